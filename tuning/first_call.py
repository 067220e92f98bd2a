"""``CUPYFLASH_TUNE=first-call``: a kind of problem without winners is tuned when it is first computed.

Nothing of it can make a call fail: whatever goes wrong is one warning, and the call takes the tiles that it would have
taken anyway.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import cast

from .. import heuristics
from ..problem import Problem
from ..resources import Limits
from ..tiles import Task
from . import settings, store
from .entries import Entry, Kind, Measured
from .kernel_hash import kernel_hash

_BUDGET_SECONDS = 60.0
_LONGEST = 16384  # of what is measured: longer sequences run so many tiles that one more or less makes no difference

_lock = threading.Lock()
_tried: set[tuple[Kind, str]] = set()
_failed = False


def tune_if_asked(tasks: tuple[Task, ...], problem: Problem, limits: Limits) -> None:
    """Tunes what a problem needs on the current GPU, if the variable asks for it and there are no winners yet.

    A call that asks for an algorithm takes what is known of that; winners are what "auto" takes.

    Args:
        tasks: that are about to be planned.
    """
    if settings.tune_mode() == "off" or problem.softcap or problem.scale <= 0 or problem.algorithm != "auto":
        return
    with _lock:  # others wait for the same winners
        for task in tasks:
            _tune_once(task, problem, limits)


def _tune_once(task: Task, problem: Problem, limits: Limits) -> None:
    global _failed
    tried = Kind.of(task, problem), limits.name
    if _failed or tried in _tried or store.is_tuned(task, problem, limits):
        return
    _tried.add(tried)
    try:
        run_tuner(task, problem, limits)
        store.refresh()
        if not store.is_tuned(task, problem, limits):
            _keep_present(task, problem, limits)
    except Exception as error:
        _failed = True  # the next kind would fail in the same way, after the same time
        settings.warn_once(
            f"tuning {tried[0]} at its first call failed ({type(error).__name__}: {error}); it takes the tiles that it "
            "would have taken anyway, and nothing more is tuned in this process. CUPYFLASH_TUNE=off does not try"
        )


def _keep_present(task: Task, problem: Problem, limits: Limits) -> None:
    """Notes what the problem takes as it is, so that the next process does not tune it again."""
    from ..dispatch import choose  # which imports the store

    config, _ = choose(task, problem, limits)
    measured = Measured(kernel=kernel_hash(config.family, task), provenance="taken after tuning at a first call")
    store.keep([Entry(Kind.of(task, problem), config, measured)], limits)


def run_tuner(task: Task, problem: Problem, limits: Limits) -> None:
    """Has a worker process tune one kind of problem on the current GPU, which keeps its winners by ``store.keep``.

    Measured is a square problem with the number of heads that the tuner takes, about as long and of as many rows.
    """
    from tempfile import TemporaryDirectory

    from cupy.cuda.runtime import getDevice

    from .tasks import DtypeKind, Size, TuningTask
    from .tuner import tune, visible_gpus

    kind = Kind.of(task, problem)
    assert kind.length is not None
    assert kind.rows is not None
    length = min(kind.length, _LONGEST)
    described = TuningTask(task, cast(DtypeKind, kind.dtype), kind.head_dim, kind.head_dim_v, kind.masked)
    heads = described.problem(Size(length, 1)).num_heads
    size = Size(length, max(1, round(kind.rows / (heads * length))))
    square = described.problem(size)
    if heuristics.exact_family(task, square, limits) != heuristics.exact_family(task, problem, limits):
        return  # its winners would not be for the problem
    with TemporaryDirectory() as folder:  # the journals of the user's own tunes stay as they are
        tune(
            [replace(described, sizes=(size,))],
            budget=_BUDGET_SECONDS,
            folder=folder,
            workers=[visible_gpus()[getDevice()]],
        )
