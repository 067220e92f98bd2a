"""The ``cupyflash`` command: ``info``, ``config`` and ``demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cupyflash
from cupyflash.resources import KNOWN_GPUS

_PROBLEM = (
    'as in "B=8 S=256 H=12 D=64 dtype=bfloat16 causal"; also Sq, Sk, Hk, Dv, scale, softcap, window=LEFT,RIGHT, '
    "precision, deterministic, and gpu=H200 to plan for another GPU"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (by default the process's own) and returns the exit status."""
    parser = argparse.ArgumentParser(prog="cupyflash", description="Exact FlashAttention for CuPy and NumPy.")
    parser.add_argument("--version", action="version", version=f"cupyflash {cupyflash.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="what this machine has, and which kernel a problem takes")
    info.add_argument("--explain", metavar="PROBLEM", help=f"how the GPU would compute a problem, {_PROBLEM}")

    config = _add_config(commands)

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

        return demonstration.run(options.device, options.tokens, options.model)

    from cupyflash.cli.info import current_gpu, machine

    if options.command == "config":
        from cupyflash.cli.config import ACTIONS

        try:
            return ACTIONS[options.action](options, current_gpu)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            config.error(f"{options.action}: {error}")

    from cupyflash.cli.explain import explain

    if options.explain is None:
        print(machine())
        return 0
    try:
        print(explain(options.explain, current_gpu))
    except (TypeError, ValueError) as error:
        info.error(f"--explain: {error}")
    return 0


def _add_config(commands: Any) -> argparse.ArgumentParser:
    """The parser of ``cupyflash config``, whose actions are those of ``cli.config.ACTIONS``."""
    config: argparse.ArgumentParser = commands.add_parser(
        "config", help="tuned tiles: where they are, which are taken, and moving them"
    )
    actions = config.add_subparsers(dest="action", required=True)
    gpu: dict[str, Any] = {"choices": list(KNOWN_GPUS), "help": "default: this machine's"}
    where = actions.add_parser("where", help="the files that are looked at, first to last")
    where.add_argument("--gpu", **gpu)
    why = actions.add_parser("why", help="which tiles a problem takes, and why not others")
    why.add_argument("problem", nargs="+", metavar="PROBLEM", help=_PROBLEM)
    show = actions.add_parser("show", help="the entries for a GPU, or those of a file")
    show.add_argument("file", nargs="?", type=Path, metavar="FILE")
    show.add_argument("--gpu", **gpu)
    export = actions.add_parser("export", help="all entries for a GPU as one file")
    export.add_argument("file", type=Path, metavar="FILE", help='a new file; "-" prints it')
    export.add_argument("--gpu", **gpu)
    import_ = actions.add_parser("import", help="adds the entries of files to the user's, the better of each kind")
    import_.add_argument("files", nargs="+", type=Path, metavar="FILE")
    merge = actions.add_parser("merge", help="makes one file of several for one GPU model, the better of each kind")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE")
    merge.add_argument("--out", "-o", type=Path, required=True, metavar="FILE", help='a new file; "-" prints it')
    check = actions.add_parser("check", help="says what in files cannot be used, or was measured with other kernels")
    check.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all that there are")
    return config
