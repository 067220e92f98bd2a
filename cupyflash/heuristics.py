"""Tile configurations where nothing has been measured: a short list per task and head dim, best first.

Each list starts with what is fastest on GPUs with much shared memory and ends with what fits every GPU of the family;
``candidates`` leaves out what the GPU at hand cannot run. Reasons: a warp that owns 32 rows reads every K or V fragment
once for two products, so shared memory is half as busy as with 16; beyond head dim 128 the float32 sums of 32 rows do
not fit the registers.
"""

from __future__ import annotations

from . import resources_simt
from .problem import Problem
from .resources import Limits, why_illegal
from .tiles import STANDARD, Task, TileConfig, tile_head_dims

_Table = tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]

# Forward on Hopper: (Br, Bc, warps, stages).
_WGMMA = (
    (64, ((192, 128, 16, 2),)),
    (128, ((192, 80, 16, 3),)),
    (192, ((128, 96, 12, 2),)),
    (256, ((128, 64, 12, 2),)),
)
# Tables of (largest tile head dim, configurations), smallest first. Forward: (Br, Bc, warps).
_FORWARD = (
    (64, ((128, 128, 4), (128, 96, 4), (128, 64, 4), (64, 64, 4), (64, 32, 4))),
    (128, ((128, 64, 4), (128, 48, 4), (64, 64, 4), (64, 32, 4), (32, 32, 2))),
    (256, ((64, 64, 4), (64, 48, 4), (64, 32, 4), (32, 32, 2), (16, 32, 1), (16, 16, 1))),
)
# With a mask or a cap a tile's scores live longer, beside the mask's limits: smaller score tiles per warp do not spill.
_FORWARD_SHAPED = (
    (64, ((128, 112, 4), (128, 96, 4), (128, 64, 4), (64, 64, 4), (64, 32, 4))),
    (128, ((64, 128, 4), (64, 64, 4), (64, 32, 4), (32, 32, 2))),
    _FORWARD[2],
)
# TF32 rounds its operands on the way in, and sm_75 copies through registers: both have fewer left for the tiles.
_FORWARD_TIGHT = (
    (64, ((128, 64, 4), (64, 64, 4), (64, 32, 4))),
    (128, ((64, 48, 4), (64, 32, 4), (32, 32, 2))),
    (256, ((64, 48, 4), (64, 32, 4), (32, 32, 2), (16, 32, 1), (16, 16, 1))),
)
# Exact float32 splits its operands, and sums apart from the rest: few keys at a time.
_FORWARD_SPLIT = (
    (64, ((128, 32, 4), (64, 32, 4), (32, 32, 2))),
    (128, ((64, 32, 4), (32, 32, 2), (16, 16, 1))),
    (256, ((128, 16, 8), (64, 16, 4), (32, 16, 2), (16, 16, 1))),
)
# (Br, Bc, warps, stages, rounded_queries)
_WGMMA_BACKWARD = (
    (64, ((128, 128, 12, 2, 32), (64, 128, 12, 2, 0))),
    (128, ((64, 128, 12, 2, 0), (48, 128, 12, 2, 0))),
    (256, ((64, 64, 16, 2, 0),)),
)
# Backward: (Br, Bc, warps, stages, score_warps_q, grad_warps_d, dq_warps_d).
_BACKWARD = (
    (64, ((32, 128, 4, 2, 1, 1, 2), (64, 128, 8, 2, 1, 1, 1), (64, 64, 4, 2, 1, 1, 1), (32, 64, 4, 1, 1, 1, 2))),
    (96, ((64, 64, 8, 2, 2, 2, 2), (32, 64, 4, 2, 1, 1, 2), (64, 64, 4, 2, 1, 1, 1), (32, 64, 4, 1, 1, 1, 2))),
    (
        128,
        (
            (64, 128, 8, 2, 2, 2, 4),
            (64, 64, 8, 2, 2, 2, 2),
            (64, 64, 4, 2, 1, 1, 1),
            (32, 64, 4, 2, 1, 1, 2),
            (32, 64, 4, 1, 1, 1, 2),
            (64, 64, 4, 1, 1, 1, 1),
            (32, 32, 2, 1, 1, 1, 1),
            (16, 32, 2, 1, 1, 1, 2),
        ),
    ),
    (
        256,
        (
            (64, 64, 8, 2, 4, 4, 4),
            (64, 64, 8, 2, 2, 2, 2),
            (64, 64, 8, 1, 4, 4, 4),
            (64, 64, 8, 1, 2, 2, 2),
            (32, 32, 4, 1, 2, 4, 4),
            (32, 32, 4, 1, 2, 2, 2),
            (32, 64, 4, 1, 1, 1, 2),
        ),
    ),
)
# dK and dV alone, for deterministic gradients: without the dQ product the large tile at 128 spills on sm_100.
_BACKWARD_DKV = (*_BACKWARD[:2], (128, ((64, 64, 4, 2, 2, 2, 2), *_BACKWARD[2][1])), _BACKWARD[3])
_BACKWARD_TIGHT = (
    (
        64,
        (
            (64, 128, 8, 2, 1, 1, 2),
            (32, 128, 8, 2, 1, 1, 4),
            (32, 64, 4, 1, 1, 1, 2),
            (64, 64, 4, 1, 1, 1, 1),
            (32, 32, 2, 1, 1, 1, 1),
        ),
    ),
    (
        128,
        (
            (32, 128, 8, 2, 2, 2, 4),
            (64, 64, 8, 1, 2, 2, 2),
            (32, 64, 8, 1, 2, 2, 4),
            (16, 32, 2, 1, 1, 1, 2),
            (32, 32, 2, 1, 1, 1, 1),
        ),
    ),
    (256, ((32, 32, 4, 1, 2, 4, 2), (32, 32, 4, 1, 2, 2, 2), (16, 32, 2, 1, 1, 2, 2))),
)
_BACKWARD_SPLIT = (
    (64, ((32, 128, 8, 2, 1, 1, 4), (32, 64, 4, 1, 1, 1, 2), (32, 32, 2, 1, 1, 1, 1))),
    (128, ((64, 64, 8, 1, 2, 2, 2), (32, 64, 8, 1, 2, 2, 4))),
    (160, ((64, 64, 8, 1, 2, 2, 2),)),
    (256, ((64, 32, 8, 1, 4, 4, 2),)),
)
# (Br, Bc, warps, stages)
_BACKWARD_DQ = (
    (128, ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 2, 1), (16, 16, 1, 1))),
    (256, ((128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 2, 1), (16, 32, 1, 1), (16, 16, 1, 1))),
)
_BACKWARD_DQ_SPLIT = (
    (128, ((64, 32, 4, 1), (32, 32, 2, 1))),
    (256, ()),  # its sums alone are half of the registers
)
_BACKWARD_DQ_TIGHT = (
    _BACKWARD_DQ[0],
    (256, ((128, 32, 8, 2), (64, 32, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1))),
)


# The first FlashAttention: its traffic goes with the number of key tiles, so these are as large as fits. A GPU has few
# blocks, one per head: each has as many warps as one SM has work for. Forward: (Br, Bc, warps, stages).
_V1 = (
    (64, ((128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 1), (32, 32, 2, 1))),
    (128, ((128, 128, 8, 2), (128, 128, 8, 1), (64, 64, 4, 2), (64, 64, 4, 1), (32, 32, 2, 1))),
    (256, ((128, 64, 8, 2), (128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 2, 1), (16, 16, 1, 1))),
)
_V1_TIGHT = (*_V1[:2], (256, _V1[2][1][3:]))  # float32 takes more registers on its way to TF32
# Backward: (Br, Bc, warps, stages, score_warps_q, grad_warps_d, dq_warps_d).
_V1_BACKWARD = (
    (64, ((64, 128, 8, 2, 2, 2, 2), (64, 64, 4, 2, 1, 1, 2), (32, 64, 4, 1, 1, 1, 2), (32, 32, 2, 1, 1, 1, 1))),
    (128, ((64, 128, 8, 2, 4, 2, 4), (64, 64, 8, 2, 2, 2, 2), (64, 64, 8, 1, 2, 2, 2), (32, 32, 2, 1, 1, 1, 1))),
    (256, ((64, 64, 8, 2, 4, 4, 4), (64, 64, 8, 1, 4, 4, 4), (32, 32, 4, 1, 2, 4, 4), (32, 32, 4, 1, 2, 2, 2))),
)
_V1_BACKWARD_TIGHT = (*_V1_BACKWARD[:2], (256, ((64, 32, 8, 1, 4, 4, 4), *_V1_BACKWARD[2][1][2:])))


def candidates(task: Task, problem: Problem, limits: Limits) -> list[TileConfig]:
    """The configurations that can run the task on the GPU, best first; empty if the GPU is too old."""
    return [config for config in listed(task, problem, limits) if why_illegal(task, config, problem, limits) is None]


def listed(task: Task, problem: Problem, limits: Limits) -> list[TileConfig]:
    """All configurations that are considered for the task, legal on the GPU or not.

    The standard algorithm and the first FlashAttention are none that a rule takes: they are asked for, or measured.
    """
    if problem.algorithm == "v1":
        return _v1_list(task, problem)
    if problem.algorithm == "standard":
        return [STANDARD] if task in ("forward", "backward") else []
    return [*_wgmma_list(task, problem), *_mma_list(task, problem, limits), *_simt_list(task, problem, limits)]


def rivals(task: Task, problem: Problem, limits: Limits) -> list[TileConfig]:
    """What no rule takes but a measurement may: the first FlashAttention, for short sequences."""
    if problem.algorithm != "auto" or problem.is_exact:
        return []
    return [config for config in _v1_list(task, problem) if why_illegal(task, config, problem, limits) is None][:1]


SPLIT_ARCHS = (80, 90)


def split_pays(problem: Problem, limits: Limits) -> bool:
    """Whether exact float32 is computed by three TF32 products on tensor cores in place of float32 ones without.

    By data sheets TF32 is 7 or 8 times as fast as float32 on these GPUs, on most others at most twice. On 10.0 the
    tiles spill registers, and above head dim 128 on 8.0, whose shared memory has no room for the backward's either.
    """
    if limits.arch not in SPLIT_ARCHS or has_few_rows(problem, limits):
        return False
    return limits.arch != 80 or max(tile_head_dims(problem.head_dim, problem.head_dim_v)) <= 128


def has_few_rows(problem: Problem, limits: Limits) -> bool:
    """Whether less than one multiprocessor in four has 64 queries: plain multiply-adds have smaller tiles.

    On an H200 both directions then take 0.73 to 0.88 of the time of split products; where half of them have 64
    queries, 1.07 of it. Queries count in the backward, too, whose blocks own keys: both passes have to agree.
    """
    tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // 64)
    return 4 * tiles < limits.sm_count


def exact_family(task: Task, problem: Problem, limits: Limits) -> str | None:
    """The one family that computes a task in exact float32, whatever won; None if none can, or for other dtypes.

    Forward and backward have to round scores alike, so that the probabilities which the backward computes from LSE sum
    to 1. They do but for head dims of which one of them has no split tiles here.
    """
    found = candidates(task, problem, limits) if problem.is_exact else []
    return found[0].family if found else None


def rounds_otherwise(family: str, exact: str | None) -> bool:
    """Whether a family computes exact float32, but not as the one does that has to; ``exact`` as in exact_family."""
    return {family, exact} == {"mma", "simt"}


def _wgmma_list(task: Task, problem: Problem) -> list[TileConfig]:
    head_dim = max(tile_head_dims(problem.head_dim, problem.head_dim_v))
    if task == "forward":
        return [TileConfig("wgmma", Br, Bc, warps, stages) for Br, Bc, warps, stages in _first_fit(_WGMMA, head_dim)]
    if task == "backward":
        found = _first_fit(_WGMMA_BACKWARD, head_dim)
        folded = 64 < head_dim <= 128  # where there are fewer steps, one more is no gain
        return [
            TileConfig("wgmma", Br, Bc, warps, stages, rounded_queries=rounded, folded_rows=folded)
            for Br, Bc, warps, stages, rounded in found
        ]
    return []


def _mma_list(task: Task, problem: Problem, limits: Limits) -> list[TileConfig]:
    exact = problem.is_exact
    if exact and not split_pays(problem, limits):
        return []
    head_dim = max(tile_head_dims(problem.head_dim, problem.head_dim_v))
    table: _Table
    tight = problem.itemsize == 4 or limits.arch < 80
    if task == "forward":
        shaped = problem.is_masked or problem.softcap or problem.scale <= 0
        table = _FORWARD_SPLIT if exact else _FORWARD_TIGHT if tight else _FORWARD_SHAPED if shaped else _FORWARD
        tiles = _first_fit(table, head_dim)
        if table is _FORWARD_TIGHT and head_dim > 128 and not problem.is_masked:
            tiles = ((128, 16, 8), *tiles)  # NVRTC 13.0 spills the others where no mask interrupts the loop
        if table is _FORWARD_SPLIT and limits.arch == 80 and not problem.is_masked and head_dim <= 64:
            tiles = tiles[1:]  # NVRTC 13.5 spills the first where no mask interrupts the loop
        return [TileConfig("mma", Br, Bc, warps) for Br, Bc, warps in tiles]
    if task == "backward_dq":
        table = _BACKWARD_DQ_SPLIT if exact else _BACKWARD_DQ_TIGHT if tight else _BACKWARD_DQ
        return [TileConfig("mma", Br, Bc, warps, stages) for Br, Bc, warps, stages in _first_fit(table, head_dim)]
    table = (
        _BACKWARD_SPLIT if exact else _BACKWARD_TIGHT if tight else _BACKWARD if task == "backward" else _BACKWARD_DKV
    )
    found = _first_fit(table, head_dim)
    if problem.dtype == "float16" and not tight and head_dim <= 64:
        found = found[1:]  # dS is kept below float16's largest number, for which the first has no registers left
    if problem.dtype == "bfloat16" and limits.arch == 80 and task == "backward":
        # Nor where bfloat16 takes several instructions to round: the first up to 64, few keys per warp above 128.
        found = found[1:] if head_dim <= 64 else tuple(tiles for tiles in found if head_dim <= 128 or tiles[4] < 4)
    # On sm_80 rounding to TF32 takes instructions, and registers, that dQ first does not leave.
    dq_first = head_dim <= 64 and not (table is _BACKWARD_TIGHT and limits.arch == 80)
    if exact and problem.is_masked and (problem.band.first is not None or problem.softcap):
        dq_first = False  # nor do a window's lower bound or a cap beside the parts of split float32
    if exact and not problem.is_masked and limits.arch == 80:
        dq_first = False  # nor, there, the parts alone
    return [
        TileConfig("mma", Br, Bc, warps, stages, 1, score, grad, dq, dq_first=dq_first)
        for Br, Bc, warps, stages, score, grad, dq in found
    ]


def _v1_list(task: Task, problem: Problem) -> list[TileConfig]:
    head_dim = max(tile_head_dims(problem.head_dim, problem.head_dim_v))
    tight = problem.itemsize == 4
    if task == "forward":
        table = _V1_TIGHT if tight else _V1
        return [TileConfig("v1", Br, Bc, warps, stages) for Br, Bc, warps, stages in _first_fit(table, head_dim)]
    if task == "backward":
        found = _first_fit(_V1_BACKWARD_TIGHT if tight else _V1_BACKWARD, head_dim)
        if problem.band.first is not None and head_dim > 64:
            found = found[1:]  # a lower bound beside the upper one takes registers that the first does not have
        return [
            TileConfig("v1", Br, Bc, warps, stages, 1, score, grad, dq)
            for Br, Bc, warps, stages, score, grad, dq in found
        ]
    return []


def _simt_list(task: Task, problem: Problem, limits: Limits) -> list[TileConfig]:
    if task == "backward" and problem.dtype != "float32":  # dQ has a kernel of its own
        return []
    d, dv = tile_head_dims(problem.head_dim, problem.head_dim_v)
    try:
        tiles = resources_simt.default_tiles(task, d, dv, limits.shared_bytes)
    except ValueError:  # nothing fits; no GPU from sm_75 on is that small
        return []
    Br, _, warps, _ = tiles
    split = resources_simt.warps_over_dq_columns(Br, d, warps) if task == "backward" else 1
    return [TileConfig("simt", *tiles, dq_warps_d=split)]


def _first_fit(table: _Table, head_dim: int) -> tuple[tuple[int, ...], ...]:
    return next(configs for largest, configs in table if head_dim <= largest)
