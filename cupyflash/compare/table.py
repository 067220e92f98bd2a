"""The results: one row per problem, pass and algorithm, and the CSV file that keeps them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .cases import ALGORITHMS, DIRECTIONS, Case
from .hbm import Traffic

FAILED = "failed: "  # how the note of a pass begins that could have been measured


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one pass of one algorithm over one problem. None: not measured, or not to be had.

    Attributes:
        device: the GPU's name, or the CPU's.
        batch, seqlen, heads, head_dim, causal, dtype: the problem.
        direction: "forward", "backward" or "step", which is both, one after the other.
        algorithm: "standard", "v1", "v2" or "v3".
        tiles: family and tiles that were taken.
        seconds: median over samples; spread: their interquartile range over the median.
        flops: of the products that are needed.
        peak_bytes: most memory that was held at a time beyond the inputs, results included.
        counted_*: see ``hbm.Traffic``; measured_*: the same by the GPU's counters.
        error: largest error against float64, over the largest element; of out, or of dq, dk and dv.
        copy_bytes, gemm_flops: per second, of a copy and of a matrix product on this device.
        note: why something was not measured.
        made: with what, and when.
    """

    device: str
    dtype: str
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool
    direction: str
    algorithm: str
    tiles: str = ""
    seconds: float | None = None
    spread: float | None = None
    samples: int | None = None
    flops: int | None = None
    peak_bytes: int | None = None
    counted_read: int | None = None
    counted_written: int | None = None
    counted_requested: int | None = None
    measured_read: int | None = None
    measured_written: int | None = None
    measured_requested: int | None = None
    error: float | None = None
    copy_bytes: float | None = None
    gemm_flops: float | None = None
    note: str = ""
    made: str = ""

    @property
    def case(self) -> Case:
        """The problem."""
        return Case(self.batch, self.seqlen, self.heads, self.head_dim, self.causal, self.dtype)

    @property
    def counted(self) -> Traffic | None:
        """The counted bytes."""
        return _traffic(self.counted_read, self.counted_written, self.counted_requested)

    @property
    def measured(self) -> Traffic | None:
        """The measured bytes."""
        return _traffic(self.measured_read, self.measured_written, self.measured_requested)

    @property
    def failed(self) -> bool:
        """Whether the pass could have been measured, but something went wrong."""
        return self.note.startswith(FAILED)

    @property
    def rate(self) -> float | None:
        """Floating-point operations per second."""
        return self.flops / self.seconds if self.flops and self.seconds else None

    @property
    def intensity(self) -> float | None:
        """Operations per byte through the GPU's memory: measured if it was, else counted."""
        moved = self.measured or self.counted
        return self.flops / moved.total if self.flops and moved and moved.total else None


_KINDS: dict[str, Any] = {
    "str": str,
    "int": int,
    "bool": lambda text: {"0": False, "1": True}[text],
    "int | None": int,
    "float | None": float,
}


# What follows from the rows, for whoever opens the file; ``read`` has no use for it.
_DERIVED = ("tflops", "times_previous", "times_standard", "flops_per_byte")


def write(path: Path, rows: Sequence[Row]) -> None:
    """Writes a CSV file with a header; what is None is left empty.

    Behind the attributes of a row it has TFLOP/s, how many times as fast it is as the algorithm before and as standard
    attention, and operations per byte through the GPU's memory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = {(row.case, row.direction, row.algorithm): row.seconds for row in rows if row.seconds}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*(field.name for field in fields(Row)), *_DERIVED))
        for row in rows:
            kept = (_text(getattr(row, field.name)) for field in fields(Row))
            writer.writerow((*kept, *("" if value is None else f"{value:.4g}" for value in _derived(row, seconds))))


def read(path: Path) -> list[Row]:
    """The rows of a CSV file that ``write`` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file; the message names the line.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        wanted = {field.name for field in fields(Row)}
        if missing := wanted - set(reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {min(missing)}; expected a file that cupyflash compare wrote")
        rows = []
        for content in reader:
            try:
                rows.append(Row(**{field.name: _value(str(field.type), content[field.name]) for field in fields(Row)}))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    for row in rows:
        if row.algorithm not in ALGORITHMS or row.direction not in DIRECTIONS:
            raise ValueError(
                f"{path}: {row.algorithm} {row.direction}; expected {', '.join((*ALGORITHMS, *DIRECTIONS))}"
            )
    return rows


def unique(values: Iterable[Any]) -> list[Any]:
    """The values in order, each once."""
    return list(dict.fromkeys(values))


def select(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows whose attributes have these values."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def _derived(row: Row, seconds: Mapping[tuple[Case, str, str], float]) -> Iterator[float | None]:
    """The values of ``_DERIVED``."""
    yield None if row.rate is None else row.rate / 1e12
    number = ALGORITHMS.index(row.algorithm)
    for older in (ALGORITHMS[number - 1], ALGORITHMS[0]):
        before = seconds.get((row.case, row.direction, older)) if number else None
        yield before / row.seconds if before and row.seconds else None
    yield row.intensity


def _traffic(read: int | None, written: int | None, requested: int | None) -> Traffic | None:
    return None if read is None or written is None else Traffic(read, written, requested or 0)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return str(value)


def _value(kind: str, text: str) -> Any:
    if text == "" and kind.endswith("None"):
        return None
    return _KINDS[kind](text)
