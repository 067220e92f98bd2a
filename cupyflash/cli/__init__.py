"""The ``cupyflash`` command: ``info`` and ``demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import cupyflash


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (by default the process's own) and returns the exit status."""
    parser = argparse.ArgumentParser(prog="cupyflash", description="Exact FlashAttention for CuPy and NumPy.")
    parser.add_argument("--version", action="version", version=f"cupyflash {cupyflash.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="what this machine has, and which kernel a problem takes")
    info.add_argument(
        "--explain",
        metavar="PROBLEM",
        help='how the GPU would compute a problem, as in "B=8 S=256 H=12 D=64 dtype=bfloat16 causal"; also Sq, Sk, Hk, '
        "Dv, scale, softcap, window=LEFT,RIGHT, precision, deterministic, and gpu=H200 to plan for another GPU",
    )

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

    from cupyflash.cli.explain import explain
    from cupyflash.cli.info import current_gpu, machine

    if options.explain is None:
        print(machine())
        return 0
    try:
        print(explain(options.explain, current_gpu))
    except (TypeError, ValueError) as error:
        info.error(f"--explain: {error}")
    return 0
