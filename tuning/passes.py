"""One task with one configuration on arrays of any runtime, ready to launch: what is proven and what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..dispatch import Plan, plan_backward, plan_forward
from ..engine import Launcher, Runtime, prepare, struct_of
from ..problem import Problem
from ..tiles import Task, TileConfig

Array = Any
_ALIGNMENT = 256


class Memory(Protocol):
    """Arrays where a runtime's kernels find them."""

    def empty(self, size: int) -> Array:
        """``size`` bytes, uint8, aligned to 256."""

    def typed(self, room: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """The contiguous array in such bytes."""

    def write(self, room: Array, content: Array) -> None:
        """Copies bytes from NumPy."""

    def read(self, room: Array) -> Array:
        """Copies bytes to NumPy, after all launches have ended."""


class HostMemory:
    """Memory of the emulated device."""

    def empty(self, size: int) -> Array:
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        return raw[-raw.ctypes.data % _ALIGNMENT :][:size]

    def typed(self, room: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return room.view(dtype).reshape(shape)

    def write(self, room: Array, content: Array) -> None:
        room[...] = content

    def read(self, room: Array) -> Array:
        return room.copy()


class CudaMemory:
    """Memory of CuPy's current device."""

    def empty(self, size: int) -> Array:
        import cupy

        return cupy.empty(size, cupy.uint8)  # CuPy's pool aligns to 512

    def typed(self, room: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        import cupy

        return cupy.ndarray(shape, dtype, room.data)

    def write(self, room: Array, content: Array) -> None:
        room.set(content)

    def read(self, room: Array) -> Array:
        return room.get()


class Pass:
    """One task of a problem with one configuration.

    A backward whose dQ has a kernel of its own has two tasks: "backward_dkv" stands for delta, dK and dV, "backward_dq"
    for dQ alone, whose delta ``launch_all`` has to compute once.
    """

    def __init__(
        self, runtime: Runtime, task: Task, config: TileConfig, problem: Problem, arrays: Sequence[Array]
    ) -> None:
        """``arrays`` are q, k, v, out, lse, or dout, q, k, v, out, lse, dlse, dq, dk, dv, workspace; all contiguous.

        dlse may be None, which stands for zeros.
        """
        self.plan = plan(runtime, task, config, problem)
        struct = struct_of("forward" if task == "forward" else "backward", self.plan)
        tensors = tuple(arrays[:4]) if task == "forward" else (*arrays[:5], *arrays[7:10])
        self._pointers = [0 if array is None else runtime.address(array) for array in arrays]
        if task != "forward":
            self._pointers.append(self._pointers[-1] + 4 * padded_delta(self.plan))
        self._prepared = prepare(runtime, problem, self.plan, struct, tensors)
        self._all = self._prepared.launchers
        self._own = {"backward_dkv": self._all[:2], "backward_dq": self._all[2:]}.get(task, self._all)
        self._arrays = tuple(arrays)  # kept alive, also where the list they came in has others by now
        self._workspace = runtime.workspace

    def launch(self) -> None:
        """Launches what belongs to the task, on the current stream."""
        self._launch(self._own)

    def launch_all(self) -> None:
        """Launches the whole pass."""
        self._launch(self._all)

    def _launch(self, launchers: list[Launcher]) -> None:
        self._prepared.launchers = launchers
        if self.plan.kept_floats:
            kept, _memory = self._workspace(self.plan.kept_floats)
            self._prepared.launch(*self._pointers, kept)
        else:
            self._prepared.launch(*self._pointers)


def plan(runtime: Runtime, task: Task, config: TileConfig, problem: Problem) -> Plan:
    """The launches for contiguous arrays, whose rows are multiples of 16 bytes."""
    direction = plan_forward if task == "forward" else plan_backward
    return direction(problem, 16, runtime.limits(), {task: config})


def padded_delta(plan: Plan) -> int:
    """Floats of delta in a workspace, so that the sum behind it is aligned."""
    return -(-plan.delta_floats // 64) * 64


def workspace_floats(plan: Plan) -> int:
    """Floats of a backward's workspace."""
    return padded_delta(plan) + plan.dq_floats
