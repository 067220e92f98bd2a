"""Worker threads for the CPU path: each takes blocks of work from one queue and runs BLAS on its own thread only.

NumPy releases the interpreter lock inside its kernels, so Python threads are enough. The threads are started once and
kept; the limit on BLAS threads holds while work runs and is lifted with the last call that needs it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")

ENVIRONMENT = "CUPYFLASH_NUM_THREADS"

_lock = threading.Lock()
_requested: int | None = None
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_limit: Any = None
_limit_users = 0


def set_num_threads(count: int | None) -> None:
    """Sets how many threads the CPU path uses; results do not depend on it.

    Args:
        count: at least 1, or None for the default: the environment variable CUPYFLASH_NUM_THREADS if it is set, else
            the number of cores this process may run on.

    Raises:
        ValueError: count is below 1.
        TypeError: count is no integer.

    Example:
        >>> set_num_threads(2)
        >>> get_num_threads()
        2
        >>> set_num_threads(None)
    """
    global _requested
    if count is not None:
        count = operator.index(count)
        if count < 1:
            raise ValueError(f"count is {count}; expected at least 1 thread, or None for the default")
    _requested = count


def get_num_threads() -> int:
    """How many threads the CPU path uses now.

    Raises:
        ValueError: CUPYFLASH_NUM_THREADS is set to something else than a positive integer.
    """
    if _requested is not None:
        return _requested
    text = os.environ.get(ENVIRONMENT, "")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{ENVIRONMENT} is {text!r}; expected a positive integer, or unset it")
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(start: Callable[[], Callable[[Item], None]], items: Sequence[Item], threads: int) -> None:
    """Hands every item to one of at most ``threads`` workers, in order.

    ``start`` is called once in each worker, allocates its scratch memory, and returns what handles an item.
    """
    queue = iter(items)
    queue_lock = threading.Lock()

    def take() -> Iterator[Item]:
        while True:
            with queue_lock:
                try:
                    item = next(queue)
                except StopIteration:
                    return
            yield item

    def work() -> None:
        one_thread = _blas_with_limits_per_thread().limit(limits=1, user_api="blas")
        # NaN and infinity are data here: they go where the textbook sends them.
        with one_thread, np.errstate(all="ignore"):
            handle = start()
            for item in take():
                handle(item)

    helpers = min(threads, len(items)) - 1
    with _one_blas_thread():
        futures = _submit(work, helpers)
        try:
            work()
        finally:
            for _ in take():  # after an error here, nothing is left for the others to take
                pass
            # One that has not started by now, since other calls keep the threads busy, is not needed any more.
            errors = [future.exception() for future in futures if not future.cancel()]
    for error in errors:
        if error is not None:
            raise error


def _submit(work: Callable[[], None], count: int) -> list[Future[None]]:
    """Starts ``work`` on ``count`` of the kept threads."""
    global _pool, _pool_size
    with _lock:
        if _pool_size < count:
            if _pool is not None:
                _pool.shutdown(wait=False)  # what was submitted before still runs
            _pool, _pool_size = ThreadPoolExecutor(count, thread_name_prefix="cupyflash"), count
        return [_pool.submit(work) for _ in range(count)] if _pool is not None else []


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """BLAS computes on the calling thread only, for as long as anyone is inside.

    The limit of most libraries is one for the whole process: the first caller sets it and the last one lifts it.
    """
    global _limit, _limit_users
    with _lock:
        if _limit_users == 0:
            libraries = _blas()
            _take_control()
            _limit = libraries.limit(limits=1, user_api="blas")
        _limit_users += 1
    try:
        yield
    finally:
        with _lock:
            _limit_users -= 1
            if _limit_users == 0:
                _lift_limit()


def _lift_limit() -> None:
    global _limit
    _take_control()
    _limit.restore_original_limits()
    _take_control()
    _limit = None


def _take_control() -> None:
    """Lets any thread change the limit of OpenBLAS.

    Since 3.8, threadpoolctl otherwise ignores all threads but the first that did, without a word.
    """
    import threadpoolctl

    clear = getattr(threadpoolctl.OpenBLASController, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)


@functools.cache
def _blas() -> Any:
    """The BLAS libraries in this process; to look for them takes milliseconds."""
    import threadpoolctl

    return threadpoolctl.ThreadpoolController().select(user_api="blas")


@functools.cache
def _blas_with_limits_per_thread() -> Any:
    """Those of them that each thread has to limit for itself."""
    return _blas().select(internal_api="mkl", threading_layer="openmp")


def _after_fork() -> None:
    """A forked child has none of its parent's threads."""
    global _lock, _pool, _pool_size, _limit_users
    _lock = threading.Lock()
    _pool, _pool_size = None, 0
    if _limit is not None:
        _lift_limit()
    _limit_users = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
