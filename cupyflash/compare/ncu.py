"""Bytes by the GPU's own counters: Nsight Compute over a process that runs each pass once (``one.py``)."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..problem import ITEMSIZE
from ..resources import Limits
from .cases import Case
from .hbm import Traffic

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
SECTORS = "lts__t_sectors_srcunit_tex.sum"  # between the multiprocessors and the L2 cache
_SECTOR_BYTES = 32
MARKER = "cupyflash_next_pass"  # the kernel that one.py launches before each pass

_FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
_TIMEOUT = 300.0
_UNITS = {"byte": 1, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12, "sector": 1, "": 1}
_CACHES = 8  # what is written is so much larger than the L2 cache that what stays there does not count
_LARGEST_SCORES = 16 << 30
_ARRAYS = 16  # of the size of q: inputs, results, sums in float32


class NcuError(Exception):
    """Nsight Compute could not be run, or said nothing that can be read."""


@dataclass(frozen=True, slots=True)
class Job:
    """A pass whose counters are read; as text, an argument of ``one.py``."""

    case: Case
    algorithm: str
    direction: str

    @property
    def key(self) -> tuple[str, str]:
        """Algorithm and direction."""
        return self.algorithm, self.direction

    def __str__(self) -> str:
        c = self.case
        numbers = (c.batch, c.seqlen, c.heads, c.head_dim, int(c.causal))
        return ":".join(map(str, (self.algorithm, self.direction, c.dtype, *numbers)))

    @classmethod
    def of(cls, text: str) -> Job:
        """The job of its text."""
        algorithm, direction, dtype, *numbers = text.split(":")
        batch, seqlen, heads, head_dim, causal = map(int, numbers)
        return cls(Case(batch, seqlen, heads, head_dim, bool(causal), dtype), algorithm, direction)


def find() -> str | None:
    """The program, or None."""
    found = shutil.which("ncu")
    if found:
        return found
    for folder in _FOLDERS:
        candidates = sorted(Path(folder).glob("**/ncu")) if Path(folder).is_dir() else []
        if candidates:
            return str(candidates[-1])
    return None


def chosen(cases: Sequence[Case]) -> list[Case]:
    """The problems whose counters are read: not causal, of the largest head dim up to 128, 1,024 and more queries."""
    eligible = [case for case in cases if not case.causal and case.seqlen >= 1024]
    up_to_128 = [case for case in eligible if case.head_dim <= 128] or eligible
    widest = max((case.head_dim for case in up_to_128), default=0)
    return [case for case in up_to_128 if case.head_dim == widest]


def enlarged(case: Case, algorithm: str, limits: Limits, free_memory: int) -> Case:
    """With as many batch entries as make its arrays much larger than the L2 cache, and fit the memory.

    What a kernel leaves in the cache when it ends is written to memory later, and no counter of the kernel has it.
    """
    per_entry = case.seqlen * case.heads * case.head_dim * ITEMSIZE[case.dtype]
    wanted = -(-_CACHES * limits.l2_bytes // per_entry)
    most = free_memory // (_ARRAYS * per_entry)
    if algorithm == "standard":
        scores = case.heads * case.seqlen**2 * ITEMSIZE[case.dtype]
        most = min(most, _LARGEST_SCORES // scores, free_memory // (3 * scores))
    return replace(case, batch=max(1, min(wanted, most)))


def measure(program: str, jobs: Sequence[Job]) -> list[Traffic]:
    """The bytes of each pass, by one run of the profiler.

    Raises:
        NcuError: it cannot be run (often: the driver allows counters to administrators only), or fails.
    """
    try:
        return _measure(program, jobs, (READ, WRITTEN, SECTORS))
    except NcuError as error:
        if "metric" not in str(error).lower():
            raise
    return _measure(program, jobs, (READ, WRITTEN))  # a GPU may lack the third


def _measure(program: str, jobs: Sequence[Job], metrics: Sequence[str]) -> list[Traffic]:
    arguments = [
        *(program, "--csv", "--print-units", "base", "--profile-from-start", "off"),
        *("--clock-control", "none", "--target-processes", "all", "--metrics", ",".join(metrics)),
        *(sys.executable, "-m", "cupyflash.compare.one", *map(str, jobs)),
    ]
    try:
        result = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NcuError(str(error)) from error
    told = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    complaints = [line for line in told if line.startswith("==ERROR==")]
    if complaints or result.returncode:
        raise NcuError(" ".join(complaints[:2] or told[-3:]) or f"status {result.returncode}")
    passes = parse(result.stdout)
    if len(passes) != len(jobs):
        raise NcuError(f"it reported {len(passes)} passes; expected {len(jobs)}")
    return passes


def parse(text: str) -> list[Traffic]:
    """The traffic of each pass from what ``ncu --csv`` prints: the kernels behind each marker are one.

    Raises:
        NcuError: there is no table in it, or a column is missing.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if not rows:
        raise NcuError("it printed no table")
    kernels: dict[str, dict[str, float]] = defaultdict(dict)
    names = {}
    try:
        for row in rows:
            if not row["ID"]:  # the units, below the header of the wide form
                continue
            names[row["ID"]] = row["Kernel Name"]
            kernels[row["ID"]].update(_metrics(row))
    except (KeyError, ValueError) as error:
        raise NcuError(f"its table cannot be read: {error}") from error
    return _by_pass((names[number], metrics) for number, metrics in kernels.items())


def _metrics(row: dict[str, str]) -> dict[str, float]:
    """Of one line: one metric in the long form, all of a kernel in the wide one."""
    if "Metric Name" in row:
        return {row["Metric Name"]: _number(row["Metric Value"]) * _UNITS[row["Metric Unit"].lower()]}
    return {name: _number(row[name]) for name in (READ, WRITTEN, SECTORS) if name in row}


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _by_pass(kernels: Iterable[tuple[str, dict[str, float]]]) -> list[Traffic]:
    passes: list[Traffic] = []
    for name, metrics in kernels:
        if MARKER in name:
            passes.append(Traffic(0, 0, 0))
            continue
        if not passes:
            raise NcuError(f"kernel {name} comes before the first pass")
        requested = metrics.get(SECTORS, 0.0) * _SECTOR_BYTES
        try:
            passes[-1] += Traffic(round(metrics[READ]), round(metrics[WRITTEN]), round(requested))
        except KeyError as error:
            raise NcuError(f"kernel {name} has no {error}") from error
    return passes
