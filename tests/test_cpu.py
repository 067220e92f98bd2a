"""The CPU path: float64, threads, memory, tile borders, and whatever hypothesis comes up with."""

import dataclasses
import multiprocessing
import os
import threading
import tracemalloc
from unittest import mock

import numpy as np
import pytest
from backends import CpuBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    DTYPES,
    assert_bitwise,
    assert_close,
    assert_lse_close,
    assert_same_strangeness,
    check,
    max_error,
    naive_backward,
    naive_forward,
)

from cupyflash import cpu, workers
from cupyflash.problem import Band, Problem
from cupyflash.reference import reference_backward, reference_forward

backend = CpuBackend()


@pytest.fixture(autouse=True)
def default_threads():
    yield
    cpu.set_num_threads(None)


def inputs(B, Sq, Sk, H, Hk, D, dtype="float32", Dv=None, seed=0):
    random = np.random.default_rng([seed, Sq, Sk])
    shapes = (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv or D)
    return tuple(random.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)


def everything(problem, q, k, v, seed=0):
    """out, lse, dq, dk, dv."""
    out, lse = backend.forward(problem, q, k, v)
    dout = np.random.default_rng(seed).standard_normal(out.shape).astype(out.dtype)
    return out, lse, *backend.backward(problem, dout, q, k, v, out, lse)


# ---- against float64


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 3)}, {"softcap": 3.0}])
def test_float64_is_computed_in_float64(options):
    q, k, v = inputs(2, 130, 700, 4, 2, 40, "float64")
    problem = Problem.of(q, k, v, **options)
    out, lse, *gradients = everything(problem, q, k, v)
    assert out.dtype == lse.dtype == np.float64
    dout = np.random.default_rng(0).standard_normal(out.shape)
    expected, expected_lse = reference_forward(problem, q, k, v)
    for got, want in zip(
        (out, lse, *gradients), (expected, expected_lse, *reference_backward(problem, dout, q, k, v)), strict=True
    ):
        assert max_error(got, want) < 1e-12


ROWS, KEYS = cpu.TILE_ROWS, cpu.TILE_KEYS


@pytest.mark.parametrize("Sq", [ROWS - 1, ROWS, ROWS + 1, ROWS * cpu.BACKWARD_TILES_PER_BLOCK + 1])
@pytest.mark.parametrize("Sk", [KEYS - 1, KEYS, KEYS + 1, 2 * KEYS + 3])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "top_left", "window": (200, None)}])
def test_tile_borders(Sq, Sk, options):
    q, k, v = inputs(1, Sq, Sk, 1, 1, 16)
    check(backend, Problem.of(q, k, v, **options), q, k, v)


@st.composite
def problems(draw):
    """(problem, q, k, v, dout) with any strides, and NaN or infinity in some places."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    Hk, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    B, Sq, Sk = draw(st.integers(1, 2)), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    D, Dv = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def array(*shape):
        order = draw(st.permutations(range(4)))
        step = [draw(st.sampled_from([1, 1, 2, -1, -2])) for _ in shape]
        stored = random.standard_normal([shape[i] * abs(step[i]) for i in order]).astype(DTYPES[dtype])
        view = stored.transpose(np.argsort(order))[tuple(slice(None, None, s) for s in step)]
        assert view.shape == shape
        return view

    q, k, v, dout = array(B, Sq, Hk * group, D), array(B, Sk, Hk, D), array(B, Sk, Hk, Dv), array(B, Sq, Hk * group, Dv)
    bound = st.none() | st.integers(-Sq - 2, Sk + 2)
    problem = Problem.of(
        q,
        k,
        v,
        scale=draw(st.none() | st.sampled_from([0.0, -0.5, 0.1])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
    )
    band = Band.of(draw(bound), draw(bound), Sq, Sk)
    for x in (q, k, v, dout):
        if draw(st.integers(0, 3)) == 0:
            place = tuple(random.integers(0, n) for n in x.shape)
            # An infinite dout is left out: where its terms cancel depends on how D is summed up.
            x[place] = np.nan if x is dout else draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return dataclasses.replace(problem, band=band), q, k, v, dout


SMALL_TILES = st.fixed_dictionaries(
    {
        "TILE_ROWS": st.integers(1, 20),
        "TILE_KEYS": st.integers(1, 20),
        "TILES_PER_BLOCK": st.integers(1, 3),
        "BACKWARD_TILES_PER_BLOCK": st.integers(1, 3),
        "CACHE_BYTES": st.sampled_from([1, 1 << 12, 1 << 14]),
        "MIN_PARALLEL_WORK": st.sampled_from([0, 1 << 60]),
        "SLACK": st.sampled_from([0.0, 0.5, 10.0]),
    }
)


def from_stored_out(problem, out, dout, q, k, v):
    """The gradients with delta = rowsum(dO * O) of O as it is stored, which rounding moves as a gradient of LSE would.

    Where few keys are seen dP - delta cancels, and this is what is left.
    """
    lost = out - out.astype(q.dtype).astype(np.float64)
    return reference_backward(problem, dout, q, k, v, (dout.astype(np.float64) * lost).sum(axis=-1).swapaxes(1, 2))


@given(problems(), SMALL_TILES)
@settings(max_examples=300, deadline=None)
def test_any_problem_in_tiles_of_any_size(case, tiles):
    problem, q, k, v, dout = case
    cpu.set_num_threads(3)
    with mock.patch.multiple(cpu, **tiles):
        out, lse = backend.forward(problem, q, k, v)
        gradients = backend.backward(problem, dout, q, k, v, out, lse)
    expected, expected_lse = reference_forward(problem, q, k, v)
    expected = expected, *reference_backward(problem, dout, q, k, v)
    assert_lse_close(lse, expected_lse)
    results = list(zip((out, *gradients), expected, strict=True))
    for got, want in results:
        assert_same_strangeness(got, want)
    if all(np.isfinite(x.astype(np.float64)).all() for x in (q, k, v, dout)):
        assert_close(out, expected[0], naive_forward(problem, q, k, v))
        naive = naive_backward(problem, dout, q, k, v)
        for (got, want), *others in zip(
            results[1:], naive, from_stored_out(problem, expected[0], dout, q, k, v), strict=True
        ):
            farthest = max(others, key=lambda other: max_error(other, want))
            assert_close(got, want, farthest, "gradient")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nan_and_infinity_in_many_places_of_large_tiles(dtype):
    """Tiles with and without hidden pairs, several blocks, and values that are not finite in all of them."""
    q, k, v = inputs(2, 600, 1100, 2, 1, 16, dtype)
    random = np.random.default_rng(1)
    for x in (q, k, v):
        for value in (np.nan, np.inf, -np.inf):
            rows = random.integers(0, x.shape[1], 2)
            x[1, rows, 0, random.integers(0, x.shape[3], 2)] = value
    problem = Problem.of(q, k, v, window=(300, 50))
    out, lse = backend.forward(problem, q, k, v)
    expected, expected_lse = reference_forward(problem, q, k, v)
    assert_same_strangeness(out, expected)
    assert_same_strangeness(lse, expected_lse)
    dout = random.standard_normal(out.shape).astype(q.dtype)
    dout[1, 77, 1, 3] = np.nan
    for got, want in zip(
        backend.backward(problem, dout, q, k, v, out, lse), reference_backward(problem, dout, q, k, v), strict=True
    ):
        assert_same_strangeness(got, want)


def test_values_as_large_as_the_dtype_holds():
    """The sum of P V must not overflow where the mean does not."""
    q, k, v = inputs(1, 8, 1000, 1, 1, 16)
    v[...] = 3e38
    out, _ = backend.forward(Problem.of(q, k, v), q, k, v)
    np.testing.assert_allclose(out, 3e38, rtol=1e-5)


# ---- threads


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1300, 1300, 2, 2, 32), {"causal": True}),
        ((2, 700, 900, 8, 2, 32), {"window": (150, 10)}),
        ((3, 200, 300, 6, 3, 16), {"softcap": 2.0}),
        ((1, 1, 3000, 16, 2, 64), {}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_do_not_depend_on_the_number_of_threads(shape, options, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "MIN_PARALLEL_WORK", 0)
    q, k, v = inputs(*shape, dtype)
    problem = Problem.of(q, k, v, **options)
    results = []
    for threads in (1, 2, 3, 8):
        cpu.set_num_threads(threads)
        results.append(everything(problem, q, k, v))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_bitwise(got, want)


def test_calls_from_several_threads(monkeypatch):
    """They share the worker threads, and BLAS has its own threads back when the last is done."""
    from threadpoolctl import threadpool_info, threadpool_limits

    monkeypatch.setattr(cpu, "MIN_PARALLEL_WORK", 0)
    cpu.set_num_threads(3)
    q, k, v = inputs(1, 400, 400, 4, 4, 16)
    problem = Problem.of(q, k, v, causal=True)
    expected = everything(problem, q, k, v)
    results = {}

    def call(i):
        results[i] = [everything(problem, q, k, v) for _ in range(3)]

    with threadpool_limits(2):
        before = [(info["filepath"], info["num_threads"]) for info in threadpool_info()]
        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        after = [(info["filepath"], info["num_threads"]) for info in threadpool_info()]
    assert len(results) == 4
    for arrays in (arrays for repeats in results.values() for arrays in repeats):
        for got, want in zip(arrays, expected, strict=True):
            assert_bitwise(got, want)
    assert after == before


def test_number_of_threads(monkeypatch):
    monkeypatch.delenv(workers.ENVIRONMENT, raising=False)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert cpu.get_num_threads() == available
    monkeypatch.setenv(workers.ENVIRONMENT, "3")
    assert cpu.get_num_threads() == 3
    cpu.set_num_threads(np.int64(5))
    assert cpu.get_num_threads() == 5
    with pytest.raises(ValueError, match="count is 0; expected at least 1"):
        cpu.set_num_threads(0)
    with pytest.raises(TypeError):
        cpu.set_num_threads(2.5)
    cpu.set_num_threads(None)
    monkeypatch.setenv(workers.ENVIRONMENT, "all")
    with pytest.raises(ValueError, match="CUPYFLASH_NUM_THREADS is 'all'; expected a positive integer"):
        cpu.get_num_threads()


@pytest.mark.parametrize("failing", [0, 5, 19])
def test_error_in_a_worker_reaches_the_caller(failing):
    handled = []

    def start():
        def handle(item):
            if item == failing:
                raise RuntimeError(f"item {item}")
            handled.append(item)

        return handle

    with pytest.raises(RuntimeError, match=f"item {failing}"):
        workers.run(start, range(20), threads=4)
    assert failing not in handled
    workers.run(lambda: handled.append, range(100, 120), threads=4)
    assert set(range(100, 120)) <= set(handled)


def test_error_in_the_backward_pass_stops_those_who_wait(monkeypatch):
    monkeypatch.setattr(cpu, "MIN_PARALLEL_WORK", 0)
    cpu.set_num_threads(4)
    q, k, v = inputs(1, 3000, 600, 1, 1, 8)
    problem = Problem.of(q, k, v)
    out, lse = backend.forward(problem, q, k, v)
    attend = cpu.Backward.attend

    def fail(self, tile, keys, dK, dV):
        if tile.queries[0] >= 1024:
            raise RuntimeError("from a worker")
        attend(self, tile, keys, dK, dV)

    monkeypatch.setattr(cpu.Backward, "attend", fail)
    with pytest.raises(RuntimeError, match="from a worker"):
        backend.backward(problem, out, q, k, v, out, lse)


def _forked(queue, problem, q, k, v):
    queue.put(everything(problem, q, k, v))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(cpu, "MIN_PARALLEL_WORK", 0)
    cpu.set_num_threads(2)
    q, k, v = inputs(1, 300, 300, 2, 2, 16)
    problem = Problem.of(q, k, v)
    expected = everything(problem, q, k, v)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_forked, args=(queue, problem, q, k, v))
    child.start()
    results = queue.get(timeout=30)
    child.join(30)
    for got, want in zip(results, expected, strict=True):
        assert_bitwise(got, want)


# ---- memory


def peak(call):
    """Bytes that a call has allocated at most at one time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_linear_in_the_length(dtype):
    """Far below the scores, and in the forward pass independent of the length."""
    forward, backward = [], []
    # How many threads hold their tiles at the same time is chance: one for what is compared, two for what is bounded.
    for S, threads in ((1024, 1), (4096, 1), (4096, 2)):
        cpu.set_num_threads(threads)
        q, k, v = inputs(1, S, S, 1, 1, 64, dtype)
        problem = Problem.of(q, k, v, causal=True)
        out, lse = np.empty_like(q), np.empty((1, 1, S), np.float32)
        gradients = [np.empty_like(x) for x in (q, k, v)]
        forward.append(peak(lambda: cpu.forward(problem, q, k, v, out, lse)))  # noqa: B023
        backward.append(peak(lambda: cpu.backward(problem, out, q, k, v, out, lse, *gradients)))  # noqa: B023
    MiB = 2**20
    assert forward[1] < 1.5 * forward[0]
    assert forward[2] < 8 * MiB
    sums = 0 if dtype == "float32" else 2 * 4096 * 64 * 4
    assert backward[2] < 8 * MiB + sums
    assert max(forward[2], backward[2]) < 4096 * 4096 * 4 / 4
