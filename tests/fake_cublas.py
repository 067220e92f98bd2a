"""A cuBLAS whose device is host memory: products by NumPy from raw addresses, and the checks that cuBLAS makes.

Addresses and strides are taken as cuBLAS's documentation defines them (columns in a row, leading dimension, stride from
one matrix to the next), so that what calls it is tested against that definition, not against itself.
"""

import ctypes
import types

import numpy as np
from oracles import DTYPES

TYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float64), 2: np.dtype(np.float16), 14: np.dtype(DTYPES["bfloat16"])}
# cublasComputeType_t, as cublas_api.h numbers it: (type of alpha and beta, types of A and B that it takes)
COMPUTE = {68: (np.float32, {0, 2, 14}), 77: (np.float32, {0}), 70: (np.float64, {1})}


class FakeCublas(types.ModuleType):
    """Stands for cupy_backends.cuda.libs.cublas. ``memory``: the buffers that may be read and written."""

    CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
    CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_64F = 68, 77, 70
    CUBLAS_GEMM_DEFAULT = -1
    CUBLAS_DEFAULT_MATH, CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE = 0, 0, 1

    def __init__(self, memory):
        super().__init__("cublas")
        self.memory = memory
        self.math_mode, self.pointer_mode = 3, 1  # as somebody else left them
        self.calls = []

    def getMathMode(self, handle):
        return self.math_mode

    def setMathMode(self, handle, mode):
        self.math_mode = mode

    def getPointerMode(self, handle):
        return self.pointer_mode

    def setPointerMode(self, handle, mode):
        self.pointer_mode = mode

    def gemmStridedBatchedEx(
        self, handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB, beta, C, Ctype,
        ldc, strideC, batchCount, computeType, algo,
    ):  # fmt: skip
        numbers = [v for name, v in locals().items() if name != "self"]
        assert all(type(x) is int for x in numbers)
        assert self.pointer_mode == self.CUBLAS_POINTER_MODE_HOST
        assert self.math_mode & 16, "sums in reduced precision are allowed"
        scalar, factors = COMPUTE[computeType]
        assert Atype == Btype
        assert Atype in factors
        assert Ctype in (Atype, 0)
        assert batchCount >= 1
        alpha, beta = (np.frombuffer(ctypes.string_at(x, np.dtype(scalar).itemsize), scalar)[0] for x in (alpha, beta))
        self.calls.append((m, n, k, batchCount))
        for batch in range(batchCount):
            a = self._matrix(A, Atype, (m, k) if transa == 0 else (k, m), lda, batch * strideA)
            b = self._matrix(B, Btype, (k, n) if transb == 0 else (n, k), ldb, batch * strideB)
            c = self._matrix(C, Ctype, (m, n), ldc, batch * strideC)
            a, b = (x.astype(np.float64).T if t else x.astype(np.float64) for x, t in ((a, transa), (b, transb)))
            product = alpha * (a @ b)
            with np.errstate(over="ignore"):  # what C cannot hold becomes infinite
                c[...] = product if beta == 0 else product + beta * c.astype(np.float64)  # with 0, C is not read

    def _matrix(self, address, type_, shape, leading, offset):
        """A column-major matrix; nothing outside of one buffer is touched."""
        rows, columns = shape
        assert leading >= max(1, rows)
        dtype = TYPES[type_]
        begin = address + offset * dtype.itemsize
        end = begin + ((columns - 1) * leading + rows) * dtype.itemsize
        assert begin % dtype.itemsize == 0
        assert any(x.ctypes.data <= begin and end <= x.ctypes.data + x.nbytes for x in self.memory)
        bytes_ = (ctypes.c_char * (end - begin)).from_address(begin)
        return np.ndarray(shape, dtype, bytes_, strides=(dtype.itemsize, leading * dtype.itemsize))
