"""The calls that are compared, and how far their results are from float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import cupyflash
from cupyflash import standard
from cupyflash.arrays import Array, bfloat16
from cupyflash.reference import reference_backward, reference_forward

from .cases import DIRECTIONS, Case

_LENGTHS = (512, 1024, 2048, 4096)  # float64 on the host takes seconds
_HEADS = 1


def inputs(case: Case, seed: int = 0, count: int = 4) -> list[Array]:
    """Normal q, k, v and dout of a case (or fewer), NumPy arrays in its dtype."""
    random = np.random.default_rng(seed)
    dtype = bfloat16("dtype") if case.dtype == "bfloat16" else np.dtype(case.dtype)
    return [random.standard_normal(case.shape, dtype=np.float32).astype(dtype) for _ in range(count)]


def calls(case: Case, algorithm: str, arrays: Sequence[Array]) -> dict[tuple[str, str], Callable[[], Any]]:
    """{(algorithm, direction): the call}, over q, k, v and dout. The forward is run once, for the backward.

    Raises:
        ValueError: the algorithm cannot compute the case here.
        MemoryError: there is not enough memory.
    """
    q, k, v, dout = arrays
    options: dict[str, Any] = {"causal": case.causal, "algorithm": algorithm}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)

    def forward() -> Any:
        return cupyflash.attention(q, k, v, return_lse=True, **options)

    def backward() -> Any:
        return cupyflash.attention_backward(dout, q, k, v, out, lse, **options)

    def step() -> Any:
        if algorithm == "standard":  # whose backward need not compute P again where the forward has just been
            return standard.step(case.problem(), "bshd", dout, q, k, v)
        new_out, new_lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        return cupyflash.attention_backward(dout, q, k, v, new_out, new_lse, **options)

    return {(algorithm, direction): call for direction, call in zip(DIRECTIONS, (forward, backward, step), strict=True)}


def cases(of: Sequence[Case]) -> list[Case]:
    """The problems whose results are compared with float64, for the head dims and up to the lengths of these.

    The shortest also with a causal mask.
    """
    longest = max(case.seqlen for case in of)
    lengths = [length for length in _LENGTHS if length <= longest] or [longest]
    return [
        Case(1, length, _HEADS, head_dim, causal, of[0].dtype)
        for head_dim in dict.fromkeys(case.head_dim for case in of)
        for length in lengths
        for causal in ((False, True) if length == lengths[0] else (False,))
    ]


def errors(
    case: Case,
    algorithms: Sequence[str],
    to_device: Callable[[Array], Array],
    to_host: Callable[[Array], Array],
) -> dict[tuple[str, str], float]:
    """{(algorithm, direction): the largest error over the largest element}, of what can be computed.

    Of the gradients it is that of the worst of the three.
    """
    q, k, v, dout = inputs(case, seed=1)
    problem = case.problem()
    expected = {
        "forward": reference_forward(problem, q, k, v)[:1],
        "backward": reference_backward(problem, dout, q, k, v),
    }
    found = {}
    for algorithm in algorithms:
        with contextlib.suppress(MemoryError, RuntimeError, ValueError):  # it cannot: the comparison itself says why
            of_algorithm = calls(case, algorithm, [to_device(x) for x in (q, k, v, dout)])
            for direction, right in expected.items():
                results = of_algorithm[algorithm, direction]()
                pairs = zip(results, right, strict=False)  # lse is not compared
                found[algorithm, direction] = max(_relative(to_host(got), reference) for got, reference in pairs)
    return found


def _relative(result: Array, reference: Array) -> float:
    difference = np.abs(result.astype(np.float64) - reference)
    return float(difference.max() / np.abs(reference).max())
