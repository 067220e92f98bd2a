"""The GPU's side of a comparison: times by events with a cold L2 cache, memory by a pool of its own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import cupy

import cupyflash
from cupyflash import dispatch, standard, standard_gpu
from cupyflash.arrays import Array, bfloat16
from cupyflash.cli.explain import describe_config
from cupyflash.runtime.cublas import products
from cupyflash.runtime.cuda import CudaRuntime
from cupyflash.tuning.measure import Stopwatch

from . import accuracy, ncu
from .cases import ALGORITHMS, DIRECTIONS, Case
from .hbm import Tiles, Traffic, count
from .session import Call, Counted, Key, Prepared, told

_FLUSH_BYTES = 256 << 20  # a quarter of what is written between launches, so that the host is ahead of them
_COPY_BYTES = 1 << 30
_PRODUCT_SIZES = (4096, 8192)
_ROOF_SAMPLES = 5
_COMPILERS = 16  # threads
_WARM_UP_SECONDS = 0.05  # of each problem
_OLDEST_WITH_BFLOAT16 = 80


def inputs(case: Case) -> list[Array]:
    """Normal q, k, v and dout of a case, CuPy arrays in its dtype."""
    cupy.random.seed(0)
    dtype = bfloat16("dtype") if case.dtype == "bfloat16" else case.dtype
    return [cupy.random.standard_normal(case.shape, dtype=cupy.float32).astype(dtype) for _ in range(4)]


def _multiply(a: Array, b: Array, c: Array) -> None:
    with products() as product:
        product(a, b, c)


class GpuBench:
    """The current GPU, through CuPy.

    Args:
        dtype: "float16" or "bfloat16"; None takes bfloat16 where the GPU has it.
        use_ncu: have Nsight Compute read the GPU's counters, if it is there.
    """

    algorithms: tuple[str, ...] = ALGORITHMS

    def __init__(self, dtype: str | None = None, use_ncu: bool = True) -> None:
        self._ncu = ncu.find() if use_ncu else None
        self._runtime = CudaRuntime()
        self._device = cupy.cuda.Device()
        self.limits = self._runtime.limits()
        self.name = self.limits.name
        self.dtype = dtype or ("bfloat16" if self.limits.arch >= _OLDEST_WITH_BFLOAT16 else "float16")
        driver = cupy.cuda.runtime.driverGetVersion()
        nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        self.made = (
            f"cupyflash {cupyflash.__version__}, CuPy {cupy.__version__}, NVRTC {nvrtc}, driver for CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}, {time.strftime('%Y-%m-%d')}"
        )
        self.notes: list[str] = []
        self._stopwatch = Stopwatch(max(self.limits.l2_bytes, _FLUSH_BYTES))
        self._expected: dict[int, float] = {}
        # Empty before each call that is measured with it: all that it takes from the device is for that call. One for
        # all calls: a pool that is dropped has been seen to keep its blocks.
        self._measuring = cupy.cuda.MemoryPool()

    def compile(self, cases: Sequence[Case]) -> int:
        profiled = {job.case for job in self._jobs(cases)} if self._ncu else set()
        kernels = {kernel for case in {*cases, *accuracy.cases(cases), *profiled} for kernel in self._kernels(case)}
        modules = {(kernel.file, kernel.defines): kernel for kernel in kernels}
        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as threads:
            return len(list(threads.map(self._compile, modules.values())))

    def roofs(self) -> tuple[float | None, float | None]:
        size = min(_COPY_BYTES, self._free_memory() // 4)
        source, target = cupy.cuda.alloc(size), cupy.cuda.alloc(size)
        source.memset(0, size)
        copied = self._best(partial(target.copy_from_device_async, source, size))
        rates = []
        for n in _PRODUCT_SIZES:
            a, b, c = (x.reshape(1, n, n) for x in inputs(Case(1, n, 1, n, False, self.dtype))[:3])
            for factor in (b, b.swapaxes(1, 2)):  # a roof is the best that can be had: attention's products have either
                rates.append(2 * n**3 / self._best(partial(_multiply, a, factor, c)))
        return 2 * size / copied, max(rates)

    def prepare(self, case: Case, algorithms: Sequence[str]) -> Prepared:
        self._expected.clear()
        self._release()
        calls: dict[Key, Call] = {}
        peaks: dict[Key, int] = {}
        reasons: dict[Key, str] = {}
        arrays = inputs(case)
        for algorithm in algorithms:
            try:
                self._require_memory(case, algorithm)
                of_algorithm = accuracy.calls(case, algorithm, arrays)
            except Exception as error:  # what keeps one from a problem is its note, and no end of the comparison
                reasons |= {(algorithm, direction): told(error) for direction in DIRECTIONS}
                continue
            for key, call in of_algorithm.items():
                try:
                    peaks[key] = self._peak_bytes(call)
                    calls[key] = call
                except Exception as error:
                    reasons[key] = told(error)
                self._release()  # freed blocks belong to a stream, and the stopwatch has its own
        ready: dict[Key, Call] = {}
        for key, call in calls.items():
            try:
                ready[key] = self._stopwatch.prepare(call)
            except Exception as error:
                reasons[key] = f"{told(error)}; {self._memory()}" if isinstance(error, MemoryError) else told(error)
                self._release()
        if ready:
            self._stopwatch.warm_up(next(iter(ready.values())), _WARM_UP_SECONDS)
        return Prepared(ready, peaks, reasons)

    def seconds(self, call: Call) -> float:
        sample: float = self._stopwatch.seconds(call, self._expected.get(id(call)))
        self._expected[id(call)] = sample
        return sample

    def counted(self, case: Case, key: Key) -> tuple[Traffic | None, str]:
        algorithm, direction = key
        tiles = self.tiles(case, key)
        told = "; ".join(f"{task} {describe_config(config)}" for task, config in tiles.items())
        traffic = count(algorithm, direction, case.problem(algorithm), tiles, self.limits, flushed=False)
        return traffic, told

    def tiles(self, case: Case, key: Key) -> Tiles:
        """What a pass of an algorithm takes."""
        algorithm, direction = key
        if algorithm == "standard":
            return {}
        problem = case.problem(algorithm)
        passes = {"forward": [dispatch.plan_forward], "backward": [dispatch.plan_backward]}
        passes["step"] = passes["forward"] + passes["backward"]
        plans = [plan(problem, 16, self.limits) for plan in passes[direction]]
        return {task: config for plan in plans for task, config, _ in plan.configs}

    def errors(self, case: Case) -> dict[Key, float]:
        return accuracy.errors(case, self.algorithms, cupy.asarray, cupy.asnumpy)

    def counters(self, cases: Sequence[Case]) -> list[Callable[[], list[Counted]]]:
        if self._ncu is None:
            self.notes.append("Nsight Compute (ncu) was not used: bytes are counted, not measured.")
            return []
        jobs = self._jobs(cases)
        lengths = dict.fromkeys(job.case.seqlen for job in jobs)
        return [partial(self._read_counters, [job for job in jobs if job.case.seqlen == length]) for length in lengths]

    def _read_counters(self, jobs: Sequence[ncu.Job]) -> list[Counted]:
        """Of all jobs by one run of the profiler; nothing where it has failed before."""
        if self._ncu is None:
            return []
        self._release()  # the profiled process needs it
        try:
            measured = ncu.measure(self._ncu, jobs)
        except ncu.NcuError as error:
            self.notes.append(f"Nsight Compute failed, bytes are counted only: {error}")
            self._ncu = None
            return []
        return [(job.case, job.key, traffic, self._counted(job)) for job, traffic in zip(jobs, measured, strict=True)]

    def _counted(self, job: ncu.Job) -> Traffic:
        problem, tiles = job.case.problem(job.algorithm), self.tiles(job.case, job.key)
        return count(*job.key, problem, tiles, self.limits, flushed=True)

    def _jobs(self, cases: Sequence[Case]) -> list[ncu.Job]:
        """The passes whose counters are read."""
        free = self._free_memory()
        return [
            ncu.Job(enlarged, algorithm, direction)
            for case in ncu.chosen(cases)
            for algorithm in self.algorithms
            for enlarged in [ncu.enlarged(case, algorithm, self.limits, free)]
            for direction in self._computable(enlarged, algorithm)
        ]

    def _kernels(self, case: Case) -> Iterator[dispatch.Kernel]:
        for algorithm in self.algorithms:
            problem = case.problem(algorithm)
            if algorithm == "standard":
                yield standard_gpu.kernel("standard_softmax", problem, self.limits)
                continue
            for plan in (dispatch.plan_forward, dispatch.plan_backward):
                try:
                    yield from (kernel for kernel, _ in plan(problem, 16, self.limits).launches)
                except dispatch.UnsupportedError:
                    continue  # prepare says why

    def _compile(self, kernel: dispatch.Kernel) -> None:
        """Into CuPy's cache on the disk, where whoever launches it finds it; and meets the error, if there is one."""
        with cupy.cuda.Device(self._device.id), contextlib.suppress(RuntimeError):  # the device is one per thread
            self._runtime.raw_kernel(kernel)

    def _peak_bytes(self, call: Call) -> int:
        call()  # what is made once is made now
        self._device.synchronize()
        self._release()
        with cupy.cuda.using_allocator(self._measuring.malloc):
            call()
            self._device.synchronize()
        peak = int(self._measuring.total_bytes())
        self._release()
        return peak

    def _release(self) -> None:
        """Gives memory back that CuPy keeps for later."""
        cupy.get_default_memory_pool().free_all_blocks()
        self._measuring.free_all_blocks()

    def _computable(self, case: Case, algorithm: str) -> list[str]:
        directions = []
        for direction in ("forward", "backward"):
            try:
                self.tiles(case, (algorithm, direction))
                directions.append(direction)
            except dispatch.UnsupportedError:
                continue
        return directions

    def _require_memory(self, case: Case, algorithm: str) -> None:
        needed = standard.score_bytes(case.problem(), "backward", on_gpu=True)
        free = self._free_memory()
        if algorithm == "standard" and needed > free:
            raise MemoryError(f"P and dS take {needed / 2**30:,.3g} GiB; {free / 2**30:,.3g} GiB are free")

    def _free_memory(self) -> int:
        return int(self._device.mem_info[0]) + int(cupy.get_default_memory_pool().free_bytes())

    def _memory(self) -> str:
        """What is known of the memory when there is none."""
        pool = cupy.get_default_memory_pool()
        free, total = self._device.mem_info
        numbers = (free, total, pool.used_bytes(), pool.free_bytes(), pool.get_limit())
        told = "the GPU has {:.3g} of {:.3g} GiB free, CuPy uses {:.3g} and keeps {:.3g}, its limit is {:.3g} (0: none)"
        return told.format(*(number / 2**30 for number in numbers))

    def _best(self, call: Call) -> float:
        call()
        self._device.synchronize()
        run = self._stopwatch.prepare(call)
        self._stopwatch.warm_up(run, 4 * _WARM_UP_SECONDS)
        return min(self._stopwatch.seconds(run) for _ in range(_ROOF_SAMPLES))
