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


def cases(lengths: Sequence[int], head_dims: Sequence[int], dtype: str, tokens: int, hidden: int) -> list[Case]:
    """All lengths and head dims, with and without a causal mask; ``tokens`` of ``hidden`` elements each, or one row."""
    return [
        Case(max(1, tokens // length), length, max(1, hidden // head_dim), head_dim, causal, dtype)
        for head_dim in head_dims
        for length in lengths
        for causal in (False, True)
    ]
