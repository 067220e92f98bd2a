"""The ``cupyflash`` command: ``info``, ``tune``, ``config``, ``compare``, ``trace`` and ``demo``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cupyflash
from cupyflash.cli import compare, config, trace, tune
from cupyflash.cli.explain import PROBLEM_HELP, explain

_NOBODY_READS = 128 + 13  # as a process that SIGPIPE has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (by default the process's own) and returns the exit status."""
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as in "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return _NOBODY_READS
    return status


@contextmanager
def _told_by(parser: argparse.ArgumentParser, *errors: type[Exception], what: str = "") -> Iterator[None]:
    """Ends the process with an error's message, and the status of a command line that is wrong."""
    try:
        yield
    except BrokenPipeError:
        raise
    except errors as error:
        parser.error(f"{what}{error}")


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="cupyflash", description="Exact FlashAttention for CuPy and NumPy.")
    parser.add_argument("--version", action="version", version=f"cupyflash {cupyflash.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="what this machine has, and which kernel a problem takes")
    info.add_argument("--explain", metavar="PROBLEM", help=f"how the GPU would compute a problem, {PROBLEM_HELP}")

    config_parser = commands.add_parser("config", help="tuned tiles: where they are, which are taken, and moving them")
    config.add_arguments(config_parser)

    tuning = commands.add_parser("tune", help="find the fastest tiles for this machine's GPUs")
    tune.add_arguments(tuning)

    compare_parser = commands.add_parser("compare", help="standard attention, V1, V2 and V3 side by side")
    compare.add_arguments(compare_parser)

    tracing = commands.add_parser("trace", help="draw which warp of a kernel does what when")
    trace.add_arguments(tracing)

    demo = commands.add_parser("demo", help="sentence embeddings and one very long sequence")
    demo.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: the GPU if there is one"
    )
    demo.add_argument("--tokens", type=int, default=16_384, help="length of the long sequence (default: %(default)s)")
    demo.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the encoder's files, if the package is not installed"
    )

    options = parser.parse_args(arguments)
    if options.command == "demo":
        from cupyflash import demo as demonstration

        if options.tokens < 1:
            demo.error(f"argument --tokens: {options.tokens} is no length; expected 1 at least")
        with _told_by(demo, OSError):
            return demonstration.run(options.device, options.tokens, options.model)

    if options.command == "compare":
        with _told_by(compare_parser, ImportError, OSError, RuntimeError, ValueError):
            return compare.run(options)

    if options.command == "tune":
        with _told_by(tuning, ImportError, OSError, RuntimeError, ValueError):
            return tune.run(options)

    if options.command == "trace":
        with _told_by(tracing, OSError, RuntimeError, TypeError, ValueError):
            return trace.run(options)

    from cupyflash.cli.info import current_gpu, machine

    if options.command == "config":
        with _told_by(config_parser, OSError, RuntimeError, TypeError, ValueError, what=f"{options.action}: "):
            return config.run(options, current_gpu)

    if options.explain is None:
        print(machine())
        return 0
    with _told_by(info, TypeError, ValueError, what="--explain: "):
        print(explain(options.explain, current_gpu))
    return 0
