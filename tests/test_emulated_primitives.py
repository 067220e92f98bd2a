"""The host twins of the PTX wrappers, each against NumPy; and that the emulation finds what it is there for."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import sanitized_cases

from cupyflash import kernels_cu
from cupyflash.runtime import emulated
from cupyflash.runtime.source import flatten

SOURCE = Path(__file__).with_name("emulated_primitives.cu")
SHARED_BYTES = 1024
THREADS = 64
ORDERS = ("forward", "reverse", "random")

needs_compiler = pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++")
pytestmark = pytest.mark.emulated


def build(**options):
    defines = {"CF_SHARED_BYTES": SHARED_BYTES, "CF_ARCH": 80}
    return emulated.build(flatten(str(SOURCE), "emulated"), defines | options.pop("defines", {}), **options)


@pytest.fixture(scope="module")
def run():
    """run(kernel, arrays, ...): the arrays' addresses are the parameter struct."""
    if not emulated.available():
        pytest.skip("the emulated device needs g++")
    library = build()

    def run(kernel, *arrays, grid=1, threads=THREADS, shared_bytes=SHARED_BYTES, **options):
        params = struct.pack(f"{len(arrays)}P", *(a.ctypes.data for a in arrays))
        emulated.launch(library, kernel, grid, params, threads=threads, shared_bytes=shared_bytes, **options)

    return run


def u32(*shape):
    return np.zeros(shape, np.uint32)


def f32(*shape):
    return np.zeros(shape, np.float32)


# ---- One contract, two bodies.


def test_both_platforms_have_the_same_words():
    folders = [Path(kernels_cu.__file__).parent / "include" / name for name in ("ptx", "emulated")]
    own = {"block.cuh", "trace.cuh"}  # the emulation's machinery
    names = [{path.name for path in folder.glob("*.cuh")} for folder in folders]
    assert names[0] == names[1] - own
    root = folders[0].parent.parent
    used = "".join(path.read_text() for path in (*root.glob("*.cu"), *root.glob("include/*.cuh")))
    word = re.compile(r"^(?:DEVICE .*?(\w+)\(|constexpr \w+ (\w+)|#define (?!CF_)(\w+)|extern .* (\w+)\[)", re.M)
    words = []
    for folder in folders:
        texts = (
            re.sub(r"^namespace emulated {.*?^}  // namespace", "", (folder / name).read_text(), flags=re.M | re.S)
            for name in names[0]
        )
        found = {"".join(groups) for text in texts for groups in word.findall(text)}
        words.append({w for w in found if re.search(rf"\b{w}\b", used)})  # others serve the headers beside
    assert words[0] == words[1]


# ---- Values.


def floats_of_interest(half_bits):
    """Every finite half-width number, the points half-way to its neighbour, and one ulp to either side of them."""
    values = np.arange(0x10000, dtype=np.uint16).view(half_bits).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    nearby = [np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    return np.concatenate([values, middle, *nearby])


def widths_of_interest():
    random = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    extremes = np.array([65519.99, 65520, 65536, 3.4e38, np.inf, np.nan, 1e-45, 6e-8, 2.98e-8, 0, 1], np.float32)
    extremes = np.concatenate([extremes, -extremes])
    x = np.concatenate([floats_of_interest(np.float16), floats_of_interest(ml_dtypes.bfloat16), random, extremes])
    return np.pad(x, (0, -len(x) % THREADS))


def round_to_tf32(x):
    """Nearest number with ten mantissa bits; ties away from zero."""
    magnitude = np.abs(x.astype(np.float64))
    spacing = np.exp2(np.maximum(np.frexp(magnitude)[1] - 1, -126) - 10)
    rounded = np.copysign(np.floor(magnitude / spacing + 0.5) * spacing, x)
    return np.where(np.isfinite(x), rounded, x).astype(np.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_narrowing_rounds_to_nearest_even(run):
    x = widths_of_interest()
    half, bfloat, pair_half, pair_bfloat, tf32 = (u32(len(x)) for _ in range(5))
    run("narrow", x, half, bfloat, pair_half, pair_bfloat, tf32, grid=len(x) // THREADS)
    number = ~np.isnan(x)
    expected_half = x.astype(np.float16).view(np.uint16)
    expected_bfloat = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(half[number], expected_half[number])
    np.testing.assert_array_equal(bfloat[number], expected_bfloat[number])
    np.testing.assert_array_equal(half[~number], 0x7FFF)
    np.testing.assert_array_equal(bfloat[~number], 0x7FFF)
    np.testing.assert_array_equal(pair_half, half | 0x3C00 << 16)
    np.testing.assert_array_equal(pair_bfloat, 0x3F80 | bfloat << 16)
    np.testing.assert_array_equal(tf32.view(np.float32), round_to_tf32(x))


def test_widening_is_exact(run):
    bits = np.arange(0x10000, dtype=np.uint16)
    half, bfloat = f32(len(bits)), f32(len(bits))
    run("widen", bits, half, bfloat, grid=len(bits) // THREADS)
    np.testing.assert_array_equal(half, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(bfloat, bits.view(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(half), bits >= 0x8000)


def test_elementary_functions(run):
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, -127, -126, 128, 1, -1], np.float32)
    x = np.concatenate([special, np.random.default_rng(0).uniform(-160, 160, 500).astype(np.float32)])
    x = np.pad(x, (0, -len(x) % THREADS))
    exp2, log2, rounded, fused, maximum = (f32(len(x)) for _ in range(5))
    finite = u32(len(x))
    run("elementary", x, exp2, log2, rounded, fused, maximum, finite, grid=len(x) // THREADS)
    tiny = np.finfo(np.float32).tiny
    flushed = np.where(np.abs(x) < tiny, np.copysign(0, x), x).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = np.exp2(flushed)
        np.testing.assert_allclose(exp2, np.where(exact < tiny, 0, exact).astype(np.float32), rtol=2**-22)
        np.testing.assert_allclose(log2, np.log2(flushed), rtol=2**-22, atol=2**-22)
        np.testing.assert_array_equal(rounded, x * x - np.float32(1))
        np.testing.assert_array_equal(fused, (x.astype(np.float64) ** 2 - 1).astype(np.float32))
        np.testing.assert_array_equal(maximum, np.fmax(x, np.float32(1)))
    np.testing.assert_array_equal(finite, np.isfinite(x))


# ---- Warps and blocks.


@pytest.mark.parametrize("order", ORDERS)
def test_exchanges_and_votes(run, order):
    x = np.arange(THREADS, dtype=np.float32)
    exchanged, warp, warp_saw, block_saw = f32(THREADS), u32(THREADS), u32(THREADS), u32(THREADS)
    run("meet", x, exchanged, warp, warp_saw, block_saw, order=order)
    thread = np.arange(THREADS)
    np.testing.assert_array_equal(exchanged, thread ^ 5)
    np.testing.assert_array_equal(warp, thread // 32)
    np.testing.assert_array_equal(warp_saw, thread // 32)  # only the second warp has numbers above 40
    np.testing.assert_array_equal(block_saw, 1)


def test_ldmatrix(run):
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 2**16, (32, 8), dtype=np.uint16)
    row = rng.permutation(32).astype(np.uint32)
    plain, transposed = u32(32, 4), u32(32, 4)
    run("load_matrices", matrix, row, plain, transposed, threads=32)
    four = matrix[row].reshape(4, 8, 8).astype(np.uint32)
    for result, matrices in ((plain, four), (transposed, four.swapaxes(1, 2))):
        pairs = matrices[:, :, 0::2] | matrices[:, :, 1::2] << 16  # (matrix, l / 4, l % 4)
        np.testing.assert_array_equal(result, pairs.reshape(4, 32).T)


def test_stmatrix(run):
    """What ldmatrix has loaded from a place, transposed or not, is what is stored there the same way."""
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 2**16, (32, 8), dtype=np.uint16)
    row = rng.permutation(32).astype(np.uint32)
    loaded = u32(32, 4), u32(32, 4)
    run("load_matrices", matrix, row, *loaded, threads=32)
    for way, r in enumerate(loaded):
        stored = np.zeros((32, 8), np.uint16), np.zeros((32, 8), np.uint16)
        run("store_matrices", r, row, *stored, threads=32)
        np.testing.assert_array_equal(stored[way], matrix)


def test_marks_of_pairs_that_are_not_finite(run):
    numbers = np.array([0, -0.0, 1, -65504, 2**-24, np.inf, -np.inf, np.nan], np.float16)
    low, high = np.repeat(numbers, 4), np.tile(numbers[[2, 3, 5, 7]], 8)
    pair = low.view(np.uint16) | high.view(np.uint16).astype(np.uint32) << 16
    marked = u32(32)
    run("mark_pairs", pair, marked, threads=32)
    np.testing.assert_array_equal(marked, ~(np.isfinite(low) & np.isfinite(high)))


@pytest.mark.parametrize(
    ("kernel", "dtype", "depth"),
    [("multiply_half", np.float16, 16), ("multiply_bfloat", ml_dtypes.bfloat16, 16), ("multiply_tf32", np.float32, 8)],
)
def test_mma(run, kernel, dtype, depth):
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((16, depth)).astype(dtype), rng.standard_normal((depth, 8)).astype(dtype)
    D = rng.standard_normal((16, 8)).astype(np.float32)
    # TF32 operands are cut to ten mantissa bits, not rounded.
    cut = [(m.view(np.uint32) & 0xFFFFE000).view(np.float32) if dtype is np.float32 else m for m in (A, B)]
    exact = D + cut[0].astype(np.float64) @ cut[1].astype(np.float64)
    run(kernel, A, B, D, threads=32)
    np.testing.assert_allclose(D, exact, rtol=0, atol=depth * 2**-22)


def test_mma_subnormals_and_infinities(run):
    A, B, D = np.zeros((16, 16), np.float16), np.zeros((16, 8), np.float16), f32(16, 8)
    A[0, 3], B[3, :] = 2.0**-24, 2.0**-24
    A[1, 0], B[0, 2] = np.inf, 1
    run("multiply_half", A, B, D, threads=32)
    np.testing.assert_array_equal(D[0], np.float32(2.0**-48))
    np.testing.assert_array_equal(D[1], [np.nan, np.nan, np.inf, *[np.nan] * 5])
    np.testing.assert_array_equal(D[2:], 0)


# ---- Memory.


def copy(run, **options):
    """Which of the two groups' words have arrived: at once, after waiting for the first group, after both."""
    source = np.arange(2 * THREADS, dtype=np.uint32)
    at_once, after_first, after_both = (u32(2 * THREADS) for _ in range(3))
    zero = np.ones(THREADS, np.uint32)
    run("copy", source, at_once, after_first, after_both, zero, **options)
    for held in (at_once, after_first, after_both):
        assert np.isin(held[held != source], 0xFFD5FFD5).all()  # what has not landed left the poison alone
    np.testing.assert_array_equal(zero, 0)
    return [(held == source).reshape(2, THREADS) for held in (at_once, after_first, after_both)]


def test_copies_land_when_they_are_issued_or_as_late_as_allowed(run):
    assert np.all(copy(run, copy_mode="issue"))
    at_once, after_first, after_both = copy(run, copy_mode="wait")
    assert not at_once.any()
    assert after_first[0].all()
    assert not after_first[1].any()
    assert after_both.all()


def test_copies_land_at_random_by_seed(run):
    at_once, after_first, after_both = copy(run, copy_mode="random", seed=1)
    assert after_first[0].all()
    assert after_both.all()
    for landed in (*at_once, after_first[1]):
        assert 0 < landed.sum() < THREADS
    np.testing.assert_array_equal(copy(run, seed=1)[0], at_once)
    assert (copy(run, seed=2)[0] != at_once).any()


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_copies_of_every_size(run, size):
    source = np.random.default_rng(0).integers(0, 256, 32 * size, dtype=np.uint8)
    target = np.zeros_like(source)
    run(f"copy_{size}", source, target, threads=32)
    np.testing.assert_array_equal(target, source)


def test_reductions_are_atomic_between_host_threads(run):
    sums, grid = f32(7), 2000
    run("sum", sums, grid=grid, workers=2)
    each = THREADS * np.array([1, 2, (THREADS - 1) / 2, -1, 3, -2, 0.5])
    np.testing.assert_array_equal(sums, grid * each)


# ---- What the emulation has to bring to light.


def test_shared_memory_starts_as_nan(run):
    out = u32(THREADS)
    run("read_unwritten", out)
    assert np.isnan(out.view(np.float32)).all()
    assert np.isnan(out.view(np.float16)).all()


def test_threads_and_blocks_run_in_the_order_asked_for(run):
    def places(**options):
        place = u32(3, THREADS)
        run("record_order", u32(1), place, grid=3, **options)
        return place

    first, second = divmod(places(order="forward")[0], 1000)[::-1]
    np.testing.assert_array_equal(first, np.arange(THREADS))
    np.testing.assert_array_equal(second, THREADS + np.arange(THREADS))
    np.testing.assert_array_equal(places(order="reverse"), places(order="forward")[::-1, ::-1])
    np.testing.assert_array_equal(places(seed=1), places(seed=1))
    assert (places(seed=1) != places(seed=2)).any()
    np.testing.assert_array_equal(np.sort(places(seed=1)[0] % 1000 % THREADS), np.arange(THREADS))


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_shows(run, order):
    expected = (np.arange(THREADS) + 1) % THREADS
    out = u32(THREADS)
    run("rotate_synchronised", out, order=order)
    np.testing.assert_array_equal(out, expected)
    run("rotate_unsynchronised", out, order=order)
    assert (out != expected).any()


def test_a_warp_may_return_before_a_barrier(run):
    out = u32(THREADS)
    run("one_warp_returns", out)
    np.testing.assert_array_equal(out, np.arange(THREADS) >= 32)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "one_lane_returns",
            r"^one_lane_returns: block 0: deadlock, every thread waits\n  warp 0, lanes 0-31: returned\n"
            r"  warp 1, lanes 0-2: at warp_any\n  warp 1, lanes 3-3: returned\n  warp 1, lanes 4-31: at warp_any$",
        ),
        (
            "lanes_diverge",
            r"block 0, thread \d+ \(warp 0, lane \d+\): at (warp_\w+) while other lanes of its warp wait at (?!\1)",
        ),
        ("forgets_a_wait", "returned with 1 asynchronous copies that no copy_async_wait has covered"),
        ("matrix_beyond_the_end", "ldmatrix_x4: 16 bytes at shared offset 1024, outside the block's 1024 bytes"),
        ("matrix_misaligned", "ldmatrix_x4: shared offset 8 is not aligned to 16 bytes"),
        ("copy_misaligned", "copy_async: global address 0x[0-9a-f]*4 is not aligned to 16 bytes"),
        ("global_pointer_as_shared", "is not in shared memory"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_errors_name_the_cause(run, kernel, message, workers):
    threads = 32 if kernel.startswith(("matrix", "copy", "global")) else THREADS
    with pytest.raises(RuntimeError, match=message):
        run(kernel, u32(256), threads=threads, workers=workers)


def test_too_little_shared_memory(run):
    with pytest.raises(RuntimeError, match="uses 1024 bytes of shared memory but is launched with 512"):
        run("read_unwritten", u32(THREADS), shared_bytes=512)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"threads": 48}, "threads is 48; it must be a multiple of 32"),
        ({"grid": 0}, "grid is 0"),
        ({"order": "sideways"}, "order is 'sideways'"),
        ({"copy_mode": "never"}, "copy_mode is 'never'"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_launch_arguments(run, option, message):
    with pytest.raises(ValueError, match=message):
        run("read_unwritten", u32(THREADS), **option)


# ---- Building.


def sanitized_run(kernel):
    """Runs a kernel, with an output of THREADS words, in a process that has the sanitizers."""
    script = f"""
import struct
import numpy as np
from cupyflash.runtime import emulated
from test_emulated_primitives import build
out = np.zeros({THREADS}, np.uint32)
params = struct.pack("P", out.ctypes.data)
emulated.launch(build(sanitize=True), "{kernel}", 3, params, threads={THREADS}, shared_bytes={SHARED_BYTES})
"""
    return subprocess.run(
        [sys.executable, "-c", script],
        env=sanitized_cases.environment(),
        cwd=SOURCE.parent,
        capture_output=True,
        text=True,
    )


@needs_compiler
def test_sanitizers_name_the_line_of_an_access_out_of_bounds():
    assert sanitized_run("rotate_synchronised").returncode == 0
    result = sanitized_run("write_beyond_the_end")
    assert result.returncode != 0
    line = next(
        n for n, text in enumerate(SOURCE.read_text().splitlines(), 1) if "AddressSanitizer has to name" in text
    )
    assert "heap-buffer-overflow" in result.stderr
    assert re.search(rf"#0 .* in write_beyond_the_end .*emulated_primitives\.cu:{line}\b", result.stderr), result.stderr


@needs_compiler
def test_compiler_errors_name_the_line():
    with pytest.raises(RuntimeError, match=r"types\.cuh:\d+:\d+: error: .*CF_SHARED_BYTES.*"):
        emulated.build(flatten(str(SOURCE), "emulated"))


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert not emulated.available()
    with pytest.raises(RuntimeError, match=r"g\+\+, which was not found in PATH"):
        emulated.build("")
