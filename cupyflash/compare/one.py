"""``python -m cupyflash.compare.one``: runs passes once each, between calls that start and stop a profiler.

A kernel that does nothing stands before each pass, so that a profiler's list can be told apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import accuracy
from .cases import ALGORITHMS, Case
from .ncu import MARKER


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", choices=ALGORITHMS, required=True)
    parser.add_argument("--directions", required=True)
    parser.add_argument("--shape", required=True, help="batch,seqlen,heads,head_dim")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args(arguments)

    import cupy

    batch, seqlen, heads, head_dim = map(int, options.shape.split(","))
    case = Case(batch, seqlen, heads, head_dim, options.causal, options.dtype)
    mark = cupy.RawKernel(f'extern "C" __global__ void {MARKER}() {{}}', MARKER)
    arrays = [cupy.asarray(x) for x in accuracy.inputs(case)]
    calls = accuracy.calls(case, options.algorithm, arrays)
    passes = [calls[options.algorithm, direction] for direction in options.directions.split(",")]
    mark((1,), (1,), ())
    for call in passes:  # compiles and loads
        call()
    cupy.cuda.Device().synchronize()
    for call in passes:
        cupy.cuda.runtime.profilerStart()
        mark((1,), (1,), ())
        call()
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
