"""Products of stacks of matrices by cuBLAS, in the matrices' own precision, with sums in float32 (float64 for float64).

CuPy's own product of three-dimensional arrays widens float16 to float32 and refuses bfloat16; this one does neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from ..arrays import Array

_LONGEST = 2**31 - 1  # sizes and leading dimensions are int32
_DATA_TYPES: dict[str, int] = {
    "float16": cupy.cuda.runtime.CUDA_R_16F,
    "bfloat16": cupy.cuda.runtime.CUDA_R_16BF,
    "float32": cupy.cuda.runtime.CUDA_R_32F,
    "float64": cupy.cuda.runtime.CUDA_R_64F,
}
_NO_REDUCED_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums stay float32


class Products:
    """Products with one handle and one precision; made by ``products``.

    Args:
        cublas: CuPy's module of that name.
        handle: of cuBLAS on the current device.
        precision: "tf32" lets tensor cores round float32 factors; "ieee" does not.
    """

    def __init__(self, cublas: Any, handle: int, precision: str) -> None:
        self._multiply = cublas.gemmStridedBatchedEx
        self._handle = handle
        self._transpose = {False: cublas.CUBLAS_OP_N, True: cublas.CUBLAS_OP_T}
        float32 = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if precision == "tf32" else cublas.CUBLAS_COMPUTE_32F
        self._compute = dict.fromkeys(("float16", "bfloat16"), cublas.CUBLAS_COMPUTE_32F)
        self._compute |= {"float32": float32, "float64": cublas.CUBLAS_COMPUTE_64F}
        self._algorithm = cublas.CUBLAS_GEMM_DEFAULT

    def __call__(self, A: Array, B: Array, C: Array, alpha: float = 1.0, beta: float = 0.0) -> None:
        """C = alpha * A @ B + beta * C, over all leading axes, on the current stream.

        Args:
            A: (..., m, k) factors; any strides, copied only where cuBLAS cannot address them.
            B: (..., k, n) factors of the same dtype.
            C: (..., m, n), of that dtype or float32; rows of consecutive elements.
        """
        (m, k), n = A.shape[-2:], B.shape[-1]
        # cuBLAS stores columns: what is a matrix in rows here is its transpose there, and C^T = B^T A^T.
        (A, a_rows, lda), (B, b_rows, ldb) = addressable(A), addressable(B)
        ldc = row_step(C)
        if ldc is None:
            raise ValueError(f"C has strides {C.strides}; its rows must be of consecutive elements")
        wide = np.float64 if A.dtype.name == "float64" else np.float32
        scalars = np.array([alpha, beta], wide)  # read before the call returns
        alpha_at = scalars.ctypes.data
        beta_at = alpha_at + scalars.itemsize
        before = self._handle, self._transpose[not b_rows], self._transpose[not a_rows], n, m, k, alpha_at
        a_type, b_type, c_type = map(data_type, (A, B, C))
        a_at, b_at, c_at = A.data.ptr, B.data.ptr, C.data.ptr
        after = self._compute[A.dtype.name], self._algorithm
        for count, (a_step, b_step, c_step), (a, b, c) in batches(A, B, C):
            of_A, of_B = (a_at + a, a_type, lda, a_step), (b_at + b, b_type, ldb, b_step)
            self._multiply(*before, *of_B, *of_A, beta_at, c_at + c, c_type, ldc, c_step, count, *after)


@contextmanager
def products(precision: str = "ieee") -> Iterator[Products]:
    """Products on the current device. CuPy's handle is as it was afterwards."""
    from cupy_backends.cuda.libs import cublas

    handle = cupy.cuda.device.get_cublas_handle()
    mode, pointers = cublas.getMathMode(handle), cublas.getPointerMode(handle)
    cublas.setMathMode(handle, cublas.CUBLAS_DEFAULT_MATH | _NO_REDUCED_SUMS)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
    try:
        yield Products(cublas, handle, precision)
    finally:
        cublas.setMathMode(handle, mode)
        cublas.setPointerMode(handle, pointers)


def data_type(array: Array) -> int:
    """The name of an array's dtype in cuBLAS."""
    return _DATA_TYPES[array.dtype.name]


def addressable(array: Array) -> tuple[Array, bool, int]:
    """An array that cuBLAS can address, this one or a copy, and its ``layout``."""
    described = layout(array)
    if described is None:
        array = cupy.ascontiguousarray(array)
        return array, True, max(1, array.shape[-1])
    return array, *described


def layout(array: Array) -> tuple[bool, int] | None:
    """(whether the rows of the matrices are of consecutive elements, else their columns are; elements between them).

    None if neither is so, or elements are not aligned.
    """
    itemsize = array.itemsize
    if array.data.ptr % itemsize or any(stride % itemsize for stride in array.strides):
        return None
    (rows, columns), (row_stride, column_stride) = array.shape[-2:], (x // itemsize for x in array.strides[-2:])
    if column_stride == 1 or columns == 1:  # the stride along an axis of length 1 means nothing
        leading = row_stride if rows > 1 else max(1, columns)
        if columns <= leading <= _LONGEST:
            return True, leading
    if row_stride == 1 or rows == 1:
        leading = column_stride if columns > 1 else max(1, rows)
        if rows <= leading <= _LONGEST:
            return False, leading
    return None


def row_step(array: Array) -> int | None:
    """Elements between rows of consecutive elements, as a product is written; None if these are no such matrices."""
    by_rows, step = layout(array) or (False, 0)
    return step if by_rows else None


def batches(*matrices: Array) -> Iterator[tuple[int, list[int], list[int]]]:
    """Calls that cover all leading axes: (count, elements between matrices of each array, offset of each in bytes).

    Axes along which all arrays advance evenly are one axis; the longest goes into one call, the others are counted.
    """
    axes: list[tuple[int, list[int]]] = []
    for axis, length in enumerate(matrices[0].shape[:-2]):
        strides = [x.strides[axis] // x.itemsize for x in matrices]
        if length == 1:
            continue
        if axes and axes[-1][1] == [length * stride for stride in strides]:
            axes[-1] = axes[-1][0] * length, strides
        else:
            axes.append((length, strides))
    none = [0] * len(matrices)
    batched = max((axis for axis in axes if min(axis[1]) >= 0), key=lambda axis: axis[0], default=(1, none))
    counted = [axis for axis in axes if axis is not batched]
    for index in itertools.product(*(range(length) for length, _ in counted)):
        steps = [(i, strides) for i, (_, strides) in zip(index, counted, strict=True)]
        offsets = [x.itemsize * sum(i * strides[n] for i, strides in steps) for n, x in enumerate(matrices)]
        yield batched[0], batched[1], offsets
