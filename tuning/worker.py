"""The process that drives one GPU: what a configuration can break, breaks here.

Started as ``python -m cupyflash.tuning.worker FD PARENT`` with one end of a socket pair. The first message is
``(factory, arguments, threads)``, where factory is ``"module:callable"`` that makes a ``Bench``; then come requests
``(method, arguments)``, each answered by ``("ok", value)``, ``("rejected", kind, message)`` or ``("broken", kind,
message)``. After the last the process ends: a CUDA context does not recover. ``("prefetch", [...])`` has no answer.

Compiling goes on ahead in threads (NVRTC lets go of the interpreter's lock). When the parent is gone, so is the worker.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from threadpoolctl import threadpool_limits

from .bench import Bench, Rejected
from .tasks import TuningTask

_PR_SET_PDEATHSIG = 1
_CONTEXT_ERRORS = ("CUDARuntimeError", "CUDADriverError")  # by name: CuPy need not be there
_MESSAGE_CHARACTERS = 2000
_SWITCH_SECONDS = 2e-4  # between threads: one that compiles shall not stand between an event and the launch it times


def main(arguments: list[str]) -> None:
    """Serves one parent until it hangs up."""
    descriptor, parent = map(int, arguments)
    sys.setswitchinterval(_SWITCH_SECONDS)
    die_with(parent)
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    factory, options, threads = requests.get()
    module, _, name = factory.partition(":")
    try:
        bench = getattr(importlib.import_module(module), name)(**options)
        threadpool_limits(1)  # of BLAS, for the proof: the cores are busy compiling
        connection.send(("ok", bench.identity()))
    except Exception as error:
        connection.send(("broken", "start", _describe(error)))
        return
    _serve(connection, requests, bench, Builder(bench, threads))


def die_with(parent: int) -> None:
    """Has the kernel end this process when the parent's thread that started it ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def _receive(connection: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Passes requests on. A hung kernel holds up whoever serves them, not who notices that nobody will ask again."""
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def _serve(connection: Connection, requests: queue.SimpleQueue[Any], bench: Bench, builder: Builder) -> None:
    while True:
        method, arguments = requests.get()
        if method == "prefetch":
            builder.prefetch(*arguments)
            continue
        try:
            value = builder.result(*arguments) if method == "build" else getattr(bench, method)(*arguments)
            if method == "forget":
                builder.forget(*arguments)
            answer: tuple[Any, ...] = ("ok", value)
        except Rejected as error:
            answer = ("rejected", error.kind, str(error)[:_MESSAGE_CHARACTERS])
        except Exception as error:
            broken = type(error).__name__ in _CONTEXT_ERRORS
            answer = ("broken" if broken else "rejected", "crash" if broken else "error", _describe(error))
        connection.send(answer)
        if answer[0] == "broken":
            os._exit(1)  # no clean-up: it would wait for the kernel


class Builder:
    """Builds configurations in threads, in the order in which they are asked for; urgent ones wait for no others."""

    def __init__(self, bench: Bench, threads: int) -> None:
        self._bench = bench
        self._ahead = ThreadPoolExecutor(threads, thread_name_prefix="build")
        self._urgent = ThreadPoolExecutor(threads, thread_name_prefix="urgent")
        self._futures: dict[Any, Future[dict[str, Any]]] = {}

    def prefetch(self, task: TuningTask, configs: list[Any], changes: dict[str, Any], urgent: bool) -> None:
        """Begins to build what is not built yet."""
        pool = self._urgent if urgent else self._ahead
        for config in configs:
            key = (task, config, tuple(changes.items()))
            if key not in self._futures:
                self._futures[key] = pool.submit(self._bench.build, task, config, changes)

    def result(self, task: TuningTask, config: Any, changes: dict[str, Any]) -> dict[str, Any]:
        """What ``Bench.build`` returned; waits for it."""
        self.prefetch(task, [config], changes, urgent=True)
        return self._futures[task, config, tuple(changes.items())].result()

    def forget(self, task: TuningTask) -> None:
        """Drops what was built for a task, and does not begin what was not."""
        for key in [key for key in self._futures if key[0] == task]:
            self._futures.pop(key).cancel()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS]


if __name__ == "__main__":
    main(sys.argv[1:])
