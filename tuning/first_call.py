"""``CUPYFLASH_TUNE=first-call``: a kind of problem without winners is tuned when it is first computed.

Nothing of it can make a call fail: whatever goes wrong is one warning, and the call takes the tiles that it would have
taken anyway.
"""

from __future__ import annotations

import threading

from ..problem import Problem
from ..resources import Limits
from ..tiles import Task
from . import settings, store
from .entries import Kind

_lock = threading.Lock()
_tried: set[tuple[Kind, str]] = set()
_failed = False


def tune_if_asked(tasks: tuple[Task, ...], problem: Problem, limits: Limits) -> None:
    """Tunes what a problem needs on the current GPU, if the variable asks for it and there are no winners yet.

    Args:
        tasks: that are about to be planned.
    """
    if settings.tune_mode() == "off" or problem.softcap or problem.scale <= 0:
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
    except Exception as error:
        _failed = True  # the next kind would fail in the same way, after the same time
        settings.warn_once(
            f"tuning {tried[0]} at its first call failed ({type(error).__name__}: {error}); default tiles are used, "
            "and nothing more is tuned in this process. CUPYFLASH_TUNE=off asks for that from the start"
        )
    finally:
        store.refresh()


def run_tuner(task: Task, problem: Problem, limits: Limits) -> None:
    """Has a worker process tune one kind of problem with a quick budget, and keeps its winners with ``store.keep``."""
    from . import tune  # type: ignore[attr-defined]  # the search engine, imported only by those who ask for it

    tune(task, problem, limits, effort="quick")
