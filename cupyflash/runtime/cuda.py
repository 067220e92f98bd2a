"""CUDA as a runtime of the engine: kernels compiled and launched by CuPy, whose compiler is used nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy

from ..arrays import Array
from ..dispatch import Kernel, UnsupportedError
from ..resources import Limits
from .driver import capture_id
from .params import ParamBlock
from .source import flatten
from .tensor_map import encode_tensor_map

_DEFAULT_SHARED_BYTES = 48 * 1024  # what a block gets without asking for more
_LEGACY_STREAM = 1  # 0 and 1 are the legacy default stream, which cannot be captured
_THREAD_STREAM = 2  # the default stream of a thread: another one in every thread
_OLDEST_ARCH = 75  # of NVRTC 13; the 16-bit and tensor-core wrappers know nothing older


class CudaRuntime:
    """Launches on the current device and CuPy's current stream."""

    def __init__(self) -> None:
        self._modules: dict[Any, _Module] = {}
        self._limits: dict[int, Limits] = {}
        self._tile_counters: dict[tuple[int, int], Array] = {}
        self._captured: dict[tuple[int, ...], list[tuple[int, Any]]] = {}
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

    def stream(self, device: int) -> int:
        return cupy.cuda.get_current_stream(device).ptr  # type: ignore[no-any-return]

    def load(self, kernel: Kernel, grid: int) -> Callable[[ParamBlock, int], None]:
        if grid < 1:
            raise ValueError(f"{kernel.name} would be launched with {grid} blocks; empty problems need no launch")
        raw = self.raw_kernel(kernel)
        if kernel.shared_bytes > _DEFAULT_SHARED_BYTES:
            raw.max_dynamic_shared_size_bytes = kernel.shared_bytes  # of the current device's function only
        loaded, threads, shared_bytes = raw.kernel, kernel.threads, kernel.shared_bytes
        function = loaded.ptr
        # The driver's own call: what CuPy's kernel object does before it costs as much as the launch.
        launch_kernel, launch_together = cupy.cuda.driver.launchKernel, cupy.cuda.driver.launchCooperativeKernel

        def launch(params: ParamBlock, stream: int) -> None:
            launch_kernel(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, params.kernel_params, 0)

        def launch_cooperative(params: ParamBlock, stream: int) -> None:
            launch_together(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, params.kernel_params)

        if kernel.cooperative:
            launch = launch_cooperative
        launch.loaded = loaded  # type: ignore[attr-defined]  # its module stays while somebody can launch it
        return launch

    def address(self, array: Array) -> int:
        return array.data.ptr  # type: ignore[no-any-return]

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Array:
        memory = cupy.cuda.UnownedMemory(address, 0, None, self.device())
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)

    def tensor_map(
        self, address: int, sizes: Sequence[int], byte_strides: Sequence[int], box: Sequence[int], itemsize: int
    ) -> bytes:
        return encode_tensor_map(address, sizes, byte_strides, box, itemsize)

    def tile_counter(self, device: int, stream: int) -> int:
        # A captured launch may run at any time, beside others that were captured or launched on this stream.
        if stream > _LEGACY_STREAM and (stream == _THREAD_STREAM or cupy.cuda.runtime.streamIsCapturing(stream)):
            return 0
        counter = self._tile_counters.get((device, stream))
        if counter is None:
            # One for all threads, whoever comes first: a kernel that runs keeps its own.
            counter = self._tile_counters.setdefault((device, stream), cupy.zeros(2, cupy.uint32))
        return counter.data.ptr  # type: ignore[no-any-return]

    def workspace(self, floats: int) -> tuple[int, Any]:
        stream = cupy.cuda.get_current_stream().ptr
        if stream > _LEGACY_STREAM and cupy.cuda.runtime.streamIsCapturing(stream):
            memory = self._captured_workspace(stream, 4 * floats)
        else:
            memory = cupy.cuda.alloc(4 * floats)  # an array around it costs twice as much as the memory
        return memory.ptr, memory

    def _captured_workspace(self, stream: int, size: int) -> Any:
        """Kept for good: a graph may use it at any time from now on, and nobody says when there will be no more.

        What is captured on one stream follows one another, and shares it.
        """
        key = capture_id(stream), self.device(), threading.get_ident(), stream  # a thread's default stream is its own
        with self._lock:
            kept = self._captured.setdefault(key, [])
            if not kept or kept[-1][0] < size:
                kept.append((size, cupy.cuda.alloc(size)))
            return kept[-1][1]

    def raw_kernel(self, kernel: Kernel) -> Any:
        """A compiled kernel on the current device, a ``cupy.RawKernel``. Threads may compile different ones at once."""
        key = (kernel.file, kernel.defines, self.device())
        with self._lock:
            module = self._modules.setdefault(key, _Module())
        with module.lock:
            if module.compiled is None:
                module.compiled = self._compile(kernel)
        return module.compiled.get_function(kernel.name)

    def forget(self) -> None:
        """Lets go of all kernels: those that nobody can launch are unloaded. Used again, they come from the disk."""
        with self._lock:
            self._modules.clear()
        cupy.clear_memo()  # of which CuPy's own modules are a part

    def _compile(self, kernel: Kernel) -> Any:
        limits = self.limits()
        if limits.arch < _OLDEST_ARCH:
            raise UnsupportedError(
                f"{limits.name} is sm_{limits.arch}; the kernels need sm_{_OLDEST_ARCH} (Turing) or later. "
                "NumPy arrays are computed on the CPU"
            )
        module = cupy.RawModule(code=flatten(kernel.file), options=options(kernel), backend="nvrtc")
        try:
            with _targeting(kernel.target):
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
    """Compiler options of a kernel; CuPy adds the device's architecture, which leaves a target of our own in force."""
    target = (f"-arch={kernel.target}",) if kernel.target and _takes_two_targets() else ()
    return ("-std=c++17", *target, *(f"-D{name}={value}" for name, value in kernel.defines))


def _takes_two_targets() -> bool:
    """Whether NVRTC accepts -arch=sm_90a beside CuPy's -arch=sm_90; up to 12.8 it does not."""
    return tuple(cupy.cuda.nvrtc.getVersion()) >= (12, 9)


_target_lock = threading.Lock()


@contextmanager
def _targeting(target: str) -> Iterator[None]:
    """Has CuPy compile for `target` where NVRTC would not take a second -arch: CuPy has no option for it."""
    if not target or _takes_two_targets():
        yield
        return
    compiler = cupy.cuda.compiler
    with _target_lock:
        own = compiler._get_arch_for_options_for_nvrtc
        # Who compiles meanwhile for the same GPU gets code for its full instruction set, which it runs.
        compiler._get_arch_for_options_for_nvrtc = lambda arch=None: (
            (f"-arch={target}", "cubin") if target.startswith(own(arch)[0].removeprefix("-arch=")) else own(arch)
        )
        try:
            yield
        finally:
            compiler._get_arch_for_options_for_nvrtc = own
