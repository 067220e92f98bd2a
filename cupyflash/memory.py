"""Where the elements of native arrays lie: what kernels can address, and which arrays share any."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from .arrays import Array, address, module_of


def is_addressable(array: Array) -> bool:
    """Whether kernels can read an array in place: rows of head_dim consecutive elements, aligned to whole elements."""
    return _strides_fit(array.strides, array.itemsize) and not address(array) % array.itemsize


def is_aligned(array: Array) -> bool:
    """Whether a GPU can load every element."""
    return not address(array) % array.itemsize and not any(stride % array.itemsize for stride in array.strides)


def contiguous(array: Array) -> Array:
    """The array, or a copy where a kernel could not read its elements one after the other."""
    return array if array.flags.c_contiguous and is_aligned(array) else copied(array)


def copied(array: Array) -> Array:
    """The same elements, aligned and one after the other."""
    xp = module_of(array)
    if is_aligned(array):
        return xp.ascontiguousarray(array)
    if xp is np:
        return np.array(array, order="C")
    # A GPU cannot load such an element: byte by byte.
    parts = xp.ndarray((*array.shape, array.itemsize), np.uint8, array.data, (*array.strides, 1))
    return parts.copy().view(array.dtype).reshape(array.shape)


def slides_over_itself(array: Array) -> bool:
    """Whether elements may lie in others of the same array, as in a sliding window or a broadcast array.

    Slices and transposes of whole arrays never do. Dimensions that interleave and just miss one another count, too.
    """
    return _slides_over_itself(array.shape, array.strides, array.itemsize)


def overlaps(array: Array, other: Array) -> range:
    """The distances from the address of ``array`` to that of ``other`` at which they cover the same memory."""
    low, high = _span(array.shape, array.strides, array.itemsize)
    other_low, other_high = _span(other.shape, other.strides, other.itemsize)
    return range(low - other_high + 1, high - other_low)


def share_elements(array: Array, other: Array, distance: int) -> bool:
    """Whether elements of one lie in elements of the other, which begins ``distance`` bytes behind it."""
    return _share_elements(array.shape, array.strides, other.shape, other.strides, array.itemsize, distance)


@functools.lru_cache(maxsize=4096)
def _share_elements(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_shape: tuple[int, ...],
    other_strides: tuple[int, ...],
    itemsize: int,
    distance: int,
) -> bool:
    origin = 1 << 62  # of memory that nobody looks at

    def at(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        elements = {"shape": shape, "strides": strides, "typestr": f"|V{itemsize}", "data": (address, True)}
        return np.asarray(SimpleNamespace(__array_interface__=elements | {"version": 3}))

    return bool(np.shares_memory(at(origin, shape, strides), at(origin + distance, other_shape, other_strides)))


@functools.lru_cache(maxsize=4096)
def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """The half-open range of bytes that an array may touch, counted from its address."""
    if 0 in shape:
        return 0, 0
    low = sum(min(0, (length - 1) * stride) for length, stride in zip(shape, strides, strict=True))
    high = sum(max(0, (length - 1) * stride) for length, stride in zip(shape, strides, strict=True))
    return low, high + itemsize


@functools.lru_cache(maxsize=4096)
def _strides_fit(strides: tuple[int, ...], itemsize: int) -> bool:
    batch, sequence, heads, element = strides
    return element == itemsize and not (batch | sequence | heads) % itemsize


@functools.lru_cache(maxsize=4096)
def _slides_over_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether a dimension, from the nearest elements on, steps over less than those before it span."""
    if 0 in shape:
        return False
    span = itemsize
    for stride, length in sorted((abs(stride), length) for length, stride in zip(shape, strides, strict=True)):
        if length > 1 and stride < span:
            return True
        span += (length - 1) * stride
    return False
