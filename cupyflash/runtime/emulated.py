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
import fcntl
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from .source import flatten

Order = Literal["forward", "reverse", "random"]
CopyMode = Literal["issue", "wait", "random"]

_ORDERS: tuple[Order, ...] = ("forward", "reverse", "random")
_COPY_MODES: tuple[CopyMode, ...] = ("issue", "wait", "random")
_MAX_THREADS = 1024
_MESSAGE_BYTES = 65536

POISON = 0xFFD5  # what memory holds that nobody has written, in 16 bits: see launch.cu

# Every access calls a function of launch.cu: the Linux kernel's variant of AddressSanitizer leaves checks to functions.
_ACCESSES = (
    "-fsanitize=kernel-address --param=asan-instrumentation-with-call-threshold=0 --param=asan-stack=0 "
    "--param=asan-globals=0"
)
# For CUPYFLASH_EMULATED_FLAGS: reads of memory that nobody has written are reported.
WATCHED = f"{_ACCESSES} --param=asan-instrument-writes=0"
# What threads ask for is recorded, with the places: cupyflash.trace.
_TRACED = f"{_ACCESSES} -DCF_EMULATED_TRACED"

# launch.cu: Launch. Kernel, parameters, their bytes, bytes of shared memory, seed; grid, threads, workers, order,
# copy mode.
_LAUNCH = struct.Struct("PPQQQIIIII")
_LAUNCHER = "include/emulated/launch.cu"

# No contraction: multiply_rounded must round. No strict aliasing: kernels reinterpret storage, which nvcc allows.
_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-pthread",
)
# No value ranges: GCC 12 mixes up those of two loops over the results of a thread (thread_gemm.cuh) and drops an exit.
_OPTIMIZED = ("-O2", "-fno-tree-vrp", "-g1")
_SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def available() -> bool:
    """Whether kernels can be built for the host."""
    return shutil.which("g++") is not None


def require_compiler() -> str:
    """The path of g++.

    Raises:
        RuntimeError: there is none.
    """
    gxx = shutil.which("g++")
    if gxx is None:
        raise RuntimeError(
            "the emulated device builds the kernels with g++, which was not found in PATH; install GCC "
            '(for example: apt install g++, or conda install gxx), or compute with device="cpu"'
        )
    return gxx


def build(
    source: str, defines: Mapping[str, object] | None = None, *, sanitize: bool = False, traced: bool = False
) -> ctypes.CDLL:
    """Builds a flattened kernel source for the host, or takes it from the cache; for `launch`.

    ``CUPYFLASH_EMULATED_FLAGS`` in the environment gives g++ further options, such as ``-O0 -g`` for a debugger.

    Args:
        source: what ``flatten(kernel_file, "emulated")`` returned.
        defines: values of the macros that the source leaves open.
        sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer, which end the process at the first error. The
            process must have been started with libasan.so, and without the check for leaks, which are Python's.
        traced: records what the threads ask for; see ``cupyflash.trace``.

    Raises:
        RuntimeError: there is no g++, or it does not accept the source (with its messages).
    """
    flags = (*_FLAGS, *(_SANITIZED if sanitize else _OPTIMIZED))
    further = os.environ.get("CUPYFLASH_EMULATED_FLAGS", "").split() + (_TRACED.split() if traced else [])
    switches = (flag for flag in further if flag.startswith("-D"))
    launcher = _built("o", ("-c", *flags, "-g", *switches), flatten(_LAUNCHER, "emulated"))
    macros = (f"-D{name}={value}" for name, value in (defines or {}).items())
    path = _built("so", ("-shared", *flags, *further, *macros), source, launcher)
    library = ctypes.CDLL(str(path))
    library.emulated_launch.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64]
    return library


def launch(
    library: ctypes.CDLL,
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
    kernel = ctypes.cast(getattr(library, kernel_name), ctypes.c_void_p).value
    own_params = ctypes.create_string_buffer(params, len(params))
    packed = _LAUNCH.pack(
        *(kernel, ctypes.addressof(own_params), len(params), shared_bytes, seed),
        *(grid, threads, workers, _ORDERS.index(order), _COPY_MODES.index(copy_mode)),
    )
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    failed = library.emulated_launch(packed, message, len(message))
    if failed:
        raise RuntimeError(f"{kernel_name}: {message.value.decode()}")


def cache_directory() -> Path:
    """Where built libraries are kept. ``XDG_CACHE_HOME`` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupyflash" / "emulated"


@functools.cache
def _version(gxx: str) -> str:
    return subprocess.run([gxx, "--version"], check=True, capture_output=True, text=True).stdout


def _built(suffix: str, flags: Sequence[str], source: str, *objects: Path) -> Path:
    """What g++ makes of a source and objects, from the cache if it is there."""
    gxx = require_compiler()
    key = hashlib.sha256("\0".join((_version(gxx), *flags, source, *map(str, objects))).encode()).hexdigest()[:32]
    path = cache_directory() / f"{key}.{suffix}"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=path.parent) as directory:
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, int(key[:8], 16))  # a byte per key: two processes do not build the same
        if not path.exists():
            built = Path(directory) / path.name
            # "-x c++ -": the #line directives name the real files, so no copy of the flattened source has to be kept.
            command = [gxx, *flags, "-x", "c++", "-", "-x", "none", *map(str, objects), "-o", str(built)]
            result = subprocess.run(command, input=source, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"g++ could not build the kernel:\n{result.stderr}")
            for product in sorted(
                Path(directory).iterdir(), key=lambda product: product == built
            ):  # notes of gcov, too
                os.replace(product, path.parent / product.name)
    return path
