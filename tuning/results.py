"""What a tune found, and how it is handed to the store."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..problem import Problem
from ..resources import Limits
from ..tiles import Task, TileConfig
from . import store
from .entries import Entry, Kind, Measured
from .kernel_hash import kernel_hash
from .tasks import Size, TuningTask


@dataclass(frozen=True, slots=True)
class Winner:
    """The best of one family for one task at one size.

    Attributes:
        task, size: what was measured.
        config: the tiles.
        seconds: median of one run.
        default: what is taken without this tune, of any family.
        default_seconds: of ``default``, measured in turn with the family's.
        gain: relative, over ``default``.
        interval: half-width of the 99% interval of ``gain``.
        spread: relative noise of a sample.
        sustained_seconds: of one run among many back to back; None for short ones.
        samples: that were taken of it in the last race.
        half: what bfloat16 found was proven in float16 too, without spills.
    """

    task: TuningTask
    size: Size
    config: TileConfig
    seconds: float
    default: TileConfig
    default_seconds: float
    gain: float
    interval: float
    spread: float
    sustained_seconds: float | None
    samples: int
    half: bool

    @property
    def is_default(self) -> bool:
        """Nothing beat what is taken anyway."""
        return self.config == self.default


def as_event(winner: Winner) -> dict[str, Any]:
    """For the journal."""
    return {**asdict(winner), "task": winner.task.name, "size": str(winner.size)}


def from_event(event: dict[str, Any], task: TuningTask) -> Winner:
    """Back from the journal."""
    values = {name: event[name] for name in Winner.__slots__}
    size = next(size for size in task.sizes if str(size) == event["size"])
    configs = {name: TileConfig(**event[name]) for name in ("config", "default")}
    return Winner(**{**values, "task": task, "size": size, **configs})


def latest(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last result of each family per task and size; of a task and size the first is what was judged the fastest."""
    found: dict[Any, dict[str, Any]] = {}
    for event in events:
        if event["kind"] == "result":
            key = event["task"], event["size"], event["config"]["family"]
            found.pop(key, None)  # a later one has its place among later ones
            found[key] = event
    return list(found.values())


def known_configs(task: Task, problem: Problem, limits: Limits) -> list[TileConfig]:
    """Winners of this GPU model and of others of its architecture, legal or not."""
    return [found.config for found in store.find_all(task, problem, limits)]


def keep(winners: Iterable[Winner], limits: Limits, identity: dict[str, Any]) -> Path | None:
    """Gives winners to the store, which writes them to the user's file of the GPU model; returns its path.

    Winners of bfloat16 are kept for both 16-bit dtypes if they were proven in both. Families are timed in races of
    their own, and a file has the fastest first: what did not beat the first of its task and size is kept as no faster.
    """
    today = datetime.date.today().isoformat()
    entries = []
    least: dict[tuple[TuningTask, Size], float] = {}
    for winner in winners:
        task = winner.task.task
        kind = Kind.of(task, winner.task.problem(winner.size))
        if winner.half:
            kind = replace(kind, dtype="half")
        measured = Measured(
            seconds=max(winner.seconds, least.setdefault((winner.task, winner.size), winner.seconds)),
            default_seconds=winner.default_seconds,
            spread=winner.spread,
            sustained_seconds=winner.sustained_seconds,
            date=today,
            kernel=kernel_hash(winner.config.family, task),
            nvrtc=identity.get("nvrtc"),
            cupy=identity.get("cupy"),
            driver=identity.get("driver"),
            provenance="cupyflash tune",
        )
        entries.append(Entry(kind, winner.config, measured))
    return store.keep(entries, limits) if entries else None
