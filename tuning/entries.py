"""What is kept of tuning: which tiles won, for which kind of problem, and how that is known.

``parse`` and ``content`` go between an ``Entry`` and the plain mappings that YAML files hold.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, get_args

from ..problem import Problem
from ..resources import Limits
from ..tiles import TASKS, Family, Task, TileConfig, tile_head_dims

DTYPES = ("float16", "bfloat16", "half", "tf32", "float32")
FAMILIES: tuple[Family, ...] = get_args(Family)

_SHORTEST = 64  # rows of one tile: what is shorter is one tile, too
_MOST_ROWS = 1 << 18  # hundreds of tiles per multiprocessor or dozens: more of them changes nothing


class EntryError(ValueError):
    """An entry that cannot be used; the message names the key, what stands there, and what was expected."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problem, as far as it decides which tiles are fastest.

    Attributes:
        task: one of ``TASKS``.
        dtype: "float16", "bfloat16", "half" (both of them), "tf32" or "float32" (exact).
        head_dim, head_dim_v: columns of the tiles.
        masked: the problem has a band.
        length: rows that every block streams (of k; of q in "backward" and "backward_dkv"), to the nearest power of two
            and at least 64. None: for all lengths.
        rows: those that the blocks share among them (batch * heads * rows of q; of k in "backward" and
            "backward_dkv"), to the nearest power of two from 64 to 2^18: few tiles leave multiprocessors idle, and then
            smaller ones win. None: for all numbers.

    Example:
        >>> from cupyflash.problem import Band, Problem
        >>> p = Problem(2, 1000, 1000, 8, 8, 59, 59, "float16", Band(None, 0), 0.125, 0.0, "ieee", False)
        >>> str(Kind.of("forward", p))
        'forward float16 d64 masked length 1024 rows 16384'
        >>> str(Kind.of("forward", p).general())
        'forward half d64 masked'
    """

    task: Task
    dtype: str
    head_dim: int
    head_dim_v: int
    masked: bool
    length: int | None = None
    rows: int | None = None

    @classmethod
    def of(cls, task: Task, problem: Problem) -> Kind:
        """The kind of a problem, with nothing left open."""
        dtype = problem.dtype
        if dtype == "float32" and problem.precision == "tf32":
            dtype = "tf32"
        streamed, owned, heads = problem.seqlen_k, problem.seqlen_q, problem.num_heads
        if task in ("backward", "backward_dkv"):
            streamed, owned, heads = problem.seqlen_q, problem.seqlen_k, problem.num_kv_heads
        return cls(
            task,
            dtype,
            *tile_head_dims(problem.head_dim, problem.head_dim_v),
            problem.is_masked,
            max(_SHORTEST, _nearest_power(streamed)),
            min(max(_SHORTEST, _nearest_power(problem.batch * heads * owned)), _MOST_ROWS),
        )

    @property
    def is_general(self) -> bool:
        """Whether it is for all lengths and numbers of rows."""
        return self.length is None and self.rows is None

    def general(self) -> Kind:
        """The same for both 16-bit dtypes, all lengths and all numbers of rows."""
        dtype = "half" if self.dtype in ("float16", "bfloat16") else self.dtype
        return replace(self, dtype=dtype, length=None, rows=None)

    def distance(self, other: Kind) -> float:
        """How far the lengths and rows of two kinds are apart, in powers of two.

        0 where this one holds for the other; infinite if they differ in more than that.
        """
        if self.dtype != other.dtype and not (self.dtype == "half" and other.dtype in ("float16", "bfloat16")):
            return math.inf
        if self._tiles() != other._tiles():
            return math.inf
        pairs = ((self.length, other.length), (self.rows, other.rows))
        return sum(abs(math.log2(mine / theirs)) for mine, theirs in pairs if mine is not None and theirs is not None)

    def _tiles(self) -> tuple[str, int, int, bool]:
        """All but the dtype and the sizes."""
        return self.task, self.head_dim, self.head_dim_v, self.masked

    def __str__(self) -> str:
        head_dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        parts = [self.task, self.dtype, head_dims, "masked" if self.masked else "full"]
        parts += [f"length {self.length}"] if self.length else []
        parts += [f"rows {self.rows}"] if self.rows else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Measured:
    """How it is known that a configuration won; None is not known.

    Attributes:
        seconds: of one run of the task, median.
        default_seconds: of what is taken without the entry, timed in turn with it.
        spread: of the samples behind ``seconds``, relative to it.
        sustained_seconds: of one run among many back to back, where power is the limit.
        date: as in "2026-11-29".
        kernel: hash of the kernel's source, see ``kernel_hash.kernel_hash``.
        nvrtc, cupy, driver: versions.
        provenance: who measured, in words.
    """

    seconds: float | None = None
    default_seconds: float | None = None
    spread: float | None = None
    sustained_seconds: float | None = None
    date: str | None = None
    kernel: str | None = None
    nvrtc: str | None = None
    cupy: str | None = None
    driver: str | None = None
    provenance: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """Tiles that won, for a kind of problem."""

    kind: Kind
    config: TileConfig
    measured: Measured = field(default_factory=Measured)

    @property
    def key(self) -> tuple[Kind, Family]:
        """What a file has one entry of: the best of each family, since not every family takes every layout."""
        return self.kind, self.config.family


@dataclass(frozen=True, slots=True)
class Winners:
    """The entries of one GPU model; those of equal kind stand in the order of preference."""

    device: Limits
    entries: tuple[Entry, ...]


# ---- checks


Check = Callable[[Any], str]  # what was expected, if it is not what came


def _any(value: Any) -> str:
    return ""


def _one_of(*allowed: str) -> Check:
    return lambda value: "" if value in allowed and isinstance(value, str) else f"one of {', '.join(allowed)}"


def _whole(value: Any) -> str:
    return "" if type(value) is int and value >= 1 else "a whole number from 1"


def _power(value: Any) -> str:
    return "" if type(value) is int and value >= 1 and value & (value - 1) == 0 else "a power of two"


def _flag(value: Any) -> str:
    return "" if type(value) is bool else "true or false"


def _seconds(value: Any) -> str:
    good = type(value) in (int, float) and 0 < value < math.inf
    return "" if good else "seconds above 0 (in YAML, an exponent needs a dot and a sign: 1.5e-05)"


def _fraction(value: Any) -> str:
    return "" if type(value) in (int, float) and 0 <= value < math.inf else "a number from 0"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) and value else "text (in YAML, numbers in quotes are text)"


def _date(value: Any) -> str:
    try:
        datetime.date.fromisoformat(value)
    except (TypeError, ValueError):
        return "a date such as 2026-11-29"
    return ""


_PARTS = dict.fromkeys(("kind", "config", "measured"), _any)
_KIND: dict[str, Check] = {
    "task": _one_of(*TASKS),
    "dtype": _one_of(*DTYPES),
    "head_dim": _whole,
    "head_dim_v": _whole,
    "masked": _flag,
    "length": _power,
    "rows": _power,
}
_BY_TYPE: dict[str, Check] = {"Family": _one_of(*FAMILIES), "int": _whole, "bool": _flag}
_CONFIG = {f.name: _BY_TYPE[str(f.type)] for f in fields(TileConfig)}
_MEASURED: dict[str, Check] = {
    **dict.fromkeys(("seconds", "default_seconds", "sustained_seconds"), _seconds),
    "spread": _fraction,
    "date": _date,
    **dict.fromkeys(("kernel", "nvrtc", "cupy", "driver", "provenance"), _text),
}
_DEVICE = {f.name: _text if f.name == "name" else _whole for f in fields(Limits)}
_REQUIRED = {cls: [f.name for f in fields(cls) if f.default is MISSING] for cls in (Kind, TileConfig, Limits)}


def parse(mapping: Any) -> Entry:
    """An entry from what a file holds.

    Raises:
        EntryError: something is missing, unknown, or not of its type.
    """
    parts = _checked("", mapping, _PARTS, ("kind", "config"))
    kind = Kind(**_checked("kind.", parts["kind"], _KIND, _REQUIRED[Kind]))
    tiles = tile_head_dims(kind.head_dim, kind.head_dim_v)
    if tiles != (kind.head_dim, kind.head_dim_v):
        raise EntryError(
            f"kind.head_dim and kind.head_dim_v are {kind.head_dim} and {kind.head_dim_v}; expected those of tiles, "
            f"{tiles[0]} and {tiles[1]}"
        )
    config = TileConfig(**_checked("config.", parts["config"], _CONFIG, _REQUIRED[TileConfig]))
    measured = parts.get("measured") or {}
    if isinstance(measured, dict) and isinstance(measured.get("date"), datetime.date):
        measured = {**measured, "date": measured["date"].isoformat()}  # YAML makes one of a date without quotes
    return Entry(kind, config, Measured(**_checked("measured.", measured, _MEASURED, ())))


def parse_device(mapping: Any) -> Limits:
    """A GPU model's identity from what a file holds; raises EntryError."""
    return Limits(**_checked("device.", mapping, _DEVICE, _REQUIRED[Limits]))


def content(entry: Entry) -> dict[str, dict[str, Any]]:
    """What a file holds of an entry: plain numbers and text, and nothing that is at its default.

    Raises:
        EntryError: the entry could not be read back.
    """
    mapping = {
        name: {f.name: _plain(value) for f in fields(part) if (value := getattr(part, f.name)) != f.default}
        for name, part in (("kind", entry.kind), ("config", entry.config), ("measured", entry.measured))
    }
    if not mapping["measured"]:
        del mapping["measured"]
    parse(mapping)
    return mapping


def device_content(device: Limits) -> dict[str, Any]:
    """What a file holds of a GPU model's identity; raises EntryError if it could not be read back."""
    mapping = {name: _plain(value) for name, value in asdict(device).items()}
    parse_device(mapping)
    return mapping


def _checked(prefix: str, mapping: Any, checks: Mapping[str, Check], required: Iterable[str]) -> dict[str, Any]:
    if not isinstance(mapping, dict):
        raise EntryError(f"{prefix.rstrip('.') or 'the entry'} is {mapping!r}; expected keys {', '.join(checks)}")
    for name, value in mapping.items():
        if name not in checks:
            raise EntryError(f"{prefix}{name} is unknown; expected {', '.join(checks)}")
        if expected := checks[name](value):
            raise EntryError(f"{prefix}{name} is {value!r}; expected {expected}")
    for name in required:
        if name not in mapping:
            raise EntryError(f"{prefix}{name} is missing")
    return mapping


def _plain(value: Any) -> Any:
    """A NumPy scalar as the Python number that it is: YAML knows no other."""
    return value.item() if hasattr(value, "item") else value


def _nearest_power(number: int) -> int:
    return 1 << round(math.log2(max(1, number)))
