"""The space has every legal configuration and none that is not, for GPUs that need not be there."""

import itertools
import random
import sys
from dataclasses import replace

import compiling
import pytest

from cupyflash import heuristics
from cupyflash.cli import main
from cupyflash.dispatch import plan_backward, plan_forward
from cupyflash.resources import KNOWN_GPUS, shared_bytes, why_illegal
from cupyflash.tiles import TASKS, TileConfig
from cupyflash.tuning.dry_run import describe_space, known_limits, shared_memory_wall
from cupyflash.tuning.space import families, space, task_spaces
from cupyflash.tuning.tasks import DTYPE_KINDS, Size, TuningTask, default_tasks

H200 = KNOWN_GPUS["H200"]
SIZE = Size(512, 4)


@pytest.mark.parametrize("gpu", KNOWN_GPUS)
def test_all_is_legal_and_what_is_taken_untuned_is_there(gpu):
    limits = KNOWN_GPUS[gpu]
    for task, dtype, head_dim in itertools.product(TASKS, DTYPE_KINDS, (64, 256)):
        problem = TuningTask(task, dtype, head_dim, head_dim, True).problem(SIZE)
        found = space(task, problem, limits)
        assert len(found) == len(set(found))
        assert {why_illegal(task, config, problem, limits) for config in found} <= {None}
        untuned = heuristics.candidates(task, problem, limits)
        assert untuned[:1] == found[:1]
        assert set(untuned) <= set(found) or task == "backward_dkv"


def test_no_two_configurations_are_one_kernel():
    """dK and dV alone have no dQ, and so no warps that share it."""
    found = space("backward_dkv", TuningTask("backward_dkv", "bfloat16", 64, 64, True).problem(SIZE), H200)
    assert len({replace(config, dq_warps_d=1) for config in found}) == len(found)


def test_multiply_adds_are_searched_only_where_there_are_no_tensor_cores():
    def found(dtype, gpu, masked=True):
        problem = TuningTask("forward", dtype, 64, 64, masked).problem(SIZE)
        return set(families(space("forward", problem, KNOWN_GPUS[gpu])))

    assert found("bfloat16", "H200") == {"wgmma", "mma", "v1"}
    assert found("bfloat16", "A100") == {"mma", "v1"}
    assert found("bfloat16", "T4") == {"simt"}
    assert found("float32", "H200", masked=False) == {"mma"}
    assert found("float32", "H200", masked=True) == {"mma"}
    assert found("float32", "RTX4090", masked=False) == {"simt"}  # three products there are slower than one


def test_exact_float32_has_the_family_of_each_size():
    """One sequence of 128 with 16 heads has 32 tiles of 64 queries, for 132 multiprocessors; 16 sequences have 512."""
    few, many = Size(128, 1), Size(128, 16)
    found = task_spaces(TuningTask("forward", "float32", 128, 128, True, (few, many)), H200)
    assert {family: sizes for family, (_, sizes) in found.items()} == {"simt": [few], "mma": [many]}
    assert {config.family for members, _ in found.values() for config in members} == {"simt", "mma"}
    for gpu, task, d in itertools.product(("H200", "A100", "RTX4090"), TASKS, (64, 80, 112, 128, 160, 224, 256)):
        task, limits = TuningTask(task, "float32", d, d, False, (few, many)), KNOWN_GPUS[gpu]
        expected = {heuristics.exact_family(task.task, task.problem(size), limits) for size in (few, many)} - {None}
        assert set(task_spaces(task, limits)) == expected, (gpu, task)
    found = task_spaces(TuningTask("forward", "bfloat16", 128, 128, True, (few, many)), H200)
    assert {tuple(sizes) for _, sizes in found.values()} == {(few, many)}


@pytest.mark.skipif(bool(compiling.missing()), reason=compiling.missing() or "it compiles")
@pytest.mark.parametrize("task", TASKS)
def test_the_compiler_agrees_on_what_lanes_can_share(task):
    """The static assertions of the kernels, against the formula."""
    problem = TuningTask(task, "float32", 128, 128, False).problem(SIZE)
    uneven = TileConfig("simt", 40, 40, 8)  # five rows to a warp
    assert "cannot share 5 x" in why_illegal(task, uneven, problem, H200)
    legal = random.Random(task).choice(space(task, problem, H200))
    for config, accepted in ((legal, True), (uneven, False)):
        plan = (plan_forward if task == "forward" else plan_backward)(problem, 16, H200, {task: config})
        kernel = plan.launches[{"forward": 0, "backward_dq": 2}.get(task, 1)][0]
        try:
            compiling.compile_cuda(kernel, "sm_90")
            compiled = True
        except compiling.CompileError:
            compiled = False
        assert compiled == accepted, config


# ---- the dry run


def test_the_wall_is_where_shared_memory_ends():
    task = TuningTask("forward", "bfloat16", 128, 128, True)
    problem = task.problem(SIZE)
    members = families(space("forward", problem, H200))["wgmma"]
    for Br, (largest, wall) in shared_memory_wall("forward", members, problem, H200).items():
        leanest = min((c for c in members if c.Br == Br), key=lambda c: (c.stages, c.cluster))
        assert shared_bytes("forward", replace(leanest, Bc=wall), problem) <= H200.shared_bytes
        assert shared_bytes("forward", replace(leanest, Bc=wall + 16), problem) > H200.shared_bytes
        assert largest <= wall


def test_a_dry_run_counts_what_would_be_searched():
    tasks = default_tasks("quick", head_dims=(64,), dtypes=("bfloat16",), tasks=("forward",))
    lines = list(describe_space(tasks, known_limits("A100")))
    problem = tasks[0].problem(tasks[0].sizes[0])
    count = len(families(space("forward", problem, KNOWN_GPUS["A100"]))["mma"])
    assert lines[0].startswith("NVIDIA A100-SXM4-80GB: sm_80, 108 multiprocessors, 163 KiB")
    assert f"forward-bfloat16-d64-masked: {count} mma; 64: 128/608" in lines[2]
    assert lines[-1] == f"{2 * (count + 1)} configurations in 2 tasks"  # one of "v1"


def test_dry_run_needs_no_gpu(capsys):
    assert main(["tune", "--dry-run", "--gpu", "L4", "--tasks", "forward", "--head-dims", "64,128"]) == 0
    assert "NVIDIA L4: sm_89" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "--gpu", "V100"], "V100 is sm_70, and the kernels need sm_75"),
        (["--gpu", "A100"], "it needs --dry-run"),
        (["--tasks", "sideways"], "tasks has 'sideways'; expected some of forward, backward,"),
        (["--head-dims", "0"], "head_dims is [0]; sizes are positive"),
        (["--head-dims", "64,512"], "head_dim is 512; the GPU computes 1 to 256"),
        (["--algorithm", "v1", "--dtypes", "float32"], "dtypes is ['float32'], which leaves nothing"),
        (["--budget", "soon"], "expected a time above 0, as in 30s, 10m or 1h"),
    ],
)
def test_wrong_options_are_usage_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *arguments])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_tuning_needs_is_named_before_it_starts(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune"]) == 1
    assert 'pip install "cupyflash[tune]"' in capsys.readouterr().err


# ---- tasks


def test_quick_tasks_cover_what_is_common_first():
    tasks = default_tasks("quick")
    assert tasks[0].name == "forward-bfloat16-d64-masked"
    assert len({task.name for task in tasks}) == len(tasks) == 48
    assert {task.dtype for task in tasks} == {"bfloat16", "tf32", "float32"}
    assert len(default_tasks("full")) > len(tasks)


def test_what_is_listed_twice_is_tuned_once():
    twice = default_tasks("quick", ("forward",) * 2, ("tf32",) * 2, (64, 64), (700, 700))
    assert twice == default_tasks("quick", ("forward",), ("tf32",), (64,), (700,))
    assert twice[0].sizes == (Size(700, 11),)


def test_a_size_is_that_of_the_measured_problem():
    task = TuningTask("backward", "tf32", 64, 128, True)
    problem = task.problem(Size(300, 7))
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (7, 300, 300)
    assert (problem.head_dim, problem.head_dim_v, problem.dtype, problem.precision) == (64, 128, "float32", "tf32")
    assert problem.is_masked
    assert task.name == "backward-tf32-d64x128-masked"
