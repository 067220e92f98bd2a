"""The parameter structs that host and kernels share, each written once.

A kernel takes one struct by value. Its fields are listed here; `declaration` emits the C++ side of it and `pack` the
bytes. Fields are ordered by size, largest first, so that neither side needs padding.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

_POINTERS = {"const Element*", "Element*", "const float*", "float*"}
_FORMATS = {"i64": "q", "i32": "i", "float": "f"} | dict.fromkeys(_POINTERS, "Q")


@dataclass(frozen=True)
class ParamStruct:
    """A C++ struct passed by value to a kernel.

    Attributes:
        name: of the C++ type.
        fields: (name, C++ type) in memory order: pointers, then i64, then 4-byte fields.
    """

    name: str
    fields: tuple[tuple[str, str], ...]

    @cached_property
    def packer(self) -> struct.Struct:
        """Packs the values of `fields`, in order, into the struct's bytes (padded to a multiple of 8)."""
        layout = "<" + "".join(_FORMATS[ctype] for _, ctype in self.fields)
        return struct.Struct(layout + "x" * (-struct.calcsize(layout) % 8))

    @cached_property
    def pointer_packer(self) -> struct.Struct:
        """Packs the leading pointers only."""
        return struct.Struct(f"<{self.pointers}Q")

    @property
    def pointers(self) -> int:
        """Number of leading pointer fields; they are all that differs between calls with one plan."""
        return sum(ctype in _POINTERS for _, ctype in self.fields)

    def declaration(self) -> str:
        """The struct in C++."""
        members = "".join(f"    {ctype} {name};\n" for name, ctype in self.fields)
        return (
            f"struct {self.name} {{\n{members}}};\n"
            f'static_assert(sizeof({self.name}) == {self.packer.size}, "params.py lays {self.name} out differently");\n'
        )


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

BACKWARD = ParamStruct(
    "BackwardParams",
    (
        ("dout", "const Element*"),
        ("q", "const Element*"),
        ("k", "const Element*"),
        ("v", "const Element*"),
        ("out", "const Element*"),
        ("lse", "const float*"),
        ("dq", "Element*"),
        ("dk", "Element*"),
        ("dv", "Element*"),
        ("delta", "float*"),
        ("dq_sum", "float*"),
        *_strides("dout", "q", "k", "v", "out", "dq", "dk", "dv"),
        *_SHAPE_AND_MASK,
    ),
)


def header() -> str:
    """Both structs, as the text that kernels include as ``params.cuh``."""
    return '#include "traits.cuh"\n\n' + FORWARD.declaration() + "\n" + BACKWARD.declaration()
