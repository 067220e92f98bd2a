"""Right answers from outside, and how near to them a result must be. Shared by all tests of attention.

A result is compared with float64 and may be off by what a naive implementation in the same dtype is off by, times a
factor, plus a constant. The factor and the constants are fixed: no test widens them.
"""

import functools
import importlib.util
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

from cupyflash.reference import (
    by_head,
    reference_backward,
    reference_forward,
    repeat_heads,
    sum_groups,
    visible_pairs,
)

# Products are small here. Threads of BLAS would wait for the next one at full speed, on the cores of other processes.
threadpool_limits(1)

# kind: (factor, constant)
TOLERANCES = {"forward": (2, 1e-5), "gradient": (3, 1e-3)}
LSE_ABSOLUTE, LSE_RELATIVE = 1e-5, 1e-6

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def max_error(got, reference):
    """The largest error among the elements that are finite in both."""
    got, reference = np.asarray(got, np.float64), np.asarray(reference, np.float64)
    both = np.isfinite(got) & np.isfinite(reference)
    return np.abs(np.where(both, got, 0) - np.where(both, reference, 0)).max(initial=0.0)


def assert_same_strangeness(got, reference, what="result"):
    """NaN, inf and -inf are at the same positions."""
    got, reference = np.asarray(got, np.float64), np.asarray(reference, np.float64)
    assert got.shape == reference.shape, f"{what} has shape {got.shape}, expected {reference.shape}"
    for name, of in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(of(got) != of(reference))
        assert not len(wrong), f"{what} differs in {name} at {len(wrong)} places, the first at {tuple(wrong[0])}"


def assert_close(got, reference, naive, kind="forward", what="result"):
    """The rule: error <= factor * error of the naive computation + constant.

    In a small array the naive result may be nearer than rounding lets one hope for; its error counts as no less than
    that of the rounded reference. In a large array it is no less.
    """
    assert_same_strangeness(got, reference, what)
    factor, constant = TOLERANCES[kind]
    with np.errstate(all="ignore"):
        rounded = np.asarray(reference).astype(np.asarray(got).dtype)
    naive_error = max(max_error(naive, reference), max_error(rounded, reference))
    error, allowed = max_error(got, reference), factor * naive_error + constant
    assert error <= allowed, f"{what} is off by {error:.3g}, allowed is {allowed:.3g}"


def assert_lse_close(got, reference):
    """LSE has its own rule, whatever the dtype of the data."""
    assert_same_strangeness(got, reference, "lse")
    got, reference = np.asarray(got, np.float64), np.asarray(reference, np.float64)
    finite = np.isfinite(reference)
    error = np.abs(got[finite] - reference[finite])
    wrong = error > np.maximum(LSE_ABSOLUTE, LSE_RELATIVE * np.abs(reference[finite]))
    assert not wrong.any(), f"lse is off by {error[wrong].max():.3g}"


def assert_bitwise(got, expected, what="result"):
    """Equal in every bit, NaN and the sign of zero included."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    same = np.ascontiguousarray(got).view(np.uint8) == np.ascontiguousarray(expected).view(np.uint8)
    assert same.all(), f"{what} differs in {np.count_nonzero(~same)} bytes, by at most {max_error(got, expected):.3g}"


def assert_lone_value(out, v, splits=False):
    """A key that is seen alone weighs exactly 1: out is v, bit by bit.

    splits: float32 as a TF32 number of 11 bits, rounded to nearest, and a rest of at most 12 bits, of which the tensor
    core takes 11: what it drops is below 2^-23 of v. Its sum of the two parts cuts off no more than that once again.
    """
    if not splits:
        assert_bitwise(out, v)
        return
    assert out.dtype == v.dtype == np.float32
    out, v = out.astype(np.float64), v.astype(np.float64)
    wrong = ~(np.abs(out - v) <= 2.0**-22 * np.abs(v))
    assert not wrong.any(), f"out is off by {np.abs(out - v)[wrong].max():.3g} from the only value"


# ---- a naive implementation in the dtype of the data: every intermediate array is rounded to it


def round_to_tf32(x):
    """Nearest numbers with ten mantissa bits, ties to even as GPUs from sm_90 on have it, in float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    carried = np.where(np.isfinite(x), bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1)), bits)
    return (carried & np.uint32(0xFFFFE000)).view(np.float32)


def _kind(problem):
    """The dtype of the problem, or "tf32"."""
    return "tf32" if problem.dtype == "float32" and problem.precision == "tf32" else problem.dtype


def _working(dtype):
    """(dtype to compute in, how results are rounded, how operands of products are rounded in addition)."""
    if dtype == "tf32":
        return np.float32, np.float32, round_to_tf32
    dtype = DTYPES[dtype] if isinstance(dtype, str) else np.dtype(dtype)
    compute = np.float64 if dtype == np.float64 else np.float32
    return compute, lambda x: np.asarray(x).astype(dtype).astype(compute), np.asarray


def _naive_softmax(problem, Q, K, compute, rounded):
    visible = visible_pairs(problem)
    S = rounded(rounded(Q @ K.swapaxes(-1, -2)) * compute(problem.scale))
    slope = compute(1)
    if problem.softcap:
        t = rounded(np.tanh(S / compute(problem.softcap)))
        S, slope = rounded(compute(problem.softcap) * t), rounded(1 - t * t)
    S = np.where(visible, S, compute(-np.inf))
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    P = np.exp(S - np.where(np.isneginf(m), 0, m))
    l = P.sum(axis=-1, keepdims=True)
    return rounded(P / np.where(l == 0, 1, l)), slope


def naive_forward(problem, q, k, v, dtype=None):
    """Attention as one would write it in ``dtype`` (that of the problem by default); float64 arrays of its values."""
    compute, rounded, operand = _working(dtype or _kind(problem))
    with np.errstate(all="ignore"):
        Q, K, V = (
            operand(rounded(x))
            for x in (by_head(q), repeat_heads(problem, by_head(k)), repeat_heads(problem, by_head(v)))
        )
        P, _ = _naive_softmax(problem, Q, K, compute, rounded)
        return rounded(operand(P) @ V).swapaxes(1, 2).astype(np.float64)


def naive_backward(problem, dout, q, k, v, dlse=0.0, dtype=None):
    """The gradients as one would write them in ``dtype``; dlse is (B, H, Sq) in float32."""
    compute, rounded, operand = _working(dtype or _kind(problem))
    with np.errstate(all="ignore"):
        Q, K, V, dO = (
            operand(rounded(x))
            for x in (by_head(q), repeat_heads(problem, by_head(k)), repeat_heads(problem, by_head(v)), by_head(dout))
        )
        P, slope = _naive_softmax(problem, Q, K, compute, rounded)
        P = operand(P)
        dV = rounded(P.swapaxes(-1, -2) @ dO)
        dP = rounded(dO @ V.swapaxes(-1, -2))
        D = (P * dP).sum(axis=-1) - np.asarray(dlse, compute)
        dS = rounded(P * (dP - D[..., None]))
        dS = operand(rounded(rounded(dS * slope) * compute(problem.scale)))
        dQ, dK = rounded(dS @ K), rounded(dS.swapaxes(-1, -2) @ Q)
        gradients = dQ, rounded(sum_groups(problem, dK)), rounded(sum_groups(problem, dV))
        return tuple(x.swapaxes(1, 2).astype(np.float64) for x in gradients)


def _results(forward, backward, problem, q, k, v, dout, dlse):
    """[out, lse], followed by [dq, dk, dv] if there is a dout."""
    return [*forward(problem, q, k, v), *(() if dout is None else backward(problem, dout, q, k, v, dlse))]


@dataclass(frozen=True)
class Answer:
    """What is right for a problem and its arrays, and what a naive computation makes of them."""

    forward: tuple  # (out, lse) in float64
    naive_out: np.ndarray
    gradients: tuple  # (dq, dk, dv) in float64; empty if nobody asks
    naive_gradients: tuple

    @classmethod
    def of(cls, problem, q, k, v, dout=None, dlse=None):
        """TF32 rounds its operands, so its inputs are the rounded ones; dlse is no operand of a product."""
        arrays = [q, k, v, dout]
        if _kind(problem) == "tf32":
            arrays = [x if x is None else round_to_tf32(x) for x in arrays]
        arrays.append(np.zeros((problem.batch, problem.num_heads, problem.seqlen_q)) if dlse is None else dlse)
        expected = _results(reference_forward, reference_backward, problem, *arrays)
        finite = [x if x is None else np.where(np.isfinite(x.astype(np.float64)), x, x.dtype.type(0)) for x in arrays]
        naive = _results(lambda *x: (naive_forward(*x), 0), naive_backward, problem, *finite)
        if any(x is not None and (x != y).any() for x, y in zip(finite, arrays, strict=True)):
            # The naive computation knows no mask but weights of 0; how far it is off shows where all data is finite.
            near = _results(reference_forward, reference_backward, problem, *finite)
            with np.errstate(invalid="ignore"):  # lse of rows that see nothing, which nobody compares with a naive one
                naive = [x + (y - z) for x, y, z in zip(expected, naive, near, strict=True)]
        return cls(tuple(expected[:2]), naive[0], tuple(expected[2:]), tuple(naive[2:]))

    def assert_forward_close(self, out, lse):
        expected, expected_lse = self.forward
        assert_close(out, expected, self.naive_out, what="out")
        assert_lse_close(lse, expected_lse)

    def assert_precise(self, out, gradients):
        """By root mean squares, and without a constant, which hides errors of float32; gradients may be empty."""
        rights, naives = (self.forward[0], *self.gradients), (self.naive_out, *self.naive_gradients)
        for name, got, right, naive in zip(("out", "dq", "dk", "dv"), (out, *gradients), rights, naives, strict=False):
            error, naive_error = (np.sqrt(np.mean(np.square(x.astype(np.float64) - right))) for x in (got, naive))
            rounding = np.finfo(got.dtype).eps / 2 * np.sqrt(np.mean(np.square(right)))
            factor, _ = TOLERANCES["forward" if name == "out" else "gradient"]
            allowed = factor * max(naive_error, rounding)
            assert error <= allowed, f"{name} is off by {error:.3g} in the mean, allowed is {allowed:.3g}"

    def assert_gradients_close(self, gradients, names=("dq", "dk", "dv")):
        for name, *three in zip(("dq", "dk", "dv"), gradients, self.gradients, self.naive_gradients, strict=True):
            if name in names:
                assert_close(*three, kind="gradient", what=name)


def check(backend, problem, q, k, v, gradients=True, seed=0):
    """A backend's results against float64, by the rule; returns (out, lse), followed by (dq, dk, dv) if asked for."""
    out, lse = backend.forward(problem, q, k, v)
    dout = np.random.default_rng(seed).standard_normal(out.shape).astype(out.dtype) if gradients else None
    answer = Answer.of(problem, q, k, v, dout)
    assert out.dtype == q.dtype
    answer.assert_forward_close(out, lse)
    if not gradients:
        return out, lse
    results = backend.backward(problem, dout, q, k, v, out, lse)
    assert all(result.dtype == q.dtype for result in results)
    answer.assert_gradients_close(results)
    return out, lse, *results


# ---- other people's implementations


@functools.lru_cache
def _onnx_model(softcap):
    from onnx import TensorProto, helper
    from onnx.defs import onnx_opset_version
    from onnx.reference import ReferenceEvaluator

    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["out"], scale=1.0, softcap=softcap)
    shapes = {name: ["b", f"h{name}", f"s{name}", f"d{name}"] for name in ("q", "k", "v")} | {"mask": ["sq", "sk"]}
    kinds = dict.fromkeys("qkv", TensorProto.DOUBLE) | {"mask": TensorProto.BOOL}
    inputs = [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in shapes.items()]
    output = helper.make_tensor_value_info("out", TensorProto.DOUBLE, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    opset = helper.make_opsetid("", onnx_opset_version())
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[opset]))


def onnx_attention(problem, q, k, v):
    """out of ONNX's Attention operator, computed by the implementation in NumPy that the onnx package ships; float64.

    The mask goes in as booleans: ONNX aligns its own causal mask at the top left unless there is a cache. The scale is
    put on q: ONNX keeps its own in float32 and takes its root.
    """
    q, k, v = (by_head(x) for x in (q, k, v))
    feed = {"q": problem.scale * q, "k": k, "v": v, "mask": visible_pairs(problem).copy()}
    (out,) = _onnx_model(problem.softcap).run(None, feed)
    return out.swapaxes(1, 2)


def torch_is_missing():
    """Why torch cannot be asked; empty if it can."""
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


def torch_attention(problem, q, k, v, dout=None):
    """out of torch's scaled_dot_product_attention on the CPU in float64; with dout, (out, dq, dk, dv).

    It has no softcap, and rows that see no key are its own affair: leave both out. It does not return LSE either: see
    ``torch_lse_gradients``.
    """
    import torch

    leaves = [torch.from_numpy(by_head(x)).requires_grad_(dout is not None) for x in (q, k, v)]
    Q, K, V = leaves
    out = torch.nn.functional.scaled_dot_product_attention(
        Q,
        K.repeat_interleave(problem.group, dim=1),
        V.repeat_interleave(problem.group, dim=1),
        attn_mask=torch.from_numpy(visible_pairs(problem).copy()),
        scale=problem.scale,
    )
    if dout is None:
        return out.numpy().swapaxes(1, 2)
    out.backward(torch.from_numpy(by_head(dout)))
    return tuple(x.detach().numpy().swapaxes(1, 2) for x in (out, *(leaf.grad for leaf in leaves)))


def torch_lse_gradients(problem, q, k, dlse):
    """(dq, dk) that torch's logsumexp on the CPU in float64 gives for dlse; rows that see no key are left out of it."""
    import torch

    Q, K = leaves = [torch.from_numpy(by_head(x)).requires_grad_() for x in (q, k)]
    S = Q @ K.repeat_interleave(problem.group, dim=1).transpose(-1, -2) * problem.scale
    if problem.softcap:
        S = problem.softcap * torch.tanh(S / problem.softcap)
    visible = visible_pairs(problem)
    rows = visible.any(axis=-1)
    S = S.masked_fill(~torch.from_numpy(visible.copy()), -torch.inf)[:, :, torch.from_numpy(rows)]
    torch.logsumexp(S, dim=-1).backward(torch.from_numpy(np.asarray(dlse, np.float64)[..., rows]))
    return tuple(leaf.grad.numpy().swapaxes(1, 2) for leaf in leaves)
