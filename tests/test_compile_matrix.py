"""What ships compiles without a warning and without a spill: the kernels that dispatch takes where nothing is measured.

Not every combination, but each for a reason. A kernel depends on the architecture (registers, instructions), on the
tiles (shared memory of the GPU, head dims, dtype), on the band, on the kind of score and on how wide accesses are. All
are compiled for the common case, causal float16, and then one of them is varied at a time. Measured winners are
compiled for what they were measured with. What an entry computes is not of interest here. What several parts ask for
is compiled once.
"""

import dataclasses
import functools
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from unittest import mock

import compiling
import pytest

from cupyflash import dispatch, resources
from cupyflash.problem import Band, Problem
from cupyflash.resources import KNOWN_GPUS
from cupyflash.runtime import emulated
from cupyflash.runtime.cuda import options
from cupyflash.runtime.source import flatten
from cupyflash.tiles import TileConfig
from cupyflash.tuning import files, layers, store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_winners"),
    pytest.mark.skipif(bool(compiling.missing()), reason=compiling.missing() or "NVRTC works"),
]

# One GPU per architecture; those of one architecture in KNOWN_GPUS have the same shared memory, and so the same tiles.
GPUS = {
    "sm_75": "T4",
    "sm_80": "A100",
    "sm_86": "RTX3090",
    "sm_89": "L4",
    "sm_90": "H200",
    "sm_100": "B200",
    "sm_120": "RTX5090",
}
UNMEASURED = {arch: KNOWN_GPUS[gpu] for arch, gpu in GPUS.items()}  # with no_winners
DIMS = (64, 128, 256)
BANDS = {"none": Band(None, None), "causal": Band(None, 0), "window": Band(-100, 0), "left": Band(-100, None)}
FORWARD, BACKWARD, DETERMINISTIC = "forward", "backward", "deterministic"
PASSES = (FORWARD, BACKWARD, DETERMINISTIC)
REGISTERS_PER_SM = 65536


# What ptxas makes of a warpgroup's kernel and still calls information: products that wait for each other, registers
# that stay with the producer.
SERIALIZED = re.compile(r"\(C\d+\)|Potential Performance Loss|setmaxnreg")


def problem(
    d=128, dv=None, dtype="float16", band="causal", scale=0.125, softcap=0.0, deterministic=False, algorithm="auto"
):
    dtype, precision = ("float32", dtype) if dtype in ("tf32", "ieee") else (dtype, "ieee")
    dv = d if dv is None else dv
    sizes = (2, 1024, 1024, 4, 2, d, dv)
    return Problem(*sizes, dtype, BANDS[band], scale, softcap, precision, deterministic, algorithm)


def matrix():
    """{what is compiled, and why: [(architecture, pass, what differs from the common case)]}"""
    cases = {}
    for arch in GPUS:
        cases[f"{arch}: the common case"] = [(arch, run, {"d": d}) for d, run in product(DIMS, PASSES)]
    for arch, passes in {"sm_80": (BACKWARD,), "sm_90": PASSES, "sm_120": (FORWARD, BACKWARD)}.items():
        cases[f"{arch}: bfloat16 is converted by other instructions"] = [
            (arch, run, {"d": d, "dtype": "bfloat16"}) for d, run in product(DIMS, passes)
        ]
    for arch in ("sm_80", "sm_89", "sm_90"):  # three sizes of shared memory
        cases[f"{arch}: TF32 has operands and tiles of its own"] = [
            (arch, run, {"d": d, "dtype": "tf32"}) for d, run in product(DIMS, PASSES)
        ]
    for arch in ("sm_75", "sm_80", "sm_90", "sm_120"):
        cases[f"{arch}: float32 has kernels of its own"] = [
            (arch, run, {"d": d, "dtype": "ieee"}) for d, run in product(DIMS, PASSES)
        ]
    others = ({"band": "none"}, {"band": "window", "softcap": 30.0})
    cases["sm_90: float32 that is split, other bands, scores and head dims"] = [
        ("sm_90", run, {"dtype": "ieee", **changes})
        for changes, run in product(
            (*({"d": d, **more} for d in DIMS for more in others), *({"d": d} for d in (20, 59, 96, 160))), PASSES
        )
    ]
    cases["sm_80: float32 that is split, other bands and scores"] = [
        ("sm_80", run, {"d": d, "dtype": "ieee", **more}) for d, more, run in product((64, 128), others, PASSES)
    ]
    cases["sm_75: bfloat16 has no tensor cores"] = [
        ("sm_75", run, {"d": d, "dtype": "bfloat16"}) for d, run in product(DIMS, (FORWARD, BACKWARD))
    ]
    padded = {"sm_75": (16, 40, 59, 96, 192), "sm_89": (16, 40, 59, 96, 192), "sm_90": (40, 59, 192)}
    for arch, passes in {"sm_75": (BACKWARD,), "sm_89": (FORWARD, BACKWARD), "sm_90": PASSES}.items():
        cases[f"{arch}: head dims that tiles pad, or that warps share otherwise"] = [
            (arch, run, {"d": d}) for d, run in product(padded[arch], passes)
        ]
    cases["sm_90: other bands"] = [
        ("sm_90", run, {"d": d, "band": band})
        for band, d, run in product(("none", "window"), DIMS, (FORWARD, BACKWARD))
    ]
    for arch in ("sm_80", "sm_90"):
        cases[f"{arch}: other scores"] = [
            (arch, run, changes) for changes, run in product(({"scale": -0.1}, {"softcap": 30.0}), PASSES)
        ]
    cases["sm_90: values of another head dim"] = [
        ("sm_90", run, {"d": d, "dv": dv}) for (d, dv), run in product(((192, 128), (64, 256)), (FORWARD, BACKWARD))
    ]
    first = {"algorithm": "v1"}
    for arch in GPUS:
        cases[f"{arch}: the first FlashAttention"] = [
            (arch, run, first | {"d": d, "band": band})
            for d, run, band in product(DIMS, (FORWARD, BACKWARD), ("none", "causal"))
            if (arch, d, run) != ("sm_75", 256, BACKWARD)  # for which there is not enough shared memory
        ]
    cases["the first FlashAttention: other dtypes, bands, scores and head dims"] = [
        (arch, run, first | changes)
        for arch, changes, run in product(
            ("sm_80", "sm_90"),
            (
                *({"d": d, "dtype": dtype} for d, dtype in product(DIMS, ("bfloat16", "tf32"))),
                *({"d": d, "band": "window"} for d in DIMS),
                *({"scale": -0.1}, {"softcap": 30.0}, {"d": 59}, {"d": 192, "dv": 128}, {"d": 64, "dv": 256}),
            ),
            (FORWARD, BACKWARD),
        )
    ]
    for arch in ("sm_90", "sm_100", "sm_120"):
        cases[f"{arch}a: the architecture-specific target"] = [(f"{arch}a", run, {}) for run in (FORWARD, BACKWARD)]
    return cases


def kernels(arch, run, changes):
    """What a pass launches."""
    p = problem(**changes, deterministic=run == DETERMINISTIC)
    limits, width = UNMEASURED[arch.rstrip("a")], 16 if p.head_dim % 8 == 0 else p.itemsize
    if run == FORWARD and p.algorithm == "auto":
        plans = [dispatch.plan_forward(p, width, limits, mappable=mappable) for mappable in (True, False)]
    else:
        plan = dispatch.plan_forward if run == FORWARD else dispatch.plan_backward
        plans = [plan(p, width, limits)]
    return [kernel for plan in plans for kernel, _ in plan.launches]


def hopper_matrix():
    """{what is compiled, and why: [(tiles that are not to be chosen, what differs from the common case)]}"""
    equal = [(d, d) for d in DIMS]  # the dtypes differ in single instructions: one of them has all pairs
    dims = {"float16": equal, "bfloat16": [*equal, (96, 96), (192, 192), (192, 128), (128, 64), (40, 24)]}
    cases = {
        f"{dtype}, {band}": [({}, {"d": d, "dv": dv, "dtype": dtype, "band": band}) for d, dv in dims[dtype]]
        for dtype, band in product(dims, ("none", "causal", "window"))
    }
    cases["one bound"] = [({}, {"d": d, "band": "left"}) for d in DIMS]
    cases["other scores"] = [
        ({}, {"d": d, **score}) for d, score in product(DIMS, ({"scale": -0.1}, {"softcap": 30.0}))
    ]
    consumers = {64: TileConfig("wgmma", 192, 128, 16, 2), 128: TileConfig("wgmma", 128, 128, 12, 2)}
    cases["maxima of every tile, no turns"] = [
        ({"forward": dataclasses.replace(consumers[d], stale_maximum=stale, turns=turns)}, {"d": d, "band": band})
        for d, band, (stale, turns) in product(consumers, ("none", "causal"), ((False, True), (True, False)))
    ]
    four = TileConfig("wgmma", 256, 64, 20, 3)
    cases["four consumers"] = [
        ({"forward": four}, {"d": 64, "dtype": dtype, "band": band})
        for dtype, band in product(("float16", "bfloat16"), ("none", "causal", "window"))
    ]
    pairs = {d: dataclasses.replace(config, cluster=2) for d, config in consumers.items()}
    pairs[256] = TileConfig("wgmma", 128, 64, 12, 2, cluster=2)
    cases["clusters"] = [
        ({"forward": pairs[d]}, {"d": d, "dtype": dtype, "band": band})
        for d, dtype, band in product(pairs, ("float16", "bfloat16"), ("none", "causal", "window"))
    ]
    cases["half tiles"] = [
        ({"forward": dataclasses.replace(consumers[d], halves=True)}, {"d": d, "dtype": "bfloat16"}) for d in consumers
    ]
    return cases


def hopper_backward_matrix():
    """The same of the backward: {what is compiled, and why: [(its tiles, what differs from the common case)]}"""
    narrow = TileConfig("wgmma", 128, 128, 12, 2, rounded_queries=32)
    wide = TileConfig("wgmma", 64, 128, 12, 2, folded_rows=True)
    tall = dataclasses.replace(wide, Br=80, rounded_queries=32)
    equal = [(narrow, 64, 64), (wide, 128, 128), (tall, 128, 128)]
    mixed = [(narrow, 40, 24), (wide, 64, 128), (wide, 128, 64), (wide, 96, 96)]
    chosen = {"float16": equal, "bfloat16": [*equal, *mixed]}
    cases = {
        f"{dtype}, {band}": [
            (config, {"d": d, "dv": dv, "dtype": dtype, "band": band}) for config, d, dv in chosen[dtype]
        ]
        for dtype, band in product(chosen, ("none", "causal", "window"))
    }
    cases["options"] = [
        (dataclasses.replace(config, **options), {"d": d, "band": band})
        for (config, d, options), band in product(
            (
                (wide, 128, {"first_stores": False}),
                (wide, 128, {"rounded_queries": 64}),
                (wide, 128, {"folded_rows": False}),
                (tall, 128, {"folded_rows": False}),
                (narrow, 64, {"first_stores": False}),
                (narrow, 64, {"folded_rows": True}),
                (wide, 64, {"stages": 3}),
                (narrow, 40, {"Br": 32, "values_in_registers": True}),
            ),
            ("none", "causal"),
        )
    ]
    cases["other scores"] = [
        (wide, {"d": d, **score}) for d, score in product((64, 128), ({"scale": -0.1}, {"softcap": 30.0}))
    ]
    roles = TileConfig("wgmma", 64, 64, 16, 2)
    dims = {"float16": [(256, 256)], "bfloat16": [(256, 256), (192, 192), (160, 256), (224, 136)]}
    cases |= {
        f"roles, {dtype}, {band}": [(roles, {"d": d, "dv": dv, "dtype": dtype, "band": band}) for d, dv in dims[dtype]]
        for dtype, band in product(dims, ("none", "causal", "window", "left"))
    }
    cases["roles, other scores"] = [
        (roles, {"d": 256, "dtype": dtype, "band": band, **score})
        for dtype, band, score in product(dims, ("none", "causal"), ({"scale": -0.1}, {"softcap": 30.0}))
    ]
    cases["roles, options"] = [
        (dataclasses.replace(roles, **options), {"d": d, "dv": dv, "dtype": dtype, "band": band})
        for (d, dv, band, options), dtype in product(
            (
                (256, 256, "causal", {"rounded_weights": True}),
                (256, 256, "none", {"dq_first": True}),  # causal: 16 bytes of spills with NVRTC 13.5, none with 13.0
                (192, 128, "causal", {"stages": 3}),
            ),
            dims,
        )
    ]
    return cases


def defaults(cases):
    return {(arch, kernel) for arch, run, changes in cases for kernel in kernels(arch, run, changes)}


def hopper(cases):
    """CuPy asks for sm_90, which has no wgmma; the kernel's own target stays in force."""
    launched = set()
    for given, changes in cases:
        ((kernel, _),) = dispatch.plan_forward(problem(**changes), 16, UNMEASURED["sm_90"], given).launches
        assert kernel.target == "sm_90a"
        launched.add(("sm_90", kernel))
    return launched


def hopper_backward(cases):
    launched = set()
    for config, changes in cases:
        plan = dispatch.plan_backward(problem(**changes), 16, UNMEASURED["sm_90"], {BACKWARD: config})
        assert plan.launches[1][0].target == "sm_90a"
        launched |= {("sm_90", kernel) for kernel, _ in plan.launches}
    return launched


def measured(path):
    winners = files.read(path).winners
    dtypes = {"half": ("float16", "bfloat16"), "tf32": ("tf32",), "float32": ("ieee",)}
    kinds = {entry.kind for entry in winners.entries}
    launched = set()
    for entry in winners.entries:
        kind, config = entry.kind, entry.config
        for dtype in dtypes.get(kind.dtype, (kind.dtype,)):
            if kind.dtype == "half" and dataclasses.replace(kind, dtype=dtype) in kinds:
                continue  # it has an entry of its own
            if dtype == "float16" and config.family != "wgmma":
                continue  # measured with bfloat16, whose instructions are as many
            apart = kind.task in ("backward_dkv", "backward_dq")
            band = "causal" if kind.masked else "none"
            p = problem(kind.head_dim, kind.head_dim_v, dtype, band, deterministic=apart)
            plan = dispatch.plan_forward if kind.task == "forward" else dispatch.plan_backward
            planned = plan(p, 16, winners.device, {kind.task: config})
            launched |= {(f"sm_{winners.device.arch}", kernel) for kernel, _ in planned.launches}
    return launched


def parts():
    """{what is compiled, and why: {(architecture, source, macros, target): the module's kernels that are launched}}.

    Each module is in the first part that asks for it, with the kernels that any of them launches.
    """
    asked = {name: functools.partial(defaults, cases) for name, cases in matrix().items()}
    asked |= {f"Hopper: {name}": functools.partial(hopper, cases) for name, cases in hopper_matrix().items()}
    asked |= {
        f"Hopper's backward: {name}": functools.partial(hopper_backward, cases)
        for name, cases in hopper_backward_matrix().items()
    }
    asked |= {path.stem: functools.partial(measured, path) for path in sorted(layers.packaged_folder().glob("*.yaml"))}
    modules, parts = {}, {}
    with mock.patch.multiple(store, find=lambda *_: (), find_related=lambda *_: ()):  # as no_winners does
        for name, launched in asked.items():
            for arch, kernel in launched():
                module = arch, kernel.file, kernel.defines, kernel.target
                if module not in modules:
                    modules[module] = parts.setdefault(name, {})[module] = set()
                modules[module].add(kernel)
    return parts


def complaints(arch, *launched, text=None):
    """What is wrong with a module that has these kernels, a line each."""
    kernel = launched[0]
    what = f"{kernel.file} for {arch} {' '.join(option for option in options(kernel) if option[:2] == '-D')}"
    try:
        log = compiling.compile_cuda(kernel, arch, "--ptxas-options=-v", text=text)
    except compiling.CompileError as error:
        return [f"{what}: does not compile:\n{error}"]
    found = [f"{what}: {line}" for line in log.splitlines() if "warning" in line.lower() or SERIALIZED.search(line)]
    usage = compiling.usage(log)
    for name, used in usage.items():
        if used.spill_bytes or used.stack_bytes:
            found.append(f"{what}: {name} spills {used.spill_bytes} bytes, its stack has {used.stack_bytes}")
    for kernel in launched:
        if usage[kernel.name].registers * kernel.threads > REGISTERS_PER_SM:
            found.append(
                f"{what}: {kernel.name} has {usage[kernel.name].registers} registers, too many for "
                f"{kernel.threads} threads"
            )
    return found


PARTS = parts()


@pytest.mark.parametrize("modules", PARTS.values(), ids=list(PARTS))
def test_compiles_without_spills(modules):
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda module: complaints(module[0], *modules[module]), modules)
        lines = [line for lines in found for line in lines]
    assert not lines, "\n".join(sorted(lines))


def test_kernels_need_no_extensions():
    """Of C++: NVRTC 12.0 and 12.4 do not know all of them (structs without a name, for one)."""
    if not emulated.available():
        pytest.skip("there is no g++")
    some_kernel = {kernel.file: kernel for modules in PARTS.values() for (kernel, *_) in map(list, modules.values())}
    assert len(some_kernel) == 11
    for file, kernel in some_kernel.items():
        macros = [f"-D{name}={value}" for name, value in kernel.defines]
        strictly = ["g++", "-std=c++17", "-pedantic-errors", "-fsyntax-only", "-x", "c++", "-", *macros]
        done = subprocess.run(strictly, input=flatten(file, "emulated"), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_complaints_are_found():
    """Of a kernel that spills, of one that draws a warning, and of one that does not compile."""
    p = problem(64)
    kernel = next(iter(kernels("sm_80", FORWARD, {"d": 64})))
    crowded = TileConfig("mma", 128, 128, 4, blocks_per_sm=4)
    assert resources.registers("forward", crowded, p) > REGISTERS_PER_SM // 4 // crowded.threads
    (line,) = complaints("sm_90", dispatch._kernel("forward", crowded, p, 16, UNMEASURED["sm_90"]))
    assert "forward_mma spills" in line
    assert complaints("sm_90", kernel_with(kernel, "CF_ELEMENT", "Float17"))[0].count("does not compile")
    assert "warning" in complaints("sm_90", kernel_with(kernel, "CF_SCORE", "(-1 > 0u ? 0 : 0)"))[0]


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("wgmma_wait<1>();", "S.x[0] += O.x[0];"),  # a sum that is still being computed
        ("KERNEL(kThreads, 1)", 'extern "C" __global__'),  # ptxas does not know how many registers there are to give
    ],
)
def test_serialized_products_are_found(written, instead):
    ((kernel, _),) = dispatch.plan_forward(problem(128), 16, UNMEASURED["sm_90"]).launches
    text = flatten(kernel.file)
    assert written in text
    assert any(SERIALIZED.search(line) for line in complaints("sm_90", kernel, text=text.replace(written, instead)))


def kernel_with(kernel, name, value):
    changed = tuple((dict(kernel.defines) | {name: value}).items())
    return dispatch.Kernel(kernel.file, kernel.name, changed, kernel.threads, kernel.shared_bytes)
