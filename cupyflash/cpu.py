"""FlashAttention on NumPy arrays: tiles, online softmax, worker threads; memory linear in the sequence length.

The algorithm is FlashAttention-2's (arXiv:2307.08691) in a form that suits a CPU:

* A tile's products are BLAS calls. One more column on Q and a column of ones on K bring S - m out of the product, so
  that no pass over the tile subtracts the maximum; in the backward pass such columns bring out S - LSE and dP - D.
* m follows a row's scores only when one exceeds it by more than ``SLACK``. While none does, the maximum over the whole
  tile is all there is to look at, and nothing is rescaled.
* The query heads of a group, and several key/value heads where tiles are small, are stacked into one tile.

Data that a query may not see reaches nothing: hidden scores are overwritten, not added to, and where values that are
not finite lie in a tile with hidden pairs, products are taken over the visible pairs only. No bit of a row depends on
hidden data, on other rows, or on the number of threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from . import workers
from .problem import Problem
from .workers import get_num_threads, set_num_threads

__all__ = ["backward", "forward", "get_num_threads", "set_num_threads"]

Array = NDArray[Any]

# An L2 cache. A tile of S takes half of it in float32; smaller ones leave more of the time to Python.
CACHE_BYTES = 1 << 20
TILE_ROWS = 256
TILE_KEYS = 512
# Tiles of queries that share one pass over K and V: what it costs to load and convert these is spread over them.
TILES_PER_BLOCK = 4
BACKWARD_TILES_PER_BLOCK = 2
# How far a score may exceed m, in natural log: exp(10) is far from overflow, and trained models seldom get there.
SLACK = 10.0
# Multiplications below which a call stays on its own thread: waking others would take longer.
MIN_PARALLEL_WORK = 1 << 22


def forward(problem: Problem, q: Array, k: Array, v: Array, out: Array, lse: Array | None) -> None:
    """Writes out and lse of one problem. All arrays but lse are (B, S, H, D) views of any strides.

    Args:
        problem: what to compute.
        q: (B, Sq, H, D) queries.
        k: (B, Sk, Hk, D) keys.
        v: (B, Sk, Hk, Dv) values.
        out: (B, Sq, H, Dv), written.
        lse: (B, H, Sq) natural log of the softmax denominators, written; None if not wanted.
    """
    plan = Plan.of(problem)
    threads = useful_threads(problem)
    tiles = TILES_PER_BLOCK
    blocks = plan.blocks(problem, tiles)
    while threads > 1 and tiles > 1 and len(blocks) < 4 * threads:  # so that all threads finish at about the same time
        tiles //= 2
        blocks = plan.blocks(problem, tiles)
    workers.run(lambda: Forward(problem, plan, tiles, q, k, v, out, lse), blocks, threads)


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
    """Writes the gradients of one problem; arrays as in ``forward``. Every run gives the same bits.

    Args:
        problem: what to compute.
        dout: (B, Sq, H, Dv) gradient of out.
        q: (B, Sq, H, D) queries.
        k: (B, Sk, Hk, D) keys.
        v: (B, Sk, Hk, Dv) values.
        out: (B, Sq, H, Dv) from ``forward``.
        lse: (B, H, Sq) from ``forward``.
        dq: (B, Sq, H, D), written.
        dk: (B, Sk, Hk, D), written.
        dv: (B, Sk, Hk, Dv), written.
        dlse: (B, H, Sq) gradient of lse; None is zero.
    """
    plan = Plan.of(problem)
    # dK and dV are sums over blocks of queries: how these are cut must not depend on the number of threads.
    blocks = plan.blocks(problem, BACKWARD_TILES_PER_BLOCK)
    turns = Turns(problem, plan, blocks)
    dk_sum, dv_sum = (x if x.dtype == compute_dtype(problem) else np.empty(x.shape, np.float32) for x in (dk, dv))
    dk_sum[...] = 0
    dv_sum[...] = 0
    workers.run(
        lambda: Backward(problem, plan, dout, q, k, v, out, lse, dq, dk_sum, dv_sum, dlse, turns),
        blocks,
        useful_threads(problem),
    )
    for gradient, total in ((dk, dk_sum), (dv, dv_sum)):
        if gradient is not total:
            with np.errstate(all="ignore"):  # what float16 cannot hold becomes infinite, or 0
                np.copyto(gradient, total, casting="unsafe")


def compute_dtype(problem: Problem) -> np.dtype[Any]:
    """The dtype of all tiles: 16-bit data is computed in float32."""
    return np.dtype(problem.wide_dtype)


def useful_threads(problem: Problem) -> int:
    """The number of threads to ask for."""
    work = problem.scores * (problem.head_dim + problem.head_dim_v)
    return get_num_threads() if work >= MIN_PARALLEL_WORK else 1


@dataclass(frozen=True)
class Block:
    """The unit of work: queries [first, last) in all query heads of some key/value heads of some batch entries."""

    first_batch: int
    last_batch: int
    first_head: int
    last_head: int
    first: int
    last: int

    @property
    def count(self) -> int:
        """How many key/value heads there are, over all batch entries."""
        return (self.last_batch - self.first_batch) * (self.last_head - self.first_head)

    def batches(self) -> slice:
        """The batch entries."""
        return slice(self.first_batch, self.last_batch)

    def heads(self, group: int = 1) -> slice:
        """The key/value heads, or the query heads if ``group`` of these share one."""
        return slice(self.first_head * group, self.last_head * group)


@dataclass(frozen=True)
class Plan:
    """How a problem is cut into tiles; nothing here depends on the number of threads."""

    rows: int  # queries per tile; with the heads of a group stacked, a tile has rows * group rows
    keys: int  # keys per tile
    heads: int  # key/value heads of one batch entry in a tile
    batches: int  # batch entries in a tile; more than 1 only with all their heads

    @classmethod
    def of(cls, problem: Problem) -> Plan:
        """TILE_ROWS x TILE_KEYS scores per tile, over several heads if one does not fill the cache."""
        rows = max(1, min(problem.seqlen_q, TILE_ROWS // problem.group))
        keys = max(1, min(problem.seqlen_k, TILE_KEYS))
        stacked, dims = rows * problem.group, problem.head_dim + problem.head_dim_v
        elements = stacked * keys + (stacked + keys) * dims  # of S, Q, O, K and V of one key/value head
        fitting = max(1, CACHE_BYTES // (elements * compute_dtype(problem).itemsize))
        heads = max(1, min(problem.num_kv_heads, fitting))
        return cls(rows, keys, heads, max(1, min(problem.batch, fitting // heads)))

    def blocks(self, problem: Problem, tiles: int) -> list[Block]:
        """All the work in blocks of ``tiles`` tiles of queries, the largest first."""
        blocks = [
            Block(*batches, *heads, *queries)
            for queries in cut((0, problem.seqlen_q), self.rows * tiles)
            for batches in cut((0, problem.batch), self.batches)
            for heads in cut((0, problem.num_kv_heads), self.heads)
        ]

        def size(block: Block) -> int:
            first, last = visible_keys(problem, block.first, block.last)
            return (last - first) * (block.last - block.first) * block.count

        return sorted(blocks, key=size, reverse=True)


def cut(whole: tuple[int, int], step: int) -> list[tuple[int, int]]:
    """The pieces of a range [first, last), cut at multiples of ``step``."""
    first, last = whole
    starts = range(first // step * step, last, step) if first < last else ()
    return [(max(i, first), min(i + step, last)) for i in starts]


def visible_keys(problem: Problem, first: int, last: int) -> tuple[int, int]:
    """The keys [first, last) that at least one of the queries [first, last) sees; an empty range if none does."""
    band = problem.band
    low = 0 if band.first is None else min(max(0, first + band.first), problem.seqlen_k)
    high = problem.seqlen_k if band.last is None else min(problem.seqlen_k, last + band.last)
    return low, max(low, high)


def hidden_pairs(problem: Problem, queries: tuple[int, int], keys: tuple[int, int]) -> Array | None:
    """(queries, keys) True where the pair is hidden; None where every pair is visible.

    What is visible depends on j - i only, so the rows are a window that slides over one vector of diagonals.
    """
    nearest, farthest = keys[0] - (queries[1] - 1), keys[1] - 1 - queries[0]
    band = problem.band
    if (band.first is None or band.first <= nearest) and (band.last is None or farthest <= band.last):
        return None
    visible = np.asarray(band.visible(0, np.arange(nearest, farthest + 1)))
    return sliding_window_view(~visible, keys[1] - keys[0])[::-1]


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The common part of two ranges [first, last); first >= last if there is none."""
    return max(a[0], b[0]), min(a[1], b[1])


def add_product(total: Array, A: Array, B: Array, hidden: Array | None) -> None:
    """Adds A @ B to total. Where ``hidden`` is given, B is not finite, A is 0 at hidden pairs, and only others count.

    The plain product is then taken with zeros in place of what is not finite: rows that do not see it keep every bit.
    The others get it added.
    """
    if hidden is None:
        total += A @ B
        return
    strange = ~np.isfinite(B)
    total += A @ np.where(strange, 0, B)
    for head, j in np.argwhere(strange.any(axis=-1)):
        rows, columns = np.ix_(np.flatnonzero(~hidden[head, :, j]), np.flatnonzero(strange[head, j]))
        total[head][rows, columns] += A[head, rows, j] * B[head, j, columns]


class Buffer:
    """Memory of one worker for arrays of one kind, whose shapes vary from tile to tile."""

    def __init__(self, dtype: np.dtype[Any], *largest: int) -> None:
        self._data = np.empty(math.prod(largest), dtype)

    def shaped(self, *shape: int) -> Array:
        """A contiguous array over the memory; its content is arbitrary."""
        return self._data[: math.prod(shape)].reshape(shape)


@dataclass(frozen=True)
class KeyTile:
    """K and V of keys [first, last), as (heads, keys, D); in use, K and in the backward pass V end in a 1."""

    first: int
    last: int
    K: Array
    V: Array
    K_is_finite: bool
    V_is_finite: bool

    def part(self, first: int, last: int) -> KeyTile:
        """A view of keys [first, last) of the tile."""
        inside = slice(first - self.first, last - self.first)
        return KeyTile(first, last, self.K[:, inside], self.V[:, inside], self.K_is_finite, self.V_is_finite)


class Tiles:
    """What the forward and backward workers share: how tiles are loaded, scored and masked."""

    V_columns = 0  # columns of ones on V

    def __init__(self, problem: Problem, plan: Plan, q: Array, k: Array, v: Array) -> None:
        self.problem, self.plan = problem, plan
        self.q, self.k, self.v = q, k, v
        self.softcap = problem.softcap
        self.multiplier = problem.scale / self.softcap if self.softcap else problem.scale
        self.rows = plan.rows * problem.group
        self.K_buffer = self.buffer(plan.keys, problem.head_dim + 1)
        self.V_buffer = self.buffer(plan.keys, problem.head_dim_v + self.V_columns)
        self.S_buffer = self.buffer(self.rows, plan.keys)

    def buffer(self, *shape: int) -> Buffer:
        """Memory for arrays of (heads of a block, *shape)."""
        return Buffer(compute_dtype(self.problem), self.plan.batches * self.plan.heads, *shape)

    def load_rows(self, buffer: Buffer, array: Array, block: Block, queries: tuple[int, int], columns: int) -> Array:
        """(heads, group * queries, D + columns) from (B, S, H, D): the query heads of a group are stacked."""
        loaded = array[block.batches(), slice(*queries), block.heads(self.problem.group)].swapaxes(1, 2)
        batches, heads, rows, dim = loaded.shape
        buffer.shaped(batches, heads, rows, dim + columns)[..., :dim] = loaded
        return buffer.shaped(block.count, self.problem.group * rows, dim + columns)

    def store_rows(self, array: Array, rows: Array, block: Block, queries: tuple[int, int]) -> None:
        """The way back of ``load_rows``."""
        place = array[block.batches(), slice(*queries), block.heads(self.problem.group)].swapaxes(1, 2)
        place[...] = rows.reshape(place.shape)

    def load_keys(self, buffer: Buffer, array: Array, block: Block, keys: tuple[int, int], columns: int) -> Array:
        """(heads, keys, D + columns) from (B, S, Hk, D), the further columns all 1."""
        loaded = array[block.batches(), slice(*keys), block.heads()].swapaxes(1, 2)
        batches, heads, rows, dim = loaded.shape
        tile = buffer.shaped(batches, heads, rows, dim + columns)
        tile[..., :dim] = loaded
        tile[..., dim:] = 1
        return tile.reshape(block.count, rows, dim + columns)

    def key_tiles(self, block: Block, seen: tuple[int, int]) -> Iterator[KeyTile]:
        """The tiles of the keys [first, last), one after the other in the same memory."""
        for keys in cut(seen, self.plan.keys):
            K = self.load_keys(self.K_buffer, self.k, block, keys, 1)
            V = self.load_keys(self.V_buffer, self.v, block, keys, self.V_columns)
            yield KeyTile(*keys, K, V, bool(np.isfinite(K).all()), bool(np.isfinite(V).all()))

    def query_tiles(self, block: Block) -> list[tuple[int, int]]:
        """The queries of each tile of a block."""
        return cut((block.first, block.last), self.plan.rows)

    def by_query(self, S: Array, queries: tuple[int, int]) -> Array:
        """A tile of scores as (heads, group, queries, keys)."""
        return S.reshape(S.shape[0], -1, queries[1] - queries[0], S.shape[-1])

    def stacked(self, hidden: Array | None, S: Array, queries: tuple[int, int]) -> Array:
        """Hidden pairs in the shape of the tile of scores."""
        assert hidden is not None
        return np.broadcast_to(hidden, self.by_query(S, queries).shape).reshape(S.shape)


@dataclass
class ForwardTile:
    """A tile of queries and what its rows have come to; P of the paper is exp(S - m)."""

    queries: tuple[int, int]
    keys: tuple[int, int]  # that the queries see
    Q: Array  # (heads, rows, D + 1), scaled; the last column is -m, or 0 with softcap
    O: Array  # (heads, rows, Dv), not yet divided by l
    l: Array  # (heads, rows) sum of P
    m: Array  # (heads, rows) what is subtracted from S
    begun: bool = False  # every row has seen a key with a score above -inf


class Forward(Tiles):
    """A worker of the forward pass; Algorithm 1 of the paper with several tiles of Q in flight."""

    def __init__(
        self, problem: Problem, plan: Plan, tiles: int, q: Array, k: Array, v: Array, out: Array, lse: Array | None
    ) -> None:
        super().__init__(problem, plan, q, k, v)
        self.out, self.lse = out, lse
        self.Q_buffers = [self.buffer(self.rows, problem.head_dim + 1) for _ in range(tiles)]
        self.O_buffers = [self.buffer(self.rows, problem.head_dim_v) for _ in range(tiles)]
        self.ones = np.ones(plan.keys, compute_dtype(problem))

    def __call__(self, block: Block) -> None:
        """Computes the rows of one block."""
        tiles = [self.start(i, block, queries) for i, queries in enumerate(self.query_tiles(block))]
        for keys in self.key_tiles(block, visible_keys(self.problem, block.first, block.last)):
            for tile in tiles:
                first, last = overlap((keys.first, keys.last), tile.keys)
                if first < last:
                    self.attend(tile, keys.part(first, last))
        for tile in tiles:
            self.finish(tile, block)

    def start(self, i: int, block: Block, queries: tuple[int, int]) -> ForwardTile:
        """The i-th tile of the block with nothing seen yet."""
        Q = self.load_rows(self.Q_buffers[i], self.q, block, queries, 1)
        Q[..., :-1] *= self.multiplier
        Q[..., -1] = 0
        O = self.O_buffers[i].shaped(*Q.shape[:2], self.problem.head_dim_v)
        O[...] = 0
        l, m = np.zeros(Q.shape[:2]), np.zeros(Q.shape[:2], Q.dtype)
        return ForwardTile(queries, visible_keys(self.problem, *queries), Q, O, l, m)

    def attend(self, tile: ForwardTile, keys: KeyTile) -> None:
        """One step of the online softmax: S = Q K^T - m, P = exp(S), O += P V."""
        hidden = hidden_pairs(self.problem, tile.queries, (keys.first, keys.last))
        S = self.scores(self.S_buffer, tile, keys, hidden)
        if hidden is not None or not tile.begun or not S.max() <= SLACK:
            self.move(tile, S, keys, hidden)
        P = np.exp(S, out=S)
        tile.l += P @ self.ones[: P.shape[-1]]
        tile.begun = tile.begun or not (tile.l == 0).any()
        careful = hidden is not None and not keys.V_is_finite
        add_product(tile.O, P, keys.V, self.stacked(hidden, P, tile.queries) if careful else None)

    def scores(self, buffer: Buffer, tile: ForwardTile, keys: KeyTile, hidden: Array | None) -> Array:
        """S - m, -inf where hidden."""
        S = buffer.shaped(*tile.Q.shape[:2], keys.K.shape[1])
        np.matmul(tile.Q, keys.K.swapaxes(1, 2), out=S)
        if self.softcap:
            np.tanh(S, out=S)
            S *= self.softcap
            S -= tile.m[..., None]
        if hidden is not None:
            np.copyto(self.by_query(S, tile.queries), -np.inf, where=hidden)
        return S

    def move(self, tile: ForwardTile, S: Array, keys: KeyTile, hidden: Array | None) -> None:
        """Moves m to the largest score of rows that have none yet, and of rows whose scores have risen far above it."""
        top = S.max(axis=-1)
        begun = tile.l != 0
        fresh = ~begun & (top > -np.inf)
        risen = begun & (top > SLACK)
        step = np.where(fresh | risen, top, 0)
        if not step.any():
            return
        tile.m += step
        if not self.softcap:
            np.negative(tile.m, out=tile.Q[..., -1])
        S -= step[..., None]
        if risen.any():
            decay = np.exp(-np.where(risen, step, 0))
            tile.l *= decay
            tile.O *= decay[..., None]
            # All of a row's P must belong to one m to the last bit, however large the scores are: S - (m + step) is not
            # (S - m) - step. A row that has just begun has m = 0, where they are the same.
            again = self.scores(self.buffer(self.rows, self.plan.keys), tile, keys, hidden)
            np.copyto(S, again, where=risen[..., None])

    def finish(self, tile: ForwardTile, block: Block) -> None:
        """O / l and LSE = m + log(l); rows that saw nothing give 0 and -inf."""
        blind = tile.l == 0
        tile.O /= np.where(blind, 1, tile.l).astype(tile.O.dtype)[..., None]
        np.copyto(tile.O, 0, where=blind[..., None])
        lost = np.isfinite(tile.l) & ~np.isfinite(tile.O).all(axis=-1)
        if lost.any():
            self.repeat(tile, block, lost)
        self.store_rows(self.out, tile.O, block, tile.queries)
        if self.lse is not None:
            place = self.lse[block.batches(), block.heads(self.problem.group), slice(*tile.queries)]
            place[...] = (tile.m + np.log(tile.l)).reshape(place.shape)

    def repeat(self, tile: ForwardTile, block: Block, lost: Array) -> None:
        """Computes lost rows again, now that LSE is known: O = exp(S - LSE) V.

        Their V is infinite or NaN, which they are to show, or so large that O overflowed before it was divided by l.
        """
        O = np.zeros_like(tile.O)
        for keys in self.key_tiles(block, tile.keys):
            hidden = hidden_pairs(self.problem, tile.queries, (keys.first, keys.last))
            S = self.scores(self.S_buffer, tile, keys, hidden)
            S -= np.log(tile.l).astype(S.dtype)[..., None]
            P = np.exp(S, out=S)
            add_product(O, P, keys.V, None if hidden is None else self.stacked(hidden, P, tile.queries))
        np.copyto(tile.O, O, where=lost[..., None])


@dataclass(frozen=True)
class BackwardTile:
    """A tile of queries in the backward pass."""

    queries: tuple[int, int]
    keys: tuple[int, int]  # that the queries see
    Q: Array  # (heads, rows, D + 1), scaled; the last column is -LSE, or 0 with softcap
    dO: Array  # (heads, rows, Dv + 1); the last column is -D, D = rowsum(dO * O) - dLSE
    dQ: Array  # (heads, rows, D), not yet scaled
    lse: Array  # (heads, rows)
    blind: Array | None  # (heads, rows) of rows that attend to nothing, all whose pairs are hidden; None: no such row
    Q_is_finite: bool
    dO_is_finite: bool


class Backward(Tiles):
    """A worker of the backward pass: Algorithm 2 of the paper.

    dQ of a block is its own. dK and dV are added up in the order of the blocks.
    """

    V_columns = 1

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        dq: Array,
        dk: Array,
        dv: Array,
        dlse: Array | None,
        turns: Turns,
    ) -> None:
        super().__init__(problem, plan, q, k, v)
        self.dout, self.out, self.lse, self.dlse = dout, out, lse, dlse
        self.dq, self.dk, self.dv = dq, dk, dv
        self.turns = turns
        tiles = range(BACKWARD_TILES_PER_BLOCK)
        self.Q_buffers = [self.buffer(self.rows, problem.head_dim + 1) for _ in tiles]
        self.dQ_buffers = [self.buffer(self.rows, problem.head_dim) for _ in tiles]
        self.dO_buffers = [self.buffer(self.rows, problem.head_dim_v + 1) for _ in tiles]
        self.O_buffer = self.buffer(self.rows, problem.head_dim_v)
        self.dP_buffer = self.buffer(self.rows, plan.keys)
        self.dK_buffer = self.buffer(plan.keys, problem.head_dim)
        self.dV_buffer = self.buffer(plan.keys, problem.head_dim_v)

    def __call__(self, block: Block) -> None:
        """Computes dQ of one block, and adds its share to dK and dV."""
        try:
            tiles = [self.start(i, block, queries) for i, queries in enumerate(self.query_tiles(block))]
            for keys in self.key_tiles(block, visible_keys(self.problem, block.first, block.last)):
                dK = self.dK_buffer.shaped(*keys.K.shape[:2], self.problem.head_dim)
                dV = self.dV_buffer.shaped(*keys.V.shape[:2], self.problem.head_dim_v)
                dK[...] = 0
                dV[...] = 0
                for tile in tiles:
                    first, last = overlap((keys.first, keys.last), tile.keys)
                    if first < last:
                        inside = slice(first - keys.first, last - keys.first)
                        self.attend(tile, keys.part(first, last), dK[:, inside], dV[:, inside])
                dK *= self.softcap or 1  # Q has been scaled already
                place = block.batches(), slice(keys.first, keys.last), block.heads()
                if not self.turns.wait(block, keys.first // self.plan.keys):
                    return
                for gradient, share in ((self.dk[place], dK), (self.dv[place], dV)):
                    by_head = gradient.swapaxes(1, 2)
                    by_head += share.reshape(by_head.shape)
                self.turns.done(block, keys.first // self.plan.keys)
            for tile in tiles:
                np.multiply(tile.dQ, self.problem.scale, out=tile.dQ)
                self.store_rows(self.dq, tile.dQ, block, tile.queries)
        except BaseException:
            self.turns.fail()
            raise

    def start(self, i: int, block: Block, queries: tuple[int, int]) -> BackwardTile:
        """The i-th tile of the block, with D."""
        Q = self.load_rows(self.Q_buffers[i], self.q, block, queries, 1)
        Q[..., :-1] *= self.multiplier
        dO = self.load_rows(self.dO_buffers[i], self.dout, block, queries, 1)
        O = self.load_rows(self.O_buffer, self.out, block, queries, 0)
        dQ = self.dQ_buffers[i].shaped(*Q.shape[:2], self.problem.head_dim)
        dQ[...] = 0

        place = block.batches(), block.heads(self.problem.group), slice(*queries)
        lse = self.lse[place].reshape(Q.shape[:2])
        D = (dO[..., :-1] * O).sum(axis=-1)
        if self.dlse is not None:
            D -= self.dlse[place].reshape(Q.shape[:2])
        np.negative(D, out=dO[..., -1])
        Q[..., -1] = 0 if self.softcap else -lse

        blind = np.isneginf(lse)
        return BackwardTile(
            queries,
            visible_keys(self.problem, *queries),
            Q,
            dO,
            dQ,
            lse,
            blind if blind.any() else None,
            bool(np.isfinite(Q).all()),
            bool(np.isfinite(dO).all()),
        )

    def attend(self, tile: BackwardTile, keys: KeyTile, dK: Array, dV: Array) -> None:
        """A tile's share of the gradients: dV += P^T dO, dS = P (dP - D), dQ += dS K, dK += dS^T Q."""
        hidden = hidden_pairs(self.problem, tile.queries, (keys.first, keys.last))
        S = self.S_buffer.shaped(*tile.Q.shape[:2], keys.K.shape[1])
        np.matmul(tile.Q, keys.K.swapaxes(1, 2), out=S)
        slope = None  # of the soft cap: d(cap tanh(S / cap)) / dS
        if self.softcap:
            np.tanh(S, out=S)
            slope = 1 - S * S
            S *= self.softcap
            S -= tile.lse[..., None]
        if tile.blind is not None:
            blind = self.by_query(tile.blind[..., None], tile.queries)
            hidden = blind if hidden is None else hidden | blind
        if hidden is not None:
            np.copyto(self.by_query(S, tile.queries), -np.inf, where=hidden)
        if not S.max() <= 0:
            np.minimum(S, 0, out=S)  # P is at most 1 even where rounding of a huge S says otherwise
        P = np.exp(S, out=S)

        dP = self.dP_buffer.shaped(*P.shape)
        np.matmul(tile.dO, keys.V.swapaxes(1, 2), out=dP)
        dS = np.multiply(P, dP, out=dP)
        if slope is not None:
            dS *= slope
        careful = None
        if hidden is not None:
            np.copyto(self.by_query(dS, tile.queries), 0, where=hidden)
            if not (keys.K_is_finite and tile.Q_is_finite and tile.dO_is_finite):
                careful = self.stacked(hidden, S, tile.queries)
        transposed = None if careful is None else careful.swapaxes(1, 2)
        add_product(dV, P.swapaxes(1, 2), tile.dO[..., :-1], transposed)
        add_product(tile.dQ, dS, keys.K[..., :-1], careful)
        add_product(dK, dS.swapaxes(1, 2), tile.Q[..., :-1], transposed)


class Turns:
    """Who adds to dK and dV when: the blocks of a key/value head in their order, one tile of keys after the other.

    The queue hands out blocks in this order too, so whom a block waits for has started. Nobody waits for long: blocks
    that run at the same time walk through the keys side by side.
    """

    def __init__(self, problem: Problem, plan: Plan, blocks: list[Block]) -> None:
        self._changed = threading.Condition()
        self._failed = False
        tiles = -(-problem.seqlen_k // plan.keys)
        # By first batch entry and head: how many blocks have added to each tile of keys.
        self._done = {(block.first_batch, block.first_head): [0] * tiles for block in blocks}
        # By block: how many blocks come before it at each tile of keys, from its first one on.
        self._before: dict[Block, tuple[int, Array]] = {}
        before = {head: np.zeros(tiles, np.int32) for head in self._done}
        for block in blocks:
            first, last = visible_keys(problem, block.first, block.last)
            seen = slice(first // plan.keys, -(-last // plan.keys) if first < last else 0)
            counts = before[block.first_batch, block.first_head][seen]
            self._before[block] = seen.start, counts.copy()
            counts += 1

    def wait(self, block: Block, tile: int) -> bool:
        """Waits until all earlier blocks that see the tile have added to it; False if a worker failed instead."""
        done = self._done[block.first_batch, block.first_head]
        start, counts = self._before[block]
        with self._changed:
            self._changed.wait_for(lambda: self._failed or done[tile] == counts[tile - start])
            return not self._failed

    def done(self, block: Block, tile: int) -> None:
        """The block has added what it had to."""
        with self._changed:
            self._done[block.first_batch, block.first_head][tile] += 1
            self._changed.notify_all()

    def fail(self) -> None:
        """Nobody need wait any more: a worker has raised an error."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()
