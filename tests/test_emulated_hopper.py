"""The host twins of Hopper's asynchronous units: a pipeline of TMA, mbarrier and wgmma against NumPy; its faults."""

import functools
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupyflash.runtime import emulated
from cupyflash.runtime.host import HostRuntime
from cupyflash.runtime.source import flatten

SOURCE = Path(__file__).with_name("emulated_hopper.cu")
ROWS, PANEL, STAGES = 64, 64, 2
ORDERS = ("forward", "reverse", "random")
COPY_MODES = ("issue", "wait", "random")

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


@pytest.mark.parametrize(
    "form",
    [
        {"n": 16},
        {"n": 256},
        {"n": 96, "depth": 128},
        {"n": 80, "b_transposed": True},
        {"n": 256, "depth": 16, "b_transposed": True},
        {"n": 192, "depth": 128, "b_transposed": True, "a_registers": True, "bfloat": True},
        {"n": 128, "a_registers": True},
        {"n": 64, "a_transposed": True},
        {"n": 128, "depth": 32, "a_transposed": True, "b_transposed": True, "bfloat": True},
    ],
    ids=str,
)
def test_every_form_of_the_product(form):
    D, expected = Pipeline(**form).run(blocks=3)
    np.testing.assert_array_equal(D, expected)
