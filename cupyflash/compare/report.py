"""One page that shows a comparison, made of its rows alone, with nothing to fetch: once mailed it still works."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..resources import KNOWN_GPUS
from . import charts, hbm, views
from .cases import ALGORITHMS, DIRECTION_TITLES, DIRECTIONS, TITLES
from .cpu import CANNOT
from .devices import peak
from .table import Row, unique

MOST_BYTES = 2_000_000

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .15rem .7rem; text-align: right; white-space: nowrap; } th { border-bottom: 1px solid; }
td:first-child, th:first-child { text-align: left; } tr:nth-child(even) { background: #8881; }
figure { display: inline-block; margin: .5rem 1rem .5rem 0; vertical-align: top; }
svg { max-width: 100%; height: auto; }
.quiet { opacity: .75; } details { margin: .5rem 0; } summary { cursor: pointer; font-weight: 600; }
"""


def write(path: Path, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """Writes the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(rows, notes), encoding="utf-8")


def render(rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """The page as text, below ``MOST_BYTES``.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("there is nothing to show: no row was measured")
    first = rows[0]
    on_gpu = first.copy_bytes is not None
    body = [
        f"<h1>{_compared(rows)} on {_text(first.device)}</h1>",
        f"<p class=quiet>{_text(first.made)} · {_text(first.dtype)} · {_roofs(first)}</p>",
        *(f"<p>{_text(note)}</p>" for note in (*notes, *(() if on_gpu else (CANNOT,)))),
        "<h2>How much faster each is than the one before</h2>",
        _speed_ups(rows),
        "<h2>Speed</h2>",
        *_figures(
            views.rates(rows, head_dim, causal, direction)
            for head_dim in unique(row.head_dim for row in rows)
            for causal in (False, True)
            for direction in DIRECTIONS
        ),
        *_figures(
            views.ratios(rows, head_dim, causal, "step")
            for head_dim in unique(row.head_dim for row in rows)
            for causal in (False, True)
        ),
        "<h2>Memory</h2>",
        f"<p>{_MEMORY}</p>",
        *_figures(
            views.memory(rows, head_dim, direction)
            for head_dim in unique(row.head_dim for row in rows)
            for direction in ("forward", "step")
        ),
        *(_bytes(rows) if on_gpu else ()),
        "<h2>Error</h2>",
        f"<p>{_ERROR} {_ERROR_GPU if on_gpu else _ERROR_CPU}</p>",
        *_figures(
            views.errors(rows, head_dim, direction)
            for head_dim in unique(row.head_dim for row in rows)
            for direction in ("forward", "backward")
        ),
        _errors(rows),
        "<h2>All times</h2>",
        _times(rows),
        "<h2>How it was measured</h2>",
        f"<p>{_METHOD_GPU if on_gpu else _METHOD_CPU}</p>",
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>cupyflash compare: {_text(first.device)}</title><style>{_STYLE}{charts.STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )
    assert len(page.encode()) <= MOST_BYTES, "a page that is too large to mail"
    return page


_MEMORY = (
    "The most that is held at a time beyond the inputs, results included. Standard attention holds S, then P in its "
    "place (backward: P, and dS in the place of dP), and grows with the square of the length. The others hold rows "
    "only."
)
_ERROR = (
    "The largest error against float64 over the largest element, of out or of the worst of dq, dk and dv, for normal "
    "inputs of one head. All are exact algorithms: what differs is rounding."
)
_ERROR_GPU = (
    "Standard attention rounds S and P to 16 bits on the way through memory; the others keep scores and sums in "
    "float32 and round P once."
)
_ERROR_CPU = "Here both compute and store float32; sums differ in their order."
_METHOD_GPU = (
    "Times are by events around each pass, with an emptied L2 cache, passes of all algorithms in turns and in a new "
    "random order each round; the median counts. Operations are those of the products over visible pairs, two in the "
    "forward, five in the backward. Standard attention is cuBLAS in the dtype of the arrays with sums in float32, and"
    " one softmax kernel; its training step keeps P for the backward, which computes it again where it stands alone. "
    "V1, V2 and V3 are the kernels that <code>attention(..., algorithm=...)</code> launches."
)
_METHOD_CPU = (
    "Times are of the wall clock, passes of both algorithms in turns and in a new random order each round; the median"
    " counts."
)
_BYTES = (
    "Counted is what the loops move through the GPU's memory, with a cache of the size of its L2 (a model: "
    "<code>cupyflash/compare/hbm.py</code>); requested is what blocks ask of that cache. V1 goes once through Q, O "
    "and the statistics of all rows per block of keys, of as many heads as there are multiprocessors, so that rows "
    "leave the cache before they are needed again: its traffic grows with N²d²/M, M being the shared memory of a "
    "block (the theorem gives all of it to tiles; kernels have less, and registers bind, too). V2 and V3 ask for K "
    "and V once per block of queries, no less often, but blocks that run at a time share what memory gives once: per "
    "head, where the cache holds what such a wave of blocks touches, else per wave that a head has blocks in. Measured "
    "is <code>dram__bytes_read + dram__bytes_write</code> of Nsight Compute, with an "
    "emptied cache before each kernel, and counted likewise; what a kernel leaves in the cache is written later and "
    "seen by no counter, so that arrays are made eight times as large as the cache."
)


def _compared(rows: Sequence[Row]) -> str:
    """The algorithms that the rows are of."""
    names = [_short(algorithm) for algorithm in _algorithms(rows)]
    told = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return told.replace("standard", "Standard attention")


def _algorithms(rows: Sequence[Row]) -> list[str]:
    return [algorithm for algorithm in ALGORITHMS if any(row.algorithm == algorithm for row in rows)]


def _roofs(row: Row) -> str:
    if row.copy_bytes is None or row.gemm_flops is None:
        return "CPU"
    told = f"a copy moves {row.copy_bytes / 1e9:,.0f} GB/s, a matrix product does {row.gemm_flops / 1e12:,.0f} TFLOP/s"
    vendor = peak(row.device)
    if vendor is not None:
        told += f" (data sheet: {vendor.bytes / 1e9:,.0f} GB/s, {vendor.flops / 1e12:,.0f} TFLOP/s)"
    return told


def _speed_ups(rows: Sequence[Row]) -> str:
    there = _algorithms(rows)
    pairs = [(newer, older) for newer, older in views.RATIOS if newer in there and older in there]
    lines = []
    for head_dim in unique(row.head_dim for row in rows):
        for causal in (False, True):
            for direction in DIRECTIONS:
                found = views.speed_ups(rows, direction, head_dim=head_dim, causal=causal)
                if any(found.values()):
                    mask = "causal" if causal else "full"
                    name = f"{DIRECTION_TITLES[direction]}, head dim {head_dim}, {mask}"
                    lines.append([name, *(_ratios(found[pair]) for pair in pairs)])
    heads = ["geometric mean (least to most)", *(f"{_short(newer)} over {_short(older)}" for newer, older in pairs)]
    return _table(heads, lines)


def _ratios(ratios: Sequence[float]) -> str:
    return f"{views.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def _bytes(rows: Sequence[Row]) -> list[str]:
    measured = [row for row in rows if row.measured is not None]
    lengths = sorted({row.seqlen for row in (measured or rows) if row.counted is not None})
    lines = []
    for seqlen in lengths:
        for direction in ("forward", "backward"):
            for algorithm in ALGORITHMS:
                row = views.traffic_row(rows, algorithm, direction, seqlen)
                if row is not None and row.counted is not None:
                    lines.append(_bytes_line(row))
    without = "" if measured else " No counters were read: Nsight Compute was not there, or was not allowed to."
    heads = (
        "pass|problem|counted, GB|read|written|requested of L2, GB|N²d²/M, GB|measured, GB|read|written|L2 to SM, GB|"
        "counted / measured|operations per byte"
    )
    return [
        "<h2>Bytes through the GPU's memory</h2>",
        f"<p>{_BYTES}{without}</p>",
        *_figures(views.traffic(rows, direction, n) for n in lengths[-2:] for direction in ("forward", "backward")),
        _table(heads.split("|"), lines),
        "<h2>Roofline</h2>",
        *_figures(views.roofline(rows, head_dim) for head_dim in unique(row.head_dim for row in rows)),
    ]


def _bytes_line(row: Row) -> list[str]:
    counted, measured = row.counted, row.measured
    assert counted is not None
    theirs = ["", "", "", "", ""]
    if measured is not None:
        theirs = [
            *(_gb(value) for value in (measured.total, measured.read, measured.written)),
            _gb(measured.requested) if measured.requested else "",
            f"{counted.total / measured.total:.2f}" if measured.total else "",
        ]
    return [
        f"{_short(row.algorithm)} {row.direction}",
        str(row.case),
        *(_gb(value) for value in (counted.total, counted.read, counted.written, counted.requested)),
        _theorem(row),
        *theirs,
        f"{row.intensity or 0:,.0f}",
    ]


def _theorem(row: Row) -> str:
    """What theorem 2 of FlashAttention has for V1's forward, where the device's shared memory is known."""
    limits = {limits.name: limits for limits in KNOWN_GPUS.values()}.get(row.device)
    if limits is None or (row.algorithm, row.direction) != ("v1", "forward"):
        return ""
    return _gb(hbm.paper_v1_bytes(row.case.problem(), limits.shared_bytes))


def _errors(rows: Sequence[Row]) -> str:
    of_error = [row for row in rows if row.error is not None]
    algorithms = _algorithms(rows)
    lines = []
    for case in unique(row.case for row in of_error):
        for direction in ("forward", "backward"):
            found = [row for row in of_error if row.case == case and row.direction == direction]
            by_algorithm = {row.algorithm: row.error for row in found}
            errors = (by_algorithm.get(algorithm) for algorithm in algorithms)
            lines.append([f"{direction}, {case}", *("" if error is None else f"{error:.2e}" for error in errors)])
    return _table(["", *map(_short, algorithms)], lines)


def _times(rows: Sequence[Row]) -> str:
    heads = "pass|problem|ms|spread|TFLOP/s|memory, MiB|tiles"
    timed = [row for row in rows if row.seconds]
    lines = [
        [
            f"{_short(row.algorithm)} {row.direction}",
            str(row.case),
            f"{(row.seconds or 0) * 1e3:.4g}",
            "" if row.spread is None else f"{row.spread:.1%}",
            f"{(row.rate or 0) / 1e12:.4g}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.4g}",
            row.tiles,
        ]
        for row in timed
    ]
    missing = unique(
        (TITLES[row.algorithm], row.direction, str(row.case), row.note) for row in rows if row.note and not row.seconds
    )
    told = "".join(
        f"<li>{_text(f'{name}, {direction}, {case}: {note}')}</li>" for name, direction, case, note in missing
    )
    not_run = f"<details><summary>{len(missing)} were not run</summary><ul>{told}</ul></details>" if missing else ""
    return f"<details><summary>{len(timed)} times</summary>{_table(heads.split('|'), lines)}</details>{not_run}"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return "<p>None.</p>"
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f"<table><tr>{''.join(f'<th>{_text(head)}</th>' for head in heads)}</tr>{body}</table>"


def _figures(drawn: Iterable[str | None]) -> list[str]:
    return [f"<figure>{svg}</figure>" for svg in drawn if svg is not None]


def _short(algorithm: str) -> str:
    return algorithm.upper() if algorithm.startswith("v") else algorithm


def _gb(value: float) -> str:
    return f"{value / 1e9:,.4g}"


def _text(value: object) -> str:
    return html.escape(str(value))
