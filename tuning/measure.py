"""How long a launch takes on the current GPU, by events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy

from .tasks import Regime

_L2_TIMES = 4  # bytes that are written between launches, in sizes of the L2 cache
_SAMPLE_SECONDS = 1.5e-3  # a sample of a short kernel is the median of several launches
_MOST_LAUNCHES = 5
_SUSTAINED_SECONDS = 0.1
_LONG = 0.5e-3  # seconds; what is shorter says little about the power limit


class Stopwatch:
    """Times launches with a cold L2 cache on a stream of its own.

    The write that empties the cache also gives the host time to enqueue what comes behind it. With regime "graph" the
    launches of a pass are captured once and replayed.
    """

    def __init__(self, l2_bytes: int, regime: Regime = "eager") -> None:
        self.regime = regime
        self._scratch = cupy.empty(_L2_TIMES * l2_bytes, cupy.uint8)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(_MOST_LAUNCHES)]

    def prepare(self, launch: Callable[[], None]) -> Callable[[], None]:
        """A function that runs a pass once, with the stopwatch's stream current."""
        with self._stream:
            launch()  # modules are loaded now
            self._stream.synchronize()
            if self.regime == "eager":
                return launch
            self._stream.begin_capture()
            launch()
            graph = self._stream.end_capture()
        return lambda: graph.launch(self._stream)

    def seconds(self, run: Callable[[], None], expected: float | None = None) -> float:
        """One sample: the median of a few launches, fewer of a long one."""
        launches = 1 if expected is None else min(_MOST_LAUNCHES, max(1, round(_SAMPLE_SECONDS / expected)))
        if launches == 2:  # no median
            launches = 3
        with self._stream:
            for start, end in self._events[:launches]:
                self._scratch.data.memset_async(0, self._scratch.nbytes, self._stream)
                start.record()
                run()
                end.record()
            self._stream.synchronize()
        return statistics.median(self._elapsed(start, end) for start, end in self._events[:launches])

    def sustained(self, run: Callable[[], None], expected: float) -> float | None:
        """Seconds per launch back to back, where the power limit has had time to act; None for short kernels."""
        if expected < _LONG:
            return None
        count = max(3, round(_SUSTAINED_SECONDS / expected))
        start, end = self._events[0]
        with self._stream:
            start.record()
            for _ in range(count):
                run()
            end.record()
            self._stream.synchronize()
        return self._elapsed(start, end) / count

    def warm_up(self, run: Callable[[], None], seconds: float = 0.3) -> None:
        """Brings clocks and temperature to where they stay."""
        until = time.monotonic() + seconds
        with self._stream:
            while time.monotonic() < until:
                for _ in range(10):
                    run()
                self._stream.synchronize()

    @staticmethod
    def _elapsed(start: Any, end: Any) -> float:
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3
