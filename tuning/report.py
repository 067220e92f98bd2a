"""One page that shows a tune: what won and by how much, where the fast tiles lie, how the races went, noise and clocks.

Made of the journals alone, with nothing to fetch: a page that is mailed still works.
"""

from __future__ import annotations

import html
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import charts
from .journal import Event
from .results import latest
from .session import all_events

MOST_BYTES = 2_000_000
_CLOCK_POINTS = 600
_IN_TIMELINE = 8  # candidates

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a7; --bad: #c54; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .15rem .7rem; text-align: right; }
th { border-bottom: 1px solid; } td:first-child, th:first-child, td.config { text-align: left; }
tr:nth-child(even) { background: #8881; } .faster { color: var(--good); } small, .quiet { opacity: .7; }
details { border-top: 1px solid var(--line); padding: .5rem 0; } summary { cursor: pointer; font-weight: 600; }
figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; vertical-align: top; } figcaption { font-size: 13px; }
svg text { fill: currentColor; font: 11px system-ui, sans-serif; } svg { overflow: visible; }
"""


def write_report(folder: Path, path: Path) -> Path:
    """Writes the page of all journals in a folder; returns where it is."""
    events = list(all_events(folder))
    page = render(events)
    if len(page.encode()) > MOST_BYTES:
        page = render(events, timelines=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def render(events: Sequence[Event], timelines: bool = True) -> str:
    """The page. ``timelines``: with the course of every race."""
    header: Event = next((e for e in reversed(events) if e["kind"] == "header"), {})
    by_task: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if "task" in event:
            by_task[event["task"]].append(event)
    name = header.get("limits", {}).get("name", "GPU")
    body = [
        f"<h1>Tiles for {_text(name)}</h1>",
        _facts(header, events),
        "<h2>Tuned against default</h2>",
        _summary(latest(events)),
        "<h2>Clocks and noise</h2>",
        _conditions(events),
        "<h2>Tasks</h2>",
        *(_task(name, by_task[name], timelines) for name in sorted(by_task, key=_order(events))),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>cupyflash tune: {_text(name)}</title><style>{_STYLE}{charts.STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _order(events: Sequence[Event]) -> Any:
    first: dict[Any, int] = {}
    for event in events:
        first.setdefault(event.get("task"), len(first))
    return first.__getitem__


def _facts(header: Event, events: Sequence[Event]) -> str:
    limits = header.get("limits", {})
    samples = [e for e in events if e["kind"] == "sample"]
    failed: dict[str, int] = defaultdict(int)
    for event in events:
        if event["kind"] == "failure":
            failed[event["reason"]] += 1
    measured = len({(e["task"], str(e["config"])) for e in samples})
    duration = events[-1]["at"] - events[0]["at"] if events else 0
    facts = [
        f"sm_{limits.get('arch')}, {limits.get('sm_count')} multiprocessors",
        f"{limits.get('shared_bytes', 0) / 1024:g} KiB of shared memory per block",
        *(f"{key} {header[key]}" for key in ("nvrtc", "cupy", "driver", "regime", "effort") if header.get(key)),
        f"{len(samples)} samples of {measured} configurations in {duration:.0f} s",
        *(f"{count} out: {reason}" for reason, count in failed.items()),
    ]
    return f"<p class=quiet>{' · '.join(map(_text, facts))}</p>"


def _summary(results: Sequence[Event]) -> str:
    best: dict[tuple[str, str], Event] = {}
    for event in results:
        best.setdefault((event["task"], event["size"]), event)  # other families' times are from other races
    if not best:
        return "<p>No task was finished.</p>"
    ratios = [event["seconds"] / event["default_seconds"] for event in best.values()]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    rows = [
        f"<tr><td>{_text(e['task'])}</td><td>{e['size']}</td><td>{e['default_seconds'] * 1e3:.4g}</td>"
        f"<td>{e['seconds'] * 1e3:.4g}</td>{_gain(e)}<td>{e['spread']:.2%}</td>"
        f"<td>{_milliseconds(e['sustained_seconds'])}</td><td class=config>{_text(_tile(e['config']))}</td></tr>"
        for e in best.values()
    ]
    titles = "task|batch x length|default ms|tuned ms|gain|noise|sustained ms|tiles"
    head = "".join(f"<th>{title}</th>" for title in titles.split("|"))
    return (
        f"<p>{len(best)} problems; geometric mean of tuned / default: {mean:.3f}. A gain counts if it is above 1% and "
        f"its 99% interval.</p><table><tr>{head}</tr>{''.join(rows)}</table>"
    )


def _gain(event: Event) -> str:
    if event["config"] == event["default"]:
        return "<td class=quiet>default kept</td>"
    return f"<td class=faster>{event['gain']:+.1%} ± {event['interval']:.1%}</td>"


def _conditions(events: Sequence[Event]) -> str:
    samples = [e for e in events if e["kind"] == "sample"]
    start = events[0]["at"] if events else 0
    figures = []
    for key, unit in (("sm_mhz", "SM clock, MHz"), ("watts", "power, W"), ("celsius", "temperature, °C")):
        points = [(e["at"] - start, float(e[key])) for e in samples if key in e]
        if points:
            figures.append(charts.line(_thinned(points, _CLOCK_POINTS), f"{unit} over seconds"))
    throttled = sorted({reason for e in samples for reason in e.get("throttled", [])})
    spreads = [e["spread"] for e in events if e["kind"] == "race"]
    if spreads:
        figures.append(charts.histogram([100 * s for s in spreads], "noise of a sample per race, %"))
    told = f"throttled by: {', '.join(throttled)}" if throttled else "no throttling was reported"
    missing = "" if any("sm_mhz" in e for e in samples) else " (no sensors: nvidia-ml-py is not installed)"
    return f"<p>{_text(told)}{missing}</p>{''.join(figures)}"


def _task(name: str, events: Sequence[Event], timelines: bool) -> str:
    spaces = next((e for e in reversed(events) if e["kind"] == "space"), None)
    failures = [e for e in events if e["kind"] == "failure"]
    parts = []
    for family, about in (spaces["families"] if spaces else {}).items():
        samples = [e for e in events if e["kind"] == "sample" and e["config"]["family"] == family]
        for size in dict.fromkeys(e["size"] for e in samples):
            chosen = [e for e in samples if e["size"] == size and e["stage"].startswith(f"search {family}")]
            if chosen:
                walls = {int(Br): Bc for Br, Bc in about["walls"].items()}
                parts.append(charts.heat_map(_cells(chosen), walls, f"{family} {size}: ms, the best of each Br x Bc"))
            if timelines:
                parts += _timelines(events, samples, family, size)
    if failures:
        told = [
            f"<li>{_text(_tile(e['config']))}: {_text(e['reason'])}, {_text(e['message'][:160])}</li>"
            for e in failures[:40]
        ]
        parts.append(
            f"<details><summary>{len(failures)} configurations are out</summary><ul>{''.join(told)}</ul></details>"
        )
    counts = ", ".join(f"{about['count']} {family}" for family, about in (spaces["families"] if spaces else {}).items())
    return f"<details><summary>{_text(name)} <small>{counts}</small></summary>{''.join(parts)}</details>"


def _cells(samples: Sequence[Event]) -> dict[tuple[int, int], float]:
    cells: dict[tuple[int, int], float] = {}
    for event in samples:
        key = event["config"]["Br"], event["config"]["Bc"]
        cells[key] = min(cells.get(key, math.inf), event["seconds"] * 1e3)
    return cells


def _timelines(events: Sequence[Event], samples: Sequence[Event], family: str, size: str) -> list[str]:
    """The last race of a family at a size: each round's ratio to the winner."""
    race = next(
        (e for e in reversed(events) if e["kind"] == "race" and e["stage"] == family and e["size"] == size), None
    )
    if race is None or not race["ranking"]:
        return []
    rounds: dict[str, dict[int, float]] = defaultdict(dict)
    for event in samples:
        if event["stage"] == f"race {family}" and event["size"] == size:
            rounds[_tile(event["config"])][event["round"]] = event["seconds"]
    leader = rounds.get(_tile(race["ranking"][0]), {})
    listed = [*race["ranking"], *(dropped["config"] for dropped in reversed(race["dropped"]))]
    series = []
    for config in listed[:_IN_TIMELINE]:
        own = rounds.get(_tile(config), {})
        points = [(float(r), own[r] / leader[r]) for r in sorted(own) if r in leader]
        if points:
            series.append((_tile(config), points))
    ties = f", {len(race['ties'])} tied" if len(race["ties"]) > 1 else ""
    return [charts.lines(series, f"{family} {size}: time over the winner's, by round{ties}")] if series else []


def _thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    step = max(1, math.ceil(len(points) / most))
    return points[::step]


def _tile(config: dict[str, Any]) -> str:
    return " ".join(
        [config["family"], *(f"{k}={int(v)}" for k, v in config.items() if k != "family" and v != _usual(k))]
    )


def _usual(name: str) -> Any:
    from ..tiles import TileConfig

    return TileConfig.__dataclass_fields__[name].default


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.4g}"


def _text(value: Any) -> str:
    return html.escape(str(value))
