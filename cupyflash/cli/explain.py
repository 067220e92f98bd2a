"""How the GPU would compute a problem: kernels, tiles, and where the choice comes from. Nothing is launched."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from cupyflash import dispatch
from cupyflash.problem import GPU_DTYPES, Band, Problem, check_gpu
from cupyflash.resources import KNOWN_GPUS, Limits
from cupyflash.tiles import ALGORITHM_OF, STANDARD, TileConfig

DEFAULTS = {"B": 1, "S": 1024, "H": 16, "D": 64}
SIZES = ("B", "S", "Sq", "Sk", "H", "Hk", "D", "Dv")
NUMBERS = ("scale", "softcap")
PROBLEM_HELP = (
    'as in "B=8 S=256 H=12 D=64 dtype=bfloat16 causal"; also Sq, Sk, Hk, Dv, scale, softcap, window=LEFT,RIGHT, '
    "precision, deterministic, algorithm=v2, and gpu=H200 to plan for another GPU"
)
WORDS = ("causal", "window", "dtype", "precision", "deterministic", "algorithm", "gpu")
_TITLES = {"standard": "S and P in memory", "v1": "FlashAttention", "v2": "FlashAttention-2", "v3": "FlashAttention-3"}


def explain(description: str, current_gpu: Callable[[], Limits]) -> str:
    """What ``"B=8 S=256 H=12 D=64 dtype=bfloat16 causal gpu=A100"`` leads to, one kernel to a line.

    Each task has its tiles, the algorithm and why it is this one, and why others are not.

    Args:
        description: ``key=value`` pairs and flags, see ``SIZES``, ``NUMBERS`` and ``WORDS``. What is left out is as in
            ``attention``, and ``DEFAULTS``.
        current_gpu: limits of the GPU to plan for if the description names none.

    Raises:
        ValueError: a key is unknown, or its value does not fit.
        TypeError: as ``attention`` raises it.
    """
    problem, limits = problem_and_gpu(description, current_gpu)
    lines = [("problem", describe(problem)), ("GPU", describe_gpu(limits))]
    vector_bytes = vector_bytes_as_allocated(problem)
    mappable = vector_bytes == 16
    for direction, plan in (("forward", dispatch.plan_forward), ("backward", dispatch.plan_backward)):
        try:
            planned = plan(problem, vector_bytes, limits)
        except dispatch.UnsupportedError as error:
            lines.append((direction, str(error)))
            continue
        for task, config, origin in planned.configs:
            lines.append((task, f"{describe_config(config)}  ({origin})"))
            lines.append(("", _describe_algorithm(problem, config, origin)))
            passed_over = dispatch.passed_over(task, config, problem, limits, mappable)
            lines += [("", f"not {family}: {reason}") for family, reason in passed_over.items()]
            if config.family == "wgmma":
                apart = dispatch.backward_tasks(problem, limits, mappable=False) if task == "backward" else (task,)
                try:
                    other = f"take {dispatch.choose(apart[0], problem, limits, mappable=False)[0].family}"
                except dispatch.UnsupportedError:
                    other = "are refused"
                lines.append(("", f"arrays with negative or zero strides, or not aligned to 16 bytes, {other}"))
        for kernel, blocks in planned.launches:
            lines.append(
                (
                    "",
                    f"{kernel.name} of {kernel.file}: {blocks:,} blocks of {kernel.threads} threads, "
                    f"{kernel.shared_bytes / 1024:g} KiB of shared memory each",
                )
            )
        if planned.share:
            those = f"those behind the first {planned.whole_works:,}" if planned.whole_works else "all"
            lines.append(("", f"of the key tiles, {those} are shared out: {planned.share} query tiles to each block"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {line}" for name, line in lines)


def problem_and_gpu(description: str, current_gpu: Callable[[], Limits]) -> tuple[Problem, Limits]:
    """The problem of a description and the GPU that it names, or the current one; arguments and errors as above."""
    given = _parse(description)
    gpu = given.pop("gpu", None)
    if gpu is not None and gpu not in KNOWN_GPUS:
        raise ValueError(f"gpu is {gpu!r}; expected one of {', '.join(KNOWN_GPUS)}, or none for this machine's")
    problem = _problem(given)
    check_gpu(problem)
    try:
        limits = KNOWN_GPUS[gpu] if gpu else current_gpu()
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"{error}; or name a GPU to plan for, as in gpu=H200") from error
    return problem, limits


def vector_bytes_as_allocated(problem: Problem) -> int:
    """The alignment of arrays as they are allocated: contiguous, and aligned to more than their rows are."""
    return math.gcd(16, problem.head_dim * problem.itemsize, problem.head_dim_v * problem.itemsize)


def _parse(description: str) -> dict[str, str]:
    given = {}
    for part in description.split():
        key, has_value, value = part.partition("=")
        if key not in SIZES + NUMBERS + WORDS:
            raise ValueError(f"unknown key {key!r}; expected {', '.join(SIZES + NUMBERS + WORDS)}")
        if not has_value and key not in ("causal", "deterministic"):
            raise ValueError(f"{key} needs a value: {key}=...")
        given[key] = value
    return given


def _problem(given: dict[str, str]) -> Problem:
    sizes = DEFAULTS | {key: _size(key, given[key]) for key in SIZES if key in given}
    numbers = {key: _number(float, key, given[key]) for key in NUMBERS if key in given}
    dtype = given.get("dtype", "float16")
    if dtype not in GPU_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(GPU_DTYPES)}")
    causal = given.get("causal", "False") or "True"
    deterministic = given.get("deterministic", "False") or "True"
    if deterministic not in ("True", "False"):
        raise ValueError(f"deterministic is {deterministic!r}; expected True or False")

    def array(seqlen: str, heads: str, head_dim: str) -> Any:
        shape = (
            sizes["B"],
            sizes.get(seqlen, sizes["S"]),
            sizes.get(heads, sizes["H"]),
            sizes.get(head_dim, sizes["D"]),
        )
        return SimpleNamespace(shape=shape, dtype=dtype)

    return Problem.of(
        array("Sq", "H", "D"),
        array("Sk", "Hk", "D"),
        array("Sk", "Hk", "Dv"),
        causal={"True": True, "False": False}.get(causal, causal),
        window=_window(given["window"]) if "window" in given else None,
        precision=given.get("precision"),
        deterministic=deterministic == "True",
        algorithm=given.get("algorithm", "auto"),
        **numbers,
    )


def _size(key: str, text: str) -> int:
    size: int = _number(int, key, text)
    if size < 1:
        raise ValueError(f"{key} is {size}; expected 1 at least")
    return size


def _number(kind: Callable[[str], Any], key: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key} is {text!r}; expected a number") from None


def _window(text: str) -> tuple[int | None, int | None]:
    sides = text.split(",")
    if len(sides) != 2:
        raise ValueError(f"window is {text!r}; expected LEFT,RIGHT, either of them an integer or None")
    left, right = (None if side in ("", "None") else _number(int, "window", side) for side in sides)
    return left, right


def describe(problem: Problem) -> str:
    """All that a problem is, on one line."""
    p = problem
    options = [
        f"scale {p.scale:g}",
        *([_describe_band(p.band)] if p.band != Band(None, None) else []),
        *([f"softcap {p.softcap:g}"] if p.softcap else []),
        *([p.precision] if p.dtype == "float32" else []),
        *(["deterministic"] if p.deterministic else []),
        *([f"algorithm {p.algorithm}"] if p.algorithm != "auto" else []),
    ]
    return (
        f"B={p.batch} Sq={p.seqlen_q} Sk={p.seqlen_k} H={p.num_heads} Hk={p.num_kv_heads} D={p.head_dim} "
        f"Dv={p.head_dim_v} {p.dtype}, {', '.join(options)}"
    )


def _describe_algorithm(problem: Problem, config: TileConfig, origin: str) -> str:
    name = ALGORITHM_OF[config.family]
    if problem.algorithm != "auto":
        reason = "as asked for"
    elif origin.startswith("tuned"):
        reason = "the fastest where it was measured"
    else:
        reason = "the newest that this problem and GPU allow"
    return f"algorithm {name} ({_TITLES[name]}), {reason}"


def _describe_band(band: Band) -> str:
    first = "" if band.first is None else f"{band.first} <= "
    last = "" if band.last is None else f" <= {band.last}"
    return f"visible {first}j - i{last}"


def describe_gpu(limits: Limits) -> str:
    """A GPU's name, and what decides which tiles fit it."""
    return (
        f"{limits.name}: sm_{limits.arch}, {limits.sm_count} multiprocessors, "
        f"{limits.shared_bytes / 1024:g} KiB of shared memory per block"
    )


def describe_config(config: TileConfig) -> str:
    """The family, and the numbers that are not at their default."""
    if config == STANDARD:
        return config.family
    numbers = [
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(config)
        if field.name != "family" and getattr(config, field.name) != field.default
    ]
    return f"{config.family} {' '.join(numbers)}"
