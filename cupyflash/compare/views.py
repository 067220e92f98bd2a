"""What the report and the documentation show of the rows: charts and figures in numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from . import charts
from .cases import ALGORITHMS, DIRECTION_TITLES, TITLES
from .charts import Axis, Series
from .devices import peak
from .table import Row, select, unique

RATIOS = (("v1", "standard"), ("v2", "v1"), ("v3", "v2"), ("v2", "standard"))  # (newer, older)


def rates(rows: Sequence[Row], head_dim: int, causal: bool, direction: str) -> str | None:
    """TFLOP/s over the length; None without times."""
    series = [
        Series(TITLES[name], name, [(row.seqlen, row.rate / 1e12) for row in found if row.rate])
        for name in ALGORITHMS
        if (found := _timed(rows, head_dim, causal, direction, name))
    ]
    if not series:
        return None
    title = f"Speed, {_title(direction, head_dim, causal)}"
    return charts.plot(title, _lengths(series), Axis("TFLOP/s"), series)


def times(rows: Sequence[Row], head_dim: int, causal: bool, direction: str) -> str | None:
    """Milliseconds over the length, for a fixed number of tokens."""
    series = [
        Series(TITLES[name], name, [(row.seqlen, (row.seconds or 0) * 1e3) for row in found])
        for name in ALGORITHMS
        if (found := _timed(rows, head_dim, causal, direction, name))
    ]
    if not series:
        return None
    title = f"Time, {_title(direction, head_dim, causal)}"
    return charts.plot(title, _lengths(series), Axis("ms", 2), series)


def ratios(rows: Sequence[Row], head_dim: int, causal: bool, direction: str) -> str | None:
    """How much faster each algorithm is than the one before, over the length."""
    series = []
    for newer, older in RATIOS[:3]:
        of = {row.seqlen: row.seconds or 0 for row in _timed(rows, head_dim, causal, direction, older)}
        found = _timed(rows, head_dim, causal, direction, newer)
        points = [(row.seqlen, of[row.seqlen] / (row.seconds or 1)) for row in found if row.seqlen in of]
        if points:
            series.append(Series(f"{newer.upper()} over {older.replace('v', 'V')}", newer, points))
    if not series:
        return None
    title = f"Speed-up, {_title(direction, head_dim, causal)}"
    return charts.plot(title, _lengths(series), Axis("times as fast"), series)


def errors(rows: Sequence[Row], head_dim: int, direction: str) -> str | None:
    """Largest error against float64, over the largest element, over the length."""
    found = [row for row in select(rows, head_dim=head_dim, direction=direction, causal=False) if row.error]
    series = [
        Series(TITLES[name], name, [(row.seqlen, row.error or 0) for row in found if row.algorithm == name])
        for name in ALGORITHMS
    ]
    if not found:
        return None
    what = {"forward": "out", "backward": "gradients"}[direction]
    title = f"Largest error of {what} against float64, head dim {head_dim}, {found[0].dtype}"
    return charts.plot(title, _lengths(series), Axis("over the largest element", 2, text=lambda x: f"{x:.1e}"), series)


def memory(rows: Sequence[Row], head_dim: int, direction: str) -> str | None:
    """Peak memory per batch entry and head over the length, beside lines that grow with N and with its square."""
    series = []
    for name in ALGORITHMS:
        found = [row for row in _timed(rows, head_dim, False, direction, name) if row.peak_bytes]
        points = [(float(row.seqlen), row.peak_bytes / row.batch / row.heads / 2**20) for row in found]  # type: ignore[operator]
        series.append(Series(TITLES[name], name, points))
    lengths = sorted({x for one in series for x, _ in one.points})
    if not lengths:
        return None
    x = _lengths(series)
    of_growth = (("v2", 1, "grows with N", "dotted"), ("standard", 2, "grows with the square of N", "dashed"))
    for kind, power, name, style in of_growth:
        given = next((one.points for one in series if one.kind == kind and one.points), None)
        if given:
            (n, value) = given[-1]
            series.append(Series(name, style, [(x, value * (x / n) ** power) for x in lengths]))
    title = f"Memory beyond the inputs, {DIRECTION_TITLES[direction]}, head dim {head_dim}"
    return charts.plot(
        title,
        x,
        Axis("MiB per head and batch entry", 2),
        series,
    )


def traffic(rows: Sequence[Row], direction: str, seqlen: int) -> str | None:
    """Bytes through the GPU's memory per query and head: counted, and as the counters have it."""
    shown = []
    for name in ALGORITHMS:
        row = traffic_row(rows, name, direction, seqlen)
        if row is not None and row.counted is not None:
            per_row = row.batch * row.heads * row.seqlen
            measured = row.measured.total / per_row if row.measured else 0.0
            shown.append((name.replace("v", "V"), name, row.counted.total / per_row, measured))
    if not shown:
        return None
    how = "counted (filled), measured (pale)" if any(row[3] for row in shown) else "counted"
    title = f"Bytes through memory per query and head, {direction}, N = {seqlen:,}: {how}"
    return charts.bars(title, "bytes per query and head", shown)


def traffic_row(rows: Sequence[Row], algorithm: str, direction: str, seqlen: int) -> Row | None:
    """The row whose bytes are shown: with counters where there are any; not causal."""
    found = select(rows, algorithm=algorithm, direction=direction, seqlen=seqlen, causal=False)
    found = [row for row in found if row.counted is not None]
    return max(found, key=lambda row: (row.measured is not None, row.head_dim <= 128, row.head_dim), default=None)


def roofline(rows: Sequence[Row], head_dim: int) -> str | None:
    """Operations per second over operations per byte of memory traffic, under the roofs of this device."""
    timed = [row for row in rows if row.rate and row.intensity and row.head_dim == head_dim and not row.causal]
    timed = [row for row in timed if row.direction != "step"]
    if not timed or not timed[0].copy_bytes or not timed[0].gemm_flops:
        return None
    series = [
        Series(
            TITLES[name],
            name,
            [(row.intensity or 0, (row.rate or 0) / 1e12) for row in timed if row.algorithm == name],
            joined=False,
        )
        for name in ALGORITHMS
    ]
    xs = [x for one in series for x, _ in one.points]
    low, high = min(xs) / 2, max(xs) * 2
    series.append(
        _roof("measured: copy and matrix product", "dashed", timed[0].copy_bytes, timed[0].gemm_flops, low, high)
    )
    vendor = peak(timed[0].device)
    if vendor is not None:
        series.append(_roof("data sheet", "dotted", vendor.bytes, vendor.flops, low, high))
    title = f"Roofline, head dim {head_dim}, full, forward and backward of every length"
    return charts.plot(
        title,
        Axis("operations per byte through memory (counted)", 10),
        Axis("TFLOP/s", 10),
        series,
    )


def speed_ups(rows: Sequence[Row], direction: str, **wanted: object) -> dict[tuple[str, str], list[float]]:
    """{(newer, older): time of the older over that of the newer, per problem that both computed}."""
    timed = [row for row in select(rows, direction=direction, **wanted) if row.seconds]
    seconds = {(row.case, row.algorithm): row.seconds for row in timed}
    return {
        (newer, older): [
            seconds[case, older] / seconds[case, newer]  # type: ignore[operator]
            for case in unique(row.case for row in timed)
            if (case, newer) in seconds and (case, older) in seconds
        ]
        for newer, older in RATIOS
    }


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _title(direction: str, head_dim: int, causal: bool) -> str:
    return f"{DIRECTION_TITLES[direction]}, head dim {head_dim}, {'causal' if causal else 'full'}"


def _lengths(series: Sequence[Series]) -> Axis:
    """The axis of sequence lengths."""
    ticks = sorted({x for one in series for x, _ in one.points})
    return Axis("sequence length", 2, ticks, _length)


def _timed(rows: Sequence[Row], head_dim: int, causal: bool, direction: str, algorithm: str) -> list[Row]:
    found = select(rows, head_dim=head_dim, causal=causal, direction=direction, algorithm=algorithm)
    return sorted((row for row in found if row.seconds), key=lambda row: row.seqlen)


def _roof(name: str, style: str, bytes_per_second: float, flops: float, low: float, high: float) -> Series:
    corner = flops / bytes_per_second
    xs = sorted({low, min(max(corner, low), high), high})
    return Series(name, style, [(x, min(x * bytes_per_second, flops) / 1e12) for x in xs])


def _length(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
