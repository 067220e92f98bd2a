"""The proof rejects every planted fault and passes what is right: NumPy kernels, and the real ones, emulated."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from fake_bench import CASES
from scripted_runtime import FAULTS, ONLY_BACKWARD, ScriptedRuntime

from cupyflash.dispatch import plan_backward, plan_forward
from cupyflash.resources import KNOWN_GPUS, why_illegal
from cupyflash.runtime import emulated
from cupyflash.runtime.host import HostRuntime
from cupyflash.tiles import TileConfig
from cupyflash.tuning.passes import HostMemory, Pass
from cupyflash.tuning.proof import CASES as ALL_CASES
from cupyflash.tuning.proof import ProofCase, Prover, Wrong, problem_of
from cupyflash.tuning.tasks import Size, TuningTask, default_tasks

MMA = {
    "forward": TileConfig("mma", 64, 32, 4),
    "backward": TileConfig("mma", 32, 64, 4, dq_warps_d=2),
}
KINDS = [("bfloat16", True), ("float32", False)]


def config_of(task, dtype):
    if dtype == "float32":
        return TileConfig("simt", 32, 32, 2)
    return MMA[task]


@pytest.mark.parametrize("task", MMA)
@pytest.mark.parametrize(("dtype", "masked"), KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_rejected(fault, dtype, masked, task):
    if task == "forward" and fault in ONLY_BACKWARD:
        pytest.skip("a forward has no such thing")
    if fault == "hidden values counted" and not masked:
        pytest.skip("nothing is hidden")
    prover = Prover(ScriptedRuntime(KNOWN_GPUS["H200"], fault), HostMemory())
    with pytest.raises(Wrong):
        prover.prove(TuningTask(task, dtype, 64, 64, masked), config_of(task, dtype), cases=CASES)


@pytest.mark.parametrize("task", MMA)
@pytest.mark.parametrize(("dtype", "masked"), KINDS)
def test_right_kernels_pass(dtype, masked, task):
    tuning_task = TuningTask(task, dtype, 64, 64, masked)
    prover = Prover(ScriptedRuntime(KNOWN_GPUS["H200"]), HostMemory())
    prover.prove(tuning_task, config_of(task, dtype))
    for changes in tuning_task.siblings():
        prover.prove(tuning_task, config_of(task, dtype), changes, CASES)


def test_the_message_says_where():
    prover = Prover(ScriptedRuntime(KNOWN_GPUS["H200"], "a tile is not written"), HostMemory())
    with pytest.raises(Wrong, match=r"out is nan at \(0, 30, 0, 0\), expected .* \(Sq=37 Sk=70 normal\)"):
        prover.prove(TuningTask("forward", "bfloat16", 64, 64, False), MMA["forward"], cases=CASES)


def test_a_pass_keeps_what_it_writes_to_whatever_becomes_of_the_list_it_came_in():
    """A workspace that grew was freed under earlier passes, which then wrote into other tasks' arrays."""
    task = TuningTask("backward", "bfloat16", 64, 64, True)
    problem = task.problem(Size(64, 1), heads=1)
    arrays = [np.zeros(1 << 16, np.uint8).view(ml_dtypes.bfloat16)[: 64 * 64].reshape(1, 64, 1, 64) for _ in range(10)]
    arrays[5], arrays[6] = np.zeros((1, 1, 64), np.float32), None
    arrays.append(np.zeros(1 << 16, np.float32))
    workspace = weakref.ref(arrays[-1])
    ready = Pass(ScriptedRuntime(KNOWN_GPUS["H200"]), task.task, config_of("backward", "bfloat16"), problem, arrays)
    arrays[-1] = np.zeros(1 << 17, np.float32)
    gc.collect()
    assert workspace() is not None
    del ready


# ---- the real kernels

REDUCED = [
    ("forward", "bfloat16", TileConfig("mma", 64, 32, 4)),
    ("forward", "bfloat16", TileConfig("wgmma", 128, 32, 12, 2)),
    ("forward", "tf32", TileConfig("mma", 32, 32, 2)),
    ("forward", "float32", TileConfig("simt", 32, 32, 2, 2)),
    ("backward", "bfloat16", TileConfig("mma", 32, 64, 4, 2, 1, 1, 1, 2, True)),
    ("backward", "bfloat16", TileConfig("wgmma", 64, 128, 12, 2, first_stores=False)),
    ("backward", "float32", TileConfig("simt", 32, 32, 2, dq_warps_d=2)),
    ("backward_dq", "tf32", TileConfig("mma", 32, 16, 2, 2)),
]
SMALL = (ProofCase(70, 133, 2, 1), ProofCase(40, 20), ProofCase(40, 40, numbers="hidden"))


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.skipif(not emulated.available(), reason="the emulated device needs g++")
@pytest.mark.parametrize(
    ("task", "dtype", "config"), REDUCED, ids=[f"{task} {dtype} {config.family}" for task, dtype, config in REDUCED]
)
def test_reduced_space_is_proven_on_the_emulated_device(task, dtype, config):
    tuning_task = TuningTask(task, dtype, 64, 64, True, (Size(64, 1),))
    runtime = HostRuntime()
    assert why_illegal(task, config, tuning_task.problem(Size(64, 1)), runtime.limits()) is None
    Prover(runtime, HostMemory()).prove(tuning_task, config, cases=SMALL)


@pytest.mark.usefixtures("no_winners")  # which depend on the size
@pytest.mark.parametrize("task", default_tasks("full"), ids=lambda task: task.name)
def test_the_proof_launches_what_is_measured(task):
    """What only the proof launched would be compiled while the GPU waits, and what is measured would not be proven."""
    plan = plan_forward if task.task == "forward" else plan_backward

    def kernels(problem):
        return {kernel for kernel, _ in plan(problem, 16, KNOWN_GPUS["H200"]).launches}

    for changes in ({}, *task.siblings()):
        measured = kernels(task.problem(Size(128, 1), **changes))
        for case in ALL_CASES:
            assert kernels(problem_of(task, case, changes)) == measured, case
