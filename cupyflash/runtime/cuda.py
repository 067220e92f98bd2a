"""CUDA as a runtime of the engine: kernels compiled and launched by CuPy, whose compiler is used nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import cupy

from ..arrays import Array
from ..dispatch import Kernel, UnsupportedError
from ..resources import Limits
from .source import flatten

_DEFAULT_SHARED_BYTES = 48 * 1024  # what a block gets without asking for more
_OLDEST_ARCH = 75  # of NVRTC 13; the 16-bit and tensor-core wrappers know nothing older


class CudaRuntime:
    """Launches on the current device and CuPy's current stream."""

    def __init__(self) -> None:
        self._modules: dict[Any, _Module] = {}
        self._limits: dict[int, Limits] = {}
        self._lock = threading.Lock()

    def device(self) -> int:
        return int(cupy.cuda.runtime.getDevice())

    def limits(self) -> Limits:
        device = cupy.cuda.Device()
        if device.id not in self._limits:
            properties = cupy.cuda.runtime.getDeviceProperties(device.id)
            self._limits[device.id] = Limits(
                name=properties["name"].decode(),
                arch=int(device.compute_capability),
                shared_bytes=device.attributes["MaxSharedMemoryPerBlockOptin"],
                sm_count=device.attributes["MultiProcessorCount"],
                l2_bytes=device.attributes["L2CacheSize"],
            )
        return self._limits[device.id]

    def load(self, kernel: Kernel, grid: int) -> Callable[[Any], None]:
        if grid < 1:
            raise ValueError(f"{kernel.name} would be launched with {grid} blocks; empty problems need no launch")
        raw = self.raw_kernel(kernel)
        if kernel.shared_bytes > _DEFAULT_SHARED_BYTES:
            raw.max_dynamic_shared_size_bytes = kernel.shared_bytes  # of the current device's function only
        function = raw.kernel
        grid_dim, block_dim, shared_bytes = (grid, 1, 1), (kernel.threads, 1, 1), kernel.shared_bytes

        def launch(params: Any) -> None:
            function(grid_dim, block_dim, (params,), shared_bytes)

        return launch

    def address(self, array: Array) -> int:
        return array.data.ptr  # type: ignore[no-any-return]

    def workspace(self, floats: int) -> Array:
        return cupy.empty(floats, cupy.float32)

    def raw_kernel(self, kernel: Kernel) -> Any:
        """A compiled kernel on the current device, a ``cupy.RawKernel``. Threads may compile different ones at once."""
        key = (kernel.file, kernel.defines, self.device())
        with self._lock:
            module = self._modules.setdefault(key, _Module())
        with module.lock:
            if module.compiled is None:
                module.compiled = self._compile(kernel)
        return module.compiled.get_function(kernel.name)

    def _compile(self, kernel: Kernel) -> Any:
        limits = self.limits()
        if limits.arch < _OLDEST_ARCH:
            raise UnsupportedError(
                f"{limits.name} is sm_{limits.arch}; the kernels need sm_{_OLDEST_ARCH} (Turing) or later. "
                "NumPy arrays are computed on the CPU"
            )
        module = cupy.RawModule(code=flatten(kernel.file), options=options(kernel), backend="nvrtc")
        try:
            module.compile()
        except cupy.cuda.compiler.CompileException as error:
            raise RuntimeError(
                f"NVRTC {'.'.join(map(str, cupy.cuda.nvrtc.getVersion()))} could not compile {kernel.file} for "
                f"{limits.name} (sm_{limits.arch}). If it does not know this GPU, a newer CuPy does: "
                f'pip install -U "cupyflash[cuda13]". Its messages:\n{error}'
            ) from error
        return module


class _Module:
    """A module that is compiled once, by whoever needs it first; CuPy keeps the binary on disk."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.compiled: Any = None


def options(kernel: Kernel) -> tuple[str, ...]:
    """Compiler options of a kernel; CuPy adds the device's architecture."""
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in kernel.defines))
