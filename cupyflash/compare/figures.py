"""``python -m cupyflash.compare.figures data.csv folder``: the figures of docs/how-it-works.md, from rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from . import charts, table, views
from .table import Row, unique


def figures(rows: Sequence[Row]) -> dict[str, str]:
    """{file name: SVG text}, of head dim 128 where it was measured, else of the largest."""
    dims = unique(row.head_dim for row in rows if row.seconds)
    head_dim = 128 if 128 in dims else max(dims, default=0)
    lengths = sorted({row.seqlen for row in rows if row.counted is not None})
    drawn = {
        f"{name}_{mask}.svg": views.rates(rows, head_dim, causal, direction)
        for name, direction in (("forward", "forward"), ("backward", "backward"), ("training_step", "step"))
        for mask, causal in (("full", False), ("causal", True))
    }
    drawn |= {
        "memory.svg": views.memory(rows, head_dim, "step"),
        "memory_forward.svg": views.memory(rows, head_dim, "forward"),
        "roofline.svg": views.roofline(rows, head_dim),
    }
    for direction in ("forward", "backward"):
        for seqlen in lengths:
            drawn[f"bytes_{direction}_{seqlen}.svg"] = views.traffic(rows, direction, seqlen)
    return {name: charts.standalone(svg) for name, svg in drawn.items() if svg is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the figures; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 2:
        print("usage: python -m cupyflash.compare.figures data.csv folder", file=sys.stderr)
        return 2
    source, folder = map(Path, given)
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in figures(table.read(source)).items():
        (folder / name).write_text(svg + "\n", encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
