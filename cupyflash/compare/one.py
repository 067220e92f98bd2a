"""``python -m cupyflash.compare.one PASS ...``: runs passes once each, between calls that start and stop a profiler.

A kernel that does nothing stands before each pass, so that the passes can be told apart in a profiler's list. A pass is
written as ``ncu.Job`` writes it: ``v2:forward:bfloat16:8:16384:16:128:0``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import accuracy
from .ncu import MARKER, Job


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the passes; returns the exit status."""
    import cupy

    from .gpu import inputs

    mark = cupy.RawKernel(f'extern "C" __global__ void {MARKER}() {{}}', MARKER)
    mark((1,), (1,), ())
    for job in map(Job.of, sys.argv[1:] if arguments is None else arguments):
        call = accuracy.calls(job.case, job.algorithm, inputs(job.case))[job.key]
        call()  # compiles and loads
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStart()
        mark((1,), (1,), ())
        call()
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStop()
        del call
        cupy.get_default_memory_pool().free_all_blocks()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
