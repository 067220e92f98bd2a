"""What would be tuned on a GPU, by its limits alone: how many configurations, and where shared memory ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..problem import Problem
from ..resources import KNOWN_GPUS, Limits, shared_bytes
from ..tiles import Task, TileConfig
from .space import task_spaces
from .tasks import TuningTask

_STEP = 16  # of keys


def known_limits(name: str) -> Limits:
    """The limits of a GPU by its short name.

    Raises:
        ValueError: it is not in the table.
    """
    if name in KNOWN_GPUS:
        return KNOWN_GPUS[name]
    reason = "; V100 is sm_70, and the kernels need sm_75" if name.upper() == "V100" else ""
    raise ValueError(f"gpu is {name!r}; expected one of {', '.join(KNOWN_GPUS)}{reason}")


def describe_space(tasks: Sequence[TuningTask], limits: Limits) -> Iterator[str]:
    """Lines that say what ``tune`` would search, task by task."""
    kib = limits.shared_bytes / 1024
    yield f"{limits.name}: sm_{limits.arch}, {limits.sm_count} multiprocessors, {kib:g} KiB of shared memory per block"
    yield "per Br: the largest Bc in the space / the largest that shared memory has room for"
    total = 0
    for task in tasks:
        found = task_spaces(task, limits)
        total += sum(len(members) for members, _ in found.values())
        if not found:
            yield f"{task.name}: no kernel"
        for family, (members, sizes) in found.items():
            problem = task.problem(sizes[0])
            walls = ", ".join(
                f"{Br}: {largest}/{wall}"
                for Br, (largest, wall) in shared_memory_wall(task.task, members, problem, limits).items()
            )
            yield f"{task.name}: {len(members)} {family}; {walls}"
    yield f"{total} configurations in {len(tasks)} tasks"


def shared_memory_wall(
    task: Task, configs: Sequence[TileConfig], problem: Problem, limits: Limits
) -> dict[int, tuple[int, int]]:
    """{Br: (largest Bc of the configurations, largest Bc whose tiles fit)}, by the leanest configuration of each Br."""
    walls = {}
    for Br in sorted({config.Br for config in configs}):
        members = [config for config in configs if config.Br == Br]
        leanest = min(members, key=lambda config: shared_bytes(task, replace(config, Bc=_STEP), problem))
        Bc = _STEP
        while shared_bytes(task, replace(leanest, Bc=Bc + _STEP), problem) <= limits.shared_bytes:
            Bc += _STEP
        walls[Br] = max(config.Bc for config in members), Bc
    return walls
