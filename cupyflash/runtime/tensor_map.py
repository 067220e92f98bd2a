"""Tensor maps, made by the CUDA driver, which CuPy does not expose for it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from .driver import driver

# Constants of cuda.h.
_UNSIGNED_OF_BYTES = {1: 0, 2: 1, 4: 2}  # loads and stores only move bytes
_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_256B, _FILL_ZEROS = 0, 3, 3, 0
_RANK = 4
_BYTES, _ALIGNMENT = 128, 64


def encode_tensor_map(
    address: int, sizes: Sequence[int], byte_strides: Sequence[int], box: Sequence[int], itemsize: int
) -> bytes:
    """A ``CUtensorMap``; arguments as in ``engine.Runtime.tensor_map``.

    Raises:
        RuntimeError: the driver refuses.
    """
    room = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    aligned = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
    error = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _UNSIGNED_OF_BYTES[itemsize],
        _RANK,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * _RANK)(*sizes),
        (ctypes.c_uint64 * (_RANK - 1))(*byte_strides),
        (ctypes.c_uint32 * _RANK)(*box),
        (ctypes.c_uint32 * _RANK)(1, 1, 1, 1),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        _FILL_ZEROS,
    )
    if error:
        raise RuntimeError(
            f"the CUDA driver refused a tensor map (error {error}) for sizes {tuple(sizes)} of {itemsize} bytes, "
            f"strides {tuple(byte_strides)} bytes, box {tuple(box)} at {address:#x}"
        )
    return ctypes.string_at(aligned, _BYTES)
