"""Attention as the textbook has it, with the score matrix in memory: the baseline for speed and memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays
from .api import Options, Window
from .arrays import Array
from .problem import Problem


def standard_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    window: Window = None,
    softcap: float | None = 0.0,
    return_lse: bool = False,
) -> Any:
    """The textbook computation in three steps, S = q k^T, P = softmax(S), out = P v, with S and P held in memory.

    The baseline that ``attention`` is measured against: the same arguments, the same results up to rounding, and the
    whole score matrix in float32 (float64 for float64 arrays), in which all three steps compute. Unlike ``attention``
    it lets a NaN or Inf in a masked row of v reach the result.

    Args:
        q, k, v, causal, scale, layout, window, softcap, return_lse: as in ``attention``, any head dimension.

    Returns:
        out, or (out, lse) with ``return_lse=True``, as ``attention`` does.

    Raises:
        TypeError, ValueError, ImportError: as ``attention`` does.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
        >>> np.allclose(cupyflash.standard_attention(q, k, v), cupyflash.attention(q, k, v), atol=1e-6)
        True

    References:
        Vaswani et al., Attention Is All You Need, arXiv:1706.03762, equation 1.
    """
    options = Options(causal, scale, layout, window, softcap)
    return arrays.through(_standard, {"q": q, "k": k, "v": v}, {}, options, return_lse)


def _standard(q: Array, k: Array, v: Array, options: Options, return_lse: bool) -> Any:
    problem = options.problem(q, k, v)
    with arrays.on_gpu_of(("q", "k", "v"), q, k, v):
        out, lse = forward(problem, options.layout, q, k, v)
    return (out, lse) if return_lse else out


def forward(
    problem: Problem, layout: str, q: Array, k: Array, v: Array, out: Array | None = None
) -> tuple[Array, Array]:
    """(out, lse) of a checked problem, on the GPU that is current; writes to ``out`` if it is given."""
    steps = _Steps(problem, layout, q, k, v)
    xp, wide, S = steps.xp, steps.wide, steps.S
    m = S.max(axis=-1, keepdims=True) if problem.scores else xp.zeros((*S.shape[:4], 1), wide)
    m = xp.where(m == -np.inf, wide(0), m)
    P = xp.exp(S - m)
    l = P.sum(axis=-1, keepdims=True)
    sees_none = l == 0
    l = xp.where(sees_none, wide(1), l)
    result = steps.result(P @ steps.V / l, q.dtype)
    lse = xp.where(sees_none, wide(-np.inf), m + xp.log(l)).reshape(steps.rows)
    if out is None:
        return result, lse
    out[...] = result
    return out, lse


def backward(
    problem: Problem,
    layout: str,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None = None,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of a checked problem, on the GPU that is current."""
    steps = _Steps(problem, layout, q, k, v)
    xp, wide, S = steps.xp, steps.wide, steps.S
    dO, O = steps.heads(dout), steps.heads(out)
    rows = lse.reshape(S.shape[:4])[..., None]
    sees = ~xp.isneginf(rows)
    P = xp.where(sees & ~xp.isneginf(S), xp.exp(S - xp.where(sees, rows, wide(0))), wide(0))
    dO = xp.where(sees, dO, wide(0))
    D = (dO * O).sum(axis=-1, keepdims=True)
    if dlse is not None:
        D = D - dlse.reshape(rows.shape)
    dS = xp.where(P > 0, P * (dO @ steps.V.swapaxes(-1, -2) - D) * steps.slope, wide(0)) * wide(problem.scale)
    dK, dV = ((x.swapaxes(-1, -2) @ y).sum(axis=2, keepdims=True) for x, y in ((dS, steps.Q), (P, dO)))
    return steps.result(dS @ steps.K, q.dtype), steps.result(dK, k.dtype), steps.result(dV, v.dtype)


class _Steps:
    """What both passes share: operands as (B, Hk, group, S, D) and the scores, -inf where they are hidden."""

    def __init__(self, problem: Problem, layout: str, q: Array, k: Array, v: Array) -> None:
        self.problem, self.layout = problem, layout
        self.xp = xp = arrays.module_of(q)
        self.wide = wide = np.float64 if problem.dtype == "float64" else np.float32
        self.rows = (problem.batch, problem.num_heads, problem.seqlen_q)
        self.Q, self.K, self.V = self.heads(q), self.heads(k), self.heads(v)
        S = self.Q @ self.K.swapaxes(-1, -2) * wide(problem.scale)
        self.slope: Array = wide(1)
        if problem.softcap:
            capped = xp.tanh(S / wide(problem.softcap))
            S, self.slope = capped * wide(problem.softcap), 1 - capped * capped
        visible = problem.band.visible(xp.arange(problem.seqlen_q)[:, None], xp.arange(problem.seqlen_k))
        self.S = xp.where(visible, S, wide(-np.inf))

    def heads(self, array: Array) -> Array:
        """An array as (B, Hk, its heads per key/value head, S, D), in the precision of all steps."""
        array = array.transpose(0, 2, 1, 3) if self.layout == "bshd" else array
        batch, heads, length, columns = array.shape
        kv_heads = self.problem.num_kv_heads
        return array.astype(self.wide).reshape(batch, kv_heads, heads // kv_heads if kv_heads else 1, length, columns)

    def result(self, array: Array, dtype: Any) -> Array:
        """What ``heads`` made, in the caller's layout and dtype."""
        with np.errstate(over="ignore", invalid="ignore"):  # what float16 cannot hold becomes infinite
            array = array.astype(dtype).reshape(array.shape[0], array.shape[1] * array.shape[2], *array.shape[3:])
        return self.xp.ascontiguousarray(array.transpose(0, 2, 1, 3)) if self.layout == "bshd" else array
