"""Every tile configuration that could run a task on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields, replace
from itertools import product

from .. import heuristics
from ..problem import Problem
from ..resources import Limits, available_registers, folds_rows, registers, why_illegal
from ..tiles import Task, TileConfig, tile_head_dims
from .tasks import Size, TuningTask

# Fewer left for addresses and operands than this, and everything spills. A consumer warpgroup takes its operands from
# shared memory by descriptors.
_SPARE_REGISTERS = {"mma": 24, "v1": 24, "wgmma": 16, "simt": 72}
AXES = tuple(field.name for field in fields(TileConfig) if field.name != "family")
Point = tuple[int, ...]  # indices into the values of each axis


def space(task: Task, problem: Problem, limits: Limits) -> list[TileConfig]:
    """The legal configurations of a task, of every family, in a fixed order; those of the heuristic are among them.

    Of the first FlashAttention there is one, unless it is asked for.
    """

    def has_room(config: TileConfig) -> bool:
        used = _simt_registers(task, config, problem) or registers(task, config, problem)
        return used <= available_registers(task, config) - _SPARE_REGISTERS[config.family]

    fitting = [c for c in _all(task, problem, limits) if why_illegal(task, c, problem, limits) is None and has_room(c)]
    found: dict[TileConfig, TileConfig] = {}  # by what reaches the kernel
    for config in (*heuristics.candidates(task, problem, limits), *heuristics.rivals(task, problem, limits), *fitting):
        told = replace(config, folded_rows=folds_rows(config, problem))
        found.setdefault(replace(told, dq_warps_d=1) if task == "backward_dkv" else told, config)
    return list(found.values())


def families(configs: Sequence[TileConfig]) -> dict[str, list[TileConfig]]:
    """Configurations by family, tensor cores first; plain multiply-adds only where there is nothing else.

    They are slower than tensor cores and take every layout that "mma" takes. Exact float32 has "mma" only on GPUs
    and for numbers of rows where that holds, see ``heuristics.split_pays``.
    """
    found = {family: [c for c in configs if c.family == family] for family in ("wgmma", "mma", "v1", "simt")}
    if found["mma"]:
        del found["simt"]
    return {family: members for family, members in found.items() if members}


def task_spaces(
    task: TuningTask, limits: Limits, defaults: Mapping[Size, TileConfig] | None = None
) -> dict[str, tuple[list[TileConfig], list[Size]]]:
    """The configurations of each family, and the sizes at which they are measured.

    All of the task's, but exact float32 has one family at each size, see ``heuristics.exact_family``.

    Args:
        defaults: what is taken at each size without a tune, which is measured, too.
    """
    sizes, defaults = task.sizes, defaults or {}
    members: dict[str, dict[TileConfig, None]] = {}  # as a set that keeps the order
    measured: dict[str, list[Size]] = {}
    for at in [[size] for size in sizes] if task.problem(sizes[0]).is_exact else [list(sizes)]:
        taken = [defaults[size] for size in at if size in defaults]
        problem = task.problem(at[0])
        exact = heuristics.exact_family(task.task, problem, limits)
        legal = [c for c in space(task.task, problem, limits) if not heuristics.rounds_otherwise(c.family, exact)]
        for family, configs in families(list(dict.fromkeys([*taken, *legal]))).items():
            members.setdefault(family, {}).update(dict.fromkeys(configs))
            measured.setdefault(family, []).extend(at)
    return {family: (list(configs), measured[family]) for family, configs in members.items()}


class Lattice:
    """Configurations of one family as points of an integer lattice, whose axes keep the order of the values."""

    def __init__(self, configs: Sequence[TileConfig]) -> None:
        self.values: dict[str, list[int]] = {
            axis: sorted({int(getattr(config, axis)) for config in configs}) for axis in AXES
        }
        self.values = {axis: values for axis, values in self.values.items() if len(values) > 1}
        self._points = {config: self.point(config) for config in configs}

    def point(self, config: TileConfig) -> Point:
        """Where a configuration of the space lies."""
        return tuple(values.index(int(getattr(config, axis))) for axis, values in self.values.items())

    def points(self) -> Iterator[Point]:
        """Of all configurations."""
        return iter(self._points.values())

    def nearest(self, point: Point, taken: frozenset[TileConfig] | set[TileConfig]) -> TileConfig | None:
        """The configuration next to a point that is not taken; of equally near ones the first. None if all are."""

        def distance(other: Point) -> float:
            spans = (len(values) - 1 for values in self.values.values())
            return sum(abs(a - b) / span for a, b, span in zip(point, other, spans, strict=True))

        free = [config for config in self._points if config not in taken]
        return min(free, key=lambda config: distance(self._points[config]), default=None)


def preference(task: Task, config: TileConfig, shared_bytes: int) -> tuple[object, ...]:
    """What breaks ties between equally fast configurations: little shared memory, few warps, then the tile itself."""
    return (shared_bytes, config.warps, *astuple(config))


def _simt_registers(task: Task, config: TileConfig, problem: Problem) -> int:
    """Accumulators of a lane; 0 for other families."""
    if config.family != "simt":
        return 0
    d, dv = tile_head_dims(problem.head_dim, problem.head_dim_v)
    Br, Bc, lanes = config.Br, config.Bc, 32 * config.warps
    results = {
        "forward": Br * (Bc + dv),
        "backward": Bc * (2 * Br + d + dv),
        "backward_dkv": Bc * (2 * Br + d + dv),
        "backward_dq": Br * (2 * Bc + d),
    }
    return results[task] // lanes


def _all(task: Task, problem: Problem, limits: Limits) -> Iterator[TileConfig]:
    if problem.algorithm == "v1":
        return (yield from _all_v1(task))
    if problem.is_exact:
        if heuristics.split_pays(problem, limits):
            yield from _all_split(task)
        return (yield from _all_simt(task))
    if task == "forward":
        # Four consumers have registers for few keys, want more stages of them, and lose by clusters.
        for Br, warps, numbers, clusters in (
            (128, 12, (2, 3), (1, 2)),
            (192, 16, (2, 3), (1, 2)),
            (256, 20, (3, 4), (1,)),
        ):
            ends = (True, False) if problem.band.last is not None else (False,)
            for Bc, stages, cluster, halves in product(range(32, 257, 16), numbers, clusters, ends):
                for stale_maximum, turns, dynamic in product((True, False), repeat=3):
                    yield TileConfig(
                        *("wgmma", Br, Bc, warps, stages),
                        stale_maximum=stale_maximum,
                        turns=turns,
                        dynamic=dynamic,
                        cluster=cluster,
                        halves=halves,
                    )
        for Br, Bc, warps, blocks in product((64, 128, 256), (32, 48, 64, 80, 96, 112, 128), (4, 8), (1, 2)):
            yield TileConfig("mma", Br, Bc, warps, blocks_per_sm=blocks)
    elif task == "backward_dq":
        for Br, Bc, warps, stages, blocks in product((64, 128), (32, 48, 64, 96, 128), (4, 8), (1, 2), (1, 2)):
            yield TileConfig("mma", Br, Bc, warps, stages, blocks)
    else:
        for Br, stages in product((32, 48, 64, 80, 96, 112, 128) if task == "backward" else (), (2, 3)):
            for rounded, (values, first, folded) in product(sorted({0, 32, Br}), product((True, False), repeat=3)):
                yield TileConfig(
                    *("wgmma", Br, 128, 12, stages),
                    rounded_queries=rounded,
                    values_in_registers=values,
                    first_stores=first,
                    folded_rows=folded,
                )
        for stages in (2, 3) if task == "backward" else ():  # head dims above 128
            for rounded, dq_first in product((True, False), repeat=2):
                yield TileConfig("wgmma", 64, 64, 16, stages, rounded_weights=rounded, dq_first=dq_first)
        for Br, Bc, warps, stages in product((32, 64, 128), (64, 128), (4, 8), (1, 2)):
            for split, dq, dq_first in product((1, 2, 4), (1, 2, 4), (False, True)):
                if task == "backward" or not dq_first:
                    yield TileConfig("mma", Br, Bc, warps, stages, 1, split, split, dq, dq_first)
    yield from _all_simt(task)


def _all_v1(task: Task) -> Iterator[TileConfig]:
    for Br, Bc, warps, stages in product((32, 64, 128), (32, 64, 96, 128, 192, 256), (4, 8), (1, 2)):
        if task == "forward":
            yield TileConfig("v1", Br, Bc, warps, stages)
        elif task == "backward":
            for score, grad, dq in product((1, 2, 4), repeat=3):
                yield TileConfig("v1", Br, Bc, warps, stages, 1, score, grad, dq)


def _all_split(task: Task) -> Iterator[TileConfig]:
    if task == "forward":
        for Br, Bc, warps, blocks in product((64, 128), (16, 32, 48, 64), (4, 8), (1, 2, 3)):
            yield TileConfig("mma", Br, Bc, warps, blocks_per_sm=blocks)
    elif task == "backward_dq":
        for Br, Bc, warps, stages in product((32, 64, 128), (16, 32, 64), (2, 4, 8), (1, 2)):
            yield TileConfig("mma", Br, Bc, warps, stages)
    else:
        for Br, Bc, warps, stages in product((32, 64), (32, 64, 128), (4, 8), (1, 2)):
            for score, grad, dq, dq_first in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8), (False, True)):
                if task == "backward" or not dq_first:
                    yield TileConfig("mma", Br, Bc, warps, stages, 1, score, grad, dq, dq_first)


def _all_simt(task: Task) -> Iterator[TileConfig]:
    sizes = (16, 32, 48, 64, 96, 128)
    for Br, Bc, warps, stages in product((*sizes, 256), sizes, (2, 4, 8), (1, 2)):
        for split in (1, 2, 4, 8) if task == "backward" else (1,):
            yield TileConfig("simt", Br, Bc, warps, stages, dq_warps_d=split)
