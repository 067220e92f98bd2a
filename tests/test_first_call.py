"""CUPYFLASH_TUNE=first-call: what is tuned when, and that nothing of it makes a call fail."""

import threading
import warnings

import numpy as np
import pytest

from cupyflash import dispatch, engine
from cupyflash.problem import Problem
from cupyflash.resources import KNOWN_GPUS
from cupyflash.tiles import TileConfig
from cupyflash.tuning import first_call, kernel_hash, layers, settings, store
from cupyflash.tuning.entries import Entry, Kind

L4 = KNOWN_GPUS["L4"]  # of whose architecture nothing ships
WINNER = TileConfig("mma", 64, 32, 4)


def problem(seqlen=512, **options):
    q = np.zeros((1, seqlen, 2, 64), np.float16)
    return Problem.of(q, q, q, **options)


@pytest.fixture
def tuner(monkeypatch, tmp_path):
    """A tuner that finds WINNER for everything; its ``calls`` are (task, problem, limits)."""
    calls = []

    def tune(task, problem, limits):
        calls.append((task, problem, limits))
        store.keep([Entry(Kind.of(task, problem), WINNER)], limits)

    tune.calls = calls
    monkeypatch.setattr(first_call, "run_tuner", tune)
    monkeypatch.setattr(first_call, "_tried", set())
    monkeypatch.setattr(first_call, "_failed", False)
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setattr(layers, "_memory", {})
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    store.refresh()
    yield tune
    store.refresh()


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setenv("CUPYFLASH_TUNE", "first-call")


@pytest.mark.parametrize("value", [None, "", "off"])
def test_nothing_is_tuned_unless_asked_for(tuner, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("CUPYFLASH_TUNE", value)
    first_call.tune_if_asked(("forward",), problem(), L4)
    assert tuner.calls == []


@pytest.mark.parametrize("value", ["on", "first_call", "OFF"])
def test_another_value_is_off_with_one_warning(tuner, monkeypatch, value):
    monkeypatch.setenv("CUPYFLASH_TUNE", value)
    with pytest.warns(settings.ConfigWarning, match=f"CUPYFLASH_TUNE is '{value}'; expected off or first-call"):
        first_call.tune_if_asked(("forward",), problem(), L4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_call.tune_if_asked(("forward",), problem(), L4)
    assert tuner.calls == []


@pytest.mark.usefixtures("asked")
def test_the_first_call_of_a_kind_is_tuned(tuner):
    pytest.importorskip("filelock")
    first_call.tune_if_asked(("forward",), problem(), L4)
    assert tuner.calls == [("forward", problem(), L4)]
    assert dispatch.choose("forward", problem(), L4) == (WINNER, "tuned: user NVIDIA_L4.yaml")
    first_call.tune_if_asked(("forward",), problem(500), L4)  # of the same kind
    assert len(tuner.calls) == 1
    first_call.tune_if_asked(("backward_dkv", "backward_dq"), problem(500), L4)
    first_call.tune_if_asked(("forward",), problem(2048), L4)
    first_call.tune_if_asked(("forward",), problem(), KNOWN_GPUS["A100"])
    assert [(task, p.seqlen_q, limits.name) for task, p, limits in tuner.calls[1:]] == [
        ("backward_dkv", 500, "NVIDIA L4"),
        ("backward_dq", 500, "NVIDIA L4"),
        ("forward", 2048, "NVIDIA L4"),
        ("forward", 512, "NVIDIA A100-SXM4-80GB"),
    ]


@pytest.mark.usefixtures("asked")
def test_what_is_measured_is_not_tuned_again(tuner):
    first_call.tune_if_asked(("forward",), problem(), KNOWN_GPUS["H200"])  # which ships
    for options in ({"softcap": 3.0}, {"scale": -1.0}):  # whose kernels are never looked up
        first_call.tune_if_asked(("forward",), problem(**options), L4)
    assert tuner.calls == []


@pytest.mark.usefixtures("asked")
def test_a_tuner_that_keeps_nothing_is_not_asked_again(tuner, monkeypatch):
    """Nor by the next process: what is taken is noted, with the kernel that it was found for."""
    pytest.importorskip("filelock")
    calls = []
    monkeypatch.setattr(first_call, "run_tuner", lambda *arguments: calls.append(arguments))
    present, _ = dispatch.choose("forward", problem(), L4)
    for _ in range(2):
        first_call.tune_if_asked(("forward",), problem(), L4)
        monkeypatch.setattr(first_call, "_tried", set())
    assert len(calls) == 1
    assert dispatch.choose("forward", problem(), L4) == (present, "tuned: user NVIDIA_L4.yaml")
    (found,) = store.find("forward", problem(), L4)
    assert found.entry.kind == Kind.of("forward", problem())
    assert not kernel_hash.is_stale(present.family, "forward", found.entry.measured.kernel)


@pytest.mark.usefixtures("asked")
def test_a_kind_is_tried_once(tuner, monkeypatch):
    """Even if nothing can be written."""
    calls = []
    monkeypatch.setattr(first_call, "run_tuner", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(store, "keep", lambda *arguments: None)
    for _ in range(3):
        first_call.tune_if_asked(("forward",), problem(), L4)
    assert len(calls) == 1


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("error", [ImportError("no optuna"), RuntimeError("worker died"), TimeoutError(), OSError(28)])
def test_a_failure_is_one_warning_and_the_last_attempt(tuner, monkeypatch, error):
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        raise error

    monkeypatch.setattr(first_call, "run_tuner", fail)
    with pytest.warns(settings.ConfigWarning, match=type(error).__name__):
        first_call.tune_if_asked(("forward",), problem(), L4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seqlen in (512, 2048):
            first_call.tune_if_asked(("forward",), problem(seqlen), L4)
    assert len(calls) == 1
    assert dispatch.choose("forward", problem(), L4)[1] == "heuristic"


@pytest.mark.usefixtures("asked")
def test_whoever_interrupts_is_heard(tuner, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(first_call, "run_tuner", interrupt)
    with pytest.raises(KeyboardInterrupt):
        first_call.tune_if_asked(("forward",), problem(), L4)


@pytest.mark.usefixtures("asked")
def test_threads_wait_for_one_tuner(tuner):
    pytest.importorskip("filelock")
    threads = [threading.Thread(target=first_call.tune_if_asked, args=(("forward",), problem(), L4)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tuner.calls) == 1


class Notes:
    """A runtime that computes nothing."""

    def device(self):
        return 0

    def limits(self):
        return L4

    def address(self, array):
        return array.ctypes.data // 16 * 16

    def load(self, kernel, grid):
        return lambda params, stream: None

    def stream(self, device):
        return 0

    def workspace(self, floats):
        return 0, None


@pytest.mark.parametrize(("deterministic", "tasks"), [(False, ("backward",)), (True, ("backward_dkv", "backward_dq"))])
def test_the_engine_asks_before_it_plans(deterministic, tasks):
    told = []
    machine = engine.Engine(Notes(), before_planning=lambda *what: told.append(what))
    p = problem(deterministic=deterministic)
    x = np.zeros((1, 512, 2, 64), np.float16)
    for _ in range(2):
        machine.bind_forward(p, x, x, x, x)
        machine.bind_backward(p, *[x] * 8)
    assert told == [(("forward",), p, L4), (tasks, p, L4)]


def test_the_gpu_asks():
    """Only real GPUs tune: the emulated device has no time to measure."""
    pytest.importorskip("cupy")
    from cupyflash import emulated, gpu

    assert gpu._engine._before_planning is first_call.tune_if_asked
    assert emulated._engine._before_planning is None
