"""One planted fault."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``old``, which is in ``file`` once, becomes ``new``; ``cases`` of the suite fail then."""

    name: str
    file: str
    old: str
    new: str
    why: str
    cases: tuple


def fault(name, file, old, new, why, *cases):
    return Fault(name, file, old, new, why, cases)
