"""The CPU's side of a comparison: standard attention against the tiled algorithm, both by BLAS."""

from __future__ import annotations

import os
import platform
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import cupyflash
from cupyflash import standard

from . import accuracy
from .cases import DIRECTIONS, Case
from .hbm import Traffic
from .session import Call, Counted, Key, Prepared, told

CANNOT = (
    "This is the CPU's part of the comparison. V1 and V3 are GPU algorithms and are missing here; so are bytes through "
    "a GPU's memory and the roofline, since what a CPU's caches do is not counted. V2 is the tiled algorithm in NumPy "
    "and BLAS, one thread per block of queries. Memory is what NumPy allocates, as tracemalloc has it. Where CuPy "
    "finds a GPU, cupyflash compare measures all four algorithms on it."
)


class CpuBench:
    """NumPy arrays on this machine."""

    dtype = "float32"
    algorithms: tuple[str, ...] = ("standard", "v2")

    def __init__(self) -> None:
        self.name = f"{_processor()}, {os.cpu_count()} threads"
        self.notes: list[str] = []
        self.made = f"cupyflash {cupyflash.__version__}, NumPy {np.__version__}, {time.strftime('%Y-%m-%d')}"

    def compile(self, cases: Sequence[Case]) -> int:
        return 0

    def roofs(self) -> tuple[float | None, float | None]:
        """Not of a CPU."""
        return None, None

    def prepare(self, case: Case, algorithms: Sequence[str]) -> Prepared:
        arrays = accuracy.inputs(case)
        calls: dict[Key, Call] = {}
        peaks: dict[Key, int] = {}
        reasons: dict[Key, str] = {}
        for algorithm in algorithms:
            needed = standard.score_bytes(case.problem(), "backward", on_gpu=False)
            if algorithm == "standard" and needed > _free_memory():
                why = f"S and P would take {needed / 2**30:.3g} GiB, {_free_memory() / 2**30:.3g} GiB are free"
                reasons |= dict.fromkeys(((algorithm, direction) for direction in DIRECTIONS), why)
                continue
            try:
                of_algorithm = accuracy.calls(case, algorithm, arrays)
                peaks |= {key: _peak_bytes(call) for key, call in of_algorithm.items()}
            except Exception as error:  # what keeps one from a problem is its note, and no end of the comparison
                reasons |= {(algorithm, direction): told(error) for direction in DIRECTIONS}
                continue
            calls |= of_algorithm
        return Prepared(calls, peaks, reasons)

    def seconds(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def counted(self, case: Case, key: Key) -> tuple[Traffic | None, str]:
        return None, ""

    def errors(self, case: Case) -> dict[Key, float]:
        return accuracy.errors(case, self.algorithms, np.asarray, np.asarray)

    def counters(self, cases: Sequence[Case]) -> list[Callable[[], list[Counted]]]:
        """None of a CPU."""
        return []


def _peak_bytes(call: Call) -> int:
    tracemalloc.start()  # NumPy reports its arrays to it
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _free_memory() -> float:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    except OSError:
        pass
    return float("inf")
