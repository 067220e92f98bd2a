"""Everything that a tune finds out, as it finds it out: one JSON object to a line.

What is in the journal is not measured again, so that a tune that was killed goes on where it was. Every line is one
write; a torn last line is cut off when the file is opened.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..tiles import TileConfig

Event = dict[str, Any]
_DEFAULTS = {f.name: f.default for f in fields(TileConfig)}


class Journal:
    """An append-only file of events, all of which are also in memory."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        heal(path)
        self.path = path
        self.events: list[Event] = list(read(path))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the tune)
        self._lock = threading.Lock()

    def write(self, kind: str, **content: Any) -> Event:
        """Appends an event, with the time; returns it."""
        event = {"kind": kind, "at": round(time.time(), 3), **content}
        line = json.dumps(event, allow_nan=False) + "\n"
        with self._lock:
            self._file.write(line.encode())
            self.events.append(event)
        return event

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def heal(path: Path) -> None:
    """Cuts off what follows the last whole line."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> Iterator[Event]:
    """The events of a journal that somebody may be writing."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def short(config: TileConfig) -> Event:
    """What is not at its default."""
    return {name: value for name, value in asdict(config).items() if value != _DEFAULTS[name]}
