"""Charts as SVG text: lines, points and bars, readable on light and dark pages, with nothing to fetch."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

COLOURS = {"standard": "#808790", "v1": "#d9822b", "v2": "#3b82d0", "v3": "#2a9d6f"}
_MARKS = {"standard": "square", "v1": "triangle", "v2": "circle", "v3": "diamond"}
STYLE = (
    "svg text{fill:currentColor;font:12px system-ui,sans-serif}svg .title{font-size:13px;font-weight:600}"
    "svg .grid{stroke:currentColor;opacity:.15}svg .axis{stroke:currentColor;opacity:.5;fill:none}"
    "svg .series{fill:none;stroke-width:2}svg .dashed{stroke-dasharray:5 4;stroke-width:1.5}"
    "svg .quiet{opacity:.75;font-size:11px}"
)

_WIDTH, _HEIGHT = 440, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 30, 44
_LEGEND_ROW = 17
_BAR, _GAP = 15, 9


@dataclass(frozen=True)
class Series:
    """Points that belong together. kind: a key of ``COLOURS``; line: they are joined; dashed: a limit, unmarked."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    line: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """log: 0 is linear from 0, else the base; ticks: where, or None for round numbers; text: how they are written."""

    title: str
    log: int = 0
    ticks: Sequence[float] | None = None
    text: Callable[[float], str] = field(default=lambda value: f"{value:,.4g}")


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


def standalone(svg: str) -> str:
    """A chart as a file of its own, in the colours of whoever looks at it."""
    style = (
        f"{STYLE}svg{{color:#1b1f24;background:#fff}}"
        "@media(prefers-color-scheme:dark){svg{color:#e6e6e6;background:#16181c}}"
    )
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "</title>", f"</title><style>{style}</style>", 1
    )


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
    colour = COLOURS.get(one.kind, "currentColor")
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    drawn = []
    if one.dashed:
        drawn.append(f'<polyline class="series dashed" stroke="{colour}" points="{path}"/>')
    elif one.line:
        drawn.append(f'<polyline class="series" stroke="{colour}" points="{path}"/>')
    if not one.dashed:
        drawn += [_mark(one.kind, a, b) for a, b in points]
    return drawn


def _mark(kind: str, x: float, y: float) -> str:
    """Algorithms differ in shape, not only in colour."""
    fill = f'fill="{COLOURS.get(kind, "currentColor")}"'
    shape = _MARKS.get(kind, "circle")
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {fill}/>'
    corners = {
        "square": ((-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)),
        "triangle": ((0, -4.8), (4.6, 3.6), (-4.6, 3.6)),
        "diamond": ((0, -5.2), (5.2, 0), (0, 5.2), (-5.2, 0)),
    }[shape]
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}" {fill}/>'


def _legend(one: Series, y: float) -> str:
    sample = _drawn(Series("", one.kind, (), dashed=one.dashed), [(_LEFT, y + 6), (_LEFT + 26, y + 6)])
    return "".join(sample) + _label(_LEFT + 36, y + 10, one.name, "start")


def _label(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    quiet = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{quiet}>{html.escape(text)}</text>'


def _svg(title: str, drawn: Sequence[str], width: int, height: int) -> str:
    content = "".join(drawn)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"<title>{html.escape(title)}</title>"
        f"{_label(_LEFT - 50, 14, title, 'start', 'title')}{content}</svg>"
    )
