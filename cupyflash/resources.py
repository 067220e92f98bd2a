"""What a tile configuration needs of a GPU, by exact formulas, and whether the GPU has it.

The kernels check the shared-memory formulas at compile time: each declares one ``struct SharedStorage`` whose size must
equal ``CF_SHARED_BYTES``.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import resources_simt
from .problem import Problem
from .tiles import ALGORITHMS, STANDARD, Task, TileConfig, tile_head_dims

_ALIGNMENT = 128  # of a shared tile, and so of the whole storage
_USABLE_REGISTERS = 255  # per thread; the architecture's limit
_REGISTERS_PER_SM = 65536
_REGISTER_UNIT = 8  # per thread; they are allocated so many at a time
_LARGEST_SHARED_BYTES = 232_448  # of a block on sm_90
SHARED_BASE = 1024  # where a block's dynamic shared memory begins on sm_90, if it has no other; the system has the rest
_RESERVED_SHARED_BYTES = 1024  # per block, taken by the system from sm_80 on

# Of family "wgmma": panels of 64 columns, and what the consumers are told per tile.
_PANEL_COLUMNS = 64
_PANEL_ROW_BYTES = 128
_PANEL_ALIGNMENT = 1024
_TILE_BYTES = 144
_STAGE_BYTES = 16 * _PANEL_ROW_BYTES  # of a consumer's warp, through which its rows of O leave
_CLUSTER_BYTES = 48  # more in a cluster, whose units have marks for two tiles each
_LARGEST_CLUSTER = 2
_CONSUMER_REGISTERS = {2: 232, 3: 160, 4: 112}  # per thread, by the number of consumer warpgroups
_BACKWARD_CONSUMERS = 2
_WORKS, _WORK_BYTES = 2, 32  # announced ahead, kernels_cu/backward_wgmma.cu
_BACKWARD_CONSUMER_REGISTERS = 240
_PART_BYTES, _PICK_BYTES = 16, 256  # of LSE and delta as operands, kernels_cu/include/tile_rows.cuh
_CAP_REGISTERS = 24  # that tanh takes beside all scores of a tile
# The backward above head dim 128 has one tile, and warpgroups of one role each: dV, dK, dQ, and the producer.
_WIDE_TILE = 64
_WIDE_WARPS = 16
_WIDE_BUFFERS = 2  # of dS
_WIDE_REGISTERS = 192  # per thread that sums dK; one that sums dV has some more

_SIMT_SHARED_BYTES = {
    "forward": resources_simt.forward_shared_bytes,
    "backward": resources_simt.backward_dkv_shared_bytes,
    "backward_dkv": resources_simt.backward_dkv_shared_bytes,
    "backward_dq": resources_simt.backward_dq_shared_bytes,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What dispatch needs to know of a GPU.

    Attributes:
        name: as the driver gives it, for example "NVIDIA H200".
        arch: compute capability, major * 10 + minor.
        shared_bytes: most dynamic shared memory that a block may ask for (the opt-in limit).
        sm_count: number of multiprocessors.
        l2_bytes: size of the L2 cache.
    """

    name: str
    arch: int
    shared_bytes: int
    sm_count: int
    l2_bytes: int


# To plan for a GPU that is not there. Names as their drivers give them; figures from the vendor's data sheets.
KNOWN_GPUS = {
    "T4": Limits("Tesla T4", 75, 65_536, 40, 4 << 20),
    "A100": Limits("NVIDIA A100-SXM4-80GB", 80, 166_912, 108, 40 << 20),
    "A10": Limits("NVIDIA A10", 86, 101_376, 72, 6 << 20),
    "RTX3090": Limits("NVIDIA GeForce RTX 3090", 86, 101_376, 82, 6 << 20),
    "L4": Limits("NVIDIA L4", 89, 101_376, 58, 48 << 20),
    "L40S": Limits("NVIDIA L40S", 89, 101_376, 142, 96 << 20),
    "RTX4090": Limits("NVIDIA GeForce RTX 4090", 89, 101_376, 128, 72 << 20),
    "H100": Limits("NVIDIA H100 80GB HBM3", 90, 232_448, 132, 50 << 20),
    "H200": Limits("NVIDIA H200", 90, 232_448, 132, 60 << 20),
    "B200": Limits("NVIDIA B200", 100, 232_448, 148, 126 << 20),
    "RTX5090": Limits("NVIDIA GeForce RTX 5090", 120, 101_376, 170, 96 << 20),
}


def shared_bytes(task: Task, config: TileConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block, in bytes; the size of the kernel's ``SharedStorage``."""
    if config.family == "standard":
        return 0
    d, dv = tile_head_dims(problem.head_dim, problem.head_dim_v)
    size = problem.itemsize
    Br, Bc, stages = config.Br, config.Bc, config.stages
    if config.family == "simt":
        return _SIMT_SHARED_BYTES[task](Br, Bc, d, dv, stages, size)
    if config.family == "wgmma" and task != "forward":
        panels, panels_v = (-(-x // _PANEL_COLUMNS) for x in (d, dv))
        if is_wide(task, config):
            return _wide_backward_shared_bytes(config, panels, panels_v)
        return _wgmma_backward_shared_bytes(config, panels, panels_v, folds_rows(config, problem))
    if config.family == "wgmma":
        tiles = _wgmma_forward_tile_bytes(config, problem)
        return tiles + (_stage_bytes(config) if stages_rows(config, problem) else 0)
    if config.family == "v1":
        return _v1_shared_bytes(task, config, d, dv, size)
    if task == "forward":
        streamed = (Br * d + Bc * (d + dv)) * size
        leaving = Br * dv * size
    elif task == "backward_dq":
        streamed = (Br + stages * Bc) * (d + dv) * size
        leaving = Br * d * size
    else:
        weights = Bc * Br * (1 if _weights_in_registers(config) else 2)
        rows = 2 * stages * Br * 4  # LSE and delta
        streamed = (Bc * (d + dv) + stages * Br * (d + dv) + weights) * size + rows
        leaving = Bc * (d + dv) * size
    work = 0 if task == "backward_dq" else _ALIGNMENT  # a few indices, kept beside the tiles
    return _round_up(max(streamed, leaving), _ALIGNMENT) + work


def _v1_shared_bytes(task: Task, config: TileConfig, d: int, dv: int, size: int) -> int:
    Br, Bc, stages = config.Br, config.Bc, config.stages
    keys = Bc * (d + dv) * size  # K and V, or dK and dV on their way out
    if task == "forward":
        return _round_up(keys + stages * Br * max(d, dv) * size, _ALIGNMENT)  # Q, or O on its way out
    rows = 2 * stages * Br * 4  # LSE and delta
    flags = _ALIGNMENT
    return _round_up(keys + (stages * Br * (d + dv) + 2 * Bc * Br) * size + rows, _ALIGNMENT) + flags


def stages_rows(config: TileConfig, problem: Problem) -> bool:
    """Whether O of the forward of "wgmma" leaves through shared memory: wherever that has room beside the tiles.

    Not above head dim 128 without a mask, where it took 1% longer on an H200, and not in clusters, where nobody has run
    it.
    """
    if config.cluster > 1 or (max(problem.head_dim, problem.head_dim_v) > 128 and not problem.is_masked):
        return False
    return _wgmma_forward_tile_bytes(config, problem) + _stage_bytes(config) <= _LARGEST_SHARED_BYTES


def _stage_bytes(config: TileConfig) -> int:
    return 4 * _consumers(config) * _STAGE_BYTES


def _wgmma_forward_tile_bytes(config: TileConfig, problem: Problem) -> int:
    consumers = _consumers(config)
    panels, panels_v = (-(-x // _PANEL_COLUMNS) for x in tile_head_dims(problem.head_dim, problem.head_dim_v))
    tiles = _PANEL_ROW_BYTES * (64 * consumers * panels + config.stages * config.Bc * (panels + panels_v))
    told = _TILE_BYTES + _CLUSTER_BYTES * (config.cluster - 1)
    return _round_up(tiles + 8 * (2 * consumers + 4 * config.stages) + told, _PANEL_ALIGNMENT)


def folds_rows(config: TileConfig, problem: Problem) -> bool:
    """Whether the tensor cores subtract LSE and delta where the tiles ask for it.

    What they compute must be the score. And float16 has no parts of LSE / scale below 2^-24: with a scale up to 2^10
    exponents are off by less than 2^-13; with a small one nearly all tiles would be rare.
    """
    return config.folded_rows and 2**-10 <= problem.scale <= 2**10 and not problem.softcap


def _wgmma_backward_shared_bytes(config: TileConfig, panels: int, panels_v: int, folded: bool) -> int:
    Br, Bc, stages = config.Br, config.Bc, config.stages
    tiles = _PANEL_ROW_BYTES * (Bc + stages * Br) * (panels + panels_v)  # K, V, Q and dO
    weights = 2 * _PANEL_ROW_BYTES * Br * (Bc // _PANEL_COLUMNS)  # dS
    sums = 4 * Br * panels * _PANEL_COLUMNS  # dQ
    rows = stages * Br * (_PART_BYTES if folded else 2 * 4) + (_PICK_BYTES if folded else 0)  # LSE and delta
    barriers = 8 * (4 + 3 * stages + 2 * _WORKS) + _WORK_BYTES * _WORKS
    flags = 2 * 4 * _BACKWARD_CONSUMERS + 4 * stages
    return _round_up(tiles + weights + sums + rows + barriers + flags, _PANEL_ALIGNMENT)


def _wide_backward_shared_bytes(config: TileConfig, panels: int, panels_v: int) -> int:
    Br, Bc, stages = config.Br, config.Bc, config.stages
    tiles = _PANEL_ROW_BYTES * (Bc + stages * Br) * (panels + panels_v)  # K, V, Q and dO
    weights = (4 + 2 * _WIDE_BUFFERS) * Br * Bc  # P as float32, dS
    rows = 2 * stages * Br * 4  # LSE and delta
    barriers = 8 * (2 + 4 * stages + 2 * 2 * _WIDE_BUFFERS)  # P has at most as many buffers as dS
    flags = 4 * _WIDE_BUFFERS + 4 * stages
    return _round_up(tiles + weights + rows + barriers + flags, _PANEL_ALIGNMENT)


def is_wide(task: Task, config: TileConfig) -> bool:
    """Whether the kernel is the one for head dims above 128, whose warpgroups have one role each."""
    return config.family == "wgmma" and task == "backward" and config.warps == _WIDE_WARPS


def kept_floats(config: TileConfig, problem: Problem) -> int:
    """float32 workspace in which family "v1" keeps O, m and l of one query tile."""
    _, dv = tile_head_dims(problem.head_dim, problem.head_dim_v)
    return config.Br * (dv + 2)


def dq_floats(config: TileConfig, problem: Problem) -> int:
    """float32 workspace in which the backward sums the dQ of one query tile."""
    d, _ = tile_head_dims(problem.head_dim, problem.head_dim_v)
    if config.family == "wgmma":
        return config.Br * _round_up(d, _PANEL_COLUMNS)
    return config.Br * d


def part_floats(config: TileConfig, problem: Problem) -> int:
    """float32 workspace for a part of the dK and dV of one key tile, see shares.py."""
    return config.Bc * sum(tile_head_dims(problem.head_dim, problem.head_dim_v))


def registers(task: Task, config: TileConfig, problem: Problem) -> int:
    """32-bit registers per thread that live accumulators and fragments take at the kernel's peak; a lower bound."""
    d, dv = tile_head_dims(problem.head_dim, problem.head_dim_v)
    if config.family == "simt":
        return 0
    if is_wide(task, config):
        return max(d, dv) // 2 + config.Br * 3 // 4  # of dK or dV, and S or dP in both forms
    if config.family == "wgmma" and task != "forward":
        score = config.Br + config.values_in_registers * dv // 4  # S, dP and V
        if problem.softcap:
            score += _CAP_REGISTERS
        score += (config.Br - (0 if problem.softcap else config.rounded_queries)) // 4  # P in both forms
        return d // 2 + dv // 2 + score
    if config.family == "wgmma":
        return dv // 2 + config.Bc // 2 + config.Bc // 4
    per_thread = 32 * config.warps
    score = config.Br * config.Bc // per_thread
    if task == "forward":
        return config.Br * dv // per_thread + score
    if task == "backward_dq":
        return config.Br * d // per_thread + 2 * score
    sums = config.Bc * (d + dv) // per_thread
    return sums + max(2 * score, config.Br * d // per_thread)


def available_registers(task: Task, config: TileConfig) -> int:
    """32-bit registers that a thread can have; a consumer of family "wgmma" has some of the producer's."""
    if is_wide(task, config):
        return _WIDE_REGISTERS
    if config.family == "wgmma" and task != "forward":
        return _BACKWARD_CONSUMER_REGISTERS
    if config.family == "wgmma":
        return _CONSUMER_REGISTERS[_consumers(config)]
    return min(_USABLE_REGISTERS, _REGISTERS_PER_SM // (config.threads * config.blocks_per_sm))


def resident_blocks(task: Task, config: TileConfig, problem: Problem, limits: Limits) -> int:
    """Blocks that run on an SM at a time, if the compiler takes all the registers that it may."""
    allowed = _REGISTERS_PER_SM // (config.threads * config.blocks_per_sm)
    per_thread = min(_round_up(_USABLE_REGISTERS, _REGISTER_UNIT), allowed // _REGISTER_UNIT * _REGISTER_UNIT)
    by_registers = _REGISTERS_PER_SM // (config.threads * per_thread)
    per_sm = limits.shared_bytes + _RESERVED_SHARED_BYTES
    by_shared = per_sm // (shared_bytes(task, config, problem) + _RESERVED_SHARED_BYTES)
    return max(1, min(by_registers, by_shared))


def why_illegal(task: Task, config: TileConfig, problem: Problem, limits: Limits) -> str | None:
    """The reason why a configuration cannot run a task on a GPU, or None if it can."""
    if config.family not in ALGORITHMS[problem.algorithm]:
        return f"algorithm {problem.algorithm!r} is asked for"
    if config.family == "standard":
        return _why_not_standard(task, config)
    reason = _why_not_family(task, config, problem, limits)
    if reason:
        return reason
    if config.threads > 1024:
        return f"{config.warps} warps are {config.threads} threads; a block has at most 1024"
    need = shared_bytes(task, config, problem)
    if need > limits.shared_bytes:
        return f"needs {need} bytes of shared memory per block; {limits.name} has {limits.shared_bytes}"
    per_sm = limits.shared_bytes + _RESERVED_SHARED_BYTES
    if (need + _RESERVED_SHARED_BYTES) * config.blocks_per_sm > per_sm:
        return f"{config.blocks_per_sm} blocks need {need} bytes of shared memory each; an SM has {per_sm}"
    available = available_registers(task, config)
    if (used := registers(task, config, problem)) > available:
        return f"needs {used} registers per thread for its accumulators; {available} are available"
    return None


def _why_not_family(task: Task, config: TileConfig, problem: Problem, limits: Limits) -> str | None:
    if config.family == "wgmma":
        return _why_not_wgmma(task, config, problem, limits)
    if config.family == "v1":
        return _why_not_v1(task, config, problem, limits)
    if task == "backward" and problem.deterministic:
        return "dQ is added to its sum in any order; a deterministic backward has a kernel for dK and dV and one for dQ"
    if config.family == "mma":
        tile_dims = tile_head_dims(problem.head_dim, problem.head_dim_v)
        return _why_not_mma(problem, limits) or _why_uneven(task, config, *tile_dims)
    if task == "backward" and problem.dtype != "float32":
        return f"dQ is summed in place, in float32; the gradients are {problem.dtype}"
    tile_dims = tile_head_dims(problem.head_dim, problem.head_dim_v)
    return resources_simt.why_uneven(task, config.Br, config.Bc, config.warps, *tile_dims, config.dq_warps_d)


def _why_not_standard(task: Task, config: TileConfig) -> str | None:
    if task not in ("forward", "backward"):
        return f"the standard algorithm has no {task} alone: one backward computes all gradients"
    if config != STANDARD:
        return "the standard algorithm has no tiles: Br, Bc and warps are 1, and nothing else is given"
    return None


def _why_not_v1(task: Task, config: TileConfig, problem: Problem, limits: Limits) -> str | None:
    if task not in ("forward", "backward"):
        return f"no v1 kernel for {task} alone: dQ, dK and dV have one kernel"
    if config.stages > 2:
        return f"stages is {config.stages}; tiles of queries are fetched between uses (1) or one ahead (2)"
    if problem.is_exact:
        return 'no v1 kernel for exact float32; precision="tf32" allows TF32'
    tile_dims = tile_head_dims(problem.head_dim, problem.head_dim_v)
    return _why_not_mma(problem, limits) or _why_uneven(task, config, *tile_dims)


def _why_not_mma(problem: Problem, limits: Limits) -> str | None:
    if limits.arch < 75:
        return f"tensor-core kernels need sm_75; {limits.name} is sm_{limits.arch}"
    if problem.dtype == "bfloat16" and limits.arch < 80:
        return f"bfloat16 on tensor cores needs sm_80; {limits.name} is sm_{limits.arch} (use float16)"
    if problem.dtype == "float32" and limits.arch < 80:
        return f"TF32 needs sm_80; {limits.name} is sm_{limits.arch}"
    return None


def _why_not_wgmma(task: Task, config: TileConfig, problem: Problem, limits: Limits) -> str | None:
    if limits.arch != 90:
        return f"wgmma needs sm_90; {limits.name} is sm_{limits.arch}"
    if problem.itemsize != 2:
        return f"wgmma kernels compute float16 and bfloat16, not {problem.dtype}"
    if task != "forward":
        return _why_not_wgmma_backward(task, config, problem)
    if config.warps % 4 or _consumers(config) not in _CONSUMER_REGISTERS:
        return f"{config.warps} warps; a producer and two to four consumer warpgroups are 12, 16 or 20"
    if config.Br != 64 * _consumers(config):
        return f"Br is {config.Br}; each of {_consumers(config)} consumer warpgroups has 64 rows"
    if config.Bc % 16 or not 16 <= config.Bc <= 256:
        return f"Bc is {config.Bc}; a product has a multiple of 16 keys, at most 256"
    if config.halves and config.Bc % 32:
        return f"Bc is {config.Bc} and halves is set; half a tile of keys has a multiple of 16"
    if config.halves and not _leaves_room_for_halves(problem):
        return (
            "halves is set; only bfloat16 with a positive scale, no cap, no lower bound and head dims up to 128 leaves "
            "registers for it"
        )
    if not 1 <= config.cluster <= _LARGEST_CLUSTER:
        return f"cluster is {config.cluster}; 1 or {_LARGEST_CLUSTER} blocks share what they load"
    if config.cluster > limits.sm_count:
        return f"clusters of {config.cluster} blocks need as many multiprocessors; {limits.name} has {limits.sm_count}"
    return None


def _leaves_room_for_halves(problem: Problem) -> bool:
    """Else ptxas, of NVRTC 13.0 or 13.5, has products wait for one another for want of registers (C7511)."""
    plain = problem.scale > 0 and not problem.softcap and problem.band.first is None
    return plain and problem.dtype == "bfloat16" and max(problem.head_dim, problem.head_dim_v) <= 128


def _why_not_wgmma_backward(task: Task, config: TileConfig, problem: Problem) -> str | None:
    if task != "backward":
        return f"no wgmma kernel for {task} alone: dQ, dK and dV have one kernel"
    if max(problem.head_dim, problem.head_dim_v) > 128:
        return _why_not_wide(config, problem)
    if config.warps != 4 * (_BACKWARD_CONSUMERS + 1) or config.Bc != 64 * _BACKWARD_CONSUMERS:
        return f"{config.warps} warps and Bc {config.Bc}; two consumer warpgroups of 64 keys and a producer are 12, 128"
    multiple = 16 if problem.head_dim > _PANEL_COLUMNS else 32  # the consumers share head dims of dQ, or queries
    if config.stages < 2:
        return "stages is 1; the scores of a tile are computed before the one before is released, which takes 2"
    if config.rounded_weights:
        return "rounded_weights is of the kernel for head dims above 128; up to there it is rounded_queries"
    if config.rounded_queries % 8 or not 0 <= config.rounded_queries <= config.Br:
        return f"rounded_queries is {config.rounded_queries}; it must be a multiple of 8 up to Br, which is {config.Br}"
    if config.Br % multiple or not multiple <= config.Br <= 128:
        return f"Br is {config.Br}; it must be a multiple of {multiple} up to 128"
    return None


def _why_not_wide(config: TileConfig, problem: Problem) -> str | None:
    if config.warps != _WIDE_WARPS or config.Br != _WIDE_TILE or config.Bc != _WIDE_TILE:
        return (
            f"{config.warps} warps, Br {config.Br} and Bc {config.Bc}; warpgroups with one role each, for head dims "
            f"above 128, are {_WIDE_WARPS}, {_WIDE_TILE}, {_WIDE_TILE}"
        )
    if config.stages < 2:
        return "stages is 1; the scores of a tile are computed beside the gradients of the one before, which takes 2"
    if config.values_in_registers or config.rounded_queries or config.folded_rows:
        return "values_in_registers, rounded_queries and folded_rows are of the kernel for head dims up to 128"
    if problem.deterministic:
        return "above head dim 128 dQ is added to its sum in any order; a deterministic backward is computed by mma"
    return None


def _consumers(config: TileConfig) -> int:
    """Warpgroups that compute; one more loads."""
    return config.warps // 4 - 1


def _why_uneven(task: Task, config: TileConfig, d: int, dv: int) -> str | None:
    """Warps own whole 16-row tiles and pairs of 8-column tiles of every product."""
    Br, Bc, warps = config.Br, config.Bc, config.warps
    if task in ("forward", "backward_dq"):
        splits = [("Br", Br, 16 * warps), ("Bc", Bc, 16)]
    else:
        for name in ("score_warps_q", "grad_warps_d", "dq_warps_d"):
            if warps % getattr(config, name):
                return f"{name}={getattr(config, name)} does not divide {warps} warps"
        splits = [
            ("Br", Br, 16 * config.score_warps_q),
            ("Bc", Bc, 16 * warps // config.score_warps_q),
            ("Bc", Bc, 16 * warps // config.grad_warps_d),
            ("head_dim", d, 16 * config.grad_warps_d),
            ("head_dim_v", dv, 16 * config.grad_warps_d),
            ("Br", Br, 16 * warps // config.dq_warps_d),
            ("head_dim", d, 16 * config.dq_warps_d),
        ]
    for name, size, unit in splits:
        if size % unit:
            return f"{name} is {size} in tiles; the warps split it in units of {unit}"
    return None


def _weights_in_registers(config: TileConfig) -> bool:
    return config.score_warps_q == 1 and config.grad_warps_d == 1


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
