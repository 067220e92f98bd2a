"""The parameter structs that host and kernels share, each written once.

A kernel takes one struct by value. Its fields are listed here; `declaration` emits the C++ side of it and `pack` the
bytes. Fields are ordered by size, largest first, so that neither side needs padding.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cached_property

_POINTERS = {"const Element*", "Element*", "const float*", "float*", "const Wide*", "Wide*", "u32*"}
_MAP = "TensorMap"
_FORMATS = {"i64": "q", "double": "d", "i32": "i", "float": "f", _MAP: "128s"} | dict.fromkeys(_POINTERS, "Q")
_MAP_ALIGNMENT = 64


@dataclass(frozen=True)
class ParamStruct:
    """A C++ struct passed by value to a kernel.

    Attributes:
        name: of the C++ type.
        fields: (name, C++ type) in memory order: tensor maps, pointers, then 8-byte fields, then 4-byte ones.
    """

    name: str
    fields: tuple[tuple[str, str], ...]

    @cached_property
    def packer(self) -> struct.Struct:
        """Packs the values of `fields`, in order, into the struct's bytes (padded as C++ does)."""
        layout = "<" + "".join(_FORMATS[ctype] for _, ctype in self.fields)
        return struct.Struct(layout + "x" * (-struct.calcsize(layout) % (_MAP_ALIGNMENT if self.maps else 8)))

    @cached_property
    def address_packer(self) -> struct.Struct:
        """Packs the leading tensor maps, as one value, and pointers: all that differs between calls with one plan."""
        maps = f"{self.maps * struct.calcsize(_FORMATS[_MAP])}s" if self.maps else ""
        return struct.Struct(f"<{maps}{self.pointers}Q")

    @property
    def maps(self) -> int:
        """Number of leading tensor maps."""
        return sum(ctype == _MAP for _, ctype in self.fields)

    @property
    def pointers(self) -> int:
        """Number of pointer fields."""
        return sum(ctype in _POINTERS for _, ctype in self.fields)

    def declaration(self) -> str:
        """The struct in C++."""
        members = "".join(f"    {ctype} {name};\n" for name, ctype in self.fields)
        return (
            f"struct {self.name} {{\n{members}}};\n"
            f'static_assert(sizeof({self.name}) == {self.packer.size}, "params.py lays {self.name} out differently");\n'
        )


class ParamBlock:
    """A parameter struct's bytes in memory that stays in place, and what the driver wants of them at a launch.

    Attributes:
        buffer: the bytes, to be packed into.
        kernel_params: address of the array of pointers, of length one, to a kernel's parameters.
    """

    def __init__(self, content: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(content, len(content))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.kernel_params = ctypes.addressof(self._pointers)

    def tobytes(self) -> bytes:
        """A copy of the bytes."""
        return self.buffer.raw


def _strides(*arrays: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{a}_{axis}_stride", "i64") for a in arrays for axis in ("batch", "row", "head"))


_SHAPE_AND_MASK = (
    ("batch", "i32"),
    ("seqlen_q", "i32"),
    ("seqlen_k", "i32"),
    ("num_heads", "i32"),
    ("num_kv_heads", "i32"),
    ("group", "i32"),
    ("section", "i32"),
    ("band_first", "i32"),
    ("band_last", "i32"),
    ("scale", "float"),
    ("softcap", "float"),
)

FORWARD = ParamStruct(
    "ForwardParams",
    (
        ("q", "const Element*"),
        ("k", "const Element*"),
        ("v", "const Element*"),
        ("out", "Element*"),
        ("lse", "float*"),
        *_strides("q", "k", "v", "out"),
        *_SHAPE_AND_MASK,
    ),
)

# Of family "v1", whose rows lie in a workspace between two visits.
FORWARD_V1 = ParamStruct("ForwardV1Params", (*FORWARD.fields[:5], ("kept", "float*"), *FORWARD.fields[5:]))

# For kernels that load with the tensor memory accelerator: the maps of q, k and v, then as above.
FORWARD_TENSOR = ParamStruct(
    "ForwardTensorParams",
    (
        *(("q_map", _MAP), ("k_map", _MAP), ("v_map", _MAP)),
        ("tile_counter", "u32*"),  # two zeros, and so again after the launch; null: no counter
        *FORWARD.fields,
    ),
)

BACKWARD = ParamStruct(
    "BackwardParams",
    (
        ("dout", "const Element*"),
        ("q", "const Element*"),
        ("k", "const Element*"),
        ("v", "const Element*"),
        ("out", "const Element*"),
        ("lse", "const float*"),
        ("dlse", "const float*"),  # null: zero
        ("dq", "Element*"),
        ("dk", "Element*"),
        ("dv", "Element*"),
        ("delta", "float*"),
        ("dq_sum", "float*"),
        *_strides("dout", "q", "k", "v", "out", "dq", "dk", "dv"),
        *_SHAPE_AND_MASK,
    ),
)

BACKWARD_TENSOR = ParamStruct(
    "BackwardTensorParams",
    (
        *((f"{name}_map", _MAP) for name in ("dout", "q", "k", "v")),
        *BACKWARD.fields,
        ("whole_works", "i32"),  # key tiles that have a block each, see shares.py
        ("share", "i32"),  # query tiles of a block, of all that the other key tiles see
    ),
)

# Of standard attention, whose scores lie in memory: rows of all heads, one after the other, `row_stride` apart.
_SCORE_ROWS = (
    ("row_stride", "i64"),
    ("lse_head_stride", "i64"),
    ("rows", "i64"),
    ("softcap", "double"),
    ("seqlen_q", "i32"),
    ("seqlen_k", "i32"),
    ("band_first", "i32"),
    ("band_last", "i32"),
)

SOFTMAX = ParamStruct("SoftmaxParams", (("scores", "Element*"), ("lse", "Wide*"), *_SCORE_ROWS))

GRADIENT = ParamStruct(
    "GradientParams",
    (
        ("scores", "Element*"),
        ("gradients", "Element*"),
        ("lse", "const Wide*"),
        ("delta", "const Wide*"),
        *_SCORE_ROWS,
        ("kept", "i32"),  # P stands where S would
    ),
)

ROWS = ParamStruct(
    "RowsParams",
    (
        ("dout", "const Element*"),
        ("out", "const Element*"),
        ("dlse", "const Wide*"),  # null: zero
        ("delta", "Wide*"),
        *((f"{a}_{axis}_stride", "i64") for a in ("dout", "out") for axis in ("batch", "row", "head", "col")),
        ("lse_head_stride", "i64"),
        ("rows", "i64"),
        ("seqlen_q", "i32"),
        ("num_heads", "i32"),
        ("head_dim_v", "i32"),
    ),
)


def header() -> str:
    """The structs without tensor maps, as the text that kernels include as ``params.cuh``."""
    return '#include "traits.cuh"\n\n' + FORWARD.declaration() + "\n" + BACKWARD.declaration()


def v1_header() -> str:
    """The struct of the first FlashAttention's forward: ``v1_params.cuh``."""
    return '#include "traits.cuh"\n\n' + FORWARD_V1.declaration()


def tensor_header() -> str:
    """The structs with tensor maps: ``tensor_params.cuh``."""
    structs = FORWARD_TENSOR.declaration() + "\n" + BACKWARD_TENSOR.declaration()
    return '#include "platform/tma.cuh"\n#include "traits.cuh"\n\n' + structs


def standard_header() -> str:
    """The structs of standard attention's kernels: ``standard_params.cuh``."""
    structs = "\n".join(struct.declaration() for struct in (SOFTMAX, GRADIENT, ROWS))
    return '#include "standard_traits.cuh"\n\n' + structs
