"""Whole tunes on a device that is not there: what is wrong never wins, what is killed goes on, nothing stays behind."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from fake_bench import FACTORY, faults_of, key, true_seconds
from scripted_runtime import FAULTS, ONLY_BACKWARD

from cupyflash import dispatch, heuristics
from cupyflash.cli import main
from cupyflash.resources import KNOWN_GPUS, why_illegal
from cupyflash.tiles import TileConfig
from cupyflash.tuning import layers, store
from cupyflash.tuning.space import families, space
from cupyflash.tuning.tasks import Size, TuningTask, default_tasks

pytest.importorskip("optuna")
from filelock import FileLock

from cupyflash.tuning import results, tune
from cupyflash.tuning.driver import CandidateFailed, Worker, WorkerError, WorkerSpec
from cupyflash.tuning.progress import Silent
from cupyflash.tuning.report import render
from cupyflash.tuning.results import Winner
from cupyflash.tuning.session import ResumeError, Session

HERE = Path(__file__).parent
H200 = KNOWN_GPUS["H200"]
SIZES = (Size(512, 32), Size(1024, 1))
FORWARD = TuningTask("forward", "bfloat16", 64, 64, True, SIZES)
SMALL = TuningTask("backward_dkv", "bfloat16", 256, 256, True, SIZES[:1])
TINY = TuningTask("backward_dq", "bfloat16", 256, 256, True, SIZES[:1])


@pytest.fixture(autouse=True)
def _fakes_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def fake(log=None, deadlines=None, **options):
    return WorkerSpec(FACTORY, options, threads=2, log=log, deadlines=deadlines or {})


def events_of(folder):
    return [
        json.loads(line) for path in sorted(folder.glob("samples-*.jsonl")) for line in path.read_text().splitlines()
    ]


def space_of(task, family="mma", gpu="H200"):
    return families(space(task.task, task.problem(task.sizes[0]), KNOWN_GPUS[gpu]))[family]


def chosen(tuned):
    return {(w.task.name, str(w.size), w.config.family): w.config for w in tuned.winners}


# ---- winners


def test_winners_are_near_the_best_and_beat_the_default(tmp_path):
    tasks = [FORWARD, TuningTask("forward", "float32", 64, 64, False, SIZES)]
    tuned = tune(tasks, workers=[fake(drift=0.03)], folder=tmp_path, store=False)
    assert len(tuned.winners) == 8  # wgmma, mma and v1, and simt, at two sizes
    for winner in tuned.winners:
        members = space_of(winner.task, winner.config.family)
        best = min(true_seconds(winner.task, config, winner.size) for config in members)
        assert true_seconds(winner.task, winner.config, winner.size) <= 1.03 * best
        assert winner.default == dispatch.choose(winner.task.task, winner.task.problem(winner.size), H200)[0]
        assert winner.seconds == pytest.approx(true_seconds(winner.task, winner.config, winner.size), rel=0.05)
    for (_, _), group in itertools.groupby(tuned.winners, key=lambda w: (w.task.name, w.size)):
        first = next(group)
        assert first.seconds <= 1.01 * first.default_seconds
    assert not tuned.unreached


def test_exact_float32_is_searched_in_the_family_of_each_size(tmp_path):
    """Few rows are computed by multiply-adds, many by tensor cores; no size has a winner that no call would take."""
    few, many = Size(128, 1), Size(1024, 16)
    task = TuningTask("forward", "float32", 128, 128, True, (few, many))
    tuned = tune([task], workers=[fake()], folder=tmp_path, store=False)
    winners = {size: {w.config.family for w in tuned.winners if w.size == size} for size in (few, many)}
    assert winners == {few: {"simt"}, many: {"mma"}}
    for size in (few, many):
        (family,) = winners[size]
        assert heuristics.exact_family("forward", task.problem(size), H200) == family
    samples = {(e["size"], e["config"]["family"]) for e in events_of(tmp_path) if e["kind"] == "sample"}
    assert samples == {(str(few), "simt"), (str(many), "mma")}


def test_regret_over_five_tunes(tmp_path):
    for seed in range(5):
        tuned = tune([TINY], workers=[fake(drift=0.03)], folder=tmp_path / str(seed), store=False, seed=seed)
        (winner,) = tuned.winners
        best = min(true_seconds(TINY, config, winner.size) for config in space_of(TINY))
        assert true_seconds(TINY, winner.config, winner.size) <= 1.01 * best


def test_what_is_no_faster_is_not_preferred(tmp_path):
    tuned = tune([TINY], workers=[fake(noise=0.008, drift=0.03)], folder=tmp_path, store=False)
    (winner,) = tuned.winners
    assert winner.gain == 0 if winner.is_default else winner.gain > max(0.01, winner.interval)


# ---- what is wrong


def test_planted_faults_never_win_and_the_run_ends_well(tmp_path):
    """Wrong kernels are three times as fast here. What crashes or hangs costs a worker, and nobody else."""
    members = space_of(FORWARD, gpu="A100")
    default = dispatch.choose("forward", FORWARD.problem(SIZES[0]), KNOWN_GPUS["A100"])[0]
    wrong = [f"wrong: {fault}" for fault in FAULTS if fault not in ONLY_BACKWARD]
    breaking = ["crash in prove", "crash in measure", "crash in build", "hang in measure", "hang in prove"]
    failing = ["error in measure", "compile in build", "spills"]
    victims = [c for c in members if c != default][:: max(1, len(members) // 24)]
    faults = list(zip(victims, [*wrong, *breaking, *failing], strict=False))
    assert len(faults) == len(wrong) + len(breaking) + len(failing) >= 12 + 8
    spec = fake(gpu="A100", faults=faults_of(faults), log=tmp_path / "log", deadlines={"prove": 1.5, "measure": 1.5})
    folder = tmp_path / "tune"
    tuned = tune([FORWARD], workers=[spec], folder=folder, store=False, effort="full")
    planted = dict(faults)
    assert tuned.winners
    assert not [winner for winner in tuned.winners if winner.config in planted]
    said = {key(TileConfig(**e["config"])): e["reason"] for e in events_of(folder) if e["kind"] == "failure"}
    expected = {
        "crash": "crash",
        "hang": "hang",
        "error": "error",
        "compile": "compile",
        "wrong": "wrong",
        "spills": "spills",
    }
    assert {key(c): expected[re.split(r"\W", f)[0]] for c, f in faults} == said
    proven = {key(TileConfig(**e["config"])) for e in events_of(folder) if e["kind"] == "proof" and not e["changes"]}
    assert all(key(winner.config) in proven for winner in tuned.winners)


def test_what_failed_is_not_tried_again(tmp_path):
    (victim,) = [c for c in space_of(TINY) if c != dispatch.choose("backward_dq", TINY.problem(SIZES[0]), H200)[0]][:1]
    spec = fake(faults=faults_of([(victim, "crash in measure")]), log=tmp_path / "log")
    for resume in (False, True):
        tune([TINY], workers=[spec], folder=tmp_path, store=False, resume=resume)
    failures = [e for e in events_of(tmp_path) if e["kind"] == "failure"]
    assert len(failures) == 1
    assert "SIGSEGV" in failures[0]["message"]


@pytest.mark.usefixtures("no_winners")
def test_a_default_that_fails_is_replaced_by_the_next(tmp_path):
    first, second = heuristics.candidates("backward_dq", TINY.problem(SIZES[0]), H200)[:2]
    faults = faults_of([(first, "error in measure")])
    (winner,) = tune([TINY], workers=[fake(faults=faults)], folder=tmp_path, store=False).winners
    assert winner.default == second
    assert winner.config != first


def test_where_nothing_works_there_is_no_winner(tmp_path):
    faults = faults_of([(config, "compile in build") for config in space_of(TINY)])
    tuned = tune([TINY, SMALL], workers=[fake(faults=faults)], folder=tmp_path, store=False)
    assert [task.name for task in tuned.unreached] == [TINY.name]
    assert {winner.task.name for winner in tuned.winners} == {SMALL.name}
    assert tuned.failures == {"compile": len(space_of(TINY))}


def test_a_winner_must_be_proven_in_all_that_its_entry_serves(tmp_path, monkeypatch):
    """What is fastest spills in float16, as a tile of the backward did on an H200."""
    (free,) = tune([TINY], workers=[fake()], folder=tmp_path / "free", store=False).winners
    assert not free.is_default
    monkeypatch.setenv("FAKE_SPILLS_IN_FLOAT16", key(free.config))
    (winner,) = tune([TINY], workers=[fake()], folder=tmp_path / "held", store=False).winners
    assert winner.config != free.config
    assert any(e["kind"] == "failure" and e["changes"] == {"dtype": "float16"} for e in events_of(tmp_path / "held"))


def test_a_default_that_spills_in_float16_is_kept_for_bfloat16_alone(tmp_path, monkeypatch):
    task = TuningTask("backward_dq", "bfloat16", 256, 256, True, SIZES[:1])
    default = dispatch.choose("backward_dq", task.problem(SIZES[0]), H200)[0]
    others = [(config, "error in build") for config in space_of(task) if config != default]
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    for spills, dtype in (("", "half"), (key(default), "bfloat16")):
        monkeypatch.setenv("FAKE_SPILLS_IN_FLOAT16", spills)
        (winner,) = tune([task], workers=[fake(faults=faults_of(others))], folder=tmp_path / dtype).winners
        assert winner.is_default
        kept = layers.entries(layers.Layer("user", layers.user_folder() / "NVIDIA_H200.yaml"), H200)
        assert dtype in {entry.kind.dtype for entry in kept}


# ---- kills


RUN = """
import sys
sys.path.insert(0, {here!r})
from test_tuner import *
tune({tasks}, workers=[fake(delay=0.001, **{options!r})], folder={folder!r}, store=False, resume=True)
"""


def start(folder, tasks="[TINY, FORWARD]", **options):
    options["journals"] = str(folder)
    code = RUN.format(here=str(HERE), folder=str(folder), options=options, tasks=tasks)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def samples_in(folder):
    path = folder / "samples-1.jsonl"
    return path.read_bytes().count(b'"kind": "sample"') if path.exists() else 0


def wait_for(condition, seconds=30):
    """For what happens soon; the limit is for machines that do much else."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def workers_of(folder):
    """Process ids of workers whose parent was started for this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_worker = entry.name.isdigit() and b"cupyflash.tuning.worker" in (entry / "cmdline").read_bytes()
            if is_worker and f"MARK={folder}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_kills_lose_one_measurement_at_most_and_change_nothing(tmp_path, monkeypatch):
    whole = tune([TINY, FORWARD], workers=[fake()], folder=tmp_path / "whole", store=False)
    folder, rng = tmp_path / "killed", random.Random(5)
    monkeypatch.setenv("MARK", str(folder))
    total = sum(e["kind"] == "sample" for e in events_of(tmp_path / "whole"))
    for enough in sorted(rng.sample(range(5, total - 5), 3)):
        process = start(folder)
        while process.poll() is None and samples_in(folder) < enough:
            time.sleep(0.002)
        assert process.poll() is None, process.stderr.read().decode()
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not workers_of(folder))
    resumed = tune([TINY, FORWARD], workers=[fake(journals=str(folder))], folder=folder, store=False, resume=True)
    assert chosen(resumed) == chosen(whole)
    taken = Counter(
        (e["task"], e["size"], str(e["config"]), e["stage"], e["round"])
        for e in events_of(folder)
        if e["kind"] == "sample"
    )
    assert set(taken.values()) == {1}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_hung_worker_dies_with_its_parent(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path))
    victims = [(config, "hang in measure") for config in space_of(TINY)]
    process = start(tmp_path, faults=faults_of(victims))
    wait_for(lambda: any(b"proof" in path.read_bytes() for path in tmp_path.glob("samples-*.jsonl")))
    time.sleep(0.5)  # by now it measures
    assert workers_of(tmp_path)
    process.kill()
    process.wait()
    wait_for(lambda: not workers_of(tmp_path))


def test_a_torn_journal_is_healed(tmp_path):
    first = tune([TINY], workers=[fake()], folder=tmp_path, store=False)
    path = tmp_path / "samples-1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if b'"race mma"' in line) + 20
    path.write_bytes(b"".join(lines[:cut]) + lines[cut][:17])
    second = tune([TINY], workers=[fake(journals=str(tmp_path))], folder=tmp_path, store=False, resume=True)
    assert chosen(first) == chosen(second)
    assert all(line.endswith(b"}\n") for line in path.read_bytes().splitlines(keepends=True))


def test_another_tune_cannot_be_resumed(tmp_path):
    tune([TINY], workers=[fake()], folder=tmp_path, store=False)
    with pytest.raises(ResumeError, match="seed was 0, is 1"):
        tune([TINY], workers=[fake()], folder=tmp_path, store=False, resume=True, seed=1)


def test_a_folder_is_not_shared_by_tunes_that_differ(tmp_path):
    """A second process has a journal of its own, in which there is nothing to compare with."""
    tune([TINY], workers=[fake()], folder=tmp_path, store=False)
    with FileLock(tmp_path / "samples-1.lock"):  # as if it went on
        with pytest.raises(ResumeError, match=r"limits was .*H200.*, is .*A100.* \(samples-1.jsonl\)"):
            tune([SMALL], workers=[fake(gpu="A100")], folder=tmp_path, store=False, resume=True)
        tune([SMALL], workers=[fake()], folder=tmp_path, store=False, resume=True)
    assert {path.name for path in tmp_path.glob("samples-*.jsonl")} == {"samples-1.jsonl", "samples-2.jsonl"}


def test_other_sizes_of_a_task_are_measured_after_a_resume(tmp_path):
    other = dataclasses.replace(TINY, sizes=(Size(3000, 4),))
    for task in (TINY, other, other):
        tuned = tune([task], workers=[fake()], folder=tmp_path, store=False, resume=True)
        assert [winner.size for winner in tuned.winners] == list(task.sizes)
    finished = [e["sizes"] for e in events_of(tmp_path) if e["kind"] == "finished"]
    assert finished == [["32x512"], ["4x3000"]]


def test_without_resume_the_old_samples_are_put_aside(tmp_path):
    for _ in range(2):
        tune([TINY], workers=[fake()], folder=tmp_path, store=False)
    assert (tmp_path / "earlier-1" / "samples-1.jsonl").exists()
    assert sum(e["kind"] == "header" for e in events_of(tmp_path)) == 1


# ---- time


def test_budget_is_kept_and_what_is_known_is_legal(tmp_path):
    began = time.monotonic()
    tuned = tune(default_tasks(), budget=4.0, workers=[fake(delay=0.004)], folder=tmp_path, store=False)
    assert time.monotonic() - began < 4 + 6  # a deadline of the tune, not a measurement: generous for slow machines
    assert tuned.unreached
    for winner in tuned.winners:
        assert why_illegal(winner.task.task, winner.config, winner.task.problem(winner.size), H200) is None
    gained = [w for w in tuned.winners if not w.is_default and w.config.family == w.default.family]
    assert all(true_seconds(w.task, w.config, w.size) < true_seconds(w.task, w.default, w.size) for w in gained)


class Told(Silent):
    """Remembers how far a tune said that it was."""

    def __init__(self):
        self.done = []

    def update(self, done, doing):
        self.done.append(done)


def test_what_is_finished_already_is_not_waited_for(tmp_path):
    tune([TINY], workers=[fake()], folder=tmp_path, store=False)
    told = Told()
    tune([TINY, SMALL], workers=[fake()], folder=tmp_path, store=False, resume=True, progress=told)
    assert told.done == sorted(told.done)
    assert told.done[-1] == 1.0


def test_a_budget_that_is_half_used_up_is_half_of_the_tune(tmp_path):
    tasks = default_tasks()
    session = Session(tmp_path, tasks, {}, 100.0, time.monotonic() - 50.0)
    try:
        assert 0.5 <= session.progress([0.9]) < 0.8
        assert session.progress([0.9] * len(tasks)) == pytest.approx(0.9)
    finally:
        session.close()


def test_a_search_without_time_is_followed_by_a_race_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "search_until", lambda *_: time.monotonic())
    tasks = [dataclasses.replace(TINY, sizes=SIZES), SMALL]
    tuned = tune(tasks, budget=60.0, workers=[fake()], folder=tmp_path, store=False)
    assert {(w.task.name, w.size) for w in tuned.winners} == {(t.name, size) for t in tasks for size in t.sizes}


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"effort": "huge"}, r"effort is 'huge'; expected one of 'quick', 'full'"),
        ({"regime": "cold"}, r"regime is 'cold'; expected one of 'eager', 'graph'"),
        ({"budget": 0}, r"budget is 0; expected seconds above 0, or None"),
        ({"tasks": []}, r"tasks is empty"),
        ({"tasks": [TINY, dataclasses.replace(TINY, sizes=(Size(3000, 4),))]}, rf"tasks has {TINY.name} twice"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tune(**{"tasks": [TINY], "workers": [WorkerSpec("fake_bench:Nothing")], "folder": tmp_path, **arguments})


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cupyflash.tuning.tuner.visible_gpus", lambda _: [fake()])
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SystemExit) as stopped:
        main(["tune", "--out", str(tmp_path / "file" / "tune")])
    assert stopped.value.code == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


# ---- several GPUs


def test_two_gpus_share_the_tasks(tmp_path):
    tasks = [TINY, SMALL]
    tuned = tune(tasks, workers=[fake(), fake()], folder=tmp_path, store=False)
    assert not tuned.unreached
    finished = Counter(e["task"] for e in events_of(tmp_path) if e["kind"] == "finished")
    assert finished == Counter(task.name for task in tasks)


def test_gpus_of_two_models_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"NVIDIA A100.* with 108 .*, NVIDIA H200 with 132 .*; tune one model at a time"
    ):
        tune([TINY], workers=[fake(), fake(gpu="A100")], folder=tmp_path, store=False)


def test_processes_share_a_folder(tmp_path):
    """As hosts do over a shared path: each task is tuned once."""
    processes = [start(tmp_path, "[TINY, SMALL]") for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    finished = Counter(e["task"] for e in events_of(tmp_path) if e["kind"] == "finished")
    assert finished == {TINY.name: 1, SMALL.name: 1}


# ---- workers


def test_a_worker_that_cannot_start_says_why(tmp_path):
    with pytest.raises(WorkerError, match=r"no worker could be started for fake_bench:Nothing: .*Nothing"):
        tune([TINY], workers=[WorkerSpec("fake_bench:Nothing")], folder=tmp_path, store=False)


def test_requests_after_a_crash_find_a_new_worker():
    config, other = space_of(TINY)[:2]
    worker = Worker(fake(faults=faults_of([(config, "crash in measure")])))
    try:
        worker.start()
        with pytest.raises(CandidateFailed, match="died of SIGSEGV") as failure:
            worker.measure(TINY, config, SIZES[0])
        assert failure.value.kind == "crash"
        assert worker.measure(TINY, other, SIZES[0])["seconds"] > 0
        assert worker.restarts == 1
    finally:
        worker.stop()


def test_the_guilty_is_found_among_those_that_are_compiled():
    """The process dies of a configuration that is compiled ahead, while another is measured."""
    members = space_of(TINY)[:5]
    worker = Worker(fake(faults=faults_of([(members[3], "crash in build")])))
    try:
        worker.start()
        worker.prefetch(TINY, members)
        failed = []
        for config in members:
            try:
                worker.build(TINY, config)
                worker.measure(TINY, config, SIZES[0])
            except CandidateFailed as error:
                failed.append((config, error.kind))
        assert failed == [(members[3], "crash")]
    finally:
        worker.stop()


def test_the_parent_imports_no_cupy(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); from cupyflash.tuning.driver import WorkerSpec\n"
        f"from cupyflash.tuning import tune; from cupyflash.tuning.tasks import *\n"
        f"task = TuningTask('backward_dq', 'bfloat16', 256, 256, True, (Size(512, 32),))\n"
        f"tune([task], workers=[WorkerSpec({FACTORY!r})], folder={str(tmp_path)!r}, store=False)\n"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


# ---- what is kept


def test_winners_are_what_calls_take_from_then_on(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    store.refresh()
    tuned = tune([TINY, SMALL, FORWARD], workers=[fake()], folder=tmp_path / "tune")
    assert tuned.stored == tmp_path / "cache" / "winners" / "NVIDIA_H200.yaml"
    first = {}
    for winner in tuned.winners:
        first.setdefault((winner.task, winner.size), winner)
    for (task, size), winner in first.items():
        for changes in [{}, *task.siblings()[:1]]:  # float16 too
            config, origin = dispatch.choose(task.task, task.problem(size, **changes), H200)
            assert config == winner.config
            assert origin == "tuned: user NVIDIA_H200.yaml"
    again = tune([TINY], workers=[fake()], folder=tmp_path / "again")
    assert [winner.default for winner in again.winners] == [w.config for w in tuned.winners if w.task == TINY]


def test_what_others_found_in_a_shared_folder_is_kept_too(tmp_path, monkeypatch):
    """The process that finished it may have been killed before it kept anything."""
    folder = tmp_path / "tune"
    tune([TINY], workers=[fake()], folder=folder, store=False)
    (folder / "samples-1.jsonl").rename(folder / "samples-2.jsonl")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    store.refresh()
    tuned = tune([TINY, SMALL], workers=[fake()], folder=folder, resume=True)
    assert {winner.task.name for winner in tuned.winners} == {TINY.name, SMALL.name}
    for winner in tuned.winners:
        origin = dispatch.choose(winner.task.task, winner.task.problem(winner.size), H200)[1]
        assert origin == "tuned: user NVIDIA_H200.yaml"


def judged(*results):
    """Results of one size: (family, milliseconds, gain over the default, which is of family "mma")."""
    default = TileConfig("mma", 64, 64, 4)
    tiles = {"mma": default, "v1": TileConfig("v1", 64, 128, 8), "wgmma": TileConfig("wgmma", 64, 128, 12)}
    return [
        Winner(FORWARD, SIZES[0], tiles[f], ms * 1e-3, default, 1e-3, gain, 0.006, 0.001, None, 25, True)
        for f, ms, gain in results
    ]


def test_who_did_not_beat_the_default_goes_behind_it(tmp_path, monkeypatch):
    """Each family is timed in a race of its own: by these times V1 was ahead, in turn with the default it was not."""
    winners = judged(("mma", 1.003, 0.0), ("v1", 1.001, -0.006), ("wgmma", 1.2, -0.2))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    store.refresh()
    results.keep(winners, H200, {})
    found = store.find("forward", FORWARD.problem(SIZES[0]), H200)
    assert [f.config.family for f in found if f.layer.name == "user"] == ["mma", "v1", "wgmma"]
    page = render([{"kind": "result", "at": 0.0, **results.as_event(winner)} for winner in winners])
    assert "default kept" in page
    assert "1 problems; geometric mean of tuned / default: 1.003" in page


def test_of_two_judgements_the_later_one_holds():
    first = judged(("v1", 0.9, 0.1), ("mma", 1.0, 0.0))
    second = judged(("mma", 1.0, 0.0), ("v1", 1.1, -0.1))
    events = [{"kind": "result", **results.as_event(winner)} for winner in (*first, *second)]
    assert [results.from_event(e, FORWARD) for e in results.latest(events)] == second


def test_without_a_place_for_journals_a_temporary_one_serves(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "file"))
    store.refresh()
    with pytest.warns(UserWarning, match="kept for this process only"):
        tuned = tune([TINY], workers=[fake()])
    assert tuned.folder.name.startswith("cupyflash-tune-")
    assert tuned.stored is None
    (winner,) = tuned.winners
    assert dispatch.choose(TINY.task, TINY.problem(winner.size), H200) == (winner.config, "tuned: process")


# ---- the report


def test_the_report_stands_alone(tmp_path):
    tuned = tune([FORWARD, TINY], workers=[fake()], folder=tmp_path, store=False)
    page = tuned.report.read_text()
    assert tuned.report == tmp_path / "report.html"
    assert len(page.encode()) < 2_000_000
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", page)
    assert "NVIDIA H200" in page
    for name in (FORWARD.name, TINY.name):
        assert name in page
    assert page.count("<svg") >= 6
    assert "beyond the shared memory" in page
    assert "SM clock" in page


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_shows_the_report(tmp_path):
    tuned = tune([TINY], workers=[fake()], folder=tmp_path, store=False)
    picture = tmp_path / "report.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [BROWSER, *options, "--enable-logging=stderr", f"--screenshot={picture}", tuned.report.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in shown.stderr  # what the page complains of
    assert picture.stat().st_size > 10_000
