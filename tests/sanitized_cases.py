"""The emulated cases whose arrays end where their memory ends, under AddressSanitizer and UndefinedBehaviorSanitizer.

``python tests/sanitized_cases.py`` runs them all, or those named; the first error ends the process with a report.
"""

import os
import subprocess
import sys
from pathlib import Path

import emulated_cases
import run_cases

from cupyflash.runtime import emulated

CASES = [name for name, case in emulated_cases.CASES.items() if case.layout == "tight"]


def environment():
    """Of a process that loads libraries built with ``sanitize=True``.

    AddressSanitizer has to be loaded before everything else, also before Python, whose own leaks are not of interest.
    """
    command = [emulated.require_compiler(), "-print-file-name=libasan.so"]
    library = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}


def run(cases=CASES, sources=None):
    """The finished process; ``sources``: a folder of kernels in place of ``kernels_cu``."""
    kernels = {} if sources is None else {"KERNELS": str(sources)}
    command = [sys.executable, __file__, *cases]
    return subprocess.run(command, env=environment() | kernels, capture_output=True, text=True)


def main():
    if "ASAN_OPTIONS" not in os.environ:  # the sanitizers have to be there from the start
        os.execve(sys.executable, [sys.executable, *sys.argv], environment())
    sources = os.environ.get("KERNELS")
    for name in sys.argv[1:] or CASES:
        run_cases.run(
            name, schedules=emulated_cases.SCHEDULES[-1:], sanitize=True, sources=Path(sources) if sources else None
        )
        print(f"{name}: no access out of bounds", flush=True)


if __name__ == "__main__":
    main()
