"""The emulated device: the CUDA kernels built by g++ and run on the CPU, one fiber per CUDA thread.

A test instrument. Without a GPU it finds what a wrong kernel does: a missing barrier or wait (the order of the threads
and the moment at which asynchronous copies land are seeded), a read of shared memory that nobody wrote (it starts as
NaN), a deadlock, an access out of bounds (``sanitize=True``). It models results, not timing; see
``kernels_cu/include/emulated``.

Example:
    >>> library = build(flatten("forward_mma.cu", "emulated"), defines)
    >>> launch(library, "forward_mma", grid, params, threads=128, shared_bytes=defines["CF_SHARED_BYTES"], seed=3)
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

Order = Literal["forward", "reverse", "random"]
CopyMode = Literal["issue", "wait", "random"]

_ORDERS: tuple[Order, ...] = ("forward", "reverse", "random")
_COPY_MODES: tuple[CopyMode, ...] = ("issue", "wait", "random")
_MAX_THREADS = 1024
_MESSAGE_BYTES = 65536

POISON = 0xFFD5  # what memory holds that nobody has written, in 16 bits: see launch.cuh

# Every access calls a function. The kernel's variant of AddressSanitizer leaves the checks to functions, which are
# ours; it is not AddressSanitizer itself, whose macro therefore has to go.
_ACCESSES = (
    "-fsanitize=kernel-address --param=asan-instrumentation-with-call-threshold=0 --param=asan-stack=0 "
    "--param=asan-globals=0 -U__SANITIZE_ADDRESS__"
)
# For CUPYFLASH_EMULATED_FLAGS: reads of memory that nobody has written are reported.
WATCHED = f"{_ACCESSES} -DCF_EMULATED_WATCHED"

_LAUNCHER = files("cupyflash.kernels_cu") / "include" / "emulated" / "launch.cuh"

# No contraction: multiply_rounded must round. No strict aliasing: kernels reinterpret storage, which nvcc allows.
_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-pthread",
)
# No value ranges: GCC 12 mixes up those of two loops over the results of a thread (thread_gemm.cuh) and drops an exit.
_OPTIMIZED = ("-O2", "-fno-tree-vrp", "-g1")
# What threads ask for is recorded, with the places: cupyflash.trace.
_TRACED = (*_OPTIMIZED, *f"{_ACCESSES} -DCF_EMULATED_TRACED".split())
_SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def compiler() -> str | None:
    """The path of g++, or None."""
    return shutil.which("g++")


def available() -> bool:
    """Whether kernels can be built for the host."""
    return compiler() is not None


def require_compiler() -> str:
    """The path of g++.

    Raises:
        RuntimeError: there is none.
    """
    gxx = compiler()
    if gxx is None:
        raise RuntimeError(
            "the emulated device builds the kernels with g++, which was not found in PATH; install GCC "
            '(for example: apt install g++, or conda install gxx), or compute with device="cpu"'
        )
    return gxx


@dataclass(frozen=True)
class Library:
    """Kernels built for the host; made by `build`, run by `launch`."""

    path: Path
    handle: ctypes.CDLL


def build(
    source: str, defines: Mapping[str, object] | None = None, *, sanitize: bool = False, traced: bool = False
) -> Library:
    """Builds a flattened kernel source for the host, or takes it from the cache.

    ``CUPYFLASH_EMULATED_FLAGS`` in the environment gives g++ further options, such as ``-O0 -g`` for a debugger.

    Args:
        source: what ``flatten(kernel_file, "emulated")`` returned.
        defines: values of the macros that the source leaves open.
        sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer, which end the process at the first error. The
            process must have been started with `sanitizer_environment`.
        traced: records what the threads ask for; see ``cupyflash.trace``.

    Raises:
        RuntimeError: there is no g++, or it does not accept the source (with its messages).
    """
    gxx = require_compiler()
    launcher = _LAUNCHER.read_text(encoding="utf-8").replace("#pragma once", "")
    source = f'{source}\n#line 1 "platform/launch.cuh"\n{launcher}'
    macros = tuple(f"-D{name}={value}" for name, value in (defines or {}).items())
    further = os.environ.get("CUPYFLASH_EMULATED_FLAGS", "").split()
    mode = _SANITIZED if sanitize else _TRACED if traced else _OPTIMIZED
    flags = (*_FLAGS, *mode, *further, *macros)
    key = hashlib.sha256("\0".join((_version(gxx), *flags, source)).encode()).hexdigest()[:32]
    path = cache_directory() / f"{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(gxx, flags, source, path)
    library = ctypes.CDLL(str(path))
    library.emulated_launch.restype = ctypes.c_int
    u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    library.emulated_launch.argtypes = [
        *(pointer, u32, u32, u64, ctypes.c_char_p, u64),  # kernel, grid, threads, shared bytes, parameters, their bytes
        *(u64, u32, u32, u32),  # seed, order, copy mode, workers
        *(ctypes.c_char_p, u64),  # room for the error message
    ]
    return Library(path, library)


def launch(
    library: Library,
    kernel_name: str,
    grid: int,
    params: bytes,
    *,
    threads: int,
    shared_bytes: int,
    seed: int = 0,
    order: Order = "random",
    copy_mode: CopyMode = "random",
    workers: int = 1,
) -> None:
    """Runs a kernel and returns when all its blocks have ended.

    Args:
        library: what `build` returned.
        kernel_name: of a kernel in it.
        grid: number of blocks.
        params: the kernel's parameter struct, byte for byte; addresses in it are host addresses.
        threads: per block; a multiple of 32, at most 1024.
        shared_bytes: the block's shared memory, as the kernel was compiled for (CF_SHARED_BYTES).
        seed: of everything random; blocks draw from their own sequences, so that `workers` changes nothing they draw.
        order: which thread that can run, runs: the first, the last, or a random one. Blocks start in the same order.
        copy_mode: whether a copy_async lands when it is issued, when it is waited for, or at random in between.
        workers: host threads over which the blocks are spread. Above 1 the order of atomic additions varies.

    Raises:
        ValueError: an option that no kernel can be launched with.
        RuntimeError: the kernel failed: a deadlock, diverging collectives, a shared address out of bounds, copies that
            nobody waited for. The message names the block and the threads.
    """
    if threads <= 0 or threads % 32 or threads > _MAX_THREADS:
        raise ValueError(f"threads is {threads}; it must be a multiple of 32, at most {_MAX_THREADS}")
    for name, value in (("grid", grid), ("workers", workers)):
        if value <= 0:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if order not in _ORDERS:
        raise ValueError(f"order is {order!r}; it must be one of {_ORDERS}")
    if copy_mode not in _COPY_MODES:
        raise ValueError(f"copy_mode is {copy_mode!r}; it must be one of {_COPY_MODES}")
    kernel = ctypes.cast(getattr(library.handle, kernel_name), ctypes.c_void_p)
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    choices = (seed, _ORDERS.index(order), _COPY_MODES.index(copy_mode), workers)
    failed = library.handle.emulated_launch(
        kernel, grid, threads, shared_bytes, params, len(params), *choices, message, len(message)
    )
    if failed:
        raise RuntimeError(f"{kernel_name}: {message.value.decode()}")


def sanitizer_environment() -> dict[str, str]:
    """The environment for a process that loads libraries built with ``sanitize=True``.

    AddressSanitizer has to be loaded before everything else, also before Python, whose own leaks are not of interest.
    """
    gxx = require_compiler()
    runtime = subprocess.run([gxx, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    options = {"LD_PRELOAD": runtime.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    return {**os.environ, **options}


def cache_directory() -> Path:
    """Where built libraries are kept. ``XDG_CACHE_HOME`` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupyflash" / "emulated"


@functools.cache
def _version(gxx: str) -> str:
    return subprocess.run([gxx, "--version"], check=True, capture_output=True, text=True).stdout


def _compile(gxx: str, flags: Sequence[str], source: str, path: Path) -> None:
    """Writes to a temporary file first: other processes may be building the same source."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        # "-x c++ -": the #line directives name the real files, so no copy of the flattened source has to be kept.
        command = [gxx, *flags, "-x", "c++", "-", "-o", str(built)]
        result = subprocess.run(command, input=source, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"g++ could not build the kernel:\n{result.stderr}")
        for product in sorted(Path(directory).iterdir(), key=lambda product: product == built):  # notes of gcov, if any
            os.replace(product, path.parent / product.name)
