"""From a problem and a GPU's limits to the kernels to launch: pure functions, no GPU needed.

The choice of tiles is looked up among the measured winners for the GPU model (``tuning.store``) and else taken from
``heuristics``; what the GPU at hand cannot run is never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from . import heuristics, resources
from .problem import Problem
from .resources import Limits
from .shares import deal
from .tiles import ALGORITHMS, Task, TileConfig, tile_head_dims
from .tuning import store

_ELEMENTS = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "float"}
_LARGEST = {"float16": "65504.0f", "bfloat16": "3.3895e38f", "float32": "3.4028e38f"}
FILES: dict[tuple[str, Task], tuple[str, str]] = {  # (family, task): (source file, name of the main kernel)
    ("wgmma", "forward"): ("forward_wgmma.cu", "forward_wgmma"),
    ("mma", "forward"): ("forward_mma.cu", "forward_mma"),
    ("wgmma", "backward"): ("backward_wgmma.cu", "backward_wgmma"),
    ("mma", "backward"): ("backward_mma.cu", "backward_mma"),
    ("mma", "backward_dkv"): ("backward_mma.cu", "backward_mma"),
    ("mma", "backward_dq"): ("backward_dq_mma.cu", "backward_dq_mma"),
    ("v1", "forward"): ("forward_v1.cu", "forward_v1"),
    ("v1", "backward"): ("backward_v1.cu", "backward_v1"),
    ("simt", "forward"): ("forward_simt.cu", "forward_simt"),
    ("simt", "backward"): ("backward_simt.cu", "backward_simt"),
    ("simt", "backward_dkv"): ("backward_simt.cu", "backward_simt"),
    ("simt", "backward_dq"): ("backward_dq_simt.cu", "backward_dq_simt"),
}
WIDE_BACKWARD = ("backward_wgmma_wide.cu", "backward_wgmma_wide")  # family "wgmma", head dims above 128

_LANES_PER_ROW = 8  # of delta, kernels_cu/include/backward_rows.cuh
_DQ_STORE_THREADS = 256  # of family "wgmma": two warpgroups share a tile of dQ
_LONGEST = 2**31 - 1024  # rows are counted in int32, rounded up to whole tiles


class UnsupportedError(ValueError):
    """No kernel can compute this problem on this GPU; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled entry point: a source file, its macros, and what a launch needs to know."""

    file: str
    name: str
    defines: tuple[tuple[str, object], ...]
    threads: int
    shared_bytes: int
    target: str = ""  # of the compiler, where the GPU's own name is not enough
    cooperative: bool = False  # its blocks wait for one another: all of them must run at once, or none


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of one pass, in order.

    Attributes:
        launches: (kernel, number of blocks); none where the standard algorithm is chosen, see standard.py.
        delta_floats: float32 workspace for delta, one per query row; 0 in the forward.
        dq_floats: float32 workspace in which dQ is summed, and behind the sums 32-bit counters and parts of dK and dV,
            if any; 0 where dQ is summed in place or has a kernel of its own.
        kept_floats: float32 workspace in which a forward keeps what it knows of the rows between two visits; 0 where
            registers do.
        section: heads whose blocks are interleaved, see ``kernels_cu/include/schedule.cuh``.
        configs: the tiles chosen per task, and where each choice comes from: "tuned: " and the file, "heuristic" or
            "given".
        dynamic: blocks take their tiles from a counter in global memory.
        whole_works, share: how the key tiles of a backward are dealt out to blocks that stay, see shares.py.
        map_rows: rows of q, k and v (backward: dout, q, k and v) that one load of the tensor memory accelerator moves;
            empty where the kernel has no use for tensor maps.
    """

    launches: tuple[tuple[Kernel, int], ...]
    delta_floats: int
    dq_floats: int
    section: int
    configs: tuple[tuple[Task, TileConfig, str], ...]
    dynamic: bool = False
    map_rows: tuple[int, ...] = ()
    kept_floats: int = 0
    whole_works: int = 0
    share: int = 0


Given = Mapping[Task, TileConfig]  # tiles that are not to be chosen


def choose(
    task: Task, problem: Problem, limits: Limits, given: Given | None = None, mappable: bool = True
) -> tuple[TileConfig, str]:
    """The tiles for a task, and where the choice comes from, as in ``Plan.configs``.

    Args:
        mappable: tensor maps can describe the inputs; family "wgmma" is considered only then.

    Raises:
        UnsupportedError: nothing fits the GPU.
    """
    if given and task in given:
        return given[task], "given"
    for found, reason in considered(task, problem, limits, mappable):
        if reason is None:
            return found.config, found.origin
    listed = heuristics.listed(task, problem, limits)
    untuned = [config for config in listed if why_not(task, config, problem, limits, mappable) is None]
    if not untuned:
        asked = problem.algorithm != "auto"
        reasons = sorted(
            why_not(task, config, problem, limits, mappable) or ""
            for config in {config.family: config for config in listed}.values()
            if config.family in ALGORITHMS[problem.algorithm]
        )
        raise UnsupportedError(
            (f"algorithm is {problem.algorithm!r}, which has " if asked else "")
            + f"no {task} kernel for {problem.dtype}, head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} "
            f"on {limits.name} (sm_{limits.arch}): {'; '.join(reasons) or 'no tile fits its shared memory'}"
            + ("; 'auto' takes an algorithm that can" if asked else "")
        )
    return untuned[0], "heuristic"


def considered(
    task: Task, problem: Problem, limits: Limits, mappable: bool = True
) -> Iterator[tuple[store.Found, str | None]]:
    """The measured winners in the order in which they are looked at, each with the reason why it is not taken.

    The one that is taken, if any, has None, and is the last.
    """
    reach = math.inf  # of what is taken: behind what is not for the problem, what won farther away would be a guess
    exact = heuristics.exact_family(task, problem, limits)
    for found in store.find_all(task, problem, limits):
        reason = why_not(task, found.config, problem, limits, mappable)
        rounds_otherwise = heuristics.rounds_otherwise(found.config.family, exact)
        if reason is None and rounds_otherwise:
            reason = f"exact float32 of this size is computed by family {exact}"
        elif reason is None and found.distance > reach and not found.is_general:
            reason = "what won nearer to the problem is not for it"
        yield found, reason
        if reason is None:
            return
        if not found.is_general:
            reach = min(reach, store.REACH if rounds_otherwise else found.distance)


def why_not(task: Task, config: TileConfig, problem: Problem, limits: Limits, mappable: bool = True) -> str | None:
    """The reason why a configuration is not for these arrays on this GPU, or None; ``mappable`` as in ``choose``."""
    reason = resources.why_illegal(task, config, problem, limits)
    if reason is None and config.family == "wgmma" and not mappable:
        return "tensor maps need strides above 0, and addresses, strides and rows that are multiples of 16 bytes"
    return reason


def passed_over(
    task: Task, config: TileConfig, problem: Problem, limits: Limits, mappable: bool = True
) -> dict[str, str]:
    """The families that would come before the chosen configuration's, and why they do not; as in ``choose``."""
    reasons: dict[str, str] = {}
    for other in heuristics.listed(task, problem, limits):
        if other.family == config.family:
            break
        reason = why_not(task, other, problem, limits, mappable)
        if reason is None:
            reasons[other.family] = "was slower where it was measured"
        else:
            reasons.setdefault(other.family, reason)
    splits = problem.is_exact and limits.arch in heuristics.SPLIT_ARCHS
    if splits and config.family == "simt" and heuristics.has_few_rows(problem, limits):
        reasons["mma"] = "for so few rows three TF32 products in place of one are slower"
    return reasons


def plan_forward(
    problem: Problem, vector_bytes: int, limits: Limits, given: Given | None = None, mappable: bool = True
) -> Plan:
    """The one launch of a forward pass.

    Args:
        vector_bytes: alignment of all pointers, strides and rows, at most 16.
        mappable: no stride of q, k and v is negative, or 0 along more than one row, head or batch entry: tensor maps
            know no such thing.
    """
    config, origin = choose("forward", problem, limits, given, mappable and vector_bytes == 16)
    if config.family == "standard":
        return _without_launches("forward", config, origin)
    kernel = _kernel("forward", config, problem, vector_bytes, limits)
    if config.family == "v1":
        return Plan(
            launches=((kernel, _blocks(problem.batch * problem.num_heads, 1, 1)),),
            delta_floats=0,
            dq_floats=0,
            section=1,
            configs=(("forward", config, origin),),
            kept_floats=_query_blocks(problem, config) * resources.kept_floats(config, problem),
        )
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.itemsize
    blocks = _query_blocks(problem, config)
    wgmma = config.family == "wgmma"
    grid = _persistent_blocks(problem, config, limits) if wgmma else blocks
    return Plan(
        launches=((kernel, grid),),
        delta_floats=0,
        dq_floats=0,
        section=min(
            _section(problem, problem.seqlen_k * row_bytes // problem.group, problem.num_heads, limits),
            _section_of_rounds(problem, config, limits) if wgmma else 2**31,
        ),
        configs=(("forward", config, origin),),
        dynamic=wgmma and config.dynamic,
        map_rows=(64, *2 * (config.Bc // config.cluster,)) if wgmma else (),
    )


def _persistent_blocks(problem: Problem, config: TileConfig, limits: Limits) -> int:
    """Blocks that take one query tile after the other: as many as can run at once, in whole clusters.

    A cluster takes as many tiles at a time as it has blocks, kernels_cu/include/tile_units.cuh.
    """
    cluster = config.cluster
    if problem.group % cluster:
        units = _blocks(problem.batch * problem.num_heads, problem.seqlen_q, config.Br * cluster)
    else:
        units = _query_blocks(problem, config) // cluster
    return cluster * min(units, limits.sm_count // cluster)


def backward_tasks(
    problem: Problem, limits: Limits, given: Given | None = None, mappable: bool = True
) -> tuple[Task, ...]:
    """One task where one kernel computes all gradients; two where none could sum dQ, or not deterministically."""
    apart: tuple[Task, ...] = ("backward_dkv", "backward_dq")
    if given and "backward" in given and (not problem.deterministic or _sums_in_order(given["backward"])):
        return ("backward",)
    if "mma" not in ALGORITHMS[problem.algorithm]:  # only v2 has kernels for parts of the gradients
        return ("backward",)
    if given and not given.keys().isdisjoint({"backward", *apart}):
        return apart
    found = heuristics.candidates("backward", problem, limits)
    return ("backward",) if any(mappable or config.family != "wgmma" for config in found) else apart


def _without_launches(task: Task, config: TileConfig, origin: str) -> Plan:
    return Plan((), 0, 0, 1, ((task, config, origin),))


def _sums_in_order(config: TileConfig) -> bool:
    """Whether the one kernel of a backward can add to dQ in the order of the keys."""
    if config.family == "wgmma":
        return not resources.is_wide("backward", config)
    return config.family in ("v1", "standard")


def plan_backward(
    problem: Problem, vector_bytes: int, limits: Limits, given: Given | None = None, mappable: bool = True
) -> Plan:
    """The launches of a backward pass: per-row preparation, the main kernel, and dQ.

    Args:
        vector_bytes, mappable: as in ``plan_forward``, of all arrays and of dout, q, k and v.
    """
    task, *apart = backward_tasks(problem, limits, given, mappable and vector_bytes == 16)
    summed = not apart
    config, origin = choose(task, problem, limits, given, mappable and vector_bytes == 16)
    if config.family == "standard":
        return _without_launches(task, config, origin)
    main = _kernel(task, config, problem, vector_bytes, limits)
    wgmma = config.family == "wgmma"
    rows_threads = _LANES_PER_ROW * config.Br if wgmma else config.threads
    rows = replace(main, name="backward_rows", threads=rows_threads, shared_bytes=0)
    query_blocks = _query_blocks(problem, config)
    key_blocks = _blocks(problem.batch * problem.num_kv_heads, problem.seqlen_k, config.Bc)
    delta_floats = problem.batch * problem.num_heads * problem.seqlen_q
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.itemsize + (4 * problem.head_dim if summed else 0)
    section = _section(problem, problem.seqlen_q * row_bytes * problem.group, problem.num_kv_heads, limits)

    if config.family == "v1":
        heads = _blocks(problem.batch * problem.num_kv_heads, 1, 1)
        kept = query_blocks * resources.dq_floats(config, problem)
        return Plan(((rows, query_blocks), (main, heads)), delta_floats, kept, 1, ((task, config, origin),))
    if summed and config.family == "simt":
        return Plan(((rows, query_blocks), (main, key_blocks)), delta_floats, 0, section, ((task, config, origin),))
    if summed:
        wide = resources.is_wide(task, config)
        last = replace(
            main,
            name="backward_dq_store",
            threads=_DQ_STORE_THREADS if wgmma else config.threads,
            shared_bytes=0 if wide else resources.dq_floats(config, problem) * problem.itemsize,
        )
        sums = query_blocks * resources.dq_floats(config, problem)
        origins = ((task, config, origin),)
        maps = (config.Br, config.Br, config.Bc, config.Bc) if wgmma else ()
        if not wgmma or wide:
            launches = (rows, query_blocks), (main, key_blocks), (last, query_blocks)
            return Plan(launches, delta_floats, sums, section, origins, map_rows=maps)
        # See Party in kernels_cu/include/dq_halves.cuh.
        waits = (problem.deterministic or config.first_stores) and not problem.is_masked
        dealt = deal(problem, config, limits)
        grid = max(min(dealt.whole, limits.sm_count), dealt.sharers)
        floats = sums + query_blocks + 1  # counters
        if dealt.sharers:  # see kernels_cu/include/shares.cuh
            floats = -(-(floats + 2 * dealt.sharers) // 4) * 4 + dealt.sharers * resources.part_floats(config, problem)
        return Plan(
            ((rows, query_blocks), (replace(main, cooperative=waits), grid), (last, query_blocks)),
            delta_floats,
            floats,
            section,
            origins,
            map_rows=maps,
            whole_works=dealt.whole,
            share=dealt.share,
        )
    dq_config, dq_origin = choose("backward_dq", problem, limits, given)
    dq = _kernel("backward_dq", dq_config, problem, vector_bytes, limits)
    return Plan(
        ((rows, query_blocks), (main, key_blocks), (dq, _query_blocks(problem, dq_config))),
        delta_floats,
        0,
        section,
        ((task, config, origin), ("backward_dq", dq_config, dq_origin)),
    )


def _kernel(task: Task, config: TileConfig, problem: Problem, vector_bytes: int, limits: Limits) -> Kernel:
    file, name = WIDE_BACKWARD if resources.is_wide(task, config) else FILES[config.family, task]
    shared_bytes = resources.shared_bytes(task, config, problem)
    defines = defines_of(task, config, problem, vector_bytes, shared_bytes, limits.arch)
    target = f"sm_{limits.arch}a" if config.family == "wgmma" else ""
    return Kernel(file, name, tuple(defines.items()), config.threads, shared_bytes, target)


def defines_of(
    task: Task, config: TileConfig, problem: Problem, vector_bytes: int, shared_bytes: int, arch: int
) -> dict[str, object]:
    """The macros that specialise a kernel; ``kernels_cu/include/traits.cuh`` and its neighbours give them names."""
    tile_d, tile_dv = tile_head_dims(problem.head_dim, problem.head_dim_v)
    defines: dict[str, object] = {
        "CF_ARCH": arch,
        "CF_ELEMENT": _ELEMENTS[problem.dtype],
        "CF_ELEMENT_MAX": _LARGEST[problem.dtype],
        "CF_HEAD_DIM": problem.head_dim,
        "CF_HEAD_DIM_V": problem.head_dim_v,
        "CF_TILE_D": tile_d,
        "CF_TILE_DV": tile_dv,
        "CF_BR": config.Br,
        "CF_BC": config.Bc,
        "CF_WARPS": config.warps,
        "CF_STAGES": config.stages,
        "CF_BLOCKS_PER_SM": config.blocks_per_sm,
        "CF_VECTOR_BYTES": vector_bytes,
        "CF_SHARED_BYTES": shared_bytes,
        "CF_BAND_FIRST": int(problem.band.first is not None),
        "CF_BAND_LAST": int(problem.band.last is not None),
        "CF_SCORE": 2 if problem.softcap else (0 if problem.scale > 0 else 1),
    }
    if config.family in ("mma", "v1"):
        defines["CF_SPLIT"] = int(problem.is_exact)
    if config.family == "wgmma":
        defines |= {
            "CF_SHARED_BASE": resources.SHARED_BASE,
            "CF_STALE_MAXIMUM": int(config.stale_maximum),
            "CF_TURNS": int(config.turns),
        }
    if config.family == "wgmma" and task == "forward":
        defines |= {
            "CF_CLUSTER": config.cluster,
            "CF_HALVES": int(config.halves),
            "CF_STAGED_ROWS": int(resources.stages_rows(config, problem)),
        }
    if task in ("backward", "backward_dkv"):
        defines |= {
            "CF_SUM_DQ": int(task == "backward"),
            "CF_WARPS_SCORE_Q": config.score_warps_q,
            "CF_WARPS_GRAD_D": config.grad_warps_d,
            "CF_WARPS_DQ_D": config.dq_warps_d,
            "CF_DQ_FIRST": int(config.dq_first),
        }
    if config.family == "wgmma" and task == "backward":
        defines |= {
            "CF_ROUNDED_P": int(config.rounded_weights),
            "CF_ROUNDED_QUERIES": config.rounded_queries,
            "CF_REGISTER_V": int(config.values_in_registers),
            "CF_FIRST_STORES": int(config.first_stores),
            "CF_FOLDED_ROWS": int(resources.folds_rows(config, problem)),
            "CF_DETERMINISTIC": int(problem.deterministic),
        }
    return defines


def _section(problem: Problem, bytes_per_head: int, heads: int, limits: Limits) -> int:
    """Heads whose blocks are interleaved, longest first: an equal part of all, that streams from half of the L2 cache.

    Without a mask all blocks are equally long; then one head follows the other, for the sake of the cache.
    """
    if not problem.is_masked:
        return 1
    heads *= problem.batch
    sections = -(-heads * bytes_per_head // (limits.l2_bytes // 2))
    return -(-heads // max(1, min(sections, heads)))


def _section_of_rounds(problem: Problem, config: TileConfig, limits: Limits) -> int:
    """Heads whose tiles give each of the persistent blocks a long one and a short one.

    More would let the blocks fetch new keys all at once, in the long tiles, and none in the short ones that follow.
    """
    tiles_per_head = -(-problem.seqlen_q // config.Br)
    return -(-2 * limits.sm_count // tiles_per_head)


def _query_blocks(problem: Problem, config: TileConfig) -> int:
    return _blocks(problem.batch * problem.num_heads, problem.seqlen_q, config.Br)


def _blocks(heads: int, length: int, tile: int) -> int:
    if length > _LONGEST:
        raise UnsupportedError(f"a sequence of {length} rows; the GPU computes up to {_LONGEST}")
    blocks = heads * -(-length // tile)
    if blocks >= 2**31:
        raise UnsupportedError(f"{heads} heads of {length} rows are {blocks} blocks; a launch has fewer than 2^31")
    return blocks
