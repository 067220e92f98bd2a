"""Attention written out in float64, and how far from it each dtype may be."""

import math

import numpy as np

TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}


def randn(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def textbook(q, k, v, visible=None, scale=None, softcap=0.0):
    """(out, lse) of (B, S, H, D) arrays in float64; a row that sees nothing is 0 and -inf."""
    q, k, v = (np.asarray(array, np.float64).transpose(0, 2, 1, 3) for array in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = q @ k.swapaxes(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores) * (True if visible is None else visible)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total == 0, 0, weights @ v / total)
        return out.transpose(0, 2, 1, 3), np.log(total[..., 0])


def bottom_right(seqlen_q, seqlen_k):
    return np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q, dtype=bool)


def close(result, expected, dtype):
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
