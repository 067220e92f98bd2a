"""Where winners come from: files in layers, the first of which has the first word.

1. ``CUPYFLASH_CONFIG``: the file or folder that the variable names.
2. ``process``: what could not be written to the user's folder and is kept in memory.
3. ``user``: the user's cache folder, which the tuner writes.
4. ``packaged``: what ships.

They are read when a GPU model first needs them, once; files of other models are not parsed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..resources import KNOWN_GPUS, Limits
from . import configs, files, settings
from .entries import Entry, Winners
from .merging import replaced

_memory: dict[str, tuple[Entry, ...]] = {}
_contents: dict[Path, files.Contents | None] = {}
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Layer:
    """One place where winners for a GPU model may be.

    Attributes:
        name: "CUPYFLASH_CONFIG", "process", "user" or "packaged".
        path: of the file, which need not exist; None in memory.
    """

    name: str
    path: Path | None

    def __str__(self) -> str:
        return f"{self.name} {self.path.name}" if self.path else self.name


def layers(device: str) -> list[Layer]:
    """The layers of a GPU model, first to last."""
    name = files.file_name(device)
    found = []
    if (given := settings.config_path()) is not None:
        found.append(Layer("CUPYFLASH_CONFIG", given / name if os.path.isdir(given) else given))
    found.append(Layer("process", None))
    if (folder := user_folder()) is not None:
        found.append(Layer("user", folder / name))
    return [*found, Layer("packaged", packaged_folder() / name)]


def user_folder() -> Path | None:
    """Where the user's winners are, one file per GPU model; None where there is no place for them."""
    folder = settings.cache_folder()
    return None if folder is None else folder / "winners"


@cache
def packaged_folder() -> Path:
    """Where the winners are that ship."""
    return Path(next(iter(configs.__path__)))


def related(limits: Limits) -> list[Layer]:
    """The packaged files of other GPU models of the same architecture, those of the most similar size first."""
    others = [other for other in KNOWN_GPUS.values() if other.arch == limits.arch and other.name != limits.name]
    others.sort(key=lambda other: abs(other.sm_count - limits.sm_count))
    paths = [packaged_folder() / files.file_name(other.name) for other in others]
    return [Layer("packaged", path) for path in paths if os.path.isfile(path)]


def entries(layer: Layer, limits: Limits) -> tuple[Entry, ...]:
    """A layer's entries for a GPU model; none, with a warning, where they cannot be used."""
    if layer.path is None:
        return _memory.get(limits.name, ())
    winners = winners_in(layer)
    if winners is None:
        return ()
    if (winners.device.name, winners.device.arch) != (limits.name, limits.arch):
        settings.warn_once(
            f"{layer.path} is not used on {limits.name} (sm_{limits.arch}): it is for {winners.device.name} "
            f"(sm_{winners.device.arch})"
            + ("; CUPYFLASH_CONFIG may also name a folder, with one file per GPU model" if layer.name[0] == "C" else "")
        )
        return ()
    return winners.entries


def winners_in(layer: Layer) -> Winners | None:
    """What a layer's file holds, read once; what cannot be used gets a warning. None: nothing."""
    path = layer.path
    assert path is not None
    with _lock:
        if path not in _contents:
            _contents[path] = _read(layer, path)
        contents = _contents[path]
    return contents.winners if contents else None


def remember(device: str, new: Iterable[Entry]) -> None:
    """Keeps entries in memory, for this process."""
    with _lock:
        _memory[device] = replaced(_memory.get(device, ()), new)


def refresh() -> None:
    """Has all files read again when they are next needed."""
    with _lock:
        _contents.clear()


def _read(layer: Layer, path: Path) -> files.Contents | None:
    contents = files.read(path)
    if contents is None and path == settings.config_path():
        settings.warn_once(f"CUPYFLASH_CONFIG names {path}, which does not exist")
    for complaint in contents.complaints if contents else ():
        settings.warn_once(f"{path}: {complaint}")
    return contents
