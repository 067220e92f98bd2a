"""Attention as the textbook has it, with the score matrix in memory: the baseline for speed and memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays
from .api import Options, Window
from .arrays import Array


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
    xp = arrays.module_of(q)
    wide = np.float64 if problem.dtype == "float64" else np.float32
    with arrays.on_gpu_of(("q", "k", "v"), q, k, v):
        if options.layout == "bshd":
            q, k, v = (array.transpose(0, 2, 1, 3) for array in (q, k, v))
        grouped = (problem.batch, problem.num_kv_heads, problem.group, problem.seqlen_q, problem.head_dim)
        Q, K, V = q.astype(wide).reshape(grouped), k.astype(wide)[:, :, None], v.astype(wide)[:, :, None]

        S = Q @ K.swapaxes(-1, -2) * wide(problem.scale)
        if problem.softcap:
            S = xp.tanh(S / wide(problem.softcap)) * wide(problem.softcap)
        visible = problem.band.visible(xp.arange(problem.seqlen_q)[:, None], xp.arange(problem.seqlen_k))
        S = xp.where(visible, S, wide(-np.inf))

        m = S.max(axis=-1, keepdims=True) if problem.scores else xp.zeros((*grouped[:4], 1), wide)
        m = xp.where(m == -np.inf, wide(0), m)
        P = xp.exp(S - m)
        l = P.sum(axis=-1, keepdims=True)
        sees_none = l == 0
        l = xp.where(sees_none, wide(1), l)

        O = (P @ V / l).astype(q.dtype)
        O = O.reshape(problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v)
        out = xp.ascontiguousarray(O.transpose(0, 2, 1, 3)) if options.layout == "bshd" else O
        if not return_lse:
            return out
        return out, xp.where(sees_none, wide(-np.inf), m + xp.log(l)).reshape(O.shape[:3])
