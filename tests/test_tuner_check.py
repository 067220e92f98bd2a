"""benchmarks/tuner_check.py fails where the tuner, or the GPU, is not as it must be."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_bench import FakeBench

pytest.importorskip("optuna")
from cupyflash.tiles import TileConfig
from cupyflash.tuning import tune
from cupyflash.tuning.driver import WorkerSpec
from cupyflash.tuning.tasks import Size, TuningTask

HERE = Path(__file__).parent
TASK = TuningTask("backward_dq", "bfloat16", 256, 256, True, (Size(4096, 4),))


class OtherSharedMemory(FakeBench):
    def build(self, task, config, changes):
        built = super().build(task, config, changes)
        return {**built, "shared_bytes": built["shared_bytes"] + 16}


@pytest.fixture
def tuner_check(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(HERE.parent / "benchmarks"))
    import tuner_check

    monkeypatch.setattr(tuner_check, "REGRET_TASKS", (TASK,))
    monkeypatch.setattr(tuner_check, "default_tasks", lambda *_: [TASK])
    return tuner_check


def spec(bench=FakeBench, **options):
    return WorkerSpec(f"{bench.__module__}:{bench.__name__}", options, threads=2)


def test_other_shared_memory_is_found(tuner_check):
    assert tuner_check.check_resources(spec(), 60.0, None)[1]
    said, good = tuner_check.check_resources(spec(OtherSharedMemory), 60.0, None)
    assert not good
    assert "other shared memory" in said


def test_a_gpu_of_much_noise_hides_a_slow_down(tuner_check, monkeypatch):
    monkeypatch.setattr(tuner_check, "default_tasks", lambda *_, **__: [TASK])
    said, good = tuner_check.check_noise(spec(noise=0.3), 2.0, None)
    assert not good
    found, planted = map(int, re.search(r"slow-down: (\d+) found of (\d+)", said).groups())
    assert found < 0.95 * planted  # and not for want of races


@pytest.mark.usefixtures("no_winners")
def test_a_winner_that_the_oracle_does_not_know_counts(tuner_check, monkeypatch):
    assert tuner_check.check_regret(spec(noise=0.0), 300.0, None)[1]

    def of_another_family(tasks, **options):
        tuned = tune(tasks, **options)
        tuned.winners[0] = replace(tuned.winners[0], config=TileConfig("simt", 16, 16, 4))
        return tuned

    monkeypatch.setattr(tuner_check, "tune", of_another_family)
    said, good = tuner_check.check_regret(spec(noise=0.0), 300.0, None)
    assert not good, said


def test_the_status_says_so(tuner_check, monkeypatch, capsys):
    monkeypatch.setitem(tuner_check.CHECKS, "held", lambda *_: ("said", False))
    monkeypatch.setattr(sys, "argv", ["tuner_check.py", "held", "--factory", "fake_bench:FakeBench"])
    assert tuner_check.main() == 1
    assert "not reached): said" in capsys.readouterr().out
