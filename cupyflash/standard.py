"""Attention as the textbook has it, with the score matrix in memory: the baseline for speed and memory."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from . import arrays
from .api import Options, Window
from .arrays import Array
from .problem import Band, Problem, shape_in


def standard_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    window: Window = None,
    softcap: float | None = 0.0,
    return_lse: bool = False,
) -> Any:
    """The textbook computation in three steps, S = q k^T, P = softmax(S), out = P v, with S and P held in memory.

    The baseline that ``attention`` is measured against: the same arguments, the same results up to rounding, and a
    whole score matrix. On the GPU the products are cuBLAS's, in the dtype of the arrays with sums in float32, and S and
    P are stored in that dtype, P in the place of S: B H Sq Sk elements. Scores of float16 arrays must therefore not
    exceed 65504, and are rounded before the softmax. On the CPU all steps compute and store float32. float64 arrays are
    float64 throughout. Unlike ``attention`` it lets a NaN or Inf in a masked row of v reach the result.

    Args:
        q, k, v, causal, scale, layout, window, softcap, return_lse: as in ``attention``, any head dimension.

    Returns:
        out, or (out, lse) with ``return_lse=True``, as ``attention`` does.

    Raises:
        TypeError, ValueError, ImportError: as ``attention`` does.
        MemoryError: S and P do not fit; the message says how large they are.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
        >>> np.allclose(cupyflash.standard_attention(q, k, v), cupyflash.attention(q, k, v), atol=1e-6)
        True

    References:
        Vaswani et al., Attention Is All You Need, arXiv:1706.03762, equation 1; Dao et al., FlashAttention,
        arXiv:2205.14135, Algorithm 0.
    """
    options = Options(causal, scale, layout, window, softcap)
    return arrays.through(_standard, {"q": q, "k": k, "v": v}, {}, options, return_lse)


def _standard(q: Array, k: Array, v: Array, options: Options, return_lse: bool) -> Any:
    problem = options.problem(q, k, v)
    with arrays.on_gpu_of(("q", "k", "v"), q, k, v):
        out, lse = forward(problem, options.layout, q, k, v)
    return (out, lse) if return_lse else out


def forward(
    problem: Problem, layout: str, q: Array, k: Array, v: Array, out: Array | None = None, lse: Array | None = None
) -> tuple[Any, Any]:
    """(out, lse) of checked NumPy arrays, or CuPy arrays on the current device, in ``layout``.

    Args:
        problem: of these arrays.
        out, lse: where to write the results, lse C-contiguous; new arrays by default.

    Returns:
        out, and lse, (B, H, Sq), float32 (float64 for float64 arrays).

    Raises:
        MemoryError: S does not fit.
    """
    xp = arrays.module_of(q)
    if out is None:
        shape = shape_in(layout, problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v)
        out = xp.empty(shape, q.dtype)
    if lse is None:
        lse = xp.empty((problem.batch, problem.num_heads, problem.seqlen_q), problem.wide_dtype)
    rows, attending = _attending(problem)
    target, views = _bshd(layout, out), [_bshd(layout, x) for x in (q, k, v)]
    if attending.seqlen_q < problem.seqlen_q or not attending.scores:
        _fill(out, 0)
        _fill(lse, -np.inf)
    if attending.scores:
        q, k, v = views
        with _score_matrices(attending, "forward", xp):
            _backend(xp).forward(attending, q[:, rows], k, v, target[:, rows], lse[:, :, rows])
    return out, lse


def backward(
    problem: Problem,
    layout: str,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None = None,
    gradients: tuple[Array, Array, Array] | None = None,
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) from the results of ``forward``; dlse (None: zero) is the gradient of lse.

    They are written to ``gradients``, arrays with rows of consecutive elements; by default, new C-contiguous ones.

    P is computed again from S and lse, and not kept from the forward: two matrices of Sq x Sk are in memory at a time,
    P in the place of S, and dS in the place of dP. lse and out may be those of a larger set of keys.

    Raises:
        MemoryError: P and dS do not fit.
    """
    xp = arrays.module_of(q)
    dq, dk, dv = gradients or (xp.empty(x.shape, x.dtype) for x in (q, k, v))
    rows, attending = _attending(problem)
    if attending.seqlen_q < problem.seqlen_q or not attending.scores:
        for gradient in (dq, dk, dv):
            _fill(gradient, 0)
    if attending.scores:
        lse, dlse = (None if x is None else xp.ascontiguousarray(x)[:, :, rows] for x in (lse, dlse))
        dout, q, k, v, out, *views = (_bshd(layout, x) for x in (dout, q, k, v, out, dq, dk, dv))
        with _score_matrices(attending, "backward", xp):
            _backend(xp).backward(
                attending, dout[:, rows], q[:, rows], k, v, out[:, rows], lse, views[0][:, rows], *views[1:], dlse
            )
    return dq, dk, dv


def step(problem: Problem, layout: str, dout: Array, q: Array, k: Array, v: Array) -> tuple[Any, ...]:
    """(out, lse, dq, dk, dv) of a forward and a backward that finds its P, as frameworks train: nothing is recomputed.

    Two matrices of Sq x Sk are in memory, as in ``backward``.

    Args:
        problem: without a soft cap, whose slope takes S.

    Raises:
        MemoryError: P and dS do not fit.
    """
    xp = arrays.module_of(q)
    out_shape = shape_in(layout, problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v)
    out, dq, dk, dv = (xp.empty(shape, q.dtype) for shape in (out_shape, q.shape, k.shape, v.shape))
    lse = xp.empty((problem.batch, problem.num_heads, problem.seqlen_q), problem.wide_dtype)
    rows, attending = _attending(problem)
    if attending.seqlen_q < problem.seqlen_q or not attending.scores:
        for result in (out, dq, dk, dv):
            _fill(result, 0)
        _fill(lse, -np.inf)
    if attending.scores:
        dO, Q, K, V, O, dQ, dK, dV = (_bshd(layout, x) for x in (dout, q, k, v, out, dq, dk, dv))
        dO, Q, O, dQ, of_rows = dO[:, rows], Q[:, rows], O[:, rows], dQ[:, rows], lse[:, :, rows]
        with _score_matrices(attending, "backward", xp):
            kept = _backend(xp).forward(attending, Q, K, V, O, of_rows)
            _backend(xp).backward(attending, dO, Q, K, V, O, of_rows, dQ, dK, dV, None, kept)
    return out, lse, dq, dk, dv


def score_bytes(problem: Problem, direction: str, on_gpu: bool) -> int:
    """Memory that score matrices take at a time: one in the forward (S, then P), two in the backward (P and dS)."""
    itemsize = problem.itemsize if on_gpu or problem.dtype == "float64" else 4
    return problem.scores * itemsize * (2 if direction == "backward" else 1)


@contextlib.contextmanager
def _score_matrices(problem: Problem, direction: str, xp: Any) -> Iterator[None]:
    """Says how large the score matrices are if there is no memory for them, and what the allocator says."""
    out_of_memory = MemoryError if xp is np else xp.cuda.memory.OutOfMemoryError
    try:
        yield
    except out_of_memory as error:
        what = "S and then P" if direction == "forward" else "P and dS"
        size = score_bytes(problem, direction, xp is not np)
        raise MemoryError(
            f"standard attention holds {what}: {size / 2**30:,.4g} GiB for {problem.seqlen_q:,} x {problem.seqlen_k:,} "
            f"scores of {problem.batch * problem.num_heads} heads; there is no memory for them (attention needs none): "
            f"{error}"
        ) from error


def _attending(problem: Problem) -> tuple[slice, Problem]:
    """The rows of queries that see some key, and their problem. What the others hold takes part in nothing.

    They are consecutive: a causal mask leaves out the first rows, the left side of a window the last.
    """
    first, last = problem.band.first, problem.band.last
    begin = 0 if last is None else max(0, -last)
    end = problem.seqlen_q if first is None else min(problem.seqlen_q, problem.seqlen_k - first)
    if first is not None and last is not None and first > last:
        end = begin
    begin, end = min(begin, problem.seqlen_q), max(begin, end)
    if (begin, end) == (0, problem.seqlen_q):
        return slice(None), problem
    band = Band.of(
        None if first is None else first + begin, None if last is None else last + begin, end - begin, problem.seqlen_k
    )
    return slice(begin, end), replace(problem, seqlen_q=end - begin, band=band)


def _backend(xp: Any) -> Any:
    return importlib.import_module(".standard_cpu" if xp is np else ".standard_gpu", __package__)


def _fill(array: Array, value: float) -> None:
    """Apart, since the tests run all else on CuPy arrays that lie in the CPU's memory."""
    array.fill(value)


def _bshd(layout: str, x: Array) -> Array:
    return x.transpose(0, 2, 1, 3) if layout == "bhsd" else x
