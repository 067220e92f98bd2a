"""Where elements lie, against what NumPy finds in small arrays."""

import numpy as np
import pytest
from textbook import randn

from cupyflash import memory
from cupyflash.arrays import address


@pytest.mark.parametrize("view", [np.s_[:], np.s_[::-1, 1:], np.s_[:, ::2, 3:4], np.s_[2:3, ::-2, ::-1]])
def test_overlaps_are_those_with_the_elements(view):
    array, byte = randn(4, 6, 8)[view], np.zeros(1, np.int8)
    first_bytes = [array[index[:-1]][index[-1] :].__array_interface__["data"][0] for index in np.ndindex(array.shape)]
    start, end = (at - address(array) for at in (min(first_bytes), max(first_bytes) + array.itemsize))
    assert memory.overlaps(array, byte) == range(start, end)
    assert memory.overlaps(byte, array) == range(1 - end, 1 - start)
    assert memory.overlaps(array, array) == range(start - end + 1, end - start)


@pytest.mark.parametrize(
    "views", [(np.s_[:, ::2], np.s_[:, 1::2]), (np.s_[:, :3], np.s_[1:, 2:]), (np.s_[2:], np.s_[::-3])]
)
def test_elements_are_shared_where_some_lie_in_both(views):
    array = np.arange(4 * 6 * 8, dtype=np.int16).reshape(4, 6, 8)
    one, other = (array[view] for view in views)
    distance = address(other) - address(one)
    assert memory.share_elements(one, other, distance) == bool(np.intersect1d(one, other).size)


def test_an_empty_array_overlaps_nothing():
    empty, byte = randn(4, 0, 8), np.zeros(1, np.int8)
    assert not memory.overlaps(empty, byte)
    assert not memory.overlaps(empty, empty)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 4), (16, 4)),
        ((3, 4), (4, 12)),
        ((3, 4), (-16, -4)),
        ((3, 1, 2), (8, 0, 4)),
        ((3, 2), (4, 4)),
        ((3, 2), (0, 4)),
        ((3, 2), (6, 4)),
        ((0, 2), (0, 0)),
    ],
)
def test_elements_that_lie_in_others(shape, strides):
    array = np.lib.stride_tricks.as_strided(np.zeros(100, np.int32)[50:], shape, strides)
    bytes_of = [at + n for at in (np.dot(index, strides) for index in np.ndindex(shape)) for n in range(4)]
    assert memory.slides_over_itself(array) == (len(set(bytes_of)) < len(bytes_of))
