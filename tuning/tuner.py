"""A whole tune: one worker per GPU, tasks handed out, winners collected."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ..problem import one_of
from ..resources import Limits
from . import files, results, settings
from .driver import Worker, WorkerError, WorkerSpec
from .journal import short
from .kernel_hash import kernel_hash
from .progress import Progress, Silent
from .results import Winner
from .session import Session, all_events, set_aside
from .task_tuner import TaskTuner
from .tasks import Effort, Regime, TuningTask, default_tasks

_AT_ONCE = 3  # tasks that take turns on a GPU: while one is measured, the others are compiled
_BENCH = "cupyflash.tuning.bench:CudaBench"


@dataclass
class Tuned:
    """What a tune found.

    Attributes:
        winners: the best of each family per task and size, the fastest first.
        unreached: tasks for which the time did not suffice, or which another process has.
        folder: with the journals.
        stored: the file of winners that was written; None if none was.
        report: the page that shows all of it; None if none was written.
        seconds: spent, and of that by stage.
        failures: configurations that are out, by reason.
    """

    winners: list[Winner] = field(default_factory=list)
    unreached: list[TuningTask] = field(default_factory=list)
    folder: Path = Path()
    stored: Path | None = None
    report: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)


def tune(
    tasks: Sequence[TuningTask] | None = None,
    *,
    budget: float | None = None,
    effort: Effort = "quick",
    folder: str | Path | None = None,
    resume: bool = False,
    regime: Regime = "eager",
    seed: int = 0,
    workers: Sequence[WorkerSpec] | None = None,
    store: bool = True,
    report: str | Path | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Finds the fastest tiles for each task on this machine's GPUs, and keeps those that are proven and faster.

    Args:
        tasks: what to tune; None: ``tasks.default_tasks(effort)``.
        budget: seconds after which no more is measured; None: as long as it takes.
        effort: "quick" samples large spaces, "full" measures every configuration.
        folder: for the journals, which ``resume`` goes on with; None: one per GPU model in the user's cache folder.
            Processes on several hosts with GPUs of one model may share it: each takes tasks that no other has.
        resume: goes on where an earlier tune in this folder stopped; else that one's journals are put aside.
        regime: how launches are timed: "eager", or "graph" for replayed ones.
        seed: of all random choices.
        workers: one per GPU; None: all visible GPUs.
        store: gives the winners to ``tuning.store``, which reads them in every process from then on.
        report: where to write the page that shows what was measured; None: ``report.html`` in the folder.
        progress: is told how far it is; None: nobody is.

    Raises:
        WorkerError: no worker could be started.
        ValueError: an argument is wrong, the GPUs are of several models, or the folder has another kind of tune.

    Example:
        >>> tuned = tune(budget=600)  # doctest: +SKIP
    """
    began = time.monotonic()
    one_of("effort", effort, get_args(Effort))
    one_of("regime", regime, get_args(Regime))
    tasks = default_tasks(effort) if tasks is None else list(tasks)
    _check(tasks, budget)
    progress = progress or Silent()
    specs = visible_gpus(regime) if workers is None else list(workers)
    with Crew(specs) as crew, progress:
        limits, identity = crew.limits, crew.identity
        where = default_folder(limits) if folder is None else Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        if not resume and (aside := set_aside(where)):
            progress.note(f"put what an earlier tune measured aside, in {aside}")
        header = {
            **{name: value for name, value in identity.items() if name != "threads"},
            "kernels": kernels_hash(),
            "effort": effort,
            "seed": seed,
            "budget": budget,
        }
        session = Session(where, tasks, header, budget, began)
        try:
            _Tune(session, crew, limits, effort, seed, progress).run()
            return _conclude(session, tasks, limits, identity, store, report, began)
        finally:
            session.close()


def _check(tasks: Sequence[TuningTask], budget: float | None) -> None:
    if budget is not None and not budget > 0:
        raise ValueError(f"budget is {budget}; expected seconds above 0, or None")
    if not tasks:
        raise ValueError("tasks is empty; expected some of TuningTask, or None for the usual ones")
    for name, count in Counter(task.name for task in tasks).items():
        if count > 1:
            raise ValueError(f"tasks has {name} twice; give one task all its sizes")


class Crew:
    """The workers of a tune, all on GPUs of one model."""

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self.workers = [Worker(spec) for spec in specs]
        self.limits: Limits
        self.identity: dict[str, Any] = {}

    def __enter__(self) -> Crew:
        if not self.workers:
            raise WorkerError(
                "there is no GPU to tune on; cupyflash tune --dry-run --gpu A100 shows what would be tuned"
            )
        try:
            for worker in self.workers:
                worker.start()
            models = [Limits(**worker.identity["limits"]) for worker in self.workers]
            if len(set(models)) > 1:
                listed = ", ".join(sorted({f"{m.name} with {m.sm_count} multiprocessors" for m in models}))
                raise ValueError(
                    f"the GPUs are of several models: {listed}; tune one model at a time (CUDA_VISIBLE_DEVICES chooses)"
                )
        except BaseException:
            self.__exit__()
            raise
        self.identity = self.workers[0].identity
        self.limits = models[0]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.stop()


class _Tune:
    """The threads that drive the workers."""

    def __init__(
        self,
        session: Session,
        crew: Crew,
        limits: Limits,
        effort: Effort,
        seed: int,
        progress: Progress,
    ) -> None:
        self._session, self._crew, self._limits = session, crew, limits
        self._effort, self._seed, self._progress = effort, seed, progress
        self._done: dict[str, float] = {}
        self._errors: list[BaseException] = []
        self._stop = threading.Event()

    def run(self) -> None:
        threads = [threading.Thread(target=self._drive, args=(worker,), daemon=True) for worker in self._crew.workers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # so that Ctrl-C gets through
        finally:
            self._stop.set()
        if len(self._errors) == len(threads):  # one GPU that is lost does not end the tune
            raise self._errors[0]

    def _drive(self, worker: Worker) -> None:
        try:
            with ThreadPoolExecutor(1) as thinker:
                self._take_turns(worker, thinker)
        except BaseException as error:
            self._progress.note(f"a GPU is lost to the tune: {type(error).__name__}: {error}")
            self._errors.append(error)

    def _take_turns(self, worker: Worker, thinker: Executor) -> None:
        active: deque[TaskTuner] = deque()
        while not self._stop.is_set():
            while len(active) < _AT_ONCE and (task := self._session.claim()) is not None:
                until = self._session.search_until(len(self._crew.workers), _AT_ONCE)
                active.append(
                    TaskTuner(self._session, worker, task, self._limits, self._effort, self._seed, until, thinker)
                )
                active[-1].begin()
            if not active:
                return
            tuner = active.popleft()
            if tuner.step():
                active.append(tuner)
                self._tell(tuner, 0.7 * tuner.progress)
                continue
            winners = tuner.finish()
            self._session.finished(tuner.task)
            self._tell(tuner, 1.0)
            for winner in winners:
                if not winner.is_default and winner.config.family == winners[0].config.family:
                    self._progress.note(describe(winner))

    def _tell(self, tuner: TaskTuner, done: float) -> None:
        self._done[tuner.task.name] = done
        self._progress.update(self._session.progress(list(self._done.values())), tuner.task.name)


def describe(winner: Winner) -> str:
    """One line about a winner."""
    against = f"{winner.seconds * 1e3:.4g} ms, {winner.gain:+.1%} against the default"
    numbers = " ".join(f"{name}={value}" for name, value in short(winner.config).items() if name != "family")
    return f"{winner.task.name} {winner.size}: {winner.config.family} {numbers}, {against}"


def _conclude(
    session: Session,
    tasks: Sequence[TuningTask],
    limits: Limits,
    identity: dict[str, Any],
    store: bool,
    report: str | Path | None,
    began: float,
) -> Tuned:
    from .report import write_report

    by_name = {task.name: task for task in tasks}
    events = [event for event in all_events(session.folder) if event.get("task") in by_name]
    measured = [(event, by_name[event["task"]]) for event in results.latest(events)]
    # What was resumed may have had other sizes.
    winners = [results.from_event(e, task) for e, task in measured if e["size"] in map(str, task.sizes)]
    reached = {winner.task.name for winner in winners}
    failures: dict[str, int] = {}
    for event in events:
        if event["kind"] == "failure":
            failures[event["reason"]] = failures.get(event["reason"], 0) + 1
    tuned = Tuned(
        winners=winners,
        unreached=[task for task in tasks if task.name not in reached],
        folder=session.folder,
        seconds={"all": time.monotonic() - began, **session.seconds},
        failures=failures,
    )
    if store:
        tuned.stored = results.keep(winners, limits, identity)
    tuned.report = write_report(session.folder, Path(report) if report else session.folder / "report.html")
    return tuned


def visible_gpus(regime: Regime = "eager") -> list[WorkerSpec]:
    """A worker for each GPU that CUDA_VISIBLE_DEVICES leaves; no context is made here."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(index) for index in range(_gpu_count())] if given is None else [x for x in given.split(",") if x.strip()]
    )
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, len(names)))
    return [WorkerSpec(_BENCH, {"regime": regime}, threads, {"CUDA_VISIBLE_DEVICES": name.strip()}) for name in names]


def _gpu_count() -> int:
    """GPUs of this machine, asked for in a process of its own: this one shall not touch CUDA."""
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        raise WorkerError(f"CuPy finds no GPU: {asked.stderr.strip().splitlines()[-1] if asked.stderr.strip() else ''}")
    return int(asked.stdout)


def kernels_hash() -> str:
    """Of all kernels: samples of others are worth nothing."""
    from ..dispatch import FILES

    return hashlib.sha256("".join(kernel_hash(*which) for which in sorted(FILES)).encode()).hexdigest()[:12]


def default_folder(limits: Limits) -> Path:
    """For a GPU model's journals: in the user's cache folder, or where nobody may write there, a temporary one."""
    cache = settings.cache_folder()
    if cache is not None:
        folder = cache / "tune" / Path(files.file_name(limits.name)).stem
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            pass
        else:
            if os.access(folder, os.W_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix="cupyflash-tune-"))
