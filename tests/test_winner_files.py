"""Files of winners: what a reader makes of every mistake, what writers do to each other, and what merging keeps."""

import dataclasses
import multiprocessing
import os
import signal
import sys
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import yaml
from hypothesis import given

from cupyflash.dispatch import FILES
from cupyflash.resources import KNOWN_GPUS
from cupyflash.runtime import source
from cupyflash.tiles import TASKS, TileConfig
from cupyflash.tuning import files, kernel_hash, plain_yaml
from cupyflash.tuning.entries import DTYPES, FAMILIES, Entry, EntryError, Kind, Measured, Winners, content, parse
from cupyflash.tuning.merging import arranged, merge, replaced

H200, A100 = KNOWN_GPUS["H200"], KNOWN_GPUS["A100"]
KIND = Kind("forward", "half", 64, 64, False)
CONFIG = TileConfig("mma", 128, 64, 4)

# A file as a person writes it, not this library.
BY_HAND = """\
schema: 1
device: {name: NVIDIA H200, arch: 90, shared_bytes: 232448, sm_count: 132, l2_bytes: 62914560}
entries:
- kind:   # the first
    task: forward
    dtype: half
    head_dim: 64
    head_dim_v: 64
    masked: no
  config: {family: mma, Br: 128, Bc: 64, warps: 4}
- kind: {task: backward, dtype: bfloat16, head_dim: 96, head_dim_v: 64, masked: true, length: 2048, rows: 16384}
  config: {family: wgmma, Br: 64, Bc: 128, warps: 12, stages: 2, first_stores: false}
  measured: {seconds: 1.5e-04, default_seconds: 2, spread: 0, date: 2026-11-29, nvrtc: '13.0', provenance: me}
"""


def by_hand(changed="", to=""):
    assert BY_HAND.count(changed) == 1 or not changed
    return files.parse_text(BY_HAND.replace(changed, to) if changed else BY_HAND)


# ---- reading


def test_a_file_by_hand():
    contents = by_hand()
    assert contents.complaints == ()
    assert contents.winners == Winners(
        H200,
        (
            Entry(KIND, CONFIG),
            Entry(
                Kind("backward", "bfloat16", 96, 64, True, 2048, 16384),
                TileConfig("wgmma", 64, 128, 12, 2, first_stores=False),
                Measured(1.5e-4, 2, 0, date="2026-11-29", nvrtc="13.0", provenance="me"),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("written", "instead", "complaint"),
    [
        ("Br: 64", "br: 64", "config.br is unknown; expected family, Br, Bc, "),
        ("Bc: 128, warps: 12", "Bc: 128", "config.warps is missing"),
        (
            "family: wgmma",
            "family: hopper",
            "config.family is 'hopper'; expected one of wgmma, mma, simt, v1, standard",
        ),
        ("warps: 12", "warps: '12'", "config.warps is '12'; expected a whole number from 1"),
        ("warps: 12", "warps: 12.0", "config.warps is 12.0; expected a whole number from 1"),
        ("warps: 12", "warps: true", "config.warps is True; expected a whole number from 1"),
        ("warps: 12", "warps: -4", "config.warps is -4; expected a whole number from 1"),
        ("first_stores: false", "first_stores: 0", "config.first_stores is 0; expected true or false"),
        ("task: backward", "task: backwards", "kind.task is 'backwards'; expected one of forward, backward, "),
        ("dtype: bfloat16", "dtype: float64", "kind.dtype is 'float64'; expected one of float16, "),
        ("masked: true", "masked: causal", "kind.masked is 'causal'; expected true or false"),
        ("length: 2048", "length: 2000", "kind.length is 2000; expected a power of two"),
        ("length: 2048", "length: 0", "kind.length is 0; expected a power of two"),
        ("rows: 16384", "rows: [1]", "kind.rows is [1]; expected a power of two"),
        (
            "head_dim: 96",
            "head_dim: 90",
            "kind.head_dim and kind.head_dim_v are 90 and 64; expected those of tiles, 96",
        ),
        (
            "seconds: 1.5e-04, d",
            "seconds: 1e-4, d",
            "measured.seconds is '1e-4'; expected seconds above 0 (in YAML, an",
        ),
        ("seconds: 1.5e-04, d", "seconds: .nan, d", "measured.seconds is nan; expected seconds above 0"),
        ("spread: 0", "spread: -.inf", "measured.spread is -inf; expected a number from 0"),
        ("2026-11-29", "yesterday", "measured.date is 'yesterday'; expected a date such as 2026-11-29"),
        ("nvrtc: '13.0'", "nvrtc: 13.0", "measured.nvrtc is 13.0; expected text (in YAML, numbers in quotes are text)"),
        ("{seconds: 1.5e-04, d", "{seconds: 1.5e-04, seconds: 1.0, d", "seconds stands twice (line 13)"),
        ("  config: {family: wgmma", "  tiles: {family: wgmma", "tiles is unknown; expected kind, config, measured"),
        ("provenance: me", "provenance: !!python/name:os.system x", "could not determine a constructor"),
        ("dtype: bfloat16", "dtype: [half]", "kind.dtype is ['half']; expected one of"),
        ("- kind: {task: backward", "- {}\n- kind: {task: forwards", "kind is missing"),
    ],
)
def test_a_bad_entry_is_left_out_by_line_and_key(written, instead, complaint):
    contents = by_hand(written, instead)
    assert contents.winners == Winners(H200, (Entry(KIND, CONFIG),))
    first = contents.complaints[0]
    assert first.startswith("entry 2 (line 11) is left out: ")
    assert complaint in first


def test_a_second_entry_of_one_kind_and_family_is_left_out():
    again = BY_HAND + "- kind: {task: forward, dtype: half, head_dim: 64, head_dim_v: 64, masked: false}\n"
    contents = files.parse_text(again + "  config: {family: mma, Br: 64, Bc: 64, warps: 4}\n")
    assert [entry.config for entry in contents.winners.entries] == by_hand_configs()
    (complaint,) = contents.complaints
    assert complaint == (
        "entry 3 (line 14) is left out: kind is that of an entry before, forward half d64 full, and so is the family"
    )


def by_hand_configs():
    return [entry.config for entry in by_hand().winners.entries]


@pytest.mark.parametrize(
    ("written", "instead", "complaint"),
    [
        ("schema: 1", "schema: 2", "schema is 2; this version of cupyflash reads schema 1"),
        ("schema: 1", "schema: '1'", "schema is '1'; this version of cupyflash reads schema 1"),
        ("schema: 1", "", "cannot be used: schema is missing"),
        (
            "schema: 1",
            "schema: 1\nwinners: []",
            "cannot be used: winners is unknown; expected schema, device and entries",
        ),
        ("arch: 90", "arch: '9.0'", "cannot be used: device.arch is '9.0'; expected a whole number from 1"),
        (", sm_count: 132", "", "cannot be used: device.sm_count is missing"),
        ("name: NVIDIA H200", "name: NVIDIA H200, name: A", "cannot be used: name stands twice (line 2)"),
        ("masked: no", "masked: no: no", "cannot be used: mapping values are not allowed"),
        ("entries:", "entries: {}\nothers:", "cannot be used: others is unknown"),
        ("entries:\n", "entries: 3\nschema: 1\n", "cannot be used: "),
    ],
)
def test_a_file_that_cannot_be_used(written, instead, complaint):
    contents = by_hand(written, instead)
    assert contents.winners is None
    (found,) = contents.complaints
    assert found.startswith(complaint)


@pytest.mark.parametrize("text", ["[" * 5000, "a: &x [*x]", "\0", "%YAML 9.9\n---\n", "? [1]\n: 2\n", "--- a\n--- b\n"])
def test_nothing_that_a_file_holds_raises(text):
    assert files.parse_text(text).winners is None


@given(st.text(alphabet=st.sampled_from(BY_HAND + '\t"|>%@`'), max_size=40), st.integers(0, len(BY_HAND)))
def test_noise_in_a_file_does_not_raise(noise, where):
    files.parse_text(BY_HAND[:where] + noise + BY_HAND[where:])


# ---- reading without PyYAML, which is the oracle

PLAIN = """\
# a remark
schema: 1
device: {name: NVIDIA H200, arch: 90}
entries:
- kind: {task: forward, masked: true}
  config: {Br: 128}

- kind: {task: backward}
  measured: {seconds: 1.5e-05, kernel: 5cd03ce7d9e4, cupy: 14.2.0, nvrtc: '13.0', provenance: 'me: by hand'}
"""


def by_pyyaml(text):
    """repr tells 1 from 1.0 and from True."""
    return repr(yaml.safe_load(text))


def test_what_is_written_needs_no_pyyaml_to_be_read(monkeypatch):
    everything = Measured(
        *(1.5e-5, 2.0, 0.0, 0.25, "2026-11-29", "09c3246bd8de", "13.0", "14.2.0", "580.159.03"),
        provenance="taken after tuning at a first call",
    )
    winners = Winners(H200, (Entry(KIND, CONFIG), Entry(dataclasses.replace(KIND, rows=64), CONFIG, everything)))
    text = files.text_of(winners)
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert files.parse_text(text) == files.Contents(winners)


def test_what_is_plain():
    assert repr(plain_yaml.read(PLAIN)) == by_pyyaml(PLAIN)


@pytest.mark.parametrize(
    "scalar",
    [
        *("0", "12", "1.5", "1.", "1.5e-05", "true", "false", "''", "'a b'", "mma", "a b-c/d", "y", "e5", "inf", "1e5"),
        *("09c3246bd8de", "0bd22da5ca82", "0b2", "1e12e3", "580.159.03", "1.2.3e4", "trueish", "no news"),
    ],
)
def test_a_plain_scalar(scalar):
    text = f"key: {scalar}\nitems:\n- a: {{{scalar}: 1, b: {scalar}}}\n  c: {scalar}\n"
    assert repr(plain_yaml.read(text)) == by_pyyaml(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "# nothing\n", "key:", "key: []", "key: {}", "- a: 1", "  key: 1", "key:1", "key: 1 # one", "'k': 1"),
        *("key: yes", "key: No", "key: OFF", "key: True", "key: null", "key: ~", "key: 2026-11-29", "key: 012"),
        *("key: 0b11", "key: 0x1f", "key: 1_000", "key: 1:30", "key: -1", "key: .inf", "key: 1.5E+05", "key: a: b"),
        *("key: &a 1", "key: *a", "key: !!str 1", "key: |", "key: [1]", 'key: "a"', "key: 'it''s'", "key: 日本"),
        *("a: 1\na: 2", "a: {b: 1, b: 2}", "a: {b: 1, 'b': 2}", "a:\n- b: 1\n  b: 2", "a:\na: 1", "a: 1\n  b: 2"),
        *("a: {b: 'c, d'}", "a: {b: 'c'', d: 'e'}", "a: {b: 1,c: 2}", "a: {b: {c: 1}}", "a: {b: 1,\n c: 2}", "a: {b}"),
        *("a:\n- b: 1\nc: 2\n- d: 3", "a: 1\n- b: 2", "a:\n- b:", "a:\n- b: 1\n  c:", "a:\n  b: 1", "a: 1\r\nb: 2"),
        *("a: 1\n---\nb: 2", "%YAML 1.1\n---\na: 1", "a:\n - b: 1", "a:\n- - b: 1", "a:\tb", "a: 1\x0bb: 2"),
        *("# \x07\na: 1", "# remark\x85b: 2\na: 1", "a: '\x7f'"),
    ],
)
def test_what_is_left_to_pyyaml(text):
    with pytest.raises(plain_yaml.NotPlain):
        plain_yaml.read(text)


@given(st.text(alphabet=st.sampled_from("0123456789abcdefxoyn.-+_' "), min_size=1, max_size=6))
def test_no_scalar_is_read_otherwise(scalar):
    text = f"key: {{a: {scalar}}}"
    try:
        read = plain_yaml.read(text)
    except plain_yaml.NotPlain:
        return
    assert repr(read) == by_pyyaml(text)


pieces = st.lists(st.sampled_from([*"\n :,#'{}-1ab|>\t", *("\n- ", "\n  ", "- ", ": ", ", ", " #", "b: 1", "''")]))


@given(pieces.map("".join), st.integers(0, len(PLAIN)), st.integers(0, 3))
def test_no_file_is_read_otherwise(noise, where, removed):
    text = PLAIN[:where] + noise + PLAIN[where + removed :]
    try:
        read = plain_yaml.read(text)
    except plain_yaml.NotPlain:
        return
    assert repr(read) == by_pyyaml(text)


# ---- names


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", "NVIDIA_H200.yaml"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB_HBM3.yaml"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA_A100-SXM4-80GB_MIG_1g.10gb.yaml"),
        ("../etc/a (b)", ".._etc_a_b_.yaml"),
    ],
)
def test_file_names(device, expected):
    assert files.file_name(device) == expected


# ---- writing

names = st.sampled_from(["a", "NVIDIA H200", "1e3", "13.0", "no", "017", "# x", "a: b", "日本", "12:30:45", "'", "~"])
seconds = st.none() | st.floats(1e-9, 1e3) | st.integers(1, 9)
kinds = st.builds(
    Kind,
    task=st.sampled_from(TASKS[:2]),
    dtype=st.sampled_from(DTYPES[:3]),
    head_dim=st.sampled_from((64, 128)),
    head_dim_v=st.just(64),
    masked=st.booleans(),
    length=st.none() | st.sampled_from((512, 4096)),
    rows=st.none() | st.just(1 << 18),
)
tiles = st.builds(
    TileConfig,
    family=st.sampled_from(FAMILIES),
    Br=st.sampled_from((64, 128)),
    Bc=st.just(64),
    warps=st.just(4),
    stages=st.integers(1, 3),
    dq_first=st.booleans(),
)
measurements = st.builds(
    Measured,
    seconds=seconds,
    default_seconds=seconds,
    spread=st.none() | st.floats(0, 1),
    date=st.none() | st.dates().map(str),
    kernel=st.none() | st.sampled_from(["0123456789ab", "111111111111", kernel_hash.kernel_hash("mma", "forward")]),
    driver=st.none() | names,
    provenance=st.none() | names,
)
entries = st.builds(Entry, kinds, tiles, measurements)


@given(st.lists(entries, unique_by=lambda entry: entry.key), names)
def test_what_is_written_is_read(written, name):
    winners = Winners(dataclasses.replace(H200, name=name), tuple(written))
    assert files.parse_text(files.text_of(winners)) == files.Contents(winners)


def test_a_written_file_is_plain():
    """PyYAML's own safe loader reads it: no tags, and text that looks like a number is quoted."""
    measured = Measured(seconds=1e-5, nvrtc="13.0", date="2026-11-29", kernel="111111111111")
    text = files.text_of(Winners(H200, (Entry(KIND, CONFIG, measured),)))
    assert yaml.safe_load(text)["entries"] == [
        {
            "kind": {"task": "forward", "dtype": "half", "head_dim": 64, "head_dim_v": 64, "masked": False},
            "config": {"family": "mma", "Br": 128, "Bc": 64, "warps": 4},
            "measured": {"seconds": 1e-5, "date": "2026-11-29", "kernel": "111111111111", "nvrtc": "13.0"},
        }
    ]
    assert max(map(len, text.splitlines())) < 160


def test_numbers_of_numpy_are_written_as_numbers():
    numpy = Entry(
        Kind("forward", np.str_("half"), np.int64(64), np.int32(64), np.bool_(False), np.int64(512)),
        TileConfig("mma", np.int64(128), np.uint8(64), np.int16(4), dq_first=np.False_),
        Measured(seconds=np.float32(0.5), spread=np.float64(0.25)),
    )
    read = parse(yaml.safe_load(yaml.safe_dump(content(numpy))))
    assert read == Entry(dataclasses.replace(KIND, length=512), CONFIG, Measured(0.5, spread=0.25))


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (Measured(seconds=float("inf")), "measured.seconds is inf"),
        (Measured(seconds=0), "measured.seconds is 0"),
        (Measured(driver=580), "measured.driver is 580"),
        (Measured(provenance=""), "measured.provenance is ''"),
    ],
)
def test_what_could_not_be_read_is_not_written(measured, message):
    with pytest.raises(EntryError, match=message.replace(".", r"\.")):
        files.text_of(Winners(H200, (Entry(KIND, CONFIG, measured),)))


def add(path, *new, device=H200):
    files.update(path, device, lambda present: replaced(present, new))


@pytest.fixture
def path(tmp_path):
    pytest.importorskip("filelock")
    return tmp_path / "a folder" / "winners.yaml"


def test_entries_are_added_and_replaced(path):
    other = dataclasses.replace(KIND, masked=True)
    add(path, Entry(KIND, CONFIG))
    add(path, Entry(other, CONFIG), Entry(KIND, dataclasses.replace(CONFIG, Bc=32)))
    found = files.read(path).winners.entries
    assert [(entry.kind.masked, entry.config.Bc) for entry in found] == [(False, 32), (True, 64)]
    assert {file.name for file in path.parent.iterdir()} == {"winners.yaml", "winners.yaml.lock"}


@pytest.mark.parametrize("text", ["schema: 1\ndevice: {", BY_HAND.replace("Br: 64", "rows: 64"), "schema: one: two"])
def test_what_could_not_be_read_is_kept_beside(path, text):
    path.parent.mkdir()
    path.write_text(text)
    add(path, Entry(dataclasses.replace(KIND, masked=True), CONFIG))
    assert path.with_name("winners.yaml.bad").read_text() == text
    assert files.read(path).complaints == ()
    assert Entry(dataclasses.replace(KIND, masked=True), CONFIG) in files.read(path).winners.entries
    assert (Entry(KIND, CONFIG) in files.read(path).winners.entries) == ("rows: 64" in text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 7\nfuture: true\n", "schema is 7; this version of cupyflash reads schema 1; move it away"),
        (BY_HAND, r"is for .*NVIDIA H200.*, and the new winners are for .*A100.*: GPU models are not mixed"),
    ],
)
def test_a_file_of_another_schema_or_gpu_is_left_alone(path, text, message):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(files.StoreError, match=message):
        add(path, Entry(KIND, CONFIG), device=A100)
    assert path.read_text() == text


def test_a_link_stays_one(path):
    path.parent.mkdir()
    target = path.parent / "elsewhere.yaml"
    path.symlink_to(target)
    add(path, Entry(KIND, CONFIG))
    assert path.is_symlink()
    assert files.read(target).winners.entries == (Entry(KIND, CONFIG),)


def test_a_failing_change_leaves_nothing(path):
    add(path, Entry(KIND, CONFIG))
    before = path.read_bytes()

    def fail(present):
        raise KeyError("no")

    with pytest.raises(KeyError):
        files.update(path, H200, fail)
    with pytest.raises(EntryError):
        add(path, Entry(KIND, CONFIG, Measured(seconds=-1)))
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 2  # and the lock


def test_a_full_disk_leaves_the_old_file(path, monkeypatch):
    add(path, Entry(KIND, CONFIG))
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(files.StoreError, match="No space left on device"):
        add(path, Entry(KIND, dataclasses.replace(CONFIG, Bc=32)))
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 2


# ---- several writers


def numbered(writer, number):
    """An entry that no other writer has."""
    return Entry(
        dataclasses.replace(KIND, length=1 << writer, rows=1 << number), CONFIG, Measured(seconds=1.0 + number)
    )


def write_many(path, writer, count):
    for number in range(count):
        add(path, numbered(writer, number))


def hold_for_ever(path, ready):
    def change(present):
        ready.set()
        time.sleep(600)
        return present

    files.update(path, H200, change)


def writers_and_a_reader(path, processes, writes):
    """Entries that are left, and how often the file was read meanwhile; every reading must be whole."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write_many, args=(path, n, writes)) for n in range(processes)]
    for worker in workers:
        worker.start()
    readings, most = 0, 0
    while any(worker.is_alive() for worker in workers):
        contents = files.read(path)
        if contents is not None:
            assert contents.complaints == ()
            assert len(contents.winners.entries) >= most, "an entry was lost"
            most = len(contents.winners.entries)
            readings += 1
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return files.read(path).winners.entries, readings


@pytest.mark.slow
def test_writers_lose_nothing(path):
    kept, readings = writers_and_a_reader(path, processes=4, writes=10)
    assert set(kept) == {numbered(writer, number) for writer in range(4) for number in range(10)}
    assert readings > 10


@pytest.mark.slow
def test_a_writer_that_is_killed_holds_nobody_up(path):
    add(path, numbered(0, 0))
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold_for_ever, args=(path, ready))
    holder.start()
    assert ready.wait(60)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    add(path, numbered(0, 1))
    assert len(files.read(path).winners.entries) == 2


def test_a_lock_that_is_held_is_named(path, monkeypatch):
    import filelock

    path.parent.mkdir()
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.01)
    with (
        filelock.FileLock(path.with_name("winners.yaml.lock")),
        pytest.raises(files.StoreError, match=r"winners\.yaml\.lock was held by another process"),
    ):
        add(path, Entry(KIND, CONFIG))


# ---- merging

files_of_entries = st.lists(entries, max_size=8, unique_by=lambda entry: entry.key).map(
    lambda found: Winners(H200, tuple(found))
)


@given(files_of_entries, files_of_entries, files_of_entries)
def test_merging_is_associative_commutative_and_idempotent(a, b, c):
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, b) == merge(b, a)
    assert merge(a, a) == merge(merge(a, a), a)
    assert set(merge(a, a).entries) == set(a.entries)


@given(files_of_entries, files_of_entries)
def test_merging_keeps_one_of_each_with_all_that_is_known_of_it(a, b):
    merged = merge(a, b).entries
    assert {entry.key for entry in merged} == {entry.key for entry in (*a.entries, *b.entries)}
    assert len({entry.key for entry in merged}) == len(merged)
    assert set(merged) <= {*a.entries, *b.entries}


CURRENT = kernel_hash.kernel_hash("mma", "forward")


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (Measured(seconds=1e-3), Measured(seconds=2e-3, date="2026-11-29")),
        (Measured(seconds=1e-3), Measured(date="2026-11-29")),
        (Measured(seconds=2e-3, kernel=CURRENT), Measured(seconds=1e-3, kernel="0123456789ab")),
        (Measured(seconds=2e-3, kernel=CURRENT), Measured(seconds=1e-3)),
        (Measured(seconds=1e-3, date="2026-11-29"), Measured(seconds=1e-3, date="2026-11-28")),
        (Measured(seconds=1e-3, date="2026-11-29"), Measured(seconds=1e-3)),
    ],
)
def test_which_is_the_better_one(better, worse):
    a, b = (Winners(H200, (Entry(KIND, CONFIG, measured),)) for measured in (better, worse))
    assert merge(a, b) == merge(b, a) == a


@pytest.mark.parametrize(
    "changes", [{"name": "NVIDIA H200 NVL"}, {"sm_count": 131}, {"shared_bytes": 1}, {"l2_bytes": 1}]
)
def test_gpu_models_are_not_merged(changes):
    with pytest.raises(ValueError, match="merge those of one model only"):
        merge(Winners(H200, ()), Winners(dataclasses.replace(H200, **changes), ()))


def test_the_fastest_family_goes_first():
    """Those that were not measured stay as they stood, behind."""
    slow, fast = (Entry(KIND, CONFIG, Measured(seconds=s)) for s in (2.0, 1.0))
    plain = Entry(KIND, TileConfig("simt", 64, 64, 4))
    hopper = Entry(KIND, TileConfig("wgmma", 128, 64, 12), Measured(seconds=1.5))
    assert arranged([plain, hopper, fast]) == (fast, hopper, plain)
    assert replaced([plain, hopper, fast], [slow]) == (hopper, slow, plain)
    unmeasured = (plain, Entry(KIND, CONFIG), Entry(KIND, TileConfig("wgmma", 128, 64, 12)))
    assert arranged(unmeasured) == unmeasured


# ---- the kernel's hash


def test_a_hash_is_that_of_the_code(monkeypatch):
    text = source.flatten("forward_mma.cu")
    kernel_hash.kernel_hash.cache_clear()
    before = kernel_hash.kernel_hash("mma", "forward")
    hashes = []
    for changed in (
        text + "// a remark\n\n",
        text.replace("  // ", "  // more: "),
        text.replace("kM * 16 * kWarps == kBr", "kM * 16 * kWarps >= kBr"),
    ):
        assert changed != text
        kernel_hash.kernel_hash.cache_clear()
        monkeypatch.setattr(source, "flatten", lambda file, changed=changed: changed)
        hashes.append(kernel_hash.kernel_hash("mma", "forward") == before)
    kernel_hash.kernel_hash.cache_clear()
    assert hashes == [True, True, False]


def test_every_kernel_file_has_its_hash():
    hashes = {file: kernel_hash.kernel_hash(family, task) for (family, task), (file, _) in FILES.items()}
    assert len(set(hashes.values())) == len(hashes) == 9 + 1


def test_what_counts_as_stale():
    assert not kernel_hash.is_stale("mma", "forward", CURRENT)
    assert not kernel_hash.is_stale("mma", "forward", None)  # nothing is known
    assert kernel_hash.is_stale("mma", "forward", "0123456789ab")
    assert kernel_hash.is_stale("wgmma", "backward_dq", CURRENT)  # no such kernel any more
