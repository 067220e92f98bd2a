"""Standard attention on NumPy arrays: BLAS in float32 (float64 for float64), the score matrix in memory.

Arrays are (B, S, H, D) views, as in cpu.py.
"""

from __future__ import annotations

import numpy as np

from .arrays import Array
from .problem import Problem


@np.errstate(all="ignore")  # NaN and infinity are data here
def forward(problem: Problem, q: Array, k: Array, v: Array, out: Array, lse: Array) -> Array:
    """Writes out and lse. S is held in memory, and P in its place: returns that."""
    Q, K, V = _grouped(problem, q), _by_key_head(problem, k), _by_key_head(problem, v)
    S = _scores(problem, Q, K)
    m = S.max(axis=-1, keepdims=True)
    m[m == -np.inf] = 0
    S -= m
    P = np.exp(S, out=S)
    l = P.sum(axis=-1, keepdims=True)
    sees_none = l == 0
    P /= np.where(sees_none, 1, l)
    _store(out, P @ V)
    lse[...] = (m + np.log(l)).reshape(lse.shape)
    return P


@np.errstate(all="ignore")
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
    dlse: Array | None,
    kept: Array | None = None,
) -> None:
    """Writes dq, dk and dv. P is computed from S and lse, in its place; dP is held beside it, and dS in its place.

    Args:
        kept: what ``forward`` returned, of a problem without a soft cap: then S is not computed again.
    """
    Q, K, V = _grouped(problem, q), _by_key_head(problem, k), _by_key_head(problem, v)
    dO, O = _grouped(problem, dout), _grouped(problem, out)
    rows = (*Q.shape[:4], 1)
    delta = (dO * O).sum(axis=-1, keepdims=True)
    if dlse is not None:
        delta -= dlse.reshape(rows)
    slope = None
    if kept is None:
        P, slope = _weights(problem, Q, K, lse.reshape(rows))
    else:
        P = kept
    dV = P.swapaxes(-1, -2) @ dO
    dS = dO @ V.swapaxes(-1, -2)
    dS -= delta
    dS *= P
    np.copyto(dS, 0, where=P == 0)
    if slope is not None:
        dS *= slope
    dS *= dS.dtype.type(problem.scale)
    _store(dq, dS @ K)
    _store(dk, (dS.swapaxes(-1, -2) @ Q).sum(axis=2, keepdims=True))
    _store(dv, dV.sum(axis=2, keepdims=True))


def _weights(problem: Problem, Q: Array, K: Array, lse: Array) -> tuple[Array, Array | None]:
    """P from S and lse, and the slope of the soft cap at each score."""
    S = _scores(problem, Q, K)
    slope = None
    if problem.softcap:
        slope = 1 - np.square(np.where(np.isneginf(S), 0, S) / S.dtype.type(problem.softcap))
    attends = ~np.isneginf(lse)
    S -= np.where(attends, lse, 0)
    P = np.exp(S, out=S)
    np.copyto(P, 0, where=~attends)
    return P, slope


def _scores(problem: Problem, Q: Array, K: Array) -> Array:
    """mask(softcap(scale Q K^T)), (B, Hk, G, Sq, Sk)."""
    S = Q @ K.swapaxes(-1, -2)
    S *= S.dtype.type(problem.scale)
    if problem.softcap:
        softcap = S.dtype.type(problem.softcap)
        S /= softcap
        np.tanh(S, out=S)
        S *= softcap
    if problem.is_masked:
        i, j = np.ogrid[: problem.seqlen_q, : problem.seqlen_k]
        np.copyto(S, -np.inf, where=~problem.band.visible(i, j))
    return S


def _grouped(problem: Problem, x: Array) -> Array:
    """(B, Hk, G, S, D) of a query-side array, in the type that is computed in."""
    batch, rows, _, columns = x.shape
    wide = x.transpose(0, 2, 1, 3).astype(problem.wide_dtype)
    return wide.reshape(batch, problem.num_kv_heads, problem.group, rows, columns)


def _by_key_head(problem: Problem, x: Array) -> Array:
    """(B, Hk, 1, S, D) of a key-side array, likewise."""
    return x.transpose(0, 2, 1, 3).astype(problem.wide_dtype)[:, :, None]


def _store(target: Array, result: Array) -> None:
    """A (B, Hk, G or 1, S, D) result into a (B, S, H, D) array."""
    batch, rows, heads, columns = target.shape
    target[...] = result.reshape(batch, heads, rows, columns).transpose(0, 2, 1, 3)
