"""What this machine has: the first thing to look at, and to send along, when something is slow or fails."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cupyflash
from cupyflash.arrays import INSTALL, require_gpu
from cupyflash.resources import Limits
from cupyflash.tuning import layers


def machine() -> str:
    """Versions, GPUs and folders, one to a line."""
    facts = [
        ("cupyflash", f"{cupyflash.__version__} in {Path(cupyflash.__file__).parent}"),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        *((name, _version(name)) for name in ("numpy", "ml_dtypes")),
        *_gpu_facts(),
    ]
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:{width}}  {fact}" for name, fact in facts)


def _gpu_facts() -> Iterator[tuple[str, str]]:
    try:
        import cupy
    except ImportError as error:
        yield "CuPy", f"none ({error}); for the GPU: {INSTALL}"
        return
    runtime = cupy.cuda.runtime
    yield "CuPy", cupy.__version__
    yield "NVRTC", _or_error(lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion())))
    yield "driver", _or_error(lambda: _cuda_version(runtime.driverGetVersion()))
    yield "compiled kernels", os.environ.get("CUPY_CACHE_DIR", str(Path("~/.cupy/kernel_cache").expanduser()))
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        yield "GPU", f"none ({error})"
        return
    for index in range(count):
        yield f"GPU {index}", _or_error(partial(_gpu, runtime, index))
        yield f"GPU {index} tiles", _or_error(partial(_tiles, runtime, index))


def current_gpu() -> Limits:
    """The limits of CuPy's current GPU."""
    require_gpu("planning for this machine's GPU")
    from cupyflash.runtime.cuda import CudaRuntime

    return CudaRuntime().limits()


def _gpu(runtime: Any, index: int) -> str:
    properties = runtime.getDeviceProperties(index)
    return (
        f"{properties['name'].decode()}, compute capability {properties['major']}.{properties['minor']}, "
        f"{properties['multiProcessorCount']} multiprocessors, {properties['totalGlobalMem'] / 2**30:.0f} GiB"
    )


def _tiles(runtime: Any, index: int) -> str:
    properties = runtime.getDeviceProperties(index)
    limits = Limits(
        name=properties["name"].decode(),
        arch=10 * properties["major"] + properties["minor"],
        shared_bytes=properties["sharedMemPerBlockOptin"],
        sm_count=properties["multiProcessorCount"],
        l2_bytes=properties["l2CacheSize"],
    )
    counts = [(layer, len(layers.entries(layer, limits))) for layer in layers.layers(limits.name)]
    if measured := ", ".join(f"{count} measured winners in {layer}" for layer, count in counts if count):
        return f"{measured}, else by heuristic"
    if others := ", ".join(map(str, layers.related(limits))):
        return f"as measured on the same architecture ({others}), else by heuristic"
    return "by heuristic (there are no measurements for this model)"


def _cuda_version(number: int) -> str:
    return f"supports CUDA {number // 1000}.{number % 1000 // 10}" if number else "none"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _or_error(fact: Callable[[], str]) -> str:
    """A fact, or why it cannot be had: a report about a broken installation must not break on it."""
    try:
        return fact()
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"
