"""The emulated device as a runtime of the engine: NumPy arrays, kernels built by g++."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Array
from ..dispatch import Kernel
from ..resources import KNOWN_GPUS, Limits
from . import emulated
from .source import flatten


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

    def device(self) -> int:
        return 0

    def limits(self) -> Limits:
        return self.limits_

    def load(self, kernel: Kernel, grid: int) -> Callable[[Any], None]:
        source = flatten(kernel.file, "emulated", self.sources)
        library = emulated.build(source, dict(kernel.defines), sanitize=self.sanitize)

        def launch(params: Any) -> None:
            emulated.launch(
                library,
                kernel.name,
                grid,
                params.tobytes(),
                threads=kernel.threads,
                shared_bytes=kernel.shared_bytes,
                **(self.options or {}),
            )

        return launch

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def workspace(self, floats: int) -> Array:
        padded = np.full(floats + 64, np.nan, np.float32)
        skip = -padded.ctypes.data % 256 // 4
        return padded[skip : skip + floats]
