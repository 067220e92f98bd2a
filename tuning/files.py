"""Winners in YAML files, one per GPU model.

A file is meant to be read and edited by hand:

    schema: 1
    device: {name: NVIDIA H200, arch: 90, shared_bytes: 232448, sm_count: 132, l2_bytes: 62914560}
    entries:
    - kind: {task: forward, dtype: half, head_dim: 128, head_dim_v: 128, masked: false, length: 1024}
      config: {family: mma, Br: 128, Bc: 64, warps: 4}
      measured: {seconds: 0.00123, default_seconds: 0.00131, spread: 0.004, date: '2026-11-29'}

Readers take no lock: a file is replaced as a whole. Writers read, change and replace it under a lock that dies with its
process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..resources import Limits
from . import plain_yaml
from .entries import Entry, EntryError, Winners, content, device_content, parse, parse_device

SCHEMA = 1
LOCK_SECONDS = 30.0  # a writer holds the lock for some tens of milliseconds
_POLL_SECONDS = 0.005  # well below that, or who has just written has the lock again before others look

_HEADER = '# Tuned tiles of cupyflash. What rewrites this file does not keep comments; "provenance" is kept.\n'


class StoreError(RuntimeError):
    """Winners could not be written; the message says where, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What could be read of a file.

    Attributes:
        winners: None if nothing could.
        complaints: what could not, each with its line and key.
        foreign: the file is whole, but of another schema version.
    """

    winners: Winners | None
    complaints: tuple[str, ...] = ()
    foreign: bool = False


def file_name(device: str) -> str:
    """The file for a GPU model: its name with everything but letters, digits, "-" and "." made "_"."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device) + ".yaml"


def read(path: Path) -> Contents | None:
    """The contents of a file; None if there is none. Never raises: what cannot be read is a complaint."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        return Contents(None, (f"cannot be read ({error})",))
    return parse_text(text)


def parse_text(text: str) -> Contents:
    """The contents of a file's text."""
    with suppress(ValueError):  # it is not plain, or not right: PyYAML knows more, and where a fault stands
        return _plain_contents(text)
    import yaml  # not at import: it costs as much as all else that a lookup does

    try:
        loader = _loader_type()(text)
        node = loader.get_single_node()
        top = _top_level(node)
        head = {name: loader.construct_document(top[name]) for name in ("schema", "device") if name in top}
        if "schema" in head and head["schema"] != SCHEMA:
            complaint = f"schema is {head['schema']!r}; this version of cupyflash reads schema {SCHEMA}"
            return Contents(None, (complaint,), foreign=True)
        if missing := [name for name in ("schema", "device", "entries") if name not in top]:
            raise EntryError(f"{missing[0]} is missing")
        if unknown := [name for name in top if name not in ("schema", "device", "entries")]:
            raise EntryError(f"{unknown[0]} is unknown; expected schema, device and entries")
        device = parse_device(head["device"])
        if not isinstance(top["entries"], yaml.SequenceNode):
            raise EntryError("entries is not a list")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return Contents(None, (f"cannot be used: {_one_line(error)}",))

    entries: dict[Any, Entry] = {}
    complaints = []
    for number, node in enumerate(top["entries"].value, start=1):
        try:
            entry = parse(loader.construct_document(node))
            if entry.key in entries:
                raise EntryError(f"kind is that of an entry before, {entry.kind}, and so is the family")
            entries[entry.key] = entry
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            complaints.append(f"entry {number} (line {node.start_mark.line + 1}) is left out: {_one_line(error)}")
    return Contents(Winners(device, tuple(entries.values())), tuple(complaints))


def _plain_contents(text: str) -> Contents:
    """The same of a text without a fault; raises ValueError, which need not say what is wrong, of others."""
    top = plain_yaml.read(text)
    listed = top.get("entries")
    if top.keys() != {"schema", "device", "entries"} or top["schema"] != SCHEMA or not isinstance(listed, list):
        raise EntryError("expected schema, device and a list of entries")
    entries = {entry.key: entry for entry in map(parse, listed)}
    if len(entries) < len(listed):
        raise EntryError("two entries have one kind and family")
    return Contents(Winners(parse_device(top["device"]), tuple(entries.values())))


def text_of(winners: Winners) -> str:
    """A file's text.

    Raises:
        EntryError: something in it could not be read back.
    """
    import yaml

    plain = {
        "schema": SCHEMA,
        "device": device_content(winners.device),
        "entries": [content(entry) for entry in winners.entries],
    }
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return _HEADER + str(
        yaml.dump(plain, Dumper=dumper, sort_keys=False, default_flow_style=None, width=1000, allow_unicode=True)
    )


def update(path: Path, device: Limits, change: Callable[[tuple[Entry, ...]], Iterable[Entry]]) -> None:
    """Replaces the entries of a file by what ``change`` makes of them; a file that is not there has none.

    What can be read only in part is kept beside it as ``<file>.bad``.

    Raises:
        StoreError: the file cannot be written, is locked for long, or is for another GPU model or schema version.
        EntryError: an entry could not be read back.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.resolve()  # a link stays one
        with _locked(path):
            present = read(path)
            if present is not None:
                _check_present(path, present, device)
            entries = present.winners.entries if present and present.winners else ()
            text = text_of(Winners(device, tuple(change(entries))))
            if present is not None and present.complaints:
                replace_file(path.with_name(path.name + ".bad"), path.read_bytes())
            replace_file(path, text.encode())
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error}); CUPYFLASH_CACHE_DIR names another folder") from error


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file such that whoever reads it sees the old content or the new one, even after a power failure."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_present(path: Path, present: Contents, device: Limits) -> None:
    if present.foreign:
        raise StoreError(f"{path}: {present.complaints[0]}; move it away, or set CUPYFLASH_CACHE_DIR")
    if present.winners is not None and present.winners.device != device:
        raise StoreError(
            f"{path} is for {present.winners.device}, and the new winners are for {device}: GPU models are not mixed; "
            "move it away, or set CUPYFLASH_CACHE_DIR"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file: of the flock type, which the system takes back from a process that dies."""
    try:
        import filelock
    except ImportError as error:
        raise StoreError(f'{error}: writing winners needs it; pip install "cupyflash[tune]"') from error
    lock = filelock.FileLock(path.with_name(path.name + ".lock"))
    try:
        _acquire(lock, path)
    except filelock.Timeout as error:
        raise StoreError(
            f"{lock.lock_file} was held by another process for {LOCK_SECONDS:g} seconds, and nothing was written; try "
            "again when that process has ended"
        ) from error
    except NotImplementedError as error:
        raise StoreError(f"{lock.lock_file}: {error}; CUPYFLASH_CACHE_DIR names another folder") from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: Any, path: Path) -> None:
    """Waits for the lock as long as those who have it get on."""
    import filelock

    while True:
        before = _version(path)
        try:
            lock.acquire(timeout=LOCK_SECONDS, poll_interval=_POLL_SECONDS)
            return
        except filelock.Timeout:
            if _version(path) == before:
                raise


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


@cache
def _loader_type() -> Any:
    """PyYAML's safe loader, that refuses keys which stand twice instead of taking the last."""
    import yaml

    class Strict(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            mapping = super().construct_mapping(node, deep)
            seen = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise EntryError(f"{key.value} stands twice (line {key.start_mark.line + 1})")
                seen.add(key.value)
            return mapping

    return Strict


def _top_level(node: Any) -> dict[str, Any]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise EntryError("expected keys schema, device and entries")
    top: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise EntryError(f"a key is not text (line {key.start_mark.line + 1})")
        if key.value in top:
            raise EntryError(f"{key.value} stands twice (line {key.start_mark.line + 1})")
        top[key.value] = value
    return top


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
