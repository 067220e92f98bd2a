"""What is compared: problems, and the passes over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from ..problem import Problem

ALGORITHMS = ("standard", "v1", "v2", "v3")
DIRECTIONS = ("forward", "backward", "step")
TITLES = {
    "standard": "standard attention",
    "v1": "FlashAttention (V1)",
    "v2": "FlashAttention-2 (V2)",
    "v3": "FlashAttention-3 (V3)",
}
DIRECTION_TITLES = {"forward": "forward", "backward": "backward", "step": "forward and backward"}


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: as many heads and batch entries as make equal work of every length, queries as many as keys."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of q, k, v and out."""
        return self.batch, self.seqlen, self.heads, self.head_dim

    def problem(self, algorithm: str = "auto") -> Problem:
        """As ``attention`` would have it."""
        array = SimpleNamespace(shape=self.shape, dtype=self.dtype)
        return Problem.of(array, array, array, causal=self.causal, algorithm=algorithm)

    def __str__(self) -> str:
        causal = ", causal" if self.causal else ""
        return f"B={self.batch} S={self.seqlen:,} H={self.heads} D={self.head_dim}{causal}"


_TELLING_LENGTHS = (4096, 16384)  # a usual one, and one at which the score matrix is large


def most_telling_first(cases: Sequence[Case]) -> list[Case]:
    """In the order in which they are measured, so that what is missing when the time is over is what says least.

    The widest head dim up to 128 first, and of each head dim 4,096 and 16,384 queries.
    """
    head_dims = sorted({case.head_dim for case in cases}, key=lambda d: (d > 128, abs(d - 128)))
    return sorted(cases, key=lambda case: (head_dims.index(case.head_dim), case.seqlen not in _TELLING_LENGTHS))


def cases(lengths: Sequence[int], head_dims: Sequence[int], dtype: str, tokens: int, hidden: int) -> list[Case]:
    """All lengths and head dims, with and without a causal mask; ``tokens`` of ``hidden`` elements each, or one row."""
    return [
        Case(max(1, tokens // length), length, max(1, hidden // head_dim), head_dim, causal, dtype)
        for head_dim in head_dims
        for length in lengths
        for causal in (False, True)
    ]
