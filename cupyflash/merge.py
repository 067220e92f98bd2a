"""Partial attentions over disjoint keys, merged into the attention over all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays
from .arrays import Array
from .problem import check_shape, common_dtype, dimensions


def merge_attention(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, layout: str = "bshd") -> Any:
    """The attention over two disjoint sets of keys, from the attention of the same queries over each of them.

    Exact up to rounding: with it, keys can be split over devices (ring attention), calls (chunked prefill) or splits. A
    part whose lse is -inf (no key seen) contributes nothing; where both are, out is 0 and lse -inf.

    Args:
        out_a, out_b: (B, S, H, D) partial results in ``layout``, one dtype.
        lse_a, lse_b: (B, H, S) their log-sum-exp, natural log, float32 or float64.
        layout: "bshd" or "bhsd".

    Returns:
        (out, lse) with the shapes and dtypes of out_a and lse_a, computed in float32 at least.

    Raises:
        TypeError: dtypes differ or are unsupported, or arrays are not all in one place.
        ValueError: shapes do not agree, or arrays are on different GPUs.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 8), dtype=np.float32)
        >>> first = cupyflash.attention(q, k[:, :4], v[:, :4], return_lse=True)
        >>> second = cupyflash.attention(q, k[:, 4:], v[:, 4:], return_lse=True)
        >>> out, lse = cupyflash.merge_attention(*first, *second)
        >>> np.allclose(out, cupyflash.attention(q, k, v), atol=1e-6)
        True

    References:
        Dao et al., FlashAttention, arXiv:2205.14135, section 3.1 (the decomposition of softmax over blocks).
    """
    parts = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    return arrays.through(_merge, parts, {}, layout)


def _merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, layout: str) -> Any:
    common_dtype({"out_a": out_a.dtype, "out_b": out_b.dtype})
    common_dtype({"lse_a": lse_a.dtype, "lse_b": lse_b.dtype})
    if lse_a.dtype not in (np.float32, np.float64):
        raise TypeError(f"lse_a and lse_b have dtype {lse_a.dtype}; expected float32 or float64")
    batch, seqlen, heads, _ = dimensions("out_a", out_a.shape, layout)
    check_shape("out_b", out_b, out_a.shape)
    check_shape("lse_a", lse_a, (batch, heads, seqlen))
    check_shape("lse_b", lse_b, (batch, heads, seqlen))
    xp = arrays.module_of(out_a)
    wide = np.result_type(np.float32, lse_a.dtype, np.float64 if out_a.dtype == np.float64 else np.float32).type

    where = arrays.on_gpu_of(("out_a", "lse_a", "out_b", "lse_b"), out_a, lse_a, out_b, lse_b)
    with where, np.errstate(all="ignore"):  # NaN and infinity are data here
        largest = xp.maximum(lse_a, lse_b).astype(wide)
        shift = xp.where(largest == -np.inf, wide(0), largest)  # both empty: exp(-inf - 0) is 0, not NaN
        weight_a, weight_b = xp.exp(lse_a - shift), xp.exp(lse_b - shift)
        total = weight_a + weight_b
        sees_none = total == 0
        total = xp.where(sees_none, wide(1), total)

        def share(part: Array, lse: Array, weight: Array) -> Array:
            fraction, empty = weight / total, lse == -np.inf
            if layout == "bshd":
                fraction, empty = fraction.swapaxes(1, 2), empty.swapaxes(1, 2)
            return xp.where(empty[..., None], wide(0), fraction[..., None] * part.astype(wide))

        out = share(out_a, lse_a, weight_a) + share(out_b, lse_b, weight_b)
        lse = xp.where(sees_none, wide(-np.inf), shift + xp.log(total))
        return out.astype(out_a.dtype), lse.astype(lse_a.dtype)
