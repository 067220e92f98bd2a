"""One tune: its folder, its journal, its clock, and which of its tasks this process takes.

A folder may be shared by processes, also of other hosts with the same GPU model: each has a journal of its own
(``samples-1.jsonl``, ``samples-2.jsonl``, ...), and a task belongs to whoever holds its lock. Locks die with their
process.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .journal import Event, Journal, read
from .race import Stop
from .tasks import TuningTask

_IDENTITY = ("limits", "kernels", "nvrtc", "regime", "effort", "seed")  # what samples depend on
_SEARCH_SHARE = 0.7  # of a task's time; the race has the rest
_LEAST_SECONDS = (
    8.0  # for a task, by itself: with less than it takes to compile and race anything none would have results
)


class ResumeError(ValueError):
    """A folder holds samples of another kind of tune; the message says what differs."""


class Session:
    """A tune in progress."""

    def __init__(
        self, folder: Path, tasks: Sequence[TuningTask], header: Event, budget: float | None, began: float
    ) -> None:
        """``began``: by ``time.monotonic``, from when on the budget counts; ``header``: what samples depend on."""
        self.folder = folder
        self._began = began
        self._deadline = float("inf") if budget is None else began + budget
        self._pending = list(tasks)
        self._unfinished = len(tasks)
        self._lock = threading.Lock()
        self._claims: dict[str, FileLock] = {}
        self.slot, self._slot_lock = _free_slot(folder)
        self.journal = Journal(journal_path(folder, self.slot))
        self._known = _index(self.journal.events)
        self.seconds: dict[str, float] = {}  # by stage
        try:
            with FileLock(folder / "headers.lock"):  # of two that begin at once, one sees the other's
                self._check(header)
                self.journal.write("header", **header)
        except BaseException:
            self.close()
            raise

    def _check(self, header: Event) -> None:
        """Raises ResumeError if any process that shares the folder, or did, measures something else."""
        for path in sorted(self.folder.glob("samples-*.jsonl")):
            earlier = next((event for event in read(path) if event["kind"] == "header"), None)
            differing = [name for name in _IDENTITY if earlier and earlier.get(name) != header.get(name)]
            if earlier and differing:
                told = "; ".join(f"{name} was {earlier.get(name)!r}, is {header.get(name)!r}" for name in differing)
                raise ResumeError(f"{self.folder} holds a tune that cannot be resumed: {told} ({path.name})")

    # ---- tasks

    def claim(self) -> TuningTask | None:
        """A task that nobody has taken or finished; None if there is none, or no time."""
        with self._lock:
            while self._pending and not self.is_over():
                task = self._pending.pop(0)
                lock = FileLock(self.folder / "claims" / f"{task.name}.lock", thread_local=False)
                try:
                    lock.acquire(timeout=0)
                except Timeout:  # another process has it
                    self._unfinished -= 1
                    continue
                if self._is_finished(task):
                    lock.release()
                    self._unfinished -= 1
                    continue
                self._claims[task.name] = lock
                return task
            return None

    def finished(self, task: TuningTask) -> None:
        """Records that a task has its results."""
        if not self.is_over():  # else another tune may find better ones
            self.journal.write("finished", task=task.name, sizes=_sizes(task))
        with self._lock:
            self._claims.pop(task.name).release()
            self._unfinished -= 1

    def _is_finished(self, task: TuningTask) -> bool:
        own = self.journal.path
        others = (path for path in self.folder.glob("samples-*.jsonl") if path != own)
        events = itertools.chain(self.journal.events, *map(read, others))
        return any(
            e["kind"] == "finished" and e["task"] == task.name and e.get("sizes") == _sizes(task) for e in events
        )

    def search_until(self, workers: int, depth: int) -> float:
        """When a task that begins now, of ``depth`` at once on each worker, has searched for its part of the time.

        The race that follows takes what it takes: a search without a race is worth nothing. Where there is little time
        for all, the first tasks have enough, and the last are not reached. Infinite without a budget.
        """
        if self._deadline == float("inf"):
            return self._deadline
        now = time.monotonic()
        seconds = (self._deadline - now) * workers * depth / max(self._unfinished, workers * depth)
        return now + _SEARCH_SHARE * max(seconds, depth * _LEAST_SECONDS)

    def is_over(self) -> bool:
        """Whether the budget is used up."""
        return time.monotonic() > self._deadline

    def progress(self, done: Sequence[float]) -> float:
        """Share of the tune that is over, by tasks or by time; ``done``: shares of those that this process began."""
        with self._lock:  # what others have, or had finished before, is not waited for
            total = self._unfinished + sum(share == 1.0 for share in done)
        spent = (time.monotonic() - self._began) / (self._deadline - self._began)
        return min(1.0, max(sum(done) / max(1, total), spent))

    # ---- what has been found out

    def recall(self, *key: Any) -> Event | None:
        """The event with this key: kind and what else ``remember`` was given by position."""
        return self._known.get(_text(key))

    def remember(self, *key: Any, **content: Any) -> Event:
        """Writes an event that ``recall`` finds."""
        names = _KEYS[key[0]]
        event = self.journal.write(key[0], **dict(zip(names, key[1:], strict=True)), **content)
        self._known[_text(key)] = event
        return event

    def check_time(self) -> None:
        """Raises Stop when the budget is used up."""
        if self.is_over():
            raise Stop

    def spent(self, stage: str, began: float) -> None:
        """Adds the time since ``began`` to a stage."""
        with self._lock:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began

    def close(self) -> None:
        """Lets go of everything."""
        for lock in self._claims.values():
            lock.release()
        self.journal.close()
        self._slot_lock.release()


# What identifies an event of a kind.
_KEYS = {
    "built": ("task", "config", "changes"),
    "proof": ("task", "config", "changes"),
    "failure": ("task", "config", "changes"),
    "sample": ("task", "size", "config", "stage", "round"),
    "sustained": ("task", "size", "config"),
}


def journal_path(folder: Path, slot: int) -> Path:
    """Of one process's journal."""
    return folder / f"samples-{slot}.jsonl"


def all_events(folder: Path) -> Iterator[Event]:
    """The events of all processes that share a folder, as they happened by their clocks."""
    events = itertools.chain.from_iterable(map(read, sorted(folder.glob("samples-*.jsonl"))))
    yield from sorted(events, key=lambda event: event["at"])


def set_aside(folder: Path) -> Path | None:
    """Moves what an earlier tune left to a folder below, unless a process is using it; returns the new place."""
    journals = sorted(folder.glob("samples-*.jsonl"))
    if not journals or any(_is_held(folder / f"{path.stem}.lock") for path in journals):
        return None
    number = 1 + len(list(folder.glob("earlier-*")))
    place = folder / f"earlier-{number}"
    place.mkdir()
    for path in (*journals, *folder.glob("optuna-*.journal"), *folder.glob("report.html")):
        path.rename(place / path.name)
    return place


def _is_held(path: Path) -> bool:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def _sizes(task: TuningTask) -> list[str]:
    return [str(size) for size in task.sizes]


def _free_slot(folder: Path) -> tuple[int, FileLock]:
    (folder / "claims").mkdir(parents=True, exist_ok=True)
    slot = 1
    while True:
        lock = FileLock(folder / f"samples-{slot}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            slot += 1
            continue
        return slot, lock


def _index(events: Sequence[Event]) -> dict[str, Event]:
    return {_text((e["kind"], *(e[name] for name in _KEYS[e["kind"]]))): e for e in events if e["kind"] in _KEYS}


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"))
