"""The standard algorithm under the signatures of cpu.py and gpu.py, on NumPy or CuPy arrays."""

from __future__ import annotations

from . import standard
from .arrays import Array
from .problem import Problem


def forward(problem: Problem, q: Array, k: Array, v: Array, out: Array, lse: Array | None) -> None:
    """Writes out and lse (None: not wanted). Arrays are (B, S, H, D) views, lse is (B, H, Sq)."""
    standard.forward(problem, "bshd", q, k, v, out, lse)


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    dlse: Array | None = None,
) -> None:
    """Writes dq, dk and dv; arrays as in ``forward``, dlse (None: zero) as lse."""
    standard.backward(problem, "bshd", dout, q, k, v, out, lse, dlse, (dq, dk, dv))
