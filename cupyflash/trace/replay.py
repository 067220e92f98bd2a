"""Plays what warps asked for against the units of one multiprocessor, step by step.

The recording says what each warp does and on whom it waits; here it gets a time. The emulated device runs one thread
after the other, so its own order means nothing; what can overlap is what the kernel's barriers and waits allow, and
that is what is played. The clock counts steps, not cycles: a model with a few numbers (``Rates``), in which what has no
unit takes no time. A multiprocessor has four parts, warp w runs on part w % 4, and each has

- a tensor core, which multiplies in the order in which it is asked,
- a unit for exponentials,

and they share one way from global memory and one way back. A warp waits for a plain load where its value is first used,
which is not recorded; here it is before the next exponential, store or arrival.

Requests, by the name of their hook: "copy" (cp.async, bytes), "load" (tensor memory accelerator, bytes), "mma" (depth),
"wgmma" (columns), "exp2", "read" and "write" (plain accesses to global memory, bytes), "reduce" (additions to it),
"store" (bulk copies, bytes); their "commit" and "wait" (groups that may be left); "barrier", "arrive" and "wait" of
mbarriers, "named sync" and "named arrive", "block barrier".
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from .record import Place, Recording, Request

Kind = Literal["load", "product", "exp", "store", "wait"]
_LANES = 32
PARTS = 4
_USES = ("exp2", "write", "reduce", "store", "arrive")  # of what plain loads bring
_PIECE = 8  # requests that a warp makes at a time, so that warps of one part share its units


@dataclass(frozen=True, slots=True)
class Rates:
    """What the units do per step: the proportions of an H100, whose multiprocessor does in one cycle 4,096 operations
    of float16 on its tensor cores, 16 exponentials, and 64 bytes on the way from the second-level cache.

    Attributes:
        operations: of one of the four tensor cores.
        exponentials: of one of the four parts.
        bytes: between global and shared memory, each way.
        latency: steps from a request to its first byte.
    """

    operations: int = 1024
    exponentials: int = 4
    bytes: int = 64
    latency: int = 400


@dataclass(slots=True)
class Span:
    """Something that a warp did, or that was done for it.

    Attributes:
        kind: "load", "product", "exp", "store" or "wait".
        asked: when it was asked for.
        start, end: in steps; asynchronous work may start later than it was asked for.
        count: instructions.
        places: in the kernel's file, the innermost call first.
        behind: the warp goes on in the meantime.
    """

    kind: Kind
    asked: int
    start: int
    end: int
    count: int = 1
    places: tuple[Place, ...] = ()
    behind: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """A recording with times.

    Attributes:
        warps: each warp's spans, by the time they were asked for.
        end: the last step.
        worked: steps in which tensor cores ("product") and units for exponentials ("exp") worked, over all parts.
    """

    recording: Recording
    rates: Rates
    warps: tuple[tuple[Span, ...], ...]
    end: int
    worked: dict[Kind, int]


def replay(recording: Recording, rates: Rates | None = None) -> Schedule:
    """Gives every request its time.

    Raises:
        RuntimeError: warps wait for something that never comes; the recording is not of a whole block.
    """
    return _Multiprocessor(recording, rates or Rates()).run()


@dataclass
class _Groups:
    """Asynchronous work of a warp, which is waited for by groups."""

    ends: list[int] = field(default_factory=lambda: [0])  # of each group; the last one is open

    def add(self, end: int) -> None:
        self.ends[-1] = max(self.ends[-1], end)

    def commit(self, count: int) -> None:
        self.ends += [0] * count

    def done(self, left: int) -> int:
        """When all but the last `left` committed groups are complete."""
        return max(self.ends[: max(0, len(self.ends) - 1 - left)], default=0)


@dataclass
class _Barrier:
    """An mbarrier, which counts down to the next phase, or a named one, which counts threads."""

    arrivals: int = 0
    due: int = 0
    bytes_due: int = 0
    phase: int = 0
    waiting: list[_Warp] = field(default_factory=list)


@dataclass
class _Warp:
    index: int
    requests: tuple[Request, ...]
    at: int = 0  # the next request
    made: int = 0  # of its count
    waits_since: int | None = None
    loaded: int = 0  # when its plain loads have landed
    copies: _Groups = field(default_factory=_Groups)
    stores: _Groups = field(default_factory=_Groups)
    products: _Groups = field(default_factory=_Groups)
    spans: list[Span] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.at == len(self.requests)


class _Multiprocessor:
    """Events in the order of time: warps that make their next request, and bytes that land."""

    def __init__(self, recording: Recording, rates: Rates) -> None:
        self._recording, self._rates = recording, rates
        self._warps = [_Warp(index, requests) for index, requests in enumerate(recording.warps) if requests]
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._now = self._events_made = 0
        self._tensor_free, self._exp_free = [0] * PARTS, [0] * PARTS
        self._in_free = self._out_free = 0
        self._worked: dict[Kind, int] = {"product": 0, "exp": 0}
        self._barriers: dict[int, _Barrier] = {}
        self._named: defaultdict[int, _Barrier] = defaultdict(_Barrier)
        self._at_block_barrier: list[_Warp] = []
        self._running = len(self._warps)
        self._handlers: dict[str, Callable[[_Warp, Request], int | None]] = {
            "copy": self._copy,
            "copy commit": lambda warp, request: self._commit(warp, request, warp.copies),
            "copy wait": lambda warp, request: self._wait_for_groups(warp, request, warp.copies),
            "load": self._load,
            "read": self._read,
            "write": self._write,
            "reduce": self._write,
            "store": self._store,
            "store commit": lambda warp, request: self._commit(warp, request, warp.stores),
            "store wait": lambda warp, request: self._wait_for_groups(warp, request, warp.stores),
            "mma": self._mma,
            "wgmma": self._wgmma,
            "wgmma commit": lambda warp, request: self._commit(warp, request, warp.products),
            "wgmma wait": lambda warp, request: self._wait_for_groups(warp, request, warp.products),
            "exp2": self._exp2,
            "barrier": self._barrier,
            "arrive": self._arrive,
            "wait": self._wait,
            "named arrive": self._named_arrive,
            "named sync": self._named_sync,
            "block barrier": self._block_barrier,
        }

    def run(self) -> Schedule:
        for warp in self._warps:
            self._wake(warp)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        stuck = [warp for warp in self._warps if not warp.ended]
        if stuck:
            request = stuck[0].requests[stuck[0].at]
            raise RuntimeError(f"warp {stuck[0].index} waits without end: {request.what!r} at {request.places}")
        spans: list[tuple[Span, ...]] = [()] * len(self._recording.warps)
        for warp in self._warps:
            spans[warp.index] = tuple(warp.spans)
        end = max((span.end for warp in spans for span in warp), default=0)
        return Schedule(self._recording, self._rates, tuple(spans), end, self._worked)

    def _at(self, time: int, event: Callable[[], None]) -> None:
        self._events_made += 1
        heapq.heappush(self._events, (time, self._events_made, event))

    def _wake(self, warp: _Warp) -> None:
        self._at(self._now, lambda: self._request(warp))

    def _request(self, warp: _Warp) -> None:
        """The warp's next request, or the next piece of it, or another look at what it waits for."""
        if warp.ended:
            self._running -= 1
            self._release_block()
            return
        request = warp.requests[warp.at]
        if request.what in _USES and warp.loaded > self._now:
            self._waited(warp, request, self._now, warp.loaded)
            self._at(warp.loaded, lambda: self._request(warp))
            return
        goes_on = self._handlers[request.what](warp, request)
        if goes_on is None:
            if warp.waits_since is None:
                warp.waits_since = self._now
            return
        if warp.waits_since is not None:
            self._waited(warp, request, warp.waits_since, self._now)
            warp.waits_since = None
        if warp.made == request.count:
            warp.at, warp.made = warp.at + 1, 0
        self._at(goes_on, lambda: self._request(warp))

    # Each handler counts what it does of the request, and returns when the warp goes on; or None: it is called again.

    def _copy(self, warp: _Warp, request: Request) -> int:
        land = self._bring(request.a * _LANES * request.count)
        warp.copies.add(land)
        return self._issued(warp, request, "load", self._now, land)

    def _load(self, warp: _Warp, request: Request) -> int:
        land = self._bring(request.a * request.count)
        self._at(land, lambda: self._complete_bytes(request.b, request.a * request.count))
        return self._issued(warp, request, "load", self._now, land)

    def _read(self, warp: _Warp, request: Request) -> int:
        warp.loaded = self._bring(request.a * _LANES * request.count)
        return self._issued(warp, request, "load", self._now, warp.loaded)

    def _write(self, warp: _Warp, request: Request) -> int:
        end = self._take(request.a * _LANES * request.count)
        return self._issued(warp, request, "store", self._now, end)

    def _store(self, warp: _Warp, request: Request) -> int:
        end = self._take(request.a * request.count)
        warp.stores.add(end)
        return self._issued(warp, request, "store", self._now, end)

    def _wgmma(self, warp: _Warp, request: Request) -> int:
        """A warp's 16 of the 64 rows, on its own tensor core."""
        part = warp.index % PARTS
        start = max(self._now, self._tensor_free[part])
        end = start + 2 * 16 * 16 * request.a * request.count // self._rates.operations
        self._tensor_free[part] = end
        self._worked["product"] += end - start
        warp.products.add(end)
        return self._issued(warp, request, "product", start, end)

    def _issued(self, warp: _Warp, request: Request, kind: Kind, start: int, end: int) -> int:
        """All of a request at once, which takes the warp a step each."""
        warp.spans.append(Span(kind, self._now, start, end, request.count, request.places, behind=True))
        warp.made = request.count
        return self._now + request.count

    def _mma(self, warp: _Warp, request: Request) -> int:
        operations = 2 * 16 * 8 * request.a
        return self._piece(warp, request, "product", self._tensor_free, operations // self._rates.operations)

    def _exp2(self, warp: _Warp, request: Request) -> int:
        return self._piece(warp, request, "exp", self._exp_free, _LANES // self._rates.exponentials)

    def _piece(self, warp: _Warp, request: Request, kind: Kind, free: list[int], steps: int) -> int:
        """Work for which the warp waits, so much at a time that others get at the unit, too."""
        count = min(_PIECE, request.count - warp.made)
        part = warp.index % PARTS
        start = max(self._now, free[part])
        free[part] = end = start + steps * count
        self._worked[kind] += end - start
        if warp.made == 0:
            warp.spans.append(Span(kind, self._now, start, end, request.count, request.places))
        else:
            warp.spans[-1].end = end
        warp.made += count
        return end

    def _commit(self, warp: _Warp, request: Request, groups: _Groups) -> int:
        groups.commit(request.count)
        warp.made = request.count
        return self._now

    def _wait_for_groups(self, warp: _Warp, request: Request, groups: _Groups) -> int:
        done = max(self._now, groups.done(request.a))
        self._waited(warp, request, self._now, done)
        warp.made = request.count
        return done

    def _waited(self, warp: _Warp, request: Request, start: int, end: int) -> None:
        if start < end:
            warp.spans.append(Span("wait", start, start, end, 1, request.places))

    def _barrier(self, warp: _Warp, request: Request) -> int:
        self._barriers[request.b] = _Barrier(request.a, request.a)
        warp.made += 1
        return self._now

    def _arrive(self, warp: _Warp, request: Request) -> int:
        barrier = self._barriers[request.b]
        barrier.bytes_due += request.a
        barrier.due -= 1
        self._begin_next_phase(barrier)
        warp.made += 1
        return self._now

    def _complete_bytes(self, address: int, count: int) -> None:
        barrier = self._barriers[address]
        barrier.bytes_due -= count
        self._begin_next_phase(barrier)

    def _begin_next_phase(self, barrier: _Barrier) -> None:
        if barrier.due == 0 and barrier.bytes_due == 0:
            barrier.phase += 1
            barrier.due = barrier.arrivals
            self._release(barrier)

    def _wait(self, warp: _Warp, request: Request) -> int | None:
        barrier = self._barriers[request.b]
        if barrier.phase % 2 == request.a:
            barrier.waiting.append(warp)
            return None
        warp.made += 1
        return self._now

    def _named_arrive(self, warp: _Warp, request: Request) -> int:
        self._come(request)
        warp.made += 1
        return self._now

    def _named_sync(self, warp: _Warp, request: Request) -> int | None:
        if warp.waits_since is None and not self._come(request):
            self._named[request.a].waiting.append(warp)
            return None
        warp.made += 1
        return self._now

    def _come(self, request: Request) -> bool:
        """A warp comes to a named barrier; whether it is the last."""
        barrier = self._named[request.a]
        barrier.due += _LANES
        if barrier.due < request.b:
            return False
        barrier.due = 0
        self._release(barrier)
        return True

    def _release(self, barrier: _Barrier) -> None:
        waiting, barrier.waiting = barrier.waiting, []
        for warp in waiting:
            self._wake(warp)

    def _block_barrier(self, warp: _Warp, request: Request) -> int | None:
        if warp.waits_since is None:
            self._at_block_barrier.append(warp)
            self._release_block()
            return None
        warp.made += 1
        return self._now

    def _release_block(self) -> None:
        if len(self._at_block_barrier) == self._running:
            waiting, self._at_block_barrier = self._at_block_barrier, []
            for warp in waiting:
                self._wake(warp)

    def _bring(self, count: int) -> int:
        """When bytes from global memory land."""
        self._in_free = max(self._in_free, self._now) + -(-count // self._rates.bytes)
        return self._in_free + self._rates.latency

    def _take(self, count: int) -> int:
        """When bytes are on their way to global memory."""
        self._out_free = max(self._out_free, self._now) + -(-count // self._rates.bytes)
        return self._out_free
