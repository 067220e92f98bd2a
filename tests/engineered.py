"""What random normal arrays do not have: numbers, gradients of LSE and layouts that wrong kernels fail on.

Functions of ``NUMBERS`` change float64 arrays in place, before they are rounded to the dtype of a case.
"""

import functools
import mmap

import numpy as np

# ---- numbers


def normal(problem, q, k, v, dout):
    pass


def large(problem, q, k, v, dout):
    """Nearly all weight on one key."""
    q *= 4
    k *= 3


def falling(problem, q, k, v, dout):
    """The later the key the lower its score: the kernels start at the last tile, so the maximum rises at every step."""
    q[..., 0] = 8
    k[..., 0] = -np.arange(k.shape[1])[:, None] % 256 / 2 - 64


def falling_gently(problem, q, k, v, dout):
    """The maximum rises by a few powers of two from where the kernels start."""
    q[..., 0] = 1
    k[..., 0] = -np.arange(k.shape[1])[:, None] / 2


def rising(problem, q, k, v, dout):
    """The maximum is the first tile's; scores fall by more than 100 from there on."""
    q[..., 0] = 16
    k[..., 0] = np.arange(k.shape[1])[:, None] % 256 / 2 - 64


def far_below(problem, q, k, v, dout):
    """All scores near -300: e^300 is no float32."""
    q[..., 0], k[..., 0] = 16, -300 / 16 / problem.scale


def huge(problem, q, k, v, dout):
    """Equal scores of 10^9 and more: a rounded product m c would be off by more than float32 can raise 2 to."""
    q[...], k[...] = 2.0**15, 2.0**14 if problem.scale > 0 else -(2.0**14)


def steep(problem, q, k, v, dout):
    """Scores of 10^5 from numbers as small as may be: a fused exponent in the backward would be off by 2^-8.

    dS of a lone key is what rounding leaves of dP - delta; large numbers would raise that above what is allowed.
    """
    q[...], k[...] = 130, 112


def steep_heads(problem, q, k, v, dout):
    """Scores of up to 100, in all but every third head, that rise and fall; values near the end of bfloat16."""
    q[:, :, np.arange(q.shape[2]) % 3 != 1] *= 4
    k[:, ::2] *= 6
    if problem.dtype == "bfloat16":
        v *= 1e25


def overflow(problem, q, k, v, dout):
    """dS beyond float16 in some rows; no gradient is."""
    q /= 64
    k /= 64
    v *= 1000
    dout[:, ::3] *= 3000


def biased(problem, q, k, v, dout):
    """Positive numbers: errors of one sign add up."""
    for x in (q, k, v, dout):
        x[...] = 1 + np.abs(x) % 1


# What few see is not finite: the last key, its value, the first query, or its gradient.


def hidden_key(problem, q, k, v, dout):
    k[0, -1, :, 1] = np.nan


def hidden_value(problem, q, k, v, dout):
    v[0, -1, :, 2] = np.inf


def hidden_query(problem, q, k, v, dout):
    q[0, 0, :, 3] = np.nan


def hidden_gradient(problem, q, k, v, dout):
    dout[0, 0, :, 4] = np.nan


def capped_infinity(problem, q, k, v, dout):
    """In two queries: a cap keeps their scores, LSE and delta finite. What they do not see has finite gradients."""
    q[0, 0, :, 3], q[0, -1, :, -1] = np.inf, -np.inf


def infinite_key(problem, q, k, v, dout):
    """A key whose score is -inf: it weighs nothing where it is seen."""
    q[..., 0] = np.abs(q[..., 0]) + 0.5
    k[0, k.shape[1] // 2, :, 0] = -np.inf


def infinite_keys(problem, q, k, v, dout):
    """Rows whose scores are all -inf: they attend to nothing."""
    q[..., 0] = np.abs(q[..., 0]) + 0.5
    k[..., 0] = -np.inf


def infinite_value(problem, q, k, v, dout):
    v[0, v.shape[1] // 2, 0, 0] = np.inf


def largest(problem, q, k, v, dout):
    """float32's largest number, which rounds to infinity in TF32, in a key and a value where it meets zeros."""
    q[..., 0], k[0, 0, :, 0] = 0, np.finfo(np.float32).max
    dout *= 0.125  # so that the gradient of q is no larger
    dout[..., 1], v[0, 0, :, 1] = 0, np.finfo(np.float32).max


def largest_hidden(problem, q, k, v, dout):
    """The same in the last key, which only the last query sees, without a gradient; the others have no zeros for it."""
    k[0, -1, :, 0] = np.finfo(np.float32).max
    q[0, -1, :, 0] = 0
    dout[0, -1] = 0


def nan_in_a_few_values(problem, q, k, v, dout):
    """In the first key tile and in the last, of one head."""
    v[-1, [3, -1], 0, [1, 9]] = np.nan


NUMBERS = {
    f.__name__.replace("_", " "): f
    for f in (
        *(normal, large, falling, falling_gently, rising, far_below, huge, steep, steep_heads, overflow, biased),
        *(hidden_key, hidden_value, hidden_query, hidden_gradient, capped_infinity),
        *(infinite_key, infinite_keys, infinite_value),
        *(nan_in_a_few_values, largest, largest_hidden),
    )
}


# ---- gradients of LSE; lse is the right one


def finite_dlse(dlse, lse):
    pass


def scaled_dlse(dlse, lse):
    """As a loss scale makes it: dS beyond float16 in some rows; with numbers as in overflow no gradient is."""
    dlse[..., ::3] *= 1e6


def hidden_dlse(dlse, lse):
    """Rows that attend to nothing: their gradient is 0 whatever is said of their LSE."""
    dlse[np.isneginf(lse)] = np.nan


def nan_in_dlse(dlse, lse):
    """In the last row of the first head, and in no other."""
    dlse[0, 0, -1] = np.nan


DLSE = {f.__name__.replace("_", " "): f for f in (finite_dlse, scaled_dlse, hidden_dlse, nan_in_dlse)}


HIDDEN = [name for name in NUMBERS if name.startswith("hidden")]


# ---- layouts: (B, S, H, D) views of other buffers


def bordered(values):
    """Rows of NaN before and after, columns of NaN behind."""
    B, S, H, D = values.shape
    view = np.full((B, S + 2, H, D + 8), np.nan, values.dtype)[:, 1:-1, :, :D]
    view[...] = values
    return view


def heads_first(values):
    """As (B, H, S, D) arrays have it; an odd distance between rows."""
    B, S, H, D = values.shape
    view = np.full((B, H, S + 2, D + 1), np.nan, values.dtype)[:, :, 1:-1, :D].swapaxes(1, 2)
    view[...] = values
    return view


def heads_first_aligned(values):
    """As (B, H, S, D) arrays have it; rows of 16 bytes, for tensor maps."""
    return np.ascontiguousarray(values.swapaxes(1, 2)).swapaxes(1, 2)


def reversed_rows(values):
    return bordered(values[:, ::-1])[:, ::-1]


def broadcast(values):
    """All heads and batch entries are the first."""
    return np.broadcast_to(bordered(values[:1, :, :1]), values.shape)


def far_apart(axis, values):
    """Neighbours along the axis are more than 32 bits apart in all; memory that nobody touches costs nothing."""
    far = -(-(2**31) // (values.shape[axis] - 1) // 64) * 64 + 64
    lengths = [far * values.shape[1], far, values.shape[3], 1]
    if axis == 0:
        lengths[:2] = far, values.shape[2] * values.shape[3]
    size = 1 + sum((n - 1) * length for n, length in zip(values.shape, lengths, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = np.frombuffer(mmap.mmap(-1, size * values.itemsize, flags=flags), values.dtype)
    strides = [length * values.itemsize for length in lengths]
    view = np.lib.stride_tricks.as_strided(memory, values.shape, strides)
    view[...] = values
    return view


class FarOutput:
    """An output full of NaN of which neighbours are far apart; in place of ``Guarded``."""

    def __init__(self, axis, shape, dtype):
        self.inside = far_apart(axis, np.full(shape, np.nan, dtype))

    def checked(self):
        return np.ascontiguousarray(self.inside)


LAYOUTS = {
    "bordered": bordered,
    "tight": np.ascontiguousarray,  # AddressSanitizer knows where it ends
    "heads first": heads_first,
    "heads first aligned": heads_first_aligned,
    "reversed": reversed_rows,
    "broadcast": broadcast,
    "far batches": functools.partial(far_apart, 0),
    "far rows": functools.partial(far_apart, 1),
}
OUTPUTS = {"far batches": functools.partial(FarOutput, 0), "far rows": functools.partial(FarOutput, 1)}
