"""Standard attention, with S and P in memory: on the CPU, and on a GPU that is not there.

The GPU's path runs as it is: its kernels on the emulated device, its products by a cuBLAS of our own (fake_cublas.py)
that takes addresses and leading dimensions as cuBLAS documents them.
"""

import importlib
import re
from dataclasses import replace

import compiling
import numpy as np
import pytest
from oracles import DTYPES, Answer, assert_same_strangeness

import cupyflash
from cupyflash import standard
from cupyflash.problem import Band, Problem
from cupyflash.resources import KNOWN_GPUS
from cupyflash.runtime.host import HostRuntime

emulated = pytest.mark.emulated


class HostRuntimeForCupy(HostRuntime):
    """Its arrays are CuPy's, in host memory."""

    def address(self, array):
        return array.data.ptr


class StandardGpu:
    """Calls standard.py with CuPy arrays in host memory."""

    def __init__(self, fake, cublas, module):
        self.fake, self.cublas, self.module = fake, cublas, module

    def array(self, host):
        """Poisoned memory around it, and 16-bit views as they are."""
        return None if host is None else self.fake.array(host)


@pytest.fixture
def gpu(monkeypatch, counted):
    cupy = pytest.importorskip("cupy")
    if not importlib.import_module("cupyflash.runtime.emulated").available():
        pytest.skip("there is no g++")
    import cupy_backends.cuda.libs
    import fake_cublas
    import fake_gpu

    from cupyflash import standard_gpu

    fake = fake_gpu.FakeGpu(monkeypatch)
    cublas = fake_cublas.FakeCublas(fake.memory)
    monkeypatch.setitem(vars(cupy_backends.cuda.libs), "cublas", cublas)  # setattr would ask for the real one
    monkeypatch.setattr(cupy.cuda.device, "get_cublas_handle", lambda: 7)
    monkeypatch.setattr(standard_gpu, "_runtime", HostRuntimeForCupy())
    monkeypatch.setattr(standard_gpu, "_loaded", {})
    # As in a process that has not met a CuPy array yet.
    monkeypatch.setitem(cupyflash.arrays.native, cupy.ndarray, cupy)
    del cupyflash.arrays.native[cupy.ndarray]

    def empty(shape, dtype):
        return fake.empty(shape, dtype)

    monkeypatch.setattr(cupy, "empty", empty)
    # CuPy's own kernels, which need a driver.
    monkeypatch.setattr(standard, "_fill", lambda array, value: fake.host(array).fill(value))
    monkeypatch.setattr(
        standard_gpu, "_copy", lambda target, source: fake.host(target).__setitem__(..., fake.host(source))
    )
    monkeypatch.setattr(cupy, "ascontiguousarray", lambda x: x if x.flags.c_contiguous else fake.array(fake.host(x)))
    with cupy.cuda.using_allocator(fake.allocate):
        yield StandardGpu(fake, cublas, standard_gpu)


def randn(*shape, seed, dtype="float64"):
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def swapped(layout, x):
    """(B, S, H, D) in a layout, contiguous."""
    return np.ascontiguousarray(x.swapaxes(1, 2)) if layout == "bhsd" else x


PROBLEMS = {
    "plain": ((2, 5, 6, 2, 2, 8, 8), {}),
    "grouped, other lengths, other head dim of v": ((2, 5, 9, 6, 2, 8, 12), {"scale": -0.3}),
    "causal, rows that see nothing": ((1, 9, 4, 2, 1, 8, 8), {"causal": True}),
    "window on both sides, capped": ((2, 12, 7, 4, 2, 4, 8), {"window": (2, 1), "softcap": 1.5}),
    "rows without keys behind the window": ((1, 9, 4, 1, 1, 8, 8), {"window": (1, None), "causal": "top_left"}),
    "one query": ((3, 1, 7, 2, 1, 8, 8), {}),
    "one key": ((2, 3, 1, 2, 2, 8, 8), {}),
    "head dim 1": ((2, 3, 5, 2, 2, 1, 1), {}),
}


# Those whose P can be kept. With one key all gradients of scores are 0, and what is left is the rounding of dP.
KEPT = [name for name, (_, options) in PROBLEMS.items() if "softcap" not in options and name != "one key"]


def case(name, dtype):
    (batch, sq, sk, heads, kv_heads, d, dv), options = PROBLEMS[name]
    q, dout = randn(batch, sq, heads, d, seed=1, dtype=dtype), randn(batch, sq, heads, dv, seed=4, dtype=dtype)
    k, v = (randn(batch, sk, kv_heads, columns, seed=seed, dtype=dtype) for columns, seed in ((d, 2), (dv, 3)))
    dlse = randn(batch, heads, sq, seed=5, dtype="float64" if dtype == "float64" else "float32")
    return Problem.of(q, k, v, **options), dout, q, k, v, dlse


def assert_lse(got, answer, q):
    """S is rounded to the dtype before the softmax, and lse is off by that: it is a mean of errors."""
    expected = answer.forward[1]
    assert_same_strangeness(got, expected, "lse")
    spacing = {2: 2.0**-8 if q.dtype.name == "bfloat16" else 2.0**-11, 4: 2.0**-20, 8: 2.0**-48}[q.itemsize]
    finite = np.isfinite(expected)
    off = np.abs(np.asarray(got)[finite] - expected[finite]).max(initial=0)
    assert off <= spacing * (1 + 2 * np.abs(expected[finite]).max(initial=1))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_on_the_cpu(name, dtype, layout):
    problem, dout, q, k, v, dlse = case(name, dtype)
    answer = Answer.of(problem, q, k, v, dout, dlse)
    dout, q, k, v = (swapped(layout, x) for x in (dout, q, k, v))
    out, lse = standard.forward(problem, layout, q, k, v)
    assert out.dtype == q.dtype
    answer.assert_forward_close(swapped(layout, out), lse)
    gradients = standard.backward(problem, layout, dout, q, k, v, out, lse, dlse)
    answer.assert_gradients_close([swapped(layout, x) for x in gradients])


@emulated
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_on_the_gpu(gpu, name, dtype, layout):
    problem, dout, q, k, v, dlse = case(name, dtype)
    answer = Answer.of(problem, q, k, v, dout, dlse)
    dout, q, k, v = (gpu.array(swapped(layout, x)) for x in (dout, q, k, v))
    out, lse = standard.forward(problem, layout, q, k, v)
    host = gpu.fake.host
    got = swapped(layout, host(out))
    assert got.dtype == q.dtype
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")
    answer.assert_forward_close(got, answer.forward[1])
    assert_lse(host(lse), answer, q)
    gradients = standard.backward(problem, layout, dout, q, k, v, out, lse, gpu.array(dlse))
    assert all(x.dtype == q.dtype and x.flags.c_contiguous for x in gradients)
    answer.assert_gradients_close([swapped(layout, host(x)) for x in gradients])
    assert (gpu.cublas.math_mode, gpu.cublas.pointer_mode) == (3, 1)  # as they were


@emulated
@pytest.mark.parametrize("place", ["cpu", "gpu"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", KEPT)
def test_a_step_keeps_what_its_backward_needs(request, place, name, dtype, layout):
    problem, dout, q, k, v, _ = case(name, dtype)
    answer = Answer.of(problem, q, k, v, dout)
    gpu = request.getfixturevalue("gpu") if place == "gpu" else None
    to, host = (gpu.array, gpu.fake.host) if gpu else (np.asarray, np.asarray)
    out, lse, *gradients = standard.step(problem, layout, *(to(swapped(layout, x)) for x in (dout, q, k, v)))
    answer.assert_forward_close(swapped(layout, host(out)), answer.forward[1])
    assert_lse(host(lse), answer, q)
    answer.assert_gradients_close([swapped(layout, host(x)) for x in gradients])
    if name == "plain" and layout == "bhsd" and gpu:
        assert len(gpu.cublas.calls) == 2 + 4  # S is computed once


@emulated
@pytest.mark.parametrize("length", [130, 1025, 2049, 4100])
@pytest.mark.parametrize("kept", [True, False])
def test_rows_of_every_share(gpu, monkeypatch, length, kept):
    """A warp or a block per row, pieces in registers; and read again where they are too many for that."""
    problem, dout, q, k, v, _ = case("plain", "float16")
    q, dout = q[:1, :3, :1], dout[:1, :3, :1]
    k, v = (randn(1, length, 1, 8, seed=seed, dtype="float16") for seed in (2, 3))
    problem = Problem.of(q, k, v, causal=True)
    answer = Answer.of(problem, q, k, v, dout)
    dout, q, k, v = (gpu.array(np.ascontiguousarray(x)) for x in (dout, q, k, v))
    threads, _, pieces = gpu.module.row_share(problem)
    assert pieces
    if not kept:
        monkeypatch.setattr(gpu.module, "row_share", lambda _: (threads, threads, 0))
    out, lse = standard.forward(problem, "bshd", q, k, v)
    answer.assert_forward_close(gpu.fake.host(out), answer.forward[1])
    assert_lse(gpu.fake.host(lse), answer, q)
    gradients = standard.backward(problem, "bshd", dout, q, k, v, out, lse)
    answer.assert_gradients_close([gpu.fake.host(x) for x in gradients])


def test_share_of_a_row():
    module = pytest.importorskip("cupyflash.standard_gpu")
    problem = Problem(1, 4, 1024, 1, 1, 8, 8, "float16", Band(None, None), 1.0, 0.0, "ieee", False)
    for dtype, length, share in [
        ("float16", 1, (256, 32, 1)),
        ("float16", 1024, (256, 32, 4)),
        ("float16", 1025, (256, 256, 1)),
        ("float16", 8192, (256, 256, 4)),
        ("float16", 16384, (512, 512, 4)),
        ("float16", 32768, (1024, 1024, 4)),
        ("float16", 32769, (1024, 1024, 0)),
        ("float32", 8192, (512, 512, 4)),
        ("float64", 512, (256, 256, 1)),
    ]:
        of_length = replace(problem, seqlen_k=length, dtype=dtype)
        assert module.row_share(of_length) == share
        _, row_threads, pieces = share
        held = row_threads * pieces * 16 // of_length.itemsize
        assert pieces == 0 or held >= length


@emulated
def test_products_are_batched(gpu):
    """One call over all heads where memory allows it: contiguous (B, H, S, D), and heads of one batch entry else."""
    problem, _, q, k, v, _ = case("plain", "float16")
    for layout, counts in (("bhsd", [4]), ("bshd", [2, 2])):
        gpu.cublas.calls.clear()
        standard.forward(problem, layout, *(gpu.array(swapped(layout, x)) for x in (q, k, v)))
        products = 2 * len(counts)
        assert [call[3] for call in gpu.cublas.calls] == (counts * products)[:products]


@emulated
def test_views_and_a_given_out(gpu):
    """Any strides: what cuBLAS cannot address is copied, what it cannot write goes through a new array."""
    problem, dout, q, k, v, dlse = case("grouped, other lengths, other head dim of v", "float16")
    answer = Answer.of(problem, q, k, v, dout, dlse)
    host = gpu.fake.host

    def spread(x):
        wide = gpu.array(np.full((*x.shape[:3], 2 * x.shape[3] + 1), np.nan, x.dtype))[..., 1::2]
        host(wide)[...] = x
        return wide

    def reversed_rows(x):
        return gpu.array(np.ascontiguousarray(x[:, ::-1]))[:, ::-1]

    for view in (spread, reversed_rows):
        out = spread(np.zeros_like(dout))
        arrays = [view(x) for x in (q, k, v)]
        result, lse = standard.forward(problem, "bshd", *arrays, out)
        assert result is out
        answer.assert_forward_close(host(out), answer.forward[1])
        gradients = standard.backward(problem, "bshd", view(dout), *arrays, out, lse, gpu.array(dlse))
        answer.assert_gradients_close([host(x) for x in gradients])


@emulated
def test_scores_are_scaled_before_they_are_rounded(gpu):
    """q k^T alone would not fit float16."""
    q, v = np.full((1, 2, 1, 64), 100, np.float16), randn(1, 2, 1, 64, seed=1, dtype="float16")
    out, lse = standard.forward(Problem.of(q, q, v, scale=2**-10), "bshd", *map(gpu.array, (q, q, v)))
    np.testing.assert_allclose(gpu.fake.host(lse), 640_000 / 1024 + np.log(2), rtol=1e-3)
    np.testing.assert_allclose(gpu.fake.host(out), np.broadcast_to(v.mean(axis=1, keepdims=True), v.shape), atol=2e-3)


@emulated
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_gradients_of_a_part_of_the_keys(request, place):
    """out and lse may be those of more keys: each part then gets its own gradients, and dq is their sum."""
    problem, dout, q, k, v, dlse = case("plain", "float32")
    answer = Answer.of(problem, q, k, v, dout, dlse)
    out, lse = (x.astype(np.float32) for x in answer.forward)
    gpu = request.getfixturevalue("gpu") if place == "gpu" else None
    to, host = (gpu.array, gpu.fake.host) if gpu else (np.asarray, np.asarray)
    dq, parts = 0, []
    for keys in (slice(None, 2), slice(2, None)):
        own = [np.ascontiguousarray(x[:, keys]) for x in (k, v)]
        part = Problem.of(q, *own)
        gradients = standard.backward(part, "bshd", *map(to, (dout, q, *own, out, lse, dlse)))
        dq = dq + host(gradients[0])
        parts.append([host(x) for x in gradients[1:]])
    answer.assert_gradients_close([dq, *(np.concatenate(x, axis=1) for x in zip(*parts, strict=True))])


@emulated
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_rows_that_see_nothing_take_part_in_nothing(request, place):
    problem, dout, q, k, v, dlse = case("causal, rows that see nothing", "float16")
    answer = Answer.of(problem, q, k, v, dout, dlse)
    for x in (q, dout):
        x[:, :5] = np.nan
    dlse[:, :, :5] = np.nan
    gpu = request.getfixturevalue("gpu") if place == "gpu" else None
    to, host = (gpu.array, gpu.fake.host) if gpu else (np.asarray, np.asarray)
    arrays = [to(x) for x in (q, k, v)]
    out, lse = standard.forward(problem, "bshd", *arrays)
    assert (host(out)[:, :5] == 0).all()
    assert np.isneginf(host(lse)[:, :, :5]).all()
    gradients = standard.backward(problem, "bshd", to(dout), *arrays, out, lse, to(dlse))
    answer.assert_gradients_close([host(x) for x in gradients])


@emulated
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_nothing_to_attend_to(request, place):
    gpu = request.getfixturevalue("gpu") if place == "gpu" else None
    to, host = (gpu.array, gpu.fake.host) if gpu else (np.asarray, np.asarray)
    q, k = to(randn(1, 3, 2, 8, seed=1)), to(randn(1, 0, 2, 8, seed=1))
    problem = Problem.of(q, k, k)
    out, lse = standard.forward(problem, "bshd", q, k, k)
    assert (host(out) == 0).all()
    assert np.isneginf(host(lse)).all()
    assert (host(standard.backward(problem, "bshd", out, q, k, k, out, lse)[0]) == 0).all()


def test_rows_that_see_some_key():
    """Against the mask, pair by pair, for every band of small problems."""
    for sq in range(1, 5):
        for sk in range(1, 5):
            bounds = [None, *range(-5, 6)]
            for first in bounds:
                for last in bounds:
                    band = Band.of(first, last, sq, sk)
                    problem = Problem(1, sq, sk, 1, 1, 8, 8, "float32", band, 1.0, 0.0, "ieee", False)
                    rows, attending = standard._attending(problem)
                    i, j = np.ogrid[:sq, :sk]
                    visible = np.broadcast_to(band.visible(i, j), (sq, sk))
                    assert np.arange(sq)[rows].tolist() == np.flatnonzero(visible.any(axis=1)).tolist()
                    i, j = np.ogrid[: attending.seqlen_q, :sk]
                    same = np.broadcast_to(attending.band.visible(i, j), (attending.seqlen_q, sk))
                    assert (same == visible[rows]).all()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_says_how_much_memory_it_wants(monkeypatch, direction):
    q = np.zeros((1, 4096, 8, 64), np.float32)
    problem = Problem.of(q, q, q)

    def full(*_):
        raise MemoryError("no more")

    monkeypatch.setattr(importlib.import_module("cupyflash.standard_cpu"), direction, full)
    size = {"forward": "0.5", "backward": "1"}[direction]
    lse = np.zeros((1, 8, 4096), np.float32)
    arrays = {"forward": (q, q, q), "backward": (q, q, q, q, q, lse)}[direction]
    with pytest.raises(MemoryError, match=re.escape(f"{size} GiB for 4,096 x 4,096 scores of 8 heads")):
        getattr(standard, direction)(problem, "bshd", *arrays)


@emulated
@pytest.mark.parametrize("direction", ["forward", "backward", "step"])
def test_only_the_allocators_complaint_is_taken_for_one(gpu, monkeypatch, direction):
    """What else fails is not hidden behind it, and what the allocator says is told."""
    from cupy.cuda.memory import OutOfMemoryError

    q = gpu.array(np.zeros((1, 4096, 8, 64), np.float16))
    problem = Problem.of(q, q, q)
    lse = gpu.array(np.zeros((1, 8, 4096), np.float32))
    arrays = {"forward": (q, q, q), "backward": (q, q, q, q, q, lse), "step": (q, q, q, q)}[direction]
    for fault in (OutOfMemoryError(1 << 30, 3 << 30, 4 << 30), RuntimeError("an illegal address"), MemoryError("host")):

        def fails(*_, fault=fault):
            raise fault

        monkeypatch.setattr(gpu.module, "_score_matrix", fails)
        with pytest.raises(type(fault) if type(fault) is RuntimeError else MemoryError) as told:
            getattr(standard, direction)(problem, "bshd", *arrays)
        if type(fault) is OutOfMemoryError:
            size = 0.25 if direction == "forward" else 0.5
            assert f"{size} GiB for 4,096 x 4,096 scores of 8 heads" in str(told.value)
            assert "(attention needs none): Out of memory allocating 1,073,741,824 bytes" in str(told.value)
            assert "limit set to: 4,294,967,296 bytes" in str(told.value)
            assert told.value.__cause__ is fault
        else:
            assert told.value is fault


def test_how_much_memory_it_wants():
    problem = Problem(2, 100, 50, 4, 2, 8, 8, "float16", Band(None, None), 1.0, 0.0, "ieee", False)
    scores = 2 * 4 * 100 * 50
    assert standard.score_bytes(problem, "forward", on_gpu=True) == 2 * scores
    assert standard.score_bytes(problem, "backward", on_gpu=True) == 2 * 2 * scores
    assert standard.score_bytes(problem, "forward", on_gpu=False) == 4 * scores


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_on_a_real_gpu(name, dtype):
    import cupy

    problem, dout, q, k, v, dlse = case(name, dtype)
    answer = Answer.of(problem, q, k, v, dout, dlse)
    for layout in ("bshd", "bhsd"):
        given = [cupy.asarray(swapped(layout, x)) for x in (dout, q, k, v)]
        out, lse = standard.forward(problem, layout, *given[1:])
        answer.assert_forward_close(swapped(layout, out.get()), answer.forward[1])
        assert_lse(lse.get(), answer, q)
        gradients = standard.backward(problem, layout, *given, out, lse, cupy.asarray(dlse))
        answer.assert_gradients_close([swapped(layout, x.get()) for x in gradients])
        if name in KEPT:
            step = standard.step(problem, layout, *given)
            Answer.of(problem, q, k, v, dout).assert_gradients_close([swapped(layout, x.get()) for x in step[2:]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("length", [1000, 4096, 20_000, 70_000])
def test_long_rows_on_a_real_gpu(length, dtype):
    import cupy

    q, k, v, dout = (
        randn(1, rows, 2, 64, seed=seed, dtype=dtype) for seed, rows in enumerate((40, length, length, 40))
    )
    problem = Problem.of(q, k, v, causal=True)
    answer = Answer.of(problem, q, k, v, dout)
    given = [cupy.asarray(x) for x in (dout, q, k, v)]
    out, lse = standard.forward(problem, "bshd", *given[1:])
    answer.assert_forward_close(out.get(), answer.forward[1])
    answer.assert_gradients_close([x.get() for x in standard.backward(problem, "bshd", *given, out, lse)])


@pytest.mark.gpu
def test_too_long_for_a_real_gpu():
    import cupy

    q = cupy.zeros((1, 1 << 20, 1, 8), np.float16)
    with pytest.raises(MemoryError, match="2,048 GiB"):
        cupyflash.standard_attention(q, q, q)


@emulated
def test_scores_that_are_not_finite(gpu):
    """What float16 cannot hold is -inf: a row of nothing else attends to nothing. A NaN stays in its row."""
    q = np.full((1, 3, 1, 64), 300, np.float16)
    q[0, 1], q[0, 2, 0, 0] = 0, np.nan
    k, v = np.full((1, 5, 1, 64), -300, np.float16), randn(1, 5, 1, 64, seed=1, dtype="float16")
    out, lse = (
        gpu.fake.host(x) for x in standard.forward(Problem.of(q, k, v, scale=1.0), "bshd", *map(gpu.array, (q, k, v)))
    )
    assert (out[0, 0] == 0).all()
    assert np.isneginf(lse[0, 0, 0])
    np.testing.assert_allclose(out[0, 1], v.mean(axis=1)[0], atol=2e-3)
    assert np.isnan(out[0, 2]).all()
    assert np.isnan(lse[0, 0, 2])


@pytest.mark.slow
@pytest.mark.skipif(bool(compiling.missing()), reason=compiling.missing() or "NVRTC works")
@pytest.mark.parametrize(
    ("arch", "gpu_name"), [("sm_75", "T4"), ("sm_80", "A100"), ("sm_90", "H200"), ("sm_120", "RTX5090")]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compile_without_a_warning_and_without_a_spill(arch, gpu_name, dtype):
    from cupyflash import standard_gpu

    # A row of a warp, of the largest block, and one that no block can keep.
    for length, softcap in ((1024, 0.0), (16384, 0.0), (16384, 30.0), (100_000, 0.0)):
        problem = Problem(1, length, length, 1, 1, 64, 64, dtype, Band(None, 0), 0.125, softcap, "ieee", False)
        kernel = standard_gpu.kernel("standard_softmax", problem, KNOWN_GPUS[gpu_name])
        log = compiling.compile_cuda(kernel, arch, "--ptxas-options=-v")
        assert "warning" not in log
        used = compiling.usage(log)
        assert used.keys() == {"standard_softmax", "standard_gradient", "standard_rows"}
        assert all(usage.spill_bytes == 0 and usage.stack_bytes == 0 for usage in used.values()), used
        assert all(usage.registers * kernel.threads <= 65536 for usage in used.values())
