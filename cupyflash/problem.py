"""What is to be computed: a frozen description of one attention problem, and all checks of shapes, dtypes and options.

Nothing here touches data or a device. A ``Problem`` holds all that decides which kernel runs and with which constants;
strides and pointers belong to the launch.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .tiles import ALGORITHMS

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38  # smallest normal; the kernels flush what is below it

GPU_DTYPES = ("float16", "bfloat16", "float32")
GPU_MAX_HEAD_DIM = 256

LAYOUTS = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}  # axes of (batch, sequence, heads, head_dim) in the layout
ALIGNMENTS = ("bottom_right", "top_left")
PRECISIONS = ("ieee", "tf32")


@dataclass(frozen=True, slots=True)
class Band:
    """The visible diagonals of the score matrix: query i may see key j when first <= j - i <= last.

    ``None`` is no bound. Causal masks of both alignments and sliding windows are all bands.
    """

    first: int | None
    last: int | None

    @classmethod
    def of(cls, first: int | None, last: int | None, seqlen_q: int, seqlen_k: int) -> Band:
        """The band in normal form: equal masks are equal bands.

        j - i lies in [-(Sq - 1), Sk - 1]. A bound that hides nothing becomes None; one that hides everything is
        clamped to the nearest value that still does, so that every bound fits an int32.
        """
        if first is not None:
            first = None if first <= -(seqlen_q - 1) else min(first, seqlen_k)
        if last is not None:
            last = None if last >= seqlen_k - 1 else max(last, -seqlen_q)
        return cls(first, last)

    def visible(self, i: Any, j: Any) -> Any:
        """Whether query ``i`` may see key ``j``: a bool for integers, a boolean array for broadcastable arrays."""
        diagonal = j - i
        first = -math.inf if self.first is None else self.first
        last = math.inf if self.last is None else self.last
        return (first <= diagonal) & (diagonal <= last)


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention problem, out = softmax(mask(softcap(scale * q k^T))) v, without its data.

    ``Problem.of`` checks its arguments; the constructor trusts them.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str  # a key of ITEMSIZE
    band: Band
    scale: float  # finite; may be negative or 0
    softcap: float  # 0.0 = off
    precision: str  # "ieee" | "tf32"; tf32 only changes float32 on the GPU
    deterministic: bool
    algorithm: str = "auto"  # a key of tiles.ALGORITHMS
    _hash: int = field(init=False, repr=False, compare=False)  # a problem is looked up at every call

    def __post_init__(self) -> None:
        values = (getattr(self, name) for name in self.__slots__ if name != "_hash")
        object.__setattr__(self, "_hash", hash(tuple(values)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def is_masked(self) -> bool:
        """Whether some query may not see some key."""
        return self.band.first is not None or self.band.last is not None

    @property
    def is_exact(self) -> bool:
        """Whether it is float32 whose products are as precise as float32 itself."""
        return self.dtype == "float32" and self.precision == "ieee"

    @property
    def wide_dtype(self) -> str:
        """Of lse, and of what the CPU computes in: 16-bit data in float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q, k, v and out."""
        return ITEMSIZE[self.dtype]

    @property
    def scores(self) -> int:
        """Elements of the score matrix; 0 when there is nothing to attend to or nobody to attend."""
        return self.batch * self.num_heads * self.seqlen_q * self.seqlen_k

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool | str = False,
        scale: float | None = None,
        layout: str = "bshd",
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = 0.0,
        precision: str | None = None,
        deterministic: bool = False,
        algorithm: str = "auto",
        alignment: str | None = None,
    ) -> Problem:
        """The checked problem of three arrays (anything with ``shape`` and ``dtype``) and the options of ``attention``.

        ``alignment`` ("bottom_right" or "top_left") places a window without a causal bound; by default it follows
        ``causal``.
        """
        dtype = common_dtype({"q": q.dtype, "k": k.dtype, "v": v.dtype})
        batch, seqlen_q, num_heads, head_dim = dimensions("q", q.shape, layout)
        k_dims = dimensions("k", k.shape, layout)
        v_dims = dimensions("v", v.shape, layout)
        _, seqlen_k, num_kv_heads, _ = k_dims
        head_dim_v = v_dims[3]

        if not k_dims[0] == v_dims[0] == batch:
            raise ValueError(f"q, k and v have batch sizes {batch}, {k_dims[0]} and {v_dims[0]}; they must be equal")
        if v_dims[1] != seqlen_k:
            raise ValueError(f"v has {v_dims[1]} rows but k has {seqlen_k}; every key needs one value")
        if v_dims[2] != num_kv_heads:
            raise ValueError(f"v has {v_dims[2]} heads but k has {num_kv_heads}; they must be equal")
        if k_dims[3] != head_dim:
            raise ValueError(f"k has head_dim {k_dims[3]} but q has {head_dim}; they must be equal")
        if head_dim == 0 or head_dim_v == 0:
            raise ValueError(f"head_dim is {head_dim} for q and k and {head_dim_v} for v; it must be at least 1")
        if num_heads != num_kv_heads and (num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads):
            raise ValueError(
                f"k has {num_kv_heads} heads but q has {num_heads}; num_heads must be a multiple of num_kv_heads"
            )

        scale = 1.0 / math.sqrt(head_dim) if scale is None else finite("scale", scale)
        softcap = cap(softcap)
        if softcap and not abs(scale) / softcap <= FLOAT32_MAX:
            raise ValueError(f"scale is {scale} and softcap {softcap}; scale / softcap must be finite (in float32)")

        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            band=mask_band(causal, window, seqlen_q, seqlen_k, alignment),
            scale=scale,
            softcap=softcap,
            precision="ieee" if precision is None else one_of("precision", precision, PRECISIONS),
            deterministic=flag("deterministic", deterministic),
            algorithm=one_of("algorithm", algorithm, tuple(ALGORITHMS)),
        )


def mask_band(
    causal: bool | str,
    window: tuple[int | None, int | None] | None,
    seqlen_q: int,
    seqlen_k: int,
    alignment: str | None = None,
) -> Band:
    """The band of a causal flag and a window, both relative to the diagonal that ends at the alignment's corner."""
    if isinstance(causal, str):
        causal_alignment = one_of("causal", causal, ALIGNMENTS)
        if alignment not in (None, causal_alignment):
            raise ValueError(f"causal={causal!r} contradicts alignment={alignment!r}")
        alignment, causal = causal_alignment, True
    else:
        causal = flag("causal", causal, 'False, True, "bottom_right" or "top_left"')
    alignment = "bottom_right" if alignment is None else one_of("alignment", alignment, ALIGNMENTS)

    left, right = window_bounds(window)
    if causal:
        right = 0
    offset = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
    return Band.of(
        None if left is None else offset - left,
        None if right is None else offset + right,
        seqlen_q,
        seqlen_k,
    )


def window_bounds(window: Any, name: str = "window", unbounded: str = "None") -> tuple[int | None, int | None]:
    """(left, right) of a window; None is unbounded, whatever the caller of ``name`` writes for it."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"{name} is {window!r}; expected None or (left, right), each an integer >= 0 or {unbounded}")
    bounds: list[int | None] = []
    for side, bound in zip(("left", "right"), window, strict=True):
        if bound is not None:
            try:
                bound = operator.index(bound)
            except TypeError:
                raise TypeError(
                    f"{name} {side} is {bound!r} ({type(bound).__name__}); expected an integer >= 0 or {unbounded}"
                ) from None
            if bound < 0:
                raise ValueError(f"{name} {side} is {bound}; expected an integer >= 0, or {unbounded} for no bound")
        bounds.append(bound)
    return bounds[0], bounds[1]


def dimensions(name: str, shape: tuple[int, ...], layout: str) -> tuple[int, int, int, int]:
    """(batch, sequence, heads, head_dim) of an array's shape."""
    axes = LAYOUTS[one_of("layout", layout, tuple(LAYOUTS))]
    if len(shape) != 4:
        expected = "(batch, sequence, heads, head_dim)" if layout == "bshd" else "(batch, heads, sequence, head_dim)"
        raise ValueError(f"{name} has {len(shape)} dimensions, shape {shape}; layout {layout!r} needs 4, {expected}")
    return shape[axes[0]], shape[axes[1]], shape[axes[2]], shape[axes[3]]


def check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raises unless an array has the one shape that fits."""
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}")


def common_dtype(dtypes: dict[str, Any]) -> str:
    """The one dtype name of several named dtypes; nothing is ever cast (the caller chooses where precision is lost)."""
    names = {name: str(getattr(dtype, "name", dtype)) for name, dtype in dtypes.items()}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{name} is {dtype}" for name, dtype in names.items())
        raise TypeError(f"{listed}; all must have one dtype (nothing is cast silently: use .astype)")
    for name, dtype in dtypes.items():
        if names[name] not in ITEMSIZE:
            raise TypeError(f"{name} has dtype {names[name]}; expected one of {', '.join(ITEMSIZE)}")
        if not getattr(dtype, "isnative", True):
            raise TypeError(f"{name} has dtype {dtype.str}, a foreign byte order; use .astype({names[name]!r})")
    return next(iter(names.values()))


def check_gpu(problem: Problem) -> None:
    """Raises what keeps a problem from the GPU but not from the CPU."""
    if problem.dtype not in GPU_DTYPES:
        raise TypeError(
            f"q, k and v are {problem.dtype}; the GPU computes {', '.join(GPU_DTYPES)} "
            f"({problem.dtype} runs on the CPU: pass NumPy arrays)"
        )
    for name, head_dim in (("q and k have", problem.head_dim), ("v has", problem.head_dim_v)):
        if head_dim > GPU_MAX_HEAD_DIM:
            raise ValueError(
                f"{name} head_dim {head_dim}; the GPU computes up to {GPU_MAX_HEAD_DIM} "
                "(the CPU has no limit: pass NumPy arrays)"
            )


def finite(name: str, value: Any) -> float:
    """A number that is finite in float32, as a float. Arrays are refused: reading one would wait for the device."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a real number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:  # also false for NaN
        raise ValueError(f"{name} is {value}; it must be finite (in float32)")
    return number


def cap(softcap: Any) -> float:
    """The soft cap as a float; 0.0 is off."""
    value = 0.0 if softcap is None else finite("softcap", softcap)
    if value < FLOAT32_TINY and value != 0:
        raise ValueError(f"softcap is {value}; it must be positive (in float32), or 0 for none")
    return value


def flag(name: str, value: Any, expected: str = "True or False") -> bool:
    """A boolean option, of Python or NumPy, or 0 or 1; what counts as true elsewhere may be meant otherwise."""
    if not isinstance(value, (numbers.Integral, np.bool_)) or value not in (False, True):
        raise ValueError(f"{name} is {value!r}; expected {expected}")
    return bool(value)


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """A string option checked against its allowed values."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}")
    return value


def shape_in(layout: str, batch: int, seqlen: int, heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """The shape of a (batch, sequence, heads, head_dim) array in a layout; both layouts are their own inverse."""
    return dimensions("shape", (batch, seqlen, heads, head_dim), layout)
