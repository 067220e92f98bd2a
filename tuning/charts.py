"""Small charts as SVG text, in the colours of the page."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float]]

STYLE = """
.axis { stroke: currentColor; opacity: .35; } .series { fill: none; stroke-width: 1.5; } .wall { fill: #8883; }
"""
_COLOURS = ("#37c", "#d73", "#2a7", "#b4b", "#c93", "#5aa", "#977", "#888")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 380, 150, 46, 20
_CELL_WIDTH, _CELL_HEIGHT = 46, 22
_CELL_SIZE = f'width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}"'


def heat_map(cells: Mapping[tuple[int, int], float], walls: Mapping[int, int], caption: str) -> str:
    """Values by (Br, Bc), the smallest the strongest; grey beyond ``walls``, the largest Bc that fits by Br."""
    rows = sorted({Br for Br, _ in cells} | set(walls))
    columns = sorted({Bc for _, Bc in cells})
    best = min(cells.values())
    drawn = []
    for y, Br in enumerate(rows):
        drawn.append(f'<text x="{_LEFT - 6}" y="{(y + 0.7) * _CELL_HEIGHT:.0f}" text-anchor="end">Br {Br}</text>')
        for x, Bc in enumerate(columns):
            place = f'x="{_LEFT + x * _CELL_WIDTH}" y="{y * _CELL_HEIGHT}" {_CELL_SIZE}'
            value = cells.get((Br, Bc))
            if value is not None:
                strength = max(0.06, 1 - (value / best - 1) / 0.5)
                middle = f'x="{_LEFT + (x + 0.48) * _CELL_WIDTH:.0f}" y="{(y + 0.68) * _CELL_HEIGHT:.0f}"'
                drawn.append(f'<rect {place} fill="#2a7" fill-opacity="{strength:.2f}"/>')
                drawn.append(f'<text {middle} text-anchor="middle">{_short(value)}</text>')
            elif Bc > walls.get(Br, math.inf):
                drawn.append(f'<rect {place} class="wall"><title>more than the shared memory</title></rect>')
    bottom = len(rows) * _CELL_HEIGHT
    for x, Bc in enumerate(columns):
        drawn.append(
            f'<text x="{_LEFT + (x + 0.48) * _CELL_WIDTH:.0f}" y="{bottom + 14}" text-anchor="middle">{Bc}</text>'
        )
    return _figure(
        drawn, _LEFT + len(columns) * _CELL_WIDTH, bottom + _BOTTOM, f"{caption}; grey: beyond the shared memory"
    )


def line(points: Points, caption: str) -> str:
    """One series."""
    return lines([("", points)], caption)


def lines(series: Sequence[tuple[str, Points]], caption: str) -> str:
    """Several series, with their names below."""
    xs = [x for _, points in series for x, _ in points]
    ys = sorted(y for _, points in series for _, y in points)
    low, high = ys[0], ys[min(len(ys) - 1, math.ceil(0.98 * len(ys)))]  # an outlier shall not flatten the rest
    scale_x, scale_y = _Scale(min(xs), max(xs), _LEFT, _WIDTH), _Scale(low, high, _HEIGHT - _BOTTOM, 8)
    drawn = [_frame(low, high, min(xs), max(xs))]
    for index, (_, points) in enumerate(series):
        path = " ".join(f"{scale_x(x):.0f},{scale_y(min(y, high)):.0f}" for x, y in points)
        drawn.append(f'<polyline class="series" stroke="{_COLOURS[index % 8]}" points="{path}"/>')
    names = "".join(
        f'<br><span style="color:{_COLOURS[i % 8]}">━</span> {html.escape(name)}'
        for i, (name, _) in enumerate(series)
        if name
    )
    return _figure(drawn, _WIDTH, _HEIGHT, caption, names)


def histogram(values: Sequence[float], caption: str, bins: int = 24) -> str:
    """How often values occur; what is above the 99th percentile counts to the last bin."""
    ordered = sorted(values)
    low, high = 0.0, ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)))] or 1.0
    counts = Counter(min(bins - 1, int((value - low) / (high - low) * bins)) for value in values)
    scale_y = _Scale(0, max(counts.values()), _HEIGHT - _BOTTOM, 8)
    width = (_WIDTH - _LEFT) / bins
    drawn = [_frame(0, max(counts.values()), low, high)]
    for number, count in counts.items():
        top = scale_y(count)
        drawn.append(
            f'<rect x="{_LEFT + number * width:.1f}" y="{top:.1f}" width="{width - 1:.1f}" '
            f'height="{_HEIGHT - _BOTTOM - top:.1f}" fill="#37c"/>'
        )
    return _figure(drawn, _WIDTH, _HEIGHT, caption)


class _Scale:
    """Maps a range to another."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._factor, self._start = low, (end - start) / ((high - low) or 1.0), start

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._factor


def _frame(low: float, high: float, left: float, right: float) -> str:
    bottom = _HEIGHT - _BOTTOM
    return (
        f'<path class="axis" fill="none" d="M{_LEFT},8V{bottom}H{_WIDTH}"/>'
        f'<text x="{_LEFT - 5}" y="14" text-anchor="end">{_short(high)}</text>'
        f'<text x="{_LEFT - 5}" y="{bottom}" text-anchor="end">{_short(low)}</text>'
        f'<text x="{_LEFT}" y="{bottom + 14}">{_short(left)}</text>'
        f'<text x="{_WIDTH}" y="{bottom + 14}" text-anchor="end">{_short(right)}</text>'
    )


def _figure(drawn: Sequence[str], width: float, height: float, caption: str, below: str = "") -> str:
    content = "".join(drawn)
    return (
        f'<figure><figcaption>{html.escape(caption)}</figcaption><svg width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{html.escape(caption)}">{content}</svg><figcaption>{below}</figcaption></figure>'
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
