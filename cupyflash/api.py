"""The public face: attention forward and backward on NumPy arrays, CuPy arrays, and arrays that share their memory.

A call is checked once: ``_resolve`` remembers its checked form under the shapes, dtypes and options of its arrays. On
CuPy arrays it is bound to its launch besides (``Bound``): from then on, an equal call on equally laid out arrays is one
look-up and a launch with new addresses.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from . import arrays, memory
from .arrays import Array
from .problem import Problem, check_gpu, check_shape, one_of, shape_in

Window = tuple[int | None, int | None] | None


class Options(NamedTuple):
    """The options of ``attention`` that select what is computed, and where."""

    causal: bool | str = False
    scale: float | None = None
    layout: str = "bshd"
    window: Window = None
    softcap: float | None = 0.0
    deterministic: bool = False
    precision: str | None = None
    device: str | None = None
    algorithm: str = "auto"
    alignment: str | None = None  # corner of a window without a causal bound; not public: causal says it there

    def problem(self, q: Array, k: Array, v: Array) -> Problem:
        """The checked problem of three arrays under these options."""
        return Problem.of(
            q,
            k,
            v,
            causal=self.causal,
            scale=self.scale,
            layout=self.layout,
            window=self.window,
            softcap=self.softcap,
            precision=self.precision,
            deterministic=self.deterministic,
            algorithm=self.algorithm,
            alignment=self.alignment,
        )


# The values of Options in its order, or Options itself: what every call looks up need not have names, which take time.
OptionValues: TypeAlias = tuple[Any, ...]


class Call(NamedTuple):
    """A checked call: the problem, the module that computes it, and the shapes of its results."""

    problem: Problem
    place: str  # "cpu", "gpu", "streaming" (NumPy arrays on the GPU), or "emulated"
    backend: Any  # the module of that name; all have the same forward and backward
    xp: Any  # numpy or cupy: the module of the arrays
    is_bhsd: bool
    is_empty: bool  # no scores: nothing is launched
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Bound:
    """A call on CuPy arrays that was checked once. Calls that find it under their key differ from it in addresses only.

    Attributes:
        call: the checked call.
        launch: launches it on the current stream; takes the addresses of all arrays.
        shapes: of the results that are made for every call: (out, lse), or (dq, dk, dv).
        dtype: of the results; their scalar type, which CuPy looks up faster than a dtype.
        overlaps: distances from a given out to q, k and v at which it may share elements with them.
    """

    call: Call
    launch: Callable[..., None]
    shapes: tuple[tuple[int, ...], ...]
    dtype: type
    overlaps: tuple[range, ...] = ()


def attention(
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
    out: Array | None = None,
    deterministic: bool = False,
    precision: str | None = None,
    device: str | None = None,
    algorithm: str = "auto",
) -> Any:
    """Exact scaled dot-product attention, softmax(q k^T * scale) v, in memory linear in the sequence length.

    Query head h attends with key/value head h // (H // Hk) (multi-query and grouped-query attention when Hk < H). With
    Sq != Sk, ``causal=True`` aligns the last query with the last key: query i sees the keys j <= i + Sk - Sq. A query
    that sees no key gives out 0 and lse -inf.

    Args:
        q: (B, Sq, H, D) queries; float16, bfloat16, float32, or float64 on the CPU. NumPy, CuPy, torch, JAX, or
            anything with DLPack or ``__cuda_array_interface__``; any strides; never copied to another place.
        k: (B, Sk, Hk, D) keys, H a multiple of Hk.
        v: (B, Sk, Hk, Dv) values. D and Dv are at most 256 on the GPU.
        causal: False, True (the same as "bottom_right"), or "top_left" (query i sees j <= i, as torch and JAX have it).
        scale: multiplies the scores; 1/sqrt(D) by default.
        layout: "bshd", or "bhsd" for (batch, heads, sequence, head_dim) arrays; out has the same layout.
        window: (left, right) keys that a query sees beside its diagonal key, both inclusive; None is unbounded.
        softcap: scores become softcap * tanh(score / softcap); 0 or None is off.
        return_lse: also return the log of the softmax denominators.
        out: array of the shape and dtype of the result to write to; may be strided, must share no element with q,
            k or v.
        deterministic: gradients equal in every bit from run to run; the forward pass always is.
        precision: of float32 products on the GPU, "ieee" (default; on tensor cores by products of parts) or "tf32"
            (10-bit mantissas, faster).
        device: None computes where the arrays are. "cuda" sends NumPy arrays to the current GPU and back. "emulated"
            runs the CUDA kernels on the CPU, thread by thread, for learning and debugging: NumPy arrays only, thousands
            of times slower than a GPU, needs g++.
        algorithm: "auto" takes what was fastest where it was measured, else the newest that the GPU and the problem
            allow. "standard" holds S and P in memory, which grow with Sq * Sk; "v1", "v2" and "v3" are FlashAttention's
            of 2022, 2023 and 2024. On the CPU there are "standard" and "v2". All are exact; but in "standard", as in
            the textbook, NaN and infinity in a value reach rows that do not see it.

    Returns:
        out, (B, Sq, H, Dv) in ``layout`` and the dtype of q; with ``return_lse=True`` the tuple (out, lse), lse being
        (B, H, Sq), natural log, float32 (float64 for float64 arrays). Both are arrays of the library that made q.

    Raises:
        TypeError: an argument is no array, dtypes differ or are unsupported, or arrays are not all in one place.
        ValueError: shapes do not agree, an option is out of range, arrays are on different GPUs, or the algorithm that
            is asked for cannot compute them.
        ImportError: CuPy, or ml_dtypes for bfloat16, is needed and missing; the message says what to install.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4, 8), dtype=np.float32)
        >>> out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        ((2, 5, 4, 8), (2, 4, 5))
        >>> np.allclose(out[:, 0], v[:, 0])  # the first query sees the first key only
        True

    References:
        Dao et al., FlashAttention, arXiv:2205.14135, Algorithm 1; Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 1;
        Shah et al., FlashAttention-3, arXiv:2407.08608, Algorithm 1.
    """
    options = (causal, scale, layout, window, softcap, deterministic, precision, device, algorithm, None)
    kind = type(q)
    if kind in arrays.native and type(k) is kind and type(v) is kind and (out is None or type(out) is kind):
        return forward(q, k, v, out, options, return_lse)
    return arrays.through(forward, {"q": q, "k": k, "v": v}, {"out": out}, options, return_lse)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    window: Window = None,
    softcap: float | None = 0.0,
    deterministic: bool = False,
    precision: str | None = None,
    device: str | None = None,
    algorithm: str = "auto",
    dlse: Array | None = None,
) -> Any:
    """The gradients of ``attention`` with respect to q, k and v, from its results and the same options.

    Args:
        dout: gradient of a loss with respect to out; shape and dtype of out, any strides.
        q, k, v: the arguments of ``attention``.
        out, lse: its results with ``return_lse=True``.
        dlse: (B, H, Sq) gradient of the loss with respect to lse, in the dtype of lse, any strides; None is zero. It
            adds dlse[b, h, i] * P[b, h, i, j], the weight of key j, to the gradient of the score of query i and key j.
        causal, scale, layout, window, softcap, deterministic, precision, device, algorithm: as given to ``attention``.
            The algorithm may be another one: out and lse mean the same in all of them.

    Returns:
        (dq, dk, dv), new C-contiguous arrays with the shapes and the dtype of q, k and v. The gradient of a key/value
        head is summed over the query heads that share it, that of a broadcast k or v is not. A query that sees no key
        contributes nothing, whatever its dout and dlse are, NaN included.

    Raises:
        TypeError, ValueError, ImportError: as ``attention`` does.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
        >>> out, lse = cupyflash.attention(q, k, v, return_lse=True)
        >>> dq, dk, dv = cupyflash.attention_backward(np.ones_like(out), q, k, v, out, lse)
        >>> np.allclose(dv.sum(axis=1), 5)  # every query spreads a weight of 1 over the keys
        True
        >>> dq, *_ = cupyflash.attention_backward(0 * out, q, k, v, out, lse, dlse=np.ones_like(lse))  # of lse.sum()
        >>> np.allclose(dq, cupyflash.attention(q, k, k) / np.sqrt(8), atol=1e-6)  # the mean key, by the weights
        True

    References:
        Dao et al., FlashAttention, arXiv:2205.14135, Algorithm 4; Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2.
    """
    options = (causal, scale, layout, window, softcap, deterministic, precision, device, algorithm, None)
    kind = type(q)
    same = kind is type(dout) is type(k) is type(v) is type(out) is type(lse)
    if same and kind in arrays.native and (dlse is None or type(dlse) is kind):
        return backward(dout, q, k, v, out, lse, dlse, options)
    required = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    return arrays.through(backward, required, {"dlse": dlse}, options)


def attention_vjp(
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
    deterministic: bool = False,
    precision: str | None = None,
    device: str | None = None,
    algorithm: str = "auto",
) -> tuple[Any, ...]:
    """``attention`` and the function that pulls a gradient of its results back to q, k and v.

    Args:
        q, k, v, causal, scale, layout, window, softcap, deterministic, precision, device, algorithm: as in
            ``attention``.
        return_lse: also return lse, the log of the softmax denominators, for a loss that depends on it.

    Returns:
        (out, vjp), or with ``return_lse=True`` (out, lse, vjp). vjp(dout) and vjp(dout, dlse) return (dq, dk, dv), dlse
        being the gradient with respect to lse as in ``attention_backward``. vjp can be called more than once. It keeps
        q, k, v, out and lse, not copies of them: change none of these in place before the last call.

    Raises:
        TypeError, ValueError, ImportError: as ``attention`` does.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
        >>> out, vjp = cupyflash.attention_vjp(q, k, v, causal=True)
        >>> dq, dk, dv = vjp(np.ones_like(out))
        >>> dq.shape == q.shape
        True
        >>> out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True)
        >>> dq, dk, dv = vjp(np.ones_like(out), 2e-4 * lse)  # of the loss out.sum() + 1e-4 * (lse**2).sum()

    References:
        Dao, FlashAttention-2, arXiv:2307.08691, Algorithms 1 and 2.
    """
    if isinstance(window, list):
        window = (*window,)  # what becomes of the list later is not meant
    options = Options(causal, scale, layout, window, softcap, deterministic, precision, device, algorithm)
    required = {"q": q, "k": k, "v": v}
    out, lse = arrays.through(forward, required, {"out": None}, options, True)

    def vjp(dout: Array, dlse: Array | None = None) -> Any:
        results = {"dout": dout, **required, "out": out, "lse": lse}
        return arrays.through(backward, results, {"dlse": dlse}, options)

    return (out, lse, vjp) if return_lse else (out, vjp)


def supported(q: Array, k: Array, v: Array, **options: Any) -> tuple[bool, str]:
    """Whether ``attention`` accepts these arrays and options, and if not, why. Never raises.

    Args:
        q, k, v: as in ``attention``.
        options: causal, scale, layout, window, softcap, deterministic, precision, device, algorithm, as in
            ``attention``.

    Returns:
        (True, "") or (False, reason), the reason being the message that ``attention`` would raise, or that an option is
        none of these.

    Example:
        >>> import numpy as np, cupyflash
        >>> q, k = np.zeros((1, 4, 8, 16), np.float32), np.zeros((1, 4, 3, 16), np.float32)
        >>> cupyflash.supported(q, k, k)
        (False, 'k has 3 heads but q has 8; num_heads must be a multiple of num_kv_heads')
    """
    known = [name for name in Options._fields if name != "alignment"]
    for name in options:
        if name not in known:
            return False, f"{name} is no option that decides it; expected {', '.join(known)}"
    try:
        adopted = {name: arrays.adopt(name, array) for name, array in (("q", q), ("k", k), ("v", v))}
        arrays.check_one_place(adopted)
        call = _resolve(adopted["q"], adopted["k"], adopted["v"], Options(**options))
        if call.place != "cpu":
            kernels = "emulated" if call.place == "emulated" else "gpu"
            in_place = filter(memory.is_addressable, adopted.values())  # others are copied
            views = (_bshd(call, array) for array in in_place)
            importlib.import_module(f".{kernels}", __package__).check(call.problem, *views)
    except Exception as error:  # whatever keeps attention from working is the answer
        return False, str(error)
    return True, ""


def forward(q: Array, k: Array, v: Array, out: Array | None, options: OptionValues, return_lse: bool) -> Any:
    """``attention`` on arrays that are all NumPy or all CuPy."""
    if type(q) is np.ndarray:
        return _forward(_resolve(q, k, v, options), q, k, v, out, return_lse)

    cupy = arrays.native[type(q)]
    gpu = cupy.cuda.runtime.getDevice()
    q_at, k_at, v_at = q.data.ptr, k.data.ptr, v.data.ptr
    out_at, out_layout = (0, None) if out is None else (out.data.ptr, _layout(out))
    bits = (q_at | k_at | v_at | out_at) & _ALIGNMENT_BITS
    key = (gpu, options, bits, _layout(q), _layout(k), _layout(v), out_layout)
    try:
        bound = _bound_forward.get(key)
    except TypeError:  # an option that cannot be hashed, such as a list for window
        bound = None
    if bound is None:
        call = _resolve(q, k, v, options)
        where = arrays.gpu_of(("q", "k", "v", "out"), q, k, v, q if out is None else out)
        if where != gpu:
            with cupy.cuda.Device(where):
                return forward(q, k, v, out, options, return_lse)
        bound = _bind_forward(call, q, k, v, out)
        if bound is None:
            return _forward(call, q, k, v, out, return_lse)
        _remember(_bound_forward, key, bound)

    if out is None:
        out = cupy.ndarray(bound.shapes[0], bound.dtype)
        out_at = out.data.ptr
        if out_at & _ALIGNMENT_BITS:  # CuPy's own allocators align to 512 bytes
            return _forward(bound.call, q, k, v, None, return_lse)
    else:
        overlaps = bound.overlaps
        if q_at - out_at in overlaps[0] or k_at - out_at in overlaps[1] or v_at - out_at in overlaps[2]:
            _check_out(out, q, k, v, bound.call)
    if not return_lse:
        bound.launch(q_at, k_at, v_at, out_at, 0)
        return out
    lse = cupy.ndarray(bound.shapes[1], np.float32)
    bound.launch(q_at, k_at, v_at, out_at, lse.data.ptr)
    return out, lse


def _bind_forward(call: Call, q: Array, k: Array, v: Array, out: Array | None) -> Bound | None:
    """The call bound to its launch; None if it launches nothing, or takes copies of arrays."""
    if out is not None:
        _check_out(out, q, k, v, call)
    result = call.xp.ndarray(call.out_shape, q.dtype) if out is None else out
    if call.is_empty or not all(map(memory.is_addressable, (q, k, v, result))):
        return None
    launch = call.backend.bind_forward(call.problem, *(_bshd(call, array) for array in (q, k, v, result)))
    overlaps = () if out is None else tuple(memory.overlaps(out, array) for array in (q, k, v))
    return Bound(call, launch, (call.out_shape, call.lse_shape), q.dtype.type, overlaps)


def _forward(call: Call, q: Array, k: Array, v: Array, out: Array | None, return_lse: bool) -> Any:
    if out is None:
        out = target = call.xp.empty(call.out_shape, q.dtype)
    else:
        _check_out(out, q, k, v, call)
        in_place = call.place not in _BY_KERNELS or memory.is_addressable(out)
        target = out if in_place else call.xp.empty(call.out_shape, q.dtype)
    lse = call.xp.empty(call.lse_shape, call.lse_dtype) if return_lse else None

    if call.is_empty:
        target.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
    else:
        call.backend.forward(call.problem, *_operands(call, q, k, v), _bshd(call, target), lse)
    if target is not out:
        out[...] = target
    return out if lse is None else (out, lse)


def backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dlse: Array | None, options: OptionValues
) -> Any:
    """``attention_backward`` on arrays that are all NumPy or all CuPy."""
    if type(q) is np.ndarray:
        return _backward(_resolve(q, k, v, options), dout, q, k, v, out, lse, dlse)

    cupy = arrays.native[type(q)]
    gpu = cupy.cuda.runtime.getDevice()
    q_at, k_at, v_at = q.data.ptr, k.data.ptr, v.data.ptr
    dout_at, out_at, lse_at = dout.data.ptr, out.data.ptr, lse.data.ptr
    dlse_at, dlse_layout = (0, None) if dlse is None else (dlse.data.ptr, _layout(dlse))
    bits = (dout_at | q_at | k_at | v_at | out_at) & _ALIGNMENT_BITS, (lse_at | dlse_at) & _FLOAT32_BITS
    layouts = (_layout(dout), _layout(q), _layout(k), _layout(v), _layout(out), _layout(lse), dlse_layout)
    key = (gpu, options, bits, layouts)
    try:
        bound = _bound_backward.get(key)
    except TypeError:
        bound = None
    if bound is None:
        call = _resolve(q, k, v, options)
        names = ("dout", "q", "k", "v", "out", "lse", "dlse")
        where = arrays.gpu_of(names, dout, q, k, v, out, lse, lse if dlse is None else dlse)
        if where != gpu:
            with cupy.cuda.Device(where):
                return backward(dout, q, k, v, out, lse, dlse, options)
        bound = _bind_backward(call, dout, q, k, v, out, lse, dlse)
        if bound is None:
            return _backward(call, dout, q, k, v, out, lse, dlse)
        _remember(_bound_backward, key, bound)

    (q_shape, k_shape, v_shape), dtype = bound.shapes, bound.dtype
    dq, dk, dv = cupy.ndarray(q_shape, dtype), cupy.ndarray(k_shape, dtype), cupy.ndarray(v_shape, dtype)
    dq_at, dk_at, dv_at = dq.data.ptr, dk.data.ptr, dv.data.ptr
    if (dq_at | dk_at | dv_at) & _ALIGNMENT_BITS:
        return _backward(bound.call, dout, q, k, v, out, lse, dlse)
    bound.launch(dout_at, q_at, k_at, v_at, out_at, lse_at, dlse_at, dq_at, dk_at, dv_at)
    return dq, dk, dv


def _bind_backward(
    call: Call, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dlse: Array | None
) -> Bound | None:
    """The call bound to its launches, as in ``_bind_forward``."""
    _check_gradients(call, q, dout, out, lse, dlse)
    rows_fit = all(x is None or (x.flags.c_contiguous and memory.is_aligned(x)) for x in (lse, dlse))
    if call.is_empty or not rows_fit or not all(map(memory.is_addressable, (dout, q, k, v, out))):
        return None
    results = (call.xp.ndarray(array.shape, array.dtype) for array in (q, k, v))
    views = (_bshd(call, array) for array in (dout, q, k, v, out, *results))
    launch = call.backend.bind_backward(call.problem, *views)
    return Bound(call, launch, (q.shape, k.shape, v.shape), q.dtype.type)


def _check_gradients(call: Call, q: Array, dout: Array, out: Array, lse: Array, dlse: Array | None) -> None:
    for name, array in (("dout", dout), ("out", out)):
        if array.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {array.dtype} but q, k and v have {q.dtype}; they must be equal")
        check_shape(name, array, call.out_shape)
    for name, array in (("lse", lse), ("dlse", dlse)):
        if array is not None:
            if array.dtype != call.lse_dtype:
                raise TypeError(f"{name} has dtype {array.dtype}; expected {call.lse_dtype}, that of attention's lse")
            check_shape(name, array, call.lse_shape)


def _backward(call: Call, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dlse: Array | None) -> Any:
    _check_gradients(call, q, dout, out, lse, dlse)
    dq, dk, dv = (call.xp.empty(array.shape, array.dtype) for array in (q, k, v))
    if call.is_empty:
        for gradient in (dq, dk, dv):
            gradient.fill(0)
        return dq, dk, dv
    dout, q, k, v, out = _operands(call, dout, q, k, v, out)
    gradients = (_bshd(call, gradient) for gradient in (dq, dk, dv))
    lse = memory.contiguous(lse)
    dlse = None if dlse is None else memory.contiguous(dlse)
    call.backend.backward(call.problem, dout, q, k, v, out, lse, *gradients, dlse)
    return dq, dk, dv


_CPU_MODULES = {"auto": "cpu", "v2": "cpu", "standard": "three_steps"}  # by algorithm
_BY_KERNELS = ("gpu", "emulated")  # places where kernels address the arrays themselves

_calls: dict[Any, Call] = {}
_bound_forward: dict[Any, Bound] = {}
_bound_backward: dict[Any, Bound] = {}
_CALLS_KEPT = 4096  # of each; more than a program has kinds of calls, unless every sequence length is new

_layout = attrgetter("shape", "strides", "dtype", "data.device_id")  # of a CuPy array: all but its address
_ALIGNMENT_BITS = 15  # of an address: kernels ask for a multiple of 16 bytes at most
_FLOAT32_BITS = 3  # of lse's and dlse's


def _resolve(q: Array, k: Array, v: Array, options: OptionValues) -> Call:
    """The checked form of a call, remembered under all that the checks depend on."""
    key = (type(q), q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, options)
    try:
        call = _calls.get(key)
    except TypeError:  # an option that cannot be hashed, such as a list for window
        call = None
    if call is None:
        call = _checked_call(q, k, v, Options(*options))
        _remember(_calls, key, call)
    return call


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    if len(memory) >= _CALLS_KEPT:
        memory.clear()
    with contextlib.suppress(TypeError):  # cannot be hashed
        memory[key] = value


def _checked_call(q: Array, k: Array, v: Array, options: Options) -> Call:
    problem = options.problem(q, k, v)
    place = _place(q, options.device)
    if place != "cpu":
        check_gpu(problem)
    elif problem.algorithm not in _CPU_MODULES:
        raise ValueError(
            f"algorithm is {problem.algorithm!r}, which is a GPU's; NumPy arrays are computed on the CPU by 'v2' or "
            "'standard' ('auto': 'v2'). device='cuda' takes them to a GPU, device='emulated' runs its kernels here"
        )
    module = _CPU_MODULES[problem.algorithm] if place == "cpu" else place
    return Call(
        problem=problem,
        place=place,
        backend=importlib.import_module(f".{module}", __package__),
        xp=arrays.module_of(q),
        is_bhsd=options.layout == "bhsd",
        is_empty=problem.scores == 0,
        out_shape=shape_in(options.layout, problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v),
        lse_shape=(problem.batch, problem.num_heads, problem.seqlen_q),
        lse_dtype=np.dtype(problem.wide_dtype),
    )


def _place(q: Array, device: str | None) -> str:
    if device is not None:
        one_of("device", device, ("cpu", "cuda", "emulated"))
    if device == "emulated":
        if type(q) is not np.ndarray:
            raise ValueError('device="emulated" computes NumPy arrays; bring the arrays over with cupy.asnumpy')
        importlib.import_module(".runtime.emulated", __package__).require_compiler()
        return "emulated"
    if type(q) is np.ndarray:
        if device != "cuda":
            return "cpu"
        arrays.require_gpu('device="cuda"')
        return "streaming"
    if device == "cpu":
        raise ValueError(
            'device="cpu" but the arrays are on the GPU; bring them over with cupy.asnumpy, or drop device'
        )
    return "gpu"


def _operands(call: Call, *operands: Array) -> Any:
    """Views of arrays as (B, S, H, D), copied only where a kernel could not address their elements."""
    if call.place in _BY_KERNELS and not all(map(memory.is_addressable, operands)):
        operands = tuple(a if memory.is_addressable(a) else memory.copied(a) for a in operands)
    return [array.transpose(0, 2, 1, 3) for array in operands] if call.is_bhsd else operands


def _bshd(call: Call, array: Array) -> Array:
    return array.transpose(0, 2, 1, 3) if call.is_bhsd else array


def _check_out(out: Array, q: Array, k: Array, v: Array, call: Call) -> None:
    if out.dtype != q.dtype:
        raise TypeError(f"out has dtype {out.dtype} but q, k and v have {q.dtype}; they must be equal")
    check_shape("out", out, call.out_shape)
    if type(out) is np.ndarray and not out.flags.writeable:
        raise ValueError("out is read-only; pass an array that can be written to")
    if memory.slides_over_itself(out):
        raise ValueError(f"out has strides {out.strides}, so that elements share memory; pass an array that owns each")
    if type(out) is not np.ndarray and not memory.is_aligned(out):
        raise ValueError(
            f"out has elements of {out.itemsize} bytes at an address, or with strides {out.strides}, that are no "
            "multiple of that, which a GPU cannot store; pass an array as CuPy allocates it"
        )
    at = arrays.address(out)
    for name, array in (("q", q), ("k", k), ("v", v)):
        distance = arrays.address(array) - at
        if distance in memory.overlaps(out, array) and memory.share_elements(out, array, distance):
            raise ValueError(f"out overlaps {name} in memory; {name} is still read while out is written")
