"""A schedule as a picture: time to the right, a lane per warp or warpgroup, a colour per kind of work."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from .replay import PARTS, Kind, Schedule, Span

WIDTH = 1000
_LEFT, _RIGHT = 146, 52  # names of lanes, and shares of time
_BAR, _THIN, _GAP, _LANE_GAP = 18, 8, 3, 11
_NARROWEST = 0.6  # a bar, in pixels
_GLYPH = 6.0  # width of a letter on a bar

KINDS: dict[Kind, str] = {
    "load": "load from memory",
    "product": "matrix product",
    "exp": "softmax (exponentials)",
    "store": "store to memory",
    "wait": "wait",
}

# Colours of Okabe and Ito, which people with any kind of colour vision can tell apart; a lighter set on a dark ground.
STYLE = """
text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#333}
.title{font-size:15px;font-weight:600;fill:#111} .tick{font-size:10.5px;fill:#666}
.on{font-size:11px;fill:#fff} .on-exp{fill:#222} .end{text-anchor:end} .mid{text-anchor:middle}
.ground{fill:#fff} .track{fill:#f3f4f6} .grid{stroke:#d8dadf;stroke-width:1} .queued{stroke:#009e73;stroke-width:1.5}
.load{fill:#0072b2} .product{fill:#009e73} .exp{fill:#e69f00} .store{fill:#cc79a7} .wait{fill:#c9ccd2}
g.span:hover rect{stroke:#000;stroke-width:1.5}
@media (prefers-color-scheme:dark){
text{fill:#ccd0d6} .title{fill:#f0f2f5} .tick{fill:#9aa0a8} .on{fill:#fff} .on-exp{fill:#1b1400}
.ground{fill:#15171a} .track{fill:#22252a} .grid{stroke:#363a41} .queued{stroke:#1fc295}
.load{fill:#2f8fd0} .product{fill:#12a37a} .exp{fill:#f0b429} .store{fill:#d58bb5} .wait{fill:#4a4f57}
g.span:hover rect{stroke:#fff}
}
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A span in a track, with what is written on it."""

    span: Span
    label: str


@dataclass(frozen=True, slots=True)
class Lane:
    """Tracks under one name, and below them, thin, stores that go on while there is other work."""

    name: str
    note: str
    tracks: tuple[tuple[Bar, ...], ...]
    stores: tuple[Bar, ...] = ()

    @property
    def height(self) -> int:
        """In pixels."""
        return len(self.tracks) * (_BAR + _GAP) + bool(self.stores) * (_THIN + _GAP) - _GAP


def lanes(schedule: Schedule) -> list[Lane]:
    """What is drawn, top to bottom: loads in flight, then who computes, stores or only waits."""
    loading = [warp for warp, spans in enumerate(schedule.warps) if any(map(_in_flight, spans))]
    found = []
    if loading:
        note = "in flight, for " + (f"warp {loading[0]}" if len(loading) == 1 else f"{len(loading)} warps")
        found.append(Lane("loads", note, _stacked(_loads(schedule))))
    requests = enumerate(schedule.recording.warps)
    producers = [warp for warp, made in requests if any(request.what == "load" for request in made)]
    stores_apart = any(_hides_work(span, spans) for spans in schedule.warps for span in spans if span.kind == "store")
    for warps in _groups(schedule):
        spans = [span for span in schedule.warps[warps[0]] if not _in_flight(span)]
        tracks: list[list[Bar]] = [[], [], []]
        for span in spans:
            track = 0 if span.kind == "product" and span.behind else 2 if span.kind == "store" and stores_apart else 1
            tracks[track].append(Bar(span, label(span)))
        if not spans:
            continue
        name, note = f"warp {warps[0]}", ""
        if len(warps) > 1:
            name, note = f"warpgroup {warps[0] // 4}", f"warps {warps[0]} to {warps[-1]}"
        elif producers == [warps[0]]:
            name, note = "producer", name
        products, others, stores = map(tuple, tracks)
        found.append(Lane(name, note, tuple(track for track in (products, others) if track), stores))
    return found


def label(span: Span) -> str:
    """The tile that a span makes or moves, by the kernel's own name for it; empty where its statement names none."""
    if span.kind == "exp":
        return "exp"
    for pattern in _NAMED.get(span.kind, ()):
        for place in span.places:
            for match in re.finditer(pattern, place.text):
                if match[1] not in _NO_TILES:
                    return match[1]
    return ""


_IN_SHARED = r"shared\.(?:\w+(?:\[[^\]]*\])?\.)*(\w+)(?![\w(])"  # the member, as in shared.rows[stage].Q
_FIRST, _LAST = r"\(\s*(\w+)\s*,", r",\s*(\w+)\);"  # of a call's arguments
_NAMED: dict[Kind, tuple[str, ...]] = {
    "product": (_FIRST,),  # warp_gemm(S, Q, K)
    "load": (_IN_SHARED, r"= (\w+)\[", _LAST, _FIRST),
    "store": (_IN_SHARED, r"^(\w+)\[", _LAST, _FIRST),
}
_NO_TILES = ("params", "work", "walk", "sum")


def _in_flight(span: Span) -> bool:
    return span.kind == "load" and span.behind


def _hides_work(store: Span, spans: Iterable[Span]) -> bool:
    """Whether a store is under way while its warp computes."""
    return any(span.kind in ("product", "exp") and span.start < store.end and store.start < span.end for span in spans)


def svg(schedule: Schedule, title: str) -> str:
    """The picture as one SVG element that needs nothing else; hovering over a bar names the kernel's statement."""
    chart = _Chart(schedule)
    y = 56.0
    body = []
    for lane in lanes(schedule):
        body.append(chart.lane(lane, y))
        y += lane.height + _GAP + _LANE_GAP
    units: tuple[tuple[str, Kind], ...] = (("tensor cores", "product"), ("exponential units", "exp"))
    for name, kind in units:
        body.append(chart.unit(name, kind, y))
        y += _BAR + _GAP + 4
    axis = chart.axis(48, y + 2)
    height = y + 34
    size = f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        f'<style>{STYLE}</style><rect class="ground" width="{WIDTH}" height="{height:g}"/>'
        f'<text class="title" x="12" y="20">{escape(title)}</text>{_legend()}{axis}{"".join(body)}</svg>'
    )


def busy(schedule: Schedule, kind: Kind) -> float:
    """The share of all steps in which the units of a kind work, over the four parts of the multiprocessor."""
    return schedule.worked[kind] / (PARTS * schedule.end) if schedule.end else 0.0


def _of_unit(spans: Iterable[Span], kind: Kind) -> list[Span]:
    return [span for span in spans if span.kind == kind]


def _groups(schedule: Schedule) -> list[tuple[int, ...]]:
    """Warpgroups whose warps do the same, and else single warps."""
    warps = range(len(schedule.warps))
    uses_warpgroups = any(request.what == "wgmma" for warp in schedule.recording.warps for request in warp)
    groups: list[tuple[int, ...]] = []
    for first in range(0, len(warps), 4):
        four = tuple(warps[first : first + 4])
        kinds = {tuple((s.kind, s.places) for s in schedule.warps[w] if s.kind != "wait") for w in four}
        alike = uses_warpgroups and len(kinds) == 1
        groups += [four] if alike else [(warp,) for warp in four]
    return groups


def _loads(schedule: Schedule) -> list[Bar]:
    """Loads in flight. Where several warps bring parts of one tile, each the n-th of a statement, it is one bar."""
    parts: defaultdict[tuple[Any, int], list[Span]] = defaultdict(list)
    for spans in schedule.warps:
        seen: Counter[Any] = Counter()
        for span in filter(_in_flight, spans):
            parts[span.places, seen[span.places]].append(span)
            seen[span.places] += 1
    whole = [replace(s[0], start=min(x.start for x in s), end=max(x.end for x in s)) for s in parts.values()]
    return [Bar(span, label(span)) for span in whole]


def _stacked(bars: Iterable[Bar]) -> tuple[tuple[Bar, ...], ...]:
    """In as few tracks as keep them apart, earlier ones on top."""
    tracks: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.span.start):
        free = next((track for track in tracks if track[-1].span.end <= bar.span.start), None)
        if free is None:
            tracks.append([bar])
        else:
            free.append(bar)
    return tuple(map(tuple, tracks))


def _legend() -> str:
    x, parts = 12.0, []
    for kind, text in KINDS.items():
        parts.append(f'<rect class="{kind}" x="{x:g}" y="30" width="14" height="12" rx="2"/>')
        parts.append(f'<text x="{x + 20:g}" y="40">{escape(text)}</text>')
        x += 38 + 6.4 * len(text)
    parts.append(f'<line class="queued" x1="{x:g}" x2="{x + 16:g}" y1="36" y2="36"/>')
    parts.append(f'<text x="{x + 22:g}" y="40">asked for, not begun</text>')
    return "".join(parts)


class _Chart:
    """Steps as pixels."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._scale = (WIDTH - _LEFT - _RIGHT) / max(1, schedule.end)

    def _x(self, step: float) -> float:
        return _LEFT + step * self._scale

    def lane(self, lane: Lane, y: float) -> str:
        middle = y + lane.height / 2 + (4 if not lane.note else -2)
        parts = [f'<text class="end" x="{_LEFT - 12}" y="{middle:g}">{escape(lane.name)}</text>']
        if lane.note:
            parts.append(f'<text class="tick end" x="{_LEFT - 12}" y="{middle + 13:g}">{escape(lane.note)}</text>')
        for n, track in enumerate(lane.tracks):
            top = y + n * (_BAR + _GAP)
            parts.append(self._track(top, _BAR))
            parts += self._queued(track, top)
            # Waits first, so that what overlaps one is seen.
            for bar in sorted(track, key=lambda bar: bar.span.kind != "wait"):
                parts.append(self._bar(bar, top, _BAR))
        if lane.stores:
            top = y + lane.height - _THIN
            parts += [self._track(top, _THIN), *(self._bar(bar, top, _THIN) for bar in lane.stores)]
        return "".join(parts)

    def unit(self, name: str, kind: Kind, y: float) -> str:
        """When the units of the multiprocessor's first part work, and for how much of the time all of them do."""
        spans = [s for w in range(0, len(self._schedule.warps), PARTS) for s in _of_unit(self._schedule.warps[w], kind)]
        parts = [f'<text class="end" x="{_LEFT - 12}" y="{y + 13:g}">{name}</text>', self._track(y, _BAR)]
        parts += [self._rect(kind, span.start, span.end, y, _BAR) for span in spans]
        share = f"{100 * busy(self._schedule, kind):.0f}%"
        parts.append(f'<text x="{WIDTH - _RIGHT + 10}" y="{y + 13:g}">{share}</text>')
        return "".join(parts)

    def axis(self, top: float, bottom: float) -> str:
        parts = []
        for step in _ticks(self._schedule.end):
            x = self._x(step)
            parts.append(f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="{top:g}" y2="{bottom:g}"/>')
            anchor = "mid" if x < WIDTH - _RIGHT - 20 else "end"  # clear of what follows
            parts.append(f'<text class="tick {anchor}" x="{x:g}" y="{bottom + 14:g}">{step:,}</text>')
        parts.append(f'<text class="tick end" x="{_LEFT - 12}" y="{bottom + 14:g}">steps of the model</text>')
        parts.append(f'<text class="tick" x="{WIDTH - _RIGHT + 10}" y="{bottom + 14:g}">busy</text>')
        return "".join(parts)

    def _track(self, y: float, height: int) -> str:
        return f'<rect class="track" x="{_LEFT}" y="{y:g}" width="{WIDTH - _LEFT - _RIGHT}" height="{height}" rx="2"/>'

    def _rect(self, kind: Kind, start: int, end: int, y: float, height: int) -> str:
        width = max(_NARROWEST, (end - start) * self._scale - 0.6)
        inset = 5 if kind == "wait" else 0
        return (
            f'<rect class="{kind}" x="{self._x(start):.2f}" y="{y + inset:g}" width="{width:.2f}" '
            f'height="{height - 2 * inset}" rx="{min(2, width / 3):.2g}"/>'
        )

    def _queued(self, track: Iterable[Bar], y: float) -> Iterator[str]:
        """Lines from where a product was asked for, or the one before it ended, to where it begins."""
        before, middle = 0, y + _BAR / 2
        for span in (bar.span for bar in track if bar.span.kind == "product"):
            first = max(before, span.asked)
            before = span.end
            if first < span.start:
                x, end = self._x(first), self._x(span.start)
                yield f'<line class="queued" x1="{x:.2f}" x2="{end:.2f}" y1="{middle:g}" y2="{middle:g}"/>'

    def _bar(self, bar: Bar, y: float, height: int) -> str:
        span = bar.span
        drawn = [f"<title>{escape(self._tooltip(bar))}</title>"]
        drawn.append(self._rect(span.kind, span.start, span.end, y, height))
        if height == _BAR and bar.label and (span.end - span.start) * self._scale > _GLYPH * len(bar.label) + 3:
            middle = self._x((span.start + span.end) / 2)
            colour = "on on-exp" if span.kind == "exp" else "on"
            drawn.append(f'<text class="{colour} mid" x="{middle:.2f}" y="{y + 13:g}">{escape(bar.label)}</text>')
        return f'<g class="span">{"".join(drawn)}</g>'

    def _tooltip(self, bar: Bar) -> str:
        span = bar.span
        what = f"{KINDS[span.kind]}{f': {bar.label}' if bar.label else ''}"
        when = f"steps {span.start:,} to {span.end:,}"
        asked = f", asked for at {span.asked:,}" if span.asked < span.start else ""
        count = f", {span.count} instructions per warp" if span.kind != "wait" else ""
        file = self._schedule.recording.kernel.file
        lines = [f"{file}:{place.line}  {place.text}" for place in span.places[:3]]
        return "\n".join([f"{what}\n{when}{asked}{count}", *lines])


def _ticks(end: int) -> Iterator[int]:
    """About ten round numbers."""
    size = next(first * 10**power for power in range(9) for first in (1, 2, 5) if end <= 12 * first * 10**power)
    yield from range(0, end + 1, size)
