"""Which configurations of one family are measured for a task, batch by batch."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import heuristics
from ..tiles import TileConfig
from .race import Failed, Stop
from .search import Study
from .session import journal_path
from .tasks import Effort, Size

if TYPE_CHECKING:
    from .task_tuner import TaskTuner

BATCH = 16  # configurations that are compiled at once
_FIRST_BATCH = 6  # what is taken without a tune, and its most likely rivals: measured soon, whatever the time
_BEST = 3  # per size, whose neighbours are measured last


def candidates(effort: Effort, space_size: int, is_likely: bool) -> int:
    """How many configurations of a family are measured; fewer where another family is likely to win."""
    if effort == "full":
        return space_size
    return min(space_size, max(64, space_size // 4) if is_likely else 24)


class FamilySearch:
    """The search among the configurations of one family, at the sizes that it serves."""

    def __init__(
        self,
        tuner: TaskTuner,
        family: str,
        configs: list[TileConfig],
        sizes: Sequence[Size],
        known: list[TileConfig],
        effort: Effort,
        seed: int,
        is_first: bool,
    ) -> None:
        self.family = family
        self._tuner, self._configs, self._sizes = tuner, configs, sizes
        members = set(configs)
        self._known = [config for config in dict.fromkeys(known) if config in members]
        has_default = any(config.family == family for config in tuner.defaults.values())
        self.wanted = candidates(effort, len(configs), has_default or is_first)
        self._all = self.wanted == len(configs)
        self._study = Study(
            journal_path(tuner.session.folder, tuner.session.slot).with_name(f"optuna-{tuner.session.slot}.journal"),
            f"{tuner.task.name}/{family}",
            configs,
            [str(size) for size in sizes],
            seed,
        )
        self._order = [
            *self._known,
            *(c for c in random.Random(seed).sample(configs, len(configs)) if c not in self._known),
        ]
        self._number = -1
        self._values: dict[TileConfig, dict[str, float] | None] = {}
        self.asked = 0
        self.batch: list[TileConfig] = []
        self._base: dict[Size, float | None] = {}  # the default in the first batch
        self.first: dict[Size, dict[TileConfig, float]] = {}  # seconds, as if the clock had not changed between batches

    def own_default(self, size: Size) -> TileConfig | None:
        """What is taken of this family without a tune, where the default is of another; None if nothing is."""
        tuner, task = self._tuner, self._tuner.task
        problem = task.problem(size)
        found = [c for c in heuristics.candidates(task.task, problem, tuner.limits) if c.family == self.family]
        return found[0] if found and found[0] in self.first.get(size, {}) else None

    def ask(self) -> None:
        """Chooses the next batch and has it compiled; an empty one if it is enough."""
        self._number += 1
        size = min(BATCH if self._number else _FIRST_BATCH, self.wanted - self.asked)
        late = self._number > 0 and time.monotonic() > self._tuner.search_until
        if size <= 0 or late or self._tuner.session.is_over():
            self.batch = []
        elif self._all:
            self.batch = self._order[self.asked : self.asked + size]
        else:
            is_last = self.asked + size >= self.wanted and self.first
            self.batch = self._study.batch(self._number, size, self._near(size) if is_last else self._known)
        self.asked += len(self.batch)
        if self.batch:
            self._tuner.worker.prefetch(self._tuner.task, self.batch)
        elif self._all:
            self._study.record(self._values)

    def _near(self, count: int) -> list[TileConfig]:
        """What lies next to the fastest of each size: the last questions are theirs."""
        return self._study.neighbours(self.fastest(_BEST), count)

    def fastest(self, count: int) -> list[TileConfig]:
        """By one sample, so many of each size; the fastest of all sizes first."""
        ranked = [sorted(times, key=times.__getitem__)[:count] for times in self.first.values()]
        return list(dict.fromkeys(config for place in zip(*ranked, strict=False) for config in place))

    def measure(self) -> None:
        """Proves and measures the batch: one sample of each at each size, in random order, the default among them."""
        tuner, order = self._tuner, random.Random(f"{self._number}-{self.family}")
        stage, seconds = f"search {self.family} {self._number}", dict[tuple[TileConfig, Size], float]()
        failed: set[TileConfig] = set()
        try:
            reference = {size: self._reference(size) for size in self._sizes}
            for config in self.batch:
                tuner.session.check_time()
                if not tuner.passes(config):
                    failed.add(config)
            jobs = [(config, size) for config in self.batch if config not in failed for size in self._sizes]
            jobs += [(config, size) for size, config in reference.items() if config is not None]
            jobs = list(dict.fromkeys(jobs))
            for config, size in order.sample(jobs, len(jobs)):
                try:
                    seconds[config, size] = tuner.sample(config, size, stage, 0)
                except Failed:
                    failed.add(config)
        except Stop:
            pass
        self._conclude(failed, seconds)

    def _conclude(self, failed: set[TileConfig], seconds: dict[tuple[TileConfig, Size], float]) -> None:
        """Relates the samples to those of the default: clocks change between batches."""
        scale = {}
        for size in self._sizes:
            measured = seconds.get((self._tuner.defaults[size], size))
            base = self._base.setdefault(size, measured) if measured is not None else None
            scale[size] = 1.0 if measured is None or base is None else base / measured
        values: dict[TileConfig, dict[str, float] | None] = {config: None for config in failed}
        for config in self.batch:
            sizes = [size for size in self._sizes if (config, size) in seconds]
            if config in failed or len(sizes) < len(self._sizes):  # failed, or out of time
                continue
            values[config] = {str(size): math.log(seconds[config, size] * scale[size]) for size in sizes}
            for size in sizes:
                self.first.setdefault(size, {})[config] = seconds[config, size] * scale[size]
        self._values |= values
        if not self._all:
            self._study.tell(self._number, values)

    def _reference(self, size: Size) -> TileConfig | None:
        """What is measured in every batch: what is taken without a tune, or the heuristic's next if that fails."""
        tuner, task = self._tuner, self._tuner.task
        listed = heuristics.candidates(task.task, task.problem(size), tuner.limits)
        for config in dict.fromkeys([tuner.defaults[size], *listed]):
            if tuner.passes(config):
                tuner.defaults[size] = config
                return config
        return None
