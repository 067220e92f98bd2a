"""Which lines of the kernels are executed by the emulated suite, and by the tests of standard attention, whose kernels
have no case there.

With the environment variable KERNEL_COVERAGE, the builds of tests that take the fixture ``counted`` go into the folder
that it names and count there what they execute. ``python tests/kernel_coverage.py FOLDER`` then prints the lines that
were not reached and fails below 95%. Lines of include/emulated and include/ptx do not count: they are wrappers, with
tests of their own.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from cupyflash import kernels_cu
from cupyflash.runtime import emulated

KERNELS = Path(kernels_cu.__file__).parent
OWN = {path.name for folder in (KERNELS, KERNELS / "include") for path in folder.glob("*.cu*")}
ENOUGH = 95.0  # percent

# Counting costs a few percent where only the kernels' own lines count.
FLAGS = "--coverage -fprofile-exclude-files=platform/.*"


def environment():
    """What the suite's builds need in theirs; empty if nothing is to be counted."""
    folder = os.environ.get("KERNEL_COVERAGE")
    if not folder:
        return {}
    # gcov adds its counts to files when the process ends, where the builds are though they were made elsewhere.
    os.environ.update({"GCOV_PREFIX": str(Path(folder, "cupyflash", "emulated")), "GCOV_PREFIX_STRIP": "99"})
    return {"XDG_CACHE_HOME": folder, "CUPYFLASH_EMULATED_FLAGS": FLAGS}


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


def main(folder):
    if not emulated.available():
        print("No coverage of the kernels: the emulated device needs g++")
        return 0
    counts = executions(Path(folder))
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
    sys.exit(main(*sys.argv[1:]))
