"""The measured winners for a problem on a GPU, looked up in all places where they may be.

An entry holds for its length and number of rows and for what is up to four times as large or small, both together;
one that names neither holds for all. Within a GPU model, those that hold go by layer (see ``layers``). In one layer,
the nearest of those that name a length or rows go before those for all, those of one 16-bit dtype before "half", and
then as they stand in the file. Entries from farther away serve where nothing holds, the nearest first. What was
measured nearer but is for the other 16-bit dtype alone, or not legal for the problem (``dispatch.choose`` asks), ends
the reach of entries that are farther: those for all lengths, or the heuristic, serve then.

``find_related`` then has the winners of another GPU model of the same architecture, on which tiles that win here are at
most some percent off, and which know kernels that no heuristic lists. Whether tiles are legal on the GPU at hand is
asked again by whoever uses them.

A problem with a cap or a scale that is not positive has no winners: nobody has measured its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from .. import heuristics
from ..problem import Problem
from ..resources import Limits
from ..tiles import Task, TileConfig
from . import files, layers, settings
from .entries import Entry, Kind, Winners
from .layers import Layer
from .merging import replaced

REACH = 2.0  # powers of two
_PROBLEMS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """A winner, and where it comes from."""

    config: TileConfig
    entry: Entry
    layer: Layer
    distance: float  # in powers of two, to the length and rows that were measured
    related: bool  # of another GPU model

    @property
    def is_general(self) -> bool:
        """Whether it is for all lengths and numbers of rows."""
        return self.entry.kind.is_general

    @property
    def origin(self) -> str:
        """As in "tuned: packaged NVIDIA_H200.yaml"."""
        kind = self.entry.kind
        measured_at = [
            *([f"length {kind.length}"] if kind.length else []),
            *([f"{kind.rows} rows"] if kind.rows else []),
        ]
        remarks = [
            *([f"measured at {' and '.join(measured_at)}"] if self.distance else []),
            *(["a GPU of the same architecture"] if self.related else []),
        ]
        return ", ".join([f"tuned: {self.layer}", *remarks])


@lru_cache(_PROBLEMS_KEPT)
def find(task: Task, problem: Problem, limits: Limits) -> tuple[Found, ...]:
    """The winners that were measured on the GPU's own model, best first; of several families, legal or not."""
    return _ranked(task, problem, limits, layers.layers(limits.name), layers.entries, related=False)


@lru_cache(_PROBLEMS_KEPT)
def find_related(task: Task, problem: Problem, limits: Limits) -> tuple[Found, ...]:
    """The same of other models of the GPU's architecture."""
    return _ranked(task, problem, limits, layers.related(limits), _entries_of_any, related=True)


def find_all(task: Task, problem: Problem, limits: Limits) -> Iterator[Found]:
    """Both, in order; other models' files are not touched before their turn."""
    yield from find(task, problem, limits)
    yield from find_related(task, problem, limits)


def is_tuned(task: Task, problem: Problem, limits: Limits) -> bool:
    """Whether the GPU's own model has an entry for the very length and rows of the problem, or for all."""
    exact = heuristics.exact_family(task, problem, limits)
    return any(
        found.distance == 0 and not heuristics.rounds_otherwise(found.config.family, exact)
        for found in find(task, problem, limits)
    )


def keep(entries: Sequence[Entry], limits: Limits) -> Path | None:
    """Adds entries to the user's winners for a GPU model, in place of those of equal kind and family.

    Where they cannot be written, this process keeps them in memory, and a warning says so.

    Returns:
        The file; None if they are kept in memory only.

    Raises:
        EntryError: an entry could not be read back; nothing is kept.
    """
    files.text_of(Winners(limits, tuple(entries)))
    folder = layers.user_folder()
    path = None if folder is None else folder / files.file_name(limits.name)
    try:
        if path is None:
            raise files.StoreError("there is no folder for winners; CUPYFLASH_CACHE_DIR names one")
        files.update(path, limits, lambda present: replaced(present, entries))
    except files.StoreError as error:
        settings.warn_once(f"tuned tiles are kept for this process only: {error}")
        layers.remember(limits.name, entries)
        path = None
    refresh()
    return path


def refresh() -> None:
    """Reads files and variables again when they are next needed. Calls that were made before keep their tiles."""
    layers.refresh()
    find.cache_clear()
    find_related.cache_clear()


def _ranked(
    task: Task,
    problem: Problem,
    limits: Limits,
    places: Iterable[Layer],
    entries_of: Callable[[Layer, Limits], tuple[Entry, ...]],
    related: bool,
) -> tuple[Found, ...]:
    if problem.softcap or problem.scale <= 0:
        return ()
    kind = Kind.of(task, problem)
    found = [
        Found(entry.config, entry, layer, distance, related)
        for layer in places
        for entry in entries_of(layer, limits)
        if (distance := entry.kind.distance(kind)) < math.inf and _holds_for(entry, problem)
    ]
    rivals = {layer: _of_the_other_dtype_alone(entries_of(layer, limits), kind) for layer in {f.layer for f in found}}
    found = [f for f in found if f.is_general or not _is_beyond(f, rivals[f.layer])]
    # Sorting is stable: what is equal stays in the order of layers and files.
    holding = [f for f in found if f.distance <= REACH]
    by_layer = [
        f
        for layer in dict.fromkeys(f.layer for f in holding)
        for f in sorted((f for f in holding if f.layer == layer), key=_preference)
    ]
    far = sorted((f for f in found if f.distance > REACH), key=_preference_by_distance)
    return tuple(by_layer + far)


def _holds_for(entry: Entry, problem: Problem) -> bool:
    """Whether a winner says something of a problem of its kind.

    A block of "v1" has a key/value head, with all queries and keys of it one after the other: what it wins where they
    are one tile it loses where they are more, which neither the number of rows nor the length of one side tells. It
    was measured without a lower bound, which takes registers.
    """
    if entry.config.family != "v1" or problem.algorithm == "v1" or entry.kind.length is None:
        return True
    longest = max(problem.seqlen_q, problem.seqlen_k)
    return longest <= entry.kind.length and problem.group == 1 and problem.band.first is None


def _of_the_other_dtype_alone(entries: Iterable[Entry], kind: Kind) -> tuple[float, Entry] | None:
    """The nearest winner that holds for the other 16-bit dtype alone, and how far it is; None if there is none."""
    other = {"float16": "bfloat16", "bfloat16": "float16"}.get(kind.dtype)
    if other is None:
        return None
    distances = (
        (entry.kind.distance(replace(kind, dtype=other)), entry)
        for entry in entries
        if entry.kind.dtype == other and not entry.kind.is_general
    )
    return min(distances, key=lambda found: found[0], default=None)


def _is_beyond(found: Found, rival: tuple[float, Entry] | None) -> bool:
    """Whether a winner is farther than ``rival``, or of a family that came second to it.

    What was best there is not for this dtype, and what was not best, or elsewhere, would be a guess.
    """
    if rival is None or found.entry.kind.dtype != "half":
        return False
    distance, entry = rival
    return found.distance > distance or (found.distance == distance and found.config.family != entry.config.family)


def _preference(found: Found) -> tuple[float, ...]:
    """Smaller goes first, of those in one layer."""
    kind = found.entry.kind
    open_ = (kind.length is None) + (kind.rows is None)
    return kind.is_general, *_preference_by_distance(found), kind.dtype == "half", open_


def _preference_by_distance(found: Found) -> tuple[float, ...]:
    """Of two that are equally near, the larger problem goes first: it has more time to lose."""
    kind = found.entry.kind
    return found.distance, -(kind.length or 1) * (kind.rows or 1)


def _entries_of_any(layer: Layer, limits: Limits) -> tuple[Entry, ...]:
    winners = layers.winners_in(layer)
    return winners.entries if winners and winners.device.arch == limits.arch else ()
