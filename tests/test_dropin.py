"""The borrowed names mean what they mean in the libraries that they come from."""

import inspect
import re

import numpy as np
import pytest
from textbook import bottom_right, close, randn, textbook

import cupyflash

Q, K, V = randn(2, 5, 4, 8), randn(2, 7, 2, 8), randn(2, 7, 2, 8, seed=1)


@pytest.mark.parametrize(
    ("name", "first"),
    [("flash_attn_func", "q, k, v"), ("flash_attn_qkvpacked_func", "qkv"), ("flash_attn_kvpacked_func", "q, kv")],
)
def test_flash_signatures(name, first):
    options = {
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
    }
    parameters = inspect.signature(getattr(cupyflash, name)).parameters
    assert list(parameters) == [*first.split(", "), *options]
    assert {key: parameters[key].default for key in options} == options
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())


def test_flash_attn_func():
    expected, expected_lse = textbook(Q, K, V, bottom_right(5, 7), scale=0.2, softcap=3.0)
    out, lse, dropout_mask = cupyflash.flash_attn_func(
        Q, K, V, softmax_scale=0.2, causal=True, softcap=3.0, return_attn_probs=True
    )
    close(out, expected, "float32")
    close(lse, expected_lse, "float32")
    assert dropout_mask is None


@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (-1, 1), (2, 0), [1, 1]])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_windows(window, causal):
    i, j = np.arange(5)[:, None] + 2, np.arange(7)
    visible = (window[0] == -1) | (j >= i - window[0])
    visible = visible & ((window[1] == -1) | (j <= i + window[1])) & (not causal or j <= i)
    close(
        cupyflash.flash_attn_func(Q, K, V, causal=causal, window_size=window), textbook(Q, K, V, visible)[0], "float32"
    )


@pytest.mark.parametrize("return_probs", [False, True])
def test_flash_packed(return_probs):
    """The parts of the packed arrays are views that interleave."""
    qkv, kv = randn(2, 6, 3, 4, 8), randn(2, 9, 2, 2, 8)
    for packed, parts in [
        (
            cupyflash.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=return_probs),
            [qkv[:, :, i] for i in range(3)],
        ),
        (
            cupyflash.flash_attn_kvpacked_func(qkv[:, :, 0], kv, causal=True, return_attn_probs=return_probs),
            [qkv[:, :, 0], kv[:, :, 0], kv[:, :, 1]],
        ),
    ]:
        result = cupyflash.flash_attn_func(
            *(np.ascontiguousarray(part) for part in parts), causal=True, return_attn_probs=True
        )
        np.testing.assert_array_equal(packed[0] if return_probs else packed, result[0])
        if return_probs:
            np.testing.assert_array_equal(packed[1], result[1])
            assert packed[2] is None


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (NotImplementedError, "dropout_p=0.5", lambda: cupyflash.flash_attn_func(Q, K, V, 0.5)),
        (NotImplementedError, "alibi_slopes", lambda: cupyflash.flash_attn_func(Q, K, V, alibi_slopes=np.ones(4))),
        (
            NotImplementedError,
            "alibi_slopes",
            lambda: cupyflash.flash_attn_kvpacked_func(Q, K, alibi_slopes=np.ones(4)),
        ),
        (NotImplementedError, "dropout_p", lambda: cupyflash.flash_attn_qkvpacked_func(Q, dropout_p=0.1)),
        (ValueError, "window_size left is -2", lambda: cupyflash.flash_attn_func(Q, K, V, window_size=(-2, 0))),
        (
            ValueError,
            "window_size right is -3; expected an integer >= 0, or -1",
            lambda: cupyflash.flash_attn_func(Q, K, V, window_size=(1, -3)),
        ),
        (TypeError, "softmax_scale is a str", lambda: cupyflash.flash_attn_func(Q, K, V, softmax_scale="1")),
        (
            ValueError,
            "causal is 'top_left'; expected True or False",
            lambda: cupyflash.flash_attn_func(Q, K, V, causal="top_left"),
        ),
        (ValueError, "is_causal is 'no'", lambda: cupyflash.scaled_dot_product_attention(Q, K, V, is_causal="no")),
        (ValueError, "is_causal is 2", lambda: cupyflash.dot_product_attention(Q, K, V, is_causal=2)),
        (ValueError, "window_size is 3", lambda: cupyflash.flash_attn_func(Q, K, V, window_size=3)),
        (ValueError, "qkv has shape", lambda: cupyflash.flash_attn_qkvpacked_func(Q)),
        (ValueError, "kv has shape", lambda: cupyflash.flash_attn_kvpacked_func(Q, K)),
        (TypeError, "qkv is a list", lambda: cupyflash.flash_attn_qkvpacked_func([1])),
        (TypeError, "key is a NoneType", lambda: cupyflash.scaled_dot_product_attention(Q, None, V)),
        (NotImplementedError, "attn_mask", lambda: cupyflash.scaled_dot_product_attention(Q, K, V, np.ones(1))),
        (NotImplementedError, "dropout_p=1", lambda: cupyflash.scaled_dot_product_attention(Q, K, V, dropout_p=1.0)),
        (
            ValueError,
            "key has 5 heads but query has 6",
            lambda: cupyflash.scaled_dot_product_attention(*unequal_heads()),
        ),
        (ValueError, "equal leading dimensions", lambda: cupyflash.scaled_dot_product_attention(Q[0], Q, Q)),
        (ValueError, "equal leading dimensions", lambda: cupyflash.scaled_dot_product_attention(Q[:1], Q, Q)),
        (ValueError, "equal leading dimensions", lambda: cupyflash.scaled_dot_product_attention(*[np.zeros(4)] * 3)),
        (NotImplementedError, "bias", lambda: cupyflash.dot_product_attention(Q, K, V, np.ones(1))),
        (NotImplementedError, "mask", lambda: cupyflash.dot_product_attention(Q, K, V, mask=np.ones(1))),
        (NotImplementedError, "query_seq", lambda: cupyflash.dot_product_attention(Q, K, V, query_seq_lengths=[1, 2])),
        (NotImplementedError, "key_value", lambda: cupyflash.dot_product_attention(Q, K, V, key_value_seq_lengths=[1])),
        (
            NotImplementedError,
            "implementation",
            lambda: cupyflash.dot_product_attention(Q, K, V, implementation="cudnn"),
        ),
        (ValueError, "query has shape (5, 8)", lambda: cupyflash.dot_product_attention(Q[0, :, 0], K, V)),
        (
            ValueError,
            "local_window_size left is -1",
            lambda: cupyflash.dot_product_attention(Q, K, V, local_window_size=-1),
        ),
    ],
)
def test_nothing_is_ignored(error, message, call):
    with pytest.raises(error, match=re.escape(message)):
        call()


def unequal_heads():
    return randn(1, 6, 4, 8), randn(1, 5, 4, 8), randn(1, 5, 4, 8)


# ---- torch's


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (0, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_product_attention(lead, is_causal):
    q, k, v = randn(*lead, 5, 8), randn(*lead, 7, 8), randn(*lead, 7, 12)
    out = cupyflash.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.4)
    flat = [array.reshape(-1, 1, *array.shape[-2:]).transpose(0, 2, 1, 3) for array in (q, k, v)]
    expected, _ = textbook(*flat, np.tri(5, 7, dtype=bool) if is_causal else None, scale=0.4)
    assert out.shape == (*lead, 5, 12)
    close(out, expected[:, :, 0].reshape(out.shape), "float32")


def test_scaled_dot_product_attention_of_views():
    q = randn(4, 3, 2, 5, 8).transpose(1, 0, 2, 3, 4)
    result = cupyflash.scaled_dot_product_attention(q, q, q)
    np.testing.assert_array_equal(result, cupyflash.scaled_dot_product_attention(q.copy(), q.copy(), q.copy()))


@pytest.mark.parametrize("batch", [(), (2,)])
def test_scaled_dot_product_attention_with_shared_heads(batch):
    q, k = randn(*batch, 6, 4, 8), randn(*batch, 2, 4, 8)
    out = cupyflash.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    wide = k.repeat(3, axis=-3)
    close(out, cupyflash.scaled_dot_product_attention(q, wide, wide), "float32")


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)])
def test_scaled_dot_product_attention_is_torchs(shape):
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(shape), torch.randn(*shape[:-2], 7, 8), torch.randn(*shape[:-2], 7, 8)
    for is_causal in (False, True):
        out = cupyflash.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


# ---- JAX's


@pytest.mark.parametrize("window", [None, 2, np.int64(1), (3, 0), (0, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_dot_product_attention(batched, is_causal, window):
    left, right = window if isinstance(window, tuple) else (window, window)
    i, j = np.arange(5)[:, None], np.arange(7)
    visible = np.full((5, 7), True) if window is None else (j >= i - left) & (j <= i + right)
    visible &= not is_causal or j <= i
    expected, expected_lse = textbook(Q, K, V, visible, scale=0.3)
    operands = (Q, K, V) if batched else (Q[0], K[0], V[0])
    options = {"is_causal": is_causal, "local_window_size": window, "scale": 0.3}
    out, lse = cupyflash.dot_product_attention(*operands, return_residual=True, **options)
    close(out, expected if batched else expected[0], "float32")
    close(lse, expected_lse.swapaxes(1, 2) if batched else expected_lse[0].T, "float32")
    np.testing.assert_array_equal(cupyflash.dot_product_attention(*operands, **options), out)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"is_causal": True, "local_window_size": (2, 0)}, {"scale": 0.1}]
)
@pytest.mark.parametrize("batched", [False, True])
def test_dot_product_attention_is_jaxs(batched, options):
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(array if batched else array[0]) for array in (Q, K, V))
    out = cupyflash.dot_product_attention(q, k, v, **options)
    assert isinstance(out, jax.Array)
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
