"""cupyflash trace: kernels ask for what their algorithms say, as buffers allow; the clock keeps its rules."""

import collections
import doctest
import functools
import itertools
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from cupyflash import trace
from cupyflash.cli import main
from cupyflash.cli.trace import algorithms
from cupyflash.resources import KNOWN_GPUS
from cupyflash.runtime import emulated
from cupyflash.tiles import TileConfig
from cupyflash.trace import Rates, Recording, Request, draw, replay
from cupyflash.trace.draw import label

needs_compiler = pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++")
runs_kernels = [pytest.mark.emulated, needs_compiler]
kernels = pytest.mark.parametrize("algorithm", [pytest.param(name, marks=runs_kernels) for name in algorithms()])
D = 64


@functools.cache
def schedule(algorithm, seqlen_q=256, seqlen_k=512, causal=False, task="forward"):
    return replay(trace.record(trace.small_problem(algorithm, seqlen_q, seqlen_k, D, causal=causal), task))


def named(spans, kind, name=None):
    return [span for span in spans if span.kind == kind and name in (None, label(span))]


def computing(schedule):
    """The spans of each warp that multiplies."""
    return [spans for spans in schedule.warps if named(spans, "product")]


# What kernels ask for.


@kernels
def test_products_are_those_of_the_tile_loops(algorithm):
    """S = Q K^T and O += P V once per query and key tile, in instructions of m16n8k16 and m64nNk16."""
    traced = schedule(algorithm)
    config = traced.recording.config
    key_tiles, query_tiles = 512 // config.Bc, -(-256 // config.Br)
    for warp, spans in enumerate(computing(traced)):
        if algorithm == "v3":  # a warpgroup has 64 rows of a tile, and the last tile may have fewer warpgroups' rows
            S, O = D // 16, config.Bc // 16
            visits = sum(tile * config.Br + warp // 4 * 64 < 256 for tile in range(query_tiles))
        else:
            fragments = config.Br // config.warps // 16
            S = fragments * config.Bc // 8 * D // 16
            O = fragments * D // 8 * config.Bc // 16
            visits = query_tiles if algorithm == "v1" else 1  # the block's tiles of queries: all, or its own
        assert [span.count for span in named(spans, "product", "S")] == [S] * key_tiles * visits
        assert [span.count for span in named(spans, "product", "O")] == [O] * key_tiles * visits


@kernels
def test_weights_are_one_exponential_each(algorithm):
    """A lane has Br Bc / threads weights of a tile; beside them only its two rows' rescaling per 16 rows."""
    traced = schedule(algorithm)
    config = traced.recording.config
    multiplying = len(computing(traced))
    weights = config.Br * config.Bc // (32 * multiplying)
    rows = 2 * config.Br // multiplying // 16
    for spans in computing(traced):
        assert {span.count for span in named(spans, "exp")} <= {weights, weights + rows}


@kernels
def test_a_warp_follows_the_algorithm(algorithm):
    """Scores, weights, output; in v3 the next scores are asked for before the output."""
    for spans in computing(schedule(algorithm)):
        work = "".join({"product": label(s), "exp": "e"}[s.kind] for s in spans if s.kind in ("product", "exp"))
        assert re.fullmatch(r"(Se(SOe)*O)+" if algorithm == "v3" else r"(SeO)+", work)


@kernels
def test_products_begin_when_their_operands_have_landed(algorithm):
    """One after the other, each tile of keys is used once; in v1 by all tiles of queries."""
    traced = schedule(algorithm)
    uses = 256 // traced.recording.config.Br if algorithm == "v1" else 1
    for name, operand in (("S", "K"), ("O", "V")):
        loads = [landed for warp in traced.warps if (landed := named(warp, "load", operand))]
        assert len(loads) == (1 if algorithm == "v3" else traced.recording.config.warps)
        for spans in computing(traced):
            for n, product in enumerate(named(spans, "product", name)):
                assert max(warp[n // uses].end for warp in loads) <= product.asked


@pytest.mark.emulated
@needs_compiler
def test_the_producer_runs_ahead_as_far_as_there_are_buffers():
    """K_{n+1} is asked for before the products of tile n end, and K_{n+2} only after S_n: there are two buffers."""
    traced = schedule("v3", seqlen_q=192)
    assert traced.recording.config.stages == 2
    (loads,) = [named(spans, "load", "K") for spans in traced.warps if named(spans, "load", "K")]
    scores = [named(spans, "product", "S") for spans in computing(traced)]
    outputs = [named(spans, "product", "O") for spans in computing(traced)]
    assert len(loads) == 512 // traced.recording.config.Bc
    for n in range(len(loads) - 1):
        assert loads[n + 1].asked < min(warp[n].end for warp in outputs)
    for n in range(len(loads) - 2):
        assert loads[n + 2].asked >= max(warp[n].end for warp in scores)


@pytest.mark.emulated
@needs_compiler
def test_consumers_take_turns_and_the_tensor_cores_hardly_rest():
    three = schedule("v3", seqlen_q=192)
    at_once = replay(three.recording, Rates(bytes=1 << 30, latency=0))  # all operands are there from the beginning
    first = [named(at_once.warps[warp], "product")[0].asked for warp in (0, 4, 8)]
    assert min(later - earlier for earlier, later in itertools.pairwise(first)) >= D // 16  # requests of a turn
    asked = sorted((span.asked, warp // 4) for warp in (0, 4, 8) for span in named(three.warps[warp], "product"))
    turns = [warpgroup for warpgroup, _ in itertools.groupby(warpgroup for _, warpgroup in asked)]
    assert turns == [0, 1, 2] * (512 // three.recording.config.Bc + 1)  # one for the first S, one for the last O
    assert trace.busy(three, "product") > trace.busy(schedule("v2", seqlen_q=128), "product")


@kernels
def test_a_mask_leaves_out_tiles(algorithm):
    """v2's first block has the last query tile, which sees all keys; its last block has the first."""
    problem = trace.small_problem(algorithm, 512, 512, D, causal=True)
    whole = schedule(algorithm, 512, 512)
    masked = replay(trace.record(problem))
    if algorithm == "v2":
        masked = replay(trace.record(problem, block=masked.recording.grid - 1))
    products = [sum(s.count for w in computing(t) for s in named(w, "product")) for t in (whole, masked)]
    assert 0 < products[1] < products[0]


@kernels
def test_backward_has_its_five_products(algorithm):
    traced = schedule(algorithm, 128, 256, task="backward")
    made = {label(span) for spans in computing(traced) for span in named(spans, "product")}
    assert made == {"S", "dP", "dV", "dK", "dQ"}
    stored = {label(span) for spans in traced.warps for span in named(spans, "store")}
    assert {"dQ"} < stored


@kernels
def test_every_span_names_a_line_of_the_kernel(algorithm):
    traced = schedule(algorithm)
    for spans in traced.warps:
        for span in spans:
            assert span.places
            assert 0 <= span.asked <= span.start <= span.end <= traced.end


@pytest.mark.emulated
@needs_compiler
def test_a_recording_can_be_repeated():
    problem = trace.small_problem("v3", 192, 256, D)
    first, second = (
        [[(r.what, r.count, r.places) for r in warp] for warp in trace.record(problem).warps] for _ in range(2)
    )
    assert first == second


# The clock, by recordings of which the answer is plain.

RATES = Rates(operations=1024, exponentials=4, bytes=64, latency=100)


def play(*warps):
    requests = tuple(tuple(Request(*request) for request in warp) for warp in warps)
    return replay(Recording(None, TileConfig("wgmma", 64, 64, 4), 1, 0, requests), RATES)


def times(spans):
    return [(span.kind, span.asked, span.start, span.end) for span in spans]


def test_exponentials_of_one_warp():
    """32 lanes, 4 per step: 8 steps each."""
    (spans,) = play([("exp2", 0, 0, 10)]).warps
    assert times(spans) == [("exp", 0, 0, 80)]


def test_warps_of_one_part_share_its_units_and_others_do_not():
    """Warps 0 and 4 are on part 0, warp 1 on part 1."""
    work = [("exp2", 0, 0, 64)]
    traced = play(work, work, [], [], work)
    assert traced.warps[1][0].end == 512
    assert {traced.warps[0][0].end, traced.warps[4][0].end} == {1024, 1024 - 64}
    assert traced.worked["exp"] == 3 * 512


def test_synchronous_products():
    """m16n8k16 has 4,096 operations: 4 steps."""
    (spans,) = play([("mma", 16, 0, 3), ("exp2", 0, 0, 1)]).warps
    assert times(spans) == [("product", 0, 0, 12), ("exp", 12, 12, 20)]


def test_asynchronous_products_queue_and_are_waited_for_by_groups():
    """16 of 64 rows, 128 columns, depth 16: 65,536 operations, 64 steps, one after the other on the part's core."""
    product = ("wgmma", 128, 0, 1)
    commit = ("wgmma commit", 0, 0, 1)
    (spans,) = play(
        [product, commit, product, commit, ("wgmma wait", 1, 0, 1), ("exp2", 0, 0, 1), ("wgmma wait", 0, 0, 1)]
    ).warps
    assert times(spans) == [
        ("product", 0, 0, 64),
        ("product", 1, 64, 128),
        ("wait", 2, 2, 64),
        ("exp", 64, 64, 72),
        ("wait", 72, 72, 128),
    ]


def test_copies_land_after_the_latency_and_share_the_way():
    """32 lanes of 16 bytes are 512 bytes: 8 steps on the way."""
    copy, commit = ("copy", 16, 0, 1), ("copy commit", 0, 0, 1)
    (spans,) = play([copy, commit, copy, commit, ("copy wait", 1, 0, 1), ("copy wait", 0, 0, 1)]).warps
    assert times(spans) == [("load", 0, 0, 108), ("load", 1, 1, 116), ("wait", 2, 2, 108), ("wait", 108, 108, 116)]


def test_a_load_completes_its_barrier_and_the_barrier_begins_anew():
    """640 bytes, 10 steps; the second phase is waited for by the other parity, and needs a second load."""
    barrier, arrive, load = ("barrier", 1, 77, 1), ("arrive", 640, 77, 1), ("load", 640, 77, 1)
    producer = [barrier, ("block barrier", 0, 0, 1), arrive, load, ("wait", 0, 77, 1), arrive, load]
    consumer = [("block barrier", 0, 0, 1), ("wait", 0, 77, 1), ("exp2", 0, 0, 1), ("wait", 1, 77, 1)]
    loads, waits = play(producer, consumer).warps
    assert times(loads) == [("load", 0, 0, 110), ("wait", 1, 1, 110), ("load", 110, 110, 220)]
    assert times(waits) == [("wait", 0, 0, 110), ("exp", 110, 110, 118), ("wait", 118, 118, 220)]


def test_named_barriers_count_threads_and_arrivals_do_not_wait():
    first = [("exp2", 0, 0, 8), ("named arrive", 1, 64, 1), ("exp2", 0, 0, 1)]
    second = [("named sync", 1, 64, 1), ("exp2", 0, 0, 1)]
    one, other = play(first, second).warps
    assert times(one) == [("exp", 0, 0, 64), ("exp", 64, 64, 72)]
    assert times(other) == [("wait", 0, 0, 64), ("exp", 64, 64, 72)]


def test_a_block_barrier_waits_for_all_that_have_not_ended():
    one, other, _ = play(
        [("exp2", 0, 0, 1), ("block barrier", 0, 0, 2)],
        [("block barrier", 0, 0, 1), ("exp2", 0, 0, 2), ("block barrier", 0, 0, 1)],
        [("exp2", 0, 0, 4)],  # ends at 32 and is no longer waited for
    ).warps
    assert times(one) == [("exp", 0, 0, 8), ("wait", 8, 8, 32), ("wait", 32, 32, 48)]
    assert times(other) == [("wait", 0, 0, 32), ("exp", 32, 32, 48)]


def test_plain_loads_are_waited_for_where_their_values_may_be_used():
    """512 bytes take 8 steps and the latency of 100; a product of 4 steps does not wait, an exponential does."""
    (spans,) = play([("read", 16, 0, 1), ("mma", 16, 0, 1), ("exp2", 0, 0, 1)]).warps
    assert times(spans) == [("load", 0, 0, 108), ("product", 1, 1, 5), ("wait", 5, 5, 108), ("exp", 108, 108, 116)]


def test_stores_drain_behind_the_warp():
    """32 lanes of 16 bytes, 8 steps; the warp is free after one."""
    (spans,) = play([("write", 16, 0, 1), ("write", 16, 0, 1), ("exp2", 0, 0, 1)]).warps
    assert times(spans) == [("store", 0, 0, 8), ("store", 1, 1, 16), ("exp", 2, 2, 10)]


def test_a_recording_that_is_not_whole_is_refused():
    with pytest.raises(RuntimeError, match=re.escape("warp 0 waits without end: 'wait'")):
        play([("barrier", 1, 77, 1), ("wait", 0, 77, 1)])


# The picture and the page.

NAMESPACE = "{http://www.w3.org/2000/svg}"


@kernels
def test_loads_are_drawn_once_per_tile(algorithm):
    """Though in v2 four warps bring a part of each; in v3 each warpgroup has its own tile of Q."""
    traced = schedule(algorithm, seqlen_q=192 if algorithm == "v3" else 256)
    loads = draw.lanes(traced)[0]
    drawn = collections.Counter(bar.label for track in loads.tracks for bar in track)
    key_tiles, query_tiles = 512 // traced.recording.config.Bc, 256 // traced.recording.config.Br
    keys = {"K": key_tiles, "V": key_tiles}
    if algorithm == "v1":  # O, m and l come again with every visit but the first
        again = (key_tiles - 1) * query_tiles
        assert drawn == keys | {"Q": key_tiles * query_tiles, "O": again, "m": again, "l": again}
    else:
        assert drawn == keys | {"Q": 3 if algorithm == "v3" else 1}


@kernels
@pytest.mark.parametrize("task", ["forward", "backward"])
def test_bars_lie_in_the_chart_and_apart(algorithm, task):
    traced = schedule(algorithm, 128, 256, task=task) if task == "backward" else schedule(algorithm)
    drawing = ElementTree.fromstring(draw.svg(traced, "title"))
    width, height = map(float, drawing.get("viewBox").split()[2:])
    rects = drawing.findall(f".//{NAMESPACE}rect")
    assert {kind for kind in draw.KINDS} <= {rect.get("class") for rect in rects}
    for rect in rects:
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert x >= 0
        assert x + float(rect.get("width")) <= width + 0.01
        assert y + float(rect.get("height")) <= height
    for lane in draw.lanes(traced):
        for track in lane.tracks:
            work = sorted((b.span for b in track if b.span.kind in ("load", "product", "exp")), key=lambda s: s.start)
            assert all(a.end <= b.start for a, b in itertools.pairwise(work)), lane.name
    spans = sum(len(track) for lane in draw.lanes(traced) for track in (*lane.tracks, lane.stores))
    assert len(drawing.findall(f".//{NAMESPACE}title")) == spans


def test_bars_are_as_long_as_their_steps():
    """One warp, which multiplies for 36 steps and exponentiates for 64, on one of four parts."""
    asked = (Request("mma", 16, 0, 9), Request("exp2", 0, 0, 8))
    recording = Recording(SimpleNamespace(file="kernel.cu"), TileConfig("mma", 64, 64, 4), 1, 0, (asked,))
    drawing = ElementTree.fromstring(draw.svg(replay(recording, RATES), "title"))
    track = drawing.find(f".//{NAMESPACE}rect[@class='track']")
    left, width = float(track.get("x")), float(track.get("width"))
    bars = [group.find(f"{NAMESPACE}rect") for group in drawing.findall(f".//{NAMESPACE}g[@class='span']")]
    ends = {bar.get("class"): (float(bar.get("x")), float(bar.get("x")) + float(bar.get("width"))) for bar in bars}
    gap = 0.7  # between bars
    assert ends["product"] == pytest.approx((left, left + 0.36 * width), abs=gap)
    assert ends["exp"] == pytest.approx((left + 0.36 * width, left + width), abs=gap)
    texts = [text.text for text in drawing.findall(f".//{NAMESPACE}text")]
    assert [text for text in texts if text.endswith("%")] == ["9%", "16%"]


class Nesting(HTMLParser):
    """Fails where tags do not close in the order in which they were opened; collects what would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.tags = [], [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.emulated
@needs_compiler
def test_page_is_well_formed_and_needs_nothing_else(tmp_path, capsys):
    out = tmp_path / "trace.html"
    assert main(["trace", "--seqlen", "256", "--seqlen-k", "512", "--head-dim", str(D), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    text = out.read_text()
    page = Nesting()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.fetched == []
    assert "script" not in page.tags
    assert not re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "prefers-color-scheme:dark" in text
    assert len(re.findall(r"<figure><svg", text)) == len(algorithms())
    for name in ("FlashAttention-2: forward_mma", "FlashAttention-3: forward_wgmma"):
        assert name in text


@pytest.mark.emulated
@needs_compiler
def test_the_docstrings_examples():
    results = doctest.testmod(trace)
    assert results.attempted
    assert not results.failed


@pytest.mark.emulated
@needs_compiler
def test_a_picture_alone(tmp_path):
    out = tmp_path / "trace.svg"
    arguments = ["--algorithm", "v2", "--seqlen", "128", "--seqlen-k", "256", "--head-dim", str(D), "--causal"]
    assert main(["trace", *arguments, "--out", str(out)]) == 0
    assert ElementTree.parse(out).getroot().tag == f"{NAMESPACE}svg"
    assert "masked" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm", "v9"], "invalid choice: 'v9'"),
        (["--seqlen", "0"], "a sequence of 0 rows; a trace has 1 to 2048"),
        (["--seqlen-k", "4096"], "a sequence of 4096 rows"),
        (["--head-dim", "300"], "head_dim 300; the GPU computes up to 256"),
        (["--head-dim", "0"], "head_dim"),
        (["--out", "trace.svg"], "name one --algorithm"),
        (["--algorithm", "v3", "--head-dim", "60"], "strides above 0"),
        (["--algorithm", "v2", "--block", "99"], "block is 99; the grid has blocks 0 to 3"),
        (["--algorithm", "v2", "--block", "-1"], "block is -1"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments, message, capsys, tmp_path, monkeypatch):
    if not emulated.available():
        pytest.skip("the emulated device needs g++")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["trace", *arguments])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_one_sentence_says_so(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit):
        main(["trace"])
    assert capsys.readouterr().err.count("g++, which was not found in PATH") == 1


def test_rates_are_the_proportions_of_an_h100():
    """989.4 TFLOP/s of float16 (its data sheet) on 132 multiprocessors at 1,830 MHz, the clock that belongs to it."""
    operations_per_cycle = 989.4e12 / (KNOWN_GPUS["H100"].sm_count * 1.83e9)
    assert 4 * Rates().operations == pytest.approx(operations_per_cycle, rel=1e-3)
