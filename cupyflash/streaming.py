"""NumPy arrays computed on the GPU: cut into pieces that are copied there, computed and copied back side by side.

The same signatures as cpu.py and gpu.py. A piece is some batch entries, or some heads where there is one batch entry
only. Pieces take turns on a few streams, so that one is copied in while another is computed and a third is copied out.
All copies go through pinned memory, which alone can be copied while the host goes on; and only the pieces in flight
take up memory of the GPU, so the arrays may be larger than it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np

from . import arrays
from .arrays import Array
from .problem import Problem

STREAMS = 3  # one piece copied in, one computed, one copied out
PIECE_BYTES = 32 << 20  # q, k, v and out of a piece: long against the cost of a launch, short against the whole


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a problem that is one itself: some batch entries, or some key/value heads with their query heads."""

    problem: Problem
    batch: slice
    heads: slice
    kv_heads: slice

    def of(self, name: str, array: Array) -> Array:
        """This piece's part of a (B, S, H, D) array, or of a (B, H, Sq) lse or dlse."""
        if name in ("lse", "dlse"):
            return array[self.batch, self.heads]
        return array[self.batch, :, self.kv_heads if name in ("k", "v", "dk", "dv") else self.heads]


def pieces(problem: Problem) -> list[Piece]:
    """The pieces of a problem: as equal as they can be, at least one for each stream where there are as many."""
    q_bytes = problem.seqlen_q * problem.num_heads * (problem.head_dim + problem.head_dim_v) * problem.itemsize
    k_bytes = problem.seqlen_k * problem.num_kv_heads * (problem.head_dim + problem.head_dim_v) * problem.itemsize
    by_batch = problem.batch > 1
    available = problem.batch if by_batch else problem.num_kv_heads
    count = min(available, max(STREAMS, ceil(problem.batch * (q_bytes + k_bytes) / PIECE_BYTES)))
    edges = [available * index // count for index in range(count + 1)]

    everything, group = slice(None), problem.group
    cut = []
    for first, last in pairwise(edges):
        if by_batch:
            cut.append(Piece(replace(problem, batch=last - first), slice(first, last), everything, everything))
        else:
            part = replace(problem, num_kv_heads=last - first, num_heads=(last - first) * group)
            cut.append(Piece(part, everything, slice(first * group, last * group), slice(first, last)))
    return cut


def forward(problem: Problem, q: Array, k: Array, v: Array, out: Array, lse: Array | None) -> None:
    """Writes out and lse (None: not wanted), NumPy arrays like q, k and v, on the current GPU."""
    from . import gpu

    def compute(part: Problem, q: Array, k: Array, v: Array, out: Array, lse: Array | None = None) -> None:
        gpu.forward(part, q, k, v, out, lse)

    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    _stream(problem, {"q": q, "k": k, "v": v}, results, compute)


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    dlse: Array | None = None,
) -> None:
    """Writes dq, dk and dv, NumPy arrays like the others, on the current GPU; dlse None is zero."""
    from . import gpu

    def compute(
        part: Problem, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *others: Array
    ) -> None:
        *dlse, dq, dk, dv = others
        gpu.backward(part, dout, q, k, v, out, lse, dq, dk, dv, *dlse)

    operands = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    operands |= {} if dlse is None else {"dlse": dlse}
    _stream(problem, operands, {"dq": dq, "dk": dk, "dv": dv}, compute)


def _stream(
    problem: Problem, operands: dict[str, Array], results: dict[str, Array], compute: Callable[..., None]
) -> None:
    """Calls ``compute(part, *operands, *results)`` for each piece, on its arrays on the GPU."""
    with ExitStack() as unwinding:
        lanes = [_Lane() for _ in range(STREAMS)]
        for lane in lanes:
            unwinding.callback(lane.stream.synchronize)  # also after an error: pinned memory is in use until then
        for index, piece in enumerate(pieces(problem)):
            lane = lanes[index % STREAMS]
            lane.finish()
            with lane.stream:
                device_operands = [lane.load(piece.of(name, array)) for name, array in operands.items()]
                device_results = [lane.result(piece.of(name, array)) for name, array in results.items()]
                compute(piece.problem, *device_operands, *device_results)
                lane.store()
        for lane in lanes:
            lane.finish()


class _Lane:
    """One stream with the piece that is on it."""

    def __init__(self) -> None:
        self.cupy = arrays.require_gpu('device="cuda"')
        self.stream: Any = self.cupy.cuda.Stream(non_blocking=True)
        self.pinned: list[Array] = []  # what the copies in flight read and write
        self.results: list[tuple[Array, Array]] = []  # (on the GPU, in the caller's memory)
        self.arriving: list[tuple[Array, Array]] = []  # (in pinned memory, in the caller's memory)

    def load(self, host: Array) -> Array:
        """A copy of ``host`` on the GPU, once the stream gets there."""
        staged = self._empty_pinned(host)
        staged[...] = host
        device = self.cupy.empty(host.shape, host.dtype)
        device.set(staged, stream=self.stream)
        return device

    def result(self, host: Array) -> Array:
        """An array on the GPU whose values ``store`` sends to ``host``."""
        device = self.cupy.empty(host.shape, host.dtype)
        self.results.append((device, host))
        return device

    def store(self) -> None:
        """Starts the copies of the results back."""
        for device, host in self.results:
            staged = self._empty_pinned(host)
            device.get(stream=self.stream, out=staged, blocking=False)
            self.arriving.append((staged, host))
        self.results.clear()

    def finish(self) -> None:
        """Waits for this lane's piece and hands its results over."""
        self.stream.synchronize()
        for staged, host in self.arriving:
            host[...] = staged
        self.arriving.clear()
        self.pinned.clear()

    def _empty_pinned(self, like: Array) -> Array:
        memory = self.cupy.cuda.alloc_pinned_memory(like.nbytes)
        array: Array = np.ndarray(like.shape, like.dtype, buffer=memory)
        self.pinned.append(array)
        return array
