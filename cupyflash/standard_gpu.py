"""Standard attention on CuPy arrays: products by cuBLAS, S and P in the arrays' own dtype in the GPU's memory.

Arrays are (B, S, H, D) views, as in engine.py, with any strides; lse, dlse and delta are (B, H, S), contiguous along S.
"""

from __future__ import annotations

import cupy

from .arrays import Array, bfloat16
from .dispatch import Kernel
from .engine import Launcher, Runtime
from .problem import ITEMSIZE, Problem
from .resources import Limits
from .runtime.cublas import layout, products, row_step
from .runtime.cuda import CudaRuntime
from .runtime.params import GRADIENT, ROWS, SOFTMAX, ParamBlock, ParamStruct

_ELEMENTS = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "float", "float64": "double"}
_PIECE_BYTES = 16  # what a thread moves at a time, kernels_cu/include/score_row.cuh
_WARP = 32
_BLOCKS = (256, 512, 1024)  # threads that share a longer row
_MOST_KEPT = 4  # pieces in registers; of 1,024 threads each has 64

_LOADED_KEPT = 1024

_runtime: Runtime = CudaRuntime()
_loaded: dict[tuple[Kernel, int, int], Launcher] = {}


def forward(problem: Problem, q: Array, k: Array, v: Array, out: Array, lse: Array) -> Array:
    """Writes out and lse on the current stream. S is held in memory, and P in its place: returns that."""
    Q, K, V = _by_group(problem, q), _by_key_head(problem, k), _by_key_head(problem, v)
    O = target = _by_group(problem, out)
    if row_step(O) is None:  # cuBLAS could not write it
        O = cupy.ndarray(O.shape, O.dtype)
    S = _score_matrix(problem)
    P = S[..., : problem.seqlen_k]  # without the padding of rows
    with products(problem.precision) as multiply:
        multiply(Q, K.swapaxes(-1, -2), P, alpha=problem.scale)
        _launch("standard_softmax", SOFTMAX, problem, [S, lse], *_rows_of(problem, lse))
        multiply(P, V, O)
    if O is not target:
        _copy(target, O)
    return S


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    dlse: Array | None,
    kept: Array | None = None,
) -> None:
    """Writes dq, dk and dv on the current stream.

    S is computed again; P replaces it, computed from S and lse. dP is held beside it, and dS in its place. The scale is
    in the products, so that dS is stored without it.

    Args:
        kept: what ``forward`` returned, of a problem without a soft cap: then S is not computed again.
    """
    Q, K, V = _by_group(problem, q), _by_key_head(problem, k), _by_key_head(problem, v)
    dO = _by_group(problem, dout)
    delta = cupy.ndarray((problem.batch, problem.num_heads, _lse_head_stride(lse)), lse.dtype)  # laid out as lse is
    _launch("standard_rows", ROWS, problem, [dout, out, dlse, delta], *_rows_of_out(problem, dout, out, lse))
    S, dP = _score_matrix(problem) if kept is None else kept, _score_matrix(problem)
    P, dS = S[..., : problem.seqlen_k], dP[..., : problem.seqlen_k]
    with products(problem.precision) as multiply:
        if kept is None:
            multiply(Q, K.swapaxes(-1, -2), P, alpha=problem.scale)
        multiply(dO, V.swapaxes(-1, -2), dS)
        constants = [*_rows_of(problem, lse), int(kept is not None)]
        _launch("standard_gradient", GRADIENT, problem, [S, dP, lse, delta], *constants)
        multiply(dS, K, _by_group(problem, dq), alpha=problem.scale)
        for gradient, weights, factors, alpha in ((dk, dS, Q, problem.scale), (dv, P, dO, 1.0)):
            target = gradient.transpose(0, 2, 1, 3)
            if problem.group == 1:
                multiply(weights[:, :, 0].swapaxes(-1, -2), factors[:, :, 0], target, alpha=alpha)
                continue
            # The sum over the heads of a group stays in float32 (float64 for float64).
            total = cupy.ndarray(target.shape, lse.dtype)
            for g in range(problem.group):
                multiply(weights[:, :, g].swapaxes(-1, -2), factors[:, :, g], total, alpha=alpha, beta=float(g > 0))
            _copy(target, total)


def kernel(name: str, problem: Problem, limits: Limits) -> Kernel:
    """One of the kernels of standard.cu, compiled for a problem."""
    threads, row_threads, pieces = row_share(problem)
    shared_bytes = _WARP * ITEMSIZE[problem.wide_dtype]
    defines = {
        "CF_ARCH": limits.arch,
        "CF_ELEMENT": _ELEMENTS[problem.dtype],
        "CF_WIDE": _ELEMENTS[problem.wide_dtype],
        "CF_THREADS": threads,
        "CF_ROW_THREADS": row_threads,
        "CF_PIECES": pieces,
        "CF_SOFTCAP": int(problem.softcap != 0),
        "CF_SHARED_BYTES": shared_bytes,
    }
    return Kernel("standard.cu", name, tuple(defines.items()), threads, shared_bytes)


def row_share(problem: Problem) -> tuple[int, int, int]:
    """(threads of a block, threads that share a row of scores, pieces of a row that each keeps in registers).

    The number of pieces is a power of two, for the sake of fewer kernels; 0 of a row that is too long.
    """
    pieces = row_stride(problem) * problem.itemsize // _PIECE_BYTES
    for threads in (_WARP, *_BLOCKS):
        if pieces <= threads * _MOST_KEPT:
            return max(threads, _BLOCKS[0]), threads, _power_of_two(-(-pieces // threads))
    return _BLOCKS[-1], _BLOCKS[-1], 0


def row_stride(problem: Problem) -> int:
    """Elements from one row of S to the next: whole pieces."""
    elements = _PIECE_BYTES // problem.itemsize
    return -(-problem.seqlen_k // elements) * elements


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def _score_matrix(problem: Problem) -> Array:
    shape = (problem.batch, problem.num_kv_heads, problem.group, problem.seqlen_q, row_stride(problem))
    return cupy.ndarray(shape, bfloat16("q") if problem.dtype == "bfloat16" else problem.dtype)


def _by_group(problem: Problem, x: Array) -> Array:
    """(B, Hk, G, S, D) view of a query-side array."""
    batch, rows, head, column = x.strides
    shape = problem.batch, problem.num_kv_heads, problem.group, problem.seqlen_q, x.shape[3]
    return cupy.ndarray(shape, x.dtype, x.data, (batch, problem.group * head, head, rows, column))


def _by_key_head(problem: Problem, x: Array) -> Array:
    """(B, Hk, G, S, D) view of a key-side array, whose heads are not repeated in memory."""
    if layout(x.transpose(0, 2, 1, 3)) is None:  # a copy of the view below would repeat them
        x = cupy.ascontiguousarray(x)
    batch, rows, head, column = x.strides
    shape = problem.batch, problem.num_kv_heads, problem.group, problem.seqlen_k, x.shape[3]
    return cupy.ndarray(shape, x.dtype, x.data, (batch, head, 0, rows, column))


def _rows_of(problem: Problem, lse: Array) -> list[float]:
    """What the structs of the score matrix hold besides pointers."""
    band = problem.band
    return [
        row_stride(problem),
        _lse_head_stride(lse),
        problem.batch * problem.num_heads * problem.seqlen_q,
        problem.softcap,
        problem.seqlen_q,
        problem.seqlen_k,
        -problem.seqlen_q if band.first is None else band.first,
        problem.seqlen_k if band.last is None else band.last,
    ]


def _rows_of_out(problem: Problem, dout: Array, out: Array, lse: Array) -> list[int]:
    """What the struct of ``standard_rows`` holds besides pointers."""
    return [
        *(x.strides[axis] // x.itemsize for x in (dout, out) for axis in range(4)),
        _lse_head_stride(lse),
        problem.batch * problem.num_heads * problem.seqlen_q,
        problem.seqlen_q,
        problem.num_heads,
        problem.head_dim_v,
    ]


def _lse_head_stride(lse: Array) -> int:
    """Elements of lse from one head to the next, and from the last head of a batch entry to the next entry's first."""
    batch, head, _ = lse.strides
    stride = head if lse.shape[1] > 1 else batch  # that along an axis of length 1 means nothing
    return int(stride // lse.itemsize)


def _launch(name: str, struct: ParamStruct, problem: Problem, arrays: list[Array | None], *constants: float) -> None:
    compiled_for = kernel(name, problem, _runtime.limits())
    row_threads = _WARP if name == "standard_rows" else row_share(problem)[1]
    rows_per_block = compiled_for.threads // row_threads
    grid = -(-problem.batch * problem.num_heads * problem.seqlen_q // rows_per_block)
    device = _runtime.device()
    key = (compiled_for, grid, device)
    if key not in _loaded:
        if len(_loaded) >= _LOADED_KEPT:
            _loaded.clear()
        _loaded[key] = _runtime.load(compiled_for, grid)
    pointers = [0 if x is None else _runtime.address(x) for x in arrays]
    _loaded[key](ParamBlock(struct.packer.pack(*pointers, *constants)), _runtime.stream(device))


def _copy(target: Array, source: Array) -> None:
    """Apart, as standard._fill."""
    target[...] = source
