"""The calls that are compared, and how far their results are from float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import cupyflash
from cupyflash.arrays import Array, bfloat16
from cupyflash.reference import reference_backward, reference_forward

from .cases import DIRECTIONS, Case

_SMALL = {"batch": 1, "seqlen": 512, "heads": 2}  # float64 on the host takes a second


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
        new_out, new_lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        return cupyflash.attention_backward(dout, q, k, v, new_out, new_lse, **options)

    return {(algorithm, direction): call for direction, call in zip(DIRECTIONS, (forward, backward, step), strict=True)}


def small(head_dim: int, causal: bool, dtype: str) -> Case:
    """The problem whose results are compared with float64."""
    return Case(head_dim=head_dim, causal=causal, dtype=dtype, **_SMALL)


def errors(
    head_dim: int,
    causal: bool,
    dtype: str,
    algorithms: Sequence[str],
    to_device: Callable[[Array], Array],
    to_host: Callable[[Array], Array],
) -> dict[tuple[str, str], tuple[Case, float]]:
    """{(algorithm, direction): (the problem, the largest error over the largest element)}, of what can be computed.

    Of the gradients it is that of the worst of the three.
    """
    case = small(head_dim, causal, dtype)
    q, k, v, dout = inputs(case, seed=1)
    problem = case.problem()
    expected = {
        "forward": reference_forward(problem, q, k, v)[:1],
        "backward": reference_backward(problem, dout, q, k, v),
    }
    found = {}
    for algorithm in algorithms:
        with contextlib.suppress(RuntimeError, ValueError):  # it cannot: the comparison itself says why
            of_algorithm = calls(case, algorithm, [to_device(x) for x in (q, k, v, dout)])
            for direction, right in expected.items():
                results = of_algorithm[algorithm, direction]()
                pairs = zip(results, right, strict=False)  # lse is not compared
                error = max(_relative(to_host(result), reference) for result, reference in pairs)
                found[algorithm, direction] = case, error
    return found


def _relative(result: Array, reference: Array) -> float:
    difference = np.abs(result.astype(np.float64) - reference)
    return float(difference.max() / np.abs(reference).max())
