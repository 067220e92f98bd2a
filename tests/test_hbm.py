"""Counted bytes: against loops that walk over tiles as the kernels do, and against the papers' formulas."""

from dataclasses import replace

import numpy as np
import pytest

from cupyflash.compare import hbm
from cupyflash.compare.hbm import Traffic
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


def test_without_a_cache_all_is_moved():
    p = problem("causal", kv_heads=4)
    for algorithm in ("v1", "v2"):
        traffic = hbm.count(algorithm, "forward", p, {"forward": tiles(64, 64)}, NO_CACHE, flushed=True)
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


def test_v2_of_few_heads_that_exceed_the_cache():
    """One head of 1,000,000 keys is 256 MB; the cache serves little of it."""
    p = problem(sq=1024, sk=1_000_000, heads=1, kv_heads=1, d=64, dv=64, batch=1)
    traffic = hbm.count("v2", "forward", p, {"forward": tiles(64, 64)}, H200, False)
    rounds = 1024 / 64
    assert 0.9 < traffic.read / (rounds * 1_000_000 * 128 * E) <= 1


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


@pytest.mark.parametrize("ratio", [0.5, 0.99, 1.1, 1.5, 3.0])
def test_hit_rate_is_that_of_a_cache_that_replaces_at_random(ratio):
    """A simulation of 3,000 lines that are read round after round."""
    random = np.random.default_rng(0)
    lines = 3000
    slots = round(lines / ratio)
    if slots >= lines:
        assert hbm.hit_rate(lines, slots) == 1
        return
    place, content = {}, np.full(slots, -1)
    hits = 0
    for round_ in range(40):
        for line in range(lines):
            if line in place:
                hits += round_ >= 20
                continue
            slot = int(random.integers(slots))
            place.pop(int(content[slot]), None)
            content[slot], place[line] = line, slot
    assert hits / (20 * lines) == pytest.approx(hbm.hit_rate(lines, slots), abs=0.03)
