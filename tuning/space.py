"""Every tile configuration that could run a task on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..problem import Problem
from ..resources import Limits, available_registers, registers, why_illegal
from ..tiles import Task, TileConfig

# Fewer left for addresses and operands than this, and everything spills. A consumer warpgroup takes its operands from
# shared memory by descriptors.
_SPARE_REGISTERS = {"mma": 24, "wgmma": 16}


def space(task: Task, problem: Problem, limits: Limits) -> list[TileConfig]:
    """The legal tensor-core configurations of a task, in a fixed order."""

    def has_room(config: TileConfig) -> bool:
        return registers(task, config, problem) <= available_registers(task, config) - _SPARE_REGISTERS[config.family]

    return [c for c in _all(task) if why_illegal(task, c, problem, limits) is None and has_room(c)]


def _all(task: Task) -> Iterator[TileConfig]:
    if task == "forward":
        for (Br, warps), Bc, stages in product(((128, 12), (192, 16)), range(32, 257, 16), (2, 3)):
            for stale_maximum, turns, dynamic in product((True, False), repeat=3):
                yield TileConfig(
                    *("wgmma", Br, Bc, warps, stages), stale_maximum=stale_maximum, turns=turns, dynamic=dynamic
                )
        for Br, Bc, warps, blocks in product((64, 128, 256), (32, 48, 64, 80, 96, 112, 128), (4, 8), (1, 2)):
            yield TileConfig("mma", Br, Bc, warps, blocks_per_sm=blocks)
    elif task == "backward_dq":
        for Br, Bc, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (1, 2)):
            yield TileConfig("mma", Br, Bc, warps, stages)
    else:
        for Br, stages in product((32, 48, 64, 80, 96, 112, 128) if task == "backward" else (), (2, 3)):
            for rounded, values, first in product((True, False), repeat=3):
                yield TileConfig(
                    *("wgmma", Br, 128, 12, stages),
                    rounded_weights=rounded,
                    values_in_registers=values,
                    first_stores=first,
                )
        for stages in (2, 3) if task == "backward" else ():  # head dims above 128
            for rounded, dq_first in product((True, False), repeat=2):
                yield TileConfig("wgmma", 64, 64, 16, stages, rounded_weights=rounded, dq_first=dq_first)
        for Br, Bc, warps, stages in product((32, 64, 128), (64, 128), (4, 8), (1, 2)):
            for split, dq, dq_first in product((1, 2, 4), (1, 2, 4), (False, True)):
                if task == "backward" or not dq_first:
                    yield TileConfig("mma", Br, Bc, warps, stages, 1, split, split, dq, dq_first)
