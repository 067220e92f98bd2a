"""Which lines of the kernels the emulated suite executes: builds them for gcov and runs every case once, and the tests
of standard attention, whose kernels have no case.

``python tests/kernel_coverage.py`` prints the lines that are not reached and fails below 95%. Lines of include/emulated
and include/ptx do not count: they are wrappers, with tests of their own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import emulated_cases
import pytest

from cupyflash import kernels_cu

KERNELS = Path(kernels_cu.__file__).parent
OWN = {path.name for folder in (KERNELS, KERNELS / "include") for path in folder.glob("*.cu*")}
ENOUGH = 95.0  # percent


def run_cases(part, parts):
    """A part of the cases: neighbours in the alphabet share kernels."""
    if part == 0 and pytest.main(["-q", "-m", "emulated", str(Path(__file__).with_name("test_standard.py"))]):
        return 1
    names = sorted(emulated_cases.CASES)
    for name in names[len(names) * part // parts : len(names) * (part + 1) // parts]:
        emulated_cases.run(name, schedules=emulated_cases.SCHEDULES[:1])
    return 0


def executions(folder):
    """{file: {line: how often it ran, over all builds}} of the kernels and their headers."""
    counts = defaultdict(lambda: defaultdict(int))
    for data in folder.glob("**/*.gcda"):
        gcov = ["gcov", "--json-format", "--stdout", data.name]
        report = subprocess.run(gcov, cwd=data.parent, check=True, capture_output=True, text=True).stdout
        for file in json.loads(report)["files"]:
            if file["file"] in OWN:
                for line in file["lines"]:
                    counts[file["file"]][line["line_number"]] += line["count"]
    return counts


def measure(processes):
    """``executions`` of all cases, each process with builds of its own, to which gcov adds its counts at the end."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for part in range(processes):
            cache = Path(folder) / str(part)
            environment = {
                "XDG_CACHE_HOME": str(cache),
                "CUPYFLASH_EMULATED_FLAGS": "-O0 --coverage",
                "GCOV_PREFIX": str(cache / "cupyflash" / "emulated"),  # where the builds are ...
                "GCOV_PREFIX_STRIP": "99",  # ... though they were made elsewhere
            }
            command = [sys.executable, __file__, "--part", str(part), str(processes)]
            running.append(subprocess.Popen(command, env=os.environ | environment))
        if any([process.wait() for process in running]):
            raise RuntimeError("a case failed")
        return executions(Path(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--part", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return run_cases(*args.part)
    counts = measure(args.processes)
    lines = reached = 0
    for file, by_line in sorted(counts.items()):
        missing = sorted(line for line, count in by_line.items() if not count)
        lines, reached = lines + len(by_line), reached + len(by_line) - len(missing)
        print(f"{file:24} {len(by_line):4} lines, {len(missing):3} not reached: {', '.join(map(str, missing))}")
    if unknown := sorted(name for name in OWN - set(counts) if name.endswith(".cu")):
        return f"no case builds {', '.join(unknown)}"
    percent = 100 * reached / lines
    print(f"{percent:.1f}% of {lines} lines")
    return 0 if percent >= ENOUGH else f"less than {ENOUGH}%"


if __name__ == "__main__":
    sys.exit(main())
