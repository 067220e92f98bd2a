"""Arrays of other libraries: shared without a copy, handed back in kind, refused by name."""

import re
import sys
import types

import numpy as np
import pytest

import cupyflash
from cupyflash import arrays


def randn(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


class Exporter:
    """An array of a library that knows DLPack and nothing else."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


def test_dlpack_shares_memory():
    array = randn(2, 3)
    view = arrays.adopt("q", Exporter(array))
    assert type(view) is np.ndarray
    assert np.shares_memory(view, array)


def test_results_of_unknown_libraries_are_numpy():
    q = randn(1, 4, 2, 8)
    out = cupyflash.attention(Exporter(q), q, Exporter(q))
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, cupyflash.attention(q, q, q))
    target = np.empty_like(q)
    assert cupyflash.attention(Exporter(q), q, q, out=target) is target
    np.testing.assert_array_equal(target, out)


def test_arrays_on_other_devices_are_refused():
    with pytest.raises(TypeError, match=r"q is a test_arrays\.Exporter; expected a CuPy or NumPy array"):
        arrays.adopt("q", Exporter(randn(2), device=(10, 0)))


@pytest.mark.parametrize("error", [BufferError, TypeError, ValueError, AttributeError])
def test_an_export_that_fails_is_named(error):
    class Broken(Exporter):
        def __dlpack__(self, **options):
            raise error("it is lost")

    with pytest.raises(TypeError, match=re.escape("k is a") + ".*Broken that cannot be shared: it is lost"):
        arrays.adopt("k", Broken(randn(2)))


@pytest.mark.parametrize("attribute", ["__dlpack_device__", "__cuda_array_interface__"])
def test_gpu_arrays_without_cupy(monkeypatch, attribute):
    monkeypatch.setitem(sys.modules, "cupy", None)
    value = (lambda self: (2, 0)) if attribute == "__dlpack_device__" else {}
    array = type("DeviceArray", (), {attribute: value})()
    with pytest.raises(
        ImportError, match=re.escape("q is on a GPU and needs CuPy") + r'.*pip install "cupyflash\[cuda13\]"'
    ):
        arrays.adopt("q", array)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r"q is bfloat16.*pip install ml_dtypes"):
        arrays.bfloat16("q")


def test_libraries_are_looked_up_not_imported(monkeypatch):
    """A module of the right name that lacks what is looked for, as while it is being imported, is no library."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "jax", None)
    assert arrays.library_of(randn(2)) is None
    q = randn(1, 4, 2, 8)
    assert type(cupyflash.flash_attn_func(q, q, q)) is np.ndarray


# ---- torch


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors(torch, dtype):
    q, k = torch.randn(2, 5, 4, 8).to(getattr(torch, dtype)), torch.randn(2, 6, 2, 8).to(getattr(torch, dtype))
    out, lse = cupyflash.attention(q, k, k, return_lse=True, causal="top_left")
    assert type(out) is type(lse) is torch.Tensor
    assert out.dtype == q.dtype
    swapped = [tensor.double().transpose(1, 2) for tensor in (q, k, k)]
    expected = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=True, enable_gqa=True)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=tolerance, atol=tolerance)
    target = torch.empty_like(q)
    assert cupyflash.attention(q, k, k, out=target, causal="top_left") is target
    assert torch.equal(target, out)
    dq, dk, _ = cupyflash.attention_backward(out, q, k, k, out, lse, causal="top_left")
    assert (dq.dtype, dq.shape, dk.shape) == (q.dtype, q.shape, k.shape)


def test_torch_gradients_are_not_lost_silently(torch):
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"q requires grad.*q\.detach\(\)"):
        cupyflash.attention(q, q, q)
    with torch.no_grad():
        assert not cupyflash.attention(q, q, q).requires_grad
    leaf = q.detach()
    out, vjp = cupyflash.attention_vjp(leaf, leaf, leaf)
    assert all(type(gradient) is torch.Tensor for gradient in vjp(torch.ones_like(out)))


def test_torch_on_other_devices(torch):
    q = torch.empty(1, 4, 2, 8, device="meta")
    with pytest.raises(TypeError, match="q is on torch device meta"):
        cupyflash.attention(q, q, q)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_tensors_on_the_gpu_follow_torch_streams(torch, dtype):
    kind = getattr(torch, dtype)
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    q = torch.randn(2, 200, 4, 64, device="cuda").to(kind)
    expected = torch.nn.functional.scaled_dot_product_attention(*[q.double().transpose(1, 2)] * 3).transpose(1, 2)
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda._sleep(20_000_000)
        late = q.clone()  # there only after the sleep, on this stream
        out = cupyflash.attention(late, late, late)
        total = out.double()
    torch.cuda.synchronize()
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}[dtype]
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
    assert (out.dtype, out.device) == (kind, q.device)
    target = torch.empty_like(q)
    assert cupyflash.attention(q, q, q, out=target) is target


# ---- JAX


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays(jax, dtype):
    q = jax.random.normal(jax.random.key(0), (2, 5, 4, 8), dtype)
    out, lse = cupyflash.attention(q, q, q, causal=True, return_lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert out.dtype == q.dtype
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(q, q, q, is_causal=True)
    tolerance = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 1e-5}[dtype]
    np.testing.assert_allclose(out.astype("float32"), expected.astype("float32"), rtol=tolerance, atol=tolerance)
    with pytest.raises(ValueError, match="out is a JAX array"):
        cupyflash.attention(q, q, q, out=out)


def test_jax_tracers_are_refused(jax):
    with pytest.raises(TypeError, match=r"q is a .*Tracer"):
        jax.jit(lambda q: cupyflash.attention(q, q, q))(jax.numpy.zeros((1, 4, 2, 8)))
