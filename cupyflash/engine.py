"""The walk from a problem and its arrays to launches, the same for every runtime that can run the kernels.

An equal call with equally laid out arrays finds its prepared launches in a dictionary: nothing is planned, compiled or
allocated again but the backward's workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from .arrays import Array
from .dispatch import Given, Kernel, Plan, plan_backward, plan_forward
from .problem import Problem
from .resources import Limits
from .runtime.params import BACKWARD, FORWARD, ParamStruct

# A kernel ready to launch: takes the parameter struct as a void array of one element.
Launcher = Callable[[Any], None]

_PREPARED_KEPT = 4096  # more than a program has kinds of calls, unless every sequence length is new


class Runtime(Protocol):
    """Where kernels run: CUDA through CuPy, or the host through the emulated device."""

    def device(self) -> int:
        """Identifies the current device."""

    def limits(self) -> Limits:
        """Limits of the current device."""

    def load(self, kernel: Kernel, grid: int) -> Launcher:
        """Compiles a kernel, or finds it compiled, for the current device."""

    def address(self, array: Array) -> int:
        """Address of an array's first element."""

    def workspace(self, floats: int) -> Array:
        """An uninitialised float32 array, aligned to 256 bytes."""


class Engine:
    """Attention forward and backward on one runtime; ``given`` are tiles that are not to be chosen."""

    def __init__(self, runtime: Runtime, given: Given | None = None) -> None:
        self._runtime = runtime
        self._given = given
        self._prepared: dict[Any, Prepared] = {}

    def check(self, problem: Problem) -> None:
        """Raises UnsupportedError if the current device cannot compute the problem; nothing is compiled."""
        for plan in (plan_forward, plan_backward):
            plan(problem, problem.itemsize, self._runtime.limits(), self._given)

    def forward(self, problem: Problem, q: Array, k: Array, v: Array, out: Array, lse: Array | None) -> None:
        """Writes out and lse (None: not wanted). Arrays are (B, S, H, D) views of unit last stride, lse is contiguous.

        ``problem`` must have scores: no dimension is 0.
        """
        address = self._runtime.address
        pointers = (address(q), address(k), address(v), address(out))
        bits = (pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15
        key = (problem, q.strides, k.strides, v.strides, out.strides, bits, self._runtime.device())
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(key, FORWARD, plan_forward, (q, k, v, out), bits)
        prepared.launch(*pointers, 0 if lse is None else address(lse))

    def backward(
        self,
        problem: Problem,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        dq: Array,
        dk: Array,
        dv: Array,
    ) -> None:
        """Writes dq, dk and dv; arrays as in ``forward``."""
        address = self._runtime.address
        arrays = (dout, q, k, v, out, dq, dk, dv)
        at = [address(array) for array in arrays]
        bits = (at[0] | at[1] | at[2] | at[3] | at[4] | at[5] | at[6] | at[7]) & 15
        key = (problem, *(array.strides for array in arrays), bits, self._runtime.device())
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(key, BACKWARD, plan_backward, arrays, bits)
        plan = prepared.plan
        delta_floats = -(-plan.delta_floats // 64) * 64  # keeps the sum behind it aligned
        workspace = self._runtime.workspace(delta_floats + plan.dq_floats)
        delta = address(workspace)
        prepared.launch(*at[:5], address(lse), *at[5:], delta, delta + 4 * delta_floats)

    def _prepare(
        self,
        key: Any,
        struct: ParamStruct,
        plan_of: Callable[[Problem, int, Limits, Given | None], Plan],
        arrays: tuple[Array, ...],
        bits: int,
    ) -> Prepared:
        problem: Problem = key[0]
        plan = plan_of(problem, vector_bytes(problem, arrays, bits), self._runtime.limits(), self._given)
        prepared = Prepared(self._runtime, problem, plan, struct, arrays)
        if len(self._prepared) >= _PREPARED_KEPT:
            self._prepared.clear()
        self._prepared[key] = prepared
        return prepared


class Prepared:
    """The launches of one kind of call; only pointers are missing."""

    def __init__(
        self, runtime: Runtime, problem: Problem, plan: Plan, struct: ParamStruct, arrays: tuple[Array, ...]
    ) -> None:
        self.plan = plan
        self.launchers = [runtime.load(kernel, grid) for kernel, grid in plan.launches]
        self._template = _void(struct.packer.size)
        constants = _constants(problem, plan.section, [_strides(array) for array in arrays])
        struct.packer.pack_into(self._template, 0, *[0] * struct.pointers, *constants)
        self._pack_pointers = struct.pointer_packer.pack_into

    def launch(self, *pointers: int) -> None:
        """Launches on the current stream, in the order of the struct's pointers."""
        params = self._template.copy()  # one per call: threads may share what is prepared
        self._pack_pointers(params, 0, *pointers)
        for launcher in self.launchers:
            launcher(params)


def _void(size: int) -> Any:
    """``size`` zero bytes as one element: CuPy passes such an array to a kernel by value."""
    return np.zeros(1, f"V{size}")


def _strides(array: Array) -> tuple[int, int, int]:
    """Strides of batch, row and head in elements; 0 along an axis of length 1, whose stride means nothing."""
    batch, row, head = (
        0 if length == 1 else stride // array.itemsize
        for length, stride in zip(array.shape[:3], array.strides[:3], strict=True)
    )
    return batch, row, head


def vector_bytes(problem: Problem, arrays: tuple[Array, ...], pointer_bits: int) -> int:
    """The widest access, up to 16 bytes, to which all pointers (their low bits), strides and rows are aligned."""
    elements = problem.head_dim | problem.head_dim_v
    for array in arrays:
        batch, row, head = _strides(array)
        elements |= batch | row | head
    bits = elements * problem.itemsize | pointer_bits | 16
    return bits & -bits


def _constants(problem: Problem, section: int, strides: list[tuple[int, int, int]]) -> list[float]:
    """What follows the pointers in a parameter struct."""
    return [
        *(stride for array in strides for stride in array),
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads,
        problem.num_kv_heads,
        problem.group,
        section,
        problem.band.first or 0,
        problem.band.last or 0,
        problem.scale,
        problem.softcap,
    ]
