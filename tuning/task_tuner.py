"""The tuning of one task on one GPU: what is measured, the races, and who has won."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from .. import dispatch, heuristics
from ..resources import Limits, shared_bytes, why_illegal
from ..tiles import TileConfig
from .driver import CandidateFailed, Worker
from .dry_run import shared_memory_wall
from .family_search import FamilySearch
from .journal import short
from .race import RUNGS, Failed, Outcome, Rung, gain_over, race
from .results import Winner, as_event, known_configs
from .session import Session
from .space import preference, task_spaces
from .tasks import Effort, Size, TuningTask

_LIKELY = 2  # per size, which are compiled in all that an entry serves before it is known who has won
_FINAL = (Rung(7, 3), Rung(25, 3))


class TaskTuner:
    """One task. ``begin``, ``step`` until it returns False, then ``finish``; several tuners may take turns.

    Between steps the worker compiles what the next one measures.
    """

    def __init__(
        self,
        session: Session,
        worker: Worker,
        task: TuningTask,
        limits: Limits,
        effort: Effort,
        seed: int,
        search_until: float,
        thinker: Executor,
    ) -> None:
        """``search_until``: for the last question, by ``time.monotonic``; ``thinker`` runs what needs no GPU."""
        self.task = task
        self._thinker = thinker
        self._asking: Future[None] | None = None
        self.session, self.worker, self.limits, self._seed = session, worker, limits, seed
        self.search_until = search_until
        problem = task.problem(task.sizes[0])
        self.defaults = {size: dispatch.choose(task.task, task.problem(size), limits)[0] for size in task.sizes}
        self._preference: Callable[[TileConfig], Any] = lambda c: preference(
            task.task, c, shared_bytes(task.task, c, problem)
        )
        known = [*self.defaults.values(), *known_configs(task.task, problem, limits)]
        listed = [c for size in task.sizes for c in heuristics.candidates(task.task, task.problem(size), limits)]
        spaces = task_spaces(task, limits, self.defaults)
        self._searches = [
            FamilySearch(self, family, members, sizes, [*known, *listed], effort, seed, number == 0)
            for number, (family, (members, sizes)) in enumerate(spaces.items())
        ]
        self._waiting = list(self._searches)
        session.journal.write(
            "space",
            task=task.name,
            sizes=[str(size) for size in task.sizes],
            families={
                family: {
                    "count": len(members),
                    "walls": {
                        Br: wall for Br, (_, wall) in shared_memory_wall(task.task, members, problem, limits).items()
                    },
                }
                for family, (members, _) in spaces.items()
            },
        )

    def begin(self) -> None:
        """Has the first configurations compiled."""
        for search in self._searches:
            search.ask()

    def step(self) -> bool:
        """Measures one batch; False if there was none to measure."""
        self._settle()
        self._waiting = [search for search in self._waiting if search.batch]
        if not self._waiting:
            return False
        search = self._waiting.pop(0)
        search.measure()
        self._waiting.append(search)
        self._asking = self._thinker.submit(search.ask)  # while others are measured
        return True

    def _settle(self) -> None:
        if self._asking is not None:
            self._asking.result()
            self._asking = None

    def finish(self) -> list[Winner]:
        """Races what was measured, and records the winners."""
        for search in self._searches:
            likely = search.fastest(_LIKELY)
            for changes in self.task.siblings():
                if served := [config for config in likely if self._serves(config, changes)]:
                    self.worker.prefetch(self.task, served, changes, urgent=True)
        winners = [winner for size in self.task.sizes for winner in self._winners(size)]
        for winner in winners:
            self.session.journal.write("result", **as_event(winner))
        self.worker.forget(self.task)
        return winners

    @property
    def progress(self) -> float:
        """Share of the batches that are done."""
        wanted = sum(search.wanted for search in self._searches)
        return sum(min(search.asked, search.wanted) for search in self._searches) / max(1, wanted)

    # ---- one candidate

    def passes(self, config: TileConfig, changes: dict[str, Any] | None = None) -> bool:
        """Whether a configuration compiles, keeps to its registers, and is proven; what is not is recorded."""
        key = (self.task.name, short(config), changes or {})
        if self.session.recall("failure", *key):
            return False
        if self.session.recall("proof", *key):
            return True
        try:
            began = time.monotonic()
            built = self.worker.build(self.task, config, changes)
            self.session.spent("compiling", began)
            if built["spilled_bytes"] and (changes or config not in self.defaults.values()):
                raise CandidateFailed("spills", f"{built['spilled_bytes']} bytes per thread")
            began = time.monotonic()
            self.worker.prove(self.task, config, changes)
            self.session.spent("proof", began)
        except CandidateFailed as error:
            self.session.remember("failure", *key, reason=error.kind, message=str(error))
            return False
        self.session.remember("proof", *key, **built)
        return True

    def _serves(self, config: TileConfig, changes: dict[str, Any]) -> bool:
        """Whether an entry with this configuration is for the changed problem, too: illegal ones are passed over."""
        problem = self.task.problem(self.task.sizes[0], **changes)
        return why_illegal(self.task.task, config, problem, self.limits) is None

    def sample(self, config: TileConfig, size: Size, stage: str, number: int) -> float:
        """Seconds of one sample, from the journal if it is there; raises Failed or Stop."""
        name, key = self.task.name, short(config)
        if self.session.recall("failure", name, key, {}):
            raise Failed("as recorded")
        if found := self.session.recall("sample", name, str(size), key, stage, number):
            return float(found["seconds"])
        self.session.check_time()
        began = time.monotonic()
        try:
            content = self.worker.measure(self.task, config, size)
        except CandidateFailed as error:
            self.session.remember("failure", name, key, {}, reason=error.kind, message=str(error))
            raise Failed(f"{error.kind}: {error}") from None
        self.session.spent("measuring", began)
        self.session.remember("sample", name, str(size), key, stage, number, **content)
        return float(content["seconds"])

    # ---- races

    def _winners(self, size: Size) -> list[Winner]:
        """The best of each family at a size, the fastest family first; empty if even the default fails."""
        default = self.defaults[size]
        best: list[TileConfig] = []
        outcomes: dict[TileConfig, Outcome[TileConfig]] = {}
        for search in self._searches:
            outcome = self._proven_race(search, size)
            if outcome is not None and outcome.winner is not None:
                best.append(outcome.winner)
                outcomes[outcome.winner] = outcome
        if len(best) > 1 or (best and not outcomes[best[0]].samples.get(default)):
            final = self._race(best, default, size, "final", {}, _FINAL)
            # Another family goes first only if it beats the default.
            best = [config for config in best if final.samples[config]]
            best.sort(key=lambda config: (config != final.winner, final.median(config)))
            outcomes = {c: outcomes[c] if outcomes[c].samples.get(default) else final for c in best}
        return [
            self._winner(config, size, outcomes[config]) for config in best if outcomes[config].samples.get(default)
        ]

    def _proven_race(self, search: FamilySearch, size: Size) -> Outcome[TileConfig] | None:
        """The race of a family, again without a winner that is not proven in all that its entry serves."""
        first = dict(search.first.get(size, {}))
        default = self.defaults[size] if self.defaults[size].family == search.family else search.own_default(size)
        while first:
            outcome = self._race(list(first), default, size, search.family, first, RUNGS)
            winner = outcome.winner
            if winner is None or winner == self.defaults[size]:
                return outcome
            served = [changes for changes in self.task.siblings() if self._serves(winner, changes)]
            if all(self.passes(winner, changes) for changes in served):
                return outcome
            if winner == default:
                default = None
            del first[winner]
        return None

    def _race(
        self,
        configs: Sequence[TileConfig],
        default: TileConfig | None,
        size: Size,
        stage: str,
        first: dict[TileConfig, float],
        rungs: Sequence[Rung],
    ) -> Outcome[TileConfig]:
        def measure(config: TileConfig, number: int) -> float:
            if number == 0 and config in first:
                return first[config]
            return self.sample(config, size, f"race {stage}", number)

        outcome = race(configs, default, measure, preference=self._preference, seed=self._seed, rungs=rungs)
        self.session.journal.write(
            "race",
            task=self.task.name,
            size=str(size),
            stage=stage,
            spread=outcome.spread,
            gain=outcome.gain,
            interval=outcome.interval if math.isfinite(outcome.interval) else None,
            ties=[short(config) for config in outcome.ties],
            ranking=[short(config) for config in outcome.ranking],
            dropped=[{"config": short(c), "round": r, "why": why} for c, (r, why) in outcome.dropped.items()],
            complete=outcome.complete,
        )
        return outcome

    def _winner(self, config: TileConfig, size: Size, outcome: Outcome[TileConfig]) -> Winner:
        default = self.defaults[size]
        gain, interval = gain_over(outcome, config, default)
        float16 = {"dtype": "float16"}
        half = self.task.dtype == "bfloat16" and self._serves(config, float16) and self.passes(config, float16)
        return Winner(
            task=self.task,
            size=size,
            config=config,
            seconds=outcome.median(config),
            default=default,
            default_seconds=outcome.median(default),
            gain=gain,
            interval=interval if math.isfinite(interval) else 1.0,
            spread=outcome.spread,
            sustained_seconds=self._sustained(config, size),
            samples=len(outcome.samples[config]),
            half=half,
        )

    def _sustained(self, config: TileConfig, size: Size) -> float | None:
        key = (self.task.name, str(size), short(config))
        if found := self.session.recall("sustained", *key):
            return found["seconds"]  # type: ignore[no-any-return]
        if self.session.is_over():
            return None
        try:
            seconds = self.worker.sustained(self.task, config, size)
        except CandidateFailed:  # it has run dozens of times: the GPU has another problem, which the next request meets
            return None
        self.session.remember("sustained", *key, seconds=seconds)
        return seconds
