"""Runs one kernel on the emulated device and keeps what every warp asked for, in order, with the lines that did.

The kernel is built with the hooks of ``kernels_cu/include/emulated/trace.cuh``. A warp's first lane speaks for it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from .. import dispatch, heuristics, resources
from ..arrays import Array
from ..engine import Engine
from ..problem import Problem, check_gpu
from ..resources import KNOWN_GPUS, Limits
from ..runtime import emulated
from ..runtime.host import HostRuntime
from ..runtime.params import ParamBlock
from ..runtime.source import flatten
from ..tiles import ALGORITHMS, Task, TileConfig

GPU = "H200"
_ACCESSES = ("read", "write")  # plain ones, to global memory
_LONGEST = 2048  # rows; a drawing of more is a grey field


class Place(NamedTuple):
    """A statement of the kernel's file: its first line, counted from 1, and its text."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """What a warp asked for ``count`` times in a row.

    Attributes:
        what: the name that the hook gives it, and its two numbers a and b; see ``replay``.
        places: where in the kernel's file, the innermost call first.
    """

    what: str
    a: int
    b: int
    count: int
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """What the warps of one block asked for.

    Attributes:
        kernel, config, grid: what was launched, in how many blocks.
        block: which of them was recorded.
        warps: each warp's requests.
    """

    kernel: dispatch.Kernel
    config: TileConfig
    grid: int
    block: int
    warps: tuple[tuple[Request, ...], ...]


def record(problem: Problem, task: Task = "forward", block: int = 0) -> Recording:
    """What one block of the main kernel of a task asks for.

    The GPU is an H200 of one multiprocessor, so that the one block of a kernel whose blocks stay takes all tiles.

    Args:
        problem: at most 2048 rows; its algorithm is one of kernels. The tiles are the first in the list of
            ``heuristics`` that fit.
        task: "forward" or "backward".
        block: of the grid.

    Raises:
        ValueError: the algorithm has no kernel for the problem, or the grid no such block; or the problem is too long.
        RuntimeError: there is no g++.
    """
    emulated.require_compiler()
    for rows in (problem.seqlen_q, problem.seqlen_k):
        if not 1 <= rows <= _LONGEST:
            raise ValueError(f"a sequence of {rows} rows; a trace has 1 to {_LONGEST} of queries and of keys")
    check_gpu(problem)
    limits = replace(KNOWN_GPUS[GPU], sm_count=1)
    config = _tiles(problem, task, limits)
    runtime = _Recorder(limits, config, task, block)
    _launch(Engine(runtime, given={task: config}), problem, task, runtime.allocate)
    assert runtime.recording is not None  # the task's main kernel was launched
    return runtime.recording


def _tiles(problem: Problem, task: Task, limits: Limits) -> TileConfig:
    reasons = ["there is none"]
    mappable = (problem.head_dim | problem.head_dim_v) * problem.itemsize % 16 == 0
    for config in heuristics.listed(task, problem, limits):
        if (config.family, task) in dispatch.FILES and config.family in ALGORITHMS[problem.algorithm]:
            reason = dispatch.why_not(task, config, problem, limits, mappable)
            if reason is None:
                return config
            reasons.append(reason)
    raise ValueError(f"algorithm is {problem.algorithm!r}, which has no {task} kernel for this problem: {reasons[-1]}")


def _launch(engine: Engine, problem: Problem, task: Task, allocate: Callable[..., Array]) -> None:
    rng = np.random.default_rng(0)
    q_shape = (problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim)
    k_shape = (problem.batch, problem.seqlen_k, problem.num_kv_heads, problem.head_dim)
    v_shape = (*k_shape[:3], problem.head_dim_v)
    out_shape = (*q_shape[:3], problem.head_dim_v)

    def filled(shape: tuple[int, ...]) -> Array:
        array = allocate(shape, problem.dtype)
        array[...] = rng.standard_normal(shape)
        return array

    q, k, v = filled(q_shape), filled(k_shape), filled(v_shape)
    out = allocate(out_shape, problem.dtype)
    lse = allocate((problem.batch, problem.num_heads, problem.seqlen_q), "float32")
    engine.forward(problem, q, k, v, out, lse)
    if task == "backward":
        gradients = [allocate(shape, problem.dtype) for shape in (q_shape, k_shape, v_shape)]
        engine.backward(problem, filled(out_shape), q, k, v, out, lse, *gradients)


_CALLERS = 12
_RECORD = np.dtype([("what", "u8"), ("a", "u8"), ("b", "u8"), ("callers", "u8", _CALLERS)])  # launch.cu: Record


@dataclass
class _Memory:
    """Where all arrays of a launch lie, so that the hooks tell them from the kernel's own variables."""

    bytes: Array = field(default_factory=lambda: np.zeros(64 << 20, np.uint8))
    used: int = 0

    def allocate(self, shape: tuple[int, ...] | int, dtype: str) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = -(-(self.bytes.ctypes.data + self.used) // 256) * 256 - self.bytes.ctypes.data
        self.used = start + size
        return self.bytes[start : self.used].view(dtype).reshape(shape)


class _Recorder(HostRuntime):
    """The emulated device; the task's main kernel is built with hooks, and recorded."""

    def __init__(self, limits: Limits, config: TileConfig, task: Task, block: int) -> None:
        super().__init__(limits, options={"order": "forward", "copy_mode": "wait"})
        wide = resources.is_wide(task, config)
        _, self._name = dispatch.WIDE_BACKWARD if wide else dispatch.FILES[config.family, task]
        self._config, self._block = config, block
        self._memory = _Memory()
        self.allocate = self._memory.allocate
        self.recording: Recording | None = None

    def load(self, kernel: dispatch.Kernel, grid: int) -> Callable[[ParamBlock, int], None]:
        if kernel.name != self._name:
            return super().load(kernel, grid)
        if not 0 <= self._block < grid:
            raise ValueError(f"block is {self._block}; the grid has blocks 0 to {grid - 1}")
        library = emulated.build(flatten(kernel.file, "emulated"), dict(kernel.defines), traced=True)
        first = self._memory.bytes.ctypes.data

        def launch(params: ParamBlock, stream: int) -> None:
            u64 = ctypes.c_uint64
            library.emulated_trace(self._block, u64(first), u64(first + self._memory.bytes.size))
            emulated.launch(
                library,
                kernel.name,
                grid,
                params.tobytes(),
                threads=kernel.threads,
                shared_bytes=kernel.shared_bytes,
                **(self.options or {}),
            )
            warps = [_records(library, warp) for warp in range(kernel.threads // 32)]
            callers = np.unique(np.concatenate([warp["callers"].ravel() for warp in warps]))
            places = _places(library, kernel.file, callers.tolist())
            requests = tuple(_requests(warp, places) for warp in warps)
            self.recording = Recording(kernel, self._config, grid, self._block, requests)

        return launch

    def workspace(self, floats: int) -> tuple[int, Array]:
        workspace = self.allocate(floats, "float32")
        workspace.view(np.uint16)[...] = emulated.POISON
        return self.address(workspace), workspace


def _records(library: ctypes.CDLL, warp: int) -> Array:
    read = library.emulated_records
    read.restype = ctypes.c_void_p
    count = ctypes.c_uint64()
    first = read(warp, ctypes.byref(count))
    return np.frombuffer(ctypes.string_at(first, count.value * _RECORD.itemsize), _RECORD)


def _requests(records: Array, places: dict[int, tuple[Place, ...]]) -> tuple[Request, ...]:
    """Equal ones in a row as one, and without what the emulated device accesses on a warp's behalf."""
    name = cache(lambda address: ctypes.string_at(address).decode())
    requests: list[Request] = []
    run: dict[Request, int] = {}  # where equal ones are counted: the last request, or all accesses since the last other
    asked: tuple[Place, ...] = ()  # where that was
    for address, a, b, callers in records.tolist():
        where = tuple(dict.fromkeys(place for caller in callers for place in places.get(caller, ())))
        request = Request(name(address), a, b, 1, where)
        is_access = request.what in _ACCESSES
        if is_access and where == asked:
            continue
        if request in run:
            counted = requests[run[request]]
            requests[run[request]] = replace(counted, count=counted.count + 1)
            continue
        if not is_access or not run or next(iter(run)).what not in _ACCESSES:
            run = {}
        if not is_access:
            asked = where
        run[request] = len(requests)
        requests.append(request)
    return tuple(requests)


def _places(library: ctypes.CDLL, file: str, callers: Sequence[int]) -> dict[int, tuple[Place, ...]]:
    """The statements of the kernel's file at return addresses, with those that they were inlined into."""
    addr2line = shutil.which("addr2line")
    if addr2line is None:
        return {}  # the drawing then lacks names
    base, end = _loaded_at(library)
    ours = [caller for caller in callers if base <= caller < end]
    offsets = "\n".join(hex(caller - base - 1) for caller in ours)  # of the call, which is before where it returns to
    command = [addr2line, "-a", "-i", "-e", str(library._name)]
    said = subprocess.run(command, input=offsets, check=True, capture_output=True, text=True).stdout
    lines = (files("cupyflash.kernels_cu") / file).read_text(encoding="utf-8").splitlines()
    found: list[list[Place]] = []
    for line in said.splitlines():
        if line.startswith("0x"):
            found.append([])
        elif match := re.search(rf"(?:^|/){re.escape(file)}:(\d+)", line):
            found[-1].append(Place(int(match[1]), _statement(lines, int(match[1]))))
    return {caller: tuple(places) for caller, places in zip(ours, found, strict=True)}


def _loaded_at(library: ctypes.CDLL) -> tuple[int, int]:
    """First address of a loaded library and the first behind it."""
    with open("/proc/self/maps") as maps:
        mapped = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(str(library._name))]
    return int(mapped[0][0], 16), int(mapped[-1][1], 16)


def _statement(lines: list[str], first: int) -> str:
    """From a line to the end of its statement."""
    text = lines[first - 1].strip()
    for line in lines[first : first + 3]:
        if ";" in text or text.endswith("{"):
            break
        text = f"{text} {line.strip()}"
    return text
