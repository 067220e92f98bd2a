"""The tuner and its winners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tuner import tune as tune

__all__ = ["tune"]


def __getattr__(name: str) -> Any:
    if name == "tune":  # not at import: a call of attention imports the store, and needs nothing of the tuner
        from .tuner import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
