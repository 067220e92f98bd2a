"""From a problem and its arrays to launches, on a runtime that only takes notes."""

import ctypes
import dataclasses
import itertools
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from cupyflash import dispatch, engine
from cupyflash.engine import Engine
from cupyflash.problem import Band, Problem
from cupyflash.resources import KNOWN_GPUS
from cupyflash.runtime import driver
from cupyflash.runtime.params import BACKWARD, BACKWARD_TENSOR, FORWARD, FORWARD_TENSOR, ParamBlock
from cupyflash.tiles import TileConfig

pytestmark = pytest.mark.usefixtures("no_winners")  # tiles are given, or the heuristic's

A100, T4 = KNOWN_GPUS["A100"], KNOWN_GPUS["T4"]
HOPPER = KNOWN_GPUS["H200"]


class NotingRuntime:
    """Loads and launches nothing, and remembers what it was asked for."""

    def __init__(self):
        self.current_device = 0
        self.gpus = {0: A100, 1: T4, 2: HOPPER}
        self.loads, self.launches, self.workspaces, self.maps = [], [], [], []

    def device(self):
        return self.current_device

    def limits(self):
        return self.gpus[self.current_device]

    def load(self, kernel, grid):
        self.loads.append((kernel, grid))
        return lambda params, stream: self.launches.append((kernel.name, grid, params.tobytes()))

    def stream(self, device):
        assert device == self.current_device
        return 0x57

    def address(self, array):
        return array.ctypes.data

    def tensor_map(self, *description):
        """Its number, 1 for the first, in 128 bytes."""
        self.maps.append(description)
        return len(self.maps).to_bytes(128, "little")

    def tile_counter(self, device, stream):
        assert (device, stream) == (self.current_device, 0x57)
        return 0xC0

    def workspace(self, floats):
        padded = np.empty(floats + 64, np.float32)
        self.workspaces.append(padded[-padded.ctypes.data % 256 // 4 :][:floats])
        return self.workspaces[-1].ctypes.data, self.workspaces[-1]


@pytest.fixture
def runtime():
    return NotingRuntime()


def aligned(shape, dtype=np.float16, offset=0):
    """A contiguous array that begins `offset` bytes behind a multiple of 256."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + 512, np.uint8)
    start = -buffer.ctypes.data % 256 + offset
    return buffer[start : start + size].view(dtype).reshape(shape)


def arrays(B=2, Sq=100, Sk=130, H=4, Hk=2, D=64, Dv=None, dtype=np.float16):
    Dv = Dv or D
    return [aligned(shape, dtype) for shape in ((B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv), (B, Sq, H, Dv))]


def forward(runtime_or_engine, q, k, v, out, lse=None, **options):
    engine = runtime_or_engine if isinstance(runtime_or_engine, Engine) else Engine(runtime_or_engine)
    engine.forward(Problem.of(q, k, v, **options), q, k, v, out, lse)


def backward(engine, q, k, v, out, dlse=None, **options):
    dout, dq, dk, dv = (aligned(x.shape, x.dtype) for x in (out, q, k, v))
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    engine.backward(Problem.of(q, k, v, **options), dout, q, k, v, out, lse, dq, dk, dv, dlse)
    return dout, lse, dq, dk, dv


def fields(param_struct, data):
    return dict(zip([name for name, _ in param_struct.fields], param_struct.packer.unpack(data), strict=True))


# ---- macros


def defines(task="forward", vector_bytes=16, limits=A100, **changes):
    q, k, v, _ = arrays()
    p = dataclasses.replace(Problem.of(q, k, v), **changes)
    plan = dispatch.plan_forward if task == "forward" else dispatch.plan_backward
    return dict(plan(p, vector_bytes, limits).launches[-1 if task == "backward_dq" else 0][0].defines)


@pytest.mark.parametrize(
    ("first", "last", "flags"), [(None, None, (0, 0)), (None, 0, (0, 1)), (0, None, (1, 0)), (-5, 0, (1, 1))]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bound_of_0_is_a_bound(first, last, flags, deterministic):
    changes = {"band": Band(first, last), "deterministic": deterministic}
    for task in ("forward", "backward", "backward_dq"):
        found = defines(task, **changes)
        assert (found["CF_BAND_FIRST"], found["CF_BAND_LAST"]) == flags


@pytest.mark.parametrize(
    ("scale", "softcap", "kind"), [(0.1, 0.0, 0), (-0.1, 0.0, 1), (0.0, 0.0, 1), (0.1, 30.0, 2), (-0.1, 30.0, 2)]
)
def test_kinds_of_scores(scale, softcap, kind):
    assert defines(scale=scale, softcap=softcap)["CF_SCORE"] == kind


def test_macros_of_types_and_dims():
    found = defines(dtype="bfloat16", head_dim=59, head_dim_v=130, vector_bytes=2)
    assert found["CF_ELEMENT"] == "BFloat16"
    assert float(found["CF_ELEMENT_MAX"].rstrip("f")) == pytest.approx((2 - 2**-7) * 2.0**127, rel=1e-4)
    assert (found["CF_HEAD_DIM"], found["CF_TILE_D"]) == (59, 64)
    assert (found["CF_HEAD_DIM_V"], found["CF_TILE_DV"]) == (130, 160)
    assert found["CF_VECTOR_BYTES"] == 2
    assert found["CF_ARCH"] == 80
    assert defines("backward")["CF_SUM_DQ"] == 1
    assert defines("backward", deterministic=True)["CF_SUM_DQ"] == 0


def test_what_is_not_a_macro_shares_kernels(runtime):
    """Lengths, batch, heads, bounds of the band and the size of the scale do not compile anything anew."""
    q, k, v, out = arrays(B=3, Sq=7, Sk=9, H=8, Hk=1)
    forward(runtime, *arrays(), window=(20, 3))
    forward(runtime, q, k, v, out, window=(2, 1), scale=0.3)
    assert runtime.loads[0][0] == runtime.loads[1][0]


# ---- alignment


@pytest.mark.parametrize(
    ("D", "Dv", "dtype", "expected"),
    [
        (64, 64, np.float16, 16),
        (8, 8, np.float16, 16),
        (40, 40, np.float16, 16),
        (36, 64, np.float16, 8),
        (64, 36, np.float16, 8),
        (34, 34, np.float16, 4),
        (59, 59, np.float16, 2),
        (1, 1, np.float16, 2),
        (4, 4, np.float32, 16),
        (2, 4, np.float32, 8),
        (59, 59, np.float32, 4),
    ],
)
def test_vectors_divide_the_rows(D, Dv, dtype, expected):
    q = aligned((2, 3, 4, D), dtype)
    v = aligned((2, 3, 4, Dv), dtype)
    assert engine.vector_bytes(Problem.of(q, q, v), (q, q, v, v), 0) == expected


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    ("axis", "elements", "expected"), [(1, 1, 2), (1, 2, 4), (0, 4, 8), (2, -8, 16), (2, -1, 2), (1, 0, 16), (2, 12, 8)]
)
def test_vectors_divide_the_strides(which, axis, elements, expected):
    four = [aligned((2, 3, 4, 64)) for _ in range(4)]
    strides = list(four[which].strides)
    strides[axis] = 2 * elements
    p = Problem.of(*four[:3])
    four[which] = as_strided(four[which], four[which].shape, strides)
    assert engine.vector_bytes(p, tuple(four), 0) == expected


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(("offset", "expected"), [(0, 16), (2, 2), (4, 4), (6, 2), (8, 8), (10, 2), (16, 16), (32, 16)])
def test_vectors_divide_the_addresses(runtime, which, offset, expected):
    four = arrays()
    four[which] = aligned(four[which].shape, offset=offset)
    forward(runtime, *four)
    ((kernel, _),) = runtime.loads
    assert dict(kernel.defines)["CF_VECTOR_BYTES"] == expected


def test_strides_of_axes_of_length_1_mean_nothing(runtime):
    base = aligned((1, 100, 1, 64))
    nonsense = as_strided(base, base.shape, (10**9 + 1, 128, 7, 2))
    forward(runtime, nonsense, nonsense, nonsense, nonsense)
    (name, _, data) = runtime.launches[0]
    packed = fields(FORWARD, data)
    assert name == "forward_mma"
    assert [packed[f"q_{axis}_stride"] for axis in ("batch", "row", "head")] == [0, 64, 0]
    assert dict(runtime.loads[0][0].defines)["CF_VECTOR_BYTES"] == 16


# ---- parameters


def test_parameters_of_the_forward(runtime):
    q, k, v, out = arrays(B=3, Sq=100, Sk=130, H=4, Hk=2)
    q = q[:, ::-1]
    k = np.broadcast_to(k[:1], k.shape)
    lse = np.zeros((3, 4, 100), np.float32)
    forward(runtime, q, k, v, out, lse, window=(20, 3), scale=-0.25, softcap=7.0)
    packed = fields(FORWARD, runtime.launches[0][2])
    for name, array in {"q": q, "k": k, "v": v, "out": out}.items():
        assert packed[name] == array.ctypes.data
        assert [packed[f"{name}_{axis}_stride"] * 2 for axis in ("batch", "row", "head")] == list(array.strides[:3])
    assert packed["lse"] == lse.ctypes.data
    expected = {
        "batch": 3,
        "seqlen_q": 100,
        "seqlen_k": 130,
        "num_heads": 4,
        "num_kv_heads": 2,
        "group": 2,
        "band_first": 30 - 20,
        "band_last": 30 + 3,
        "scale": -0.25,
        "softcap": 7.0,
    }
    assert {name: packed[name] for name in expected} == expected


def test_parameters_of_the_backward(runtime):
    q, k, v, out = arrays()
    q, out = q[::-1], np.broadcast_to(out[:1], out.shape)
    dout, lse, dq, dk, dv = backward(Engine(runtime), q, k, v, out, causal=True)
    assert len(runtime.launches) == 3
    assert len({data for _, _, data in runtime.launches}) == 1
    packed = fields(BACKWARD, runtime.launches[0][2])
    named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
    for name, array in named.items():
        assert packed[name] == array.ctypes.data
        assert [packed[f"{name}_{axis}_stride"] * 2 for axis in ("batch", "row", "head")] == list(array.strides[:3])
    assert packed["lse"] == lse.ctypes.data
    assert packed["band_last"] == 30


def test_no_lse_is_a_null_pointer(runtime):
    forward(runtime, *arrays())
    assert fields(FORWARD, runtime.launches[0][2])["lse"] == 0


@pytest.mark.parametrize("family", ["mma", "simt", "wgmma"])
def test_no_gradient_of_lse_is_a_null_pointer(hopper, family):
    """What is prepared serves calls with it and calls without."""
    given = {"mma": TileConfig("mma", 64, 64, 4, 2), "wgmma": HOPPER_BACKWARD, "simt": SIMT_BACKWARD}
    struct = BACKWARD_TENSOR if family == "wgmma" else BACKWARD
    same = Engine(hopper, {"backward": given[family]})
    four = arrays(dtype=np.float32 if family == "simt" else np.float16)
    dlse = aligned((2, 4, 100), np.float32)
    for given_dlse, address in ((None, 0), (dlse, dlse.ctypes.data), (None, 0)):
        hopper.launches.clear()
        _, lse, dq, _, _ = backward(same, *four, dlse=given_dlse)
        assert f"backward_{family}" in [name for name, *_ in hopper.launches]
        for *_, data in hopper.launches:
            packed = fields(struct, data)
            assert [packed[name] for name in ("lse", "dlse", "dq")] == [lse.ctypes.data, address, dq.ctypes.data]
    assert len(same._prepared) == 1


# ---- grids and sections


SIMT_BACKWARD = TileConfig("simt", 64, 64, 4)


def summed_in_place(dtype, deterministic):
    """Tiles whose kernel adds to dQ itself, for float32."""
    return {"backward": SIMT_BACKWARD} if dtype == np.float32 and not deterministic else {}


def blocks(rows, tile):
    return len(range(0, rows, tile))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_every_tile_has_its_block(runtime, deterministic, dtype):
    four = arrays(B=3, Sq=257, Sk=1030, H=6, Hk=2, dtype=dtype)
    forward(runtime, *four)
    backward(Engine(runtime, summed_in_place(dtype, deterministic)), *four, deterministic=deterministic)
    (fwd, fwd_grid), (rows, rows_grid), (main, main_grid), *of_dq = runtime.loads
    tile = {kernel: dict(kernel.defines) for kernel, _ in runtime.loads}
    assert fwd_grid == 3 * 6 * blocks(257, tile[fwd]["CF_BR"])
    assert rows_grid == 3 * 6 * blocks(257, tile[rows]["CF_BR"])
    assert main_grid == 3 * 2 * blocks(1030, tile[main]["CF_BC"])
    assert rows.name == "backward_rows"
    assert main.defines == rows.defines
    if dtype == np.float32 and not deterministic:  # summed where the caller wants it
        assert of_dq == []
        return
    ((dq, dq_grid),) = of_dq
    assert dq_grid == 3 * 6 * blocks(257, tile[dq]["CF_BR"])
    assert (dq.name == "backward_dq_store") == (not deterministic)
    if not deterministic:  # what one kernel sums in fragments the other reads: they agree on everything
        assert main.defines == dq.defines


def test_more_blocks_than_a_launch_has():
    q, k, v, _ = arrays(H=1, Hk=1)
    p = dataclasses.replace(
        Problem.of(q, k, v), batch=2**15, num_heads=2**16, num_kv_heads=2**16, seqlen_q=1, seqlen_k=1
    )
    for plan in (dispatch.plan_forward, dispatch.plan_backward):
        with pytest.raises(dispatch.UnsupportedError, match="2147483648 blocks; a launch has fewer than 2\\^31"):
            plan(p, 16, A100)
        assert plan(dataclasses.replace(p, batch=2**15 - 1), 16, A100).launches[0][1] == 2**31 - 2**16


def test_zero_blocks_are_refused():
    """CuPy makes one block of none, and that one would write (case 119)."""
    cuda = pytest.importorskip("cupyflash.runtime.cuda", reason="CuPy is not installed")
    q, k, v, _ = arrays()
    kernel, _ = dispatch.plan_forward(Problem.of(q, k, v), 16, A100).launches[0]
    with pytest.raises(ValueError, match="forward_mma would be launched with 0 blocks"):
        cuda.CudaRuntime().load(kernel, 0)


def test_a_launch_on_cuda(monkeypatch):
    cuda = pytest.importorskip("cupyflash.runtime.cuda", reason="CuPy is not installed")
    calls = []
    monkeypatch.setattr(cuda.cupy.cuda.driver, "launchKernel", lambda *arguments: calls.append(arguments))
    runtime = cuda.CudaRuntime()
    runtime.raw_kernel = lambda kernel: types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=0xF))
    q, k, v, _ = arrays()
    kernel, _ = dispatch.plan_forward(Problem.of(q, k, v), 16, A100).launches[0]
    params = ParamBlock(b"12345678")
    runtime.load(kernel, 7)(params, 0x57)
    assert calls == [(0xF, 7, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, 0x57, params.kernel_params, 0)]
    (address,) = (ctypes.c_void_p * 1).from_address(params.kernel_params)
    assert ctypes.string_at(address, 8) == b"12345678"


def test_tile_counters_on_cuda(monkeypatch):
    """One for each stream; none where launches that use it could run side by side."""
    cuda = pytest.importorskip("cupyflash.runtime.cuda", reason="CuPy is not installed")
    counters = []

    def zeros(shape, dtype):
        counters.append(types.SimpleNamespace(data=types.SimpleNamespace(ptr=0x100 * (len(counters) + 1))))
        return counters[-1]

    monkeypatch.setattr(cuda.cupy, "zeros", zeros)
    monkeypatch.setattr(cuda.cupy.cuda.runtime, "streamIsCapturing", lambda stream: stream == 0x99)
    runtime = cuda.CudaRuntime()
    default, thread_default, captured = 0, 2, 0x99
    assert runtime.tile_counter(0, thread_default) == runtime.tile_counter(0, captured) == 0
    found = [runtime.tile_counter(*where) for where in ((0, default), (0, 0x57), (1, default), (0, 0x58))]
    assert found == [0x100, 0x200, 0x300, 0x400]
    assert [runtime.tile_counter(*where) for where in ((0, default), (0, 0x57))] == found[:2]


def test_a_capture_keeps_its_workspaces_on_cuda(monkeypatch):
    """Nobody else is given what a graph may use later; launches that follow one another share it."""
    cuda = pytest.importorskip("cupyflash.runtime.cuda", reason="CuPy is not installed")
    addresses = itertools.count(0x1000, 0x100)
    alive = weakref.WeakValueDictionary()

    class Memory:
        def __init__(self, size):
            self.ptr, self.size = next(addresses), size
            alive[self.ptr] = self

    current = types.SimpleNamespace(ptr=0)
    captures = {0x98: 1, 0x99: 1}  # stream: which
    monkeypatch.setattr(cuda.cupy.cuda, "alloc", Memory)
    monkeypatch.setattr(cuda.cupy.cuda, "get_current_stream", lambda: current)
    monkeypatch.setattr(cuda.cupy.cuda.runtime, "streamIsCapturing", captures.__contains__)
    monkeypatch.setattr(cuda, "capture_id", captures.__getitem__)
    monkeypatch.setattr(cuda.CudaRuntime, "device", lambda self: 0)
    runtime = cuda.CudaRuntime()

    def workspace(stream, floats):
        current.ptr = stream
        address, _memory = runtime.workspace(floats)
        return address

    for stream in (0, 1, 0x57):
        assert workspace(stream, 10) not in alive
    first = workspace(0x99, 10)
    assert workspace(0x99, 10) == workspace(0x99, 3) == first
    larger = workspace(0x99, 11)
    assert workspace(0x99, 10) == larger != first
    beside = workspace(0x98, 10)
    captures[2] = 1  # the default stream of whichever thread
    with ThreadPoolExecutor(1) as pool:
        threads = [pool.submit(workspace, 2, 10).result(), workspace(2, 10)]
    captures[0x99] = 2
    again = workspace(0x99, 10)
    expected = {first: 40, larger: 44, beside: 40, again: 40} | dict.fromkeys(threads, 40)
    assert {address: memory.size for address, memory in alive.items()} == expected
    assert len(expected) == 6


def test_which_capture_is_under_way(monkeypatch):
    """As cuda.h has it: cuStreamGetCaptureInfo_v2(stream, &status, &id, null, null, null)."""

    def info(stream, status, number, *others):
        assert others == (None, None, None)
        number._obj.value = 2**40 + stream.value
        return 0 if stream.value == 7 else 900

    monkeypatch.setattr(driver, "driver", lambda: types.SimpleNamespace(cuStreamGetCaptureInfo_v2=info))
    assert driver.capture_id(7) == 2**40 + 7
    with pytest.raises(RuntimeError, match=r"which capture is under way on a stream \(error 900\)"):
        driver.capture_id(8)


def section(changes, limits=A100, plan=dispatch.plan_forward):
    q, k, v, _ = arrays(B=4, Sq=1024, Sk=1024, H=8, Hk=8)
    return plan(dataclasses.replace(Problem.of(q, k, v, causal=True), **changes), 16, limits).section


def test_sections():
    """An equal part of the 32 heads, whose keys and values (256 KiB each here) stream from half of the L2 cache."""
    small = dataclasses.replace(A100, l2_bytes=5 << 20)
    assert section({}, small) == 8  # ten would fit, but leave two for the last section
    assert section({"batch": 5}, small) == 10
    assert section({"batch": 1, "num_heads": 11, "num_kv_heads": 11}, small) == 6
    assert section({"num_kv_heads": 2}, small) == 32  # four heads share keys and values; all 32 heads fit
    assert section({"num_kv_heads": 2}, dataclasses.replace(A100, l2_bytes=1 << 20)) == 8
    assert section({}) == 32  # all there are
    assert section({}, dataclasses.replace(A100, l2_bytes=1 << 10)) == 1
    assert section({"band": Band(None, None)}) == 1
    assert section({}, plan=dispatch.plan_backward) == 32


def test_section_of_blocks_that_stay():
    """Two tiles for each of 132 blocks, however much the cache would hold: a head has six here."""
    assert section({"head_dim": 128, "head_dim_v": 128}, HOPPER) == 32
    assert section({"head_dim": 128, "head_dim_v": 128, "batch": 100}, HOPPER) == 44
    assert section({"band": Band(None, None)}, HOPPER) == 1


def test_section_of_tiny_heads():
    """Keys and values of less than a byte per query head."""
    tiny = {"seqlen_q": 2, "seqlen_k": 1, "num_heads": 64, "num_kv_heads": 1, "head_dim": 1, "head_dim_v": 1}
    assert section(tiny | {"band": Band(None, -1)}) >= 1


# ---- Hopper: tensor maps, blocks that stay


@pytest.fixture
def hopper(runtime):
    runtime.current_device = 2
    return runtime


def test_parameters_of_a_forward_with_tensor_maps(hopper):
    q, k, v, out = arrays(B=3, Sq=100, Sk=130, H=4, Hk=2)
    q = aligned((3, 4, 100, 64)).swapaxes(1, 2)
    lse = np.zeros((3, 4, 100), np.float32)
    forward(hopper, q, k, v, out, lse, window=(20, 3), scale=0.25)
    ((name, _, data),) = hopper.launches
    packed = fields(FORWARD_TENSOR, data)
    assert name == "forward_wgmma"
    assert [int.from_bytes(packed[f"{x}_map"], "little") for x in "qkv"] == [1, 2, 3]
    keys = dict(hopper.loads[0][0].defines)["CF_BC"]
    for x, rows, described in zip((q, k, v), (64, keys, keys), hopper.maps, strict=True):
        batch, length, heads, head_dim = x.shape
        strides = x.strides[1], x.strides[2], x.strides[0]
        assert described == (x.ctypes.data, (head_dim, length, heads, batch), strides, (64, rows, 1, 1), 2)
    assert packed["tile_counter"] == 0xC0
    assert (packed["lse"], packed["scale"], packed["band_last"]) == (lse.ctypes.data, 0.25, 30 + 3)
    for name, array in {"q": q, "k": k, "v": v, "out": out}.items():
        assert packed[name] == array.ctypes.data
        assert [packed[f"{name}_{axis}_stride"] * 2 for axis in ("batch", "row", "head")] == list(array.strides[:3])


HOPPER_BACKWARD = TileConfig("wgmma", 64, 128, 12, 2)


def test_parameters_of_a_backward_with_tensor_maps(hopper):
    q, k, v, out = arrays(B=3, Sq=100, Sk=130, H=4, Hk=2, D=128)
    q = aligned((3, 4, 100, 128)).swapaxes(1, 2)
    dout, lse, dq, dk, dv = backward(Engine(hopper, {"backward": HOPPER_BACKWARD}), q, k, v, out, window=(20, 3))
    assert [name for name, *_ in hopper.launches] == ["backward_rows", "backward_wgmma", "backward_dq_store"]
    assert len({data for *_, data in hopper.launches}) == 1
    packed = fields(BACKWARD_TENSOR, hopper.launches[0][2])
    assert [int.from_bytes(packed[f"{x}_map"], "little") for x in ("dout", "q", "k", "v")] == [1, 2, 3, 4]
    for x, rows, described in zip((dout, q, k, v), (64, 64, 128, 128), hopper.maps, strict=True):
        batch, length, heads, head_dim = x.shape
        strides = x.strides[1], x.strides[2], x.strides[0]
        assert described == (x.ctypes.data, (head_dim, length, heads, batch), strides, (64, rows, 1, 1), 2)
    for name, array in {"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}.items():
        assert packed[name] == array.ctypes.data
        assert [packed[f"{name}_{axis}_stride"] * 2 for axis in ("batch", "row", "head")] == list(array.strides[:3])
    assert (packed["lse"], packed["band_last"]) == (lse.ctypes.data, 30 + 3)


@pytest.mark.parametrize(
    ("folded_rows", "options", "folds"),
    [
        (True, {}, True),
        (True, {"causal": True, "scale": 0.3}, True),
        (False, {}, False),
        (True, {"scale": -0.3}, False),
        (True, {"scale": 0.0}, False),
        (True, {"scale": 1024.0}, True),
        (True, {"scale": 1025.0}, False),
        (True, {"scale": 1 / 1024}, True),
        (True, {"scale": 1 / 1025}, False),
        (True, {"softcap": 20.0}, False),
    ],
)
def test_tensor_cores_subtract_lse_where_their_product_is_the_score(folded_rows, options, folds):
    """Per query of the two tiles in flight 16 bytes instead of 8, and 256 more; all in units of 1,024."""
    q, k, v, _ = arrays(Sq=100, Sk=130, D=128)
    config = dataclasses.replace(HOPPER_BACKWARD, folded_rows=folded_rows)
    plan = dispatch.plan_backward(Problem.of(q, k, v, **options), 16, HOPPER, {"backward": config})
    main = plan.launches[1][0]
    assert dict(main.defines)["CF_FOLDED_ROWS"] == folds
    assert main.shared_bytes == 1024 * (32 + 32 + 2 * (16 + 16) + 2 * 16 + 32 + (3 if folds else 2))


@pytest.mark.parametrize(("d", "columns"), [(40, 64), (64, 64), (72, 128), (128, 128)])
def test_launches_of_a_backward_with_tensor_maps(d, columns):
    """All three kernels are one module; dQ is summed in panels of 64 columns, beside counters of sums and of keys."""
    q, k, v, _ = arrays(B=3, Sq=100, Sk=130, H=4, Hk=2, D=d)
    plan = dispatch.plan_backward(Problem.of(q, k, v), 16, HOPPER, {"backward": HOPPER_BACKWARD})
    (rows, tiles), (main, key_tiles), (store, same_tiles) = plan.launches
    assert len({(kernel.file, kernel.defines, kernel.target) for kernel in (rows, main, store)}) == 1
    assert main.target == "sm_90a"
    assert (tiles, key_tiles, same_tiles) == (3 * 4 * 2, 3 * 2 * 2, 3 * 4 * 2)
    assert plan.dq_floats == tiles * (64 * columns + 1) + 1
    assert (rows.threads, main.threads, store.threads) == (8 * 64, 384, 256)
    assert store.shared_bytes == 64 * columns * 2
    assert plan.map_rows == (64, 64, 128, 128)


@pytest.mark.parametrize(("heads", "blocks", "whole", "share", "sharers"), [(2, 128, 0, 8, 128), (5, 132, 132, 4, 112)])
def test_launches_of_a_backward_whose_last_keys_are_shared_out(heads, blocks, whole, share, sharers):
    """Behind the counters of dQ there are two of each share, and from a multiple of 16 bytes on its dK and dV."""
    q, k, v, _ = arrays(B=1, Sq=1000, Sk=4000, H=heads, Hk=heads, D=40, Dv=72)
    problem = Problem.of(q, k, v)
    plan = dispatch.plan_backward(problem, 16, HOPPER, {"backward": HOPPER_BACKWARD})
    assert [grid for _, grid in plan.launches] == [heads * 16, blocks, heads * 16]
    assert plan.launches[1][0].cooperative
    assert (plan.whole_works, plan.share) == (whole, share)
    counters = heads * 16 + 1 + 2 * sharers
    assert plan.dq_floats == heads * 16 * 64 * 64 + -(-counters // 4) * 4 + sharers * 128 * (48 + 80)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"causal": True}, HOPPER_BACKWARD),
        ({"deterministic": True}, HOPPER_BACKWARD),
        ({}, dataclasses.replace(HOPPER_BACKWARD, first_stores=False)),
    ],
)
def test_keys_are_not_shared_out(options, config):
    q, k, v, _ = arrays(B=1, Sq=1000, Sk=4000, H=1, Hk=1)
    plan = dispatch.plan_backward(Problem.of(q, k, v, **options), 16, HOPPER, {"backward": config})
    assert (plan.whole_works, plan.share, plan.launches[1][1]) == (32, 0, 32)
    assert plan.dq_floats == 16 * 64 * 64 + 16 + 1


@pytest.mark.parametrize(("d", "dv", "columns"), [(136, 64, 192), (40, 136, 64), (256, 256, 256)])
def test_launches_of_a_backward_of_roles(d, dv, columns):
    q, k, v, _ = arrays(B=3, Sq=100, Sk=130, H=4, Hk=2, D=d, Dv=dv)
    given = TileConfig("wgmma", 64, 64, 16, 2)
    plan = dispatch.plan_backward(Problem.of(q, k, v), 16, HOPPER, {"backward": given})
    (rows, tiles), (main, key_tiles), (store, same_tiles) = plan.launches
    assert len({(kernel.file, kernel.defines, kernel.target) for kernel in (rows, main, store)}) == 1
    assert (main.file, main.name, main.target) == ("backward_wgmma_wide.cu", "backward_wgmma_wide", "sm_90a")
    assert (tiles, key_tiles, same_tiles) == (3 * 4 * 2, 3 * 2 * 3, 3 * 4 * 2)
    assert plan.dq_floats == tiles * 64 * columns
    assert (rows.threads, main.threads, store.threads) == (8 * 64, 512, 256)
    assert (rows.shared_bytes, store.shared_bytes) == (0, 0)
    assert plan.map_rows == (64, 64, 64, 64)


@pytest.mark.parametrize(
    ("mappable", "vector_bytes", "family"), [(True, 16, "wgmma"), (False, 16, "mma"), (True, 8, "mma")]
)
def test_a_tuned_backward_with_tensor_maps_is_for_what_they_describe(monkeypatch, mappable, vector_bytes, family):
    winner = types.SimpleNamespace(config=HOPPER_BACKWARD, origin="tuned", distance=0.0, is_general=True)
    monkeypatch.setattr(dispatch.store, "find", lambda task, *_: [winner] if task == "backward" else [])
    q, k, v, _ = arrays()
    plan = dispatch.plan_backward(Problem.of(q, k, v), vector_bytes, HOPPER, mappable=mappable)
    ((_, config, _),) = plan.configs
    assert config.family == family


ALONE = {("backward", "wgmma")}
APART = {("backward_dkv", "mma"), ("backward_dq", "mma")}


@pytest.mark.parametrize(
    ("d", "given", "mappable", "kernels"),
    [
        (64, None, True, ALONE),
        (128, None, True, ALONE),
        (136, None, True, APART),
        (64, None, False, APART),
        (64, HOPPER_BACKWARD, True, ALONE),
        # These sum in any order.
        (256, TileConfig("wgmma", 64, 64, 16, 2), True, APART),
        (64, TileConfig("mma", 64, 64, 4, 2), True, APART),
    ],
)
def test_a_deterministic_backward_sums_in_the_order_of_the_keys_or_apart(d, given, mappable, kernels):
    q, k, v, _ = arrays(D=d)
    problem = Problem.of(q, k, v, deterministic=True)
    plan = dispatch.plan_backward(problem, 16, HOPPER, {"backward": given} if given else None, mappable)
    assert {(task, config.family) for task, config, _ in plan.configs} == kernels


@pytest.mark.parametrize("task", ["backward_dkv", "backward_dq"])
def test_tiles_given_for_one_of_two_kernels_are_used(task):
    q, k, v, _ = arrays(D=64)
    given = {task: TileConfig("mma", 64, 64, 4, 2)}
    plan = dispatch.plan_backward(Problem.of(q, k, v, deterministic=True), 16, HOPPER, given)
    assert {(task, config) for task, config, _ in plan.configs} >= set(given.items())
    assert len(plan.launches) == 3
    assert plan.dq_floats == 0


def test_blocks_stay_in_the_backward_too(hopper):
    for heads, expected in ((1, 2), (66, 132), (67, 132)):
        backward(Engine(hopper), *arrays(B=1, Sk=200, H=heads, Hk=heads))  # two tiles of 128 keys
        (main, grid) = hopper.loads[-2]
        assert (main.name, grid) == ("backward_wgmma", expected)


@pytest.mark.parametrize(("deterministic", "first_stores", "causal"), list(itertools.product([False, True], repeat=3)))
def test_only_blocks_that_wait_for_later_ones_are_launched_together(deterministic, first_stores, causal):
    q, k, v, _ = arrays(D=64)
    problem = Problem.of(q, k, v, deterministic=deterministic, causal=causal)
    given = {"backward": dataclasses.replace(HOPPER_BACKWARD, first_stores=first_stores)}
    plan = dispatch.plan_backward(problem, 16, HOPPER, given)
    together = {kernel.name for kernel, _ in plan.launches if kernel.cooperative}
    assert together == ({"backward_wgmma"} if (deterministic or first_stores) and not causal else set())


def test_maps_are_kept_by_addresses(hopper, monkeypatch):
    monkeypatch.setattr(engine, "_MAPS_KEPT", 2)
    same = Engine(hopper)
    q, k, v, out = arrays()
    others = [aligned(q.shape) for _ in range(3)]
    for _ in range(3):
        forward(same, q, k, v, out)
        forward(same, others[0], k, v, out)
    described = [address for address, *_ in hopper.maps]
    assert described == [x.ctypes.data for x in (q, k, v, others[0], k, v)]
    numbers = [fields(FORWARD_TENSOR, data)["q_map"][0] for *_, data in hopper.launches]
    assert numbers == [1, 4] * 3
    (prepared,) = same._prepared.values()
    for other in others[1:]:
        forward(same, other, k, v, out)
        assert len(prepared._maps) <= 2


def test_strides_of_axes_of_length_1_are_legal_in_a_map(hopper):
    base = aligned((1, 100, 1, 64))
    nonsense = as_strided(base, base.shape, (10**9 + 1, 128, -7, 2))
    forward(hopper, nonsense, nonsense, nonsense, nonsense)
    assert [strides for _, _, strides, _, _ in hopper.maps] == [(128, 16, 16)] * 3


def test_blocks_stay_where_there_are_more_tiles_than_multiprocessors(hopper):
    for heads, expected in ((1, 2), (66, 132), (67, 132)):
        forward(hopper, *arrays(B=1, Sq=200, H=heads, Hk=1, D=128))  # two tiles of 128 rows
        kernel, grid = hopper.loads[-1]
        assert (kernel.name, grid) == ("forward_wgmma", expected)


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "expected"),
    [
        (200, 1, 1, 2),  # two neighbouring tiles of 128 rows
        (300, 1, 1, 4),  # the third one has no neighbour
        (300, 2, 1, 6),  # the same rows of both heads
        (300, 2, 2, 8),  # heads that share no keys
        (2048, 16, 2, 132),
    ],
)
def test_clusters_take_tiles_that_share_keys(hopper, length, heads, kv_heads, expected):
    given = {"forward": TileConfig("wgmma", 128, 128, 12, 2, cluster=2)}
    forward(Engine(hopper, given), *arrays(B=1, Sq=length, Sk=128, H=heads, Hk=kv_heads, D=128))
    kernel, grid = hopper.loads[-1]
    assert (dict(kernel.defines)["CF_CLUSTER"], grid) == (2, expected)
    assert [box for *_, box, _ in hopper.maps] == [(64, 64, 1, 1)] * 3  # half of a tile of keys


def test_clusters_are_whole(hopper):
    hopper.gpus[2] = dataclasses.replace(HOPPER, sm_count=7)
    given = {"forward": TileConfig("wgmma", 128, 128, 12, 2, cluster=2)}
    forward(Engine(hopper, given), *arrays(B=1, Sq=2048, H=4, Hk=4, D=128))
    assert hopper.loads[-1][1] == 6


def test_a_static_schedule_has_no_counter(hopper):
    q, k, v, out = arrays()
    for dynamic in (False, True):
        given = {"forward": TileConfig("wgmma", 192, 128, 16, 2, dynamic=dynamic)}
        forward(Engine(hopper, given), q, k, v, out)
    counters = [fields(FORWARD_TENSOR, data)["tile_counter"] for *_, data in hopper.launches]
    assert counters == [0, 0xC0]
    assert hopper.loads[0] == hopper.loads[1]  # one kernel does both


def test_macros_of_hopper():
    found = defines(limits=HOPPER)
    assert (found["CF_STALE_MAXIMUM"], found["CF_TURNS"], found["CF_SHARED_BASE"]) == (1, 1, 1024)
    assert not {"CF_STALE_MAXIMUM", "CF_TURNS", "CF_SHARED_BASE"} & set(defines(limits=A100))
    q, k, v, _ = arrays()
    for plan in (dispatch.plan_forward, dispatch.plan_backward):
        for limits, target in ((HOPPER, "sm_90a"), (A100, "")):  # wgmma is in no other instruction set
            (kernel, _), *_ = plan(Problem.of(q, k, v), 16, limits).launches
            assert kernel.target == target


def reversed_along(axis):
    return lambda x: np.flip(x, axis)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "view",
    [
        *(pytest.param(reversed_along(axis), id=f"reversed along axis {axis}") for axis in (0, 1, 2)),
        pytest.param(lambda x: np.broadcast_to(x[:1], x.shape), id="broadcast along axis 0"),
        pytest.param(lambda x: np.broadcast_to(x[:, :1], x.shape), id="broadcast along axis 1"),
        pytest.param(lambda x: np.broadcast_to(x[:, :, :1], x.shape), id="broadcast along axis 2"),
        pytest.param(lambda x: aligned(x.shape, offset=8), id="not aligned"),
        pytest.param(lambda x: aligned((*x.shape[:3], 68))[..., :64], id="rows not aligned"),
    ],
)
def test_what_no_map_describes_goes_to_mma(hopper, which, view):
    four = arrays()
    four[which] = view(four[which])
    forward(hopper, *four)
    assert hopper.maps == []
    ((name, _, data),) = hopper.launches
    assert name == "forward_mma"
    assert len(data) == FORWARD.packer.size


def test_an_output_needs_no_map(hopper):
    q, k, v, out = arrays()
    forward(hopper, q, k, v, out[:, ::-1])
    assert hopper.launches[0][0] == "forward_wgmma"
    forward(hopper, q, k, v, aligned(out.shape, offset=8))
    assert hopper.launches[1][0] == "forward_mma"


@pytest.mark.parametrize(("D", "family"), [(36, "mma"), (40, "wgmma"), (59, "mma"), (256, "wgmma")])
def test_rows_of_16_bytes_go_to_wgmma(hopper, D, family):
    forward(hopper, *arrays(D=D))
    assert hopper.launches[0][0] == f"forward_{family}"


# ---- what is kept between calls


def test_equal_calls_are_planned_once(runtime):
    same = Engine(runtime)
    four = arrays()
    for _ in range(3):
        forward(same, *four)
        forward(same, *arrays(), lse=np.zeros((2, 4, 100), np.float32))
    assert (len(runtime.loads), len(runtime.launches)) == (1, 6)
    for _ in range(3):
        backward(same, *arrays())
    assert (len(runtime.loads), len(runtime.launches)) == (1 + 3, 6 + 9)


def test_nothing_is_taken_for_another_call(runtime):
    """Equal shapes with other dtypes, strides, alignments, options or GPUs are planned anew (case 58)."""
    same = Engine(runtime)
    q, k, v, out = arrays(Sq=64, Sk=64, H=4, Hk=4)
    swapped = aligned((2, 4, 64, 64)).swapaxes(1, 2)
    broadcast = np.broadcast_to(k[:, :1], k.shape)
    variants = [
        (q, k, v, out),
        [x.astype(np.float32) for x in (q, k, v, out)],
        (swapped, k, v, out),
        (q, swapped, v, out),
        (q, k, swapped, out),
        (q, k, v, swapped),
        (q, broadcast, v, out),
        (aligned(q.shape, offset=2), k, v, out),
        (q, k, v, aligned(q.shape, offset=8)),
    ]
    options = [{"causal": True}, {"scale": 0.1}, {"scale": -0.1}, {"softcap": 2.0}, {"window": (3, 4)}]
    calls = [(four, {}) for four in variants] + [(variants[0], option) for option in options]
    for _ in range(2):
        for four, option in calls:
            forward(same, *four, **option)
    assert len(runtime.loads) == len(calls)
    runtime.current_device = 1
    forward(same, *variants[0])
    assert dict(runtime.loads[-1][0].defines)["CF_ARCH"] == 75
    assert len(runtime.loads) == len(calls) + 1

    by_call = runtime.launches[: len(calls)]
    assert by_call == runtime.launches[len(calls) : 2 * len(calls)]
    for (four, _), (_, _, data) in zip(calls, by_call, strict=True):
        packed = fields(FORWARD, data)
        for name, array in zip(("q", "k", "v", "out"), four, strict=True):
            strides = [packed[f"{name}_{axis}_stride"] * array.itemsize for axis in ("batch", "row", "head")]
            assert strides == list(array.strides[:3])


def test_what_is_kept_is_bounded(runtime, monkeypatch):
    monkeypatch.setattr(engine, "_PREPARED_KEPT", 3)
    same = Engine(runtime)
    for length in range(1, 9):
        forward(same, *arrays(Sq=length))
        assert len(same._prepared) <= 3


# ---- workspace


@pytest.mark.parametrize("Sq", [1, 63, 64, 100, 1000])
@pytest.mark.parametrize("D", [40, 64, 256])
def test_workspace_is_delta_and_the_sum_of_dq(runtime, Sq, D):
    backward(Engine(runtime), *arrays(B=2, Sq=Sq, H=6, Hk=2, D=D))
    main, _ = runtime.loads[1]
    tile = dict(main.defines)
    rows = 2 * 6 * Sq
    sums = 2 * 6 * blocks(Sq, tile["CF_BR"]) * tile["CF_BR"] * tile["CF_TILE_D"]
    (workspace,) = runtime.workspaces
    assert rows + sums <= workspace.size < rows + sums + 64
    packed = fields(BACKWARD, runtime.launches[0][2])
    assert packed["delta"] == workspace.ctypes.data
    assert packed["dq_sum"] >= packed["delta"] + 4 * rows
    assert packed["dq_sum"] + 4 * sums == workspace.ctypes.data + workspace.nbytes
    assert packed["dq_sum"] % 256 == 0


@pytest.mark.parametrize(("dtype", "deterministic"), [(np.float16, True), (np.float32, False)])
def test_workspace_without_a_sum_is_delta(runtime, dtype, deterministic):
    engine = Engine(runtime, summed_in_place(dtype, deterministic))
    backward(engine, *arrays(B=2, Sq=100, H=6, Hk=2, dtype=dtype), deterministic=deterministic)
    assert 2 * 6 * 100 <= runtime.workspaces[0].size < 2 * 6 * 100 + 64


def test_every_backward_has_its_own_workspace(runtime):
    same = Engine(runtime)
    backward(same, *arrays())
    backward(same, *arrays())
    assert runtime.workspaces[0].ctypes.data != runtime.workspaces[1].ctypes.data


# ---- threads


def test_threads_launch_with_their_own_pointers(runtime):
    """They share what is prepared; both have written their parameters before either launches."""
    both = threading.Barrier(2, timeout=10)
    expected, seen = {}, {}

    def load(kernel, grid):
        def launch(params, stream):
            if expected:
                both.wait()
                seen[threading.get_ident()] = fields(FORWARD, params.tobytes())

        runtime.loads.append(kernel)
        return launch

    runtime.load = load
    same = Engine(runtime)
    q, k, v, out = arrays()
    forward(same, q, k, v, out)

    def call(q, out):
        expected[threading.get_ident()] = q.ctypes.data, out.ctypes.data
        forward(same, q, k, v, out)

    threads = [threading.Thread(target=call, args=(aligned(q.shape), aligned(out.shape))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runtime.loads) == 1
    assert len(expected) == 2
    assert {ident: (packed["q"], packed["out"]) for ident, packed in seen.items()} == expected
