"""The course of a comparison: which problem when, how often, and what is kept of it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from . import accuracy
from .cases import ALGORITHMS, DIRECTIONS, Case
from .hbm import Traffic, flops
from .table import FAILED, Row

_LEAST_ROUNDS = 2  # even if the time is over: one sample says nothing of its noise
_SHARE_OF_COUNTERS = 3  # the first counters get a third of what is left; the others what the times leave

Call = Callable[[], Any]
Key = tuple[str, str]  # algorithm, direction
Counted = tuple[Case, Key, Traffic, Traffic]  # by the device's counters, and by count


@dataclass(frozen=True)
class Prepared:
    """The passes over one problem, each run already.

    Attributes:
        calls: runs a pass.
        peaks: most memory that it holds at a time beyond its inputs, in bytes.
        reasons: why others cannot be run.
    """

    calls: Mapping[Key, Call]
    peaks: Mapping[Key, int]
    reasons: Mapping[Key, str]


class Bench(Protocol):
    """A device that computes and measures."""

    name: str
    made: str
    dtype: str
    notes: list[str]  # what to say of the measurement
    algorithms: tuple[str, ...]

    def compile(self, cases: Sequence[Case]) -> int:
        """Compiles what the cases take, ahead of all measurements; returns how many kernels that is."""

    def roofs(self) -> tuple[float | None, float | None]:
        """Bytes per second of a copy, and operations per second of a matrix product."""

    def prepare(self, case: Case, algorithms: Sequence[str]) -> Prepared:
        """Inputs and calls of a problem. What was prepared before is not called any more."""

    def seconds(self, call: Call) -> float:
        """One sample."""

    def counted(self, case: Case, key: Key) -> tuple[Traffic | None, str]:
        """The bytes that a pass moves by count, and its tiles."""

    def errors(self, case: Case) -> dict[Key, float]:
        """The errors of all algorithms on a small problem, against float64."""

    def counters(self, cases: Sequence[Case]) -> list[Callable[[], list[Counted]]]:
        """Calls that read what the device's counters say the passes move, one for each length, in the cases' order."""


class Clock:
    """Time that is left."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, None if seconds is None else now() + seconds

    @property
    def left(self) -> float | None:
        """Seconds; None: no end."""
        return None if self._end is None else max(0.0, self._end - self._now())

    @property
    def is_over(self) -> bool:
        """Nothing is left."""
        return self.left == 0.0


def told(error: Exception) -> str:
    """The note of a pass that this keeps from being measured."""
    if isinstance(error, MemoryError):
        return f"does not fit: {error}"
    if isinstance(error, ValueError):  # UnsupportedError is one
        return str(error)
    return f"{FAILED}{type(error).__name__}: {error}"


def compare(
    bench: Bench,
    cases: Sequence[Case],
    rounds: int,
    seconds: float | None,
    say: Callable[[str], None],
    seed: int = 0,
    now: Callable[[], float] = time.monotonic,
    rows: list[Row] | None = None,
    keep: Callable[[], object] = lambda: None,
) -> list[Row]:
    """All rows of a comparison, in the order of the cases.

    What one algorithm fails at over one problem is noted in its row, and the comparison goes on.

    All passes of all algorithms over one problem are sampled in turns, in a new random order each round: what drifts
    meanwhile (clocks, temperature) drifts for all of them.

    Args:
        rounds: samples of each pass; fewer if the time is over.
        seconds: after which no more is begun; None: no limit.
        say: takes a line of progress.
        rows: to which they are appended as they come, so that somebody has them if the comparison is broken off.
        keep: called when there are new ones.
    """
    rows = [] if rows is None else rows
    clock = Clock(seconds, now)
    order = random.Random(seed)
    say(f"{bench.name}: {len(cases)} problems, {', '.join(bench.algorithms)}")
    if compiled := bench.compile(cases):
        say(f"{compiled} kernels are compiled")
    copy_bytes, gemm_flops = bench.roofs()
    common = {"device": bench.name, "made": bench.made, "copy_bytes": copy_bytes, "gemm_flops": gemm_flops}

    for case in accuracy.cases(cases):
        rows += [_row(case, key, common, error=error) for key, error in bench.errors(case).items()]
    say(f"errors against float64 of {len(rows)} passes")
    keep()

    counters = bench.counters(cases)

    def count(clock: Clock) -> None:
        """Reads counters until the time is over."""
        while counters and not clock.is_over:
            of_length = counters.pop(0)()
            rows.extend(_counted(*counted, common) for counted in of_length)
            say(f"counters of {len(of_length)} passes")
            keep()

    count(Clock(None if clock.left is None else clock.left / _SHARE_OF_COUNTERS, now))

    groups = [list(group) for _, group in groupby(cases, key=lambda case: (case.head_dim, case.seqlen))]
    for index, group in enumerate(groups):
        if clock.is_over:
            say(f"the time is over: {len(groups) - index} of {len(groups)} lengths and head dims were not reached")
            break
        share = None if clock.left is None else clock.left / (len(groups) - index)
        for case in group:
            share_of_case = None if share is None else share / len(group)
            rows += _measured(bench, case, rounds, Clock(share_of_case, now), order, common)
            say(f"{case}: {_summary(rows, case)}")
            keep()
    count(clock)
    if counters:
        bench.notes.append("There was not time enough to read all counters.")
    return rows


def _counted(case: Case, key: Key, measured: Traffic, count: Traffic, common: dict[str, Any]) -> Row:
    return _row(
        case,
        key,
        common,
        counted=count,
        measured_read=measured.read,
        measured_written=measured.written,
        measured_requested=measured.requested,
    )


def _measured(
    bench: Bench, case: Case, rounds: int, clock: Clock, order: random.Random, common: dict[str, Any]
) -> Iterator[Row]:
    try:
        prepared = bench.prepare(case, bench.algorithms)
    except Exception as error:  # whatever it is, the next problem may do without
        keys = [(algorithm, direction) for algorithm in bench.algorithms for direction in DIRECTIONS]
        prepared = Prepared({}, {}, dict.fromkeys(keys, told(error)))
    reasons = dict(prepared.reasons)
    samples: dict[Key, list[float]] = {key: [] for key in prepared.calls}
    for number in range(rounds):
        if clock.is_over and number >= _LEAST_ROUNDS:
            break
        for key in order.sample(list(samples), len(samples)):
            try:
                samples[key].append(bench.seconds(prepared.calls[key]))
            except Exception as error:  # likewise the next pass
                reasons[key] = told(error)
                del samples[key]
    for algorithm in bench.algorithms:
        for direction in DIRECTIONS:
            key = (algorithm, direction)
            traffic, tiles = bench.counted(case, key) if key in samples else (None, "")
            if key in samples:
                median = statistics.median(samples[key])
                yield _row(
                    case,
                    key,
                    common,
                    counted=traffic,
                    tiles=tiles,
                    seconds=median,
                    spread=_spread(samples[key], median),
                    samples=len(samples[key]),
                    peak_bytes=prepared.peaks.get(key),
                )
            else:
                yield _row(case, key, common, note=reasons.get(key, "was not run"))


def _row(case: Case, key: Key, common: dict[str, Any], counted: Traffic | None = None, **known: Any) -> Row:
    algorithm, direction = key
    row = Row(
        dtype=case.dtype,
        batch=case.batch,
        seqlen=case.seqlen,
        heads=case.heads,
        head_dim=case.head_dim,
        causal=case.causal,
        direction=direction,
        algorithm=algorithm,
        flops=flops(case.problem(), direction),
        **common,
        **known,
    )
    if counted is None:
        return row
    return replace(row, counted_read=counted.read, counted_written=counted.written, counted_requested=counted.requested)


def _spread(samples: Sequence[float], median: float) -> float | None:
    if len(samples) < 2:
        return None
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / median


def _summary(rows: Sequence[Row], case: Case) -> str:
    """The milliseconds of a training step by each algorithm."""
    of_case = {row.algorithm: row for row in rows if row.case == case and row.direction == "step" and row.samples}
    told = [f"{name} {(of_case[name].seconds or 0) * 1e3:.3g} ms" for name in ALGORITHMS if name in of_case]
    return ", ".join(told) or "nothing could be run"
