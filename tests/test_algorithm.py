"""The algorithm that a caller asks for is the one that computes, or an error says why not."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
from textbook import TOLERANCE, bottom_right, close, randn, textbook

import cupyflash
from cupyflash import cpu, dispatch, standard
from cupyflash.cli.explain import explain
from cupyflash.engine import Engine, mappable
from cupyflash.problem import Band, Problem
from cupyflash.reference import reference_backward, reference_forward
from cupyflash.resources import KNOWN_GPUS
from cupyflash.runtime.host import HostRuntime
from cupyflash.tiles import ALGORITHM_OF, ALGORITHMS, STANDARD, TASKS, TileConfig
from cupyflash.tuning import store
from cupyflash.tuning.entries import Entry, Kind, content, parse
from cupyflash.tuning.passes import HostMemory
from cupyflash.tuning.proof import ProofCase, Prover
from cupyflash.tuning.space import families as families_of
from cupyflash.tuning.space import space
from cupyflash.tuning.tasks import Size, TuningTask, default_tasks

H200, A100, T4 = (KNOWN_GPUS[name] for name in ("H200", "A100", "T4"))
ASKED = tuple(name for name in ALGORITHMS if name != "auto")


def problem(algorithm="auto", head_dim=64, dtype="float16", **changes):
    precision, deterministic = changes.pop("precision", "ieee"), changes.pop("deterministic", False)
    band = changes.pop("band", Band(None, None))
    sizes = (1, 512, 512, 4, 2, head_dim, head_dim)
    return Problem(*sizes, dtype, band, 0.125, 0.0, precision, deterministic, algorithm)


def families(plan):
    return [config.family for _, config, _ in plan.configs]


# ---- on the CPU


@pytest.mark.parametrize("algorithm", ["auto", "v2", "standard"])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((33, 47), {}),
        ((47, 33), {"causal": True}),  # rows that see nothing
        ((40, 40), {"window": (5, 3), "softcap": 2.0}),
        ((7, 1), {"scale": -0.3, "causal": "top_left"}),
    ],
)
def test_cpu(algorithm, lengths, options):
    Sq, Sk = lengths
    q, k, v, dout = randn(2, Sq, 4, 24), randn(2, Sk, 2, 24), randn(2, Sk, 2, 16), randn(2, Sq, 4, 16, seed=1)
    dlse = randn(2, 4, Sq)
    p = Problem.of(q, k, v, **options)
    expected, expected_lse = reference_forward(p, q, k, v)
    gradients = reference_backward(p, dout, q, k, v, dlse)

    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, algorithm=algorithm, **options)
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)
    close(out, expected, "float32")
    close(lse, expected_lse, "float32")
    for gradient, right in zip(vjp(dout, dlse), gradients, strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-5, atol=5e-5)

    swapped = [x.transpose(0, 2, 1, 3) for x in (q, k, v, dout)]
    bhsd = cupyflash.attention(*swapped[:3], layout="bhsd", algorithm=algorithm, **options)
    close(bhsd, expected.transpose(0, 2, 1, 3), "float32")
    gradients_bhsd = cupyflash.attention_backward(
        swapped[3], *swapped[:3], bhsd, lse, layout="bhsd", dlse=dlse, algorithm=algorithm, **options
    )
    for gradient, right in zip(gradients_bhsd, gradients, strict=True):
        np.testing.assert_allclose(gradient, right.transpose(0, 2, 1, 3), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_standard_in_other_dtypes(dtype):
    q, k = randn(1, 20, 2, 16, dtype=dtype), randn(1, 30, 2, 16, dtype=dtype)
    wide = np.full((1, 40, 2, 16), 7, dtype)
    out, lse = cupyflash.attention(q, k, k, algorithm="standard", causal=True, return_lse=True, out=wide[:, ::2])
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    expected, expected_lse = textbook(q, k, k, bottom_right(20, 30))
    close(wide[:, ::2], expected, dtype)
    close(lse, expected_lse, dtype)
    assert (wide[:, 1::2] == 7).all()
    gradients = cupyflash.attention_backward(out, q, k, k, out, lse, causal=True, algorithm="standard")
    for gradient, right in zip(
        gradients, reference_backward(Problem.of(q, k, k, causal=True), out, q, k, k), strict=True
    ):
        assert gradient.dtype == dtype
        np.testing.assert_allclose(gradient, right, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_each_algorithm_has_its_module(monkeypatch):
    calls = []
    for module in (cpu, standard):

        def note(*arguments, module=module, forward=module.forward):
            calls.append(module)
            return forward(*arguments)

        monkeypatch.setattr(module, "forward", note)
    q = randn(1, 6, 2, 8, seed=3)
    for algorithm in ("auto", "v2", "standard", "v2"):
        cupyflash.attention(q, q, q, algorithm=algorithm)
    assert calls == [cpu, cpu, standard, cpu]


@pytest.mark.parametrize("algorithm", ["v1", "v3"])
def test_what_the_cpu_does_not_have(algorithm):
    q = randn(1, 6, 2, 8)
    out, lse = cupyflash.attention(q, q, q, return_lse=True)
    message = (
        f"algorithm is '{algorithm}', which is a GPU's; NumPy arrays are computed on the CPU by 'v2' or 'standard'"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        cupyflash.attention(q, q, q, algorithm=algorithm)
    with pytest.raises(ValueError, match=re.escape(message)):
        cupyflash.attention_backward(out, q, q, q, out, lse, algorithm=algorithm)
    supported, reason = cupyflash.supported(q, q, q, algorithm=algorithm)
    assert not supported
    assert message in reason


@pytest.mark.parametrize("algorithm", ["v4", "V2", None, 2])
def test_unknown(algorithm):
    q = randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match=f"algorithm is {algorithm!r}; expected one of 'auto', 'standard', 'v1', "):
        cupyflash.attention(q, q, q, algorithm=algorithm)


# ---- which kernels


def test_every_family_has_one_algorithm():
    assert {ALGORITHM_OF[family] for family in ALGORITHMS["auto"]} == set(ASKED)
    assert sum(len(ALGORITHMS[name]) for name in ASKED) == len(ALGORITHMS["auto"])


@pytest.mark.parametrize("winners", [True, False])
@pytest.mark.parametrize("band", [Band(None, None), Band(None, 0)])
@pytest.mark.parametrize(
    ("algorithm", "gpu", "changes", "forward", "backward"),
    [
        ("v1", H200, {}, ["v1"], ["v1"]),
        ("v1", H200, {"deterministic": True}, ["v1"], ["v1"]),
        ("v1", H200, {"dtype": "float32", "precision": "tf32"}, ["v1"], ["v1"]),
        ("v1", A100, {"dtype": "bfloat16", "head_dim": 256}, ["v1"], ["v1"]),
        ("v1", T4, {"head_dim": 128}, ["v1"], ["v1"]),
        ("auto", H200, {}, ["wgmma"], ["wgmma"]),
        ("auto", A100, {}, ["mma"], ["mma"]),
        ("v2", H200, {}, ["mma"], ["mma"]),
        ("v2", H200, {"deterministic": True}, ["mma"], ["mma", "mma"]),
        ("v2", T4, {"dtype": "float32"}, ["simt"], ["simt"]),
        ("v2", H200, {"dtype": "float32", "precision": "tf32"}, ["mma"], ["mma"]),
        ("v2", T4, {"dtype": "bfloat16"}, ["simt"], ["simt", "simt"]),
        ("v3", H200, {}, ["wgmma"], ["wgmma"]),
        ("v3", H200, {"deterministic": True}, ["wgmma"], ["wgmma"]),
        ("v3", H200, {"head_dim": 256}, ["wgmma"], ["wgmma"]),
        ("standard", H200, {}, ["standard"], ["standard"]),
        ("standard", H200, {"deterministic": True}, ["standard"], ["standard"]),
        ("standard", T4, {"dtype": "float32"}, ["standard"], ["standard"]),
    ],
)
def test_families(algorithm, gpu, changes, forward, backward, band, winners, monkeypatch):
    if not winners:
        for find in ("find", "find_related"):
            monkeypatch.setattr(store, find, lambda *_: ())
    p = problem(algorithm, band=band, **changes)
    assert families(dispatch.plan_forward(p, 16, gpu)) == forward
    assert families(dispatch.plan_backward(p, 16, gpu)) == backward


@pytest.mark.parametrize(
    ("gpu", "changes", "arrays", "reason"),
    [
        (A100, {}, (16, True), "wgmma needs sm_90; NVIDIA A100-SXM4-80GB is sm_80"),
        (H200, {"dtype": "float32"}, (16, True), "wgmma kernels compute float16 and bfloat16, not float32"),
        (H200, {}, (8, True), "tensor maps need strides above 0, and addresses"),
        (H200, {}, (16, False), "tensor maps need strides above 0, and addresses"),
    ],
)
def test_what_v3_cannot_compute(gpu, changes, arrays, reason):
    width, maps = arrays
    for plan, task in ((dispatch.plan_forward, "forward"), (dispatch.plan_backward, "backward")):
        message = f"algorithm is 'v3', which has no {task} kernel for {changes.get('dtype', 'float16')}, head_dim 64"
        with pytest.raises(dispatch.UnsupportedError, match=re.escape(message)) as raised:
            plan(problem("v3", **changes), width, gpu, mappable=maps)
        assert reason in str(raised.value)
        assert "'auto' takes an algorithm that can" in str(raised.value)


@pytest.mark.parametrize(("batch", "family"), [(32, "mma"), (1, "simt")])
def test_exact_float32_is_v2_on_either_instructions(batch, family):
    p = dataclasses.replace(problem("v2", dtype="float32"), batch=batch)
    for plan in (dispatch.plan_forward, dispatch.plan_backward):
        assert [config.family for _, config, _ in plan(p, 16, H200).configs] == [family]


@pytest.mark.parametrize(
    ("gpu", "changes", "reason"),
    [
        (H200, {"dtype": "float32"}, 'no v1 kernel for exact float32; precision="tf32" allows TF32'),
        (T4, {"dtype": "bfloat16"}, "bfloat16 on tensor cores needs sm_80; Tesla T4 is sm_75"),
    ],
)
def test_what_v1_cannot_compute(gpu, changes, reason):
    for plan in (dispatch.plan_forward, dispatch.plan_backward):
        with pytest.raises(dispatch.UnsupportedError, match="algorithm is 'v1', which has no") as raised:
            plan(problem("v1", **changes), 16, gpu)
        assert reason in str(raised.value)


def test_one_block_per_head():
    """Of queries in the forward, of keys in the backward; float32 of what lies in memory between two visits."""
    p = dataclasses.replace(problem("v1", head_dim=40), batch=3, seqlen_q=500, head_dim_v=24)
    forward, backward = dispatch.plan_forward(p, 16, H200), dispatch.plan_backward(p, 16, H200)
    ((kernel, blocks),) = forward.launches
    assert (kernel.name, blocks) == ("forward_v1", 3 * 4)
    (_, config, _), tiles = forward.configs[0], -(-500 // forward.configs[0][1].Br)
    assert forward.kept_floats == 3 * 4 * tiles * config.Br * (32 + 2)  # columns of tiles, m and l
    (rows, row_blocks), (kernel, blocks) = backward.launches
    assert (rows.name, kernel.name, blocks) == ("backward_rows", "backward_v1", 3 * 2)
    tiles = -(-500 // backward.configs[0][1].Br)
    assert row_blocks == 3 * 4 * tiles
    assert backward.dq_floats == 3 * 4 * tiles * backward.configs[0][1].Br * 48
    assert backward.delta_floats == 3 * 4 * 500


def test_what_v3_cannot_compute_in_one_pass():
    wide = problem("v3", head_dim=256, deterministic=True)
    assert families(dispatch.plan_forward(wide, 16, H200)) == ["wgmma"]
    with pytest.raises(dispatch.UnsupportedError, match="above head dim 128 dQ is added to its sum in any order"):
        dispatch.plan_backward(wide, 16, H200)


def test_supported_looks_at_the_arrays():
    """Rows of a view that are no multiple of 16 bytes apart; the emulated device is a Hopper."""
    pytest.importorskip("cupy")
    engine = Engine(HostRuntime())
    q = np.zeros((1, 8, 2, 64), np.float16)
    odd = np.zeros((1, 8, 2, 68), np.float16)[..., :64]
    p = problem("v3")
    engine.check(p, q, q, q)
    assert mappable([q, odd])
    with pytest.raises(dispatch.UnsupportedError, match="tensor maps need"):
        engine.check(p, q, odd, q)
    with pytest.raises(dispatch.UnsupportedError, match="tensor maps need"):
        engine.check(p, q, q[:, ::-1], q)


# ---- winners


def measured(monkeypatch, *configs):
    winners = tuple(
        SimpleNamespace(config=config, origin="tuned: user NVIDIA_H200.yaml", distance=0.0, is_general=True)
        for config in configs
    )
    monkeypatch.setattr(store, "find", lambda *_: winners)


@pytest.mark.parametrize("config", [STANDARD, TileConfig("v1", 64, 64, 4)])
@pytest.mark.parametrize("task", ["forward", "backward"])
def test_auto_takes_what_was_fastest(task, config, monkeypatch):
    measured(monkeypatch, config)
    plan = dispatch.plan_forward if task == "forward" else dispatch.plan_backward
    planned = plan(problem(), 16, H200)
    assert planned.configs == ((task, config, "tuned: user NVIDIA_H200.yaml"),)
    assert bool(planned.launches) == (config != STANDARD)
    assert families(plan(problem("v3"), 16, H200)) == ["wgmma"]
    assert families(plan(problem("v2"), 16, H200)) == ["mma"]


def test_tiles_of_what_has_none_are_passed_over(monkeypatch):
    measured(monkeypatch, TileConfig("standard", 64, 64, 4))
    assert families(dispatch.plan_forward(problem(), 16, H200)) == ["wgmma"]
    measured(monkeypatch, STANDARD)
    apart = problem("v2", deterministic=True)
    assert families(dispatch.plan_backward(apart, 16, A100)) == ["mma", "mma"]


def test_an_asked_algorithm_takes_its_measured_tiles(monkeypatch):
    tiles = TileConfig("mma", 64, 48, 4)
    measured(monkeypatch, TileConfig("wgmma", 128, 64, 12, 2), tiles)
    assert dispatch.choose("forward", problem("v2"), H200) == (tiles, "tuned: user NVIDIA_H200.yaml")


@pytest.mark.parametrize("config", [STANDARD, TileConfig("v1", 64, 128, 8, 2)])
@pytest.mark.parametrize("task", TASKS)
def test_in_a_file(task, config):
    entry = Entry(Kind.of(task, problem()), config)
    assert content(entry)["config"]["family"] == config.family
    assert parse(content(entry)) == entry


@pytest.mark.parametrize("task", ["forward", "backward"])
def test_the_tuner_searches_v1_where_it_is_asked_to(task):
    described = TuningTask(task, "bfloat16", 64, 64, True, algorithm="v1")
    assert described.name == f"{task}-bfloat16-d64-masked-v1"
    found = space(task, described.problem(Size(512, 4)), H200)
    assert {config.family for config in found} == {"v1"} == set(families_of(found))
    assert len(found) > 20
    auto = space(task, TuningTask(task, "bfloat16", 64, 64, True).problem(Size(512, 4)), H200)
    of_families = [config.family for config in auto]
    assert of_families.count("v1") == 1
    assert "standard" not in of_families


def test_tasks_of_v1_are_what_it_has_kernels_for():
    tasks = default_tasks("full", algorithm="v1")
    assert {task.algorithm for task in tasks} == {"v1"}
    assert {task.task for task in tasks} == {"forward", "backward"}
    assert {task.dtype for task in tasks} == {"bfloat16", "tf32"}
    with pytest.raises(ValueError, match="algorithm is 'v3'; expected one of 'auto', 'v1'"):
        default_tasks(algorithm="v3")


@pytest.mark.emulated
@pytest.mark.parametrize("task", ["forward", "backward"])
def test_the_prover_runs_v1(task):
    """And its workspaces: what a pass is measured with is what a call launches."""
    described = TuningTask(task, "float16", 64, 64, True, algorithm="v1")
    prover = Prover(HostRuntime(), HostMemory())
    prover.prove(described, TileConfig("v1", 32, 32, 2, 2), cases=(ProofCase(70, 45, 2, 1),))


# ---- explain


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ("gpu=H200", "algorithm v3 (FlashAttention-3), the fastest where it was measured"),
        ("gpu=T4", "algorithm v2 (FlashAttention-2), the newest that this problem and GPU allow"),
        ("gpu=H200 algorithm=v2", "algorithm v2 (FlashAttention-2), as asked for"),
        ("gpu=H200 algorithm=v2", "not wgmma: algorithm 'v2' is asked for"),
        ("gpu=H200 algorithm=standard", "algorithm standard (S and P in memory), as asked for"),
        ("gpu=H200 algorithm=v3", "arrays with negative or zero strides, or not aligned to 16 bytes, are refused"),
        ("gpu=A100 algorithm=v3", "algorithm is 'v3', which has no forward kernel for float16"),
    ],
)
def test_explain(description, said):
    assert said in explain(f"B=8 S=256 {description}", lambda: None)


def test_explain_names_what_was_measured(monkeypatch):
    measured(monkeypatch, STANDARD)
    said = explain("S=64 gpu=H200", lambda: None)
    assert "forward   standard  (tuned: user NVIDIA_H200.yaml)" in said
    assert "algorithm standard (S and P in memory), the fastest where it was measured" in said
    assert "not wgmma: was slower where it was measured" in said
    assert "not mma: was slower where it was measured" in said


# ---- by the engine


def test_standard_by_addresses():
    """The engine makes arrays around addresses: any strides, a dlse or none, and an lse that nobody wants."""
    engine = Engine(HostRuntime(), {"forward": STANDARD, "backward": STANDARD})
    q, k = randn(2, 20, 4, 16)[:, ::-2], randn(2, 14, 2, 32)[..., ::2].transpose(0, 1, 2, 3)
    k = np.ascontiguousarray(k)[:, ::-1]
    p = Problem.of(q, k, k, causal=True)
    expected, expected_lse = reference_forward(p, q, k, k)
    room = np.full((2, 20, 4, 16), 7, np.float32)
    out, lse = room[:, ::2], np.full((2, 4, 10), np.nan, np.float32)
    engine.forward(p, q, k, k, out, None)
    close(out, expected, "float32")
    assert (room[:, 1::2] == 7).all()
    out[...] = 0
    engine.forward(p, q, k, k, out, lse)
    close(out, expected, "float32")
    close(lse, expected_lse, "float32")
    for dlse in (None, randn(2, 4, 10)):
        gradients = [np.full(x.shape, np.nan, np.float32) for x in (q, k, k)]
        engine.backward(p, out, q, k, k, out, lse, *gradients, dlse)
        for gradient, right in zip(gradients, reference_backward(p, out, q, k, k, dlse), strict=True):
            np.testing.assert_allclose(gradient, right, rtol=1e-5, atol=5e-5)


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["standard", "v1", "v2", "v3"])
def test_emulated(algorithm, monkeypatch):
    loaded = []
    load = HostRuntime.load
    monkeypatch.setattr(HostRuntime, "load", lambda self, *args: loaded.append(args[0].file) or load(self, *args))
    q, k = randn(1, 9, 1, 16, dtype="float16"), randn(1, 33, 1, 16, dtype="float16")
    out, lse = cupyflash.attention(q, k, k, return_lse=True, algorithm=algorithm, device="emulated")
    files = {"standard": [], "v1": ["forward_v1.cu"], "v2": ["forward_mma.cu"], "v3": ["forward_wgmma.cu"]}
    assert loaded == files[algorithm]
    expected, expected_lse = textbook(q, k, k)
    close(out, expected, "float16")
    close(lse, expected_lse, "float16")


# ---- with a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ASKED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gpu(algorithm, dtype):
    import cupy
    import ml_dtypes

    def gpu(array):
        return cupy.asarray(array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))

    q, k, dout = gpu(randn(2, 300, 4, 64)), gpu(randn(2, 333, 2, 64)), gpu(randn(2, 300, 4, 64, seed=1))
    p = Problem.of(q, k, k, causal=True)
    supported, reason = cupyflash.supported(q, k, k, causal=True, algorithm=algorithm)
    if not supported:
        with pytest.raises(dispatch.UnsupportedError, match=re.escape(reason)):
            cupyflash.attention(q, k, k, causal=True, algorithm=algorithm)
        return
    host = [x.get().astype(np.float64) for x in (q, k, k)]
    expected, expected_lse = reference_forward(p, *host)
    gradients = reference_backward(p, dout.get().astype(np.float64), *host)
    for _ in range(2):  # the second call is bound
        out, lse, vjp = cupyflash.attention_vjp(q, k, k, causal=True, return_lse=True, algorithm=algorithm)
        close(out.get(), expected, dtype)
        close(lse.get(), expected_lse, dtype)
        for gradient, right in zip(vjp(dout), gradients, strict=True):
            assert np.abs(gradient.get().astype(np.float64) - right).max() < 4 * TOLERANCE[dtype] * np.abs(right).max()
