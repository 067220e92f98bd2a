"""Which kernel sources a measurement was made with."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ..tiles import Family, Task

_COMMENT = re.compile(r"\s*//.*")


@cache
def kernel_hash(family: Family, task: Task) -> str:
    """A hash of the code that computes a task: its file with all that it includes, but for comments and blank lines.

    The standard algorithm has no kernel; its module stands for it.

    Raises:
        KeyError: there is no such kernel.
    """
    import hashlib  # not at import: most processes never ask

    from ..dispatch import FILES, WIDE_BACKWARD  # which imports the store
    from ..runtime.source import flatten

    if family == "standard":
        from .. import standard

        return hashlib.sha256(Path(standard.__file__).read_bytes()).hexdigest()[:12]
    files = (
        [FILES[family, task][0], *WIDE_BACKWARD[:1]]
        if (family, task) == ("wgmma", "backward")
        else [FILES[family, task][0]]
    )
    lines = (_COMMENT.sub("", line).strip() for file in files for line in flatten(file).splitlines())
    code = "\n".join(line for line in lines if line and not line.startswith("#line"))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def is_stale(family: Family, task: Task, kernel: str | None) -> bool:
    """Whether a measurement's hash is known and not that of the kernel as it is now."""
    if kernel is None:
        return False
    try:
        return kernel_hash(family, task) != kernel
    except KeyError:
        return True
