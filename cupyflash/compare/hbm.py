"""Bytes that each algorithm moves, counted from its loops: pure functions, no GPU needed.

Two counts for each direction. *Requested* is what blocks ask of global memory, whoever serves it. *DRAM* is what passes
between the L2 cache and the GPU's memory: everything once (the compulsory part), and again what the cache has lost
before it is asked for again. That is where the algorithms differ. V1 reads and writes Q, O, m and l once per block of
keys, of one head per block, and as many heads as there are multiprocessors: their rows exceed the cache, and pass
through memory each time. V2 and V3 read K and V once per block of queries, but blocks that run at a time share them:
memory gives them once per wave of blocks at most, and once per head where the cache holds what a wave touches
(``waves.py``).

Counted this way, the bytes are those of waves that keep in step. Blocks drift apart, and what one wave loses the next
then sometimes finds: 5 to 9% less is measured where heads are read more than once.

References: Dao et al., FlashAttention, arXiv:2205.14135, theorem 2, and algorithms 0, 1, 3 and 4; Dao,
FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..problem import Problem
from ..resources import Limits, is_wide, part_floats, resident_blocks
from ..shares import deal
from ..tiles import Task, TileConfig, tile_head_dims
from .waves import Blocks, Touched, copies_for_one_reader, reads_per_head, stays

_SUM_BYTES = 4  # of an element of lse, delta, m, l, and of a sum that is kept in float32

Tiles = Mapping[Task, TileConfig]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one pass.

    Attributes:
        read, written: between the L2 cache and the GPU's memory.
        requested: read and written by blocks, from the L2 cache or through it; a reduction counts once.
    """

    read: int
    written: int
    requested: int

    @property
    def total(self) -> int:
        """What the GPU's memory moves."""
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written, self.requested + other.requested)


def count(algorithm: str, direction: str, problem: Problem, tiles: Tiles, limits: Limits, flushed: bool) -> Traffic:
    """The traffic of one pass; a step of standard attention keeps P for its backward.

    Args:
        algorithm: "standard", "v1", "v2" or "v3".
        direction: "forward" (with lse), "backward" or "step", which is both.
        tiles: of the tasks that the pass consists of; standard attention has none.
        limits: of the GPU: its L2 cache, and how many blocks run at a time.
        flushed: the cache is emptied between kernels, as a profiler does it.
    """
    if algorithm == "standard":
        kept = not flushed and stays(problem.scores * problem.itemsize, limits.l2_bytes)
        forward, backward = _standard_forward(problem, kept), _standard_backward(problem, kept)
        return {"forward": forward, "backward": backward, "step": forward + _standard_backward(problem, kept, True)}[
            direction
        ]
    if direction == "step":
        passes = (count(algorithm, one, problem, tiles, limits, flushed) for one in ("forward", "backward"))
        return sum(passes, Traffic(0, 0, 0))
    if direction == "forward":
        of = _v1_forward if algorithm == "v1" else _tiled_forward
        return of(problem, tiles["forward"], limits)
    if algorithm == "v1":
        return _v1_backward(problem, tiles["backward"], limits)
    if "backward" in tiles:
        return _rows(problem) + _tiled_backward(problem, tiles["backward"], limits)
    return (
        _rows(problem)
        + _tiled_backward_dkv(problem, tiles["backward_dkv"], limits)
        + _tiled_backward_dq(problem, tiles["backward_dq"], limits)
    )


def flops(problem: Problem, direction: str) -> int:
    """Floating-point operations of the products that are needed: two forward, five backward, of visible pairs only."""
    pairs = problem.batch * problem.num_heads * visible_pairs(problem)
    d, dv = problem.head_dim, problem.head_dim_v
    products = {"forward": d + dv, "backward": 3 * d + 2 * dv}
    return 2 * pairs * (sum(products.values()) if direction == "step" else products[direction])


def visible_pairs(problem: Problem) -> int:
    """Pairs of one head's queries and keys that the mask leaves."""
    return sum(keys for _, keys in _rows_and_keys(problem, 1, 1))


def paper_v1_bytes(problem: Problem, shared_bytes: int) -> float:
    """N^2 d^2 / M, of theorem 2 of FlashAttention for its forward, with the factors of algorithm 1.

    M is the shared memory of a block in elements. A block of keys is M / (4 d) rows; for each, N d elements of Q are
    read, and N d of O are read and written, which are float32 here as in the authors' code.
    """
    d = problem.head_dim
    M = shared_bytes / problem.itemsize
    rounds = problem.seqlen_k / (M / (4 * d))
    per_round = problem.seqlen_q * d * (problem.itemsize + 2 * _SUM_BYTES)
    return rounds * per_round * problem.batch * problem.num_heads


def _standard_forward(problem: Problem, kept: bool) -> Traffic:
    """S = Q K^T;  P = softmax(S), which reads what is visible and writes all;  O = P V."""
    Q, KV, O, S, visible, lse = _sizes(problem)
    K, V = _split(problem, KV)
    read = Q + K + (0 if kept else visible + S) + V
    return Traffic(read, S + S + lse + O, Q + K + S + visible + S + lse + S + V + O)


def _standard_backward(problem: Problem, kept: bool, has_P: bool = False) -> Traffic:
    """delta;  S = Q K^T;  dP = dO V^T;  P and dS from both;  dQ = dS K;  dK = dS^T Q;  dV = P^T dO.

    In a step it has P from the forward: then S is not computed, and P not written.
    """
    Q, KV, O, S, _, lse = _sizes(problem)
    K, V = _split(problem, KV)
    matrices_read = S + S + 2 * S + S  # by the step between, and by three products, dS twice
    read = 2 * O + (O + V) + 2 * lse + K + Q + O
    written = lse + S + S + Q + KV
    if not has_P:
        read, written = read + Q + K, written + 2 * S
    return Traffic(read if kept else read + matrices_read, written, read + matrices_read + written)


def _tiled_forward(problem: Problem, tiles: TileConfig, limits: Limits, task: Task = "forward") -> Traffic:
    """Each block of queries reads its Q once and every K and V that it sees, and writes its O and LSE once."""
    Q, KV, O, _, _, lse = _sizes(problem)
    streamed = (
        _heads(problem) * _row_bytes(problem) * sum(keys for _, keys in _rows_and_keys(problem, tiles.Br, tiles.Bc))
    )
    read = Q + min(streamed, KV * _reads_of_keys(task, problem, tiles, limits))
    return Traffic(round(read), O + lse, Q + streamed + O + lse)


def _tiled_backward_dq(problem: Problem, tiles: TileConfig, limits: Limits) -> Traffic:
    """As the forward, with dO beside Q, LSE and delta read, and dQ written."""
    Q, _, O, _, _, lse = _sizes(problem)
    forward = _tiled_forward(problem, tiles, limits, "backward_dq")
    return forward + Traffic(O + 2 * lse, Q - O - lse, 2 * lse + Q - lse)


def _tiled_backward_dkv(problem: Problem, tiles: TileConfig, limits: Limits, task: Task = "backward_dkv") -> Traffic:
    """Each block of keys reads its K and V once and every Q and dO that see it, and writes its dK and dV once."""
    Q, KV, O, _, _, lse = _sizes(problem)
    rows = Q + O + 2 * lse
    per_row = _row_bytes(problem) + 2 * _SUM_BYTES
    streamed = _heads(problem) * per_row * sum(queries for queries, _ in _keys_and_rows(problem, tiles.Br, tiles.Bc))
    read = KV + min(streamed, rows * _reads_of_queries(task, problem, tiles, limits))
    return Traffic(round(read), KV, 2 * KV + streamed)


def _tiled_backward(problem: Problem, tiles: TileConfig, limits: Limits) -> Traffic:
    """The same, which also adds to a float32 sum of dQ per pair of tiles; a last kernel rounds the sums to dQ."""
    Q = _sizes(problem)[0]
    sums = _heads(problem) * problem.seqlen_q * _dq_row_bytes(problem)
    visited = sum(queries for queries, _ in _keys_and_rows(problem, tiles.Br, tiles.Bc))
    added = _heads(problem) * visited * _dq_row_bytes(problem)
    reads = _reads_of_queries("backward", problem, tiles, limits)
    lost = max(0, min(added, sums * reads) - sums)  # read from memory and written back
    cleared, parts = sums, 0  # written before, and read by the first addition
    if _first_stores(problem, tiles):
        dealt = deal(problem, tiles, limits)
        # Of heads of which all keys are shared out. Parts of dK and dV are read right after they are written.
        heads, of_a_head = problem.batch * problem.num_kv_heads, -(-problem.seqlen_k // tiles.Bc)
        cleared = sums * ((heads * of_a_head - dealt.whole) // of_a_head) // heads
        parts = dealt.sharers * part_floats(tiles, problem) * _SUM_BYTES
    return _tiled_backward_dkv(problem, tiles, limits, "backward") + Traffic(
        round(cleared + lost + sums), round(cleared + sums + lost) + Q + parts, cleared + added + sums + Q + 2 * parts
    )


def _reads_of_keys(task: Task, problem: Problem, tiles: TileConfig, limits: Limits) -> float:
    """How often K and V are read from memory."""
    d, dv = problem.head_dim * problem.itemsize, problem.head_dim_v * problem.itemsize
    read, written = (d, dv + _SUM_BYTES) if task == "forward" else (d + dv + 2 * _SUM_BYTES, d)
    blocks = Blocks(
        heads=problem.batch * problem.num_kv_heads,
        per_head=problem.group * -(-problem.seqlen_q // tiles.Br),
        at_a_time=limits.sm_count * resident_blocks(task, tiles, problem, limits),
        in_step=not problem.is_masked,
    )
    touched = Touched(problem.seqlen_k * _row_bytes(problem), 0, tiles.Br * read, tiles.Br * written)
    return reads_per_head(blocks, touched, limits)


def _reads_of_queries(task: Task, problem: Problem, tiles: TileConfig, limits: Limits) -> float:
    """How often Q, dO, LSE and delta are read from memory, and what of dQ is summed in place is read and written."""
    rows, own = problem.group * problem.seqlen_q, tiles.Bc * _row_bytes(problem)
    blocks = Blocks(
        heads=problem.batch * problem.num_kv_heads,
        per_head=-(-problem.seqlen_k // tiles.Bc),
        at_a_time=limits.sm_count * resident_blocks(task, tiles, problem, limits),
        # kSpread of kernels_cu/include/dq_halves.cuh: where the first to come stores, none begins with another.
        in_step=not problem.is_masked and not (task == "backward" and _first_stores(problem, tiles)),
    )
    summed = _dq_row_bytes(problem) if task == "backward" else 0
    touched = Touched(rows * (_row_bytes(problem) + 2 * _SUM_BYTES), rows * summed, own, own)
    return reads_per_head(blocks, touched, limits)


def _first_stores(problem: Problem, tiles: TileConfig) -> bool:
    """Whether what comes first to a sum of dQ is stored, so that sums are not cleared before."""
    return tiles.family == "wgmma" and not is_wide("backward", tiles) and (tiles.first_stores or problem.deterministic)


def _rows(problem: Problem) -> Traffic:
    """Delta = rowsum(O * dO)."""
    _, _, O, _, _, lse = _sizes(problem)
    return Traffic(2 * O + lse, lse, 2 * O + 2 * lse)


def _v1_forward(problem: Problem, tiles: TileConfig, limits: Limits) -> Traffic:
    """One block per head. Per block of keys and of queries that see it, Q is read, and O, m and l are read and written.

    They are float32 in memory; the first visit reads none, and the last writes O and LSE in their place.
    """
    _, KV, O, _, _, lse = _sizes(problem)
    dv = tile_head_dims(problem.head_dim, problem.head_dim_v)[1]
    Q = problem.head_dim * problem.itemsize
    blocks = _heads(problem)
    moved = _keys_outside("forward", problem, tiles, limits, blocks, read_only=Q, state=(dv + 2) * _SUM_BYTES)
    # Heads of a group run at the same time, and read the same keys.
    return moved + Traffic(KV, O + lse, KV * problem.group + O + lse)


def _v1_backward(problem: Problem, tiles: TileConfig, limits: Limits) -> Traffic:
    """One block per key/value head. Likewise: Q, dO, LSE and delta are read, float32 sums of dQ are read and written.

    The first visit reads no sums, and the last writes dQ in their place; dK and dV are written once.
    """
    Q, KV, *_ = _sizes(problem)
    read_only = _row_bytes(problem) + 2 * _SUM_BYTES
    blocks = problem.batch * problem.num_kv_heads
    state = _dq_row_bytes(problem)
    moved = _keys_outside("backward", problem, tiles, limits, blocks, read_only=read_only, state=state)
    return _rows(problem) + moved + Traffic(KV, KV + Q, 2 * KV + Q)


def _keys_outside(
    task: Task, problem: Problem, tiles: TileConfig, limits: Limits, blocks: int, read_only: int, state: int
) -> Traffic:
    """What goes with the rows of queries where keys are outside.

    Args:
        blocks: that could run at a time.
        read_only, state: bytes of a row that each visit reads, and that it takes over from the visit before.
    """
    heads = _heads(problem)
    by_keys = [queries for queries, _ in _keys_and_rows(problem, tiles.Br, tiles.Bc)]
    visits = heads * sum(-(-queries // tiles.Br) for queries in by_keys)
    seen = heads * sum(keys > 0 for _, keys in _rows_and_keys(problem, tiles.Br, tiles.Bc))  # tiles of queries
    read_rows, rows = heads * sum(by_keys), min(heads * problem.seqlen_q, heads * sum(by_keys))
    taken_over = (visits - seen) * tiles.Br  # rows, padded to whole tiles as memory has them
    kept = min(taken_over, seen * tiles.Br)

    at_a_time = limits.sm_count * resident_blocks(task, tiles, problem, limits)
    running = min(blocks, at_a_time) * heads // blocks  # heads
    rows_between = running * sum(by_keys) / max(1, len(by_keys))
    if stays(rows_between * (read_only + state) * copies_for_one_reader(limits), limits.l2_bytes):
        read, written = rows * read_only, kept * state
    else:
        read, written = read_rows * read_only + taken_over * state, taken_over * state
    return Traffic(read, written, read_rows * read_only + 2 * taken_over * state)


def _rows_and_keys(problem: Problem, Br: int, Bc: int) -> list[tuple[int, int]]:
    """(first row, keys in the tiles that it visits) of each block of Br queries of a head."""
    return [
        (start, _covered(*_visible(problem, start, min(start + Br, problem.seqlen_q)), Bc, problem.seqlen_k))
        for start in range(0, problem.seqlen_q, Br)
    ]


def _keys_and_rows(problem: Problem, Br: int, Bc: int) -> list[tuple[int, int]]:
    """(queries in the tiles that it visits, first key) of each block of Bc keys of a head."""
    first, last = problem.band.first, problem.band.last
    found = []
    for start in range(0, problem.seqlen_k, Bc):
        end = min(start + Bc, problem.seqlen_k)
        begin = 0 if last is None else max(0, start - last)
        stop = problem.seqlen_q if first is None else min(problem.seqlen_q, end - first)
        found.append((_covered(begin, stop, Br, problem.seqlen_q), start))
    return found


def _visible(problem: Problem, start: int, end: int) -> tuple[int, int]:
    """The range of keys that some of the queries [start, end) see."""
    first, last = problem.band.first, problem.band.last
    return (
        0 if first is None else max(0, start + first),
        problem.seqlen_k if last is None else min(problem.seqlen_k, end + last),
    )


def _covered(begin: int, end: int, tile: int, length: int) -> int:
    """Elements of the tiles that cover [begin, end)."""
    if begin >= end:
        return 0
    return min(length, -(-end // tile) * tile) - begin // tile * tile


def _heads(problem: Problem) -> int:
    return problem.batch * problem.num_heads


def _row_bytes(problem: Problem) -> int:
    """Of a row of K and V, or of Q and dO."""
    return (problem.head_dim + problem.head_dim_v) * problem.itemsize


def _dq_row_bytes(problem: Problem) -> int:
    """Of a row of the float32 sums of dQ, which have the columns of tiles."""
    return tile_head_dims(problem.head_dim, problem.head_dim_v)[0] * _SUM_BYTES


def _sizes(problem: Problem) -> tuple[int, int, int, int, int, int]:
    """Bytes of Q (and dQ), of K and V (and dK and dV), of O (and dO), of S, of what of S is visible, of LSE."""
    e, rows = problem.itemsize, _heads(problem) * problem.seqlen_q
    return (
        rows * problem.head_dim * e,
        problem.batch * problem.num_kv_heads * problem.seqlen_k * _row_bytes(problem),
        rows * problem.head_dim_v * e,
        problem.scores * e,
        _heads(problem) * visible_pairs(problem) * e,
        rows * _SUM_BYTES,
    )


def _split(problem: Problem, KV: int) -> tuple[int, int]:
    """Bytes of K and of V."""
    K = KV * problem.head_dim // (problem.head_dim + problem.head_dim_v)
    return K, KV - K
