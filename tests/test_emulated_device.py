"""``device="emulated"``: the public functions on the CUDA kernels, run on the CPU."""

import numpy as np
import pytest
from oracles import Answer, assert_bitwise
from test_failure_cases import qkv, randn

import cupyflash
from cupyflash.problem import Problem
from cupyflash.runtime import emulated

pytestmark = pytest.mark.emulated
needs_compiler = pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++")


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_forward_and_backward(dtype):
    q, k, v = qkv(1, 20, 35, 4, 2, 24, dtype)
    dout = randn(*q.shape, dtype=dtype)
    options = {"causal": True, "device": "emulated"}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    answer = Answer.of(Problem.of(q, k, v, causal=True), q, k, v, dout)
    answer.assert_forward_close(out, lse)
    answer.assert_gradients_close(cupyflash.attention_backward(dout, q, k, v, out, lse, **options))
    same, vjp = cupyflash.attention_vjp(q, k, v, **options)
    assert_bitwise(same, out)
    answer.assert_gradients_close(vjp(dout))


@needs_compiler
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradient_of_lse(dtype, deterministic):
    q, k, v = qkv(2, 20, 15, 4, 2, 24, dtype)
    dout, dlse = randn(*q.shape, dtype=dtype, seed=8), randn(2, 4, 20, seed=9)
    options = {"causal": True, "deterministic": deterministic}
    answer = Answer.of(Problem.of(q, k, v, **options), q, k, v, dout, dlse)
    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, device="emulated", **options)
    answer.assert_forward_close(out, lse)
    answer.assert_gradients_close(vjp(dout, dlse))
    answer.assert_gradients_close(vjp(dout, np.repeat(dlse, 2, axis=2)[..., ::2]))


@needs_compiler
def test_what_kernels_cannot_address_is_copied():
    q, k, v = qkv(1, 20, 35, 4, 2, 24)
    expected = cupyflash.attention(q, k, v, device="emulated")
    strided = [np.repeat(x, 2, axis=-1)[..., ::2] for x in (q, k, v)]
    out = np.full((1, 20, 4, 48), np.nan, np.float32)[..., ::2]
    assert cupyflash.attention(*strided, out=out, device="emulated") is out
    assert_bitwise(np.ascontiguousarray(out), expected)
    by_head = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    out = cupyflash.attention(*by_head, layout="bhsd", device="emulated")
    assert_bitwise(np.ascontiguousarray(out.swapaxes(1, 2)), expected)


@needs_compiler
def test_limits_are_those_of_the_kernels():
    wide = randn(1, 4, 2, 264)
    assert cupyflash.supported(wide, wide, wide) == (True, "")
    for arrays, reason in (([wide] * 3, "head_dim 264"), ([wide[..., :8].astype(float)] * 3, "are float64")):
        answer, said = cupyflash.supported(*arrays, device="emulated")
        assert not answer
        assert reason in said
    small = wide[..., :8]
    assert cupyflash.supported(small, small, small, device="emulated") == (True, "")
    empty = cupyflash.attention(small, small[:, :0], small[:, :0], device="emulated")
    assert (empty == 0).all()


def test_arrays_on_the_gpu_stay_there(monkeypatch):
    gpu = pytest.importorskip("fake_gpu").FakeGpu(monkeypatch)
    q = gpu.array(randn(1, 4, 2, 8))
    with pytest.raises(ValueError, match=r'device="emulated" computes NumPy arrays.*cupy\.asnumpy'):
        cupyflash.attention(q, q, q, device="emulated")


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    q = randn(1, 4, 2, 9)  # a shape that no other test has checked
    with pytest.raises(RuntimeError, match=r"g\+\+, which was not found in PATH; install GCC .*apt install g\+\+"):
        cupyflash.attention(q, q, q, device="emulated")
    answer, reason = cupyflash.supported(q, q, q, device="emulated")
    assert not answer
    assert "install GCC" in reason
