"""Small odd problems for the emulated device: few specialisations of the kernels, many shapes, engineered numbers.

A case runs forward and backward under several schedules (run_cases.py) and is compared with float64 under each, by the
rule of oracles.py. Tiles are small, so that short sequences span several of them. All arrays lie in buffers of NaN.
"""

from dataclasses import dataclass, field

from engineered import HIDDEN

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
    "backward hopper wide": persistent_backward(
        "bfloat16", (104, 128), 80, 2, rounded_queries=40, first_stores=False, folded_rows=True
    ),
    "backward hopper narrow": persistent_backward(
        "float16", (40, 72), 32, 3, values_in_registers=True, rounded_queries=32, folded_rows=True
    ),
    # Or queries, each consumer half of them or half of the head dims.
    "backward hopper tall": persistent_backward("bfloat16", (56, 64), 128, 2, rounded_queries=32),
    "backward hopper panels": persistent_backward("float16", (104, 72), 64, 2, folded_rows=True),
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
    "small scale": {"scale": 2**-9},
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
# Of keys that do not make a round of four blocks the queries are shared out: one work in four parts; a head whose first
# keys are in the last round; two works; three, of which two blocks have parts of two each; a head behind whole rounds,
# of one sequence and of several.
_SHARED_SHAPES = {
    "backward hopper narrow": [
        *((520, 100, 1, 1, 1), (520, 600, 1, 2, 1), (300, 700, 1, 1, 1), (520, 350, 1, 1, 1)),
        *((330, 200, 1, 6, 3), (330, 200, 5, 1, 1)),
    ],
    "backward hopper panels": [(600, 100, 2, 1, 1)],
    "backward hopper tall": [(1100, 100, 1, 1, 1)],
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
        *(Case(kind, "plain", shape) for kind, shapes in _SHARED_SHAPES.items() for shape in shapes),
        Case("backward hopper narrow", "plain", (520, 350, 1, 1, 1), layout="tight"),
        *(Case(_LARGEST, *case) for case in _LARGEST_CASES),
        Case("backward hopper", "causal", (140, 230, 2, 4, 2), layout="heads first aligned"),
        *(
            Case(kind, "causal", (140, 230, 2, 2, 1), layout="tight")
            for kind in ("backward hopper", "backward hopper roles")
        ),
        Case("backward hopper wide", "causal", (129, 33), layout="tight"),  # rows that see nothing, in rare tiles
        Case("backward hopper panels", "small scale", (140, 140), "far below"),  # LSE / scale is no float16
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
