"""``cupyflash tune``: finds the fastest tiles for this machine's GPUs, or shows what it would search."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cupyflash.resources import KNOWN_GPUS

if TYPE_CHECKING:
    from cupyflash.tuning.tuner import Tuned

T = TypeVar("T")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
NEEDS = 'tuning needs optuna and filelock: pip install "cupyflash[tune]"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--dry-run", action="store_true", help="print the space of each task, and measure nothing")
    parser.add_argument("--gpu", help=f"with --dry-run, a GPU that need not be there: {', '.join(KNOWN_GPUS)}")
    parser.add_argument(
        "--tasks", type=_listed(str), default=[], help="as in forward,backward,backward_dkv,backward_dq"
    )
    parser.add_argument("--dtypes", type=_listed(str), default=[], help="as in bfloat16,float16,tf32,float32")
    parser.add_argument("--head-dims", type=_listed(int), default=[], help="as in 64,128,256")
    parser.add_argument("--lengths", type=_listed(int), default=[], help="of the sequences that are measured")
    parser.add_argument(
        "--algorithm",
        choices=("auto", "v1"),
        default="auto",
        help="v1: all its tiles, of which auto measures one",
    )
    parser.add_argument("--budget", type=seconds, help="time after which no more is measured, as in 30s or 10m")
    parser.add_argument(
        "--effort", choices=("quick", "full"), default="quick", help="full measures every configuration"
    )
    parser.add_argument("--regime", choices=("eager", "graph"), default="eager", help="how launches are timed")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for journals (default: in the user's cache folder)")
    parser.add_argument("--resume", action="store_true", help="go on where the tune in this folder stopped")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="the page with all results (default: in the folder)"
    )
    parser.add_argument("--no-store", action="store_true", help="keep the winners out of this machine's configuration")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        ValueError: an option does not fit.
    """
    from cupyflash.tuning.tasks import default_tasks

    chosen = (options.tasks, options.dtypes, options.head_dims, options.lengths)
    tasks = default_tasks(options.effort, *chosen, options.algorithm)
    if options.gpu and not options.dry_run:
        raise ValueError("--gpu plans for a GPU that is not there: it needs --dry-run")
    if options.dry_run:
        from cupyflash.cli.info import current_gpu
        from cupyflash.tuning.dry_run import describe_space, known_limits

        limits = known_limits(options.gpu) if options.gpu else current_gpu()
        for line in describe_space(tasks, limits):
            print(line)
        return 0
    try:
        import optuna  # noqa: F401 (before workers start, who have no use for it)

        from cupyflash.tuning.tuner import tune
    except ImportError as error:
        print(f"{NEEDS} ({error})", file=sys.stderr)
        return 1
    from cupyflash.tuning.driver import WorkerError
    from cupyflash.tuning.progress import suitable

    try:
        tuned = tune(
            tasks,
            budget=options.budget,
            effort=options.effort,
            folder=options.out,
            resume=options.resume,
            regime=options.regime,
            seed=options.seed,
            store=not options.no_store,
            report=options.report,
            progress=suitable(),
        )
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; --resume goes on from here", file=sys.stderr)
        return 130
    print(summary(tuned))
    return 0


def summary(tuned: Tuned) -> str:
    """What came of a tune, in a few lines."""
    first: dict[Any, Any] = {}
    for winner in tuned.winners:
        first.setdefault((winner.task.name, winner.size), winner)
    faster = [winner for winner in first.values() if not winner.is_default]
    spent = ", ".join(f"{name} {value:.0f} s" for name, value in tuned.seconds.items() if name != "all")
    lines = [
        f"{len(first)} problems in {tuned.seconds['all']:.0f} s ({spent}); {len(faster)} have faster tiles than before",
        *([f"out: {', '.join(f'{n} {reason}' for reason, n in tuned.failures.items())}"] if tuned.failures else []),
        *([f"not reached: {', '.join(task.name for task in tuned.unreached)}"] if tuned.unreached else []),
        f"samples: {tuned.folder}",
        *([f"report: {tuned.report}"] if tuned.report else []),
        *([f"winners: {tuned.stored}"] if tuned.stored else []),
    ]
    return "\n".join(lines)


def seconds(text: str) -> float:
    """Of "30s", "10m", "1h" or "45"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a time above 0, as in 30s, 10m or 1h")
    return float(match[1]) * _UNITS[match[2]]


def _listed(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        return [kind(part) for part in text.split(",") if part]

    parse.__name__ = f"list of {kind.__name__}"
    return parse
