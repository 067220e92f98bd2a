"""``cupyflash compare``: the command on the CPU from end to end, and what of the GPU's side needs no GPU."""

import contextlib
import csv
import functools
import html
import math
import re
import types
import xml.etree.ElementTree as ElementTree

import pytest

from cupyflash.cli import main
from cupyflash.compare import accuracy, charts, cpu, figures, hbm, ncu, report, table, views
from cupyflash.compare.cases import ALGORITHMS, DIRECTIONS, Case, cases, most_telling_first
from cupyflash.compare.devices import PEAKS, peak
from cupyflash.compare.hbm import Traffic
from cupyflash.compare.session import Clock, Prepared, compare
from cupyflash.compare.table import Row
from cupyflash.resources import KNOWN_GPUS

NOW = 0.0


class ScriptedBench:
    """A device on which every pass takes a known time; its clock is the sum of them."""

    name = "NVIDIA H200"
    dtype = "bfloat16"
    made = "made for a test"
    algorithms = ALGORITHMS
    seconds_of_counters = 0.0
    seconds_of = {"standard": 8.0, "v1": 4.0, "v2": 2.0, "v3": 1.0}  # noqa: RUF012  # never changed

    def __init__(self, missing=(), noise=0.0):
        self.missing, self.noise = missing, noise
        self.now, self.samples, self.prepared, self.notes = 0.0, [], [], []

    def clock(self):
        return self.now

    def compile(self, cases):
        self.now += 1
        return 7

    def roofs(self):
        return 4e12, 7e14

    def prepare(self, case, algorithms):
        self.prepared.append(case)
        keys = [(a, d) for a in algorithms for d in DIRECTIONS if a not in self.missing]
        reasons = {(a, d): "is not here" for a in self.missing for d in DIRECTIONS}
        calls = {key: types.SimpleNamespace(key=key, case=case) for key in keys}
        return Prepared(calls, dict.fromkeys(keys, 1 << 20), reasons)

    def seconds(self, call):
        algorithm, direction = call.key
        self.samples.append((call.case, call.key))
        seconds = self.seconds_of[algorithm] * {"forward": 1, "backward": 2, "step": 3}[direction]
        seconds *= 1 + self.noise * (len(self.samples) % 3)
        self.now += seconds
        return seconds

    def counted(self, case, key):
        return Traffic(3 << 30, 1 << 30, 9 << 30), "mma Br=64"

    def errors(self, case):
        return {(a, d): 1e-3 for a in self.algorithms for d in DIRECTIONS[:2] if a not in self.missing}

    def counters(self, cases):
        def read(case):
            self.now += self.seconds_of_counters
            measured, counted = Traffic(300, 100, 1000), Traffic(330, 110, 900)
            return [(case, (algorithm, "forward"), measured, counted) for algorithm in ("v1", "v2")]

        return [functools.partial(read, case) for case in ncu.chosen(cases)]


def scripted(lengths=(1024, 2048), rounds=3, seconds=None, **options):
    bench = ScriptedBench(**options)
    chosen = cases(lengths, (128,), "bfloat16", 4096, 2048)
    said = []
    return bench, compare(bench, chosen, rounds, seconds, said.append, now=bench.clock), said


# ---- the course of a comparison


def test_every_pass_is_sampled_as_often_in_turns():
    bench, rows, said = scripted(rounds=4)
    timed = [row for row in rows if row.seconds]
    assert len(timed) == 2 * 2 * 4 * 3  # lengths, masks, algorithms, directions
    assert {row.samples for row in timed} == {4}
    per_case = 4 * 4 * 3
    for number, case in enumerate(bench.prepared):
        of_case = bench.samples[number * per_case : (number + 1) * per_case]
        assert {c for c, _ in of_case} == {case}
        rounds = [[key for _, key in of_case[n : n + 12]] for n in range(0, per_case, 12)]
        assert all(len(set(keys)) == 12 for keys in rounds)  # each once per round
        assert len({tuple(keys) for keys in rounds}) > 1  # in another order
    assert "7 kernels are compiled" in said
    assert any("B=4 S=1,024 H=16 D=128, causal: standard 2.4e+04 ms" in line for line in said)


def test_rows_hold_medians_spreads_and_bytes():
    _, rows, _ = scripted(rounds=3, noise=0.1)
    row = next(row for row in rows if (row.algorithm, row.direction) == ("v2", "forward") and row.seconds)
    assert row.seconds in [pytest.approx(2 * x) for x in (1.0, 1.1, 1.2)]
    assert row.flops == 4 * 4 * 16 * 1024 * 1024 * 128
    assert row.rate == row.flops / row.seconds
    assert row.counted == Traffic(3 << 30, 1 << 30, 9 << 30)
    assert row.peak_bytes == 1 << 20
    spreads = [row.spread for row in rows if row.spread is not None]
    assert 0 < max(spreads) < 0.2
    assert {row.error for row in rows if row.seqlen == 512} == {1e-3}
    measured = [row for row in rows if row.measured]
    assert {(row.algorithm, row.measured, row.counted) for row in measured} == {
        ("v1", Traffic(300, 100, 1000), Traffic(330, 110, 900)),
        ("v2", Traffic(300, 100, 1000), Traffic(330, 110, 900)),
    }


def test_when_the_time_is_over_each_length_has_had_its_share():
    """A round of a problem takes 90 seconds; there is time for some rounds of both lengths, not for a hundred."""
    bench, rows, _ = scripted(rounds=100, seconds=1600)
    samples = {row.seqlen: row.samples for row in rows if row.samples}
    assert samples.keys() == {1024, 2048}
    assert all(2 <= count <= 8 for count in samples.values())
    assert bench.now < 2000
    bench, rows, said = scripted(rounds=100, seconds=100)
    assert {row.seqlen for row in rows if row.samples} == {1024}
    assert {row.samples for row in rows if row.samples} == {2}  # the least that says something of noise
    assert said[-1] == "the time is over: 1 of 2 lengths and head dims were not reached"


def test_counters_get_a_third_of_the_time_and_then_what_is_left():
    """Those of a length take 100 seconds, a round of a problem 90."""

    class Slow(ScriptedBench):
        seconds_of_counters = 100.0

    chosen = cases((1024, 2048, 4096), (128,), "bfloat16", 4096, 2048)
    for seconds, before, lengths in ((600, 2, 2), (1300, 3, 3), (None, 3, 3), (20, 1, 1), (1000, 3, 3), (250, 1, 1)):
        bench = Slow()
        rows = compare(bench, chosen, 2, seconds, lambda _: None, now=bench.clock)
        first_time = next((n for n, row in enumerate(rows) if row.seconds), len(rows))
        assert len({row.seqlen for row in rows[:first_time] if row.measured}) == before, seconds
        assert len({row.seqlen for row in rows if row.measured}) == lengths, seconds
        assert bench.notes == ([] if lengths == 3 else ["There was not time enough to read all counters."]), seconds

    bench = Slow()
    bench.seconds_of_counters = 300.0  # the third length does not begin before the times
    rows = compare(bench, chosen, 2, 1750, lambda _: None, now=bench.clock)
    order = [("counters" if row.measured else "time", row.seqlen) for row in rows if row.measured or row.seconds]
    order = list(dict.fromkeys(order))
    assert order == [
        ("counters", 1024), ("counters", 2048), ("time", 1024), ("time", 2048), ("time", 4096), ("counters", 4096)
    ]  # fmt: skip
    assert bench.notes == []


def test_what_tells_most_comes_first():
    chosen = most_telling_first(cases((1024, 2048, 4096, 8192, 16384), (64, 128, 256), "bfloat16", 16384, 2048))
    order = list(dict.fromkeys((case.head_dim, case.seqlen) for case in chosen))
    lengths = [4096, 16384, 1024, 2048, 8192]
    assert order == [(head_dim, length) for head_dim in (128, 64, 256) for length in lengths]
    assert [case.causal for case in chosen] == [False, True] * 15
    assert [case.seqlen for case in ncu.chosen(chosen)] == lengths


class Failing(ScriptedBench):
    """V1's backward does not fit, standard attention's is broken from its third sample on, and so is one problem."""

    def prepare(self, case, algorithms):
        if (case.seqlen, case.causal) == (2048, True):
            self.prepared.append(case)
            raise RuntimeError("no inputs")
        return super().prepare(case, algorithms)

    def seconds(self, call):
        if call.key == ("v1", "backward"):
            raise MemoryError("16 GiB")
        if call.key == ("standard", "backward") and self.samples.count((call.case, call.key)) == 2:
            raise RuntimeError("an illegal address")
        return super().seconds(call)


def test_a_failure_is_noted_and_the_comparison_goes_on():
    bench = Failing()
    kept, rows = [], []
    chosen = cases((1024, 2048), (128,), "bfloat16", 4096, 2048)
    compare(bench, chosen, 4, None, lambda _: None, now=bench.clock, rows=rows, keep=lambda: kept.append(len(rows)))
    assert bench.prepared == chosen
    notes = {(row.seqlen, row.causal, row.algorithm, row.direction): (row.note, row.failed) for row in rows if row.note}
    broken = {(2048, True, a, d): ("failed: RuntimeError: no inputs", True) for a in ALGORITHMS for d in DIRECTIONS}
    assert notes == broken | {
        (length, causal, algorithm, "backward"): noted
        for length, causal in ((1024, False), (1024, True), (2048, False))
        for algorithm, noted in (
            ("v1", ("does not fit: 16 GiB", False)),
            ("standard", ("failed: RuntimeError: an illegal address", True)),
        )
    }
    assert sum(row.samples == 4 for row in rows) == 3 * 10
    assert all(row.seconds is None for row in rows if row.note)
    assert kept == sorted(set(kept))  # more each time
    assert kept[-1] == len(rows)
    assert len(kept) == 1 + 2 + 4  # errors, counters of two lengths, four problems


def test_what_cannot_be_run_is_named():
    _, rows, _ = scripted(missing=("v3",))
    without = [row for row in rows if row.algorithm == "v3"]
    assert {row.note for row in without} == {"is not here"}
    assert not any(row.seconds for row in without)
    assert "FlashAttention-3 (V3), forward, B=4 S=1,024 H=16 D=128: is not here" in report.render(rows)


def test_clock():
    times = iter([10.0, 11.0, 15.0, 16.0, 99.0])
    clock = Clock(5, lambda: next(times))
    assert clock.left == 4
    assert clock.left == 0
    assert clock.is_over
    assert Clock(None).left is None
    assert not Clock(None).is_over


# ---- files


def test_rows_survive_a_file(tmp_path):
    _, rows, _ = scripted(missing=("v1",))
    path = tmp_path / "rows" / "data.csv"
    table.write(path, rows)
    assert table.read(path) == rows
    assert path.read_text().splitlines()[0].startswith("device,dtype,batch,seqlen,heads,head_dim,causal,direction")


def test_a_file_has_what_follows_from_its_rows(tmp_path):
    """V3's forward takes a second, V2's two, standard attention's eight; 4 GiB pass through memory."""
    _, rows, _ = scripted(missing=("v1",))
    path = tmp_path / "data.csv"
    table.write(path, rows)
    with path.open() as file:
        lines = [line for line in csv.DictReader(file) if line["seconds"] and line["direction"] == "forward"]
    derived = {
        line["algorithm"]: tuple(
            line[name] for name in ("tflops", "times_previous", "times_standard", "flops_per_byte")
        )
        for line in lines
        if line["seqlen"] == "1024" and line["causal"] == "0"
    }
    flops = 4 * 4 * 16 * 1024 * 1024 * 128
    of_all = f"{flops / 2**32:.4g}"
    assert derived == {
        "standard": (f"{flops / 8e12:.4g}", "", "", of_all),
        "v2": (f"{flops / 2e12:.4g}", "", "4", of_all),  # V1 is missing
        "v3": (f"{flops / 1e12:.4g}", "2", "8", of_all),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("seqlen", "length", 1), "has no column seqlen"),
        (lambda text: text.replace(",1024,", ",many,", 1), "line 2: invalid literal"),
        (lambda text: text.replace("forward,standard", "forward,v4", 1), "v4 forward; expected standard, v1, v2, v3"),
        (lambda text: text.replace(",1024,16,128,0", ",1024,16,128,no", 1), "line 2: 'no'"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, change, message):
    _, rows, _ = scripted()
    path = tmp_path / "data.csv"
    table.write(path, [row for row in rows if row.seconds])
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=re.escape(message)):
        table.read(path)


# ---- the page and the figures


def test_speed_ups_are_ratios_of_times_of_equal_problems():
    _, rows, _ = scripted(missing=())
    found = views.speed_ups(rows, "step", causal=True)
    assert found["v1", "standard"] == [2.0, 2.0]  # of two lengths
    assert found["v3", "v2"] == [2.0, 2.0]
    assert found["v2", "standard"] == [4.0, 4.0]
    assert views.mean([1.0, 4.0]) == 2.0


def test_a_page_shows_all_and_fetches_nothing():
    _, rows, _ = scripted(missing=("v1",))
    page = report.render(rows, ["Something to know."])
    assert "Something to know." in page
    assert "<h1>Standard attention, V1, V2 and V3 on NVIDIA H200</h1>" in page
    assert "rounds S and P to 16 bits" in page
    assert "2.00 (2.00 to 2.00)" in page  # V3 over V2
    assert "a copy moves 4,000 GB/s, a matrix product does 700 TFLOP/s (data sheet: 4,800 GB/s, 989 TFLOP/s)" in page
    # counted: all, read, written, of L2; no theorem of V2; measured likewise; counted over measured; per measured byte
    bytes_moved = "4.4e-07|3.3e-07|1.1e-07|9e-07||4e-07|3e-07|1e-07|1e-06|1.10|"
    assert f"<td>{bytes_moved.replace('|', '</td><td>')}" in page
    theorem = hbm.paper_v1_bytes(next(row for row in rows if row.measured).case.problem(), 232_448) / 1e9
    assert f"<td>{theorem:,.4g}</td>" in page
    for chart in (
        "Speed, forward, head dim 128, full",
        "Speed-up, forward and",
        "Largest error of out",
        "Memory beyond the inputs",
        "Roofline",
        "Bytes through memory",
    ):
        assert f"<title>{chart}" in page
    assert len(page.encode()) < report.MOST_BYTES
    assert "http" not in page
    assert "<script" not in page
    assert "src=" not in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_a_page_of_every_length_and_head_dim_can_be_mailed():
    lengths = [2**n for n in range(7, 18)]
    _, rows, _ = scripted(lengths=lengths, rounds=2)
    rows = [Row(**{**as_dict(row), "head_dim": d}) for d in (32, 64, 128, 256) for row in rows]
    assert len(report.render(rows).encode()) < report.MOST_BYTES


def as_dict(row):
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def test_text_of_a_file_is_text(tmp_path):
    _, rows, _ = scripted(missing=("v1",))
    rows = [Row(**{**as_dict(row), "device": "<b>GPU</b>"}) for row in rows]
    assert "<b>" not in report.render(rows)


def test_nothing_to_show():
    with pytest.raises(ValueError, match="no row was measured"):
        report.render([])


def test_figures_are_files_of_their_own(tmp_path, capsys):
    _, rows, _ = scripted()
    table.write(tmp_path / "data.csv", rows)
    assert figures.main([str(tmp_path / "data.csv"), str(tmp_path / "figures")]) == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{name}.svg" for name in ("throughput", "time", "speedups", "memory", "hbm", "roofline", "error")}
    for path in (tmp_path / "figures").iterdir():
        root = ElementTree.fromstring(path.read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme:dark" in path.read_text()
    assert figures.main(["one"]) == 2
    assert "usage" in capsys.readouterr().err


def test_points_lie_where_their_values_are():
    """On a logarithmic axis equal factors are equal distances."""
    series = [charts.Series("V2", "v2", [(1, 1), (2, 10), (4, 100)])]
    svg = charts.plot("title", charts.Axis("x", 2), charts.Axis("y", 10), series)
    circles = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)]
    (x0, y0), (x1, y1), (x2, y2) = circles[:3]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    assert y0 > y1  # upwards


def test_bars_are_as_long_as_their_values():
    svg = charts.bars("title", "bytes", [("V1", "v1", 1000.0, 100.0), ("V2", "v2", 10.0, 0.0)])
    widths = [float(x) for x in re.findall(r'<rect .*?width="([\d.]+)"', svg)]
    assert len(widths) == 3
    assert widths[0] - widths[1] == pytest.approx(widths[1] - widths[2], abs=0.11)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (512, "512"), (4096, "4,096"), (16384, "16.4k"), (3.2e6, "3.2M")]
)
def test_numbers_in_few_letters(value, text):
    assert charts.short(value) == text


# ---- the GPU's side


def test_cases_make_equal_work():
    chosen = cases((512, 65536), (64, 128), "float16", 16384, 2048)
    assert [(case.batch, case.heads) for case in chosen if not case.causal] == [(32, 32), (1, 32), (32, 16), (1, 16)]
    assert chosen[0].problem("v2").algorithm == "v2"


def test_errors_are_of_one_head_and_of_lengths_up_to_the_longest():
    chosen = accuracy.cases(cases((1024, 2048, 16384), (64, 128), "float16", 16384, 2048))
    assert {(case.batch, case.heads, case.dtype) for case in chosen} == {(1, 1, "float16")}
    of_128 = [(case.seqlen, case.causal) for case in chosen if case.head_dim == 128]
    assert of_128 == [(512, False), (512, True), (1024, False), (2048, False), (4096, False)]
    assert {case.head_dim for case in chosen} == {64, 128}
    assert [case.seqlen for case in accuracy.cases([Case(1, 64, 2, 64, False, "float16")])] == [64, 64]


def test_bytes_are_shown_of_the_row_with_counters_and_of_head_dims_up_to_128():
    def row(head_dim, **known):
        return Row("GPU", "float16", 1, 4096, 16, head_dim, False, "forward", "v1", **known)

    counted = {"counted_read": 2, "counted_written": 1, "counted_requested": 4}
    measured = {"measured_read": 2, "measured_written": 1}
    rows = [row(64, **counted), row(256, **counted), row(128, **counted), row(128)]
    assert views.traffic_row(rows, "v1", "forward", 4096) == rows[2]
    rows.append(row(64, **counted, **measured))
    assert views.traffic_row(rows, "v1", "forward", 4096) == rows[-1]
    assert views.traffic_row(rows, "v2", "forward", 4096) is None


def test_known_gpus_have_peaks():
    assert PEAKS.keys() >= {limits.name for limits in KNOWN_GPUS.values()}
    assert peak("another") is None
    assert peak("NVIDIA H200").bytes == 4.8e12


def test_counters_are_read_of_arrays_larger_than_the_cache():
    limits = KNOWN_GPUS["H200"]
    case = Case(1, 16384, 16, 128, False, "bfloat16")
    for algorithm in ALGORITHMS:
        enlarged = ncu.enlarged(case, algorithm, limits, 130 << 30)
        size = enlarged.batch * 16384 * 16 * 128 * 2
        assert 16 * size < 130 << 30
        if algorithm == "standard":
            assert enlarged.problem().scores * 2 <= 16 << 30
        else:
            assert size >= 8 * limits.l2_bytes
    assert ncu.enlarged(case, "v2", limits, 1 << 30).batch == 1


def test_which_counters_are_read():
    chosen = ncu.chosen(cases((512, 4096, 16384), (64, 128, 256), "bfloat16", 16384, 2048))
    assert [(case.seqlen, case.head_dim, case.causal) for case in chosen] == [(4096, 128, False), (16384, 128, False)]
    assert ncu.chosen([]) == []
    assert [case.head_dim for case in ncu.chosen(cases((1024,), (256,), "float16", 1024, 256))] == [256]


def test_jobs_are_read_as_they_are_written():
    job = ncu.Job(Case(8, 16384, 16, 128, True, "bfloat16"), "v2", "forward")
    assert str(job) == "v2:forward:bfloat16:8:16384:16:128:1"
    assert ncu.Job.of(str(job)) == job


HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(number, kernel, metric, unit, value):
    return (
        f'"{number}","4711","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(2048, 1, 1)","0","9.0",'
        f'"Command line profiler metrics","{metric}","{unit}","{value}"'
    )


def recorded(*kernels, unit="byte", of_unit=1):
    lines = ["==PROF== Connected to process 4711", '==PROF== Profiling "forward_mma" - 0: 0%....100%', HEADER]
    for number, (kernel, read, written, sectors) in enumerate(kernels):
        lines += [
            line(number, kernel, ncu.READ, unit, f"{read / of_unit:,}"),
            line(number, kernel, ncu.WRITTEN, unit, f"{written / of_unit:,}"),
            line(number, kernel, ncu.SECTORS, "sector", f"{sectors:,}"),
        ]
    return "\n".join([*lines, "==PROF== Disconnected from process 4711"])


MARK = (f"{ncu.MARKER}()", 0, 0, 0)
KERNELS = (
    MARK,
    ("forward_mma(ForwardParams)", 2_013_265_920, 536_870_912, 100),
    MARK,
    ("backward_rows(BackwardParams)", 1_000_000, 2_000, 10),
    ("backward_mma(BackwardParams)", 5_000_000, 3_000, 20),
)
PASSES = [Traffic(2_013_265_920, 536_870_912, 3200), Traffic(6_000_000, 5_000, 960)]


@pytest.mark.parametrize(("unit", "of_unit"), [("byte", 1), ("Kbyte", 1000), ("Mbyte", 1000000)])
def test_what_ncu_prints_is_added_up_by_pass(unit, of_unit):
    assert ncu.parse(recorded(*KERNELS, unit=unit, of_unit=of_unit)) == PASSES


def test_the_wide_form_of_ncu():
    lines = [
        f'"ID","Kernel Name","{ncu.READ}","{ncu.WRITTEN}","{ncu.SECTORS}"',
        '"","","byte","byte","sector"',
        *(
            f'"{n}","{name}","{read:,}","{written:,}","{sectors:,}"'
            for n, (name, read, written, sectors) in enumerate(KERNELS)
        ),
    ]
    assert ncu.parse("\n".join(lines)) == PASSES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== nothing", "it printed no table"),
        (recorded(*KERNELS[1:]), "forward_mma(ForwardParams) comes before the first pass"),
        (recorded(*KERNELS).replace(ncu.READ, "sm__cycles.sum"), f"has no '{ncu.READ}'"),
        (recorded(*KERNELS).replace("2,013,265,920", "n/a"), "its table cannot be read"),
    ],
)
def test_what_ncu_prints_else_is_refused(text, message):
    with pytest.raises(ncu.NcuError, match=re.escape(message)):
        ncu.parse(text)


JOBS = [ncu.Job(Case(8, 4096, 16, 128, False, "bfloat16"), "v2", direction) for direction in ("forward", "backward")]


def program(tmp_path, body):
    path = tmp_path / "ncu"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_ncu_is_run_over_the_passes(tmp_path):
    (tmp_path / "table").write_text(recorded(*KERNELS))
    fake = program(tmp_path, f'echo "$@" > {tmp_path}/arguments; cat {tmp_path}/table')
    assert ncu.measure(fake, JOBS) == PASSES
    arguments = (tmp_path / "arguments").read_text()
    assert "--profile-from-start off --clock-control none" in arguments
    assert f"--metrics {ncu.READ},{ncu.WRITTEN},{ncu.SECTORS}" in arguments
    assert "-m cupyflash.compare.one v2:forward:bfloat16:8:4096:16:128:0 v2:backward:bfloat16:" in arguments


def test_ncu_without_the_third_metric(tmp_path):
    """An older GPU; the two that matter are asked for alone."""
    (tmp_path / "table").write_text("\n".join(x for x in recorded(*KERNELS).splitlines() if ncu.SECTORS not in x))
    complaint = f"==ERROR== Failed to find metric {ncu.SECTORS}"
    fake = program(tmp_path, f'case "$*" in *lts*) echo "{complaint}"; exit 1;; esac; cat {tmp_path}/table')
    assert ncu.measure(fake, JOBS) == [Traffic(x.read, x.written, 0) for x in PASSES]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'", "ERR_NVGPUCTRPERM"),
        ("echo broken >&2; exit 3", "broken"),
        ("exit 3", "status 3"),
    ],
)
def test_ncu_that_fails(tmp_path, body, message):
    with pytest.raises(ncu.NcuError, match=message):
        ncu.measure(program(tmp_path, body), JOBS)


def test_ncu_that_reports_too_few(tmp_path):
    (tmp_path / "table").write_text(recorded(*KERNELS[:2]))
    with pytest.raises(ncu.NcuError, match="it reported 1 passes; expected 2"):
        ncu.measure(program(tmp_path, f"cat {tmp_path}/table"), JOBS)


def test_ncu_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "_FOLDERS", (str(tmp_path / "none"),))
    assert ncu.find() is None
    monkeypatch.setattr(ncu, "_FOLDERS", (str(tmp_path),))
    (tmp_path / "2025.1").mkdir()
    inside = program(tmp_path / "2025.1", "")
    assert ncu.find() == inside
    assert ncu.find() == inside
    assert ncu.find() != program(tmp_path, "") == ncu.find()


@pytest.fixture
def gpu_bench(monkeypatch):
    """What a GpuBench knows without a GPU."""
    pytest.importorskip("cupy")
    try:
        from cupyflash.compare import gpu
    except ImportError as error:
        pytest.skip(str(error))
    bench = object.__new__(gpu.GpuBench)
    bench.limits = KNOWN_GPUS["H200"]
    bench.notes = []
    monkeypatch.setattr(bench, "_free_memory", lambda: 130 << 30, raising=False)
    monkeypatch.setattr(bench, "_release", lambda: None, raising=False)
    return bench


def test_bytes_are_counted_of_the_tiles_that_are_taken(gpu_bench):
    case = Case(4, 4096, 16, 128, False, "bfloat16")
    for algorithm in ("v1", "v2", "v3"):
        traffic, tiles = gpu_bench.counted(case, (algorithm, "step"))
        family = {"v1": "v1", "v2": "mma", "v3": "wgmma"}[algorithm]
        assert re.match(rf"forward {family} Br=\d+ .*; backward {family} Br=\d+ ", tiles)
        Q = 4 * 4096 * 16 * 128 * 2
        most = (500 if algorithm == "v1" else 30) * Q  # V1's rows pass through memory once per block of keys
        assert most / 8 < traffic.total < most
    traffic, tiles = gpu_bench.counted(case, ("standard", "forward"))
    assert tiles == ""
    assert traffic.total > 4 * case.problem().scores * 2


def test_all_kernels_are_compiled_ahead(gpu_bench):
    case = Case(4, 4096, 16, 128, False, "bfloat16")
    files = {kernel.file for kernel in gpu_bench._kernels(case)}
    assert files >= {
        "standard.cu",
        "forward_v1.cu",
        "backward_v1.cu",
        "forward_mma.cu",
        "backward_mma.cu",
        "forward_wgmma.cu",
        "backward_wgmma.cu",
    }


def test_counters_of_the_gpu(gpu_bench, monkeypatch):
    monkeypatch.setattr(gpu_bench, "_ncu", "ncu", raising=False)
    chosen = cases((1024, 4096), (128,), "bfloat16", 16384, 2048)
    measured = []
    monkeypatch.setattr(ncu, "measure", lambda program, jobs: measured.append(jobs) or [Traffic(1, 2, 3)] * len(jobs))
    found = [read() for read in gpu_bench.counters(chosen)]
    assert [len(jobs) for jobs in measured] == list(map(len, found))  # one run per length
    found = [counted for of_length in found for counted in of_length]
    assert {case.seqlen for case, *_ in found} == {1024, 4096}
    for case, key, traffic, counted in found:
        assert traffic == Traffic(1, 2, 3)
        if key == ("v2", "forward"):
            tiles = gpu_bench.tiles(case, key)
            assert counted == hbm.count(*key, case.problem("v2"), tiles, gpu_bench.limits, flushed=True)

    def fails(program, jobs):
        raise ncu.NcuError("ERR_NVGPUCTRPERM")

    monkeypatch.setattr(ncu, "measure", fails)
    assert [read() for read in gpu_bench.counters(chosen)] == [[], []]
    assert gpu_bench.notes == ["Nsight Compute failed, bytes are counted only: ERR_NVGPUCTRPERM"]  # once
    assert gpu_bench.counters(chosen) == []
    assert "was not used" in gpu_bench.notes[-1]


class FakeStopwatch:
    def prepare(self, call):
        call()
        return call

    def seconds(self, call, expected=None):
        call()
        return 2.0 if expected is None else expected / 2

    def warm_up(self, call, seconds):
        call()


def test_passes_of_the_gpu_are_prepared(gpu_bench, monkeypatch):
    """On NumPy arrays, of which V1 and V3 are not: they are left out, and why is kept."""
    from cupyflash.compare import gpu

    monkeypatch.setattr(gpu, "inputs", accuracy.inputs)
    monkeypatch.setattr(gpu_bench, "_stopwatch", FakeStopwatch(), raising=False)
    monkeypatch.setattr(gpu_bench, "_expected", {}, raising=False)
    monkeypatch.setattr(gpu_bench, "_peak_bytes", lambda call: call() and 77)
    case = Case(1, 64, 2, 16, True, "float32")
    prepared = gpu_bench.prepare(case, ALGORITHMS)
    assert prepared.calls.keys() == {(a, d) for a in ("standard", "v2") for d in DIRECTIONS}
    assert prepared.reasons.keys() == {(a, d) for a in ("v1", "v3") for d in DIRECTIONS}
    assert all("NumPy arrays are computed on the CPU" in reason for reason in prepared.reasons.values())
    assert set(prepared.peaks.values()) == {77}
    call = prepared.calls["v2", "step"]
    assert [gpu_bench.seconds(call) for _ in range(2)] == [2.0, 1.0]

    def fails_on(direction, error):
        def call():
            raise error

        return lambda case, algorithm, arrays: {
            (algorithm, d): call if (algorithm, d) == ("v2", direction) else lambda: None for d in DIRECTIONS
        }

    monkeypatch.setattr(gpu_bench, "_memory", lambda: "1 GiB is free")
    for error, told in ((MemoryError("16 GiB"), "does not fit: 16 GiB"), (KeyError("x"), "failed: KeyError: 'x'")):
        with monkeypatch.context() as context:
            context.setattr(accuracy, "calls", fails_on("backward", error))
            prepared = gpu_bench.prepare(case, ("standard", "v2"))
            assert prepared.reasons == {("v2", "backward"): told}
            assert len(prepared.calls) == 5
            context.setattr(gpu_bench, "_peak_bytes", lambda call: 77)  # then it is the stopwatch that fails
            prepared = gpu_bench.prepare(case, ("standard", "v2"))
            memory = "; 1 GiB is free" if isinstance(error, MemoryError) else ""
            assert prepared.reasons == {("v2", "backward"): told + memory}
            assert len(prepared.calls) == 5
    monkeypatch.setattr(gpu_bench, "_free_memory", lambda: 1000)
    reason = gpu_bench.prepare(case, ("standard",)).reasons["standard", "step"]
    assert reason == "does not fit: P and dS take 6.1e-05 GiB; 9.31e-07 GiB are free"


class FakePool:
    """Blocks in use, and blocks that are kept."""

    def __init__(self):
        self.used = self.kept = 0

    def malloc(self, size):
        self.used += size

    def total_bytes(self):
        return self.used + self.kept

    def free_all_blocks(self):
        self.kept = 0


def test_memory_of_one_call_is_given_back_before_the_next(monkeypatch):
    """Also what a call held that failed."""
    cupy = pytest.importorskip("cupy")
    try:
        from cupyflash.compare import gpu
    except ImportError as error:
        pytest.skip(str(error))
    default = FakePool()
    allocators = [default.malloc]

    @contextlib.contextmanager
    def using(allocator):
        allocators.append(allocator)
        try:
            yield
        finally:
            allocators.pop()

    monkeypatch.setattr(cupy.cuda, "using_allocator", using)
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: default)
    bench = object.__new__(gpu.GpuBench)
    bench._measuring, bench._device = FakePool(), types.SimpleNamespace(synchronize=lambda: None)

    def call(size, fails=False):
        pool = allocators[-1].__self__
        pool.malloc(size)
        pool.used, pool.kept = 0, pool.kept + size
        if fails and pool is bench._measuring:
            raise MemoryError

    assert bench._peak_bytes(lambda: call(5)) == 5
    assert default.total_bytes() == bench._measuring.total_bytes() == 0
    with pytest.raises(MemoryError):
        bench._peak_bytes(lambda: call(7, fails=True))
    assert bench._measuring.total_bytes() == 7
    assert bench._peak_bytes(lambda: call(3)) == 3
    assert default.total_bytes() == bench._measuring.total_bytes() == 0


# ---- the command, on the CPU


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The page and the CSV file of a tiny comparison, and what the command said."""
    page = tmp_path_factory.mktemp("compare") / "page.html"
    said = []
    import argparse

    from cupyflash.cli import compare as command

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(f"--quick --device cpu --lengths 64,128 --head-dims 16 --rounds 2 --out {page}".split())
    assert command.run(options, said.append) == 0
    return page, page.with_suffix(".csv"), said


def test_the_command_on_the_cpu(compared):
    page, data, said = compared
    rows = table.read(data)
    timed = [row for row in rows if row.seconds]
    assert {(row.seqlen, row.causal, row.algorithm, row.direction) for row in timed} == {
        (n, causal, algorithm, direction)
        for n in (64, 128)
        for causal in (False, True)
        for algorithm in ("standard", "v2")
        for direction in DIRECTIONS
    }
    assert all(row.samples == 2 and row.peak_bytes > 0 for row in timed)
    scores = {row.seqlen: 4 * row.batch * row.heads * row.seqlen**2 for row in timed}
    for row in timed:
        if row.algorithm == "standard":
            assert row.peak_bytes > scores[row.seqlen]
    errors = {(row.algorithm, row.direction): row.error for row in rows if row.error is not None}
    assert errors.keys() == {(a, d) for a in ("standard", "v2") for d in ("forward", "backward")}
    assert all(0 < error < 1e-5 for error in errors.values())
    text = page.read_text()
    assert cpu.CANNOT in said
    assert html.escape(cpu.CANNOT) in text
    assert "<h1>Standard attention and V2 on " in text
    assert "V1 over standard" not in text
    assert "16 bits" not in text  # all is float32 here
    assert any(re.match(r"forward and backward: v2 [\d.]+ times standard", line) for line in said)
    assert said[-2:] == [str(data), str(page)]
    assert all(math.isfinite(row.seconds) for row in timed)


def test_a_page_is_made_again_from_its_rows(compared, tmp_path, capsys):
    page, data, _ = compared
    again = tmp_path / "again.html"
    assert main(["compare", "--from", str(data), "--out", str(again)]) == 0
    assert again.read_text() == page.read_text()
    assert capsys.readouterr().out == f"{again}\n"


def test_after_a_failure_the_status_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cupyflash.cli.compare._cpu_bench", Failing)
    page = tmp_path / "a.html"
    command = ["compare", "--device", "cpu", "--lengths", "64,128", "--rounds", "3", "--out", str(page)]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "standard backward, B=32 S=64 H=4 D=64: failed: RuntimeError: an illegal address" in said.splitlines()
    assert "does not fit" not in said
    assert "failed: RuntimeError: an illegal address" in page.read_text()
    assert "does not fit: 16 GiB" in page.read_text()
    assert len({row.case for row in table.read(page.with_suffix(".csv")) if row.seconds}) == 4


@pytest.mark.parametrize("broken_by", [KeyboardInterrupt, RuntimeError("no page"), SystemExit(3)])
def test_what_was_measured_is_kept(tmp_path, capsys, monkeypatch, broken_by):
    """Whatever breaks it off: here the count of bytes after the seventieth sample."""

    class Breaking(ScriptedBench):
        def counted(self, case, key):
            if len(self.samples) >= 70:
                raise broken_by
            return super().counted(case, key)

    monkeypatch.setattr("cupyflash.cli.compare._cpu_bench", Breaking)
    command = ["compare", "--device", "cpu", "--lengths", "64,128", "--rounds", "2", "--out", str(tmp_path / "a.html")]
    if broken_by is KeyboardInterrupt:
        assert main(command) == 130
    else:
        with pytest.raises(SystemExit):
            main(command)
        assert isinstance(broken_by, SystemExit) or "no page" in capsys.readouterr().err
    timed = [row for row in table.read(tmp_path / "a.csv") if row.seconds]
    assert len({row.case for row in timed}) == 2
    assert "Speed" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--out page.csv", "--out is the page"),
        ("--lengths 12,x", "'x'; expected a whole number above 0"),
        ("--head-dims 0", "'0'; expected a whole number above 0"),
        ("--rounds -1", "expected"),
        ("--seconds soon", "'soon'; expected a time above 0"),
        ("--device cpu --dtype float16", "--dtype is of the GPU"),
        ("--from nowhere.csv", "nowhere.csv"),
        ("--device tpu", "invalid choice"),
    ],
)
def test_wrong_arguments_are_usage_errors(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *arguments.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    from cupyflash import arrays

    def missing(who):
        raise RuntimeError(f"{who} needs an NVIDIA GPU")

    monkeypatch.setattr(arrays, "require_gpu", missing)
    with pytest.raises(SystemExit):
        main(["compare", "--device", "gpu"])
    assert "comparing on the GPU needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
def test_the_command_on_a_gpu(tmp_path):
    page = tmp_path / "page.html"
    arguments = f"--quick --device gpu --lengths 1024 --head-dims 128 --rounds 2 --no-ncu --out {page}"
    assert main(["compare", *arguments.split()]) == 0
    rows = table.read(page.with_suffix(".csv"))
    timed = {(row.algorithm, row.direction) for row in rows if row.seconds and row.peak_bytes and row.counted}
    assert {("standard", direction) for direction in DIRECTIONS} <= timed
    assert {("v2", direction) for direction in DIRECTIONS} <= timed
    assert all(row.error < 0.05 for row in rows if row.error is not None)
    assert "Roofline" in page.read_text()
