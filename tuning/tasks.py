"""What is tuned: kinds of problems, each with the sizes at which it is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, Literal, get_args

from ..problem import GPU_MAX_HEAD_DIM, Problem, one_of
from ..tiles import TASKS, Task

DtypeKind = Literal["bfloat16", "float16", "tf32", "float32"]
Effort = Literal["quick", "full"]
Regime = Literal["eager", "graph"]

DTYPE_KINDS: tuple[DtypeKind, ...] = get_args(DtypeKind)
HEAD_DIMS = (64, 128, 256)
LENGTHS = (512, 4096)

# Tokens of a measured problem, and columns of all heads: enough blocks for several rounds of a large GPU, and where
# multiply-adds bind, little enough for milliseconds.
_TOKENS = {"bfloat16": (16384, 2048), "float16": (16384, 2048), "tf32": (8192, 1024), "float32": (8192, 1024)}
_PRODUCTS = {"forward": 2, "backward": 5, "backward_dkv": 4, "backward_dq": 3}  # of matrices


@dataclass(frozen=True, slots=True)
class Size:
    """Of a measured problem; it stands for those that are nearer to it than to the others."""

    seqlen: int
    batch: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.seqlen}"


# One sequence alone, which leaves multiprocessors idle; sequences of a tile or two, many and few, whose time is that of
# the first loads and of rows that tiles have for nothing.
_SMALL = (Size(1024, 1), Size(256, 1), Size(128, 32), Size(128, 2), Size(64, 64))


@dataclass(frozen=True, slots=True)
class TuningTask:
    """One kind of problem, for which winners are kept.

    Attributes:
        task: the pass.
        dtype: of the data; "tf32" is float32 on tensor cores. What "bfloat16" finds holds for float16 too, if it is
            proven there.
        head_dim, head_dim_v: of q and k, and of v.
        masked: with a causal mask, which stands for every band.
        sizes: that are measured, each of which has winners of its own; kernels do not depend on them.
        algorithm: whose kernels are searched, as in ``attention``. "auto" has one tile of "v1", which is rarely right.

    Raises:
        ValueError: a head dim that no kernel has.
    """

    task: Task
    dtype: DtypeKind
    head_dim: int
    head_dim_v: int
    masked: bool
    sizes: tuple[Size, ...] = ()
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        for name in ("head_dim", "head_dim_v"):
            if not 1 <= getattr(self, name) <= GPU_MAX_HEAD_DIM:
                raise ValueError(f"{name} is {getattr(self, name)}; the GPU computes 1 to {GPU_MAX_HEAD_DIM}")

    @property
    def name(self) -> str:
        """Says all but the sizes, without spaces: ``forward-bfloat16-d128-masked``."""
        dims = f"d{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        algorithm = "" if self.algorithm == "auto" else f"-{self.algorithm}"
        return f"{self.task}-{self.dtype}-{dims}-{'masked' if self.masked else 'full'}{algorithm}"

    def problem(self, size: Size, **changes: Any) -> Problem:
        """What is measured at a size; ``changes`` are ``heads``, ``kv_heads``, ``seqlen_k``, ``dtype`` or options of
        ``attention``.
        """
        seqlen, batch = size.seqlen, size.batch
        heads = changes.pop("heads", max(1, _TOKENS[self.dtype][1] // self.head_dim))
        kv_heads, seqlen_k = changes.pop("kv_heads", heads), changes.pop("seqlen_k", seqlen)
        dtype = changes.pop("dtype", "float32" if self.dtype == "tf32" else self.dtype)

        def array(length: int, count: int, columns: int) -> Any:
            return SimpleNamespace(shape=(batch, length, count, columns), dtype=dtype)

        options: dict[str, Any] = {
            "causal": self.masked,
            "precision": "tf32" if self.dtype == "tf32" else None,
            "deterministic": self.task in ("backward_dkv", "backward_dq"),
            "algorithm": self.algorithm,
        }
        return Problem.of(
            array(seqlen, heads, self.head_dim),
            array(seqlen_k, kv_heads, self.head_dim),
            array(seqlen_k, kv_heads, self.head_dim_v),
            **{**options, **changes},
        )

    def siblings(self) -> list[dict[str, Any]]:
        """Changes to the problem that lead to other kernels with the same entry: a winner is proven in these too."""
        return [
            *([{"dtype": "float16"}] if self.dtype == "bfloat16" else []),
            *([{"window": (50, 9)}] if self.masked else []),
        ]


def flops(task: Task, problem: Problem) -> float:
    """Floating-point operations of a pass, by the matrix products that its mathematics need; causal counts half."""
    visible = problem.scores / (2 if problem.is_masked else 1)
    return _PRODUCTS[task] * 2.0 * visible * (problem.head_dim + problem.head_dim_v) / 2


def default_tasks(
    effort: Effort = "quick",
    tasks: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    head_dims: Sequence[int] = (),
    lengths: Sequence[int] = (),
    algorithm: str = "auto",
) -> list[TuningTask]:
    """What is tuned if nobody says otherwise, the most used first; each argument that is not empty replaces a choice.

    Quick leaves out deterministic gradients of float32, and float16, which shares bfloat16's winners. ``algorithm``:
    "auto" or "v1", which has kernels of its own for what tensor cores compute.

    Raises:
        ValueError: an unknown task, dtype or algorithm, a size that is not positive or too large, or nothing is left.
    """
    one_of("algorithm", algorithm, ("auto", "v1"))
    for what, given, known in (("tasks", tasks, TASKS), ("dtypes", dtypes, DTYPE_KINDS)):
        for name in given:
            if name not in known:
                raise ValueError(f"{what} has {name!r}; expected some of {', '.join(known)}")
    for what, numbers in (("head_dims", head_dims), ("lengths", lengths)):
        if any(number < 1 for number in numbers):
            raise ValueError(f"{what} is {list(numbers)}; sizes are positive")
    found = [
        TuningTask(task, dtype, head_dim, head_dim, masked, sizes(dtype, lengths), algorithm)
        for task, dtype, head_dim, masked in _listed(effort, tasks, dtypes, head_dims)
        if algorithm == "auto" or (task in ("forward", "backward") and dtype != "float32")
    ]
    if not found:
        raise ValueError(
            f"algorithm is {algorithm!r}, whose kernels are forward and backward of bfloat16, float16 and tf32; tasks "
            f"is {list(tasks)} and dtypes is {list(dtypes)}, which leaves nothing"
        )
    return found


def sizes(dtype: DtypeKind, lengths: Sequence[int] = ()) -> tuple[Size, ...]:
    """Problems that fill a GPU, of several lengths; if no lengths are given, also some that do not."""
    tokens = _TOKENS[dtype][0]
    full = [Size(length, max(1, tokens // length)) for length in dict.fromkeys(lengths or LENGTHS)]
    return (*full, *([] if lengths else _SMALL))


def _listed(
    effort: Effort, tasks: Sequence[str], dtypes: Sequence[str], head_dims: Sequence[int]
) -> Iterator[tuple[Task, DtypeKind, int, bool]]:
    for dtype in DTYPE_KINDS:
        if dtype not in (dtypes or ("bfloat16", "tf32", "float32")):
            continue
        rare: tuple[Task, ...] = ("backward_dkv", "backward_dq")
        for task, head_dim, masked in product(TASKS, dict.fromkeys(head_dims or HEAD_DIMS), (True, False)):
            asked = task in tasks or (not tasks and (effort == "full" or dtype == "bfloat16" or task not in rare))
            if asked:
                yield task, dtype, head_dim, masked
