"""Winners from several runs, files or machines made one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..tiles import TASKS
from .entries import DTYPES, FAMILIES, Entry, Winners, content
from .kernel_hash import kernel_hash


def merge(a: Winners, b: Winners) -> Winners:
    """The better entry of each kind and family, with all that is known of it; in a fixed order, the fastest first.

    Better is, in this order: measured with the kernels as they are now, measured at all, faster, measured later. The
    order of the arguments and of their entries does not matter, nor how often something is merged.

    Raises:
        ValueError: the GPU models differ.

    Example:
        >>> from cupyflash.resources import KNOWN_GPUS
        >>> from cupyflash.tiles import TileConfig
        >>> from cupyflash.tuning.entries import Kind, Measured
        >>> kind, h200 = Kind("forward", "half", 64, 64, False), KNOWN_GPUS["H200"]
        >>> slow = Entry(kind, TileConfig("mma", 64, 32, 4), Measured(seconds=2e-3))
        >>> fast = Entry(kind, TileConfig("mma", 128, 64, 4), Measured(seconds=1e-3))
        >>> merge(Winners(h200, (slow,)), Winners(h200, (fast,))).entries == (fast,)
        True
    """
    if a.device != b.device:
        raise ValueError(
            f"winners for {a.device} and for {b.device}; what is fastest on one GPU model is not on another: merge "
            "those of one model only"
        )
    best: dict[Any, Entry] = {}
    for entry in (*a.entries, *b.entries):
        other = best.setdefault(entry.key, entry)
        best[entry.key] = min(entry, other, key=_rank)
    by_family = sorted(best.values(), key=lambda entry: FAMILIES.index(entry.config.family))
    return Winners(a.device, arranged(by_family))


def replaced(present: Iterable[Entry], new: Iterable[Entry]) -> tuple[Entry, ...]:
    """The present entries with the new ones in the places of those of equal kind and family."""
    entries = {entry.key: entry for entry in present}
    return arranged((entries | {entry.key: entry for entry in new}).values())


def arranged(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """By kind; of equal kind the fastest first, then those that were not measured, in the order in which they come."""
    return tuple(sorted(entries, key=lambda entry: (*_position(entry), entry.measured.seconds or math.inf)))


def _position(entry: Entry) -> tuple[Any, ...]:
    k = entry.kind
    return TASKS.index(k.task), DTYPES.index(k.dtype), k.head_dim, k.head_dim_v, k.masked, k.length or 0, k.rows or 0


def _rank(entry: Entry) -> tuple[Any, ...]:
    """Smaller is better; equal for equal entries only."""
    measured = entry.measured
    try:
        current = measured.kernel == kernel_hash(entry.config.family, entry.kind.task)
    except KeyError:
        current = False
    newest_first = tuple(-ord(sign) for sign in measured.date or "")
    return (
        not current,
        measured.seconds is None,
        measured.seconds or math.inf,
        not measured.date,
        newest_first,
        str(content(entry)),
    )
