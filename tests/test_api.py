"""The public functions: results against float64 written out, and every error before anything is computed."""

import contextlib
import doctest
import importlib
import itertools
import math
import re
import sys

import numpy as np
import pytest
from textbook import bottom_right, close, randn, textbook

import cupyflash
from cupyflash import api, cpu, streaming
from cupyflash.problem import Problem
from cupyflash.runtime import emulated

DTYPES = ["float16", "float32", "float64"]
# ---- forward


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(dtype, layout):
    q, k, v = randn(2, 9, 6, 16, dtype=dtype), randn(2, 12, 2, 16, dtype=dtype), randn(2, 12, 2, 24, dtype=dtype)
    expected, expected_lse = textbook(q, k, v, bottom_right(9, 12), scale=0.3, softcap=2.0)
    swap = (lambda array: array.transpose(0, 2, 1, 3)) if layout == "bhsd" else (lambda array: array)
    options = {"causal": True, "scale": 0.3, "softcap": 2.0, "layout": layout, "return_lse": True}
    out, lse = cupyflash.attention(swap(q), swap(k), swap(v), **options)
    assert out.dtype == dtype
    assert out.flags.c_contiguous
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    close(swap(out), expected, dtype)
    close(lse, expected_lse, dtype)


def test_forward_bfloat16():
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (randn(2, 9, 4, 16, dtype=dtype, seed=seed) for seed in range(3))
    out = cupyflash.attention(q, k, v)
    assert out.dtype == dtype
    close(out, textbook(q, k, v)[0], "bfloat16")


@pytest.mark.parametrize("causal", [False, True, "bottom_right", "top_left"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2, 5), (5, 2), (4, 4)])
def test_which_keys_are_seen(seqlen_q, seqlen_k, causal):
    """With q = 0 the lse is the logarithm of the number of keys seen."""
    q, k = np.zeros((1, seqlen_q, 1, 8), np.float32), randn(1, seqlen_k, 1, 8)
    _, lse = cupyflash.attention(q, k, k, causal=causal, return_lse=True)
    offset = {False: seqlen_k, "top_left": 0}.get(causal, seqlen_k - seqlen_q)
    seen = np.clip(np.arange(seqlen_q) + 1 + offset, 0, seqlen_k)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(seen), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "window", "causal", "seen"),
    [
        ((8, 3), (None, 4), False, [0, 1, 2, 3, 3, 3, 3, 3]),
        ((8, 3), (2, 2**31 - 1), False, [3] * 8),
        ((3, 8), (4, None), False, [7, 6, 5]),
        ((6, 6), (0, 0), False, [1] * 6),
        ((6, 6), (2, 5), True, [1, 2, 3, 3, 3, 3]),
        ((6, 6), [1, 1], False, [2, 3, 3, 3, 3, 2]),  # a list: cannot be hashed, means the same
    ],
)
def test_windows(shape, window, causal, seen):
    q, k = np.zeros((1, shape[0], 1, 8), np.float32), randn(1, shape[1], 1, 8)
    _, lse = cupyflash.attention(q, k, k, window=window, causal=causal, return_lse=True)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(seen), rtol=1e-6)


def test_no_option_is_taken_from_another_call():
    """Calls of equal shapes that differ in dtype, strides or options, forwards and backwards through the cache."""
    q, k = randn(2, 6, 4, 8), randn(2, 6, 2, 8)
    views = [q, q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), q[:, ::-1], q[..., ::-1]]
    options = [{}, {"causal": True}, {"causal": 1}, {"window": (1, 0)}, {"scale": 0.5}, {"softcap": 1.0}]
    calls = list(itertools.product(DTYPES, views, options))
    for dtype, view, option in calls + calls[::-1]:
        out = cupyflash.attention(view.astype(dtype, order="K"), k.astype(dtype), k.astype(dtype), **option)
        visible = bottom_right(6, 6) if option.get("causal") else None
        if "window" in option:
            visible = bottom_right(6, 6) & ~np.tri(6, 6, -2, dtype=bool)
        rest = {name: value for name, value in option.items() if name in ("scale", "softcap")}
        close(out, textbook(view.astype(dtype), k.astype(dtype), k.astype(dtype), visible, **rest)[0], dtype)


def test_broadcast_keys_get_gradients_of_their_own():
    q, k = randn(3, 5, 4, 8), randn(1, 6, 1, 8)
    wide = np.broadcast_to(k, (3, 6, 4, 8))
    out, vjp = cupyflash.attention_vjp(q, wide, wide)
    close(out, textbook(q, wide, wide)[0], "float32")
    for gradient in vjp(np.ones_like(out))[1:]:
        assert gradient.shape == wide.shape
        assert gradient.flags.c_contiguous
        assert gradient.flags.writeable


def test_read_only_arrays_and_memmaps(tmp_path):
    q = randn(1, 4, 2, 8)
    q.flags.writeable = False
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=q.shape)
    mapped[...] = q
    assert type(cupyflash.attention(mapped, q, q)) is np.ndarray
    np.testing.assert_array_equal(cupyflash.attention(mapped, q, q), cupyflash.attention(q, q, q))


# ---- empty problems


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_no_keys(layout):
    q, k = randn(2, 3, 3, 8), np.empty((2, 0, 3, 8), np.float32)
    if layout == "bhsd":
        k = k.transpose(0, 2, 1, 3)
    options = {"layout": layout, "causal": True}
    out, lse = cupyflash.attention(q, k, k, return_lse=True, **options)
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    gradients = cupyflash.attention_backward(np.full_like(out, np.nan), q, k, k, out, lse, **options)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]
    assert (gradients[0] == 0).all()


@pytest.mark.parametrize(("batch", "seqlen", "heads"), [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
def test_no_queries(batch, seqlen, heads):
    q, k = np.empty((batch, seqlen, heads, 8), np.float32), randn(batch, 5, heads, 8)
    out, lse = cupyflash.attention(q, k, k, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (batch, heads, seqlen)
    dq, dk, dv = cupyflash.attention_backward(out, q, k, k, out, lse)
    assert dq.shape == q.shape
    assert (dk == 0).all()
    assert (dv == 0).all()


# ---- out


def test_out_is_written_through_its_strides():
    q = randn(2, 5, 3, 8)
    wide = np.full((2, 10, 3, 8), 7, np.float32)
    out = wide[:, ::2]
    assert cupyflash.attention(q, q, q, out=out) is out
    np.testing.assert_array_equal(out, cupyflash.attention(q, q, q))
    assert (wide[:, 1::2] == 7).all()
    result, _ = cupyflash.attention(q, q, q, out=out, return_lse=True)
    assert result is out


def test_bad_out():
    buffer = randn(2, 6, 3, 8)
    q, fine = buffer[:, :5], np.empty((2, 5, 3, 8), np.float32)
    read_only = fine.copy()
    read_only.flags.writeable = False
    shared, sliding = (
        np.lib.stride_tricks.as_strided(np.empty(400, np.float32), fine.shape, strides)
        for strides in ((0, *fine.strides[1:]), (480, 32, 4, 4))
    )
    for error, message, out in [
        (TypeError, "out has dtype float16 but q, k and v have float32", fine.astype(np.float16)),
        (ValueError, "out has shape (2, 5, 3, 4); expected (2, 5, 3, 8)", fine[..., :4]),
        (ValueError, "out is read-only", read_only),
        (ValueError, "elements share memory", shared),
        (ValueError, "elements share memory", sliding),
        (ValueError, "out overlaps q in memory", q),
        (ValueError, "out overlaps q in memory", buffer[:, 1:]),
        (TypeError, "out is a list", fine.tolist()),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            cupyflash.attention(q, fine, fine, out=out)
    with pytest.raises(ValueError, match="out overlaps v in memory"):
        cupyflash.attention(q, q, fine, out=fine)


def test_out_may_lie_between_operands():
    packed = randn(2, 6, 4, 3, 8)
    q, k, v, out = (packed[:, :, n] for n in range(4))
    expected = cupyflash.attention(q.copy(), k.copy(), v.copy())
    assert cupyflash.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(ValueError, match="out overlaps k in memory"):
        cupyflash.attention(q, k, v, out=packed[:, :, 1])


def misaligned(array):
    """Contiguous, at an odd address."""
    copy = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.emulated
@pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++")
def test_misaligned_arrays_are_copied():
    q, k, dout = randn(1, 9, 2, 8), randn(1, 12, 2, 8), randn(1, 9, 2, 8, seed=1)
    assert cupyflash.supported(misaligned(q), k, k, device="emulated") == (True, "")
    out, lse = cupyflash.attention(q, k, k, return_lse=True, device="emulated")
    expected = cupyflash.attention_backward(dout, q, k, k, out, lse, dlse=lse, device="emulated")
    q, k, dout, lse = map(misaligned, (q, k, dout, lse))
    np.testing.assert_array_equal(cupyflash.attention(q, k, k, device="emulated", out=misaligned(out)), out)
    gradients = cupyflash.attention_backward(dout, q, k, k, misaligned(out), lse, dlse=lse, device="emulated")
    for gradient, same in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(gradient, same)


# ---- errors


def test_what_is_no_array():
    q = randn(1, 4, 2, 8)
    for name, message, wrong in [
        ("q", "q is a list", q.tolist()),
        ("k", "k is a NoneType", None),
        ("v", "v is a numpy.float64", np.float64(1)),
        ("q", "q is a numpy.matrix", q[0, 0].view(np.matrix)),
        ("k", "k is a numpy.ma.MaskedArray", np.ma.masked_array(q)),
    ]:
        with pytest.raises(TypeError, match=re.escape(message)):
            cupyflash.attention(**{"q": q, "k": q, "v": q, name: wrong})


@pytest.mark.parametrize("dtype", [np.int8, bool, np.complex64])
def test_dtypes(dtype):
    q = np.zeros((1, 4, 2, 8), dtype)
    with pytest.raises(TypeError, match=f"q has dtype {np.dtype(dtype)}"):
        cupyflash.attention(q, q, q)


def test_backward_checks_what_forward_made():
    q = randn(1, 4, 2, 8)
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    good = {"dout": out, "q": q, "k": q, "v": q, "out": out, "lse": lse}
    for error, message, wrong in [
        (TypeError, "dout has dtype float16 but q, k and v have float32", {"dout": out.astype(np.float16)}),
        (ValueError, "dout has shape (1, 4, 2, 4); expected (1, 4, 2, 8)", {"dout": out[..., :4]}),
        (ValueError, "out has shape (1, 3, 2, 8)", {"out": out[:, :3]}),
        (TypeError, "lse has dtype float64; expected float32", {"lse": lse.astype(np.float64)}),
        (ValueError, "lse has shape (1, 4, 2); expected (1, 2, 4)", {"lse": lse.swapaxes(1, 2)}),
        (ValueError, "dlse has shape (4,); expected (1, 2, 4)", {"dlse": lse[0, 0]}),
        (TypeError, "dlse has dtype float64; expected float32", {"dlse": lse.astype(np.float64)}),
        (TypeError, "dlse is a float", {"dlse": 1.0}),
        (TypeError, "lse is a NoneType", {"lse": None}),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            cupyflash.attention_backward(**good | wrong)


def test_devices():
    q = randn(1, 4, 2, 8)
    np.testing.assert_array_equal(cupyflash.attention(q, q, q, device="cpu"), cupyflash.attention(q, q, q))
    with pytest.raises(ValueError, match="device is 'tpu'"):
        cupyflash.attention(q, q, q, device="tpu")


# ---- backward


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_are_slopes(layout):
    """Central differences of a weighted sum of out and lse, in float64."""
    shape_q, shape_k = ((1, 5, 4, 3), (1, 6, 2, 3)) if layout == "bshd" else ((1, 4, 5, 3), (1, 2, 6, 3))
    operands = [
        randn(*shape_q, dtype="float64"),
        randn(*shape_k, dtype="float64", seed=1),
        randn(*shape_k, dtype="float64"),
    ]
    options = {"causal": True, "window": (3, None), "softcap": 1.5, "scale": 0.7, "layout": layout}
    out, lse = cupyflash.attention(*operands, return_lse=True, **options)
    dout, dlse = randn(*out.shape, dtype="float64", seed=2), randn(*lse.shape, dtype="float64", seed=3)

    def loss(*operands):
        out, lse = cupyflash.attention(*operands, return_lse=True, **options)
        return (out * dout).sum() + (lse * dlse).sum()

    gradients = cupyflash.attention_backward(dout, *operands, out, lse, dlse=dlse, **options)
    step = 1e-5
    for which, gradient in enumerate(gradients):
        for index in list(np.ndindex(gradient.shape))[::7]:
            moved = [[array.copy() for array in operands] for _ in range(2)]
            moved[0][which][index] += step
            moved[1][which][index] -= step
            slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
            assert gradient[index] == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_vjp_is_backward():
    q, k, v = randn(2, 5, 4, 8), randn(2, 6, 2, 8), randn(2, 6, 2, 12)
    options = {"causal": "top_left", "scale": -0.2, "deterministic": True}
    out, vjp = cupyflash.attention_vjp(q, k, v, **options)
    expected_out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_array_equal(out, expected_out)
    dout = randn(*out.shape)
    expected = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    for result in (vjp(dout), vjp(dout)):
        for gradient, array, same in zip(result, (q, k, v), expected, strict=True):
            assert gradient.shape == array.shape
            np.testing.assert_array_equal(gradient, same)


def test_vjp_is_of_the_options_of_its_call():
    q, window = randn(1, 9, 2, 8), [1, 0]
    out, vjp = cupyflash.attention_vjp(q, q, q, window=window)
    first = vjp(out)
    window[0] = 5
    for gradient, same in zip(vjp(out), first, strict=True):
        np.testing.assert_array_equal(gradient, same)


def test_vjp_with_the_gradient_of_lse():
    """Of lse alone, and of it beside that of out; any strides of dlse will do."""
    q, k, v = randn(2, 5, 4, 8), randn(2, 6, 2, 8), randn(2, 6, 2, 12)
    options = {"causal": True, "scale": -0.2, "softcap": 1.5}
    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    for got, same in zip((out, lse), cupyflash.attention(q, k, v, return_lse=True, **options), strict=True):
        np.testing.assert_array_equal(got, same)
    dout, dlse = randn(*out.shape), randn(*lse.shape, seed=1)
    for dlse_given in (None, dlse, np.repeat(dlse, 3, axis=2)[..., ::3], dlse.swapaxes(0, 2).copy().swapaxes(0, 2)):
        expected = cupyflash.attention_backward(
            dout, q, k, v, out, lse, dlse=None if dlse_given is None else dlse, **options
        )
        for gradient, same in zip(vjp(dout, dlse_given), expected, strict=True):
            np.testing.assert_array_equal(gradient, same)
    of_both, of_out, of_lse = vjp(dout, dlse), vjp(dout), vjp(0 * dout, dlse)
    for both, one, other in zip(of_both, of_out, of_lse, strict=True):
        np.testing.assert_allclose(both, one + other, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=re.escape("dlse has shape (2, 5, 4); expected (2, 4, 5)")):
        vjp(dout, dlse.swapaxes(1, 2))


# ---- baseline, merging, and asking first


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_standard_attention(dtype, layout):
    q, k = randn(2, 6, 6, 8, dtype=dtype), randn(2, 6, 6, 8, dtype=dtype, seed=1)
    options = {"causal": True, "window": (2, 0), "softcap": 3.0, "layout": layout, "return_lse": True}
    for result, same in zip(
        cupyflash.standard_attention(q, k, k, **options), cupyflash.attention(q, k, k, **options), strict=True
    ):
        assert result.dtype == same.dtype
        close(result, same, dtype)


def test_standard_attention_without_keys():
    q, k = randn(1, 9, 2, 8), randn(1, 4, 1, 8)
    out, lse = cupyflash.standard_attention(q, k, k, causal=True, return_lse=True)
    assert (out[:, :5] == 0).all()
    assert np.isneginf(lse[..., :5]).all()
    out, lse = cupyflash.standard_attention(q, k[:, :0], k[:, :0], return_lse=True)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_numbers_that_are_not_finite_are_data():
    """No warning, nor what becomes of warnings where the caller has asked for errors."""
    q = np.full((1, 200, 2, 16), 8, np.float16) * randn(1, 200, 2, 16, dtype="float16")
    q[0, 3, 0, 0], q[0, 7, 1, 1] = np.inf, np.nan
    part = np.zeros((1, 3, 1, 4), np.float32), np.array([[[np.inf, 3e38, -np.inf]]], np.float32)
    other = np.full((1, 3, 1, 4), np.inf, np.float32), np.array([[[np.inf, -3e38, 0]]], np.float32)
    with np.errstate(all="raise"):
        for algorithm in ("v2", "standard"):
            for options in ({"scale": 1.0}, {"softcap": 1e-30}):
                options |= {"algorithm": algorithm, "causal": True}
                out, lse = cupyflash.attention(q, q, q, return_lse=True, **options)
                cupyflash.attention_backward(q, q, q, q, out, lse, **options)
        cupyflash.standard_attention(q, q, q)
        cupyflash.merge_attention(*part, *other)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("split", [0, 1, 16, 36, 37])
def test_merge_is_attention_over_both(split, layout):
    """At split 0 and 37 one part saw no key; with the causal mask some queries see keys of neither."""
    q, k, v = (randn(2, seqlen, 3, 8, seed=seed) for seed, seqlen in ((0, 40), (1, 37), (2, 37)))
    last = 37 - 40  # query i sees the keys j <= i - 3, whichever part they are in
    parts = []
    for keys in (slice(None, split), slice(split, None)):
        start = keys.start or 0
        visible = np.tri(40, k[:, keys].shape[1], last - start, dtype=bool)
        out, lse = textbook(q, k[:, keys], v[:, keys], visible)
        parts += [out.astype(np.float32), lse.astype(np.float32)]
    expected, expected_lse = textbook(q, k, v, np.tri(40, 37, last, dtype=bool))
    if layout == "bhsd":
        parts[0], parts[2], expected = (array.swapaxes(1, 2) for array in (parts[0], parts[2], expected))
    out, lse = cupyflash.merge_attention(*parts, layout=layout)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-6)
    empty = out[:, :, :3] if layout == "bhsd" else out[:, :3]
    assert (empty == 0).all()
    assert np.isneginf(lse[..., :3]).all()


def test_merge_keeps_data_that_counts_and_drops_data_that_does_not():
    out_a, out_b = np.full((1, 2, 1, 4), np.nan, np.float16), np.ones((1, 2, 1, 4), np.float16)
    lse_a = np.array([[[-np.inf, 0.0]]], np.float32)
    out, lse = cupyflash.merge_attention(out_a, lse_a, out_b, np.zeros((1, 1, 2), np.float32))
    assert out.dtype == np.float16
    assert (out[0, 0] == 1).all()
    assert np.isnan(out[0, 1]).all()
    np.testing.assert_allclose(lse[0, 0], [0, math.log(2)], rtol=1e-6)


def test_merge_errors():
    out, lse = randn(1, 4, 2, 8), randn(1, 2, 4)
    for error, message, arguments in [
        (TypeError, "out_a is float32, out_b is float16", (out, lse, out.astype(np.float16), lse)),
        (TypeError, "expected float32 or float64", (out, lse.astype(np.float16), out, lse.astype(np.float16))),
        (ValueError, "lse_b has shape (1, 4, 2); expected (1, 2, 4)", (out, lse, out, lse.swapaxes(1, 2))),
        (ValueError, "out_b has shape (1, 3, 2, 8)", (out, lse, out[:, :3], lse)),
        (TypeError, "lse_a is a NoneType", (out, None, out, lse)),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            cupyflash.merge_attention(*arguments)


def test_supported_never_raises():
    q = randn(1, 4, 3, 8)
    assert cupyflash.supported(q, q, q, causal=True) == (True, "")
    for arguments, options, reason in [
        ((q, q[:, :, :2], q[:, :, :2]), {}, "k has 2 heads but q has 3"),
        ((q, None, q), {}, "k is a NoneType"),
        ((q, q, q.astype(np.int8)), {}, "v is int8"),
        ((q, q, q), {"window": (-1, 0)}, "window left is -1"),
        ((q, q, q), {"window": object()}, "expected None or (left, right)"),
        ((q, q, q), {"dropout": 0.5}, "dropout is no option that decides it; expected causal, "),
        ((q, q, q), {"alignment": "top_left"}, "alignment is no option that decides it"),
        ((q, q, q), {"return_lse": True}, "return_lse is no option that decides it"),
    ]:
        answer = cupyflash.supported(*arguments, **options)
        assert answer[0] is False
        assert reason in answer[1]


@pytest.mark.parametrize("module", ["api", "dropin", "merge", "standard"])
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(f"cupyflash.{module}"))
    assert result.attempted
    assert not result.failed


# ---- the way to the GPU, without one


@pytest.fixture
def gpu(monkeypatch):
    fake = pytest.importorskip("fake_gpu").FakeGpu(monkeypatch)
    with importlib.import_module("cupy").cuda.using_allocator(fake.allocate):
        yield fake


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_cupy_arrays_reach_the_gpu(gpu, layout):
    q, k = randn(2, 5, 5, 8, dtype="float16"), randn(2, 5, 5, 8, dtype="float16", seed=1)
    options = {"causal": True, "layout": layout, "deterministic": True}
    out, lse = cupyflash.attention(gpu.array(q), gpu.array(k), gpu.array(k), return_lse=True, **options)
    expected, expected_lse = cupyflash.attention(q, k, k, return_lse=True, **options)
    np.testing.assert_array_equal(gpu.host(out), expected)
    np.testing.assert_array_equal(gpu.host(lse), expected_lse)
    arguments = (out, gpu.array(q), gpu.array(k), gpu.array(k), out, lse)
    for gradient, same in zip(
        cupyflash.attention_backward(*arguments, **options),
        cupyflash.attention_backward(expected, q, k, k, expected, expected_lse, **options),
        strict=True,
    ):
        assert gradient.flags.c_contiguous
        np.testing.assert_array_equal(gpu.host(gradient), same)
    assert gpu.launches == [api.Options(**options).problem(q, k, k)] * 2
    assert gpu.switches == []


def test_an_equal_call_is_not_checked_again(gpu, monkeypatch):
    """And computes with its own arrays all the same."""

    def call(host):
        q, k, v, dout = map(gpu.array, host)
        given = gpu.empty(q.shape)
        out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        assert cupyflash.attention(q, k, v, causal=True, out=given) is given
        gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True)
        dlse = gpu.array(2 * gpu.host(lse))
        with_dlse = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True)
        return given, out, lse, *gradients, *with_dlse

    call(randn(4, 1, 4, 2, 8))
    host = randn(4, 1, 4, 2, 8, seed=1)
    with monkeypatch.context() as patches:
        for name in ("_resolve", "_check_out", "_check_gradients"):
            patches.setattr(api, name, None)
        results = call(host)
    assert len(gpu.launches) == 8
    assert all(problem is gpu.launches[0] for problem in gpu.launches)
    out, lse = cupyflash.attention(*host[:3], causal=True, return_lse=True)
    gradients = cupyflash.attention_backward(host[3], *host[:3], out, lse, causal=True)
    with_dlse = cupyflash.attention_backward(host[3], *host[:3], out, lse, dlse=2 * lse, causal=True)
    for result, expected in zip(results, (out, out, lse, *gradients, *with_dlse), strict=True):
        np.testing.assert_array_equal(gpu.host(result), expected)


@pytest.mark.parametrize("which", range(3))
def test_an_equal_call_may_still_overlap(gpu, which):
    """Where out lies is no part of what was checked before."""
    room = gpu.array(randn(12, 1, 2, 8))
    operands = [gpu.array(randn(4, 1, 2, 8)) for _ in range(3)]
    cupyflash.attention(*operands, out=room[:4])
    operands[which] = room[4:8]
    for start in (1, 4, 7):
        with pytest.raises(ValueError, match=f"out overlaps {'qkv'[which]}"):
            cupyflash.attention(*operands, out=room[start : start + 4])
    assert len(gpu.launches) == 1
    for start in (0, 8):
        cupyflash.attention(*operands, out=room[start : start + 4])
    assert len(gpu.launches) == 3
    assert len(api._bound_forward) == 1


def test_no_layout_is_taken_from_another_call(gpu, monkeypatch):
    """Equal shapes with other strides, alignments, dtypes and options, forwards and backwards, each repeated."""
    cupy = importlib.import_module("cupy")
    monkeypatch.setattr(cupy, "ascontiguousarray", lambda x: gpu.array(np.ascontiguousarray(gpu.host(x))))
    shape, options = (1, 6, 6, 8), [{}, {"causal": True}, {"layout": "bhsd"}, {"window": [1, 1]}]
    plain = gpu.array(randn(*shape))
    swapped = gpu.array(randn(*shape)).transpose(0, 2, 1, 3)
    offset = gpu.array(np.append(randn(*shape), np.float32(0)))[1:].reshape(shape)
    reversed_rows = gpu.array(randn(*shape))[..., ::-1]  # which kernels cannot address
    half = gpu.array(randn(*shape, dtype="float16"))
    operands = [(half,) * 4, (reversed_rows,) * 4, *itertools.product((plain, swapped, offset), repeat=4)]
    for (q, k, v, dout), option in list(itertools.product(operands, options)) * 2:
        host = [gpu.host(x) for x in (q, k, v)]
        expected, expected_lse = cupyflash.attention(*host, return_lse=True, **option)
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **option)
        np.testing.assert_array_equal(gpu.host(out), expected)
        expected = cupyflash.attention_backward(gpu.host(dout), *host, expected, expected_lse, **option)
        swapped_lse = gpu.array(gpu.host(lse).swapaxes(1, 2)).transpose(0, 2, 1)
        for other_lse in (lse, swapped_lse):
            gradients = cupyflash.attention_backward(dout, q, k, v, out, other_lse, **option)
            for gradient, right in zip(gradients, expected, strict=True):
                np.testing.assert_array_equal(gpu.host(gradient), right)
        host_lse = gpu.host(lse)
        expected = cupyflash.attention_backward(gpu.host(dout), *host, gpu.host(out), host_lse, dlse=host_lse, **option)
        for dlse in (lse, swapped_lse, gpu.array(host_lse)):
            gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **option)
            for gradient, right in zip(gradients, expected, strict=True):
                np.testing.assert_array_equal(gpu.host(gradient), right)


def test_any_allocator_will_do(gpu):
    """CuPy's aligns all arrays to 512 bytes, which a bound call expects of the arrays that it makes."""
    cupy = importlib.import_module("cupy")
    q = gpu.array(randn(1, 4, 2, 8, dtype="float16"))
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    dq, *_ = cupyflash.attention_backward(q, q, q, q, out, lse)
    for offset in (0, 2, 0, 8):
        with cupy.cuda.using_allocator(lambda size, offset=offset: gpu.allocate(size, offset=offset)):
            results = cupyflash.attention(q, q, q), cupyflash.attention_backward(q, q, q, q, out, lse)[0]
        for result, expected in zip(results, (out, dq), strict=True):
            assert result.data.ptr % 16 == offset
            np.testing.assert_array_equal(gpu.host(result), gpu.host(expected))


def test_calls_of_many_shapes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(api, "_calls", {})
    monkeypatch.setattr(api, "_CALLS_KEPT", 3)
    for seqlen in range(1, 9):
        cupyflash.attention(*[randn(1, seqlen, 1, 8)] * 3)
        assert len(api._calls) <= 3


def test_bound_calls_of_many_shapes_do_not_pile_up(gpu, monkeypatch):
    monkeypatch.setattr(api, "_CALLS_KEPT", 3)
    for seqlen in range(1, 9):
        q = gpu.array(randn(1, seqlen, 1, 8))
        out, lse = cupyflash.attention(q, q, q, return_lse=True)
        cupyflash.attention_backward(q, q, q, q, out, lse)
        assert 0 < len(api._bound_forward) <= 3
        assert 0 < len(api._bound_backward) <= 3


def test_arrays_on_another_gpu_than_the_current(gpu):
    q = gpu.array(randn(1, 4, 2, 8), device=1)
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    assert out.data.device_id == lse.data.device_id == 1
    assert cupyflash.attention_backward(out, q, q, q, out, lse)[0].data.device_id == 1
    assert gpu.switches == [1, 1]
    assert gpu.current_device == 0
    with pytest.raises(ValueError, match="q on GPU 1, k on GPU 0, v on GPU 1, out on GPU 1"):
        cupyflash.attention(q, gpu.array(randn(1, 4, 2, 8)), q)
    with pytest.raises(TypeError, match="out has dtype float16"):
        cupyflash.attention(q, q, q, out=gpu.empty(q.shape, np.float16, device=1))
    assert gpu.current_device == 0


def test_what_only_the_gpu_refuses(gpu):
    host, q = randn(1, 4, 2, 8), gpu.array(randn(1, 4, 2, 8))
    wide, double = gpu.empty((1, 4, 2, 264)), gpu.empty(q.shape, np.float64)
    with pytest.raises(TypeError, match=re.escape("k, v in CPU memory (NumPy) but q on the GPU (CuPy)")):
        cupyflash.attention(q, host, host)
    with pytest.raises(ValueError, match='device="cpu" but the arrays are on the GPU'):
        cupyflash.attention(q, q, q, device="cpu")
    with pytest.raises(TypeError, match="the GPU computes float16, bfloat16, float32"):
        cupyflash.attention(double, double, double)
    with pytest.raises(ValueError, match="head_dim 264; the GPU computes up to 256"):
        cupyflash.attention(wide, wide, wide)
    with pytest.raises(ValueError, match="out overlaps q"):
        cupyflash.attention(q[:, :3], gpu.array(host), gpu.array(host), out=q[:, 1:])
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    cupyflash.attention_backward(out, q, q, q, out, lse)
    with pytest.raises(TypeError, match=re.escape("dlse in CPU memory (NumPy) but dout, q, k, v, out, lse on the GPU")):
        cupyflash.attention_backward(out, q, q, q, out, lse, dlse=gpu.host(lse))
    with pytest.raises(ValueError, match=r"lse on GPU 0, dlse on GPU 1"):
        cupyflash.attention_backward(out, q, q, q, out, lse, dlse=gpu.array(gpu.host(lse), device=1))
    with pytest.raises(ValueError, match=r"dlse has shape \(1, 2, 3\); expected \(1, 2, 4\)"):
        cupyflash.attention_backward(out, q, q, q, out, lse, dlse=lse[..., :3])
    assert len(gpu.launches) == 2
    assert cupyflash.supported(double, double, double)[0] is False


# ---- NumPy arrays on the GPU


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (1, 2), (1, 8), (2, 1), (7, 2), (64, 1)])
def test_pieces_are_the_whole(batch, kv_heads):
    q, k, v = (randn(batch, 6, heads, 8) for heads in (2 * kv_heads, kv_heads, kv_heads))
    problem = Problem.of(q, k, v, causal=True)
    out, lse = np.empty_like(q), np.empty((batch, 2 * kv_heads, 6), np.float32)
    pieces = streaming.pieces(problem)
    assert len(pieces) == min(streaming.STREAMS, batch if batch > 1 else kv_heads)
    for piece in pieces:
        part_q, part_k = piece.of("q", q), piece.of("k", k)
        assert api.Options(causal=True).problem(part_q, part_k, part_k) == piece.problem
        part = cupyflash.attention(part_q, part_k, piece.of("v", v), causal=True, return_lse=True)
        piece.of("out", out)[...], piece.of("lse", lse)[...] = part
    expected = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    close(out, expected[0], "float32")
    close(lse, expected[1], "float32")


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 2), (7, 2)])
def test_gradients_of_pieces_are_the_whole(monkeypatch, batch, kv_heads, has_dlse):
    """Each array goes to its place, piece by piece; the GPU's part is computed by the CPU."""

    class HostLane(contextlib.nullcontext):
        stream = property(lambda self: self)
        load = result = staticmethod(lambda host: host)
        store = finish = synchronize = staticmethod(lambda: None)

    monkeypatch.setattr(streaming, "_Lane", HostLane)
    monkeypatch.setattr(streaming.arrays, "require_gpu", lambda who: None)
    monkeypatch.setitem(sys.modules, "cupyflash.gpu", cpu)
    monkeypatch.setattr(cupyflash, "gpu", cpu, raising=False)
    q, k = randn(batch, 6, 2 * kv_heads, 8), randn(batch, 9, kv_heads, 8)
    out, lse, vjp = cupyflash.attention_vjp(q, k, k, window=(5, 1), return_lse=True)
    dout, dlse = randn(*q.shape, seed=1), randn(*lse.shape, seed=2) if has_dlse else None
    options = {"window": (5, 1), "device": "cuda", "dlse": dlse}
    gradients = cupyflash.attention_backward(dout, q, k, k, out, lse, **options)
    for gradient, expected in zip(gradients, vjp(dout, dlse), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_large_problems_are_cut_finer():
    shape = (64, 4096, 32, 128)
    q = np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), shape, (0, 0, 0, 0))
    pieces = streaming.pieces(Problem.of(q, q, q))
    assert len(pieces) == 64
    assert sum(piece.problem.batch for piece in pieces) == 64


def test_device_cuda_without_a_gpu(monkeypatch):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy, "is_available", lambda: False)
    q = randn(1, 2, 1, 9)
    with pytest.raises(RuntimeError, match=re.escape('device="cuda" needs an NVIDIA GPU')):
        cupyflash.attention(q, q, q, device="cuda")


# ---- with a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 6), (5, 4)])
def test_streaming(batch, heads):
    q, k = randn(batch, 100, 2 * heads, 64, dtype="float16"), randn(batch, 130, heads, 64, dtype="float16")
    view = q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    out, lse = cupyflash.attention(view, k, k, causal=True, return_lse=True, device="cuda")
    assert type(out) is np.ndarray
    expected, expected_lse = cupyflash.attention(q, k, k, causal=True, return_lse=True)
    close(out, expected, "float16")
    close(lse, expected_lse, "float16")
    for dlse in (None, randn(*lse.shape, seed=1)):
        gradients = cupyflash.attention_backward(out, view, k, k, out, lse, dlse=dlse, causal=True, device="cuda")
        same = cupyflash.attention_backward(expected, q, k, k, expected, expected_lse, dlse=dlse, causal=True)
        for gradient, cpu_gradient in zip(gradients, same, strict=True):
            close(gradient, cpu_gradient, "float16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gpu_agrees_with_cpu_for_any_view(dtype):
    import cupy

    q, k = randn(2, 33, 4, 64, dtype=dtype), randn(2, 33, 4, 64, dtype=dtype, seed=1)
    gq, gk = cupy.asarray(q), cupy.asarray(k)
    wide = cupy.zeros((2, 66, 4, 128), dtype)
    for view in (lambda a: a[:, ::-1], lambda a: a[..., ::-1], lambda a: a[..., ::2], lambda a: a[:1, :, :1]):
        for kept in (lambda a: a, lambda a: a.transpose(0, 2, 1, 3)):
            layout = "bshd" if kept(q) is q else "bhsd"
            arguments = {"layout": layout, "return_lse": True, "causal": True}
            expected, expected_lse = cupyflash.attention(*(kept(view(a)) for a in (q, k, k)), **arguments)
            out, lse = cupyflash.attention(*(kept(view(a)) for a in (gq, gk, gk)), **arguments)
            close(out.get(), expected, dtype)
            close(lse.get(), expected_lse, dtype)
            target = kept(wide[: view(q).shape[0], ::2, : view(q).shape[2], : 2 * view(q).shape[3] : 2])
            assert cupyflash.attention(*(kept(view(a)) for a in (gq, gk, gk)), out=target, **arguments)[0] is target
            close(target.get(), expected, dtype)


@pytest.mark.gpu
def test_gpu_empty_problems_and_merging():
    import cupy

    q, k = cupy.asarray(randn(2, 8, 2, 64)), cupy.asarray(randn(2, 0, 2, 64))
    out, lse = cupyflash.attention(q, k, k, return_lse=True)
    assert (out == 0).all()
    assert cupy.isneginf(lse).all()
    merged, merged_lse = cupyflash.merge_attention(out, lse, *cupyflash.attention(q, q, q, return_lse=True))
    close(merged.get(), cupyflash.standard_attention(q, q, q).get(), "float32")
    assert cupy.isfinite(merged_lse).all()
    dq, dk, _ = cupyflash.attention_backward(out, q, k, k, out, lse)
    assert (dq == 0).all()
    assert dk.shape == k.shape


@pytest.mark.gpu
def test_gpu_calls_can_be_captured():
    import cupy

    q = cupy.asarray(randn(1, 64, 2, 64, dtype="float16"))
    expected, lse = cupyflash.attention(q, q, q, return_lse=True)
    cupyflash.attention_backward(expected, q, q, q, expected, lse)
    out = cupy.empty_like(q)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        cupyflash.attention(q, q, q, out=out)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    cupy.testing.assert_array_equal(out, expected)
