"""The float64 reference against implementations of other people, finite differences, and answers worked out by hand."""

import doctest
import importlib

import numpy as np
import pytest
from oracles import assert_same_strangeness, onnx_attention, torch_attention, torch_is_missing, torch_lse_gradients

from cupyflash.problem import Problem
from cupyflash.reference import reference_backward, reference_forward

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"window": (3, 1)},
    "left_window": {"window": (2, None), "causal": True},
    "scale": {"scale": -0.7},
    "no_scale": {"scale": 0.0},
    "softcap": {"softcap": 1.5, "causal": True},
}
# (B, Sq, Sk, H, Hk, D, Dv)
SHAPES = [(2, 7, 7, 2, 2, 8, 8), (1, 5, 12, 4, 2, 6, 10), (1, 12, 5, 3, 1, 16, 4), (3, 1, 9, 2, 1, 4, 4)]


def randn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def inputs(shape, **options):
    B, Sq, Sk, H, Hk, D, Dv = shape
    q, k, v = randn(B, Sq, H, D, seed=1), randn(B, Sk, Hk, D, seed=2), randn(B, Sk, Hk, Dv, seed=3)
    return Problem.of(q, k, v, **options), q, k, v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_agrees_with_onnx(shape, options):
    pytest.importorskip("onnx.reference.ops.op_attention")
    problem, q, k, v = inputs(shape, **options)
    out, _ = reference_forward(problem, q, k, v)
    np.testing.assert_allclose(out, onnx_attention(problem, q, k, v), rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(bool(torch_is_missing()), reason=torch_is_missing())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [key for key in OPTIONS if key != "softcap"])
def test_forward_and_backward_agree_with_torch(shape, options):
    problem, q, k, v = inputs(shape, **OPTIONS[options])
    out, lse = reference_forward(problem, q, k, v)
    if np.isneginf(lse).any():
        pytest.skip("rows that see no key are torch's own affair")
    dout = randn(*out.shape, seed=4)
    expected = torch_attention(problem, q, k, v, dout)
    for got, want in zip((out, *reference_backward(problem, dout, q, k, v)), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(bool(torch_is_missing()), reason=torch_is_missing())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradient_of_lse_agrees_with_torch(shape, options):
    problem, q, k, v = inputs(shape, **options)
    out, lse = reference_forward(problem, q, k, v)
    dlse = randn(*lse.shape, seed=5)
    dq, dk, dv = reference_backward(problem, np.zeros(out.shape), q, k, v, dlse)
    for got, want in zip((dq, dk), torch_lse_gradients(problem, q, k, dlse), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert (dv == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_backward_agrees_with_finite_differences(shape, options):
    problem, *arrays = inputs(shape, **options)
    out, lse = reference_forward(problem, *arrays)
    dout = randn(*out.shape, seed=4)
    dlse = np.where(np.isneginf(lse), np.nan, randn(*lse.shape, seed=5))  # D3: where there is none, NaN is nothing
    gradients = reference_backward(problem, dout, *arrays, dlse)

    def loss(*arrays):
        out, lse = reference_forward(problem, *arrays)
        return (out * dout).sum() + (lse * dlse)[np.isfinite(lse)].sum()

    for position, gradient in enumerate(gradients):
        assert gradient.shape == arrays[position].shape
        direction = randn(*gradient.shape, seed=6 + position)
        step = 1e-5
        moved = [
            [x + sign * step * direction if i == position else x for i, x in enumerate(arrays)] for sign in (1, -1)
        ]
        slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-8)


def test_row_without_keys_is_zero_and_gives_nothing():
    """D3: also when its dout and its query are NaN."""
    problem, q, k, v = inputs((1, 5, 2, 1, 1, 8, 8), causal=True)
    q[:, :3] = np.nan
    out, lse = reference_forward(problem, q, k, v)
    assert (out[:, :3] == 0).all()
    assert np.isneginf(lse[..., :3]).all()
    dout = randn(*out.shape)
    dout[:, :3] = np.nan
    dq, dk, dv = reference_backward(problem, dout, q, k, v)
    assert (dq[:, :3] == 0).all()
    q[:, :3], dout[:, :3] = 0, 0
    for got, want in zip((dq, dk, dv), reference_backward(problem, dout, q, k, v), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_hidden_data_reaches_nothing(poison):
    """D4: key 3 is seen by query 3 only."""
    problem, q, k, v = inputs((1, 4, 4, 2, 1, 8, 8), causal=True)
    dout = randn(*q.shape)
    clean = (*reference_forward(problem, q, k, v), *reference_backward(problem, dout, q, k, v))
    k[:, 3] = v[:, 3] = q[:, 3] = dout[:, 3] = poison
    out, lse = reference_forward(problem, q, k, v)
    dq, _, _ = reference_backward(problem, dout, q, k, v)
    for got, want in ((out, clean[0]), (lse.swapaxes(1, 2), clean[1].swapaxes(1, 2)), (dq, clean[2])):
        np.testing.assert_allclose(got[:, :3], want[:, :3], rtol=1e-12, atol=1e-14)
    assert np.isnan(dq[:, 3]).all()


def test_visible_nan_is_not_swallowed():
    """D4: a NaN in one column of v shows in that column of the rows that see it, and nowhere else."""
    problem, q, k, v = inputs((2, 6, 6, 2, 2, 4, 4), causal=True)
    v[1, 2, 1, 3] = np.nan
    out, lse = reference_forward(problem, q, k, v)
    expected = np.zeros(out.shape, bool)
    expected[1, 2:, 1, 3] = True
    np.testing.assert_array_equal(np.isnan(out), expected)
    assert np.isfinite(lse).all()


def test_infinite_scores():
    """Entry 29: the answers are those of the formulas."""
    cases = [
        # q, k, v -> out, lse
        (1, [0, -np.inf], [3, 5], 3, 0),
        (1, [0, np.inf], [3, 5], np.nan, np.nan),
        (1, [-np.inf, -np.inf], [3, 5], 0, -np.inf),
        (1, [0, 0], [1, np.inf], np.inf, np.log(2)),
        (1, [0, 0], [np.inf, -np.inf], np.nan, np.log(2)),
        (0, [np.inf, np.inf], [3, 5], np.nan, np.nan),
    ]
    for q, k, v, expected, expected_lse in cases:
        q, k, v = (np.array(x, float).reshape(1, -1, 1, 1) for x in (q, k, v))
        out, lse = reference_forward(Problem.of(q, k, v, scale=1.0), q, k, v)
        assert_same_strangeness(out.ravel(), [expected])
        np.testing.assert_allclose(out.ravel(), [expected])
        np.testing.assert_allclose(lse.ravel(), [expected_lse])


@pytest.mark.parametrize(
    "shape", [(0, 3, 3, 2, 2, 4, 4), (2, 0, 3, 2, 2, 4, 4), (2, 3, 0, 2, 2, 4, 4), (2, 3, 3, 0, 0, 4, 4)]
)
def test_empty_dimensions(shape):
    problem, q, k, v = inputs(shape)
    out, lse = reference_forward(problem, q, k, v)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    gradients = reference_backward(problem, out, q, k, v)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert all((x == 0).all() for x in gradients)


@pytest.mark.parametrize("module", ["cupyflash.reference", "cupyflash.workers"])
def test_examples(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0
