"""What a worker does on its GPU: builds, proves and measures configurations."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from ..engine import Engine
from ..tiles import TileConfig
from .nvml import Sensors
from .passes import CudaMemory, Pass, plan, workspace_floats
from .proof import CASES, Prover, Wrong, numpy_dtype
from .tasks import Regime, Size, TuningTask

_MODULES_KEPT = 1000  # loaded kernels, of some 100 KiB each


class Rejected(Exception):
    """A configuration that is out, and why: ``kind`` is "compile" or "wrong"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Bench(Protocol):
    """What the tuner needs of a device; one process drives one."""

    def identity(self) -> dict[str, Any]:
        """``limits``, and versions to record."""

    def build(self, task: TuningTask, config: TileConfig, changes: dict[str, Any]) -> dict[str, Any]:
        """Compiles, or raises Rejected; ``registers`` and ``spilled_bytes`` of a thread, ``shared_bytes`` of a block.

        Called by several threads at once. ``changes``: see ``TuningTask.siblings``.
        """

    def prove(self, task: TuningTask, config: TileConfig, changes: dict[str, Any]) -> None:
        """Computes problems that wrong kernels fail; raises Rejected."""

    def measure(self, task: TuningTask, config: TileConfig, size: Size) -> dict[str, Any]:
        """``seconds`` of one sample, and what the sensors say."""

    def sustained(self, task: TuningTask, config: TileConfig, size: Size) -> float | None:
        """Seconds per launch back to back; None where that says nothing."""

    def forget(self, task: TuningTask) -> None:
        """Frees what is kept for a task."""


class CudaBench:
    """The current GPU, through CuPy."""

    def __init__(self, regime: Regime = "eager") -> None:
        import cupy

        from ..runtime.cuda import CudaRuntime
        from .measure import Stopwatch

        self._cupy = cupy
        self._runtime = CudaRuntime()
        self._limits = self._runtime.limits()
        self._memory = CudaMemory()
        self._prover = Prover(self._runtime, self._memory)
        self._stopwatch = Stopwatch(self._limits.l2_bytes, regime)
        device = cupy.cuda.Device()
        self._device_id = device.id
        self._sensors = Sensors(device.pci_bus_id)
        self._arrays: dict[tuple[str, Size], list[Any]] = {}
        self._runs: dict[tuple[str, Size, TileConfig], Callable[[], None]] = {}
        self._expected: dict[tuple[str, Size], float] = {}
        self._is_warm = False
        self._built = 0

    def identity(self) -> dict[str, Any]:
        cuda = self._cupy.cuda
        driver = cuda.runtime.driverGetVersion()
        return {
            "limits": asdict(self._limits),
            "cupy": self._cupy.__version__,
            "nvrtc": ".".join(map(str, cuda.nvrtc.getVersion())),
            "driver": f"{driver // 1000}.{driver % 1000 // 10}",
            "regime": f"{self._stopwatch.regime}, cold L2",
        }

    def build(self, task: TuningTask, config: TileConfig, changes: dict[str, Any]) -> dict[str, Any]:
        self._prover.answers(task, changes)
        with self._cupy.cuda.Device(self._device_id):  # CuPy's device is one per thread
            problem = task.problem(Size(128, 1), **changes)
            registers, spilled, shared = [], 0, 0
            for kernel, _ in self._own(task, plan(self._runtime, task.task, config, problem).launches):
                try:
                    raw = self._runtime.raw_kernel(kernel)
                    registers.append(raw.num_regs)
                    spilled += raw.local_size_bytes
                    shared = max(shared, kernel.shared_bytes + raw.shared_size_bytes)
                except RuntimeError as error:
                    if "could not compile" not in str(error):
                        raise
                    raise Rejected("compile", str(error)[-2000:]) from None
        self._built += 1
        return {"registers": max(registers, default=0), "spilled_bytes": spilled, "shared_bytes": shared}

    def prove(self, task: TuningTask, config: TileConfig, changes: dict[str, Any]) -> None:
        try:
            self._prover.prove(task, config, changes, CASES)
        except Wrong as error:
            raise Rejected("wrong", str(error)) from None

    def measure(self, task: TuningTask, config: TileConfig, size: Size) -> dict[str, Any]:
        key = (task.name, size)
        run = self._run(task, config, size)
        if key not in self._expected:
            self._expected[key] = self._stopwatch.seconds(run)
        seconds = self._stopwatch.seconds(run, self._expected[key])
        self._expected[key] = min(seconds, self._expected[key])  # of any configuration: it only says how often
        return {"seconds": seconds, **self._sensors.read()}

    def sustained(self, task: TuningTask, config: TileConfig, size: Size) -> float | None:
        run = self._run(task, config, size)
        return self._stopwatch.sustained(run, self._expected.get((task.name, size), 0.0))

    def forget(self, task: TuningTask) -> None:
        of_tasks: tuple[dict[Any, Any], ...] = (self._arrays, self._runs, self._expected)
        for kept in of_tasks:
            for key in [key for key in kept if key[0] == task.name]:
                del kept[key]
        if self._built >= _MODULES_KEPT:
            self._built = 0
            self._runtime.forget()
        gc.collect()
        self._cupy.get_default_memory_pool().free_all_blocks()

    def _run(self, task: TuningTask, config: TileConfig, size: Size) -> Callable[[], None]:
        """The launch, after one that nobody times."""
        key = (task.name, size, config)
        if key not in self._runs:
            ready = self._pass(task, config, size)
            self._cupy.cuda.Device().synchronize()  # the stopwatch has a stream of its own
            self._runs[key] = self._stopwatch.prepare(ready.launch)
            if not self._is_warm:
                self._is_warm = True
                self._stopwatch.warm_up(self._runs[key])
        return self._runs[key]

    def _pass(self, task: TuningTask, config: TileConfig, size: Size) -> Pass:
        problem = task.problem(size)
        arrays = self._arrays_of(task, size)
        if task.task == "forward":
            return Pass(self._runtime, task.task, config, problem, arrays[:5])
        floats = workspace_floats(plan(self._runtime, task.task, config, problem))
        if arrays[-1].size < floats:  # one for all configurations: they run one after the other
            arrays[-1] = self._memory.empty(4 * floats).view(self._cupy.float32)
        ready = Pass(self._runtime, task.task, config, problem, arrays)
        if task.task == "backward_dq":
            ready.launch_all()  # delta has to be there once
        return ready

    def _arrays_of(self, task: TuningTask, size: Size) -> list[Any]:
        """Arrays that all configurations share, a forward's results too: gradients of rubbish take rare paths."""
        key = (task.name, size)
        if key not in self._arrays:
            self._arrays[key] = self._new_arrays(task, size)
        return self._arrays[key]

    def _new_arrays(self, task: TuningTask, size: Size) -> list[Any]:
        cupy, p = self._cupy, task.problem(size)
        dtype = numpy_dtype(p.dtype)
        cupy.random.seed(0)

        def normal(length: int, heads: int, columns: int) -> Any:
            shape = (p.batch, length, heads, columns)
            return cupy.random.standard_normal(shape, dtype=cupy.float32).astype(dtype)

        q = normal(p.seqlen_q, p.num_heads, p.head_dim)
        k, v = (normal(p.seqlen_k, p.num_kv_heads, columns) for columns in (p.head_dim, p.head_dim_v))
        out = cupy.empty((*q.shape[:3], p.head_dim_v), dtype)
        lse = cupy.empty((p.batch, p.num_heads, p.seqlen_q), cupy.float32)
        if task.task == "forward":
            return [q, k, v, out, lse]
        Engine(self._runtime).forward(p, q, k, v, out, lse)
        dout = normal(p.seqlen_q, p.num_heads, p.head_dim_v)
        return [dout, q, k, v, out, lse, None, *(cupy.empty_like(x) for x in (q, k, v)), cupy.empty(0, cupy.float32)]

    @staticmethod
    def _own(task: TuningTask, launches: Any) -> Any:
        return {"backward_dkv": launches[:2], "backward_dq": launches[2:]}.get(task.task, launches)
