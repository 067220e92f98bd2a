"""What only a GPU can show: memory, streams, graphs, determinism under load, addresses beyond 32 bits, registers.

Values are compared with float64 in the other tests, which run on every backend. Here most right answers are the bits of
an equal computation without the difficulty, or known exactly.
"""

import contextlib
import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor

import emulated_cases
import numpy as np
import pytest
import run_cases
from backends import GpuBackend
from oracles import DTYPES, Answer, assert_bitwise, assert_close, assert_lse_close, naive_backward, naive_forward

import cupyflash
from cupyflash import dispatch, heuristics
from cupyflash.engine import Engine
from cupyflash.problem import Problem
from cupyflash.reference import reference_backward, reference_forward
from cupyflash.tiles import TileConfig, tile_head_dims

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

KINDS = [("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", None)]  # dtype, precision
every_kind = pytest.mark.parametrize(("dtype", "precision"), KINDS)
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}

SOURCE = r"""
__device__ void wait(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

extern "C" __global__ void spin(long long cycles) { wait(cycles); }

extern "C" __global__ void fill_late(unsigned short* array, long long size, unsigned short value, long long cycles) {
    wait(cycles);
    for (long long n = blockIdx.x * blockDim.x + threadIdx.x; n < size; n += gridDim.x * blockDim.x)
        array[n] = value;
}
"""
MILLISECOND = 2_000_000  # clock cycles of a GPU at 2 GHz, or a little more


@pytest.fixture(scope="module")
def slow():
    """A module with the kernels ``spin`` and ``fill_late``."""
    return cupy.RawModule(code=SOURCE)


@pytest.fixture
def runtime():
    """The runtime behind the public functions."""
    from cupyflash import gpu

    return gpu._engine._runtime


def to_gpu(host):
    """As words: not every library that moves bits knows bfloat16."""
    words = np.ascontiguousarray(host).view(WORDS[host.itemsize])
    return cupy.asarray(words).view(host.dtype)


def to_host(array):
    return cupy.asnumpy(array.view(WORDS[array.itemsize])).view(array.dtype)


def randn(*shape, dtype="float16", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(DTYPES[dtype])


def on_host(B, Sq, Sk, H, Hk, D, dtype="float16", seed=0):
    """(q, k, v, dout)."""
    shapes = (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, D), (B, Sq, H, D)
    return [randn(*shape, dtype=dtype, seed=4 * seed + n) for n, shape in enumerate(shapes)]


def copies(count, *arrays):
    """Each with its one batch entry so many times: float64 is asked about one."""
    return [np.repeat(x, count, axis=0) for x in arrays]


def both(q, k, v, dout, deterministic=True, dlse=None, **options):
    """(out, lse, dq, dk, dv)."""
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **options)
    return out, lse, *gradients


def assert_same_bits(got, expected):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=False):
        x, y = (a.view(WORDS[a.itemsize]) for a in (x, y))
        assert x.shape == y.shape, name
        different = int(cupy.count_nonzero(x != y))
        assert different == 0, f"{name} differs in {different} of {x.size} elements"


def assert_right(results, arrays, precision=None, **options):
    """out, lse, dq, dk and dv against float64."""
    q, k, v, dout = arrays
    p = Problem.of(q, k, v, precision=precision, **options)
    out, lse, *gradients = map(to_host, results)
    expected, expected_lse = reference_forward(p, q, k, v)
    assert_close(out, expected, naive_forward(p, q, k, v), what="out")
    assert_lse_close(lse, expected_lse)
    expected, naive = reference_backward(p, dout, q, k, v), naive_backward(p, dout, q, k, v)
    for name, *three in zip(("dq", "dk", "dv"), gradients, expected, naive, strict=True):
        assert_close(*three, kind="gradient", what=name)


# ---- the gradient of LSE


@every_kind
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 20), "softcap": 5.0}])
def test_gradient_of_lse(dtype, precision, deterministic, D, options):
    """Bound calls with it, in both strides, and without it take turns; the first rows of a causal mask see nothing."""
    host = on_host(2, 515, 390, 4, 2, D, dtype)
    dlse = randn(2, 4, 515, dtype="float32", seed=9)
    if options.get("causal"):
        dlse[..., : 515 - 390] = np.nan
    arrays, transposed = [to_gpu(x) for x in host], to_gpu(dlse.swapaxes(1, 2)).swapaxes(1, 2)
    answers = [Answer.of(Problem.of(*host[:3], precision=precision, **options), *host, x) for x in (None, dlse)]
    for given, answer in [(None, answers[0]), (to_gpu(dlse), answers[1]), (transposed, answers[1])] * 2:
        results = both(*arrays, deterministic=deterministic, dlse=given, precision=precision, **options)
        answer.assert_gradients_close([to_host(x) for x in results[2:]])


@every_kind
def test_gradients_through_merging_are_those_of_the_whole(dtype, precision):
    """Two parts of the keys, by the derivatives of what ``merge_attention`` computes."""
    host = on_host(2, 300, 515, 4, 2, 64, dtype)
    q, k, v = map(to_gpu, host[:3])
    dlse = randn(2, 4, 300, dtype="float32", seed=9)
    parts = [slice(0, 200), slice(200, None)]
    calls = [cupyflash.attention_vjp(q, k[:, part], v[:, part], return_lse=True, precision=precision) for part in parts]
    outs, lses = [to_host(call[0]).astype(np.float64) for call in calls], [to_host(call[1]) for call in calls]
    weights = [np.exp(lse - np.logaddexp(*lses)) for lse in lses]
    along = ((outs[0] - outs[1]) * host[3]).sum(axis=-1).swapaxes(1, 2) * weights[0] * weights[1]
    gradients = [
        vjp(
            to_gpu((weight.swapaxes(1, 2)[..., None] * host[3].astype(np.float32)).astype(host[3].dtype)),
            to_gpu((weight * dlse + sign * along).astype(np.float32)),
        )
        for (_, _, vjp), weight, sign in zip(calls, weights, (1, -1), strict=True)
    ]
    (dq_a, *first), (dq_b, *second) = ([to_host(x) for x in three] for three in gradients)
    dk, dv = (np.concatenate(pair, axis=1) for pair in zip(first, second, strict=True))
    answer = Answer.of(Problem.of(*host[:3], precision=precision), *host, dlse)
    answer.assert_gradients_close((dq_a.astype(np.float32) + dq_b.astype(np.float32), dk, dv))


# ---- memory


def blocks_of_512(*sizes):
    """What CuPy's pool takes for allocations of these sizes."""
    return sum(-(-size // 512) * 512 for size in sizes)


def growth(call):
    """Bytes that a call takes beyond its arguments at its peak: what a pool without free blocks has to add."""
    call()  # compiled, loaded, planned; what a stream is given once
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        call()
        gc.collect()
        pool.free_all_blocks()
        assert pool.total_bytes() == 0
        results = call()
        taken = pool.total_bytes()
        cupy.cuda.get_current_stream().synchronize()
        del results
    return taken


@every_kind
@pytest.mark.parametrize(("S", "H", "Hk"), [(1000, 8, 8), (4096, 8, 2)])
def test_forward_takes_its_results_only(dtype, precision, S, H, Hk):
    q, k, v, _ = map(to_gpu, on_host(2, S, S, H, Hk, 64, dtype))
    taken = growth(lambda: cupyflash.attention(q, k, v, causal=True, precision=precision, return_lse=True))
    assert taken == blocks_of_512(q.nbytes, 4 * 2 * H * S)
    out = cupy.empty_like(q)
    assert growth(lambda: cupyflash.attention(q, k, v, causal=True, precision=precision, out=out)) == 0


@every_kind
@pytest.mark.parametrize(("S", "H", "Hk"), [(1000, 8, 8), (4096, 8, 2)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_takes_its_results_and_one_workspace(runtime, dtype, precision, S, H, Hk, deterministic):
    """Delta, and where dQ is summed in another dtype a float32 dQ; heads that share keys add nothing.

    Family "wgmma" has a counter per query tile beside it, and one more.
    """
    q, k, v, dout = map(to_gpu, on_host(2, S, S, H, Hk, 64, dtype))
    options = {"causal": True, "precision": precision}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    options["deterministic"] = deterministic
    task, tiles, _ = dispatch.plan_backward(Problem.of(q, k, v, **options), 16, runtime.limits()).configs[0]
    workspace = -(-2 * H * S // 64) * 64
    query_tiles = 2 * H * -(-S // tiles.Br)
    assert (task == "backward") == (not deterministic or tiles.family == "wgmma")
    if task == "backward" and tiles.family != "simt":
        workspace += query_tiles * tiles.Br * tile_head_dims(64, 64)[0]
    if tiles.family == "wgmma":
        workspace += query_tiles + 1
    taken = growth(lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, **options))
    assert taken == blocks_of_512(q.nbytes, k.nbytes, v.nbytes, 4 * workspace)


@every_kind
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("Sq", "Sk", "options"),
    [
        (257, 130, {"causal": True}),
        (65, 193, {}),
        (130, 257, {"window": (20, 3)}),
    ],  # the first has rows that see nothing
)
def test_nothing_is_read_before_it_is_written(dtype, precision, deterministic, Sq, Sk, options):
    """All memory that a call is given, results and workspace, is full of NaN."""
    pool = cupy.cuda.MemoryPool()

    def poisoned(size):
        pointer = pool.malloc(size)
        if size:
            pointer.memset_async(0xFF, size, cupy.cuda.get_current_stream())
        return pointer

    host = on_host(2, Sq, Sk, 4, 2, 80, dtype)
    arrays = [to_gpu(x) for x in host]
    with cupy.cuda.using_allocator(poisoned):
        assert np.isnan(to_host(cupy.empty(1000, np.float32))).all()
        results = both(*arrays, deterministic=deterministic, precision=precision, **options)
    if precision == "tf32":  # its tolerance is another; the reference is itself without NaN
        expected = both(*arrays, deterministic=deterministic, precision=precision, **options)
        assert_same_bits([results[n] for n in (0, 1)], [expected[n] for n in (0, 1)])
        for got, want in zip(map(to_host, results[2:]), map(to_host, expected[2:]), strict=True):
            assert np.isfinite(want).all()
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    else:
        assert_right(results, host, **options)


# ---- determinism


@contextlib.contextmanager
def busy_gpu(slow):
    """Short kernels of all sizes on another stream, half a second of them: longer than what is launched meanwhile."""
    sms = cupy.cuda.Device().attributes["MultiProcessorCount"]
    sizes = np.random.default_rng(0).integers(1, sms, 900)
    spin = slow.get_function("spin")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for size in sizes:
            spin((int(size),), (256,), (np.int64(MILLISECOND // 2),))
    yield
    assert not stream.done, "the other stream ended too early to disturb anything"
    stream.synchronize()


def repeated(slow, call, times=20):
    """The results of a call, `times` times on a stream of its own while the GPU is busy."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # the arguments are there
    with stream:
        call()  # compiled and loaded
        stream.synchronize()
        with busy_gpu(slow):
            results = [call() for _ in range(times)]
            stream.synchronize()
    return results


@every_kind
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (256, 0)}, {"softcap": 20.0}])
def test_forward_is_always_deterministic(slow, dtype, precision, options):
    q, k, v, _ = map(to_gpu, on_host(2, 1025, 1025, 8, 2, 128, dtype))
    first, *others = repeated(
        slow, lambda: cupyflash.attention(q, k, v, return_lse=True, precision=precision, **options)
    )
    for other in others:
        assert_same_bits(other, first)


@every_kind
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (256, 0)}, {"softcap": 20.0}, {}])
@pytest.mark.parametrize(("Sq", "Sk"), [(1025, 1025), (333, 1777)])
def test_case_109_deterministic_backward(slow, dtype, precision, options, Sq, Sk):
    q, k, v, dout = map(to_gpu, on_host(2, Sq, Sk, 8, 2, 128, dtype))
    options = {"precision": precision, **options}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    first, *others = repeated(
        slow, lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=True, **options)
    )
    for other in others:
        assert_same_bits((out, lse, *other), (out, lse, *first))


def test_deterministic_and_summed_gradients_agree():
    host = on_host(2, 257, 257, 8, 2, 64)
    arrays = [to_gpu(x) for x in host]
    summed, fixed = (both(*arrays, deterministic=flag, causal=True) for flag in (False, True))
    assert_right(summed, host, causal=True)
    assert_right(fixed, host, causal=True)


def on_four_streams(arrays, **options):
    """Results of 40 calls of ``both``, beside one another as far as the GPU has room."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.Device().synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with stream:
                results.append(both(*arrays, **options))
    cupy.cuda.Device().synchronize()
    return results


@pytest.mark.parametrize("D", [64, 128])
def test_blocks_that_wait_for_one_another_share_the_gpu(D):
    """Deterministic backwards on several streams: each runs as a whole, or a block would wait for one without room."""
    arrays = [to_gpu(x) for x in on_host(2, 1100, 1500, 20, 4, D)]
    expected = both(*arrays)
    for result in on_four_streams(arrays):
        assert_same_bits(result, expected)


def test_blocks_that_share_out_keys_share_the_gpu():
    """The same of backwards whose blocks wait for one another's parts of dk and dv, which are added in a fixed order.

    What is added to dq in any order, in float32, is rounded to neighbours of float16 at most.
    """
    host = on_host(1, 1100, 1500, 20, 4, 64)
    arrays = [to_gpu(x) for x in host]
    expected = both(*arrays, deterministic=False)
    assert_right(expected, host)
    neighbours = 2.0**-10 * float(abs(expected[2]).max())
    for out, lse, dq, dk, dv in on_four_streams(arrays, deterministic=False):
        assert_same_bits((out, lse, expected[2], dk, dv), expected)
        assert float(abs(dq.astype(np.float32) - expected[2].astype(np.float32)).max()) <= neighbours


# ---- streams, threads, graphs


def test_case_113_everything_runs_on_the_current_stream(slow):
    """Inputs that come late, and outputs that are read in order, on a stream that waits for no other."""
    fill_late = slow.get_function("fill_late")
    stream = cupy.cuda.Stream(non_blocking=True)
    ones = np.ones(1, np.float16).view(np.uint16)[0]
    with stream:
        arrays = [cupy.ones((2, 130, 4, 64), np.float16) for _ in range(4)]
        for deterministic in (False, True):
            both(*arrays, deterministic=deterministic)  # compiled and loaded
        for repeat in range(20):
            for array in arrays:
                array.view(np.uint16).fill(0xFFFF)
                arguments = array, np.int64(array.size), ones, np.int64(5 * MILLISECOND)
                fill_late((32,), (256,), arguments)
            out, lse, dq, dk, dv = both(*arrays, deterministic=repeat % 2 == 0)
            assert not stream.done, "the inputs were not late"
            stream.synchronize()
            assert (to_host(out) == 1).all()
            np.testing.assert_allclose(to_host(lse), 64 / 8 + np.log(130), rtol=1e-6)
            assert (to_host(dq) == 0).all()
            assert (to_host(dk) == 0).all()
            np.testing.assert_allclose(to_host(dv).astype(float), 1, rtol=2e-3)


def test_threads_with_streams_of_their_own():
    """The same kinds of calls at the same time; each thread gets its own results."""
    arrays = [[to_gpu(x) for x in on_host(2, 257, 257, 4, 2, 64, seed=seed)] for seed in range(2)]
    expected = [both(*four, causal=True) for four in arrays]
    cupy.cuda.Device().synchronize()

    def work(mine):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for _ in range(50):
                results = both(*arrays[mine], causal=True)
                assert_same_bits(results, expected[mine])
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [True, True]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("length", "options"), [(257, {"causal": True}), (1100, {})])
def test_graphs_are_replayed_with_new_data(deterministic, length, options):
    """Forward into an array of the caller, and backward, captured once; they keep the memory that they share."""
    host = [on_host(2, length, length, 4, 2, 64, seed=seed) for seed in range(3)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        q, k, v, dout = arrays = [to_gpu(x) for x in host[0]]
        target, lse = cupyflash.attention(q, k, v, return_lse=True, **options)

        def run():
            cupyflash.attention(q, k, v, out=target, **options)
            return cupyflash.attention_backward(dout, q, k, v, target, lse, deterministic=deterministic, **options)

        run()  # nothing is compiled, loaded or taken from the driver during capture
        stream.synchronize()
        stream.begin_capture()
        gradients = run()
        graph = stream.end_capture()
        others = [cupy.full(size, 7, np.uint8) for size in [2**n for n in range(12, 26)] * 2]  # from the same pool

        for data in host[1:]:
            for array, x in zip(arrays, data, strict=True):
                array.set(x)
            expected = both(*map(to_gpu, data), deterministic=deterministic, **options)
            lse[...] = expected[1]
            for result in (target, *gradients):
                result.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            if deterministic:
                assert_same_bits((target, lse, *gradients), expected)
            else:
                assert_right((target, lse, *gradients), data, **options)
        assert all((other == 7).all() for other in others)


# ---- the first FlashAttention


@pytest.mark.parametrize("case", [name for name, c in emulated_cases.CASES.items() if c.kind in emulated_cases.V1])
def test_v1_is_right(case):
    """The cases that the emulated device runs in several orders."""
    tiles = dict(emulated_cases.KINDS[emulated_cases.CASES[case].kind].tiles)
    run_cases.run_on([GpuBackend(tiles)] * 2, case)


@pytest.mark.parametrize("case", [name for name, c in emulated_cases.CASES.items() if c.kind.startswith("split")])
def test_split_float32_is_right(runtime, case):
    """The cases of the emulated device: problems so small that calls take plain multiply-adds."""
    if runtime.limits().arch not in heuristics.SPLIT_ARCHS:
        pytest.skip("float32 is split on sm_80 and sm_90 only")
    tiles = dict(emulated_cases.KINDS[emulated_cases.CASES[case].kind].tiles)
    run_cases.run_on([GpuBackend(tiles)], case)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_v1_gives_the_same_bits_in_every_run(D, causal):
    """dQ is summed in memory by the one block that owns it."""
    q, k, v, dout = (cupy.random.standard_normal((2, 2000, 8, D), cupy.float32).astype(np.float16) for _ in range(4))
    first = None
    for _ in range(5):
        out, lse, vjp = cupyflash.attention_vjp(q, k, v, causal=causal, return_lse=True, algorithm="v1")
        results = (out, lse, *vjp(dout))
        first = first or results
        assert_same_bits(results, first)


# ---- Hopper: blocks that stay, and what they count their tiles with


@pytest.fixture
def hopper(runtime):
    """The runtime, without tile counters; afterwards no kernel has left one other than it was."""
    if runtime.limits().arch != 90:
        pytest.skip("family wgmma runs on sm_90 only")
    cupy.cuda.Device().synchronize()
    runtime._tile_counters.clear()
    yield runtime
    cupy.cuda.Device().synchronize()
    for counter in runtime._tile_counters.values():
        assert (to_host(counter) == 0).all()


@pytest.fixture
def counting(hopper):
    """Attention by blocks that take the next tile from a counter, whatever is tuned."""
    engine = Engine(hopper, {"forward": TileConfig("wgmma", 128, 128, 12, 2)})

    def forward(q, k, v, out=None, lse=None, **options):
        out = cupy.empty_like(q) if out is None else out
        engine.forward(Problem.of(q, k, v, **options), q, k, v, out, lse)
        return out

    yield forward
    assert hopper._tile_counters


@pytest.mark.parametrize(
    "case", [name for name, c in emulated_cases.CASES.items() if c.kind in (*emulated_cases.HOPPER, "four consumers")]
)
def test_hoppers_kernels_are_right(hopper, case):
    """The cases that the emulated device runs in several orders."""
    tiles = dict(emulated_cases.KINDS[emulated_cases.CASES[case].kind].tiles)
    run_cases.run_on([GpuBackend(tiles)] * 2, case)
    assert hopper._tile_counters or not tiles["forward"].dynamic


def forward_by(family, runtime, q, k, v, **options):
    """out and lse, NumPy arrays, by the family's first choice of tiles."""
    p = Problem.of(q, k, v, **options)
    config = next(c for c in heuristics.candidates("forward", p, runtime.limits()) if c.family == family)
    return GpuBackend({"forward": config}).forward(p, q, k, v)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 7)}, {"causal": True, "softcap": 9.0}])
def test_more_tiles_than_multiprocessors(hopper, dtype, D, Dv, options):
    """Two families, and float64; all copies of a batch entry have the bits of the first."""
    q, k, _, _ = on_host(1, 1100, 1000, 10, 2, D, dtype)
    v = randn(1, 1000, 2, Dv, dtype=dtype, seed=9)
    p = Problem.of(q, k, v, **options)
    expected, expected_lse = reference_forward(p, q, k, v)
    naive = naive_forward(p, q, k, v)
    q, k, v = copies(4, q, k, v)
    for family in ("wgmma", "mma"):
        out, lse = forward_by(family, hopper, q, k, v, **options)
        for n in range(4):
            assert_bitwise(out[n], out[0])
            assert_bitwise(lse[n], lse[0])
        assert_close(out[:1], expected, naive, what=f"out by {family}")
        assert_lse_close(lse[:1], expected_lse)


@pytest.mark.parametrize("options", [{}, {"causal": True}])
@pytest.mark.parametrize("steep", [False, True])
def test_a_thousand_times_the_same_bits(counting, options, steep):
    """Who computes which tile depends on the clock; what a tile becomes does not, repeated or not."""
    q, k, v, _ = on_host(2, 1100, 1000, 20, 4, 128)
    if steep:  # the weights of some tiles overflow
        q[:, :, ::3] *= 8
    q, k, v = map(to_gpu, (q, k, v))
    shape = (2, 20, 1100)  # of lse
    first_lse, lse = cupy.empty(shape, np.float32), cupy.empty(shape, np.float32)
    first = counting(q, k, v, lse=first_lse, **options)
    for _ in range(1000):
        assert_same_bits((counting(q, k, v, lse=lse, **options), lse), (first, first_lse))


def test_a_captured_forward_is_replayed_on_two_streams_at_once(counting):
    """They would share a counter: a captured launch has none."""
    host = on_host(2, 1100, 1000, 20, 4, 128)
    capturing, *streams = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    with capturing:
        q, k, v = map(to_gpu, host[:3])
        expected = counting(q, k, v, causal=True)
        targets = [cupy.full_like(expected, np.nan) for _ in streams]
        graphs = []
        for target in targets:
            counting(q, k, v, target, causal=True)
            target.fill(np.nan)
            capturing.synchronize()
            capturing.begin_capture()
            counting(q, k, v, target, causal=True)
            graphs.append(capturing.end_capture())
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            graph.launch(stream)
        for stream, target in zip(streams, targets, strict=True):
            stream.synchronize()
            assert_same_bits([target], [expected])
            target.fill(np.nan)
        cupy.cuda.Device().synchronize()


def test_streams_have_counters_of_their_own(counting):
    q, k, v, _ = map(to_gpu, on_host(2, 1100, 1000, 20, 4, 128))
    expected = counting(q, k, v, causal=True)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.Device().synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with stream:
                results.append(counting(q, k, v, causal=True))
    cupy.cuda.Device().synchronize()
    for result in results:
        assert_same_bits([result], [expected])


# ---- Hopper: a backward whose tiles are given


@pytest.fixture
def on_hopper(runtime):
    if runtime.limits().arch != 90:
        pytest.skip("family wgmma runs on sm_90 only")


@pytest.mark.parametrize(
    "case", [name for name, c in emulated_cases.CASES.items() if c.kind in emulated_cases.BACKWARD_HOPPER]
)
def test_hoppers_backward_is_right(on_hopper, case):
    """The cases that the emulated device runs in several orders."""
    tiles = dict(emulated_cases.KINDS[emulated_cases.CASES[case].kind].tiles)
    run_cases.run_on([GpuBackend(tiles)] * 2, case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("D", "Dv", "config"),
    [
        (64, 64, TileConfig("wgmma", 128, 128, 12, 2, rounded_queries=32)),
        (128, 128, TileConfig("wgmma", 64, 128, 12, 2)),
        (128, 128, TileConfig("wgmma", 64, 128, 12, 2, first_stores=False)),
        (128, 128, TileConfig("wgmma", 80, 128, 12, 2, rounded_queries=80)),
        (64, 64, TileConfig("wgmma", 128, 128, 12, 2, rounded_queries=32, folded_rows=True)),
        (128, 128, TileConfig("wgmma", 64, 128, 12, 2, folded_rows=True)),
        (128, 128, TileConfig("wgmma", 80, 128, 12, 2, rounded_queries=32, folded_rows=True)),
        (128, 64, TileConfig("wgmma", 64, 128, 12, 2, rounded_queries=64)),
        (256, 256, TileConfig("wgmma", 64, 64, 16, 2)),
        (256, 256, TileConfig("wgmma", 64, 64, 16, 2, rounded_weights=True)),
        (256, 256, TileConfig("wgmma", 64, 64, 16, 2, dq_first=True)),
        (192, 128, TileConfig("wgmma", 64, 64, 16, 3)),
        (136, 256, TileConfig("wgmma", 64, 64, 16, 2)),
        (224, 160, TileConfig("wgmma", 64, 64, 16, 2)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 7)}, {"causal": True, "softcap": 9.0}])
def test_hoppers_backward_with_many_tiles(on_hopper, dtype, D, Dv, config, options):
    """More blocks than multiprocessors, all adding to dQ; with a cap, tiles that have registers left for it."""
    q, k, _, _ = on_host(1, 1100, 1000, 5, 1, D, dtype)
    v, dout = randn(1, 1000, 1, Dv, dtype=dtype, seed=9), randn(1, 1100, 5, Dv, dtype=dtype, seed=10)
    many = copies(20, q, k, v, dout)
    small, p = (Problem.of(*arrays, **options) for arrays in ((q, k, v), many[:3]))
    if p.softcap:
        config = dataclasses.replace(config, Br=64, values_in_registers=False)
    backend = GpuBackend({"backward": config})
    results = backend.forward(p, *many[:3])
    for dlse in (None, randn(1, 5, 1100, dtype="float32", seed=11)):
        answer = Answer.of(small, q, k, v, dout, dlse)
        given = None if dlse is None else copies(20, dlse)[0]
        gradients = backend.backward(p, many[3], *many[:3], *results, given)
        for n in range(20):
            answer.assert_gradients_close([x[n : n + 1] for x in gradients])


# ---- sizes and addresses


@pytest.mark.parametrize(("B", "H"), [(70_000, 1), (1, 70_000)])
@pytest.mark.parametrize("causal", [False, True])
def test_more_than_65535_heads(B, H, causal):
    """Seven problems over and over: all results are those of the first seven."""
    host = on_host(7, 16, 16, 1, 1, 16)
    axis = 0 if B > 1 else 2
    arrays = [to_gpu(np.concatenate([x if axis == 0 else x.swapaxes(0, 2)] * 10_000, axis=axis)) for x in host]
    results = both(*arrays, causal=causal, deterministic=False)  # each row of dq has one block: nothing to be summed
    first = [x[:7] if axis == 0 else x.swapaxes(0, 2)[:7] for x in (results[0], *results[2:])]
    lse = results[1].reshape(70_000, 1, 16)
    assert_right((first[0], lse[:7], *first[1:]), host, causal=causal)
    for got in (results[0], *results[2:], lse):
        problems = cupy.ascontiguousarray(got if axis == 0 or got is lse else got.swapaxes(0, 2))
        words = problems.view(WORDS[problems.itemsize]).reshape(10_000, 7, -1)
        assert int(cupy.count_nonzero(words != words[:1])) == 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_case_67_more_than_65535_tiles(dtype):
    """One key: every query gets its value, exactly; 4,194,241 ones are summed exactly in float32."""
    Sq, dtype = 64 * 65_535 + 1, np.dtype(dtype)
    q = cupy.zeros((1, Sq, 1, 16), dtype)  # scores, and so lse, are 0, and all weights 1
    k = cupy.full((1, 1, 1, 16), 0.25, dtype)
    v = cupy.arange(16, dtype=np.float32).astype(dtype).reshape(1, 1, 1, 16)
    out, lse, dq, dk, dv = both(q, k, v, cupy.ones_like(q))
    assert int(cupy.count_nonzero(out != v)) == 0
    for zero in (lse, dq, dk):
        assert int(cupy.count_nonzero(zero)) == 0
    np.testing.assert_array_equal(to_host(dv).ravel(), np.inf if dtype == np.float16 else Sq)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_case_62_elements_beyond_32_bits(axis):
    """Batches, rows or heads so far apart that an offset in elements does not fit 32 bits."""
    shape = (3, 130, 2, 64)
    host = [randn(*shape, seed=seed) for seed in range(4)]
    options = {"causal": True, "algorithm": "v2"}  # whose kernels take any view
    expected = both(*map(to_gpu, host), **options)
    per_step = {0: 2**31 // 2, 1: 2**31 // 129, 2: 2**31}[axis] // 64 * 64 + 64 * 2**10
    buffer = cupy.empty(2 * (shape[axis] - 1) * per_step + (64 << 20), np.uint8)
    arrays = []
    for n, x in enumerate(host):
        strides = [64 * 2 * 130 * 2, 64 * 2 * 2, 64 * 2, 2]
        strides[axis] = 2 * per_step
        start = buffer.data + n * (1 << 20)  # an array needs less than this between its far steps
        far = cupy.ndarray(shape, np.float16, start, strides=strides)
        assert (shape[axis] - 1) * per_step >= 2**31
        for index in range(shape[axis]):  # by memory copies or kernels whose own offsets fit
            part = tuple(index if a == axis else slice(None) for a in range(3))
            far[part][...] = to_gpu(x[part])
        arrays.append(far)
    for far, x in zip(arrays, host, strict=True):
        parts = [far[tuple(i if a == axis else slice(None) for a in range(3))] for i in range(shape[axis])]
        np.testing.assert_array_equal(np.stack([to_host(part) for part in parts], axis), x)
    assert_same_bits(both(*arrays, **options), expected)
    del arrays, far, parts, buffer
    cupy.get_default_memory_pool().free_all_blocks()


@every_kind
@pytest.mark.parametrize(("D", "width"), [(64, 64), (40, 41)])
def test_case_56_any_alignment(dtype, precision, D, width):
    """All arrays begin `offset` elements behind a multiple of 256 bytes; rows of 40 out of 41 are never aligned."""
    host = on_host(2, 130, 130, 4, 2, D, dtype)

    def placed(shape, offset, value=None):
        length = int(np.prod(shape[:-1])) * width
        buffer = to_gpu(np.zeros(length + 256, DTYPES[dtype]))
        array = buffer[offset : offset + length].reshape(*shape[:-1], width)[..., : shape[-1]]
        assert array.data.ptr % 256 == offset * array.itemsize
        if value is not None:
            words = array.view(WORDS[array.itemsize])
            words[...] = to_gpu(value).view(words.dtype)
        return array

    options = {"causal": True, "precision": precision, "algorithm": "v2"}  # v3 takes aligned arrays only
    expected = both(*map(to_gpu, host), **options)
    for offset in range(9):
        q, k, v, dout = (placed(x.shape, offset, x) for x in host)
        target = placed(q.shape, offset)
        returned, lse = cupyflash.attention(q, k, v, out=target, return_lse=True, **options)
        assert returned is target
        results = cupyflash.attention_backward(dout, q, k, v, target, lse, deterministic=True, **options)
        assert_same_bits((target, lse, *results), expected)
    assert int(cupy.arange(10).sum()) == 45  # the context has survived


# ---- what the driver says of the kernels


@every_kind
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_default_kernels_use_no_local_memory(runtime, dtype, precision, D, causal):
    q = np.empty((2, 512, 4, D), DTYPES[dtype])
    found = []
    for deterministic in (False, True):
        p = Problem.of(q, q, q, causal=causal, precision=precision, deterministic=deterministic)
        for plan in (dispatch.plan_forward, dispatch.plan_backward):
            for kernel, _ in plan(p, 16, runtime.limits()).launches:
                raw = runtime.raw_kernel(kernel)
                what = f"{kernel.name} {dict(kernel.defines)}"
                assert raw.max_threads_per_block >= kernel.threads, what
                assert raw.num_regs * kernel.threads <= 65_536, what
                if raw.local_size_bytes:
                    found.append(f"{what}: {raw.local_size_bytes} bytes of local memory")
    assert not found, "\n".join(found)
