"""The host twins of Hopper's asynchronous units: a pipeline of TMA, mbarrier and wgmma against NumPy; its faults."""

import functools
import re
import struct
from pathlib import Path

import compiling
import ml_dtypes
import numpy as np
import pytest

from cupyflash import dispatch
from cupyflash.runtime import emulated
from cupyflash.runtime.host import HostRuntime
from cupyflash.runtime.source import flatten

SOURCE = Path(__file__).with_name("emulated_hopper.cu")
ROWS, PANEL, STAGES = 64, 64, 2
ORDERS = ("forward", "reverse", "random")
COPY_MODES = ("issue", "wait", "random")
FORMS = [
    {"n": 16},
    {"n": 256},
    {"n": 96, "depth": 128},
    {"n": 80, "b_transposed": True},
    {"n": 256, "depth": 16, "b_transposed": True},
    {"n": 192, "depth": 128, "b_transposed": True, "a_registers": True, "bfloat": True},
    {"n": 128, "a_registers": True},
    {"n": 64, "a_transposed": True},
    {"n": 128, "depth": 32, "a_transposed": True, "b_transposed": True, "bfloat": True},
]

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++"),
]


def tensor_map(array, box):
    """Of a 2-d array (rows, columns) and a box (columns, rows); with nonsense for the dimensions that have size 1."""
    rows, columns = array.shape
    pitch = array.strides[0]
    return HostRuntime().tensor_map(
        array.ctypes.data, (columns, rows, 1, 1), (pitch, 16, 16), (*box, 1, 1), array.itemsize
    )


def aligned(array):
    """A copy whose rows begin at multiples of 16 bytes."""
    pitch = -(-array.shape[1] * array.itemsize // 16) * 16
    buffer = np.zeros(array.shape[0] * pitch + 16, np.uint8)
    skip = -buffer.ctypes.data % 16
    rows = buffer[skip:][: array.shape[0] * pitch].reshape(array.shape[0], pitch)
    copy = rows.view(array.dtype)[:, : array.shape[1]]
    copy[...] = array
    return copy


class Pipeline:
    """The kernel `multiply`: D += A B^T for A of 64 rows, B of n rows, in blocks of `depth` columns."""

    def __init__(
        self, n=64, depth=64, a_transposed=False, b_transposed=False, a_registers=False, bfloat=False, **defines
    ):
        self.n, self.depth, self.dtype = n, depth, ml_dtypes.bfloat16 if bfloat else np.float16
        self.transposed = a_transposed, b_transposed
        self.defines = (
            {
                "CF_N": n,
                "CF_DEPTH": depth,
                "CF_TRANSPOSED_A": int(a_transposed),
                "CF_TRANSPOSED_B": int(b_transposed),
                "CF_REGISTERS_A": int(a_registers),
                "CF_MORE_BYTES": 0,
                "CF_WRONG_PARITY": 0,
                "CF_BOX_BYTES": 0,
                "CF_POLL_LAST": 0,
                "CF_CLUSTER": 1,
                "CF_SHARED_BYTES": self.shared_bytes(),
                "CF_ARCH": 90,
            }
            | ({"CF_BFLOAT": 1} if bfloat else {})
            | defines
        )

    def shared_bytes(self):
        def operand(transposed, rows):
            inner, outer = (rows, self.depth) if transposed else (self.depth, rows)
            return -(-inner // PANEL) * -(-outer * 128 // 1024) * 1024

        operands = STAGES * sum(operand(t, rows) for t, rows in zip(self.transposed, (ROWS, self.n), strict=True))
        return -(-(operands + ROWS * self.n * 4 + STAGES * 16) // 1024) * 1024

    def run(self, blocks=5, fault=None, **options):
        """(D, what it should be)"""
        rng = np.random.default_rng(0)
        k = blocks * self.depth
        A, B = (rng.integers(-4, 5, (rows, k)).astype(self.dtype) for rows in (ROWS, self.n))
        D = rng.integers(-4, 5, (ROWS, self.n)).astype(np.float32)
        expected = D + A.astype(np.float32) @ B.astype(np.float32).T
        maps, stored = b"", []
        for matrix, transposed in zip((A, B), self.transposed, strict=True):
            stored.append(aligned(matrix.T if transposed else matrix))
            maps += tensor_map(stored[-1], (PANEL, self.depth if transposed else len(matrix)))
        params = maps + struct.pack("<QQi44x", A.ctypes.data, D.ctypes.data, blocks)
        library = build(fault, tuple(self.defines.items()))
        shared_bytes = self.defines["CF_SHARED_BYTES"]
        emulated.launch(library, "multiply", 1, params, threads=256, shared_bytes=shared_bytes, **options)
        return D, expected


@functools.cache
def build(fault, defines):
    """The kernels, without the line of the fault."""
    source = flatten(str(SOURCE), "emulated")
    if fault is not None:
        lines = source.splitlines()
        (n,) = (n for n, line in enumerate(lines) if f"FAULT({fault})" in line)
        lines[n] = ""
        source = "\n".join(lines)
    return emulated.build(source, dict(defines))


# ---- Values: small integers, so that every order of addition is exact.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("copy_mode", COPY_MODES)
def test_pipeline_in_every_order(order, copy_mode):
    for seed in range(3):
        D, expected = Pipeline().run(order=order, copy_mode=copy_mode, seed=seed)
        np.testing.assert_array_equal(D, expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_the_product(form):
    D, expected = Pipeline(**form).run(blocks=3)
    np.testing.assert_array_equal(D, expected)


# ---- Boxes, stores and reductions.

WIDE = np.float32  # of 32 elements in a row of 128 bytes


def box_map(array, box):
    """Of a (d3, d2, d1, d0) array and a box with its innermost size first."""
    return HostRuntime().tensor_map(array.ctypes.data, array.shape[::-1], array.strides[2::-1], box, array.itemsize)


def box_run(kernel, from_map, to_map, sums, at, to_at, box_bytes, fault=None, **options):
    pipeline = Pipeline(CF_BOX_BYTES=box_bytes)
    params = from_map + to_map + struct.pack("<Q8i24x", sums.ctypes.data, *at, *to_at)
    library = build(fault, tuple(pipeline.defines.items()))
    shared_bytes = pipeline.defines["CF_SHARED_BYTES"]
    emulated.launch(library, kernel, 1, params, threads=32, shared_bytes=shared_bytes, **options)


def box_of(array, at, box):
    """The box at the coordinates, zero outside the array; sizes and coordinates innermost first."""
    indices = np.ix_(*(np.arange(c, c + size) for c, size in zip(at[::-1], box[::-1], strict=True)))
    inside = functools.reduce(np.logical_and, (((i >= 0) & (i < n)) for i, n in zip(indices, array.shape, strict=True)))
    clipped = (np.clip(i, 0, n - 1) for i, n in zip(indices, array.shape, strict=True))
    return np.where(inside, array[tuple(clipped)], 0)


TENSOR = np.random.default_rng(0).standard_normal((3, 4, 10, 36)).astype(WIDE)
BOX = (32, 5, 2, 2)
BOX_BYTES = 128 * 5 * 2 * 2


@pytest.mark.parametrize("at", [(0, 0, 0, 0), (4, 5, 2, 1), (8, 7, 3, 2), (-3, -2, -1, -1), (40, 0, 0, 0)])
def test_boxes_are_zero_outside_the_tensor_and_swizzled(at):
    shown = np.zeros(BOX_BYTES // 4, WIDE)
    box_run("show_box", box_map(TENSOR, BOX), box_map(TENSOR, BOX), shown, at, at, BOX_BYTES)
    rows = box_of(TENSOR, at, BOX).reshape(-1, 8, 4)  # 16-byte chunks
    swizzled = np.empty_like(rows)
    for n, row in enumerate(rows):
        swizzled[n, np.arange(8) ^ n % 8] = row
    np.testing.assert_array_equal(shown, swizzled.ravel())


@pytest.mark.parametrize("copy_mode", COPY_MODES)
@pytest.mark.parametrize("to_at", [(0, 0, 0, 0), (10, 6, -1, 2), (-5, 8, 3, 0)])
def test_boxes_are_stored_inside_the_tensor_only(to_at, copy_mode):
    target, sums = np.full_like(TENSOR, 7), np.zeros(32, np.float32)
    box_run(
        "move_box",
        box_map(TENSOR, BOX),
        box_map(target, BOX),
        sums,
        (4, 5, 2, 1),
        to_at,
        BOX_BYTES,
        copy_mode=copy_mode,
    )
    padded = np.full([n + 2 * 40 for n in TENSOR.shape], 7, WIDE)
    place = tuple(slice(40 + c, 40 + c + size) for c, size in zip(to_at[::-1], BOX[::-1], strict=True))
    padded[place] = box_of(TENSOR, (4, 5, 2, 1), BOX)
    np.testing.assert_array_equal(target, padded[tuple(slice(40, 40 + n) for n in TENSOR.shape)])
    np.testing.assert_array_equal(sums, 2 * np.arange(32) + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 8}, "address 0x8"),
        ({"byte_strides": (16, 24, 16)}, "multiples of 16"),
        ({"box": (64, 257, 1, 1)}, "box is"),
        ({"box": (32, 8, 1, 1)}, "rows 128 bytes"),
        ({"sizes": (64, 0, 1, 1)}, "sizes are"),
    ],
)
def test_maps_that_the_driver_refuses(change, message):
    good = {"address": 16, "sizes": (64, 8, 1, 1), "byte_strides": (128, 16, 16), "box": (64, 8, 1, 1), "itemsize": 2}
    assert len(HostRuntime().tensor_map(**good)) == 128
    with pytest.raises(ValueError, match=message):
        HostRuntime().tensor_map(**good | change)


def test_named_barriers():
    for order in ORDERS:
        out = np.zeros(256, np.uint32)
        misuse("hand_over", out, order=order)
        np.testing.assert_array_equal(out, [*range(127, -1, -1), *range(1127, 999, -1)])


# ---- Blocks that wait for one another.


def relay(blocks=4, fault=None, **options):
    """(sums, what they are in the order of the blocks and in no other, the counter)"""
    addends = np.stack([np.full(32, x, np.float32) for x in (2.0**24, 1, -(2.0**24), 0)])[:blocks]
    addends[-1] += np.arange(32)
    sums, counter = np.full(36, np.nan, np.float32), np.zeros(1, np.uint32)
    sums = sums[-sums.ctypes.data % 16 // 4 :][:32]
    library = build(fault, tuple(Pipeline().defines.items()))
    params = struct.pack("PPP", addends.ctypes.data, sums.ctypes.data, counter.ctypes.data)
    shared_bytes = Pipeline().defines["CF_SHARED_BYTES"]
    emulated.launch(library, "relay", blocks, params, threads=32, shared_bytes=shared_bytes, **options)
    return sums, np.add.accumulate(addends)[-1], int(counter[0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("copy_mode", COPY_MODES)
def test_blocks_store_and_add_in_the_order_they_are_told(order, copy_mode):
    for seed in range(3):
        sums, expected, counter = relay(order=order, copy_mode=copy_mode, seed=seed, workers=4)
        np.testing.assert_array_equal(sums, expected)
        assert counter == 4


@pytest.mark.parametrize("last", range(3))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("copy_mode", COPY_MODES)
def test_who_polls_starves_nobody(last, order, copy_mode):
    """Neither a thread that the order puts behind, nor a load that waits until no thread can run."""
    box = np.zeros((1, 1, 1, 36), WIDE)
    box = box.ravel()[-box.ctypes.data % 16 // 4 :][:32].reshape(1, 1, 1, 32)
    counter = np.zeros(1, np.uint32)
    params = box_map(box, (32, 1, 1, 1)) + struct.pack("<Q56x", counter.ctypes.data)
    pipeline = Pipeline(CF_POLL_LAST=last)
    shared_bytes = pipeline.defines["CF_SHARED_BYTES"]
    library = build(None, tuple(pipeline.defines.items()))
    emulated.launch(library, "poll", 1, params, threads=96, shared_bytes=shared_bytes, order=order, copy_mode=copy_mode)
    assert counter == 3


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        (None, {"order": "reverse"}, r"spin_until: a counter in global memory stays at 0"),  # no block before runs
        ("relay_wait", {"order": "reverse"}, r"wrong"),
        ("relay_told", {"order": "forward"}, r"spin_until: a counter in global memory stays at 0"),
        (
            "relay_done",
            {"order": "forward", "copy_mode": "wait", "workers": 4},
            r"wrong",
        ),  # told of before it has landed
        ("relay_seen", {"order": "forward"}, r"bulk_store: no fence_async_global since the thread saw what others did"),
        ("relay_fence", {"order": "forward"}, r"bulk_store: reads shared offset \d+, where a thread has written"),
    ],
)
def test_faults_around_blocks_that_wait_are_caught(fault, options, message):
    try:
        sums, expected, _ = relay(fault=fault, **options)
        found = "" if np.array_equal(sums, expected) else "wrong"
    except RuntimeError as error:
        found = str(error)
    assert re.search(message, found), found


# ---- Clusters.


def share(blocks=4, kernel="share", threads=64, fault=None, **options):
    """(boxes as each block shows them, what they are): the same pairs in both blocks of a cluster."""
    rows = np.random.default_rng(0).standard_normal((1, 1, 48, 32)).astype(WIDE)
    shown = np.zeros((blocks, 2, 16, 32), WIDE)
    pipeline = Pipeline(CF_CLUSTER=2)
    params = box_map(rows, (32, 8, 1, 1)) + struct.pack("<Q56x", shown.ctypes.data)
    library = build(fault, tuple(pipeline.defines.items()))
    shared_bytes = pipeline.defines["CF_SHARED_BYTES"]
    emulated.launch(library, kernel, blocks, params, threads=threads, shared_bytes=shared_bytes, **options)
    swizzled = np.empty((48, 8, 4), WIDE)
    for n, row in enumerate(rows.reshape(48, 8, 4)):
        swizzled[n, np.arange(8) ^ n % 8] = row
    return shown, np.broadcast_to(swizzled.reshape(3, 16, 32)[1:], shown.shape)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("copy_mode", COPY_MODES)
def test_blocks_of_a_cluster_load_for_each_other(order, copy_mode):
    for seed in range(3):
        shown, expected = share(order=order, copy_mode=copy_mode, seed=seed, workers=1 + seed)
        np.testing.assert_array_equal(shown, expected)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("share_start", r"there is no initialised barrier at shared offset \d+"),
        ("share_told", r"wrong"),
        ("share_empty", r"wrong|all \d arrivals of phase \d have come"),
        ("share_full", r"wrong|barrier_arrive_expect: all 1 arrivals of phase \d have come"),
        ("share_release", r"(?s)block \d: deadlock.*block \d: deadlock.*phase 0 lacks 4 of 4 arrivals and 0 bytes"),
        ("share_end", r"(barrier_arrive_at|tma_load): block \d of the cluster has ended"),
    ],
)
def test_faults_in_a_cluster_are_caught(fault, message):
    messages = caught(functools.partial(share, fault=fault), seeds=12)
    assert any(re.search(message, found) for found in messages), messages[:1]


@pytest.mark.parametrize(
    ("kernel", "blocks", "message"),
    [
        ("leave_alone", 2, r"block 0, thread 0 .*: barrier_arrive_at: block 1 of the cluster has ended"),
        ("one_thread_less", 2, r"warp 0, lanes 7-7: returned"),
        ("no_such_block", 2, r"barrier_arrive_at: block 2 of the cluster does not exist"),
        ("place_of_the_first_block", 2, r"block 1, .*: stmatrix_x4: the address is in block 0 of the cluster"),
        ("share", 3, r"the grid is no multiple of the cluster's blocks"),
    ],
)
def test_misuse_of_a_cluster_is_reported(kernel, blocks, message):
    with pytest.raises(RuntimeError, match=message):
        share(blocks, kernel, threads=64 if kernel == "share" else 32, order="reverse")


def test_a_bulk_store_moves_whole_chunks():
    with pytest.raises(RuntimeError, match=r"bulk_store: 24 bytes at 0x\w+: both must be multiples of 16"):
        misuse("store_of_24_bytes", threads=32)


# ---- Faults.


def misuse(kernel, out=None, threads=256, fault=None, **options):
    pipeline = Pipeline(CF_BOX_BYTES=0)
    out = np.zeros(256, np.uint32) if out is None else out
    library = build(fault, tuple(pipeline.defines.items()))
    params = struct.pack("P", out.ctypes.data)
    shared_bytes = pipeline.defines["CF_SHARED_BYTES"]
    emulated.launch(library, kernel, 1, params, threads=threads, shared_bytes=shared_bytes, **options)


def caught(run, seeds):
    """Whether a run fails or goes wrong for one of the seeds, and the messages."""
    messages = []
    for seed in range(seeds):
        for order in ORDERS:
            try:
                result, expected = run(seed=seed, order=order)
                messages += [] if np.array_equal(result, expected) else ["wrong"]
            except RuntimeError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("empty", r"deadlock|wrong"),
        ("full", r"wrong"),
        ("fence", r"wgmma: no wgmma_fence since the last wgmma_wait"),
        ("commit", r"wgmma_wait: no wgmma_commit since the last product"),
        ("wait", r"returned with \d+ products that no wgmma_wait has covered"),
        (
            "release",
            r"warp 4, lanes 0-0: at barrier_wait, parity 0, shared offset \d+: phase 0 lacks 128 of 128 arrivals",
        ),
        ("init", r"tma_load: no barrier_init_fence since barrier_init"),
        ("sync", r"there is no initialised barrier at shared offset \d+"),
        ({"CF_RELEASE_EARLY": 1}, r"wrong"),
        ({"CF_RELEASE_EARLY": 1, "a_registers": True}, r"wrong"),
        ({"CF_WRONG_PARITY": 1}, r"warp 0, lanes 0-31: at barrier_wait, parity 0, .*: phase 0 lacks 1 of 1"),
        ({"CF_MORE_BYTES": 16}, r"phase 0 lacks 0 of 1 arrivals and 16 bytes"),
        (
            {"CF_MORE_BYTES": -128},
            r"tma_load: brings 8192 bytes to the barrier at shared offset \d+, which expects 8064",
        ),
    ],
    ids=str,
)
def test_faults_in_the_pipeline_are_caught(fault, message):
    pipeline = Pipeline(**fault) if isinstance(fault, dict) else Pipeline()
    messages = caught(functools.partial(pipeline.run, fault=fault if isinstance(fault, str) else None), seeds=12)
    assert any(re.search(message, found) for found in messages), messages[:1]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("box_full", r"wrong|loads that no barrier_wait has covered"),
        ("bulk_commit", r"wrong|bulk_reduce_add: reads shared|2 bulk copies .* that no bulk_wait has covered"),
        ("async_fence", r"bulk_reduce_add: reads shared offset \d+, where a thread has written"),
        ("addends", r"wrong"),
        ("bulk_wait", r"bulk_reduce_add: reads shared|bulk copies from shared memory that no bulk_wait has covered"),
    ],
)
def test_faults_around_stores_are_caught(fault, message):
    def run(**options):
        target, sums = np.full_like(TENSOR, 7), np.zeros(32, np.float32)
        at = (0, 0, 0, 0)
        box_run("move_box", box_map(TENSOR, BOX), box_map(target, BOX), sums, at, at, BOX_BYTES, fault, **options)
        moved = np.array_equal(box_of(target, at, BOX), box_of(TENSOR, at, BOX))
        return np.append(sums, moved), np.append(2 * np.arange(32) + 1, True)

    messages = caught(run, seeds=6)
    assert any(re.search(message, found) for found in messages), messages[:1]


@pytest.mark.parametrize("fault", [None, "plain_fence"])
def test_operands_without_a_swizzle(fault):
    """Eight rows of A stand for all, and eight columns of B for sixteen: with a stride or a leading distance of 0."""

    def whole(rows, columns):
        row, column = np.ogrid[:rows, :columns]
        return (3 * row + 5 * column) % 7

    def run(**options):
        out = np.zeros((ROWS, 64), np.uint32)
        misuse("plain_operands", out, threads=128, fault=fault, **options)
        return out, np.tile(whole(8, 16) @ np.tile(whole(64, 8), 2).T, (ROWS // 8, 1))

    messages = caught(run, seeds=1)
    assert len(messages) == (0 if fault is None else len(ORDERS))
    assert all("where a thread has written" in message for message in messages)


@pytest.mark.parametrize("fault", ["read", "written", "named_sync"])
def test_faults_around_named_barriers_are_caught(fault):
    def run(**options):
        out = np.zeros(256, np.uint32)
        misuse("hand_over", out, fault=fault, **options)
        return out, [*range(127, -1, -1), *range(1127, 999, -1)]

    assert caught(run, seeds=2)


@pytest.mark.parametrize(
    ("kernel", "threads", "message"),
    [
        ("wrong_count", 256, r"named_sync: barrier 1 for (64|256) threads, while others use it for (64|256)"),
        ("wrong_barrier", 256, r"named_sync: barrier 16 for 256 threads; there are barriers 1 to 15"),
        ("too_many_registers", 384, r"at registers_acquire of 256 per thread: the block has \d+ left"),
        ("one_warp_less", 128, r"warp 3 took part in 0 of the 1 products of its warpgroup"),
        ("plain_along_rows", 128, r"wgmma: an operand without a swizzle has its rows along K here"),
        ("panel_misaligned", 128, r"wgmma: address 1280, .*: not panels aligned to 1024 bytes"),
        ("one_arrival_too_many", 32, r"barrier_arrive: all 1 arrivals of phase 0 have come to the barrier"),
        ("written_without_fence", 32, r"bulk_reduce_add: reads shared offset \d+, where a thread has written"),
    ],
)
def test_misuse_is_reported(kernel, threads, message):
    with pytest.raises(RuntimeError, match=message):
        misuse(kernel, threads=threads)


# ---- The same kernels on the other platform.


@pytest.mark.skipif(bool(compiling.missing()), reason=compiling.missing() or "NVRTC works")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_compile_for_hopper(form):
    """Every wrapper, as ptxas sees it: no spill, no warning, no serialised product."""
    defines = tuple(Pipeline(**form, CF_BOX_BYTES=BOX_BYTES).defines.items())
    kernel = dispatch.Kernel(str(SOURCE), "multiply", defines, 256, 0)
    check_compiled(kernel)


@pytest.mark.skipif(bool(compiling.missing()), reason=compiling.missing() or "NVRTC works")
def test_clusters_compile_for_hopper():
    defines = tuple(Pipeline(CF_CLUSTER=2, CF_BOX_BYTES=BOX_BYTES).defines.items())
    check_compiled(dispatch.Kernel(str(SOURCE), "share", defines, 64, 0))


def check_compiled(kernel):
    log = compiling.compile_cuda(kernel, "sm_90a", "--ptxas-options=-v")
    assert not re.search(r"warning|serializ|setmaxnreg ignored|C75\d\d", log, re.I), log
    assert all(usage.spill_bytes == 0 for usage in compiling.usage(log).values()), log
