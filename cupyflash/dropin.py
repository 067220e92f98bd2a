"""Functions with the signatures and meanings of FlashAttention-2, torch and JAX, so that a changed import is enough.

Options that are not built raise NotImplementedError by name; none is ignored. Rows that see no key give 0 throughout.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

from . import api, arrays
from .arrays import Array
from .problem import finite, flag, window_bounds


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The ``flash_attn_func`` of FlashAttention-2, on NumPy, CuPy and other arrays.

    Args:
        q: (B, Sq, H, D) queries.
        k, v: (B, Sk, Hk, D) keys and values, H a multiple of Hk.
        dropout_p: must be 0.
        softmax_scale: multiplies the scores; 1/sqrt(D) by default.
        causal: bottom-right aligned, query i sees the keys j <= i + Sk - Sq.
        window_size: (left, right), inclusive around the same diagonal; -1 is unbounded.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: must be None.
        deterministic: gradients of ``attention_vjp`` only; the forward pass always is.
        return_attn_probs: return (out, softmax_lse, None), softmax_lse being (B, H, Sq) float32. The third place is
            that of the dropout mask, which exists with dropout only (FlashAttention returns an empty tensor there).

    Returns:
        out, (B, Sq, H, D).

    Raises:
        TypeError, ValueError, ImportError: as ``cupyflash.attention`` does.
        NotImplementedError: dropout_p or alibi_slopes is given.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
        >>> cupyflash.flash_attn_func(q, k, v, causal=True, window_size=(2, 0)).shape
        (1, 5, 2, 8)

    References:
        Dao, FlashAttention-2, arXiv:2307.08691.
    """
    _refuse(alibi_slopes=alibi_slopes)
    options = _flash_options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    return arrays.through(_flash_attn, {"q": q, "k": k, "v": v}, {}, options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The ``flash_attn_qkvpacked_func`` of FlashAttention-2: q, k and v in one array, read in place.

    Args:
        qkv: (B, S, 3, H, D).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            ``flash_attn_func``.

    Returns:
        out, (B, S, H, D), or (out, softmax_lse, None).

    Raises:
        TypeError, ValueError, ImportError, NotImplementedError: as ``flash_attn_func`` does.

    Example:
        >>> import numpy as np, cupyflash
        >>> qkv = np.random.default_rng(0).standard_normal((1, 5, 3, 2, 8), dtype=np.float32)
        >>> cupyflash.flash_attn_qkvpacked_func(qkv, causal=True).shape
        (1, 5, 2, 8)

    References:
        Dao, FlashAttention-2, arXiv:2307.08691.
    """
    _refuse(alibi_slopes=alibi_slopes)
    options = _flash_options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)

    def unpacked(qkv: Array) -> Any:
        if qkv.ndim != 5 or qkv.shape[2] != 3:
            raise ValueError(f"qkv has shape {qkv.shape}; expected (batch, sequence, 3, heads, head_dim)")
        return _flash_attn(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], options, return_attn_probs)

    return arrays.through(unpacked, {"qkv": qkv}, {})


def flash_attn_kvpacked_func(
    q: Array,
    kv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The ``flash_attn_kvpacked_func`` of FlashAttention-2: k and v in one array, read in place.

    Args:
        q: (B, Sq, H, D).
        kv: (B, Sk, 2, Hk, D), H a multiple of Hk.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            ``flash_attn_func``.

    Returns:
        out, (B, Sq, H, D), or (out, softmax_lse, None).

    Raises:
        TypeError, ValueError, ImportError, NotImplementedError: as ``flash_attn_func`` does.

    Example:
        >>> import numpy as np, cupyflash
        >>> rng = np.random.default_rng(0)
        >>> q, kv = rng.standard_normal((1, 5, 4, 8)), rng.standard_normal((1, 7, 2, 2, 8))
        >>> cupyflash.flash_attn_kvpacked_func(q, kv).shape
        (1, 5, 4, 8)

    References:
        Dao, FlashAttention-2, arXiv:2307.08691.
    """
    _refuse(alibi_slopes=alibi_slopes)
    options = _flash_options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)

    def unpacked(q: Array, kv: Array) -> Any:
        if kv.ndim != 5 or kv.shape[2] != 2:
            raise ValueError(f"kv has shape {kv.shape}; expected (batch, sequence, 2, heads, head_dim)")
        return _flash_attn(q, kv[:, :, 0], kv[:, :, 1], options, return_attn_probs)

    return arrays.through(unpacked, {"q": q, "kv": kv}, {})


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The ``scaled_dot_product_attention`` of torch, on NumPy, CuPy and other arrays.

    Args:
        query: (..., H, Sq, D) with any number of leading dimensions; (H, Sq, D) and (Sq, D) too.
        key: (..., Hk, Sk, D) with the same leading dimensions.
        value: (..., Hk, Sk, Dv).
        attn_mask: must be None.
        dropout_p: must be 0.
        is_causal: top-left aligned, query i sees the keys j <= i.
        scale: multiplies the scores; 1/sqrt(D) by default.
        enable_gqa: allow Hk < H, H a multiple of Hk. Otherwise the heads must be equal.

    Returns:
        (..., H, Sq, Dv).

    Raises:
        TypeError, ValueError, ImportError: as ``cupyflash.attention`` does.
        NotImplementedError: attn_mask or dropout_p is given.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8), dtype=np.float32)
        >>> cupyflash.scaled_dot_product_attention(q, k, v, is_causal=True).shape
        (2, 5, 8)

    References:
        torch.nn.functional.scaled_dot_product_attention; Dao, FlashAttention-2, arXiv:2307.08691.
    """
    _refuse(attn_mask=attn_mask)
    _refuse_dropout(dropout_p)
    causal = "top_left" if flag("is_causal", is_causal) else False
    options = api.Options(causal=causal, scale=_scale("scale", scale), layout="bhsd")
    operands = {"query": query, "key": key, "value": value}
    return arrays.through(_scaled_dot_product, operands, {}, options, enable_gqa)


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """The ``jax.nn.dot_product_attention`` of JAX, on NumPy, CuPy and other arrays.

    Args:
        query: (B, T, N, H), or (T, N, H).
        key: (B, S, K, H) or (S, K, H), N a multiple of K.
        value: as key; its last dimension may differ.
        bias, mask, query_seq_lengths, key_value_seq_lengths, implementation: must be None.
        scale: multiplies the scores; 1/sqrt(H) by default.
        is_causal: top-left aligned, query i sees the keys j <= i.
        local_window_size: (left, right) keys beside key i that query i sees, or one number for both.
        return_residual: return (out, lse), lse being (B, T, N) or (T, N), natural log, float32.

    Returns:
        out with the shape of query (its last dimension that of value).

    Raises:
        TypeError, ValueError, ImportError: as ``cupyflash.attention`` does.
        NotImplementedError: an option that must be None is given.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 2, 8), dtype=np.float32)
        >>> cupyflash.dot_product_attention(q, k, v, local_window_size=(2, 0)).shape
        (5, 2, 8)

    References:
        jax.nn.dot_product_attention; Dao, FlashAttention-2, arXiv:2307.08691.
    """
    _refuse(
        bias=bias,
        mask=mask,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        implementation=implementation,
    )
    both = isinstance(local_window_size, Integral)
    window = window_bounds((local_window_size,) * 2 if both else local_window_size, "local_window_size")
    options = api.Options(flag("is_causal", is_causal), _scale("scale", scale), window=window, alignment="top_left")
    operands = {"query": query, "key": key, "value": value}
    return arrays.through(_dot_product, operands, {}, options, return_residual)


def _flash_options(
    dropout_p: float, scale: float | None, causal: bool, window_size: Any, softcap: float, deterministic: bool
) -> api.Options:
    """FlashAttention's options, in which -1 is an unbounded side of the window, as ours, in which None is."""
    _refuse_dropout(dropout_p)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; expected (left, right), each >= 0 or -1 for no bound")
    window = window_bounds(tuple(None if bound == -1 else bound for bound in window_size), "window_size", "-1")
    return api.Options(flag("causal", causal), _scale("softmax_scale", scale), "bshd", window, softcap, deterministic)


def _scale(name: str, scale: float | None) -> float | None:
    return None if scale is None else finite(name, scale)


def _flash_attn(q: Array, k: Array, v: Array, options: api.Options, return_attn_probs: bool) -> Any:
    if not return_attn_probs:
        return api.forward(q, k, v, None, options, False)
    return (*api.forward(q, k, v, None, options, True), None)


def _scaled_dot_product(query: Array, key: Array, value: Array, options: api.Options, enable_gqa: bool) -> Any:
    shapes = [array.shape for array in (query, key, value)]
    lead = shapes[0][:-3]
    if any(len(shape) != len(shapes[0]) or len(shape) < 2 or shape[:-3] != lead for shape in shapes):
        raise ValueError(
            f"query, key and value have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}; expected (..., heads, "
            "sequence, head_dim) with equal leading dimensions"
        )
    with arrays.on_gpu_of(
        ("query", "key", "value"), query, key, value
    ):  # reshape copies where strides leave it no choice
        q, k, v = (array.reshape(math.prod(lead), *(1, 1, *array.shape)[-3:]) for array in (query, key, value))
    if k.shape[1] != q.shape[1] and not enable_gqa:
        raise ValueError(
            f"key has {k.shape[1]} heads but query has {q.shape[1]}; pass enable_gqa=True to share key/value heads"
        )
    out = api.forward(q, k, v, None, options, False)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _dot_product(query: Array, key: Array, value: Array, options: api.Options, return_residual: bool) -> Any:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim not in (3, 4):
            raise ValueError(f"{name} has shape {array.shape}; expected 4 dimensions, or 3 without the batch")
    q, k, v = (array if array.ndim == 4 else array[None] for array in (query, key, value))
    shape = (*query.shape[:-1], value.shape[-1])
    if not return_residual:
        return api.forward(q, k, v, None, options, False).reshape(shape)
    out, lse = api.forward(q, k, v, None, options, True)
    return out.reshape(shape), lse.swapaxes(1, 2).reshape(shape[:-1])


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p={dropout_p} is not supported; pass 0.0")


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported; pass None")
