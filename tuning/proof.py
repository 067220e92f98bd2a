"""The proof that a configuration computes what it should, on small problems that wrong kernels fail.

Ragged tails, a causal corner that leaves rows and keys without a partner, grouped heads, scores so large that one key
has all the weight. Outputs are full of NaN before, and lie like the workspace between guards that must survive. What is
right comes from textbook attention in float64; a result may be off by what a naive computation in the same dtype is off
by, times a factor, plus a constant.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..engine import Runtime
from ..problem import Problem
from ..reference import (
    by_head,
    reference_backward,
    reference_forward,
    repeat_heads,
    sum_groups,
    visible_pairs,
)
from ..tiles import TileConfig
from .passes import Memory, Pass, plan, workspace_floats
from .tasks import Size, TuningTask

Array = Any

_computing = threading.Lock()
_GUARD_BYTES = 1024  # on either side
_GUARD = 0xA5
_FORWARD_RULE, _GRADIENT_RULE = (2.0, 1e-5), (3.0, 1e-3)  # (factor, constant)
_LSE_ABSOLUTE, _LSE_RELATIVE = 3e-5, 3e-6


class Wrong(Exception):
    """A configuration's result is not what it should be; the message says where."""


@dataclass(frozen=True, slots=True)
class ProofCase:
    """A small problem of a task.

    ``numbers`` is "normal", "large" (one key weighs all), "falling" (the later a key the lower its score, so that
    kernels, which start at the last, raise their maximum all the time) or "hidden" (the last key and its value are not
    finite, which rows that do not see them must not notice; in masked tasks only).
    """

    seqlen_q: int
    seqlen_k: int
    heads: int = 2
    kv_heads: int = 1
    numbers: str = "normal"


CASES = (
    ProofCase(261, 333, 4, 2),
    ProofCase(200, 70),
    ProofCase(150, 290, numbers="falling"),
    ProofCase(70, 200, 2, 2, numbers="large"),
    ProofCase(2, 130),  # not 1: a causal mask that hides nothing is another kernel, which would have to be compiled
    ProofCase(140, 140, numbers="hidden"),
)


class Prover:
    """Proves configurations on one runtime. Right answers are kept, since all candidates of a task share them."""

    def __init__(self, runtime: Runtime, memory: Memory) -> None:
        self._runtime = runtime
        self._memory = memory

    def prove(
        self,
        task: TuningTask,
        config: TileConfig,
        changes: dict[str, Any] | None = None,
        cases: tuple[ProofCase, ...] = CASES,
    ) -> None:
        """Computes all cases with a configuration.

        Args:
            task: the kind of problem.
            config: legal on the runtime's device.
            changes: to the problem, see ``TuningTask.siblings``.
            cases: the small problems.

        Raises:
            Wrong: a result is off, an output was not written, or something else was.
        """
        for answer in self.answers(task, changes, cases):
            case = answer.case
            try:
                self._check(task, config, answer)
            except Wrong as error:
                raise Wrong(f"{error} (Sq={case.seqlen_q} Sk={case.seqlen_k} {case.numbers})") from None

    def answers(
        self, task: TuningTask, changes: dict[str, Any] | None = None, cases: tuple[ProofCase, ...] = CASES
    ) -> list[Answer]:
        """What is right; computed once, by whoever asks first: threads that compile may, ahead of the proof."""
        fitting = [case for case in cases if task.masked or case.numbers != "hidden"]
        with _computing:
            return [_answer(task, case, tuple((changes or {}).items())) for case in fitting]

    def _check(self, task: TuningTask, config: TileConfig, answer: Answer) -> None:
        outputs, workspace = self._outputs(task, config, answer)
        given = [None if x is None else self._upload(x) for x in answer.inputs]
        arrays = [*given, *(output.inside for output in outputs), *([workspace.inside] if workspace else [])]
        Pass(self._runtime, task.task, config, answer.problem, arrays).launch_all()
        results = [output.checked(self._memory) for output in outputs]
        if workspace:
            workspace.checked(self._memory)
        for name, got, right in zip(answer.names, results, answer.right, strict=True):
            right.check(name, got)

    def _outputs(self, task: TuningTask, config: TileConfig, answer: Answer) -> tuple[list[Guarded], Guarded | None]:
        outputs = [Guarded(self._memory, self._runtime, x.value.shape, x.dtype) for x in answer.right]
        if task.task == "forward":
            return outputs, None
        floats = workspace_floats(plan(self._runtime, task.task, config, answer.problem))
        return outputs, Guarded(self._memory, self._runtime, (floats,), np.dtype(np.float32))

    def _upload(self, values: Array) -> Array:
        room = self._memory.empty(values.nbytes)
        self._memory.write(room, np.ascontiguousarray(values).view(np.uint8).reshape(-1))
        return self._memory.typed(room, values.shape, values.dtype)


class Guarded:
    """An array full of NaN, with guards before and behind it."""

    def __init__(self, memory: Memory, runtime: Runtime, shape: tuple[int, ...], dtype: Any) -> None:
        self._bytes = math.prod(shape) * dtype.itemsize
        self._room = memory.empty(2 * _GUARD_BYTES + self._bytes)
        content = np.full(2 * _GUARD_BYTES + self._bytes, _GUARD, np.uint8)
        inside = slice(_GUARD_BYTES, _GUARD_BYTES + self._bytes)
        content[inside] = 0xFF  # NaN in every float type
        memory.write(self._room, content)
        self.inside = memory.typed(self._room[inside], shape, dtype)
        if runtime.address(self.inside) % 256:
            raise ValueError("memory is not aligned to 256 bytes")

    def checked(self, memory: Memory) -> Array:
        """The values, after a look at the guards."""
        content = memory.read(self._room)
        for part, where in ((content[:_GUARD_BYTES], "before"), (content[_GUARD_BYTES + self._bytes :], "behind")):
            if (part != _GUARD).any():
                raise Wrong(f"wrote {where} an array")
        return content[_GUARD_BYTES:][: self._bytes].view(self.inside.dtype).reshape(self.inside.shape)


@dataclass(frozen=True)
class Right:
    """What a result must be: float64 values, and how far it may be off."""

    value: Array
    dtype: Any
    allowed: Array | float

    def check(self, name: str, got: Array) -> None:
        got = got.astype(np.float64)
        strange = np.isfinite(got) != np.isfinite(self.value)
        if strange.any():
            where = tuple(int(i) for i in np.argwhere(strange)[0])
            raise Wrong(f"{name} is {got[where]} at {where}, expected {self.value[where]:.4g}")
        with np.errstate(invalid="ignore"):
            error = np.where(np.isfinite(got), np.abs(got - self.value), 0)
        if (error > self.allowed).any():
            where = tuple(int(i) for i in np.argwhere(error > self.allowed)[0])
            raise Wrong(
                f"{name} is off by {error.max():.3g}; at {where} it is {got[where]:.4g}, not {self.value[where]:.4g}"
            )


@dataclass(frozen=True)
class Answer:
    """A problem with its inputs and what is right."""

    case: ProofCase
    problem: Problem
    inputs: tuple[Array, ...]
    names: tuple[str, ...]
    right: tuple[Right, ...]


def problem_of(task: TuningTask, case: ProofCase, changes: dict[str, Any]) -> Problem:
    """The problem of a case; its kernels are those that are measured."""
    further = {"seqlen_k": case.seqlen_k, "heads": case.heads, "kv_heads": case.kv_heads}
    return task.problem(Size(case.seqlen_q, 1), **further, **changes)


@lru_cache(maxsize=64)
def _answer(task: TuningTask, case: ProofCase, changes: tuple[tuple[str, Any], ...]) -> Answer:
    problem = problem_of(task, case, dict(changes))
    dtype = numpy_dtype(problem.dtype)
    rng = np.random.default_rng((case.seqlen_q, case.seqlen_k, problem.head_dim))
    q, k, v, dout = _numbers(rng, problem, case, dtype, task.task == "forward")
    dlse: Array | None = rng.standard_normal((problem.batch, problem.num_heads, problem.seqlen_q), np.float32)
    if case.numbers != "normal":
        dlse = None
    forward = task.task == "forward"

    def exact(k: Array, v: Array) -> tuple[Array, ...]:
        if forward:
            return reference_forward(problem, q, k, v)
        return reference_backward(problem, dout, q, k, v, dlse)

    # How far one may be off is asked with finite numbers: the naive computation hides by weights of 0.
    values = exact(k, v)
    naive = [_naive_forward(problem, q, k, v)] if forward else _naive_backward(problem, dout, q, k, v, dlse)
    allowed: list[Any] = [
        _allowed(value, near, dtype, _FORWARD_RULE if forward else _GRADIENT_RULE)
        for value, near in zip(values, naive, strict=False)
    ]
    if case.numbers == "hidden":
        k, v = k.copy(), v.copy()
        k[:, -1, :, 1], v[:, -1, :, 2] = np.nan, np.inf
        values = exact(k, v)
    if forward:
        lse = values[1]
        allowed.append(np.maximum(_LSE_ABSOLUTE, _LSE_RELATIVE * np.abs(np.where(np.isfinite(lse), lse, 0))))
        rights = (Right(values[0], dtype, allowed[0]), Right(lse, np.dtype(np.float32), allowed[1]))
        return Answer(case, problem, (q, k, v), ("out", "lse"), rights)
    out, lse = reference_forward(problem, q, k, v)
    given = (dout, q, k, v, out.astype(dtype), lse.astype(np.float32), dlse)
    gradients = tuple(Right(value, dtype, most) for value, most in zip(values, allowed, strict=True))
    return Answer(case, problem, given, ("dq", "dk", "dv"), gradients)


def _allowed(value: Array, naive: Array, dtype: Any, rule: tuple[float, float]) -> float:
    factor, constant = rule
    error = max(np.abs(naive - value).max(), np.abs(value.astype(dtype).astype(np.float64) - value).max())
    return factor * float(error) + constant


def _numbers(rng: np.random.Generator, problem: Problem, case: ProofCase, dtype: Any, forward: bool) -> list[Array]:
    batch, heads = problem.batch, problem.num_heads
    shapes = [
        (batch, problem.seqlen_q, heads, problem.head_dim),
        (batch, problem.seqlen_k, problem.num_kv_heads, problem.head_dim),
        (batch, problem.seqlen_k, problem.num_kv_heads, problem.head_dim_v),
        (batch, problem.seqlen_q, heads, problem.head_dim_v),
    ]
    q, k, v, dout = (rng.standard_normal(shape, np.float32) for shape in shapes)
    if case.numbers == "large":
        q, k = 4 * q, 3 * k
    elif case.numbers == "falling":
        # In the backward gently: a gradient that is a small difference of large keys shows float32's rounding of LSE.
        later = np.arange(problem.seqlen_k)[:, None]
        q[..., 0], k[..., 0] = (8, -later / 2 - 64) if forward else (16, -later / 16)
    given = [x.astype(dtype) for x in (q, k, v, dout)]
    # The tensor cores round float32 to TF32; given such numbers, they do not.
    return [_to_tf32(x) for x in given] if problem.precision == "tf32" else given


def _to_tf32(x: Array) -> Array:
    """Ten bits of mantissa, in float32."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def numpy_dtype(name: str) -> Any:
    """NumPy's dtype of this name, or ml_dtypes'."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


# ---- attention as one would write it in the dtype of the data: every intermediate array is rounded to it


def _rounder(problem: Problem) -> Any:
    if problem.precision == "tf32" and problem.dtype == "float32":
        return lambda x: _to_tf32(np.ascontiguousarray(x, np.float32))
    dtype = numpy_dtype(problem.dtype)
    return lambda x: np.asarray(x).astype(dtype).astype(np.float32)


def _naive_weights(problem: Problem, Q: Array, K: Array, rounded: Any) -> Array:
    S = rounded(rounded(Q @ K.swapaxes(-1, -2)) * np.float32(problem.scale))
    S = np.where(visible_pairs(problem), S, np.float32(-np.inf))
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    P = np.exp(S - np.where(np.isneginf(m), 0, m))
    l = P.sum(axis=-1, keepdims=True)
    return rounded(P / np.where(l == 0, 1, l))


def _float32_heads(problem: Problem, q: Array, *kv: Array) -> list[Array]:
    return [by_head(q).astype(np.float32), *(repeat_heads(problem, by_head(x)).astype(np.float32) for x in kv)]


def _naive_forward(problem: Problem, q: Array, k: Array, v: Array) -> Array:
    rounded = _rounder(problem)
    Q, K, V = _float32_heads(problem, q, k, v)
    return rounded(_naive_weights(problem, Q, K, rounded) @ V).swapaxes(1, 2).astype(np.float64)


def _naive_backward(problem: Problem, dout: Array, q: Array, k: Array, v: Array, dlse: Array | None) -> list[Array]:
    rounded = _rounder(problem)
    Q, K, V = _float32_heads(problem, q, k, v)
    dO = by_head(dout).astype(np.float32)
    P = _naive_weights(problem, Q, K, rounded)
    dV = rounded(P.swapaxes(-1, -2) @ dO)
    dP = rounded(dO @ V.swapaxes(-1, -2))
    D = (P * dP).sum(axis=-1) - (0 if dlse is None else dlse)
    dS = rounded(rounded(P * (dP - D[..., None])) * np.float32(problem.scale))
    dQ, dK = rounded(dS @ K), rounded(dS.swapaxes(-1, -2) @ Q)
    grouped = (dQ, rounded(sum_groups(problem, dK)), rounded(sum_groups(problem, dV)))
    return [x.swapaxes(1, 2).astype(np.float64) for x in grouped]
