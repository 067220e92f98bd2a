"""The emulated device as a runtime of the engine: NumPy arrays, kernels built by g++."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Array
from ..dispatch import Kernel
from ..resources import KNOWN_GPUS, Limits
from . import emulated
from .params import ParamBlock
from .source import flatten

# kernels_cu/include/emulated/tma.cuh: TensorMap.
_TENSOR_MAP = struct.Struct("<Q4Q3Q4III40x")
_SWIZZLE_BYTES = 128


@dataclass
class HostRuntime:
    """Runs kernels on the CPU.

    Attributes:
        limits_: of the GPU to stand in for.
        options: of ``emulated.launch``: seed, order, copy_mode, workers.
        sanitize: build with AddressSanitizer.
        sources: the folder of the kernels, if it is not ``kernels_cu``.
    """

    limits_: Limits = KNOWN_GPUS["H200"]
    sanitize: bool = False
    options: dict[str, Any] | None = None
    sources: Path | None = None
    _tile_counter: Array = field(default_factory=lambda: np.zeros(2, np.uint32))

    def device(self) -> int:
        return 0

    def limits(self) -> Limits:
        return self.limits_

    def stream(self, device: int) -> int:
        return 0

    def load(self, kernel: Kernel, grid: int) -> Callable[[ParamBlock, int], None]:
        source = flatten(kernel.file, "emulated", self.sources)
        library = emulated.build(source, dict(kernel.defines), sanitize=self.sanitize)
        options = self.options or {}
        if kernel.cooperative:
            options = {**options, "workers": grid}

        def launch(params: ParamBlock, stream: int) -> None:
            emulated.launch(
                library,
                kernel.name,
                grid,
                params.tobytes(),
                threads=kernel.threads,
                shared_bytes=kernel.shared_bytes,
                **options,
            )

        return launch

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Array:
        spans = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
        low, high = sum(min(0, span) for span in spans), sum(max(0, span) for span in spans) + dtype.itemsize
        content = (ctypes.c_char * (high - low)).from_address(address + low)
        return np.ndarray(shape, dtype, content, -low, strides)

    def tensor_map(
        self, address: int, sizes: Sequence[int], byte_strides: Sequence[int], box: Sequence[int], itemsize: int
    ) -> bytes:
        """What tma_load and tma_store need to know of a tensor and of the box they copy; with the 128-byte swizzle.

        Args:
            address: of the first element; a multiple of 16 bytes.
            sizes: of four dimensions, in elements, the innermost first.
            byte_strides: of the three outer dimensions; multiples of 16.
            box: sizes of the box, at most 256 each; its rows have 128 bytes.
            itemsize: bytes of an element.

        Raises:
            ValueError: cuTensorMapEncodeTiled would not accept this.
        """
        if address % 16 or any(stride % 16 for stride in byte_strides):
            raise ValueError(f"address {address:#x}, byte_strides {byte_strides}: they must be multiples of 16")
        if any(not 0 < size <= 256 for size in box) or box[0] * itemsize != _SWIZZLE_BYTES:
            raise ValueError(f"box is {box}; sizes must be 1 to 256, and rows {_SWIZZLE_BYTES} bytes")
        if any(size <= 0 for size in sizes):
            raise ValueError(f"sizes are {sizes}; they must be positive")
        return _TENSOR_MAP.pack(address, *sizes, *byte_strides, *box, itemsize, _SWIZZLE_BYTES)

    def tile_counter(self, device: int, stream: int) -> int:
        if self._tile_counter.any():
            raise RuntimeError(f"a kernel left its tile counter at {self._tile_counter}")
        return int(self._tile_counter.ctypes.data)

    def workspace(self, floats: int) -> tuple[int, Array]:
        padded = np.full(2 * (floats + 64), emulated.POISON, np.uint16).view(np.float32)
        skip = -padded.ctypes.data % 256 // 4
        workspace = padded[skip : skip + floats]
        return self.address(workspace), workspace
