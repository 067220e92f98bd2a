"""The walk from a problem and its arrays to launches, the same for every runtime that can run the kernels.

An equal call with equally laid out arrays finds its prepared launches in a dictionary: nothing is planned, compiled or
allocated again but the backward's workspace. Who knows without that look-up that a call is equal has bound it before,
and passes its addresses only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, Protocol

import numpy as np

from . import three_steps
from .arrays import Array
from .dispatch import Given, Kernel, Plan, backward_tasks, plan_backward, plan_forward
from .problem import Problem
from .resources import Limits
from .runtime.params import BACKWARD, BACKWARD_TENSOR, FORWARD, FORWARD_TENSOR, FORWARD_V1, ParamBlock, ParamStruct
from .tiles import Task

Launcher = Callable[[ParamBlock, int], None]  # a kernel ready to launch: takes its parameters and a stream

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

    def stream(self, device: int) -> int:
        """Handle of the current stream of the current device."""

    def address(self, array: Array) -> int:
        """Address of an array's first element."""

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Array:
        """The array of the current device that begins at an address, which somebody else keeps."""

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

    def tile_counter(self, device: int, stream: int) -> int:
        """Address of two uint32 zeros with which a kernel on the current device and stream counts its tiles; it leaves
        them as they were. 0 where there are none to be had.
        """

    def workspace(self, floats: int) -> tuple[int, Any]:
        """Address of uninitialised float32 memory, aligned to 256 bytes, and the object that holds it."""


class Engine:
    """Attention forward and backward on one runtime.

    Args:
        given: tiles that are not to be chosen.
        before_planning: called with the tasks, the problem and the limits of what is about to be planned for a launch.
    """

    def __init__(
        self,
        runtime: Runtime,
        given: Given | None = None,
        before_planning: Callable[[tuple[Task, ...], Problem, Limits], None] | None = None,
    ) -> None:
        self._runtime = runtime
        self._given = given
        self._before_planning = before_planning
        self._prepared: dict[Any, Prepared] = {}

    def check(self, problem: Problem, *arrays: Array) -> None:
        """Raises UnsupportedError if the current device cannot compute the problem; nothing is compiled.

        Args:
            arrays: some of q, k and v, as in ``forward``; others are taken to be contiguous and aligned.
        """
        width = vector_bytes(problem, arrays, self._pointer_bits(arrays))
        for plan in (plan_forward, plan_backward):
            plan(problem, width, self._runtime.limits(), self._given, mappable(arrays))

    def forward(self, problem: Problem, q: Array, k: Array, v: Array, out: Array, lse: Array | None) -> None:
        """Writes out and lse (None: not wanted). Arrays are (B, S, H, D) views of unit last stride, lse is contiguous.

        ``problem`` must have scores: no dimension is 0.
        """
        address = self._runtime.address
        launch = self.bind_forward(problem, q, k, v, out)
        launch(address(q), address(k), address(v), address(out), 0 if lse is None else address(lse))

    def bind_forward(self, problem: Problem, q: Array, k: Array, v: Array, out: Array) -> Callable[..., None]:
        """The launch of ``forward`` on arrays laid out and aligned like these, on the device that is current now.

        It takes the addresses of q, k, v, out and lse (0: not wanted).
        """
        arrays = (q, k, v, out)
        bits = self._pointer_bits(arrays)
        key = (problem, q.strides, k.strides, v.strides, out.strides, bits, self._runtime.device())
        prepared = self._prepared.get(key)
        if prepared is None:
            width, limits = vector_bytes(problem, arrays, bits), self._runtime.limits()
            if self._before_planning:
                self._before_planning(("forward",), problem, limits)
            plan = plan_forward(problem, width, limits, self._given, mappable(arrays[:3]))
            prepared = self._prepare(key, plan, struct_of("forward", plan), arrays)
        floats = prepared.plan.kept_floats
        if not floats:
            return prepared.launch
        launch_on, workspace = prepared.launch, self._runtime.workspace

        def launch(q: int, k: int, v: int, out: int, lse: int) -> None:
            kept, _memory = workspace(floats)
            launch_on(q, k, v, out, lse, kept)

        return launch

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
        dlse: Array | None = None,
    ) -> None:
        """Writes dq, dk and dv; arrays as in ``forward``, dlse (None: zero) as lse."""
        address = self._runtime.address
        launch = self.bind_backward(problem, dout, q, k, v, out, dq, dk, dv)
        dlse_at = 0 if dlse is None else address(dlse)
        launch(*map(address, (dout, q, k, v, out, lse)), dlse_at, *map(address, (dq, dk, dv)))

    def bind_backward(self, problem: Problem, *arrays: Array) -> Callable[..., None]:
        """The launch of ``backward`` on arrays laid out and aligned like these, as in ``bind_forward``.

        It takes the addresses of dout, q, k, v, out, lse, dlse (0: zero), dq, dk and dv; lse and dlse are contiguous.
        """
        bits = self._pointer_bits(arrays)
        key = (problem, *(array.strides for array in arrays), bits, self._runtime.device())
        prepared = self._prepared.get(key)
        if prepared is None:
            width, limits = vector_bytes(problem, arrays, bits), self._runtime.limits()
            maps = mappable(arrays[:4])
            if self._before_planning:
                tasks = backward_tasks(problem, limits, self._given, maps and width == 16)
                self._before_planning(tasks, problem, limits)
            plan = plan_backward(problem, width, limits, self._given, maps)
            prepared = self._prepare(key, plan, struct_of("backward", plan), arrays)
        launch_on, workspace = prepared.launch, self._runtime.workspace
        delta_floats = -(-prepared.plan.delta_floats // 64) * 64  # keeps the sum behind it aligned
        floats = delta_floats + prepared.plan.dq_floats

        def launch(*pointers: int) -> None:
            delta, _memory = workspace(floats)
            launch_on(*pointers, delta, delta + 4 * delta_floats)

        return launch

    def _pointer_bits(self, arrays: tuple[Array, ...]) -> int:
        """The low bits that some address has."""
        return reduce(or_, map(self._runtime.address, arrays), 0) & 15

    def _prepare(self, key: Any, plan: Plan, struct: ParamStruct, arrays: tuple[Array, ...]) -> Prepared:
        prepared = prepare(self._runtime, key[0], plan, struct, arrays)
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
        constants = _constants(problem, plan.section, [_strides(array) for array in arrays])
        if struct is BACKWARD_TENSOR:
            constants += [plan.whole_works, plan.share]
        nothing = [bytes(128)] * struct.maps + [0] * struct.pointers
        self._content = struct.packer.pack(*nothing, *constants)
        self._pack_addresses = struct.address_packer.pack_into
        self._device = runtime.device()
        self._stream = runtime.stream
        self._blocks: list[ParamBlock] = []  # those that no thread is launching with

    def launch(self, *pointers: int) -> None:
        """Launches on the current stream, in the order of the struct's pointers."""
        try:
            block = self._blocks.pop()
        except IndexError:
            block = ParamBlock(self._content)
        self._pack_addresses(block.buffer, 0, *pointers)
        stream = self._stream(self._device)
        for launcher in self.launchers:
            launcher(block, stream)
        self._blocks.append(block)


def struct_of(direction: str, plan: Plan) -> ParamStruct:
    """What the kernels of a plan take; direction: "forward" or "backward"."""
    if direction == "forward":
        return FORWARD_V1 if plan.kept_floats else FORWARD_TENSOR if plan.map_rows else FORWARD
    return BACKWARD_TENSOR if plan.map_rows else BACKWARD


def prepare(runtime: Runtime, problem: Problem, plan: Plan, struct: ParamStruct, arrays: tuple[Array, ...]) -> Prepared:
    """The launches of a plan whose kernels take this struct."""
    if not plan.launches:
        return PreparedStandard(runtime, problem, plan, struct, arrays)
    kind = {FORWARD_TENSOR: PreparedTensor, BACKWARD_TENSOR: PreparedTensorBackward}.get(struct, Prepared)
    return kind(runtime, problem, plan, struct, arrays)


class PreparedTensor(Prepared):
    """The launches of a forward that loads with the tensor memory accelerator."""

    def __init__(
        self, runtime: Runtime, problem: Problem, plan: Plan, struct: ParamStruct, arrays: tuple[Array, ...]
    ) -> None:
        super().__init__(runtime, problem, plan, struct, arrays)
        self._maps = TensorMaps(runtime, arrays, plan.map_rows)
        self._tile_counter = runtime.tile_counter if plan.dynamic else _no_counter

    def launch(self, q: int, k: int, v: int, out: int, lse: int) -> None:  # type: ignore[override]  # by name: faster
        """Launches on the current stream."""
        try:
            block = self._blocks.pop()
        except IndexError:
            block = ParamBlock(self._content)
        stream = self._stream(self._device)
        counter = self._tile_counter(self._device, stream)
        self._pack_addresses(block.buffer, 0, self._maps[q, k, v], counter, q, k, v, out, lse)
        for launcher in self.launchers:
            launcher(block, stream)
        self._blocks.append(block)


class PreparedTensorBackward(Prepared):
    """The launches of a backward that loads with the tensor memory accelerator."""

    def __init__(
        self, runtime: Runtime, problem: Problem, plan: Plan, struct: ParamStruct, arrays: tuple[Array, ...]
    ) -> None:
        super().__init__(runtime, problem, plan, struct, arrays)
        self._maps = TensorMaps(runtime, arrays, plan.map_rows)

    def launch(self, *pointers: int) -> None:
        """Launches on the current stream; dout, q, k and v come first."""
        super().launch(self._maps[pointers[: len(self.plan.map_rows)]], *pointers)  # type: ignore[arg-type]


class PreparedStandard(Prepared):
    """The standard algorithm, which takes arrays: they are made around the addresses."""

    def __init__(
        self, runtime: Runtime, problem: Problem, plan: Plan, struct: ParamStruct, arrays: tuple[Array, ...]
    ) -> None:
        super().__init__(runtime, problem, plan, struct, arrays)
        self._problem, self._array = problem, runtime.array
        described = [(array.shape, array.dtype, array.strides) for array in arrays]
        lengths = (problem.batch, problem.num_heads, problem.seqlen_q)
        rows = (lengths, np.dtype(np.float32), (4 * lengths[1] * lengths[2], 4 * lengths[2], 4))
        # lse follows the forward's arrays; lse and dlse stand before the backward's results.
        self._described = [*described, rows] if len(arrays) == 4 else [*described[:5], rows, rows, *described[5:]]

    def launch(self, *pointers: int) -> None:
        """Computes on the current stream; what lies behind the last array is no concern of it."""
        operands = [
            self._array(address, *described) if address else None
            for address, described in zip(pointers, self._described, strict=False)
        ]
        if len(operands) == 5:
            three_steps.forward(self._problem, *operands)
            return
        dout, q, k, v, out, lse, dlse, dq, dk, dv = operands
        three_steps.backward(self._problem, dout, q, k, v, out, lse, dq, dk, dv, dlse)


def _no_counter(device: int, stream: int) -> int:
    return 0


class TensorMaps(dict[tuple[int, ...], bytes]):
    """Tensor maps of the first arrays, in a row, by addresses: kept, since a program comes back to its addresses."""

    def __init__(self, runtime: Runtime, arrays: Sequence[Array], rows: Sequence[int]) -> None:
        self._runtime = runtime
        # All but their addresses.
        self._tensors = [self._description(*described) for described in zip(arrays, rows, strict=False)]

    @staticmethod
    def _description(array: Array, rows: int) -> tuple[Any, ...]:
        batch, length, heads, head_dim = array.shape
        itemsize = array.itemsize
        # (B, S, H, D) is (D, S, H, B) here. The stride along an axis of length 1 means nothing, but must be legal.
        byte_strides = [stride * itemsize or 16 for stride in _strides(array)]
        return (
            (head_dim, length, heads, batch),
            (byte_strides[1], byte_strides[2], byte_strides[0]),
            (_PANEL_BYTES // itemsize, rows, 1, 1),
            itemsize,
        )

    def __missing__(self, addresses: tuple[int, ...]) -> bytes:
        described = zip(addresses, self._tensors, strict=True)
        maps = b"".join(self._runtime.tensor_map(address, *tensor) for address, tensor in described)
        if len(self) >= _MAPS_KEPT:
            self.clear()
        self[addresses] = maps
        return maps


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
