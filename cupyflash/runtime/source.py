"""Kernel sources, flattened: one string with every include resolved.

CuPy's disk cache keys on the source text and the options but does not see files behind ``-I``; a flat source makes a
changed header a changed key. The same flattening, with the other platform folder, feeds the emulated runtime.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from . import params

if TYPE_CHECKING:
    from importlib.abc import Traversable

_KERNELS = files("cupyflash.kernels_cu")
_INCLUDE = re.compile(r'^#include "([^"]+)"\s*$')
_PLATFORM_FOLDERS = {"cuda": "ptx", "emulated": "emulated"}
_GENERATED = {
    "params.cuh": params.header,
    "v1_params.cuh": params.v1_header,
    "tensor_params.cuh": params.tensor_header,
    "standard_params.cuh": params.standard_header,
}


@cache
def flatten(kernel_file: str, platform: str = "cuda", root: Path | None = None) -> str:
    """The text of ``kernels_cu/<kernel_file>`` with every include replaced by the included text, once each.

    Args:
        kernel_file: for example ``"forward_mma.cu"``.
        platform: ``"cuda"`` or ``"emulated"``: which folder ``#include "platform/..."`` means.
        root: in place of ``kernels_cu``, another folder of the same make-up.
    """
    kernels = _KERNELS if root is None else root
    seen: set[str] = set()

    def expand(name: str, text: str) -> str:
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(text.splitlines(), start=1):
            match = _INCLUDE.match(line)
            if match is None:
                lines.append("" if line.strip() == "#pragma once" else line)
            elif match[1] not in seen:
                seen.add(match[1])
                lines += [expand(match[1], _read(match[1], platform, kernels)), f'#line {number + 1} "{name}"']
            else:
                lines.append("")
        return "\n".join(lines)

    return expand(kernel_file, kernels.joinpath(kernel_file).read_text(encoding="utf-8")) + "\n"


def _read(name: str, platform: str, kernels: Traversable) -> str:
    if name in _GENERATED:
        return _GENERATED[name]()
    folder, _, rest = name.partition("/")
    path = f"include/{_PLATFORM_FOLDERS[platform]}/{rest}" if folder == "platform" else f"include/{name}"
    return kernels.joinpath(path).read_text(encoding="utf-8")
