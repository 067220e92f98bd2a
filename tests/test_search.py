"""The search asks for legal configurations, each once, and goes on after a kill as if there had been none."""

import json
import logging
import math
import threading

import pytest

from cupyflash.resources import KNOWN_GPUS
from cupyflash.tuning.space import Lattice, families, space
from cupyflash.tuning.tasks import Size, TuningTask

optuna = pytest.importorskip("optuna")
from cupyflash.tuning.search import Study, _quiet  # noqa: E402 (optuna first)

TASK = TuningTask("backward", "bfloat16", 64, 64, True)
SPACE = families(space(TASK.task, TASK.problem(Size(512, 32)), KNOWN_GPUS["H200"]))["mma"]
SIZES = ("long", "short")


def cost(config, size="long"):
    """Log seconds with a valley at one corner of the space, another one for the other size."""
    best = 64 if size == "long" else 32
    return (
        abs(math.log(config.Br / best))
        + 0.7 * abs(math.log(config.Bc / 128))
        + 0.1 * (config.stages == 1)
        + 0.05 * abs(config.score_warps_q - 2)
        + 0.03 * config.dq_first
    )


def answers(configs):
    return {config: {size: cost(config, size) for size in SIZES} for config in configs}


def searched(study, batches, size=8, known=()):
    """All configurations of these batches, which are told."""
    found = []
    for number in batches:
        batch = study.batch(number, size, known)
        study.tell(number, answers(batch))
        found += batch
    return found


def test_every_question_is_new_and_legal():
    found = searched(Study(None, "s", SPACE, SIZES, 0), range(6))
    assert len(found) == len(set(found)) == 48
    assert set(found) <= set(SPACE)


def test_known_configurations_come_first():
    known = [SPACE[5], SPACE[100]]
    assert Study(None, "s", SPACE, SIZES, 0).batch(0, 4, known)[:2] == known


def test_a_small_space_is_asked_for_in_whole():
    study = Study(None, "s", SPACE[:20], SIZES, 0)
    assert [len(searched(study, [n])) for n in range(4)] == [8, 8, 4, 0]


@pytest.mark.parametrize("size", SIZES)
def test_it_finds_the_best_of_each_size(size):
    best = min(cost(config, size) for config in SPACE)
    regrets = [
        min(cost(config, size) for config in searched(Study(None, "s", SPACE, SIZES, seed), range(6))) - best
        for seed in range(3)
    ]
    assert max(regrets) < 0.1
    chance = sorted(cost(config, size) for config in SPACE)[len(SPACE) // 48]
    assert sum(regrets) / len(regrets) <= chance - best


def test_failures_are_not_asked_again_nor_are_their_neighbours_sought():
    study = Study(None, "s", SPACE, SIZES, 0)
    bad = 0
    for number in range(5):
        batch = study.batch(number, 8)
        study.tell(number, {c: None if c.warps == 8 else answers([c])[c] for c in batch})
        bad += number >= 3 and sum(c.warps == 8 for c in batch)
    assert bad <= 6  # of 16


def test_questions_depend_on_what_came_before_only(tmp_path):
    once = searched(Study(tmp_path / "a", "s", SPACE, SIZES, 3), range(4))
    parts = []
    for number in range(4):
        parts += searched(Study(tmp_path / "b", "s", SPACE, SIZES, 3), [number])
    assert once == parts
    assert once != searched(Study(None, "s", SPACE, SIZES, 4), range(4))


@pytest.mark.parametrize("part", [0.15, 0.35, 0.5, 0.62, 0.8, 0.93, 0.99])
def test_a_journal_cut_anywhere_leads_to_the_same_questions(tmp_path, part):
    """As a kill leaves it: a torn line, trials that run for ever, answers that only some studies know."""
    path = tmp_path / "journal"
    once = searched(Study(path, "s", SPACE, SIZES, 3), range(3))
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    assert searched(Study(path, "s", SPACE, SIZES, 3), range(3)) == once
    states = [t.state for s in Study(path, "s", SPACE, SIZES, 3)._studies.values() for t in s.get_trials()]
    assert not any(state == optuna.trial.TrialState.RUNNING for state in states)


def test_optuna_reads_the_journal(tmp_path):
    path = tmp_path / "journal"
    searched(Study(path, "s", SPACE, SIZES, 0), range(2))
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    study = optuna.load_study(study_name="s/long", storage=storage)
    assert len(study.trials) == 16
    assert study.best_value == pytest.approx(min(t.value for t in study.trials))


def test_answers_that_need_no_questions_are_recorded_once(tmp_path):
    configs = SPACE[:5]
    for _ in range(2):
        study = Study(tmp_path / "journal", "s", configs, SIZES, 0)
        study.record({**answers(configs[:4]), configs[4]: None})
    trials = study._studies["long"].get_trials()
    assert len(trials) == 5
    assert json.loads(trials[0].user_attrs["config"])["family"] == "mma"


def test_nearest_is_by_steps_of_the_axes():
    lattice = Lattice(SPACE)
    config = SPACE[17]
    assert lattice.nearest(lattice.point(config), set()) == config
    near = lattice.nearest(lattice.point(config), {config})
    steps = [abs(a - b) for a, b in zip(lattice.point(config), lattice.point(near), strict=True)]
    assert near != config
    assert sum(steps) <= 2
    assert lattice.nearest(lattice.point(config), set(SPACE)) is None


def test_optuna_logs_as_before_when_two_threads_have_asked():
    """The level is one for the process: who comes in between would take the other's for what was before."""
    logger, entered, leave = logging.getLogger("optuna"), threading.Event(), threading.Event()
    before = logger.level

    def ask():
        with _quiet():
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=ask)
    with _quiet():
        assert logger.level == logging.ERROR
        other.start()
        entered.wait(0.2)
    leave.set()
    other.join()
    assert logger.level == before
