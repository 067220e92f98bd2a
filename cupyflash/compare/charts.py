"""Charts as SVG text: lines, points and bars, readable on light and dark pages, with nothing to fetch."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

COLOURS = {"standard": "#808790", "v1": "#d9822b", "v2": "#3b82d0", "v3": "#2a9d6f"}
_MARKS = {"standard": "square", "v1": "triangle", "v2": "circle", "v3": "diamond"}
STYLE = (
    "svg text{fill:currentColor;font:12px system-ui,sans-serif}svg .title{font-size:13px;font-weight:600}"
    "svg .grid{stroke:currentColor;opacity:.15}svg .axis{stroke:currentColor;opacity:.5;fill:none}"
    "svg .series{fill:none;stroke-width:2}svg .dashed{stroke-dasharray:6 4;stroke-width:1.5}"
    "svg .dotted{stroke-dasharray:2 3;stroke-width:1.5}"
    "svg .quiet{opacity:.75;font-size:11px}"
)

_WIDTH, _HEIGHT = 440, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 26, 24, 44
_TITLE_LINE, _TITLE_LETTER = 17, 8.4  # height and width, roughly
_LEGEND_ROW = 17
_BAR, _GAP = 15, 9


@dataclass(frozen=True)
class Series:
    """Points that belong together.

    kind: a key of ``COLOURS``, or "dashed" or "dotted" for a line to compare with. joined: by a line.
    """

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    joined: bool = True


@dataclass(frozen=True)
class Axis:
    """log: 0 is linear from 0, else the base; ticks: where, or None for round numbers; text: how they are written."""

    title: str
    log: int = 0
    ticks: Sequence[float] | None = None
    text: Callable[[float], str] = field(default=lambda value: short(value))


def short(value: float) -> str:
    """A number in few letters: 0.25, 512, 16k, 3.2M."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):.3g}{letter}"
    return f"{value:,.4g}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def plot(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """A chart of one or more series that have points."""
    shown = [one for one in series if one.points]
    values_x = [value for one in shown for value, _ in one.points] or [1.0]
    values_y = [value for one in shown for _, value in one.points] or [1.0]
    to_x, ticks_x = _scale(x, values_x, _LEFT, _WIDTH - _RIGHT)
    to_y, ticks_y = _scale(y, values_y, _HEIGHT - _BOTTOM, _TOP)
    drawn = []
    for tick in ticks_x:
        drawn.append(f'<path class="grid" d="M{to_x(tick):.1f},{_TOP}V{_HEIGHT - _BOTTOM}"/>')
        drawn.append(_label(to_x(tick), _HEIGHT - _BOTTOM + 16, x.text(tick), "middle"))
    for tick in ticks_y:
        drawn.append(f'<path class="grid" d="M{_LEFT},{to_y(tick):.1f}H{_WIDTH - _RIGHT}"/>')
        drawn.append(_label(_LEFT - 6, to_y(tick) + 4, y.text(tick), "end"))
    drawn.append(f'<path class="axis" d="M{_LEFT},{_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>')
    drawn.append(_label((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x.title, "middle", "quiet"))
    drawn.append(_label(_LEFT, _TOP - 6, y.title, "start", "quiet"))
    for one in shown:
        drawn += _drawn(one, [(to_x(a), to_y(b)) for a, b in one.points])
    legend = [_legend(one, _HEIGHT + number * _LEGEND_ROW) for number, one in enumerate(shown)]
    return _svg(title, [*drawn, *legend], _WIDTH, _HEIGHT + len(shown) * _LEGEND_ROW + 4)


def bars(title: str, unit: str, rows: Sequence[tuple[str, str, float, float]]) -> str:
    """Horizontal bars on a logarithmic scale: (name, kind, filled bar, outlined bar beside it; 0: none)."""
    values = [value for _, _, a, b in rows for value in (a, b) if value > 0] or [1.0]
    scale = Axis(unit, log=10)
    left, width = 150, 560
    to_x, ticks = _scale(scale, [min(values) / 2, max(values)], left, width - 60)
    bottom = _TOP + len(rows) * (2 * _BAR + _GAP)
    drawn = []
    for tick in ticks:
        drawn.append(f'<path class="grid" d="M{to_x(tick):.1f},{_TOP}V{bottom}"/>')
        drawn.append(_label(to_x(tick), bottom + 15, scale.text(tick), "middle"))
    for number, (name, kind, filled, outlined) in enumerate(rows):
        top = _TOP + number * (2 * _BAR + _GAP)
        drawn.append(_label(left - 8, top + _BAR + 4, name, "end"))
        for value, offset, opacity in ((filled, 0, "1"), (outlined, _BAR, ".35")):
            if value > 0:
                end = to_x(value)
                drawn.append(
                    f'<rect x="{left}" y="{top + offset}" width="{max(1.0, end - left):.1f}" height="{_BAR - 2}" '
                    f'fill="{COLOURS[kind]}" fill-opacity="{opacity}" stroke="{COLOURS[kind]}"/>'
                )
                drawn.append(_label(end + 5, top + offset + 11, scale.text(value), "start", "quiet"))
    drawn.append(_label((left + width) / 2, bottom + 32, unit, "middle", "quiet"))
    return _svg(title, drawn, width, bottom + 40)


def beside(drawn: Sequence[str]) -> str:
    """Charts in a row, as one."""
    sizes = [tuple(map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])) for svg in drawn]
    placed, left = [], 0.0
    for svg, (width, _) in zip(drawn, sizes, strict=True):
        placed.append(svg.replace("<svg ", f'<svg x="{left:.0f}" ', 1))
        left += width
    height = max(height for _, height in sizes)
    return f'<svg viewBox="0 0 {left:.0f} {height:.0f}" width="{left:.0f}" role="img">{"".join(placed)}</svg>'


def standalone(svg: str) -> str:
    """A chart as a file of its own, in the colours of whoever looks at it."""
    style = (
        f"{STYLE}svg{{color:#1b1f24;background:#fff}}"
        "@media(prefers-color-scheme:dark){svg{color:#e6e6e6;background:#16181c}}"
    )
    begin, rest = svg.split(">", 1)
    begin = begin.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f"{begin}><style>{style}</style>{rest}"


def _scale(
    axis: Axis, values: Sequence[float], start: float, end: float
) -> tuple[Callable[[float], float], Sequence[float]]:
    """Where values lie, and the ticks among them."""
    low, high = (min(values), max(values)) if axis.log else (0.0, max(values) * 1.05 or 1.0)
    if axis.log:
        ticks = axis.ticks or _powers(axis.log, low, high)
        low, high = min(low, *ticks), max(high, *ticks)
        base, factor = math.log(low), (end - start) / ((math.log(high) - math.log(low)) or 1.0)
        return lambda value: start + (math.log(value) - base) * factor, ticks
    factor = (end - start) / (high - low)
    return lambda value: start + (value - low) * factor, axis.ticks or _round_numbers(high)


def _powers(base: int, low: float, high: float) -> list[float]:
    first, last = (math.floor(math.log(x, base) + 1e-9) for x in (low, high))
    step = max(1, (last - first) // 6)
    return [float(base) ** n for n in range(first, last + 2, step)]


def _round_numbers(high: float) -> list[float]:
    rough = high / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * n for n in range(int(high / step) + 1)]


def _drawn(one: Series, points: Sequence[tuple[float, float]]) -> list[str]:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    if one.kind not in COLOURS:
        return [f'<polyline class="series {one.kind}" stroke="currentColor" points="{path}"/>']
    line = f'<polyline class="series" stroke="{COLOURS[one.kind]}" points="{path}"/>'
    return [line] * one.joined + [_mark(one.kind, a, b) for a, b in points]


def _mark(kind: str, x: float, y: float) -> str:
    """Algorithms differ in shape, not only in colour."""
    fill, shape = f'fill="{COLOURS[kind]}"', _MARKS[kind]
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {fill}/>'
    corners = {
        "square": ((-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)),
        "triangle": ((0, -4.8), (4.6, 3.6), (-4.6, 3.6)),
        "diamond": ((0, -5.2), (5.2, 0), (0, 5.2), (-5.2, 0)),
    }[shape]
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}" {fill}/>'


def _legend(one: Series, y: float) -> str:
    ends = [(_LEFT, y + 6), (_LEFT + 26, y + 6)] if one.joined else [(_LEFT + 13, y + 6)]
    sample = _drawn(one, ends)
    return "".join(sample) + _label(_LEFT + 36, y + 10, one.name, "start")


def _label(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    quiet = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{quiet}>{html.escape(text)}</text>'


def _svg(title: str, drawn: Sequence[str], width: int, height: int) -> str:
    """The chart below its title, which takes as many lines as it needs."""
    lines = textwrap.wrap(title, int(width / _TITLE_LETTER))
    above = _TITLE_LINE * len(lines)
    titles = "".join(_label(8, 13 + _TITLE_LINE * n, line, "start", "title") for n, line in enumerate(lines))
    return (
        f'<svg viewBox="0 0 {width} {height + above}" width="{width}" height="{height + above}" role="img">'
        f"<title>{html.escape(title)}</title>{titles}"
        f'<g transform="translate(0 {above})">{"".join(drawn)}</g></svg>'
    )
