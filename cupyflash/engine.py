"""The walk from a problem and its arrays to launches, the same for every runtime that can run the kernels.

An equal call with equally laid out arrays finds its prepared launches in a dictionary: nothing is planned, compiled or
allocated again but the backward's workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .arrays import Array
from .dispatch import Given, Kernel, Plan, plan_backward, plan_forward
from .problem import Problem
from .resources import Limits
from .runtime.params import BACKWARD, FORWARD, FORWARD_TENSOR, ParamBlock, ParamStruct

Launcher = Callable[[ParamBlock], None]  # a kernel ready to launch

_PANEL_BYTES = 128  # of a row in one load, kernels_cu/include/panel_tile.cuh
_MAPS_KEPT = 1024  # more than an allocator's pool has blocks of one size

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

    def tensor_map(
        self, address: int, sizes: Sequence[int], byte_strides: Sequence[int], box: Sequence[int], itemsize: int
    ) -> bytes:
        """The 128 bytes that describe a tensor to the tensor memory accelerator.

        Args:
            address: of the first element, aligned to 16 bytes.
            sizes: of the four dimensions in elements, the innermost first.
            byte_strides: of the three outer dimensions, multiples of 16.
            box: what one load moves, in elements per dimension; 128 bytes along the innermost, which lie in shared
                memory with the 128-byte swizzle.
            itemsize: bytes of an element.
        """

    def tile_counter(self) -> int:
        """Address of two uint32 zeros with which a kernel on the current stream counts its tiles; it leaves them as
        they were. 0 where there are none to be had.
        """

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
            arrays = (q, k, v, out)
            width = vector_bytes(problem, arrays, bits)
            plan = plan_forward(problem, width, self._runtime.limits(), self._given, mappable(arrays[:3]))
            prepared = self._prepare(key, plan, FORWARD_TENSOR if plan.map_rows else FORWARD, arrays)
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
            width = vector_bytes(problem, arrays, bits)
            plan = plan_backward(problem, width, self._runtime.limits(), self._given)
            prepared = self._prepare(key, plan, BACKWARD, arrays)
        plan = prepared.plan
        delta_floats = -(-plan.delta_floats // 64) * 64  # keeps the sum behind it aligned
        workspace = self._runtime.workspace(delta_floats + plan.dq_floats)
        delta = address(workspace)
        prepared.launch(*at[:5], address(lse), *at[5:], delta, delta + 4 * delta_floats)

    def _prepare(self, key: Any, plan: Plan, struct: ParamStruct, arrays: tuple[Array, ...]) -> Prepared:
        prepared = Prepared(self._runtime, key[0], plan, struct, arrays)
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
        self._maps = [
            TensorMaps(runtime, array, rows)
            for array, rows in zip(arrays[: len(plan.map_rows)], plan.map_rows, strict=True)
        ]
        constants = _constants(problem, plan.section, [_strides(array) for array in arrays])
        nothing = [bytes(128)] * struct.maps + [0] * struct.pointers
        self._content = struct.packer.pack(*nothing, *constants)
        self._pack_addresses = struct.address_packer.pack_into
        self._tile_counter = runtime.tile_counter if plan.dynamic else int
        self._blocks: list[ParamBlock] = []  # those that no thread is launching with

    def launch(self, *pointers: int) -> None:
        """Launches on the current stream, in the order of the struct's pointers."""
        try:
            block = self._blocks.pop()
        except IndexError:
            block = ParamBlock(self._content)
        if self._maps:
            maps = [map_of.at(pointer) for map_of, pointer in zip(self._maps, pointers, strict=False)]
            self._pack_addresses(block.buffer, 0, *maps, self._tile_counter(), *pointers)
        else:
            self._pack_addresses(block.buffer, 0, *pointers)
        for launcher in self.launchers:
            launcher(block)
        self._blocks.append(block)


class TensorMaps:
    """Tensor maps of arrays that differ in their address only, kept since a program comes back to its addresses."""

    def __init__(self, runtime: Runtime, array: Array, rows: int) -> None:
        batch, length, heads, head_dim = array.shape
        itemsize = array.itemsize
        # (B, S, H, D) is (D, S, H, B) here. The stride along an axis of length 1 means nothing, but must be legal.
        byte_strides = [stride * itemsize or 16 for stride in _strides(array)]
        self._describe: tuple[Any, ...] = (
            (head_dim, length, heads, batch),
            (byte_strides[1], byte_strides[2], byte_strides[0]),
            (_PANEL_BYTES // itemsize, rows, 1, 1),
            itemsize,
        )
        self._runtime = runtime
        self._maps: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        """The map of the array at this address."""
        found = self._maps.get(address)
        if found is None:
            if len(self._maps) >= _MAPS_KEPT:
                self._maps.clear()
            found = self._maps[address] = self._runtime.tensor_map(address, *self._describe)
        return found


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


def mappable(arrays: Sequence[Array]) -> bool:
    """Whether no stride is negative, or 0 along an axis longer than 1; tensor maps know no such thing."""
    return all(
        stride > 0 or (stride == 0 and length == 1)
        for array in arrays
        for stride, length in zip(_strides(array), array.shape[:3], strict=True)
    )


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
