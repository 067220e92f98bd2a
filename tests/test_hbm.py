"""Counted bytes: against loops that walk over tiles as the kernels do, the papers' formulas, and a GPU's counters."""

from collections import OrderedDict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cupyflash.compare import hbm
from cupyflash.compare.cases import Case
from cupyflash.compare.hbm import Traffic
from cupyflash.compare.waves import Blocks, stays
from cupyflash.problem import Band, Problem
from cupyflash.resources import KNOWN_GPUS
from cupyflash.tiles import TileConfig

H200 = KNOWN_GPUS["H200"]
NO_CACHE = replace(H200, l2_bytes=1)
ALL_CACHE = replace(H200, l2_bytes=1 << 60)
E = 2  # bytes of an element

BANDS = {"full": (None, None), "causal": (None, 0), "window": (-70, 10), "top left": (None, 40), "left": (-33, None)}


def problem(band="full", sq=200, sk=240, heads=4, kv_heads=2, d=64, dv=32, batch=3):
    first, last = BANDS[band]
    band = Band.of(first, last, sq, sk)
    return Problem(batch, sq, sk, heads, kv_heads, d, dv, "float16", band, 1.0, 0.0, "ieee", False)


def tiles(Br, Bc, family="mma", **more):
    return TileConfig(family, Br, Bc, 4, **more)


def visible(p):
    i, j = np.ogrid[: p.seqlen_q, : p.seqlen_k]
    return np.broadcast_to(p.band.visible(i, j), (p.seqlen_q, p.seqlen_k))


def visits(p, Br, Bc):
    """(queries, keys) of each pair of tiles between the first and the last with a visible pair, by block of queries."""
    seen = visible(p)
    found = []
    for i in range(0, p.seqlen_q, Br):
        keys = np.flatnonzero(seen[i : i + Br].any(axis=0))
        if len(keys):
            for j in range(keys[0] // Bc * Bc, keys[-1] + 1, Bc):
                found.append((min(Br, p.seqlen_q - i), min(Bc, p.seqlen_k - j)))
    return found


def visits_of_keys(p, Br, Bc):
    swapped = replace(
        p,
        seqlen_q=p.seqlen_k,
        seqlen_k=p.seqlen_q,
        band=Band(None if p.band.last is None else -p.band.last, None if p.band.first is None else -p.band.first),
    )
    return [(queries, keys) for keys, queries in visits(swapped, Bc, Br)]


def visits_of_the_same(p, Br, Bc):
    """Visits to tiles of queries of one head, but for the first of each."""
    seen = visible(p)
    visited = 0
    for i in range(0, p.seqlen_q, Br):
        keys = np.flatnonzero(seen[i : i + Br].any(axis=0))
        if len(keys):
            visited += keys[-1] // Bc - keys[0] // Bc
    return visited


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("Br", "Bc"), [(64, 64), (128, 48), (32, 16), (256, 256)])
def test_requested_bytes_are_those_of_the_loops(band, Br, Bc):
    p = problem(band)
    heads, config = p.batch * p.num_heads, tiles(Br, Bc)
    rows = heads * p.seqlen_q
    by_queries, by_keys = visits(p, Br, Bc), visits_of_keys(p, Br, Bc)
    K_and_V = E * (p.head_dim + p.head_dim_v) * p.batch * p.num_kv_heads * p.seqlen_k

    forward = hbm.count("v2", "forward", p, {"forward": config}, H200, flushed=True)
    streamed = heads * sum(keys for _, keys in by_queries) * E * (p.head_dim + p.head_dim_v)
    assert forward.requested == rows * (E * (p.head_dim + p.head_dim_v) + 4) + streamed

    v1 = hbm.count("v1", "forward", p, {"forward": config}, H200, flushed=True)
    queries = heads * sum(queries for queries, _ in by_keys)
    again = heads * Br * visits_of_the_same(p, Br, Bc)  # rows whose O, m and l are written, and read by the next visit
    out = rows * (E * p.head_dim_v + 4)
    assert v1.requested == 2 * K_and_V + queries * E * p.head_dim + again * 2 * 4 * (p.head_dim_v + 2) + out

    v1 = hbm.count("v1", "backward", p, {"backward": config}, H200, flushed=True)
    streamed = queries * (E * (p.head_dim + p.head_dim_v) + 8) + again * 2 * 4 * p.head_dim
    delta = rows * (2 * E * p.head_dim_v + 8)
    assert v1.requested == delta + 2 * K_and_V + streamed + rows * E * p.head_dim

    backward = hbm.count("v2", "backward", p, {"backward": config}, H200, flushed=True)
    visited = heads * sum(queries for queries, _ in by_keys)
    delta = rows * (2 * E * p.head_dim_v + 8)
    sums = rows * p.head_dim * 4
    assert backward.requested == (
        delta
        + 2 * K_and_V
        + visited * (E * (p.head_dim + p.head_dim_v) + 8 + 4 * p.head_dim)
        + 2 * sums
        + rows * E * p.head_dim
    )


@pytest.mark.parametrize("algorithm", ["v1", "v2", "v3"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_cache_that_holds_all_leaves_what_has_to_be(algorithm, direction):
    p = problem()
    family = "wgmma" if algorithm == "v3" else "mma"
    config = {"forward": tiles(64, 64, family), "backward": tiles(64, 128, family)}
    rows = p.batch * p.num_heads * p.seqlen_q
    Q, O, lse, sums = rows * p.head_dim * E, rows * p.head_dim_v * E, rows * 4, rows * p.head_dim * 4
    K_and_V = E * (p.head_dim + p.head_dim_v) * p.batch * p.num_kv_heads * p.seqlen_k
    kept = p.batch * p.num_heads * -(-p.seqlen_q // 64) * 64 * 4  # rows of whole tiles
    expected = {
        ("v1", "forward"): (Q + K_and_V, O + lse + kept * (p.head_dim_v + 2)),
        ("v2", "forward"): (Q + K_and_V, O + lse),
        ("v3", "forward"): (Q + K_and_V, O + lse),
        # delta; K, V, Q, dO, LSE, delta; sums that are cleared, added to, and rounded
        ("v2", "backward"): (2 * O + lse + K_and_V + Q + O + 2 * lse + 2 * sums, lse + K_and_V + 2 * sums + Q),
        # the first to come stores
        ("v3", "backward"): (2 * O + lse + K_and_V + Q + O + 2 * lse + sums, lse + K_and_V + sums + Q),
        ("v1", "backward"): (2 * O + lse + K_and_V + Q + O + 2 * lse, lse + K_and_V + Q + kept * p.head_dim),
    }[algorithm, direction]
    traffic = hbm.count(algorithm, direction, p, config, ALL_CACHE, flushed=True)
    assert (traffic.read, traffic.written) == expected


def test_without_a_cache_v1_moves_all_that_it_asks_for():
    p = problem("causal", kv_heads=4)
    traffic = hbm.count("v1", "forward", p, {"forward": tiles(64, 64)}, NO_CACHE, flushed=True)
    assert traffic.total == traffic.requested


def test_v1_grows_with_the_square_of_the_length_and_falls_with_shared_memory():
    """Theorem 2: N^2 d^2 / M elements, where a block of keys is M / (4 d) rows."""
    shared = 128 * 1024
    counts = {}
    for n in (8192, 16384):
        p = problem(sq=n, sk=n, heads=16, kv_heads=16, d=128, dv=128, batch=8)
        for part in (1, 2):
            Bc = shared // E // (4 * 128) // part
            counted = hbm.count("v1", "forward", p, {"forward": tiles(64, Bc)}, H200, flushed=True)
            # Beside the theorem: m and l, what is moved once, and the first and the last round, which are cheaper.
            assert counted.total == pytest.approx(hbm.paper_v1_bytes(p, shared // part), rel=0.03)
            counts[n, part] = counted.total
    assert counts[16384, 1] / counts[8192, 1] == pytest.approx(4, rel=0.02)
    assert counts[8192, 2] / counts[8192, 1] == pytest.approx(2, rel=0.02)


def test_v2_grows_with_the_length():
    counts = [
        hbm.count("v2", "forward", problem(sq=n, sk=n, batch=16), {"forward": tiles(64, 64)}, H200, False).total
        for n in (4096, 8192)
    ]
    assert counts[1] / counts[0] == pytest.approx(2, rel=0.001)


# ---- Waves: three multiprocessors run two blocks each (255 registers for 128 threads), and a head has four.
# Blocks 0123 4567 89AB of three heads are the waves 012345 6789AB: the second head is in both.

ROWS, WIDTH = 256, 64 * E
K_AND_V = ROWS * 2 * WIDTH
OWN = 6 * 64  # rows of a wave's blocks


def of_three_heads(direction, arch, l2_bytes, band="full", sm_count=3):
    p = problem(band, sq=ROWS, sk=ROWS, heads=3, kv_heads=3, d=64, dv=64, batch=1)
    limits = replace(H200, arch=arch, l2_bytes=l2_bytes, sm_count=sm_count)
    return hbm.count("v2", direction, p, {direction: tiles(64, 64)}, limits, flushed=True)


# K and V of two heads, Q, O and LSE. With a cache in two parts K and V twice, and half of Q.
@pytest.mark.parametrize(
    ("arch", "wave"),
    [(89, 2 * K_AND_V + OWN * (2 * WIDTH + 4)), (90, 4 * K_AND_V + OWN * (3 * WIDTH // 2 + WIDTH + 4))],
)
def test_a_head_in_two_waves_is_read_twice_if_a_wave_exceeds_the_cache(arch, wave):
    Q = 3 * ROWS * WIDTH
    assert of_three_heads("forward", arch, wave).read == Q + 3 * K_AND_V
    assert of_three_heads("forward", arch, wave - 1).read == Q + 4 * K_AND_V
    assert of_three_heads("forward", arch, wave - 1).written == of_three_heads("forward", arch, wave).written
    # Four blocks at a time are whole heads, and twelve are all there are; with a mask there are no waves.
    for sm_count in (2, 6):
        assert of_three_heads("forward", arch, wave // 4, sm_count=sm_count).read == Q + 3 * K_AND_V
    assert of_three_heads("forward", arch, 2 * K_AND_V, band="causal").read == Q + 3 * K_AND_V


def test_a_head_in_two_waves_has_its_sums_of_dq_moved_twice():
    Q_and_dO, sums = ROWS * (2 * WIDTH + 8), ROWS * 64 * 4  # and LSE and delta
    wave = 2 * (Q_and_dO + sums) + OWN * 4 * WIDTH  # K, V, dK and dV
    kept, lost = (of_three_heads("backward", 89, size) for size in (wave, wave - 1))
    assert lost.read - kept.read == Q_and_dO + sums
    assert lost.written - kept.written == sums
    assert lost.requested == kept.requested
    wave = 2 * (2 * Q_and_dO + sums) + OWN * 5 * WIDTH
    kept, lost = (of_three_heads("backward", 90, size) for size in (wave, wave - 1))
    assert lost.total - kept.total == Q_and_dO + 2 * sums


def test_a_head_larger_than_the_cache_is_read_once_per_wave():
    """132 multiprocessors run 264 blocks of 64 queries: 1,000 blocks are four waves."""
    p = problem(sq=64_000, sk=1_000_000, heads=1, kv_heads=1, d=64, dv=64, batch=1)
    traffic = hbm.count("v2", "forward", p, {"forward": tiles(64, 64)}, H200, False)
    assert traffic.read == 64_000 * 64 * E + 4 * 1_000_000 * 128 * E


def test_blocks_that_begin_apart_leave_no_wave_between_two_walks():
    """V3's backward, whose blocks begin at tiles evenly apart; cleared sums have them begin together."""
    p = problem(sq=16384, sk=16384, heads=16, kv_heads=16, d=128, dv=128, batch=1)
    config = TileConfig("wgmma", 80, 128, 12, stages=2)
    apart, together = (
        hbm.count("v3", "backward", p, {"backward": replace(config, first_stores=first)}, H200, True)
        for first in (True, False)
    )
    sums = 16 * 16384 * 128 * 4
    heads_in_two_waves = 15  # of 128 blocks, in waves of 132
    Q_and_dO = 16384 * (2 * 128 * E + 8)
    assert together.read - apart.read == sums + heads_in_two_waves * (Q_and_dO + sums // 16)
    parts = 132 * 128 * (128 + 128) * 4  # of dK and dV: 68 key tiles do not make a round, and are shared out
    assert together.written - apart.written == sums + heads_in_two_waves * sums // 16 - parts


@pytest.mark.parametrize(("per_head", "at_a_time"), [*product((1, 4, 5, 6, 128), (1, 4, 6, 10, 132))])
def test_walks_are_pairs_of_a_wave_and_a_head(per_head, at_a_time):
    heads = 40
    pairs = {(block // at_a_time, block // per_head) for block in range(heads * per_head)}
    blocks = Blocks(heads, per_head, at_a_time, True)
    assert blocks.walks == len(pairs)
    begins = range(0, per_head * at_a_time, at_a_time)  # of as many waves as begin anew with a head
    touched = [len({block // per_head for block in range(begin, begin + at_a_time)}) for begin in begins]
    assert blocks.heads_of_a_wave == pytest.approx(min(heads, sum(touched) / len(touched)))


# MB read and written in a pass, by Nsight Compute on an H200 (60 MiB of L2): bfloat16, 16 heads of 128.
V1 = {"forward": TileConfig("v1", 128, 128, 8, 2), "backward": TileConfig("v1", 64, 128, 8, 2)}
V2 = {"forward": TileConfig("mma", 128, 64, 4), "backward": TileConfig("mma", 64, 128, 8, 2)}
V3 = {"forward": TileConfig("wgmma", 192, 80, 16, 3), "backward": TileConfig("wgmma", 80, 128, 12, 2)}
MEASURED = [
    ("standard", "forward", 120, 1024, False, 9581, 7914),
    ("standard", "backward", 120, 1024, False, 24737, 16199),
    ("v1", "forward", 120, 1024, False, 12115, 7654),
    ("v1", "backward", 120, 1024, False, 17240, 8551),
    ("v2", "forward", 120, 1024, False, 1510, 498),
    ("v2", "backward", 120, 1024, False, 5050, 3460),
    ("v3", "forward", 120, 1024, False, 1510, 499),
    ("v3", "backward", 120, 1024, False, 4084, 2507),
    ("standard", "forward", 30, 4096, False, 33925, 32143),
    ("standard", "backward", 30, 4096, False, 85781, 64735),
    ("v1", "forward", 30, 4096, False, 48803, 32193),
    ("v1", "backward", 30, 4096, False, 65938, 32713),
    ("v2", "forward", 30, 4096, False, 1540, 499),
    ("v2", "backward", 30, 4096, False, 5078, 3480),
    ("v3", "forward", 30, 4096, False, 1510, 500),
    ("v3", "backward", 30, 4096, False, 4137, 2514),
    ("standard", "forward", 8, 8192, False, 35672, 34325),
    ("standard", "backward", 8, 8192, False, 89591, 68896),
    ("v1", "forward", 15, 8192, False, 97630, 64910),
    ("v1", "backward", 15, 8192, False, 130878, 64926),
    ("v2", "forward", 15, 8192, False, 1630, 500),
    ("v2", "backward", 15, 8192, False, 5200, 3550),
    ("v3", "forward", 15, 8192, False, 1513, 501),
    ("v3", "backward", 15, 8192, False, 4185, 2518),
    ("standard", "forward", 2, 16384, False, 35494, 34400),
    ("standard", "backward", 2, 16384, False, 88702, 68952),
    ("v1", "forward", 8, 16384, False, 208292, 139033),
    ("v1", "backward", 8, 16384, False, 278131, 137979),
    ("v2", "forward", 8, 16384, False, 1898, 535),
    ("v2", "backward", 8, 16384, False, 6979, 4548),
    ("v3", "forward", 8, 16384, False, 1619, 535),
    ("v3", "backward", 8, 16384, False, 4603, 2758),
    ("v2", "forward", 4, 16384, False, 999, 263),
    ("v2", "backward", 4, 16384, False, 3383, 2187),
    ("v2", "forward", 2, 16384, True, 407, 124),
    ("v2", "backward", 2, 16384, True, 1348, 870),
]


@pytest.mark.parametrize(("algorithm", "direction", "batch", "length", "causal", "read", "written"), MEASURED)
def test_counted_bytes_are_those_measured(algorithm, direction, batch, length, causal, read, written):
    p = Case(batch, length, 16, 128, causal, "bfloat16").problem(algorithm)
    config = {"standard": {}, "v1": V1, "v2": V2, "v3": V3}[algorithm]
    counted = hbm.count(algorithm, direction, p, config, H200, flushed=True)
    assert (read + written) * 1e6 == pytest.approx(counted.total, rel=0.10)


@pytest.mark.parametrize("band", BANDS)
def test_standard_attention(band):
    """S in and out of memory: one product writes it, the softmax reads it and writes P, the other product reads P."""
    p = problem(band)
    rows, heads = p.batch * p.num_heads * p.seqlen_q, p.batch * p.num_heads
    S, seen = E * p.scores, E * heads * int(visible(p).sum())
    Q, O, lse = rows * p.head_dim * E, rows * p.head_dim_v * E, rows * 4
    K, V = (E * x * p.batch * p.num_kv_heads * p.seqlen_k for x in (p.head_dim, p.head_dim_v))
    assert hbm.count("standard", "forward", p, {}, H200, flushed=True) == Traffic(
        Q + K + seen + S + V, S + S + lse + O, Q + K + S + seen + S + lse + S + V + O
    )
    backward = hbm.count("standard", "backward", p, {}, H200, flushed=True)
    assert backward.written == lse + S + S + 2 * S + Q + K + V
    assert backward.read == 2 * O + Q + K + O + V + 2 * lse + K + Q + O + 5 * S
    step = hbm.count("standard", "step", p, {}, H200, flushed=True)  # P is kept: S is not computed again
    forward = hbm.count("standard", "forward", p, {}, H200, flushed=True)
    assert step.read == forward.read + backward.read - Q - K
    assert step.written == forward.written + backward.written - 2 * S
    kept = hbm.count("standard", "forward", p, {}, ALL_CACHE, flushed=False)
    assert kept.read == Q + K + V
    assert kept.written == 2 * S + lse + O


def test_a_step_is_both_passes():
    p, config = problem(), {"forward": tiles(64, 64), "backward": tiles(64, 64)}
    one, other, both = (hbm.count("v2", x, p, config, H200, True) for x in ("forward", "backward", "step"))
    assert both == one + other


def test_parts_of_a_backward():
    """dK and dV by one kernel and dQ by another: K and V are streamed once more, and no sums lie in memory."""
    p, config = problem(), tiles(64, 64)
    apart = hbm.count("v2", "backward", p, {"backward_dkv": config, "backward_dq": config}, ALL_CACHE, True)
    together = hbm.count("v2", "backward", p, {"backward": config}, ALL_CACHE, True)
    rows = p.batch * p.num_heads * p.seqlen_q
    sums, Q, O = rows * p.head_dim * 4, rows * p.head_dim * E, rows * p.head_dim_v * E
    K_and_V = E * (p.head_dim + p.head_dim_v) * p.batch * p.num_kv_heads * p.seqlen_k
    assert apart.written == together.written - 2 * sums
    assert apart.read == together.read - 2 * sums + Q + O + 8 * rows + K_and_V


@pytest.mark.parametrize("band", BANDS)
def test_operations_are_those_of_visible_pairs(band):
    p = problem(band)
    pairs = int(visible(p).sum())
    assert hbm.visible_pairs(p) == pairs
    products = 2 * p.batch * p.num_heads * pairs
    assert hbm.flops(p, "forward") == products * (p.head_dim + p.head_dim_v)
    assert hbm.flops(p, "backward") == products * (3 * p.head_dim + 2 * p.head_dim_v)
    assert hbm.flops(p, "step") == hbm.flops(p, "forward") + hbm.flops(p, "backward")


@pytest.mark.parametrize(("lines", "slots"), [(500, 1000), (1000, 1000), (1001, 1000), (3000, 1000)])
def test_a_cache_that_replaces_what_was_used_longest_ago(lines, slots):
    """Lines that are read round after round: all are found, or none."""
    cache, hits = OrderedDict(), 0
    for round_ in range(4):
        for line in range(lines):
            if line in cache:
                hits += round_ > 0
                cache.move_to_end(line)
            elif len(cache) == slots:
                cache.popitem(last=False)
            cache[line] = None
    assert hits == 3 * lines * stays(lines, slots)
