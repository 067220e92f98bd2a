"""``cupyflash compare``: standard attention, V1, V2 and V3 side by side, as a page and a CSV file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cupyflash.cli.tune import seconds

if TYPE_CHECKING:
    from cupyflash.compare.session import Bench
    from cupyflash.compare.table import Row

# What is compared by default: (lengths, head dims, tokens, hidden size, rounds).
_FULL_GPU = ((512, 1024, 2048, 4096, 8192, 16384), (64, 128), 16384, 2048, 7)
_QUICK_GPU = ((1024, 4096, 16384), (128,), 16384, 2048, 5)
_FULL_CPU = ((256, 512, 1024, 2048, 4096), (64,), 2048, 256, 5)
_QUICK_CPU = ((256, 1024), (64,), 1024, 128, 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--quick", action="store_true", help="a minute's worth: few lengths, one head dim")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: the GPU if there is one"
    )
    parser.add_argument("--lengths", type=_numbers, help="of the sequences, as in 1024,4096")
    parser.add_argument("--head-dims", type=_numbers, help="as in 64,128")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), help="on the GPU (default: bfloat16, if it has it)")
    parser.add_argument("--seconds", type=seconds, help="after which nothing is begun, as in 100s or 5m")
    parser.add_argument("--rounds", type=_positive, help="samples of each pass")
    parser.add_argument("--seed", type=int, default=0, help="of the order of samples (default: %(default)s)")
    parser.add_argument("--no-ncu", action="store_true", help="do not ask Nsight Compute for the GPU's counters")
    parser.add_argument("--from", dest="source", type=Path, metavar="CSV", help="measure nothing: show these rows")
    parser.add_argument("--out", type=Path, metavar="HTML", help="the page; a CSV file is put beside it")


def run(options: argparse.Namespace, say: Callable[[str], None] | None = None) -> int:
    """Runs the command; returns the exit status, 1 if a pass failed that could have been measured.

    Args:
        say: takes a line of progress; printed by default.

    Raises:
        OSError: a file cannot be read or written.
        ImportError, RuntimeError: the GPU that is asked for is not there.
        ValueError: an option does not fit.
    """
    from cupyflash.compare import report, table

    say = say or partial(print, flush=True)
    if options.source is not None:
        return _render(options, say)

    from cupyflash.compare.cases import cases, most_telling_first
    from cupyflash.compare.cpu import CANNOT
    from cupyflash.compare.session import compare

    on_gpu = _on_gpu(options.device, say)
    if options.dtype and not on_gpu:
        raise ValueError("--dtype is of the GPU; on the CPU float32 is compared")
    bench = _gpu_bench(options) if on_gpu else _cpu_bench()
    if not on_gpu:
        say(CANNOT)
    defaults = {
        (True, False): _FULL_GPU,
        (True, True): _QUICK_GPU,
        (False, False): _FULL_CPU,
        (False, True): _QUICK_CPU,
    }[on_gpu, options.quick]
    lengths, head_dims, tokens, hidden, rounds = defaults
    chosen = most_telling_first(
        cases(
            options.lengths or lengths,
            options.head_dims or head_dims,
            bench.dtype,
            tokens,
            hidden,
        )
    )
    page = _page(options.out, bench.name)
    rows: list[Row] = []
    keep = partial(table.write, page.with_suffix(".csv"), rows)
    try:
        compare(bench, chosen, options.rounds or rounds, options.seconds, say, options.seed, rows=rows, keep=keep)
    except KeyboardInterrupt:
        say("stopped")
        return 130
    finally:  # what was measured before something failed is kept
        if rows:
            keep()
            report.write(page, rows, bench.notes)
            for line in (*summary(rows), str(page.with_suffix(".csv")), str(page)):
                say(line)
    failed = [row for row in rows if row.failed]
    for row in failed:
        say(f"{row.algorithm} {row.direction}, {row.case}: {row.note}")
    return 1 if failed else 0


def _page(given: Path | None, device: str) -> Path:
    if given is None:
        return Path(f"cupyflash_compare_{re.sub('[^A-Za-z0-9]+', '_', device)[:40].strip('_')}.html")
    if given.suffix == ".csv":
        raise ValueError(f"--out is the page, and {given} is where its rows go; give it another suffix, as in .html")
    return given


def summary(rows: Sequence[Row]) -> list[str]:
    """How much faster each is, in a few lines."""
    from cupyflash.compare import views
    from cupyflash.compare.cases import DIRECTION_TITLES, DIRECTIONS

    lines = []
    for direction in DIRECTIONS:
        found = views.speed_ups(rows, direction)
        told = [f"{new} {views.mean(x):.2f} times {old}" for (new, old), x in found.items() if x]
        if told:
            lines.append(f"{DIRECTION_TITLES[direction]}: {', '.join(told)}")
    return lines


def _render(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    from cupyflash.compare import report, table

    page = _page(options.out or options.source.with_suffix(".html"), "")
    report.write(page, table.read(options.source))
    say(str(page))
    return 0


def _on_gpu(device: str, say: Callable[[str], None]) -> bool:
    """Whether to compare on the GPU; says why not, where there is none and none was asked for."""
    from cupyflash.arrays import require_gpu

    if device == "cpu":
        return False
    try:
        require_gpu("comparing on the GPU")
    except (ImportError, RuntimeError) as error:
        if device == "gpu":
            raise
        say(str(error))
        return False
    return True


def _gpu_bench(options: argparse.Namespace) -> Bench:
    from cupyflash.compare.gpu import GpuBench

    return GpuBench(options.dtype, use_ncu=not options.no_ncu)


def _cpu_bench() -> Bench:
    from cupyflash.compare.cpu import CpuBench

    return CpuBench()


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",") if part]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number above 0")
    return int(text)
