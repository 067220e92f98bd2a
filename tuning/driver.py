"""The parent's side of a worker: requests with deadlines, and a new process when the old one hangs or crashes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_SECONDS = 120.0  # imports, a CUDA context, and a driver that may have to be loaded
DEADLINES = {  # seconds; nothing that works comes near them
    "build": 300.0,
    "prove": 60.0,
    "measure": 30.0,
    "sustained": 60.0,
    "forget": 60.0,
}
_STARTS = 3  # in a row that may fail


class CandidateFailed(Exception):
    """A configuration is out. ``kind``: compile, wrong, error, crash or hang."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class WorkerError(RuntimeError):
    """No worker can be had for a GPU; the message says what it died of."""


@dataclass
class WorkerSpec:
    """How a worker is made.

    Attributes:
        factory: "module:callable" of its ``Bench``.
        options: of the factory.
        threads: that compile.
        environment: variables beside those of this process, such as CUDA_VISIBLE_DEVICES.
        log: file for what it prints.
        deadlines: in place of some of ``DEADLINES``.
    """

    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    log: Path | None = None
    deadlines: dict[str, float] = field(default_factory=dict)


class Worker:
    """One GPU, used by one thread, but for ``prefetch``. The process ends with the thread that started it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._deadlines = DEADLINES | spec.deadlines
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._wanted: dict[Any, tuple[Any, ...]] = {}  # prefetched and not built yet
        self._lock = threading.Lock()  # prefetches may come from another thread
        self.restarts = -1
        self.identity: dict[str, Any] = {}

    def prefetch(
        self, task: Any, configs: list[Any], changes: dict[str, Any] | None = None, urgent: bool = False
    ) -> None:
        """Has configurations compiled while the GPU does something else; urgent ones beside those that wait."""
        with self._lock:
            for config in configs:
                self._wanted[task, config, tuple((changes or {}).items())] = (task, [config], changes or {}, urgent)
        if self._connection is not None:
            self._send(("prefetch", (task, configs, changes or {}, urgent)))

    def build(self, task: Any, config: Any, changes: dict[str, Any] | None = None) -> Any:
        """See ``Bench.build``."""
        self._wanted.pop((task, config, tuple((changes or {}).items())), None)
        return self._request("build", task, config, changes or {})

    def prove(self, task: Any, config: Any, changes: dict[str, Any] | None = None) -> None:
        """See ``Bench.prove``."""
        self._request("prove", task, config, changes or {})

    def measure(self, task: Any, config: Any, size: Any) -> dict[str, Any]:
        """See ``Bench.measure``."""
        return self._request("measure", task, config, size)  # type: ignore[no-any-return]

    def sustained(self, task: Any, config: Any, size: Any) -> float | None:
        """See ``Bench.sustained``."""
        return self._request("sustained", task, config, size)  # type: ignore[no-any-return]

    def forget(self, task: Any) -> None:
        """See ``Bench.forget``."""
        with self._lock:
            self._wanted = {key: value for key, value in self._wanted.items() if key[0] != task}
        if self._connection is not None:
            self._call("forget", task)

    def stop(self) -> None:
        """Ends the process."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def _request(self, method: str, *arguments: Any) -> Any:
        """A request about one configuration.

        A process that dies may have died of another that was being compiled. It is asked once more, with nothing else
        to do; the others are compiled when their turn comes.
        """
        try:
            return self._call(method, *arguments)
        except CandidateFailed as error:
            if error.kind != "crash" or not self._wanted:
                raise
        self._wanted.clear()
        return self._call(method, *arguments)

    def _call(self, method: str, *arguments: Any) -> Any:
        """One request.

        Raises:
            CandidateFailed: rejected, or or the process crashed or hung; the next request finds a new one.
            WorkerError: no process can be started.
        """
        if self._connection is None:
            self.start()
        self._send((method, arguments))
        answer = self._answer(self._deadlines[method])
        if answer[0] == "ok":
            return answer[1]
        if answer[0] == "broken":
            self.stop()
        raise CandidateFailed(*answer[1:])

    def _send(self, message: Any) -> None:
        connection = self._connection
        try:
            with self._lock:
                if connection is not None:
                    connection.send(message)
        except OSError:  # it died between two requests: what follows finds that out
            pass

    def _answer(self, seconds: float) -> tuple[Any, ...]:
        assert self._connection is not None
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return ("broken", "crash", f"the worker {self._obituary()}")
        return ("broken", "hang", f"no answer within {seconds:g} s")

    def _obituary(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "hung up"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def start(self) -> None:
        """Starts the process; raises WorkerError."""
        problem = ""
        for _ in range(_STARTS):
            self._spawn()
            answer = self._answer(START_SECONDS)
            if answer[0] == "ok":
                self.identity = answer[1]
                self.restarts += 1
                with self._lock:
                    wanted = list(self._wanted.values())
                for again in wanted:
                    self._send(("prefetch", again))
                return
            problem = str(answer[2])
            self.stop()
        where = f"; it printed to {self._spec.log}" if self._spec.log else ""
        raise WorkerError(f"no worker could be started for {self._spec.factory}: {problem}{where}")

    def _spawn(self) -> None:
        """Not by multiprocessing, which would run the caller's main module again."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self._spec.environment}
        command = [sys.executable, "-m", "cupyflash.tuning.worker", str(theirs.fileno()), str(os.getpid())]
        output = open(self._spec.log, "ab") if self._spec.log else subprocess.DEVNULL  # noqa: SIM115 (closed below)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        finally:
            theirs.close()
            if self._spec.log:
                output.close()  # type: ignore[union-attr]
        self._connection = Connection(ours.detach())
        self._send((self._spec.factory, self._spec.options, self._spec.threads))
