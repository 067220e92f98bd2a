"""Which configurations are measured at all: every one where they fit the budget, else those that TPE asks for.

Optuna proposes a point of the lattice of a space (``space.Lattice``); the nearest configuration that has not been
measured takes its place, so that every question is legal and none is asked twice. Answers come in batches, which are
compiled in parallel. The studies live in a journal file: a tune that was killed finds its questions and answers there
and asks on as if nothing had happened, since a question is determined by those before it.
"""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..tiles import TileConfig
from .journal import heal
from .space import Lattice

_quieting = threading.RLock()  # log and warnings are those of the whole process, and each GPU has a thread that asks
_RANDOM_FIRST = 6  # proposals before there is a model; the known configurations count
_FAILED_BEHIND = 0.5  # log seconds that a failed configuration is told to be behind the slowest


class Study:
    """The search of one space for the fastest at each of several sizes, kept in a file.

    Optuna has one study per size. They ask in turn, and all learn from every answer: what is measured, is measured at
    all sizes.
    """

    def __init__(
        self, path: Path | None, name: str, configs: Sequence[TileConfig], sizes: Sequence[str], seed: int
    ) -> None:
        """``path``: of a journal, which the studies of a tune share; None: in memory. One process at a time uses it."""
        import optuna

        self._optuna = optuna
        self._seed = seed
        self._lattice = Lattice(configs)
        self._distributions: dict[str, Any] = {
            axis: optuna.distributions.IntDistribution(0, len(values) - 1)
            for axis, values in self._lattice.values.items()
        }
        with _quiet():
            storage = None if path is None else _storage(path)
            self._studies = {
                size: optuna.create_study(storage=storage, study_name=f"{name}/{size}", load_if_exists=True)
                for size in sizes
            }
        self._heal()

    def batch(self, number: int, size: int, known: Iterable[TileConfig] = ()) -> list[TileConfig]:
        """The configurations of a batch, up to ``size``, ``known`` ones first; the same if asked again.

        Fewer, or none, if the space has no others that are not in earlier batches.
        """
        asked = self._asked()
        while sum(question.batch == number for question in asked) < size:
            taken = {question.config for question in asked}
            waiting = [config for config in known if config not in taken]
            if not self._ask(number, len(asked), taken, waiting[0] if waiting else None):
                break
            asked = self._asked()
        return [question.config for question in asked if question.batch == number]

    def neighbours(self, configs: Sequence[TileConfig], count: int) -> list[TileConfig]:
        """Up to ``count`` configurations that were not asked for, next to each of these in turn."""
        taken = {question.config for question in self._asked()}
        found: list[TileConfig] = []
        while len(found) < count and configs:
            point = self._lattice.point(configs[len(found) % len(configs)])
            near = self._lattice.nearest(point, taken)
            if near is None:
                break
            taken.add(near)
            found.append(near)
        return found

    def tell(self, number: int, values: Mapping[TileConfig, Mapping[str, float] | None]) -> None:
        """The answers to a batch, in log seconds by size; None: the configuration failed.

        Questions without an answer stay open.
        """
        batch = [question for question in self._asked() if question.batch == number and question.config in values]
        for size, study in self._studies.items():
            trials = study.get_trials(deepcopy=False)
            told = {json.loads(t.user_attrs["told"])["index"] for t in trials if "told" in t.user_attrs}
            known = [t.value for t in trials if t.value is not None]
            known += [value[size] for value in values.values() if value is not None]
            # Told as failed, TPE would not learn from them.
            worst = max(known, default=0.0) + _FAILED_BEHIND
            for question in batch:
                answers = values[question.config]
                value = worst if answers is None else answers[size]
                if question.size == size and not question.is_open:
                    continue
                if question.size == size:
                    study.tell(question.number, value)
                elif question.index not in told:
                    study.add_trial(
                        self._trial(question.config, value, {"told": json.dumps({"index": question.index})})
                    )

    def record(self, values: Mapping[TileConfig, Mapping[str, float] | None]) -> None:
        """Answers to questions that nobody had to think of, for those who look at the journal; once."""
        for size, study in self._studies.items():
            if not study.get_trials(deepcopy=False):
                for config, answers in values.items():
                    attributes = {"config": json.dumps(asdict(config))}
                    study.add_trial(self._trial(config, None if answers is None else answers[size], attributes))

    def _ask(self, batch: int, index: int, taken: set[TileConfig], known: TileConfig | None) -> bool:
        """One question more, which is ``known`` if given; False if there is none."""
        if known is None and self._lattice.nearest(next(iter(self._lattice.points())), taken) is None:
            return False
        samplers, seed = self._optuna.samplers, _number(self._seed, index)
        study = list(self._studies.values())[index % len(self._studies)]
        with _quiet():
            study.sampler = (
                samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM_FIRST, multivariate=True, constant_liar=True)
                if known is None
                else samplers.PartialFixedSampler(self._params(known), samplers.RandomSampler(seed=seed))
            )
            trial = study.ask(self._distributions)
        point = tuple(trial.params[axis] for axis in self._distributions)
        config = known or self._lattice.nearest(point, taken)
        assert config is not None
        trial.set_user_attr("asked", json.dumps({"batch": batch, "index": index, "config": asdict(config)}))
        return True

    def _asked(self) -> list[_Question]:
        """All questions, in order."""
        running = self._optuna.trial.TrialState.RUNNING
        found = []
        for size, study in self._studies.items():
            for trial in study.get_trials(deepcopy=False):
                if asked := trial.user_attrs.get("asked"):
                    content = json.loads(asked)
                    config = TileConfig(**content["config"])
                    is_open = trial.state == running
                    found.append(_Question(content["index"], content["batch"], config, size, trial.number, is_open))
        return sorted(found, key=lambda question: question.index)

    def _params(self, config: TileConfig) -> dict[str, int]:
        return dict(zip(self._distributions, self._lattice.point(config), strict=True))

    def _trial(self, config: TileConfig, value: float | None, attributes: dict[str, str]) -> Any:
        states = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(
            state=states.FAIL if value is None else states.COMPLETE,
            value=value,
            params=self._params(config),
            distributions=self._distributions,
            user_attrs=attributes,
        )

    def _heal(self) -> None:
        """Gives up questions in whose midst the process was killed: their content is missing. Others stay open."""
        states = self._optuna.trial.TrialState
        for study in self._studies.values():
            for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
                if "asked" not in trial.user_attrs:
                    study.tell(trial.number, state=states.FAIL)


@dataclass(frozen=True, slots=True)
class _Question:
    """One that was asked: its place among all, and its trial in the study that asked it."""

    index: int
    batch: int
    config: TileConfig
    size: str
    number: int
    is_open: bool


def _number(*parts: int) -> int:
    """A seed from several numbers."""
    import numpy as np

    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _storage(path: Path) -> Any:
    """A journal at this path, healed: Optuna could not append behind a torn line."""
    from filelock import FileLock
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    class Lock:
        """Dies with its process, unlike Optuna's own, which others wait 30 seconds for."""

        def __init__(self) -> None:
            self._lock = FileLock(f"{path}.lock")

        def acquire(self) -> bool:
            self._lock.acquire()
            return True

        def release(self) -> None:
            self._lock.release()

    class Backend(JournalFileBackend):
        """Without waiting for the disk, which took half of the time of a question: killed processes lose nothing so."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
            self._lock.acquire()
            try:
                with open(path, "ab", buffering=0) as file:
                    file.write(lines.encode())
            finally:
                self._lock.release()

    path.parent.mkdir(parents=True, exist_ok=True)
    lock: Any = Lock()
    lock.acquire()
    try:
        heal(path)
    finally:
        lock.release()
    return JournalStorage(Backend(str(path), lock_obj=lock))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's log of every study and its warnings that features of ours are new."""
    logger = logging.getLogger("optuna")
    with _quieting, warnings.catch_warnings():
        level = logger.level
        logger.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        warnings.filterwarnings("ignore", message=".*xperimental")
        try:
            yield
        finally:
            logger.setLevel(level)
