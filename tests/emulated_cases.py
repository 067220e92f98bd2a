"""Small odd problems for the emulated device: few specialisations of the kernels, many shapes, engineered numbers.

A case runs forward and backward under several schedules and is compared with float64 under each, by the rule of
oracles.py. Tiles are small, so that short sequences span several of them. All arrays lie in buffers of NaN.
"""

import functools
import mmap
from dataclasses import dataclass, field

import numpy as np
from backends import EmulatedBackend, Guarded
from oracles import DTYPES, Answer, assert_bitwise, assert_lone_value, assert_lse_close, assert_same_strangeness

from cupyflash.problem import Problem
from cupyflash.reference import reference_forward
from cupyflash.resources import KNOWN_GPUS, Limits
from cupyflash.tiles import TASKS, TileConfig

# Which thread runs, and when an asynchronous copy lands: both extremes, and random.
SCHEDULES = (
    {"order": "forward", "copy_mode": "wait"},
    {"order": "reverse", "copy_mode": "issue"},
    {"order": "random", "copy_mode": "random", "seed": 1},
)
# For kernels whose blocks wait for one another (with one worker the first does all the work), or keep what is theirs in
# memory: several at once.
TOGETHER = (*SCHEDULES, {"order": "random", "copy_mode": "random", "seed": 2, "workers": 4})


@dataclass(frozen=True)
class Kind:
    """What kernels are specialised for, but for the mask and the score."""

    dtype: str
    head_dims: tuple[int, int]
    tiles: tuple = ()  # what is not to be chosen: TileConfig by task
    precision: str = "ieee"
    gpu: Limits = KNOWN_GPUS["H200"]
    schedules: tuple = SCHEDULES


def mma(forward, backward, backward_dkv, backward_dq):
    return (
        ("forward", TileConfig("mma", *forward)),
        ("backward", TileConfig("mma", *backward)),
        ("backward_dkv", TileConfig("mma", *backward_dkv)),
        ("backward_dq", TileConfig("mma", *backward_dq)),
    )


# (Br, Bc, warps, stages); backward and backward_dkv also blocks per SM, and how the warps split the products in what
# order.
# P and dS pass between warps; two stages.
EXCHANGED = mma((32, 32, 2), (32, 32, 2, 2, 1, 2, 1, 1), (32, 32, 2, 2, 1, 2, 1, 1), (32, 32, 2, 2))
# P and dS stay in registers, dQ first; one stage; a warp owns two 16-row tiles in the forward.
IN_REGISTERS = mma((64, 32, 2), (32, 32, 2, 1, 1, 1, 1, 2, True), (32, 32, 2, 1, 1, 1, 1, 1), (32, 16, 2, 1))
# O, on its way out, covers Q, K and some of V.
TALL = mma((64, 32, 2), (32, 32, 2, 1, 1, 1, 1, 1), (32, 32, 2, 1, 1, 1, 1, 1), (32, 32, 2, 1))
# Whole tiles have a loop body of their own.
PEELED = mma((32, 32, 2), (32, 64, 8, 2, 1, 2, 2, 4), (32, 64, 8, 2, 1, 2, 2, 4), (32, 32, 2, 2))

# Few multiprocessors, so that a block computes several tiles, and so little cache that heads are taken in sections.
TWO_SMS = Limits("a small Hopper", 90, 232_448, 2, 1 << 17)
FOUR_SMS = Limits("a small Hopper", 90, 232_448, 4, 1 << 17)


def wgmma(Br, Bc, warps, stages, **options):
    return (("forward", TileConfig("wgmma", Br, Bc, warps, stages, **options)),)


def persistent_backward(dtype, head_dims, Br, stages, **options):
    """Head dims up to 128: blocks that stay, and wait for what others have added to dQ."""
    tiles = (
        ("forward", TileConfig("mma", 32, 32, 2)),
        ("backward", TileConfig("wgmma", Br, 128, 12, stages, **options)),
    )
    return Kind(dtype, head_dims, tiles, gpu=FOUR_SMS, schedules=TOGETHER)


def wgmma_roles(stages, **options):
    """Head dims above 128: warpgroups with one role each."""
    return (
        ("forward", TileConfig("mma", 32, 32, 2)),
        ("backward", TileConfig("wgmma", 64, 64, 16, stages, **options)),
    )


def v1(forward, backward):
    return (("forward", TileConfig("v1", *forward)), ("backward", TileConfig("v1", *backward)))


# Plain multiply-adds with two stages.
STAGED = tuple((task, TileConfig("simt", 32, 32, 2, 2)) for task in TASKS)

KINDS = {
    "half": Kind("float16", (40, 24), EXCHANGED),
    "half narrow": Kind("float16", (59, 17), IN_REGISTERS),
    "half tall": Kind("float16", (16, 64), TALL),
    "bfloat": Kind("bfloat16", (64, 64), IN_REGISTERS),
    "bfloat wide": Kind("bfloat16", (192, 160), PEELED),
    "tf32": Kind("float32", (24, 40), EXCHANGED, precision="tf32"),
    "tf32 registers": Kind("float32", (20, 32), IN_REGISTERS, precision="tf32"),
    # (Br, Bc, warps, stages), in the backward also blocks per SM and how the warps split the products: by keys and head
    # dims, by queries, or by both; in the forward a warp has one or two 16-row tiles.
    "v1": Kind("float16", (40, 24), v1((32, 32, 2, 2), (32, 32, 2, 2, 1, 2, 1, 1)), schedules=TOGETHER),
    "v1 narrow": Kind("float16", (59, 17), v1((64, 32, 2, 1), (32, 32, 2, 1, 1, 1, 1, 2))),
    "v1 tall": Kind("bfloat16", (16, 64), v1((64, 16, 4, 2), (64, 32, 2, 1, 1, 2, 1, 1))),
    "v1 wide": Kind("bfloat16", (192, 160), v1((32, 48, 2, 1), (32, 64, 8, 2, 1, 2, 2, 4))),
    "v1 tf32": Kind("float32", (24, 40), v1((32, 32, 2, 2), (32, 32, 2, 2, 1, 2, 1, 1)), precision="tf32"),
    "hopper": Kind("float16", (64, 64), wgmma(128, 32, 12, 2), gpu=TWO_SMS),
    "hopper wide": Kind("bfloat16", (72, 136), wgmma(128, 16, 12, 3, dynamic=False), gpu=TWO_SMS),
    "hopper three": Kind("bfloat16", (40, 24), wgmma(192, 48, 16, 2, turns=False), gpu=TWO_SMS),
    "four consumers": Kind("bfloat16", (64, 48), wgmma(256, 32, 20, 2), gpu=TWO_SMS),
    "hopper maxima": Kind("float16", (64, 64), wgmma(128, 32, 12, 2, stale_maximum=False), gpu=TWO_SMS),
    "hopper pair": Kind(
        "bfloat16", (64, 64), wgmma(128, 32, 12, 2, cluster=2, halves=True), gpu=FOUR_SMS, schedules=TOGETHER
    ),
    "hopper pair wide": Kind("bfloat16", (72, 136), wgmma(128, 16, 12, 3, cluster=2, dynamic=False), gpu=FOUR_SMS),
    # A product of dQ has head dims as rows: of 32, 80 and 16 queries.
    "backward hopper": persistent_backward("float16", (64, 64), 64, 2),
    "backward hopper wide": persistent_backward("bfloat16", (104, 128), 80, 2, rounded_queries=40, first_stores=False),
    "backward hopper narrow": persistent_backward(
        "float16", (40, 72), 32, 3, values_in_registers=True, rounded_queries=32
    ),
    # Or queries, each consumer half of them or half of the head dims.
    "backward hopper tall": persistent_backward("bfloat16", (56, 64), 128, 2, rounded_queries=32),
    "backward hopper panels": persistent_backward("float16", (104, 72), 64, 2),
    "backward hopper roles": Kind("float16", (136, 160), wgmma_roles(2), gpu=TWO_SMS),
    "backward hopper roles largest": Kind("bfloat16", (256, 256), wgmma_roles(2), gpu=TWO_SMS),
    "backward hopper roles narrow": Kind(
        "float16", (40, 136), wgmma_roles(3, rounded_weights=True, dq_first=True), gpu=TWO_SMS
    ),
    "float": Kind("float32", (40, 24), gpu=KNOWN_GPUS["T4"]),
    "float staged": Kind("float32", (24, 40), STAGED),
    "float narrow": Kind("float32", (33, 50), gpu=KNOWN_GPUS["T4"]),
    "float wide": Kind("float32", (136, 160), gpu=KNOWN_GPUS["T4"]),
    # float32 split on tensor cores, into parts that are rounded in two ways.
    "split": Kind("float32", (40, 24), EXCHANGED),
    "split registers": Kind("float32", (31, 20), IN_REGISTERS, gpu=KNOWN_GPUS["A100"]),
    "split wide": Kind("float32", (180, 160), PEELED),
    "bfloat simt": Kind("bfloat16", (32, 48), gpu=KNOWN_GPUS["T4"]),
}
# So little L2 cache that heads are taken in sections of a few: see schedule.cuh.
SMALL_L2 = Limits("a GPU with little cache", 90, 232_448, 132, 1 << 15)

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (9, 5)},
    "left": {"window": (7, None)},
    "diagonal": {"window": (0, 0)},
    "negative scale": {"causal": True, "scale": -0.3},
    "no scale": {"scale": 0.0},
    "softcap": {"window": (20, 3), "softcap": 1.5},
    "deterministic": {"deterministic": True},
    "deterministic causal": {"deterministic": True, "causal": True},
    "deterministic window": {"deterministic": True, "window": (9, 5)},
    "deterministic diagonal": {"deterministic": True, "window": (0, 0)},
    "deterministic softcap": {"deterministic": True, "softcap": 1.5},
}


@dataclass(frozen=True)
class Case:
    kind: str
    options: str
    shape: tuple  # (Sq, Sk), or with (B, H, Hk) behind
    numbers: str = "normal"  # a key of NUMBERS
    layout: str = "bordered"  # a key of LAYOUTS
    gradients: tuple = ("dq", "dk", "dv")  # that are compared
    dlse: str = field(default="", kw_only=True)  # a key of DLSE; empty: there is none
    l2: str = field(default="", kw_only=True)

    def __str__(self):
        words = [self.kind, self.options, "x".join(map(str, self.shape)), self.l2]
        words += [x for x in (self.numbers, self.layout) if x not in ("normal", "bordered")]
        return ", ".join(filter(None, [*words, self.dlse]))


# ---- numbers


def normal(problem, q, k, v, dout):
    pass


def large(problem, q, k, v, dout):
    """Nearly all weight on one key."""
    q *= 4
    k *= 3


def falling(problem, q, k, v, dout):
    """The later the key the lower its score: the kernels start at the last tile, so the maximum rises at every step."""
    q[..., 0] = 8
    k[..., 0] = -np.arange(k.shape[1])[:, None] % 256 / 2 - 64


def falling_gently(problem, q, k, v, dout):
    """The maximum rises by a few powers of two from where the kernels start."""
    q[..., 0] = 1
    k[..., 0] = -np.arange(k.shape[1])[:, None] / 2


def rising(problem, q, k, v, dout):
    """The maximum is the first tile's; scores fall by more than 100 from there on."""
    q[..., 0] = 16
    k[..., 0] = np.arange(k.shape[1])[:, None] % 256 / 2 - 64


def far_below(problem, q, k, v, dout):
    """All scores near -300: e^300 is no float32."""
    q[..., 0], k[..., 0] = 16, -300 / 16 / problem.scale


def huge(problem, q, k, v, dout):
    """Equal scores of 10^9 and more: a rounded product m c would be off by more than float32 can raise 2 to."""
    q[...], k[...] = 2.0**15, 2.0**14 if problem.scale > 0 else -(2.0**14)


def steep(problem, q, k, v, dout):
    """Scores of 10^5 from numbers as small as may be: a fused exponent in the backward would be off by 2^-8.

    dS of a lone key is what rounding leaves of dP - delta; large numbers would raise that above what is allowed.
    """
    q[...], k[...] = 130, 112


def steep_heads(problem, q, k, v, dout):
    """Scores of up to 100, in all but every third head, that rise and fall; values near the end of bfloat16."""
    q[:, :, np.arange(q.shape[2]) % 3 != 1] *= 4
    k[:, ::2] *= 6
    if problem.dtype == "bfloat16":
        v *= 1e25


def overflow(problem, q, k, v, dout):
    """dS beyond float16 in some rows; no gradient is."""
    q /= 64
    k /= 64
    v *= 1000
    dout[:, ::3] *= 3000


def biased(problem, q, k, v, dout):
    """Positive numbers: errors of one sign add up."""
    for x in (q, k, v, dout):
        x[...] = 1 + np.abs(x) % 1


# What few see is not finite: the last key, its value, the first query, or its gradient.


def hidden_key(problem, q, k, v, dout):
    k[0, -1, :, 1] = np.nan


def hidden_value(problem, q, k, v, dout):
    v[0, -1, :, 2] = np.inf


def hidden_query(problem, q, k, v, dout):
    q[0, 0, :, 3] = np.nan


def hidden_gradient(problem, q, k, v, dout):
    dout[0, 0, :, 4] = np.nan


def capped_infinity(problem, q, k, v, dout):
    """In two queries: a cap keeps their scores, LSE and delta finite. What they do not see has finite gradients."""
    q[0, 0, :, 3], q[0, -1, :, -1] = np.inf, -np.inf


def infinite_key(problem, q, k, v, dout):
    """A key whose score is -inf: it weighs nothing where it is seen."""
    q[..., 0] = np.abs(q[..., 0]) + 0.5
    k[0, k.shape[1] // 2, :, 0] = -np.inf


def infinite_keys(problem, q, k, v, dout):
    """Rows whose scores are all -inf: they attend to nothing."""
    q[..., 0] = np.abs(q[..., 0]) + 0.5
    k[..., 0] = -np.inf


def infinite_value(problem, q, k, v, dout):
    v[0, v.shape[1] // 2, 0, 0] = np.inf


def largest(problem, q, k, v, dout):
    """float32's largest number, which rounds to infinity in TF32, in a key and a value where it meets zeros."""
    q[..., 0], k[0, 0, :, 0] = 0, np.finfo(np.float32).max
    dout *= 0.125  # so that the gradient of q is no larger
    dout[..., 1], v[0, 0, :, 1] = 0, np.finfo(np.float32).max


def largest_hidden(problem, q, k, v, dout):
    """The same in the last key, which only the last query sees, without a gradient; the others have no zeros for it."""
    k[0, -1, :, 0] = np.finfo(np.float32).max
    q[0, -1, :, 0] = 0
    dout[0, -1] = 0


def nan_in_a_few_values(problem, q, k, v, dout):
    """In the first key tile and in the last, of one head."""
    v[-1, [3, -1], 0, [1, 9]] = np.nan


NUMBERS = {
    f.__name__.replace("_", " "): f
    for f in (
        *(normal, large, falling, falling_gently, rising, far_below, huge, steep, steep_heads, overflow, biased),
        *(hidden_key, hidden_value, hidden_query, hidden_gradient, capped_infinity),
        *(infinite_key, infinite_keys, infinite_value),
        *(nan_in_a_few_values, largest, largest_hidden),
    )
}


# ---- gradients of LSE; lse is the right one


def finite_dlse(dlse, lse):
    pass


def scaled_dlse(dlse, lse):
    """As a loss scale makes it: dS beyond float16 in some rows; with numbers as in overflow no gradient is."""
    dlse[..., ::3] *= 1e6


def hidden_dlse(dlse, lse):
    """Rows that attend to nothing: their gradient is 0 whatever is said of their LSE."""
    dlse[np.isneginf(lse)] = np.nan


def nan_in_dlse(dlse, lse):
    """In the last row of the first head, and in no other."""
    dlse[0, 0, -1] = np.nan


DLSE = {f.__name__.replace("_", " "): f for f in (finite_dlse, scaled_dlse, hidden_dlse, nan_in_dlse)}


HIDDEN = [name for name in NUMBERS if name.startswith("hidden")]


# ---- layouts: (B, S, H, D) views of other buffers


def bordered(values):
    """Rows of NaN before and after, columns of NaN behind."""
    B, S, H, D = values.shape
    view = np.full((B, S + 2, H, D + 8), np.nan, values.dtype)[:, 1:-1, :, :D]
    view[...] = values
    return view


def heads_first(values):
    """As (B, H, S, D) arrays have it; an odd distance between rows."""
    B, S, H, D = values.shape
    view = np.full((B, H, S + 2, D + 1), np.nan, values.dtype)[:, :, 1:-1, :D].swapaxes(1, 2)
    view[...] = values
    return view


def heads_first_aligned(values):
    """As (B, H, S, D) arrays have it; rows of 16 bytes, for tensor maps."""
    return np.ascontiguousarray(values.swapaxes(1, 2)).swapaxes(1, 2)


def reversed_rows(values):
    return bordered(values[:, ::-1])[:, ::-1]


def broadcast(values):
    """All heads and batch entries are the first."""
    return np.broadcast_to(bordered(values[:1, :, :1]), values.shape)


def far_apart(axis, values):
    """Neighbours along the axis are more than 32 bits apart in all; memory that nobody touches costs nothing."""
    far = -(-(2**31) // (values.shape[axis] - 1) // 64) * 64 + 64
    lengths = [far * values.shape[1], far, values.shape[3], 1]
    if axis == 0:
        lengths[:2] = far, values.shape[2] * values.shape[3]
    size = 1 + sum((n - 1) * length for n, length in zip(values.shape, lengths, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = np.frombuffer(mmap.mmap(-1, size * values.itemsize, flags=flags), values.dtype)
    strides = [length * values.itemsize for length in lengths]
    view = np.lib.stride_tricks.as_strided(memory, values.shape, strides)
    view[...] = values
    return view


class FarOutput:
    """An output full of NaN of which neighbours are far apart; in place of ``Guarded``."""

    def __init__(self, axis, shape, dtype):
        self.inside = far_apart(axis, np.full(shape, np.nan, dtype))

    def checked(self):
        return np.ascontiguousarray(self.inside)


LAYOUTS = {
    "bordered": bordered,
    "tight": np.ascontiguousarray,  # AddressSanitizer knows where it ends
    "heads first": heads_first,
    "heads first aligned": heads_first_aligned,
    "reversed": reversed_rows,
    "broadcast": broadcast,
    "far batches": functools.partial(far_apart, 0),
    "far rows": functools.partial(far_apart, 1),
}
OUTPUTS = {"far batches": functools.partial(FarOutput, 0), "far rows": functools.partial(FarOutput, 1)}


# ---- the table: (kind, options): shapes; then what is engineered

_SHAPES = {
    ("half", "plain"): [(1, 1), (33, 70), (70, 33, 2, 3, 1)],
    ("half", "causal"): [(1, 37), (37, 1), (65, 65, 1, 4, 2), (95, 64), (31, 97), (64, 94), (40, 41)],
    ("half", "top left"): [(40, 70), (70, 40)],
    ("half", "window"): [(64, 64), (33, 97), (97, 33, 2, 2, 2)],
    ("half", "left"): [(40, 66), (66, 40), (55, 64)],
    ("half", "negative scale"): [(35, 67)],
    ("half", "softcap"): [(67, 67, 1, 4, 1)],
    ("half", "deterministic"): [(33, 65, 1, 4, 2)],
    ("half", "deterministic causal"): [(65, 33), (97, 97, 2, 2, 1)],
    ("half", "deterministic softcap"): [(50, 70)],
    ("half", "deterministic window"): [(96, 64), (64, 97)],
    ("half narrow", "causal"): [(5, 5), (67, 35, 2, 3, 3)],
    ("half narrow", "deterministic"): [(35, 67)],
    ("half tall", "plain"): [(70, 70)],
    ("bfloat", "plain"): [(31, 129), (129, 31)],
    ("bfloat", "causal"): [(63, 65), (130, 130, 1, 2, 1)],
    ("bfloat", "window"): [(100, 100), (33, 64)],
    ("bfloat", "no scale"): [(17, 50)],
    ("bfloat", "deterministic causal"): [(65, 65, 1, 6, 2)],
    ("bfloat wide", "causal"): [(40, 130), (70, 64)],
    ("bfloat wide", "deterministic"): [(33, 65)],
    ("tf32", "plain"): [(33, 65, 2, 2, 1)],
    ("tf32", "causal"): [(65, 65, 1, 4, 2), (40, 97)],
    ("tf32", "softcap"): [(50, 50)],
    ("tf32", "deterministic window"): [(65, 97)],
    ("tf32 registers", "causal"): [(65, 40, 1, 2, 1), (1, 66)],
    ("tf32 registers", "deterministic"): [(34, 66)],
    ("float", "plain"): [(1, 1), (65, 70, 2, 3, 1)],
    ("float", "causal"): [(1, 70), (70, 1), (130, 65, 1, 4, 2), (65, 130)],
    ("float", "window"): [(64, 96), (130, 33, 1, 2, 2)],
    ("float", "left"): [(66, 66)],
    ("float", "negative scale"): [(70, 66)],
    ("float", "deterministic causal"): [(70, 70)],
    ("float", "softcap"): [(67, 99, 1, 4, 1)],
    ("float staged", "causal"): [(65, 97, 1, 2, 1)],
    ("float staged", "deterministic"): [(66, 70, 1, 4, 2)],
    ("float narrow", "causal"): [(66, 70, 2, 2, 1)],
    ("float wide", "top left"): [(40, 36)],
    ("split", "plain"): [(1, 1), (33, 70, 2, 3, 1)],
    ("split", "causal"): [(1, 37), (37, 1), (65, 65, 1, 4, 2), (95, 64)],
    ("split", "window"): [(64, 97), (97, 33, 2, 2, 2)],
    ("split", "negative scale"): [(35, 67)],
    ("split", "softcap"): [(67, 67, 1, 4, 1)],
    ("split", "deterministic causal"): [(70, 70, 1, 4, 2)],
    ("split", "deterministic window"): [(64, 97)],
    ("split registers", "causal"): [(70, 130, 2, 2, 1)],
    ("split registers", "deterministic"): [(65, 33)],
    ("split wide", "left"): [(40, 66)],
    ("bfloat simt", "causal"): [(70, 70, 1, 6, 2)],
    ("bfloat simt", "plain"): [(65, 33)],
}

# One block has all tiles of a head: several of queries and of keys, also where a mask hides some, or all keys of some.
_V1_SHAPES = {
    ("v1", "plain"): [(1, 1), (33, 70), (70, 33, 2, 3, 1)],
    ("v1", "causal"): [(1, 37), (37, 1), (65, 65, 1, 4, 2), (95, 64), (31, 97), (64, 94), (40, 41), (130, 40, 2, 2, 1)],
    ("v1", "top left"): [(40, 70), (70, 40)],
    ("v1", "window"): [(64, 64), (33, 97), (97, 33, 2, 2, 2)],
    ("v1", "left"): [(40, 66), (66, 40), (55, 64)],
    ("v1", "negative scale"): [(35, 67)],
    ("v1", "softcap"): [(67, 67, 1, 4, 1)],
    ("v1", "deterministic causal"): [(65, 33), (97, 97, 2, 2, 1)],
    ("v1", "deterministic"): [(97, 97, 1, 4, 2)],
    ("v1", "deterministic softcap"): [(50, 70)],
    ("v1", "deterministic window"): [(96, 64), (64, 97)],
    ("v1 narrow", "causal"): [(5, 5), (67, 35, 2, 3, 3), (130, 70)],
    ("v1 narrow", "deterministic"): [(135, 67)],
    ("v1 tall", "plain"): [(70, 70)],
    ("v1 tall", "window"): [(130, 90)],
    ("v1 tall", "no scale"): [(17, 50)],
    ("v1 wide", "causal"): [(40, 130), (70, 64)],
    ("v1 tf32", "causal"): [(65, 65, 1, 4, 2), (40, 97)],
    ("v1 tf32", "deterministic window"): [(65, 97)],
}

# Forward only: more tiles than blocks, ragged, groups of heads; blocks of rows some of which see nothing, or nothing
# of the keys that are loaded first.
_HOPPER_SHAPES = {
    "plain": [(1, 1), (130, 70, 1, 5, 1), (300, 100, 2, 3, 3)],
    # In the last but one a tile of keys ends where the first row's keys end; in the last one rows see a key beyond the
    # middle of a tile.
    "causal": [(1, 100), (129, 33), (300, 300, 1, 4, 2), (300, 150, 1, 5, 1), (300, 299), (290, 275)],
    "top left": [(70, 130), (300, 100)],
    "window": [(300, 300, 1, 3, 1), (140, 400), (333, 97)],
    "left": [(300, 200, 2, 2, 1)],
    "negative scale": [(140, 200)],
    "no scale": [(40, 70)],
    "softcap": [(200, 150, 1, 4, 1)],
}
_HOPPER_NUMBERS = {
    "plain": ["large", "falling", "falling gently", "rising", "steep heads", "huge", "infinite key", "infinite value"],
    "causal": ["falling", "steep heads", "far below", "hidden key", "hidden value", "hidden query", "infinite keys"],
    "window": ["falling", "steep heads", "infinite value", "nan in a few values"],
    "diagonal": ["large", "steep"],
    "softcap": ["steep heads"],
}
V1 = [kind for kind in KINDS if kind.startswith("v1")]
HOPPER = [kind for kind in KINDS if kind.startswith("hopper")]

# Blocks own 128 or 64 keys: some that no query sees, several heads of a group, tiles in which the keys of one consumer
# are hidden, or beyond the last.
_BACKWARD_SHAPES = {
    "plain": [(1, 1), (130, 70, 2, 3, 1), (70, 300, 1, 4, 2)],
    "causal": [(1, 200), (129, 33), (260, 260, 1, 4, 2), (150, 300), (300, 150, 1, 3, 1)],
    "top left": [(70, 200), (200, 70)],
    "window": [(200, 260, 1, 2, 1), (140, 400), (333, 97)],
    "left": [(200, 150, 2, 2, 1)],
    "negative scale": [(140, 200)],
    "no scale": [(40, 70)],
    "softcap": [(130, 150, 1, 4, 1)],
}
_BACKWARD_NUMBERS = {
    "plain": ["large", "rising", "overflow", "infinite key", "infinite value"],
    "causal": ["falling", "far below", "biased", *HIDDEN, "infinite key", "nan in a few values"],
    "window": [*HIDDEN, "infinite value", "nan in a few values"],
    "diagonal": ["large", "steep"],
}
BACKWARD_HOPPER = [kind for kind in KINDS if kind.startswith("backward hopper")]
# Many keys, so that several blocks add to each sum of dQ, and several of their works to the rings of each block.
_PERSISTENT_SHAPES = {
    # In the second works are so short that one is announced while the gradients of the last but one are stored.
    "plain": [(300, 520, 1, 3, 1), (60, 650, 2, 3, 3)],
    "causal": [(200, 390, 2, 5, 5)],
    "window": [(333, 500, 1, 9, 3)],
    "deterministic": [(300, 520, 1, 3, 1)],
    "deterministic causal": [(260, 390, 1, 6, 3), (300, 150, 2, 3, 1)],
    "deterministic window": [(333, 500, 1, 9, 3)],
    "deterministic softcap": [(130, 260, 1, 3, 3)],
}
# At the largest head dim a case takes long, and sums in float32 lose as much as the answers allow: the usual, and what
# the others have no columns for.
_LARGEST = "backward hopper roles largest"
_LARGEST_CASES = (
    ("plain", (130, 70, 2, 3, 1), "normal"),
    ("causal", (260, 260, 1, 4, 2), "normal"),
    ("causal", (140, 140), "hidden key"),
    ("window", (333, 97), "normal"),
    ("window", (140, 140), "hidden query"),
    ("window", (140, 140), "hidden gradient"),
    ("softcap", (130, 150, 1, 4, 1), "normal"),
)

CASES = {
    str(case): case
    for case in (
        *(Case(*key, shape) for key, shapes in (_SHAPES | _V1_SHAPES).items() for shape in shapes),
        *(Case("v1", "plain", (33, 130), numbers) for numbers in ("large", "falling", "rising", "steep heads")),
        *(Case("v1", "causal", (40, 70), numbers) for numbers in ("far below", "biased", "overflow")),
        Case("v1", "deterministic", (70, 70), "overflow"),
        Case("v1", "plain", (35, 70), "huge", gradients=()),
        Case("v1", "plain", (33, 70), "infinite key"),  # a query beyond the last meets it as 0 x inf
        Case("v1", "deterministic diagonal", (35, 35), "steep"),
        Case("v1", "diagonal", (35, 35), "large"),
        Case("v1", "causal", (20, 20), "infinite keys", gradients=("dk", "dv")),
        *(
            Case(kind, options, (70, 70), numbers)
            for kind, options in (("v1", "causal"), ("v1", "window"), ("v1 narrow", "causal"), ("v1 tf32", "causal"))
            for numbers in (*HIDDEN, "infinite key", "infinite value", "nan in a few values")
        ),
        *(
            Case("v1", "causal", (67, 67, 2, 2, 1), layout=layout)
            for layout in ("heads first", "heads first aligned", "reversed")
        ),
        Case("v1", "plain", (40, 40, 2, 4, 4), layout="broadcast"),
        *(Case(kind, "causal", (35, 70, 2, 2, 1), layout="tight") for kind in ("v1", "v1 narrow", "v1 tf32")),
        *(Case("v1", "plain", (40, 66, 2, 2, 1), layout=layout) for layout in ("far batches", "far rows")),
        *(Case(kind, "causal", (70, 98), "large") for kind in ("half", "bfloat", "tf32", "float", "split")),
        *(Case(kind, "plain", (33, 130), "falling") for kind in ("half", "tf32", "float", "split")),
        *(
            Case(kind, "softcap", (70, 70), "capped infinity")
            for kind in (
                *("half", "half narrow", "bfloat wide", "tf32", "split", "split registers", "float"),
                *("v1", "v1 narrow", "v1 tf32", *BACKWARD_HOPPER),
            )
        ),
        # dQ of such a row is a failure on record: see test_case_29 of test_failure_cases.py.
        *(Case(kind, "causal", (20, 20), "infinite keys", gradients=("dk", "dv")) for kind in ("half", "float")),
        *(Case("split", "plain", (40, 70), numbers) for numbers in ("far below", "rising")),
        Case("split", "plain", (40, 70), "huge", gradients=()),
        Case("split registers", "causal", (80, 90), "largest hidden"),
        *(Case(kind, "diagonal", (35, 35), gradients=()) for kind in ("split", "split registers")),
        *(
            Case(kind, options, (66, 70), numbers)
            for kind, options in (("split", "causal"), ("split", "deterministic causal"), ("split registers", "plain"))
            for numbers in (*HIDDEN, "infinite key", "infinite value", "largest")
        ),
        Case("half", "plain", (40, 70), "far below"),
        Case("float", "diagonal", (35, 35), "large"),
        *(Case(kind, "plain", (33, 130), "rising") for kind in ("half", "float")),
        *(Case(kind, "causal", (40, 70), "far below") for kind in ("half", "float")),
        *(Case(kind, "plain", (35, 70), "huge", gradients=()) for kind in ("half", "float")),
        *(
            Case(kind, options, (35, 35), "steep")
            for kind in ("half", "float")
            for options in ("diagonal", "deterministic diagonal")
        ),
        *(Case("half", options, (40, 70), "overflow") for options in ("plain", "deterministic", "causal")),
        *(Case(kind, "causal", (40, 70), "biased") for kind in ("tf32", "half", "split")),
        *(
            Case(kind, options, (70, 70), numbers)
            for kind, options in (
                *(("half", "causal"), ("half", "deterministic causal")),
                *(("float", "window"), ("float", "deterministic causal")),
            )
            for numbers in (*HIDDEN, "infinite key", "infinite value")
        ),
        *(Case(kind, "causal", (67, 67, 2, 2, 1), layout="heads first") for kind in ("half", "float")),
        Case("half", "causal", (67, 67, 2, 2, 1), layout="reversed"),
        Case("half", "plain", (40, 40, 2, 4, 4), layout="broadcast"),
        *(
            Case(kind, options, (35, 70, 2, 2, 1), layout="tight")
            for kind in ("half", "half narrow", "tf32", "float", "float narrow")
            for options in ("causal", "deterministic")
        ),
        *(Case(kind, "plain", (40, 66, 2, 2, 1), layout="far batches") for kind in ("half", "float")),
        *(Case(kind, "plain", (65, 66), layout="far rows") for kind in ("half", "float")),
        *(Case(kind, "plain", (20, 24), layout="far rows") for kind in ("half", "float")),
        *(Case(kind, "causal", (40, 40, 1, 5, 5), l2="small L2") for kind in ("half", "float")),
        *(
            Case(kind, options, shape, gradients=())
            for kind in HOPPER
            for options, shapes in _HOPPER_SHAPES.items()
            for shape in shapes
        ),
        *(
            Case(kind, options, (260, 260 if options == "diagonal" else 230, 1, 5, 5), numbers, gradients=())
            for kind in HOPPER
            for options, all_numbers in _HOPPER_NUMBERS.items()
            for numbers in all_numbers
        ),
        Case("hopper", "causal", (260, 230, 2, 4, 2), layout="heads first aligned", gradients=()),
        Case("four consumers", "plain", (300, 100, 2, 3, 3), "steep heads", gradients=()),
        Case("four consumers", "causal", (520, 550, 1, 4, 2), "falling", gradients=()),
        Case("four consumers", "window", (333, 97), "nan in a few values", gradients=()),
        # An even number of heads that share no keys; of three tiles the last one has no neighbour.
        Case("hopper pair", "causal", (300, 200, 1, 4, 4), "steep heads", gradients=()),
        # Most units see no key, and so wait for nothing.
        Case("hopper pair", "causal", (500, 60, 1, 4, 2), gradients=()),
        *(
            Case(kind, options, shape)
            for kind in BACKWARD_HOPPER
            if kind != _LARGEST
            for options, shapes in _BACKWARD_SHAPES.items()
            for shape in shapes
        ),
        *(
            Case(kind, options, (140, 140), numbers)
            for kind in BACKWARD_HOPPER
            if kind != _LARGEST
            for options, all_numbers in _BACKWARD_NUMBERS.items()
            for numbers in all_numbers
        ),
        *(
            Case(kind, "causal", (140, 140), "infinite keys", gradients=("dk", "dv"))
            for kind in BACKWARD_HOPPER
            if kind != _LARGEST
        ),
        *(
            Case(kind, options, shape)
            for kind in BACKWARD_HOPPER
            if "roles" not in kind
            for options, shapes in _PERSISTENT_SHAPES.items()
            for shape in shapes
        ),
        *(Case(_LARGEST, *case) for case in _LARGEST_CASES),
        Case("backward hopper", "causal", (140, 230, 2, 4, 2), layout="heads first aligned"),
        *(
            Case(kind, "causal", (140, 230, 2, 2, 1), layout="tight")
            for kind in ("backward hopper", "backward hopper roles")
        ),
        # Gradients of LSE, in every kernel that has delta: heads that share keys, rows that see nothing, and NaN.
        *(
            Case(kind, options, shape, dlse=dlse)
            for kind, options, shape in (
                ("half", "causal", (70, 33, 2, 4, 2)),
                ("half", "softcap", (67, 67, 1, 4, 1)),
                ("half", "deterministic window", (96, 64, 2, 2, 1)),
                ("bfloat", "causal", (130, 70, 1, 2, 1)),
                ("tf32", "causal", (97, 40, 1, 2, 1)),
                ("float", "causal", (130, 65, 2, 4, 2)),
                ("float", "deterministic causal", (97, 70, 2, 2, 1)),
                ("float staged", "window", (99, 66)),
                ("v1", "causal", (70, 33, 2, 4, 2)),
                ("v1 narrow", "deterministic window", (96, 64, 2, 2, 1)),
                *((kind, "causal", (300, 150, 2, 4, 2)) for kind in BACKWARD_HOPPER if kind != _LARGEST),
            )
            for dlse in ("finite dlse", "hidden dlse", "nan in dlse")
        ),
        *(
            Case(kind, "softcap", (130, 150, 1, 4, 1), dlse="finite dlse")
            for kind in ("backward hopper", "backward hopper roles")
        ),
        *(
            Case(kind, options, (70, 130), "overflow", dlse="scaled dlse")
            for kind, options in (
                *(("half", "causal"), ("half", "deterministic"), ("v1", "causal")),
                *(("backward hopper", "causal"), ("backward hopper roles", "causal")),
            )
        ),
        *(
            Case(kind, "causal", (140, 140), "infinite keys", gradients=("dk", "dv"), dlse="hidden dlse")
            for kind in ("half", "float", "backward hopper", "backward hopper roles")
        ),
        Case("half", "causal", (35, 70, 2, 2, 1), layout="tight", dlse="finite dlse"),
    )
}


# ---- running


@functools.lru_cache(maxsize=8)
def prepared(name):
    """(problem, q, k, v, dout, dlse, the right answer) of a case."""
    case = CASES[name]
    kind = KINDS[case.kind]
    Sq, Sk, B, H, Hk = (*case.shape, 1, 2, 1)[:5] if len(case.shape) == 2 else case.shape
    D, Dv = kind.head_dims
    rng = np.random.default_rng(list(map(ord, name)))
    shapes = (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv), (B, Sq, H, Dv)
    numbers = [rng.standard_normal(shape) for shape in shapes]
    rounded = [x.astype(DTYPES[kind.dtype]) for x in numbers]
    options = OPTIONS[case.options] | {"precision": kind.precision}
    problem = Problem.of(*rounded[:3], **options)
    NUMBERS[case.numbers](problem, *numbers)
    q, k, v, dout = (LAYOUTS[case.layout](x.astype(DTYPES[kind.dtype])) for x in numbers)
    dlse = None
    if case.dlse:
        dlse = rng.standard_normal((B, H, Sq)).astype(np.float32)
        DLSE[case.dlse](dlse, reference_forward(problem, q, k, v)[1])
    answer = Answer.of(problem, q, k, v, dout if case.gradients else None, dlse)
    return problem, q, k, v, dout, dlse, answer


def run(name, schedules=(), **runtime):
    """Raises what is wrong with the kernels on a case; ``runtime`` are attributes of the HostRuntime.

    Args:
        schedules: options of ``emulated.launch``; those of the kind, if there are none.
    """
    case = CASES[name]
    kind = KINDS[case.kind]
    limits = SMALL_L2 if case.l2 else kind.gpu
    backends = (
        EmulatedBackend(dict(kind.tiles), limits_=limits, options=options, **runtime)
        for options in schedules or kind.schedules
    )
    run_on(backends, name)


def assert_split_weights_close(problem, q, k, v, out, lse, answer):
    """For values of which one is so large that its weights decide, which are too few to compare with naive errors.

    A score is off by 2^-22 of the sum of its products' sizes, and a weight by twice that: in its own score and in the
    sum of all. Exponentials, sums and the product with v take 2^-20 at most.
    """
    expected, expected_lse = answer.forward
    assert_same_strangeness(out, expected, "out")
    assert_lse_close(lse, expected_lse)
    Q, K = (np.abs(x.astype(np.float64)) for x in (q, np.repeat(k, problem.group, axis=2)))
    sizes = abs(problem.scale) * np.einsum("bihd,bjhd->bihj", Q, K).max(axis=-1, keepdims=True)
    allowed = (2.0**-21 * sizes + 2.0**-20) * reference_forward(problem, q, k, np.abs(v))[0]
    error = np.abs(out - expected)
    assert (error <= allowed).all(), f"out is off by {error.max():.3g}, allowed is {allowed.max():.3g}"


def assert_others_keep_their_bits(backend, problem, arrays, results, right):
    """What, in float64, does not depend on the numbers that are not finite, does not in the kernels either.

    Without a mask that is only said of the forward, of queries beside one with a NaN.

    Args:
        arrays: q, k, v and dout.
        results, right: out, lse, dq, dk and dv of the kernels, and those in float64.
    """
    q, k, v, dout = (np.where(np.isfinite(x), x, np.float32(0)) for x in arrays)
    out, lse = backend.forward(problem, q, k, v)
    clean = (out, lse, *backend.backward(problem, dout, q, k, v, out, lse))
    answer = Answer.of(problem, q, k, v, dout)
    for n, what in enumerate(("out", "lse", "dq", "dk", "dv")):
        same = right[n] == (*answer.forward, *answer.gradients)[n]
        assert same.any() or what not in ("out", "lse")
        ordered = what != "dq" or problem.deterministic  # else blocks add to it in any order
        if n < 2 or (problem.is_masked and ordered):
            assert_bitwise(results[n][same], clean[n][same], what)


def run_on(backends, name):
    """The case on each of these backends, which agree in every bit."""
    case = CASES[name]
    problem, q, k, v, dout, dlse, answer = prepared(name)
    first = None
    for backend in backends:
        backend.max_head_dim = backend.max_scores = None
        backend.output = OUTPUTS.get(case.layout, Guarded)
        out, lse = backend.forward(problem, q, k, v)
        if case.kind.startswith("split") and case.numbers == "largest":
            assert_split_weights_close(problem, q, k, v, out, lse, answer)
        else:
            answer.assert_forward_close(out, lse)
        if case.options.endswith("diagonal"):  # a lone key weighs exactly 1
            assert_lone_value(out, np.repeat(v, problem.group, axis=2), backend.splits(problem))
        results = [out, lse]
        if case.gradients:
            if case.numbers == "steep":  # as another kernel may have rounded it; still no weight is above 1
                lse = np.nextafter(np.nextafter(lse, np.float32(0)), np.float32(0))
            gradients = backend.backward(problem, dout, q, k, v, out, lse, dlse)
            answer.assert_gradients_close(gradients, case.gradients)
            if case.kind.startswith("split") and case.numbers in ("normal", "biased") and min(case.shape[:2]) > 1:
                # A tensor core rounds towards zero: in gradients, sums of one sign have errors that do not average.
                answer.assert_precise(out, gradients if case.numbers == "normal" else ())
            hidden = case.numbers in HIDDEN and (problem.is_masked or case.numbers == "hidden query")
            if case.kind.startswith("split") and hidden and first is None:
                right = (*answer.forward, *answer.gradients)
                assert_others_keep_their_bits(backend, problem, (q, k, v, dout), (out, lse, *gradients), right)
            if problem.deterministic:
                results += gradients
        first = first or results
        for got, expected in zip(results, first, strict=True):
            assert_bitwise(got, expected)
