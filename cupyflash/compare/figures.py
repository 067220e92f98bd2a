"""``python -m cupyflash.compare.figures data.csv folder``: the figures of docs/how-it-works.md, from rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from . import charts, table, views
from .table import Row, unique

_LENGTH_OF_BYTES = 4096


def figures(rows: Sequence[Row]) -> dict[str, str]:
    """{file name: SVG text}, of head dim 128 where it was measured, else of the largest."""
    dims = unique(row.head_dim for row in rows if row.seconds)
    head_dim = 128 if 128 in dims else max(dims, default=0)
    measured = [row for row in rows if row.measured] or [row for row in rows if row.counted]
    lengths = sorted({row.seqlen for row in measured})
    length = next((n for n in lengths if n >= _LENGTH_OF_BYTES), max(lengths, default=0))
    passes = ("forward", "backward")
    drawn = {
        "throughput.svg": [views.rates(rows, head_dim, causal, "step") for causal in (False, True)],
        "time.svg": [views.times(rows, head_dim, False, direction) for direction in ("forward", "step")],
        "speedups.svg": [views.ratios(rows, head_dim, causal, "step") for causal in (False, True)],
        "memory.svg": [views.memory(rows, head_dim, direction) for direction in ("forward", "step")],
        "hbm.svg": [views.traffic(rows, direction, length) for direction in passes],
        "roofline.svg": [views.roofline(rows, head_dim)],
        "error.svg": [views.errors(rows, head_dim, direction) for direction in passes],
    }
    complete = {name: [svg for svg in parts if svg is not None] for name, parts in drawn.items()}
    return {name: charts.standalone(charts.beside(parts)) for name, parts in complete.items() if parts}


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
