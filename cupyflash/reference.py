"""Textbook attention in float64: the scores are materialised, nothing is tiled. What tests compare with.

Hidden data takes part in nothing, and what is not finite in visible data shows where the formulas put it: products are
sums over visible pairs, not sums in which hidden pairs have the factor 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .problem import Problem

Array = NDArray[Any]


def reference_forward(problem: Problem, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Attention of one problem, in float64 throughout.

    Args:
        problem: the options, and the shapes that q, k and v have.
        q: (B, Sq, H, D) queries of any dtype.
        k: (B, Sk, Hk, D) keys.
        v: (B, Sk, Hk, Dv) values.

    Returns:
        out, (B, Sq, H, Dv), and lse, (B, H, Sq), both float64. A row whose visible scores are all -inf, or that sees
        no key, has out 0 and lse -inf.

    Example:
        >>> import numpy as np
        >>> q, k, v = np.zeros((3, 1, 2, 1, 4))
        >>> out, lse = reference_forward(Problem.of(q, k, v, causal=True), q, k, v)
        >>> np.exp(lse).round()
        array([[[1., 2.]]])
    """
    with np.errstate(all="ignore"):
        visible = visible_pairs(problem)
        S, _ = scores(problem, visible, by_head(q), repeat_heads(problem, by_head(k)))
        P, lse = softmax(S)
        out = visible_product(visible, P, repeat_heads(problem, by_head(v)))
        out[np.isneginf(lse)] = 0
        return out.swapaxes(1, 2), lse


def reference_backward(
    problem: Problem, dout: Array, q: Array, k: Array, v: Array, dlse: Array | None = None
) -> tuple[Array, Array, Array]:
    """The gradients of ``reference_forward``, in float64 throughout.

    Args:
        problem: the options, and the shapes that the arrays have.
        dout: (B, Sq, H, Dv) gradient of out.
        q: (B, Sq, H, D) queries of any dtype.
        k: (B, Sk, Hk, D) keys.
        v: (B, Sk, Hk, Dv) values.
        dlse: (B, H, Sq) gradient of lse; None is zero.

    Returns:
        dq, dk and dv in float64, in the shapes of q, k and v: dk and dv are summed over the query heads of a group. A
        row that sees no key has the gradient 0 and contributes to none, whatever its dout is.
    """
    with np.errstate(all="ignore"):
        Q, K, V = by_head(q), repeat_heads(problem, by_head(k)), repeat_heads(problem, by_head(v))
        dO = by_head(dout)
        visible = visible_pairs(problem)
        S, slope = scores(problem, visible, Q, K)
        P, lse = softmax(S)
        # From here on, a row that attends to nothing sees nothing.
        visible = visible & ~np.isneginf(lse)[..., None]

        dV = visible_product(visible.swapaxes(-1, -2), P.swapaxes(-1, -2), dO)
        dP = np.where(visible, dO @ V.swapaxes(-1, -2), 0)
        D = np.where(visible, P * dP, 0).sum(axis=-1)
        if dlse is not None:
            D = D - np.asarray(dlse, np.float64)
        dS = np.where(visible, P * (dP - D[..., None]) * slope * problem.scale, 0)
        dQ = visible_product(visible, dS, K)
        dK = visible_product(visible.swapaxes(-1, -2), dS.swapaxes(-1, -2), Q)
        return dQ.swapaxes(1, 2), sum_groups(problem, dK).swapaxes(1, 2), sum_groups(problem, dV).swapaxes(1, 2)


def by_head(x: Array) -> Array:
    """(B, H, S, D) in float64."""
    return np.asarray(x).swapaxes(1, 2).astype(np.float64)


def repeat_heads(problem: Problem, x: Array) -> Array:
    """Query head h uses key/value head h // group."""
    return np.repeat(x, problem.group, axis=1)


def sum_groups(problem: Problem, x: Array) -> Array:
    """The way back of ``repeat_heads`` for gradients."""
    batch, _, rows, columns = x.shape
    return np.asarray(x.reshape(batch, problem.num_kv_heads, problem.group, rows, columns).sum(axis=2))


def visible_pairs(problem: Problem) -> Array:
    """(Sq, Sk) True where query i may see key j."""
    i, j = np.ogrid[: problem.seqlen_q, : problem.seqlen_k]
    return np.broadcast_to(problem.band.visible(i, j), (problem.seqlen_q, problem.seqlen_k))


def scores(problem: Problem, visible: Array, Q: Array, K: Array) -> tuple[Array, Array | float]:
    """mask(softcap(scale * Q K^T)), and the derivative of the soft cap at each score."""
    S = Q @ K.swapaxes(-1, -2) * problem.scale
    slope: Array | float = 1.0
    if problem.softcap:
        t = np.tanh(S / problem.softcap)
        S, slope = problem.softcap * t, 1 - t * t
    return np.where(visible, S, -np.inf), slope


def softmax(S: Array) -> tuple[Array, Array]:
    """P and LSE of each row; P is 0 and LSE is -inf where all scores are -inf."""
    m = S.max(axis=-1, initial=-np.inf)
    m_or_0 = np.where(np.isneginf(m), 0, m)
    P = np.exp(S - m_or_0[..., None])
    l = P.sum(axis=-1)
    return P / np.where(l == 0, 1, l)[..., None], m_or_0 + np.log(l)


def visible_product(visible: Array, A: Array, B: Array) -> Array:
    """A @ B, summed over the pairs that are visible."""
    if np.isfinite(B).all():
        return np.asarray(np.where(visible, A, 0) @ B)
    visible = np.broadcast_to(visible, A.shape)
    total = np.zeros((*A.shape[:-1], B.shape[-1]))
    for index in np.ndindex(*A.shape[:-1]):
        seen = visible[index]
        total[index] = A[index][seen] @ B[index[:-1]][seen]
    return total
