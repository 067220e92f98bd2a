"""What a tile configuration needs, against the compiler; and that every known GPU is given some that it can run."""

import dataclasses
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import compiling
import pytest

from cupyflash import dispatch, heuristics
from cupyflash.problem import Band, Problem
from cupyflash.resources import KNOWN_GPUS, Limits, registers, resident_blocks, shared_bytes, why_illegal
from cupyflash.tiles import TASKS, TileConfig, tile_head_dims
from cupyflash.tuning.space import space

HEAD_DIMS = [(d, d) for d in (8, 16, 40, 59, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)]
HEAD_DIMS += [(192, 128), (128, 256), (64, 256), (256, 16), (59, 8)]  # d_v of its own
PRECISIONS = [("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "tf32"), ("float32", "ieee")]
T4, A100, H200 = (KNOWN_GPUS[name] for name in ("T4", "A100", "H200"))


def problem(d=64, dv=None, dtype="float16", precision="ieee", deterministic=False, **changes):
    fields = {
        "batch": 2,
        "seqlen_q": 1000,
        "seqlen_k": 1100,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": d,
        "head_dim_v": d if dv is None else dv,
        "dtype": dtype,
        "band": Band(None, 100),
        "scale": 0.125,
        "softcap": 0.0,
        "precision": precision,
        "deterministic": deterministic,
    }
    return Problem(**(fields | changes))


# ---- shared memory: the kernels assert CF_SHARED_BYTES == sizeof(SharedStorage)

ASKED = {"v1": "v1"}  # families that no rule takes, and no tune searches, unless they are asked for
FRONT_END = "-dlto"  # all checks of C++ but no code
needs_nvrtc = pytest.mark.skipif(bool(compiling.missing()), reason=compiling.missing() or "NVRTC works")


def kernel_of(task, config, p, limits=H200, **changes):
    kernel = dispatch._kernel(task, config, p, p.itemsize, limits)
    return dataclasses.replace(kernel, defines=tuple((dict(kernel.defines) | changes).items()))


def spread(family, task):
    """(configuration, problem): the ends of every list, and some of the tuner's, with all kinds of head dims."""
    choose = random.Random(0)
    for dtype, precision in PRECISIONS:
        for d, dv in choose.sample(HEAD_DIMS[:14], 5) + choose.sample(HEAD_DIMS[14:], 2):
            p = problem(d, dv, dtype, precision, algorithm=ASKED.get(family, "auto"))
            listed = heuristics.candidates(task, p, H200)
            more = [config for config in space(task, p, H200) if config.family == family]
            for config in {*listed[:1], *listed[-2:], *choose.sample(more, min(2, len(more)))}:
                if config.family == family:
                    yield config, p


@needs_nvrtc
@pytest.mark.parametrize(("family", "task"), dispatch.FILES)
def test_the_compiler_finds_the_same_size(family, task):
    def failure(case):
        try:
            compiling.compile_cuda(kernel_of(task, *case), "compute_90", FRONT_END)
        except compiling.CompileError as error:
            return f"{case}: {error}"

    cases = list(spread(family, task))
    assert len(cases) > 10
    with ThreadPoolExecutor(2) as pool:
        assert [text for text in pool.map(failure, cases) if text] == []


@needs_nvrtc
@pytest.mark.parametrize(("family", "task"), dispatch.FILES)
@pytest.mark.parametrize("error", [-128, 16])
def test_a_wrong_size_does_not_compile(family, task, error):
    dtype, precision = {"wgmma": ("float16", "ieee"), "simt": ("float32", "ieee")}.get(family, ("float32", "tf32"))
    p = problem(40, 24, dtype, precision, algorithm=ASKED.get(family, "auto"))
    config = next(c for c in heuristics.candidates(task, p, H200) + space(task, p, H200) if c.family == family)
    wrong = shared_bytes(task, config, p) + error
    with pytest.raises(compiling.CompileError, match="and SharedStorage disagree"):
        compiling.compile_cuda(kernel_of(task, config, p, CF_SHARED_BYTES=wrong), "compute_90", FRONT_END)


def test_sizes_by_hand():
    p = problem(64)
    forward = TileConfig("mma", 128, 64, 4)
    assert shared_bytes("forward", forward, p) == 2 * 64 * (128 + 64 + 64) + 128  # Q, K, V, and a few indices
    assert shared_bytes("forward", forward, problem(59)) == shared_bytes("forward", forward, p)  # tiles are padded
    dq = TileConfig("mma", 64, 32, 4, 2)
    assert shared_bytes("backward_dq", dq, p) == 2 * 64 * 2 * (64 + 2 * 32)  # Q, dO; two stages of K, V
    backward = TileConfig("mma", 32, 128, 4, 2, 1, 1, 1, 2)
    tiles = 2 * (128 * 128 + 2 * 32 * 128 + 128 * 32)  # K, V; two stages of Q, dO; dS
    assert shared_bytes("backward", backward, p) == tiles + 2 * 2 * 32 * 4 + 128  # LSE and delta, indices
    hopper = 2 * (2 * 128 * 64 + 2 * 2 * 64 * 64 + 2 * 64 * 128) + 4 * 64 * 64  # K, V; Q, dO; dS twice; dQ
    rest = 2 * 2 * 64 * 4 + 1024  # LSE and delta; barriers and flags, rounded up to the alignment of panels
    assert shared_bytes("backward", WGMMA_BACKWARD, p) == hopper + rest
    assert shared_bytes("backward", WGMMA_BACKWARD, problem(40, 24)) == hopper + rest
    roles = 2 * (3 * 64 * (256 + 192) + 2 * 64 * 64) + 4 * 64 * 64  # K, V; Q, dO twice; dS twice; P as float32
    assert shared_bytes("backward", WGMMA_ROLES, problem(256, 136)) == roles + rest
    first = TileConfig("v1", 64, 128, 8, 2)
    assert shared_bytes("forward", first, problem(64, 40)) == 2 * (128 * (64 + 48) + 2 * 64 * 64)  # K, V; two of Q or O
    assert shared_bytes("forward", first, problem(40, 64)) == 2 * (128 * (48 + 64) + 2 * 64 * 64)
    tiles = 2 * (128 * 128 + 2 * 64 * 128 + 2 * 128 * 64)  # K, V; two stages of Q, dO; P and dS
    assert shared_bytes("backward", first, p) == tiles + 2 * 2 * 64 * 4 + 128  # LSE and delta, flags
    exchanged = dataclasses.replace(backward, score_warps_q=2)  # P too
    assert shared_bytes("backward", exchanged, p) == shared_bytes("backward", backward, p) + 2 * 128 * 32


# ---- legality: each reason has its case


FORWARD = TileConfig("mma", 128, 64, 4)
BACKWARD = TileConfig("mma", 64, 128, 8, 2, 1, 2, 2, 4)
WGMMA = TileConfig("wgmma", 128, 128, 12, 2)  # 64 rows for each of two consumer warpgroups
WGMMA_BACKWARD = TileConfig("wgmma", 64, 128, 12, 2)  # 64 keys for each of them
WGMMA_ROLES = TileConfig("wgmma", 64, 64, 16, 2)  # one role for each of them


@pytest.mark.parametrize(
    ("limits", "p", "reason"),
    [
        (T4, problem(dtype="bfloat16"), "bfloat16 on tensor cores needs sm_80; Tesla T4 is sm_75"),
        (T4, problem(dtype="float32", precision="tf32"), "TF32 needs sm_80; Tesla T4 is sm_75"),
        (T4, problem(dtype="float32"), "TF32 needs sm_80; Tesla T4 is sm_75"),
        (dataclasses.replace(T4, arch=70), problem(), "tensor-core kernels need sm_75; Tesla T4 is sm_70"),
    ],
)
def test_why_not_on_tensor_cores(limits, p, reason):
    for task, config in (("forward", FORWARD), ("backward", BACKWARD), ("backward_dq", FORWARD)):
        assert why_illegal(task, config, p, limits).startswith(reason)


def test_what_tensor_cores_do():
    for p in (problem(), problem(dtype="bfloat16"), *(problem(dtype="float32", precision=x) for x in ("tf32", "ieee"))):
        assert why_illegal("forward", FORWARD, p, A100) is None
    assert why_illegal("forward", FORWARD, problem(), T4) is None


@pytest.mark.parametrize(
    ("task", "changes", "reason"),
    [
        ("forward", {"Br": 96}, "Br is 96 in tiles; the warps split it in units of 64"),
        ("forward", {"Bc": 40}, "Bc is 40 in tiles; the warps split it in units of 16"),
        ("backward_dq", {"Br": 32}, "Br is 32 in tiles; the warps split it in units of 64"),
        ("backward", {"score_warps_q": 3}, "score_warps_q=3 does not divide 8 warps"),
        ("backward", {"grad_warps_d": 3}, "grad_warps_d=3 does not divide 8 warps"),
        ("backward", {"dq_warps_d": 5}, "dq_warps_d=5 does not divide 8 warps"),
        ("backward", {"score_warps_q": 8}, "Br is 64 in tiles; the warps split it in units of 128"),
        ("backward", {"Bc": 96, "score_warps_q": 4}, "Bc is 96 in tiles; the warps split it in units of 64"),
        ("backward", {"Bc": 64, "score_warps_q": 1}, "Bc is 64 in tiles; the warps split it in units of 128"),
        ("backward", {"grad_warps_d": 8}, "head_dim is 64 in tiles; the warps split it in units of 128"),
        ("backward", {"dq_warps_d": 8}, "head_dim is 64 in tiles; the warps split it in units of 128"),
        ("backward", {"dq_warps_d": 1}, "Br is 64 in tiles; the warps split it in units of 128"),
    ],
)
def test_uneven_splits(task, changes, reason):
    good = {"forward": FORWARD, "backward_dq": TileConfig("mma", 64, 32, 4), "backward": BACKWARD}[task]
    assert why_illegal(task, good, problem(), H200) is None
    assert why_illegal(task, dataclasses.replace(good, **changes), problem(), H200) == reason


def test_head_dim_of_values_is_split_too():
    config = dataclasses.replace(BACKWARD, grad_warps_d=4)
    assert why_illegal("backward", config, problem(64, 64), H200) is None
    assert why_illegal("backward", config, problem(64, 48), H200).startswith("head_dim_v is 48 in tiles")


@pytest.mark.parametrize(
    ("tiles", "rows"),
    [
        ((96, 128, 8), 12),
        ((48, 96, 8), 6),
        ((48, 64, 4), 12),
        ((96, 64, 8, 2), 24),
        ((48, 48, 2), 24),
        ((32, 64, 8), 4),
    ],
)
def test_a_lane_reads_whole_chunks_of_dS(tiles, rows):
    """With 6 or 12 rows of dQ per warp its gradient was wrong; the tuner's proof found it."""
    Br, Bc, warps, *dq_warps = tiles
    config = TileConfig("simt", Br, Bc, warps, dq_warps_d=dq_warps[0] if dq_warps else 1)
    reason = why_illegal("backward", config, problem(64, dtype="float32"), H200)
    told = f"a warp has {rows} rows of dQ; a lane's runs of them must be a multiple of 8 apart"
    assert reason == (told if rows in (6, 12) else None)


@pytest.mark.parametrize("family", ["mma", "simt"])
def test_too_many_threads(family):
    assert why_illegal("forward", TileConfig(family, 512, 16, 32), problem(16), H200) is None
    reason = why_illegal("forward", TileConfig(family, 528, 16, 33), problem(16), H200)
    assert reason == "33 warps are 1056 threads; a block has at most 1024"


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("forward", FORWARD),
        ("backward", BACKWARD),
        ("backward_dq", FORWARD),
        ("forward", WGMMA),
        ("forward", TileConfig("simt", 64, 32, 2)),
        ("backward_dkv", TileConfig("simt", 32, 64, 4)),
        ("backward_dq", TileConfig("simt", 64, 32, 4)),
    ],
)
def test_shared_memory_up_to_the_last_byte(task, config):
    need = shared_bytes(task, config, problem())
    enough = dataclasses.replace(H200, shared_bytes=need)
    assert why_illegal(task, config, problem(), enough) is None
    short = dataclasses.replace(H200, shared_bytes=need - 1)
    expected = f"needs {need} bytes of shared memory per block; NVIDIA H200 has {need - 1}"
    assert why_illegal(task, config, problem(), short) == expected


def test_shared_memory_of_several_blocks():
    """Each block costs 1 KiB on top, of the multiprocessor's memory, which is 1 KiB more than a block may have."""
    config = TileConfig("mma", 64, 32, 4, blocks_per_sm=3)
    need = shared_bytes("forward", config, problem())
    limit = 3 * need + 2 * 1024
    assert why_illegal("forward", config, problem(), dataclasses.replace(H200, shared_bytes=limit)) is None
    reason = why_illegal("forward", config, problem(), dataclasses.replace(H200, shared_bytes=limit - 1))
    assert reason == f"3 blocks need {need} bytes of shared memory each; an SM has {limit - 1 + 1024}"


@pytest.mark.parametrize(
    ("task", "config", "d", "limits", "blocks"),
    [
        ("forward", TileConfig("mma", 128, 64, 4), 128, H200, 2),  # 128 threads of 256 registers, 65,536 in all
        ("backward", TileConfig("mma", 64, 128, 8, 2), 128, H200, 1),  # 256 threads of 256
        ("forward", TileConfig("mma", 128, 64, 4, blocks_per_sm=4), 64, H200, 4),  # 128 registers each
        ("forward", TileConfig("mma", 128, 128, 4), 64, T4, 1),  # 48 KiB of 64
        ("forward", TileConfig("wgmma", 192, 80, 16, 3), 128, H200, 1),  # 512 threads of 128
        ("backward", TileConfig("wgmma", 80, 128, 12, 2), 128, H200, 1),  # 384 threads of 168
        ("forward", TileConfig("v1", 128, 128, 8, 2), 128, H200, 1),
    ],
)
def test_blocks_that_an_sm_runs_at_a_time(task, config, d, limits, blocks):
    assert resident_blocks(task, config, problem(d), limits) == blocks


@pytest.mark.parametrize(
    ("task", "config", "d", "need", "available"),
    [
        ("forward", TileConfig("mma", 128, 128, 4), 256, 256 + 128, 255),  # O: 128 x 256, S: 128 x 128, by 128 threads
        ("forward", TileConfig("mma", 128, 64, 4, blocks_per_sm=4), 128, 128 + 64, 128),
        ("forward", TileConfig("mma", 256, 64, 16, blocks_per_sm=2), 64, 32 + 32, 64),
        ("backward_dq", TileConfig("mma", 128, 128, 4), 64, 64 + 2 * 128, 255),
        ("backward", TileConfig("mma", 64, 128, 4, 1, 1, 1, 1, 1), 128, 2 * 128 + 2 * 64, 255),
        (
            "backward",
            TileConfig("mma", 64, 64, 4, 1, 1, 1, 1, 1),
            256,
            2 * 128 + 128,
            255,
        ),  # dQ, not S and dP, is the peak
        ("backward_dkv", TileConfig("mma", 64, 128, 4, 1, 1, 1, 1, 1), 128, 2 * 128 + 2 * 64, 255),
    ],
)
def test_registers(task, config, d, need, available):
    assert registers(task, config, problem(d)) == need
    reason = why_illegal(task, config, problem(d), dataclasses.replace(H200, shared_bytes=1 << 30))
    expected = f"needs {need} registers per thread for its accumulators; {available} are available"
    assert reason == (expected if need > available else None)


@pytest.mark.parametrize(
    ("limits", "task", "p", "reason"),
    [
        (A100, "forward", problem(), "wgmma needs sm_90; NVIDIA A100-SXM4-80GB is sm_80"),
        (KNOWN_GPUS["B200"], "forward", problem(), "wgmma needs sm_90; NVIDIA B200 is sm_100"),
        (KNOWN_GPUS["RTX5090"], "forward", problem(), "wgmma needs sm_90; NVIDIA GeForce RTX 5090 is sm_120"),
        (H200, "forward", problem(dtype="float32"), "wgmma kernels compute float16 and bfloat16, not float32"),
        (
            H200,
            "forward",
            problem(dtype="float32", precision="tf32"),
            "wgmma kernels compute float16 and bfloat16, not float32",
        ),
        (
            H200,
            "backward",
            problem(64, 136),
            "12 warps, Br 128 and Bc 128; warpgroups with one role each, for head dims above 128, are 16, 64, 64",
        ),
        *(
            (H200, task, problem(), f"no wgmma kernel for {task} alone: dQ, dK and dV have one kernel")
            for task in ("backward_dkv", "backward_dq")
        ),
    ],
)
def test_why_not_on_hoppers_tensor_cores(limits, task, p, reason):
    assert why_illegal(task, WGMMA, p, limits) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"warps": 8}, "8 warps; a producer and two to four consumer warpgroups are 12, 16 or 20"),
        ({"warps": 13}, "13 warps; a producer and two to four consumer warpgroups are 12, 16 or 20"),
        ({"warps": 24}, "24 warps; a producer and two to four consumer warpgroups are 12, 16 or 20"),
        ({"Br": 64}, "Br is 64; each of 2 consumer warpgroups has 64 rows"),
        ({"warps": 16}, "Br is 128; each of 3 consumer warpgroups has 64 rows"),
        ({"Bc": 40}, "Bc is 40; a product has a multiple of 16 keys, at most 256"),
        ({"Bc": 272}, "Bc is 272; a product has a multiple of 16 keys, at most 256"),
        ({"Bc": 0}, "Bc is 0; a product has a multiple of 16 keys, at most 256"),
        ({"cluster": 0}, "cluster is 0; 1 or 2 blocks share what they load"),
        ({"cluster": 4}, "cluster is 4; 1 or 2 blocks share what they load"),
        ({"Bc": 48, "halves": True}, "Bc is 48 and halves is set; half a tile of keys has a multiple of 16"),
        ({"cluster": 2}, None),
        ({"Bc": 16}, None),
        ({"warps": 16, "Br": 192}, None),
    ],
)
def test_tiles_of_warpgroups(changes, reason):
    assert why_illegal("forward", dataclasses.replace(WGMMA, **changes), problem(), H200) == reason


@pytest.mark.parametrize(
    ("changes", "is_legal"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16", "softcap": 5.0}, False),
        ({"dtype": "float16"}, False),
        ({"dtype": "bfloat16", "scale": -0.2}, False),
        ({"dtype": "bfloat16", "scale": 0.0}, False),
        ({"dtype": "bfloat16", "band": Band(-9, 0)}, False),
        ({"dtype": "bfloat16", "head_dim_v": 136}, False),
    ],
)
def test_halves_where_the_compiler_keeps_products_asynchronous(changes, is_legal):
    reason = (
        "halves is set; only bfloat16 with a positive scale, no cap, no lower bound and head dims up to 128 leaves "
        "registers for it"
    )
    config = dataclasses.replace(WGMMA, cluster=2, halves=True)
    assert why_illegal("forward", config, problem(**changes), H200) == (None if is_legal else reason)


def test_a_cluster_needs_as_many_multiprocessors():
    lonely = dataclasses.replace(H200, sm_count=1)
    reason = "clusters of 2 blocks need as many multiprocessors; NVIDIA H200 has 1"
    assert why_illegal("forward", dataclasses.replace(WGMMA, cluster=2), problem(), lonely) == reason
    assert why_illegal("forward", WGMMA, problem(), lonely) is None


def test_size_of_panels_by_hand():
    """Panels of 64 columns, 128 bytes a row: Q of each consumer, stages of K and V. One more KiB holds barriers.

    Where there is room, 2 KiB of each consumer's warp are for rows of O on their way out.
    """
    rows, out = 128 + 2 * 128 * 2, 8 * 2048
    assert shared_bytes("forward", WGMMA, problem(64)) == 128 * rows + 1024 + out
    assert shared_bytes("forward", WGMMA, problem(40)) == 128 * rows + 1024 + out  # panels are filled up
    assert shared_bytes("forward", WGMMA, problem(72)) == 2 * 128 * rows + 1024 + out
    three = TileConfig("wgmma", 192, 80, 16, 3)
    assert shared_bytes("forward", three, problem(128, 64)) == 128 * (2 * 192 + 3 * 80 * (2 + 1)) + 1024 + 12 * 2048
    full = dataclasses.replace(WGMMA, stages=3)  # 225 of 227 KiB
    assert shared_bytes("forward", full, problem(128)) == 2 * 128 * (128 + 3 * 128 * 2) + 1024
    narrow = TileConfig("wgmma", 128, 48, 12, 2)
    assert shared_bytes("forward", narrow, problem(256)) == 4 * 128 * (128 + 2 * 48 * 2) + 1024 + out
    pair = dataclasses.replace(WGMMA, cluster=2)
    assert shared_bytes("forward", pair, problem(64)) == 128 * rows + 1024
    unmasked = problem(256, band=Band(None, None))  # measured slower
    assert shared_bytes("forward", narrow, unmasked) == 4 * 128 * (128 + 2 * 48 * 2) + 1024


@pytest.mark.parametrize(
    ("config", "d", "need", "available"),
    [  # O, S, and P in 16 bits; 128 threads have 64 rows
        (TileConfig("wgmma", 128, 128, 12, 2), 128, 64 + 64 + 32, 232),
        (TileConfig("wgmma", 128, 256, 12, 1), 128, 64 + 128 + 64, 232),
        (TileConfig("wgmma", 128, 128, 12, 1), 256, 128 + 64 + 32, 232),
        (TileConfig("wgmma", 192, 128, 16, 2), 64, 32 + 64 + 32, 160),
        (TileConfig("wgmma", 192, 144, 16, 1), 128, 64 + 72 + 36, 160),
    ],
)
def test_registers_of_consumers(config, d, need, available):
    assert registers("forward", config, problem(d)) == need
    reason = why_illegal("forward", config, problem(d), dataclasses.replace(H200, shared_bytes=1 << 30))
    expected = f"needs {need} registers per thread for its accumulators; {available} are available"
    assert reason == (expected if need > available else None)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_space_of_warpgroups(d):
    """What the heuristic takes, with every option, around it other tiles; more stages where they fit."""
    p = problem(d, dtype="bfloat16")
    found = [config for config in space("forward", p, H200) if config.family == "wgmma"]
    default = heuristics.candidates("forward", p, H200)[0]
    for option in ("stale_maximum", "turns", "dynamic"):
        assert {dataclasses.replace(default, **{option: value}) for value in (False, True)} <= set(found)
    assert {dataclasses.replace(default, cluster=cluster) for cluster in (1, 2)} <= set(found)
    assert any(config.halves for config in found) == (d <= 128)
    assert len({(config.Br, config.Bc) for config in found}) > 3
    assert {config.stages for config in found} == ({2, 3, 4} if d <= 128 else {2, 3})
    assert (TileConfig("wgmma", 256, 64, 20, 4) in found) == (d == 64)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("d", "dv", "Br"), [(64, 64, 128), (128, 128, 64), (128, 128, 80), (64, 128, 64)])
def test_space_of_the_backwards_warpgroups(d, dv, Br):
    found = [config for config in space("backward", problem(d, dv), H200) if config.family == "wgmma"]
    plain = TileConfig("wgmma", Br, 128, 12, 2, rounded_queries=32)
    options = ({}, {"first_stores": False}, {"folded_rows": True})
    assert {dataclasses.replace(plain, **option) for option in options} <= set(found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("d", "dv", "folds"), [(64, 64, False), (72, 64, True), (64, 128, True), (136, 136, False)])
def test_the_backwards_warpgroups_fold_rows_where_products_have_steps_enough(d, dv, folds):
    assert heuristics.candidates("backward", problem(d, dv), H200)[0].folded_rows == folds


@pytest.mark.parametrize("options", [{"softcap": 20.0}, {"scale": -0.1}])
def test_space_has_no_two_names_for_one_kernel(options):
    found = [config for config in space("backward", problem(128, **options), H200) if config.family == "wgmma"]
    assert len({dataclasses.replace(config, folded_rows=False) for config in found}) == len(found) > 0


@pytest.mark.parametrize(
    ("d", "dv", "stages"), [(256, 256, {2}), (136, 64, {2, 3}), (192, 128, {2, 3}), (192, 192, {2, 3})]
)
def test_space_of_the_backward_of_roles(d, dv, stages):
    found = [config for config in space("backward", problem(d, dv), H200) if config.family == "wgmma"]
    assert found[0] == WGMMA_ROLES  # the heuristic's
    assert len(set(found)) == len(found)
    assert set(found) == {
        dataclasses.replace(WGMMA_ROLES, stages=number, rounded_weights=rounded, dq_first=dq_first)
        for number in stages
        for rounded, dq_first in itertools.product((True, False), repeat=2)
    }


def test_a_capped_score_needs_registers():
    """Its slope is kept in P, so that P is not only there rounded, beside what tanh takes."""
    config = dataclasses.replace(WGMMA_BACKWARD, Br=128, rounded_queries=128)
    assert registers("backward", config, problem(64)) == 2 * 32 + 2 * 64
    assert why_illegal("backward", config, problem(64), H200) is None
    reason = "needs 248 registers per thread for its accumulators; 240 are available"
    assert why_illegal("backward", config, problem(64, softcap=30.0), H200) == reason


@pytest.mark.parametrize(
    ("p", "changes", "reason"),
    [
        (
            problem(64),
            {"warps": 16},
            "16 warps and Bc 128; two consumer warpgroups of 64 keys and a producer are 12, 128",
        ),
        (
            problem(64),
            {"Bc": 64},
            "12 warps and Bc 64; two consumer warpgroups of 64 keys and a producer are 12, 128",
        ),
        (problem(64), {"Br": 80}, "Br is 80; it must be a multiple of 32 up to 128"),
        (problem(72), {"Br": 72}, "Br is 72; it must be a multiple of 16 up to 128"),
        (problem(72), {"Br": 0}, "Br is 0; it must be a multiple of 16 up to 128"),
        (
            problem(128),
            {"Br": 96},
            "needs 264192 bytes of shared memory per block; NVIDIA H200 has 232448",
        ),
        (
            problem(64),
            {"stages": 1},
            "stages is 1; the scores of a tile are computed before the one before is released, which takes 2",
        ),
        (problem(64, 128), {"stages": 3}, None),
        (problem(72), {"Br": 80}, None),
    ],
)
def test_why_not_a_backward_of_warpgroups(p, changes, reason):
    assert why_illegal("backward", dataclasses.replace(WGMMA_BACKWARD, **changes), p, H200) == reason


@pytest.mark.parametrize(
    ("p", "changes", "reason"),
    [
        (problem(256), {}, None),
        (problem(136, 8, softcap=30.0), {"rounded_weights": True}, None),
        (problem(128), {}, "16 warps and Bc 64; two consumer warpgroups of 64 keys and a producer are 12, 128"),
        *(
            (
                problem(8, 136),
                dataclasses.asdict(WGMMA_ROLES) | changes,
                f"{warps} warps, Br {Br} and Bc {Bc}; warpgroups with one role each, for head dims above 128, are "
                "16, 64, 64",
            )
            for changes, warps, Br, Bc in (
                ({"warps": 12}, 12, 64, 64),
                ({"Br": 80}, 16, 80, 64),
                ({"Bc": 128}, 16, 64, 128),
            )
        ),
        (
            problem(136),
            {"stages": 1},
            "stages is 1; the scores of a tile are computed beside the gradients of the one before, which takes 2",
        ),
        *(
            (
                problem(136),
                option,
                "values_in_registers, rounded_queries and folded_rows are of the kernel for head dims up to 128",
            )
            for option in ({"values_in_registers": True}, {"rounded_queries": 8}, {"folded_rows": True})
        ),
        (problem(256), {"stages": 3}, "needs 296960 bytes of shared memory per block; NVIDIA H200 has 232448"),
    ],
)
def test_why_not_a_backward_of_roles(p, changes, reason):
    assert why_illegal("backward", dataclasses.replace(WGMMA_ROLES, **changes), p, H200) == reason


def test_a_backward_of_roles_has_registers_for_every_head_dim():
    """256 columns of dK or dV, and the scores of 64 queries as float32 and rounded."""
    assert registers("backward", WGMMA_ROLES, problem(256)) == 128 + 32 + 16
    assert registers("backward", WGMMA_ROLES, problem(40, 136)) == 160 // 2 + 32 + 16


def test_space_has_warpgroups_where_there_is_a_kernel():
    def families(*arguments):
        return {config.family for config in space(*arguments)}

    assert families("forward", problem(), H200) >= {"wgmma", "mma"}
    for task in TASKS:
        assert "wgmma" not in families(task, problem(), A100)
    assert families("backward", problem(136), H200) == {"wgmma", "mma", "v1"}
    for task in ("backward_dkv", "backward_dq"):
        assert "wgmma" not in families(task, problem(), H200)


# ---- every known GPU


@pytest.mark.parametrize("gpu", KNOWN_GPUS)
@pytest.mark.parametrize("last", [None, 100])
@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
def test_every_gpu_has_candidates(gpu, dtype, precision, last):
    limits = KNOWN_GPUS[gpu]
    for (d, dv), task in itertools.product(HEAD_DIMS, TASKS):
        p = problem(d, dv, dtype, precision, band=Band(None, last))
        found = heuristics.candidates(task, p, limits)
        assert [why_illegal(task, config, p, limits) for config in found] == [None] * len(found)
        families = {config.family for config in found}
        assert ("simt" in families) == (task != "backward" or dtype == "float32"), (task, d, dv)  # it sums dQ in place
        hopper = task in ("forward", "backward") and limits.arch == 90 and p.itemsize == 2
        assert ("wgmma" in families) == hopper
        if runs_on_tensor_cores(task, p, limits):
            assert found[0].family == ("wgmma" if hopper else "mma"), (task, d, dv)
            assert "mma" in families  # for arrays that no tensor map describes
        elif not has_tensor_cores_for(p, limits):
            assert "mma" not in families, (task, d, dv)


def has_tensor_cores_for(p, limits):
    if p.dtype == "float32" and p.precision == "ieee":
        # Elsewhere three products take longer than one, or do not fit.
        return limits.arch == 90 or (limits.arch == 80 and max(tile_head_dims(p.head_dim, p.head_dim_v)) <= 128)
    if p.dtype == "float32":
        return limits.arch >= 80
    return limits.arch >= (80 if p.dtype == "bfloat16" else 75)


def runs_on_tensor_cores(task, p, limits):
    """All that tensor cores can do; but dK and dV of large head dims have to fit registers and shared memory."""
    large = max(p.head_dim, p.head_dim_v) > 192 and limits.shared_bytes < 160_000
    split = p.dtype == "float32" and p.precision == "ieee" and task != "forward"  # not of all head dims
    return has_tensor_cores_for(p, limits) and not split and not (task in ("backward", "backward_dkv") and large)


@pytest.mark.parametrize("gpu", KNOWN_GPUS)
@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
def test_every_gpu_has_plans(gpu, dtype, precision):
    limits = KNOWN_GPUS[gpu]
    for (d, dv), deterministic in [(dims, flag) for dims in HEAD_DIMS for flag in (False, True)]:
        p = problem(d, dv, dtype, precision, deterministic)
        for plan in (dispatch.plan_forward(p, p.itemsize, limits), dispatch.plan_backward(p, p.itemsize, limits)):
            assert plan.section >= 1
            for task, config, _ in plan.configs:
                assert why_illegal(task, config, p, limits) is None
            for kernel, grid in plan.launches:
                assert grid >= 1
                assert kernel.threads <= 1024
                assert kernel.shared_bytes <= limits.shared_bytes, kernel.name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("last", [None, 100])
@pytest.mark.parametrize(("gpu", "family"), [("H200", "mma"), ("A100", "mma"), ("B200", "simt"), ("RTX4090", "simt")])
def test_exact_float32_has_one_family_for_both_directions(gpu, family, last, deterministic):
    """The backward recomputes the scores, and rounds them as the forward has rounded its LSE."""
    for d in (32, 64, 96, 128):
        p = problem(d, dtype="float32", deterministic=deterministic, band=Band(None, last))
        plans = (dispatch.plan_forward(p, 16, KNOWN_GPUS[gpu]), dispatch.plan_backward(p, 16, KNOWN_GPUS[gpu]))
        assert {config.family for plan in plans for _, config, _ in plan.configs} == {family}


@pytest.mark.parametrize("last", [None, 0])
@pytest.mark.parametrize("heads", [1, 16, 33, 64, 1024])
@pytest.mark.parametrize("length", [64, 300, 4096])
@pytest.mark.parametrize("d", [32, 64, 96, 128])
def test_exact_float32_has_one_family_whatever_won_nearby(d, length, heads, last):
    """By rows alone; the H200 has winners of both families."""
    families = set()
    for deterministic in (False, True):
        p = problem(d, dtype="float32", deterministic=deterministic, band=Band(None, last))
        p = dataclasses.replace(p, batch=1, seqlen_q=length, seqlen_k=length, num_heads=heads, num_kv_heads=heads)
        plans = [dispatch.plan_forward(p, 16, H200), dispatch.plan_backward(p, 16, H200)]
        families |= {config.family for plan in plans for _, config, _ in plan.configs}
    assert families == {"mma" if heads * -(-length // 64) >= 33 else "simt"}


def test_what_won_in_another_family_ends_the_reach_of_far_winners():
    """Few queries and many keys: multiply-adds won for 64 of both, which says nothing here."""
    p = dataclasses.replace(
        problem(64, dtype="float32"), batch=1, seqlen_q=256, seqlen_k=32768, num_heads=8, num_kv_heads=8
    )
    config, origin = dispatch.choose("backward", p, H200)
    assert (config.family, origin) == ("simt", "heuristic")


def test_bfloat16_on_turing_is_computed_by_plain_multiply_adds():
    plans = (
        dispatch.plan_forward(problem(dtype="bfloat16"), 16, T4),
        dispatch.plan_backward(problem(dtype="bfloat16"), 16, T4),
    )
    assert [[config.family for _, config, _ in plan.configs] for plan in plans] == [["simt"], ["simt", "simt"]]
    assert plans[1].dq_floats == 0


@pytest.mark.parametrize("plan", [dispatch.plan_forward, dispatch.plan_backward])
def test_impossible_gpu(plan):
    tiny = Limits("Tiny", 80, 4 * 1024, 1, 1 << 20)
    with pytest.raises(dispatch.UnsupportedError, match=r"no (forward|backward).* float16, head_dim 64 .*on Tiny"):
        plan(problem(64), 16, tiny)


@pytest.mark.parametrize(("d", "expected"), [(1, 16), (16, 16), (17, 32), (59, 64), (128, 128), (129, 160), (256, 256)])
def test_head_dims_of_tiles(d, expected):
    assert tile_head_dims(d, d) == (expected, expected)


def test_head_dims_of_tiles_that_differ():
    """Both are split alike: what one needs the other gets."""
    assert tile_head_dims(256, 16) == (256, 32)
    assert tile_head_dims(40, 129) == (64, 160)
