"""How far a tune has come: a bar with the time that is left on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Protocol, TextIO

_SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """What a tune tells, from several threads; ``done`` is of 1."""

    def update(self, done: float, doing: str) -> None: ...

    def note(self, text: str) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Silent:
    """Tells nothing."""

    def update(self, done: float, doing: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Lines:
    """Plain lines, for logs."""

    def __init__(self, file: TextIO | None = None, every: float = _SECONDS_BETWEEN_LINES) -> None:
        self._file = file or sys.stdout
        self._every = every
        self._began = self._last = time.monotonic()
        self._lock = threading.Lock()

    def update(self, done: float, doing: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._last < self._every:
                return
            self._last = now
        elapsed = now - self._began
        left = f", about {clock(elapsed * (1 - done) / done)} left" if done > 0.02 else ""
        self.note(f"{done:4.0%} after {clock(elapsed)}{left}: {doing}")

    def note(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Bar:
    """A bar of rich."""

    def __init__(self) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
        )
        self._task: Any = self._bar.add_task("starting", total=1.0)

    def update(self, done: float, doing: str) -> None:
        self._bar.update(self._task, completed=done, description=doing)

    def note(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()


def suitable() -> Progress:
    """A bar where a person sees it and rich is there, else lines."""
    if not sys.stdout.isatty():
        return Lines()
    try:
        return Bar()
    except ImportError:
        return Lines()


def clock(seconds: float) -> str:
    """As in 4:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
