"""Racing: many candidates, few samples each; whoever is surely slower drops out, and the rest are sampled again.

Pure functions over ``measure(candidate, round) -> seconds``. All candidates of a round are measured one after the other
in random order, and compared by the ratios of one round: a GPU whose clock drifts slows all of them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Rung:
    """Up to ``samples`` per candidate in all, of which at most ``survivors`` are left afterwards."""

    samples: int
    survivors: int


RUNGS = (Rung(1, 16), Rung(3, 8), Rung(7, 4), Rung(25, 3))

CLEARLY_SLOWER = 1.25  # ratio at which one sample is enough; noise and drift stay far below
DROP_SIGMAS = 3.0  # of a median's error: a candidate that is as fast is dropped once in hundreds of comparisons
WIN_SIGMAS = 2.6  # 99%
LEAST_GAIN = 0.01  # a winner is faster than the default by more than this
TIE = 0.005  # candidates within this of the fastest are as good: a fixed rule chooses
_MEDIAN_ERROR = math.sqrt(math.pi / 2)  # of a median relative to that of a mean
_LEAST_NOISE = 5e-4  # relative; events tick at half a microsecond


class Failed(Exception):
    """What ``measure`` raises when a candidate cannot be measured: it is out of the race."""


class Stop(Exception):
    """What ``measure`` raises when time is up: the race ends with what is known."""


Measure = Callable[[C, int], float]  # takes the sample of this number of a candidate, in seconds


@dataclass
class Outcome(Generic[C]):
    """Who won, and why.

    Attributes:
        winner: the default, unless another candidate beat it by more than ``max(LEAST_GAIN, interval)``.
        fastest: by the fixed rule among those that are as fast as the fastest; None if nobody could be measured.
        gain: of ``fastest`` over the default, relative, from rounds in which both were measured.
        interval: half-width of the interval of ``gain``.
        spread: relative noise of a sample.
        ties: as fast as the fastest, in the order of preference.
        ranking: finalists, fastest first.
        samples: seconds per candidate, by round.
        dropped: round after which a candidate was out, and why.
        complete: whether the last rung was reached.
    """

    winner: C | None = None
    fastest: C | None = None
    gain: float = 0.0
    interval: float = math.inf
    spread: float = 0.0
    ties: list[C] = field(default_factory=list)
    ranking: list[C] = field(default_factory=list)
    samples: dict[C, dict[int, float]] = field(default_factory=dict)
    dropped: dict[C, tuple[int, str]] = field(default_factory=dict)
    complete: bool = False

    def median(self, candidate: C) -> float:
        """Of a candidate's samples, in seconds."""
        return statistics.median(self.samples[candidate].values())


def race(
    candidates: Sequence[C],
    default: C | None,
    measure: Measure[C],
    *,
    preference: Callable[[C], object],
    seed: int = 0,
    rungs: Sequence[Rung] = RUNGS,
) -> Outcome[C]:
    """Finds the fastest candidate with few samples.

    Args:
        candidates: without repetition; ``default`` may be among them.
        default: never dropped, and beaten only by a clear margin; None: there is nothing to beat.
        measure: takes a sample; raises ``Failed`` or ``Stop``.
        preference: sort key that breaks ties.
        seed: of the order within rounds.
        rungs: samples and survivors per stage.
    """
    outcome: Outcome[C] = Outcome()
    entered = list(dict.fromkeys([*([] if default is None else [default]), *candidates]))
    outcome.samples = {candidate: {} for candidate in entered}
    alive: list[C] = []
    try:
        while not outcome.complete:
            alive = [candidate for candidate in entered if not _has_failed(outcome, candidate)]
            outcome.dropped = {c: how for c, how in outcome.dropped.items() if c not in alive}
            outcome.complete = _climb(outcome, alive, default, measure, seed, rungs)
    except Stop:
        alive = [candidate for candidate in alive if outcome.samples[candidate]]
    _judge(outcome, alive, default, preference)
    return outcome


def _climb(
    outcome: Outcome[C], alive: list[C], default: C | None, measure: Measure[C], seed: int, rungs: Sequence[Rung]
) -> bool:
    """All rungs; ``alive`` shrinks to the finalists.

    False if a candidate failed that others may have dropped out against: then all but it have to start again, with the
    samples that they have.
    """
    done = 0
    for rung in rungs:
        for number in range(done, rung.samples):
            order = random.Random(f"{seed}-{number}")
            for candidate in order.sample(alive, len(alive)):
                if number in outcome.samples[candidate]:
                    continue
                try:
                    outcome.samples[candidate][number] = measure(candidate, number)
                except Failed as error:
                    alive.remove(candidate)
                    outcome.samples[candidate].clear()
                    outcome.dropped[candidate] = (number, f"failed: {error}")
                    if number >= rungs[0].samples:
                        return False
        done = rung.samples
        alive[:] = _survivors(outcome, alive, default, rung)
    return True


def _has_failed(outcome: Outcome[C], candidate: C) -> bool:
    return candidate in outcome.dropped and not outcome.samples[candidate]


def _survivors(outcome: Outcome[C], alive: list[C], default: C | None, rung: Rung) -> list[C]:
    if not alive:
        return alive
    leader = _leader(outcome.samples, alive)
    noise = pooled_noise(outcome.samples, alive)
    slower = {candidate: log_ratio(outcome.samples, candidate, leader)[0] for candidate in alive}
    ranked = sorted(alive, key=lambda candidate: slower[candidate])
    kept = []
    for place, candidate in enumerate(ranked):
        rounds = len(outcome.samples[candidate])
        limit = math.log(CLEARLY_SLOWER) if rounds < 3 else max(TIE, DROP_SIGMAS * median_error(noise, rounds))
        if candidate in (leader, default):
            kept.append(candidate)
        elif slower[candidate] > limit:
            outcome.dropped[candidate] = (rounds, f"{math.expm1(slower[candidate]):.1%} slower")
        elif place >= rung.survivors:
            outcome.dropped[candidate] = (rounds, f"place {place + 1}, {math.expm1(slower[candidate]):.1%} slower")
        else:
            kept.append(candidate)
    return kept


def _judge(outcome: Outcome[C], alive: list[C], default: C | None, preference: Callable[[C], object]) -> None:
    """Fills in who won."""
    if not alive:
        return
    leader = _leader(outcome.samples, alive)
    behind = {candidate: log_ratio(outcome.samples, candidate, leader)[0] for candidate in alive}
    outcome.ranking = sorted(alive, key=lambda candidate: behind[candidate])
    least = len(outcome.samples[leader]) / 2  # whoever was stopped early is no match
    ties = [c for c in alive if behind[c] <= TIE and len(outcome.samples[c]) >= least]
    outcome.ties = sorted(ties or [leader], key=lambda c: preference(c))  # type: ignore[arg-type, return-value]
    outcome.fastest = outcome.ties[0]
    outcome.spread = pooled_noise(outcome.samples, alive)
    if default is None or default not in alive:
        outcome.winner = outcome.fastest
        return
    outcome.gain, outcome.interval = gain_over(outcome, outcome.fastest, default)
    ahead = outcome.gain > max(LEAST_GAIN, outcome.interval)
    outcome.winner = outcome.fastest if ahead else default


def gain_over(outcome: Outcome[C], candidate: C, default: C) -> tuple[float, float]:
    """(by how much faster a candidate is than another, half-width of the interval), relative to the other."""
    slower, rounds = log_ratio(outcome.samples, candidate, default)
    if candidate == default:
        return 0.0, 0.0
    own = [candidate, default]
    noise = max(outcome.spread, pooled_noise(outcome.samples, own) if rounds >= 7 else 0)
    interval = WIN_SIGMAS * median_error(noise, rounds) if rounds >= 3 else math.inf
    return -math.expm1(slower), interval


def log_ratio(samples: dict[C, dict[int, float]], candidate: C, other: C) -> tuple[float, int]:
    """(median of log(candidate / other) over the rounds that both have, number of these rounds)."""
    rounds = samples[candidate].keys() & samples[other].keys()
    if not rounds:
        return math.inf, 0
    ratios = [math.log(samples[candidate][r] / samples[other][r]) for r in rounds]
    return statistics.median(ratios), len(ratios)


def median_error(noise: float, rounds: int) -> float:
    """Standard error of a median of ratios of two samples with this relative noise each."""
    return _MEDIAN_ERROR * math.sqrt(2) * noise / math.sqrt(max(1, rounds))


def pooled_noise(samples: dict[C, dict[int, float]], alive: Sequence[C]) -> float:
    """Relative noise of one sample, robust: from how ratios within rounds scatter, over all candidates.

    Few samples say little of one candidate's own noise. What a round has in common (the clock) is no noise.
    """
    rounds = sorted({r for candidate in alive for r in samples[candidate]})
    if len(rounds) < 3 or len(alive) < 2:
        return _LEAST_NOISE
    logs = {c: {r: math.log(t) for r, t in samples[c].items()} for c in alive}
    centre = {c: statistics.median(logs[c].values()) for c in alive if logs[c]}
    common = {r: statistics.median(logs[c][r] - centre[c] for c in centre if r in logs[c]) for r in rounds}
    # A median over few leaves less to see than there is.
    shrink = math.sqrt(max(0.25, (1 - 1 / len(centre)) * (1 - 1 / len(rounds))))
    scatter = [abs(logs[c][r] - centre[c] - common[r]) for c in centre for r in logs[c]]
    return max(_LEAST_NOISE, 1.4826 * statistics.median(scatter) / shrink)


def _leader(samples: dict[C, dict[int, float]], alive: Sequence[C]) -> C:
    """The fastest by the rounds that it shares with the others."""
    most = max(len(samples[candidate]) for candidate in alive)
    full = [candidate for candidate in alive if len(samples[candidate]) == most]
    rounds = set.intersection(*(set(samples[candidate]) for candidate in full)) or set(samples[full[0]])
    level = {r: statistics.median(math.log(samples[c][r]) for c in full if r in samples[c]) for r in rounds}
    return min(
        full,
        key=lambda c: statistics.median(math.log(samples[c][r]) - level[r] for r in rounds if r in samples[c]),
    )
