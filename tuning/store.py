"""The measured winners: tile configurations per GPU model, kept in readable YAML files.

A file ``configs/<GPU name>.yaml`` holds, per task and kind of problem, what was fastest on that model:

    device: NVIDIA H200
    winners:
      - {task: forward, dtype: half, head_dim: 128, head_dim_v: 128, masked: false,
         config: {family: mma, Br: 128, Bc: 64, warps: 4}}

Several entries for one kind stand in the order of preference, one per family of kernels: not every family takes every
layout. ``dtype`` is half (float16 or bfloat16; an entry for one of the two goes first), tf32 or float32; head dims are
those of the tiles; ``masked`` says whether the problem has a band. A problem without an entry takes the heuristic, and
so does one with a cap or a scale that is not positive, whose kernels nobody has measured.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

from ..problem import Problem
from ..resources import Limits
from ..tiles import Task, TileConfig, tile_head_dims

Key = tuple[str, str, int, int, bool]


def find(task: Task, problem: Problem, limits: Limits) -> tuple[TileConfig, ...]:
    """The measured winners for a task on a GPU model, best first: one per family of kernels."""
    if problem.softcap or problem.scale <= 0:
        return ()
    kept = winners(limits.name)
    kind = key(task, problem)
    return kept.get((task, problem.dtype, *kind[2:]), ()) or kept.get(kind, ())


def key(task: Task, problem: Problem) -> Key:
    """What entries are kept under."""
    dtype = "half" if problem.itemsize == 2 else "tf32" if problem.precision == "tf32" else "float32"
    d, dv = tile_head_dims(problem.head_dim, problem.head_dim_v)
    return task, dtype, d, dv, problem.is_masked


@cache
def winners(device: str) -> dict[Key, tuple[TileConfig, ...]]:
    """All entries for a GPU model; empty for one that nobody has measured."""
    path = files("cupyflash.tuning.configs") / file_name(device)
    if not path.is_file():
        return {}
    import yaml  # only where there is something to read: it costs 20 ms

    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    found: dict[Key, tuple[TileConfig, ...]] = {}
    for e in content["winners"]:
        kind = e["task"], e["dtype"], e["head_dim"], e["head_dim_v"], e["masked"]
        found[kind] = (*found.get(kind, ()), TileConfig(**e["config"]))
    return found


def file_name(device: str) -> str:
    """The file for a GPU model: its name with everything but letters, digits, "-" and "." made "_"."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device) + ".yaml"
