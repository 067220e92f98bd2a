"""Planted faults: kernels with one thing wrong, each of which the emulated suite must catch.

A tolerance, a schedule or an engineered case is worth something only if a kernel that is wrong in its neighbourhood
fails. ``python tests/faults.py`` plants them all, ``python tests/faults.py NAME ...`` some; with ``--cases WORD`` it
tries all cases whose name has the word in place of those of the table.
"""

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

import emulated_cases
import run_cases
from fault_tables import FAULTS

from cupyflash import kernels_cu

KERNELS = Path(kernels_cu.__file__).parent
# A fault costs a build, and mostly fails at the first launch. Cases are small: who waits for long waits forever.
FLAGS = "-O1 -DCF_PATIENCE=(1<<19)"


def copied(folder):
    """A copy of the kernels below a folder."""
    return shutil.copytree(KERNELS, Path(folder) / "kernels_cu", ignore=shutil.ignore_patterns("__pycache__"))


def planted(fault, folder):
    """A copy of the kernels with the fault, below a folder."""
    sources = copied(folder)
    file = sources / fault.file
    text = file.read_text()
    found = text.count(fault.old)
    assert found == 1, f"{fault.name}: {found} places in {fault.file} have {fault.old!r}; the table has to follow"
    file.write_text(text.replace(fault.old, fault.new))
    return sources


def _fails(case, sources, answer):
    """In a process of its own: a wrong kernel may write anywhere, and a crash is an answer, not a report."""
    faulthandler.disable()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        try:
            run_cases.run(case, sources=sources)
        except (AssertionError, RuntimeError) as error:
            answer.send(str(error).splitlines()[0])
        else:
            answer.send("")


def failure(case, sources, seconds=60):
    """How a case fails with the kernels of a folder; empty if it does not."""
    run_cases.prepared(case)  # here, for all faults that it catches
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_fails, args=(case, sources, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(seconds) else f"no end within {seconds} s"
    except EOFError:
        process.join()
        return f"ended by signal {-process.exitcode}"
    finally:
        process.kill()
        process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults; all by default")
    parser.add_argument("--cases", help="try the cases whose name has this word")
    args = parser.parse_args()
    os.environ["CUPYFLASH_EMULATED_FLAGS"] = FLAGS
    missed = 0
    for fault in FAULTS:
        if args.names and fault.name not in args.names:
            continue
        cases = fault.cases if args.cases is None else [case for case in emulated_cases.CASES if args.cases in case]
        with tempfile.TemporaryDirectory() as folder:
            sources = planted(fault, folder)
            results = {case: failure(case, sources) for case in cases}
        missed += not any(results.values())
        print(f"{fault.name}: {'caught' if any(results.values()) else 'MISSED'}")
        for case, how in results.items():
            print(f"    {case}: {how[:100] or 'passes'}")
        sys.stdout.flush()
    return f"{missed} faults missed" if missed else 0


if __name__ == "__main__":
    sys.exit(main())
