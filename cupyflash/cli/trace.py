"""``cupyflash trace``: the schedule of the kernels, drawn."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from cupyflash.dispatch import FILES
from cupyflash.tiles import ALGORITHMS


def algorithms() -> list[str]:
    """Those that are kernels of their own, oldest first."""
    drawn = {family for family, _ in FILES}
    return [name for name, families in ALGORITHMS.items() if name != "auto" and not drawn.isdisjoint(families)]


def add_arguments(parser: ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--algorithm", choices=(*algorithms(), "all"), default="all", help="default: %(default)s")
    parser.add_argument("--seqlen", type=int, default=512, help="number of queries, and of keys (default: %(default)s)")
    parser.add_argument("--seqlen-k", type=int, help="number of keys, if another")
    parser.add_argument("--head-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="query i sees the keys up to its own")
    parser.add_argument("--backward", action="store_true", help="the gradients' kernel")
    parser.add_argument("--block", type=int, default=0, help="of the grid (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("trace.html"),
        metavar="FILE",
        help="a page, or, if it ends in .svg, the picture alone (default: %(default)s)",
    )


def run(options: Namespace) -> int:
    """Draws, and says where; what keeps it from that is raised as OSError, RuntimeError, TypeError or ValueError."""
    from cupyflash import trace

    chosen = algorithms() if options.algorithm == "all" else [options.algorithm]
    alone = options.out.suffix.lower() == ".svg"
    if alone and len(chosen) > 1:
        raise ValueError(f"--out is {options.out}, one picture; name one --algorithm, or a page: --out trace.html")
    seqlen_k = options.seqlen if options.seqlen_k is None else options.seqlen_k
    pictures = []
    for algorithm in chosen:
        problem = trace.small_problem(algorithm, options.seqlen, seqlen_k, options.head_dim, causal=options.causal)
        pictures.append(trace.picture(problem, "backward" if options.backward else "forward", options.block))
    options.out.write_text(pictures[0] if alone else trace.page(pictures), encoding="utf-8")
    print(f"{', '.join(chosen)}: {options.out}")
    return 0
