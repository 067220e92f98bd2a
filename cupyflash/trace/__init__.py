"""The schedule of a kernel as a picture: who loads, multiplies, exponentiates, stores and waits when.

``record`` runs one small problem on the emulated device and keeps what each warp asks for and on whom it waits;
``replay`` plays that against a model of a multiprocessor's units; ``draw`` makes the picture. Nothing is measured: the
steps are those of the model, and what overlaps is what the kernel's barriers and waits allow to overlap.
"""

from __future__ import annotations

from html import escape
from types import SimpleNamespace

from ..problem import Problem
from ..tiles import Task
from .draw import busy, lanes, svg
from .record import Place, Recording, Request, record
from .replay import Rates, Schedule, Span, replay

__all__ = [
    "Place",
    "Rates",
    "Recording",
    "Request",
    "Schedule",
    "Span",
    "busy",
    "lanes",
    "page",
    "picture",
    "record",
    "replay",
    "small_problem",
    "svg",
    "title",
]

NAMES = {"v1": "FlashAttention", "v2": "FlashAttention-2", "v3": "FlashAttention-3"}

_EXPLAINED = """
One block of the kernel, run on the emulated device. What each warp asks for and on whom it waits is recorded there; the
time is a model's. A multiprocessor has four parts, warp w runs on part w mod 4. Per step, a part's tensor core does
{operations:,} floating-point operations and its other unit {exponentials} exponentials; all share {bytes} bytes per
step from global memory, which land {latency} steps after the last of them, and as many back. The first three are the
proportions of an H100; everything else a kernel does takes no time. So these are steps, not cycles: what overlaps here
is what barriers and waits allow to overlap. Hover over a bar for the line of the kernel that asked for it.
"""


def small_problem(
    algorithm: str, seqlen_q: int, seqlen_k: int, head_dim: int, *, causal: bool = False, dtype: str = "float16"
) -> Problem:
    """One head of one batch entry, to be traced.

    Args:
        algorithm: "v1", "v2" or "v3".
        seqlen_q, seqlen_k: queries and keys.

    Raises:
        ValueError, TypeError: as ``attention`` raises them.
    """
    q, k = (SimpleNamespace(shape=(1, seqlen, 1, head_dim), dtype=dtype) for seqlen in (seqlen_q, seqlen_k))
    return Problem.of(q, k, k, causal=causal, algorithm=algorithm)


def picture(problem: Problem, task: Task = "forward", block: int = 0, rates: Rates | None = None) -> str:
    """The schedule of one block as an SVG element.

    Raises:
        ValueError, RuntimeError: as ``record`` raises them.

    Example:
        >>> drawing = picture(small_problem("v2", 128, 256, 64))
        >>> drawing[:4], drawing.count("<title>") > 20
        ('<svg', True)
    """
    schedule = replay(record(problem, task, block), rates)
    return svg(schedule, title(problem, schedule))


def title(problem: Problem, schedule: Schedule) -> str:
    """What a picture shows."""
    recording = schedule.recording
    config, kernel = recording.config, recording.kernel
    lengths = f"{problem.seqlen_q} queries, {problem.seqlen_k} keys{', masked' if problem.is_masked else ''}"
    return (
        f"{NAMES.get(problem.algorithm, problem.algorithm)}: {kernel.name}, Br = {config.Br}, Bc = {config.Bc}, "
        f"{lengths}, head dim {problem.head_dim}; block {recording.block} of {recording.grid}"
    )


def page(pictures: list[str], rates: Rates | None = None) -> str:
    """A page with these pictures and what they mean; needs nothing but itself."""
    rates = rates or Rates()
    explained = _EXPLAINED.format(
        operations=rates.operations, exponentials=rates.exponentials, bytes=rates.bytes, latency=rates.latency
    )
    figures = "\n".join(f"<figure>{picture}</figure>" for picture in pictures)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>cupyflash trace</title>
<style>
:root{{color-scheme:light dark}}
body{{font:15px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif;max-width:1280px;margin:2em auto;padding:0 1em}}
p{{max-width:80ch}} figure{{margin:1.5em 0;overflow-x:auto}} svg{{width:100%;min-width:800px;height:auto}}
@media (prefers-color-scheme:dark){{body{{background:#15171a;color:#ccd0d6}}}}
</style>
</head>
<body>
<h1>cupyflash trace</h1>
<p>{escape(explained.strip())}</p>
{figures}
</body>
</html>
"""
