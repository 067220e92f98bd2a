"""The CUDA driver itself, for what CuPy does not expose of it."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any


@functools.cache
def driver() -> Any:
    """The driver's library."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def capture_id(stream: int) -> int:
    """What tells the capture that is under way on a stream from every other of the process.

    Raises:
        RuntimeError: the driver refuses.
    """
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error:
        raise RuntimeError(f"the CUDA driver does not tell which capture is under way on a stream (error {error})")
    return number.value
