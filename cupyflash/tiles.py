"""How a problem is cut into tiles, and which kernels compute it.

A ``TileConfig`` holds every choice that does not change the result: the tuner searches them, YAML files keep them, and
they reach a kernel as ``-D`` macros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Family = Literal["wgmma", "mma", "simt", "v1", "standard"]
Task = Literal["forward", "backward", "backward_dkv", "backward_dq"]

TASKS: tuple[Task, ...] = ("forward", "backward", "backward_dkv", "backward_dq")

# The families of each algorithm that can be asked for: "v2" is one algorithm on two kinds of instructions.
ALGORITHMS: dict[str, tuple[Family, ...]] = {
    "auto": get_args(Family),
    "standard": ("standard",),
    "v1": ("v1",),
    "v2": ("mma", "simt"),
    "v3": ("wgmma",),
}
ALGORITHM_OF: dict[Family, str] = {
    family: algorithm for algorithm, families in ALGORITHMS.items() if algorithm != "auto" for family in families
}


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One way to compute one task.

    Attributes:
        family: "wgmma" (FlashAttention-3 on Hopper's tensor cores, sm_90), "mma" (FlashAttention-2 on tensor cores by
            mma.sync, sm_75 and up), "simt" (the same on plain multiply-adds, every GPU), "v1" (the first of them, on
            tensor cores by mma.sync) or "standard" (S and P in memory; no tiles of ours: see ``STANDARD``).
        Br: query rows per tile.
        Bc: keys per tile.
        warps: per block; "wgmma": four per consumer warpgroup, which has 64 query rows (in the backward, 64 keys; above
            head dim 128, one role for the 64 keys of the block), and four of the producer.
        stages: streamed tiles in flight (1: fetched between uses; 2: fetched under the computation before).
        blocks_per_sm: blocks that shall fit one SM; the compiler limits registers to that.
        score_warps_q: backward only, warps over the queries of S^T and dP^T; the others split their keys.
        grad_warps_d: backward only, warps over the head dims of dK and dV; the others split their keys.
        dq_warps_d: backward only, warps over the head dims of dQ; the others split its queries.
        dq_first: backward only, dQ is computed before dK and dV, so that its reductions drain under their products;
            "wgmma": above head dim 128, the warpgroup of dQ is the block's first.
        stale_maximum: "wgmma" forward only, row maxima are taken in the first and in masked tiles of keys only; what
            then overflows is computed again.
        turns: "wgmma" forward only, the consumers take turns at the tensor cores; in the backward they always do.
        dynamic: "wgmma" forward only, a block that is free takes the next tile; else every block has its tiles from the
            start.
        cluster: "wgmma" forward only, blocks that share the keys and values that they load, 1 or 2.
        halves: "wgmma" forward only, of a row's first tile of keys only half is computed where no more is seen.
        rounded_queries: "wgmma" backward up to head dim 128 only, queries of a tile whose dS comes from the rounded P:
            fewer registers, less precision.
        rounded_weights: "wgmma" backward above head dim 128 only, the same for all of them: less shared memory.
        values_in_registers: "wgmma" backward up to head dim 128 only, a consumer reads its values once.
        first_stores: "wgmma" backward up to head dim 128 only, what comes first to a sum of dQ is stored, and others
            wait for that; else sums are cleared before. Deterministic sums always do.
        folded_rows: "wgmma" backward up to head dim 128 only, the tensor cores subtract LSE and delta, in a step more
            of the products for S and dP; else, and always with a cap or a scale that is not positive (or beyond 2^-10
            to 2^10), every lane loads both for its columns.

    Shared memory and registers follow from it by ``resources.shared_bytes`` and ``resources.registers``.
    """

    family: Family
    Br: int
    Bc: int
    warps: int
    stages: int = 1
    blocks_per_sm: int = 1
    score_warps_q: int = 1
    grad_warps_d: int = 1
    dq_warps_d: int = 1
    dq_first: bool = False
    stale_maximum: bool = True
    turns: bool = True
    dynamic: bool = True
    cluster: int = 1
    halves: bool = False
    rounded_queries: int = 0
    rounded_weights: bool = False
    values_in_registers: bool = False
    first_stores: bool = True
    folded_rows: bool = False

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps


STANDARD = TileConfig("standard", 1, 1, 1)  # its numbers say nothing


def tile_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Columns that tiles hold for the head dims of q and k, and of v: what warps can share evenly, the added ones zero.

    A step of the tensor core is 16 columns. If either is above 128, two warps have to share the columns of dK and dV,
    or their float32 sums would not fit the registers: both are multiples of 32.
    """
    multiple = 16 if max(head_dim, head_dim_v) <= 128 else 32
    return -(-head_dim // multiple) * multiple, -(-head_dim_v // multiple) * multiple
