"""How attention libraries have failed their users, restated as small cases that every backend must get right.

Each section is one kind of failure; the numbers are those of the reports' list, e.g. "case 10". D1 to D9 are the
decisions of the documentation: alignment, windows, rows that see nothing, NaN, order of the operations.
"""

import itertools
import math

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from oracles import (
    DTYPES,
    Answer,
    assert_bitwise,
    assert_close,
    assert_lone_value,
    assert_lse_close,
    assert_same_strangeness,
    check,
    max_error,
    naive_backward,
    naive_forward,
)

from cupyflash.problem import Band, Problem
from cupyflash.reference import reference_backward, reference_forward, visible_pairs

HALVES = ["float16", "bfloat16"]
FLOATS = ["float16", "bfloat16", "float32"]
INPUTS = ("q", "k", "v")


def randn(*shape, dtype="float32", seed=0, times=1.0):
    return (times * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(DTYPES[dtype])


def qkv(B, Sq, Sk, H, Hk, D, dtype="float32", Dv=None, times=1.0):
    q = randn(B, Sq, H, D, dtype=dtype, seed=1, times=times)
    k = randn(B, Sk, Hk, D, dtype=dtype, seed=2, times=times)
    v = randn(B, Sk, Hk, Dv or D, dtype=dtype, seed=3, times=times)
    return q, k, v


def constant(shape, value, dtype="float32"):
    return np.full(shape, value, DTYPES[dtype])


def uniform(Sq, Sk, D, dtype="float32"):
    """q = k = 0 and v one-hot, so that out shows the probabilities: all visible keys share them."""
    v = np.eye(D, dtype=np.float32)[np.arange(Sk) % D].reshape(1, Sk, 1, D)
    return constant((1, Sq, 1, D), 0, dtype), constant((1, Sk, 1, D), 0, dtype), v.astype(DTYPES[dtype])


def log_counts(problem):
    with np.errstate(divide="ignore"):
        return np.log(visible_pairs(problem).sum(axis=1))[None, None]


def with_band(problem, first, last):
    """The problem with another band; for masks that no option of Problem.of makes."""
    import dataclasses

    return dataclasses.replace(problem, band=Band.of(first, last, problem.seqlen_q, problem.seqlen_k))


# ---- masks, alignment, windows


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_1_causal_with_fewer_queries_than_keys(backend, dtype):
    q, k, v = uniform(2, 5, 8, dtype)
    out, lse = backend.forward(Problem.of(q, k, v, causal=True), q, k, v)
    np.testing.assert_allclose(lse[0, 0], [math.log(4), math.log(5)], rtol=1e-6)
    expected = np.zeros((2, 8))
    expected[0, :4], expected[1, :5] = 1 / 4, 1 / 5
    assert_close(out[0, :, 0], expected, expected.astype(DTYPES[dtype]))

    out, lse = backend.forward(Problem.of(q, k, v, causal="top_left"), q, k, v)
    np.testing.assert_allclose(lse[0, 0], [0, math.log(2)], rtol=1e-6)
    expected = np.zeros((2, 8))
    expected[0, :1], expected[1, :2] = 1, 1 / 2
    assert_close(out[0, :, 0], expected, expected.astype(DTYPES[dtype]))


@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize(("Sq", "Sk"), [(1, 239), (3, 799), (127, 512), (128, 217), (113, 203)])
def test_case_1_against_float64(backend, Sq, Sk, causal):
    q, k, v = qkv(1, Sq, Sk, 2, 2, 32, "float16")
    check(backend, Problem.of(q, k, v, causal=causal), q, k, v)


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_2_causal_with_more_queries_than_keys(backend, dtype):
    """The first rows see nothing: out 0, lse -inf, no gradient, even where their dout is NaN (D3)."""
    q, k, v = uniform(5, 2, 8, dtype)
    problem = Problem.of(q, k, v, causal=True)
    out, lse = backend.forward(problem, q, k, v)
    expected = np.zeros((5, 8))
    expected[3, 0], expected[4, :2] = 1, 1 / 2
    np.testing.assert_array_equal(out[0, :, 0].astype(float), expected)
    np.testing.assert_allclose(lse[0, 0], [-np.inf, -np.inf, -np.inf, 0, math.log(2)], rtol=1e-6)

    dout = randn(*out.shape, dtype=dtype)
    dout[:, :3] = np.nan
    dq, dk, dv = (x.astype(np.float64) for x in backend.backward(problem, dout, q, k, v, out, lse))
    assert (dq[:, :3] == 0).all()
    reference = reference_backward(problem, dout, q, k, v)
    dO = dout[0, :, 0].astype(np.float64)
    np.testing.assert_array_equal(reference[2][0, :, 0], [dO[3] + dO[4] / 2, dO[4] / 2])
    dout[:, :3] = 0
    for got, want, naive in zip((dq, dk, dv), reference, naive_backward(problem, dout, q, k, v), strict=True):
        assert_close(got, want, naive, "gradient")


@pytest.mark.parametrize(("Sq", "Sk"), [(799, 3), (239, 1), (300, 128)])
def test_case_2_is_finite_everywhere(backend, Sq, Sk):
    q, k, v = qkv(1, Sq, Sk, 1, 1, 64)
    q[:, : Sq - Sk] = np.nan
    problem = Problem.of(q, k, v, causal=True)
    out, lse = backend.forward(problem, q, k, v)
    dout = randn(*out.shape)
    dout[:, : Sq - Sk] = np.nan
    for x in (out, *backend.backward(problem, dout, q, k, v, out, lse)):
        assert np.isfinite(x).all()
    assert np.isneginf(lse[..., : Sq - Sk]).all()
    assert np.isfinite(lse[..., Sq - Sk :]).all()


@pytest.mark.parametrize("Sq", [1, 63, 64, 65, 127, 128, 129, 192])
@pytest.mark.parametrize("offset", [0, 1, 5, 31, 33, 63, 64, 65, 127, 129, -1, -33, -65])
def test_case_4_diagonal_that_crosses_several_tiles(backend, Sq, offset):
    Sk = Sq + offset
    if Sk < 1:
        pytest.skip("no keys")
    q, k, v = uniform(Sq, Sk, 64)
    problem = Problem.of(q, k, v, causal=True)
    _, lse = backend.forward(problem, q, k, v)
    np.testing.assert_allclose(lse, log_counts(problem), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [None, (64, 0)])
def test_case_8_very_negative_scores_behind_hidden_tiles(backend, dtype, window):
    q, k = constant((1, 88, 1, 64), 10, dtype), constant((1, 448, 1, 64), -20, dtype)
    v = randn(1, 448, 1, 64, dtype=dtype)
    problem = Problem.of(q, k, v, causal=True, window=window)
    out, lse = backend.forward(problem, q, k, v)
    expected, _ = reference_forward(problem, q, k, v)
    assert_close(out, expected, naive_forward(problem, q, k, v))
    np.testing.assert_allclose(lse, -1600 + log_counts(problem), rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 6e4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_case_10_hidden_keys_and_values_leak_nothing(backend, dtype, poison):
    """Keys 4 and 5 are hidden from all rows (D4)."""
    q, k, v = qkv(1, 4, 6, 2, 1, 64, dtype)
    dout = randn(1, 4, 2, 64, dtype=dtype)
    problem = Problem.of(q, k, v, causal="top_left")
    results = []
    for value in (0, poison):
        k[:, 4:] = v[:, 4:] = value
        out, lse = backend.forward(problem, q, k, v)
        results.append((out, lse, *backend.backward(problem, dout, q, k, v, out, lse)))
    for name, clean, poisoned in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert_bitwise(poisoned, clean, name)
    assert (results[1][3][:, 4:] == 0).all()
    assert (results[1][4][:, 4:] == 0).all()


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (2, 0)}, {"causal": "top_left", "softcap": 3.0}])
@pytest.mark.parametrize("Sk", [4, 67, 600])
def test_case_10_rows_that_do_not_see_a_nan_keep_every_bit(backend, Sk, options):
    """The last key is NaN, -inf in the value: only the last row sees it."""
    q, k, v = qkv(2, Sk, Sk, 2, 2, 32, Dv=24)
    dout = randn(2, Sk, 2, 24)
    # Without an order, dQ summed over more than two blocks of keys has other bits in every run.
    problem = Problem.of(q, k, v, deterministic=Sk > 67, **options)
    out, lse = backend.forward(problem, q, k, v)
    dq, dk, dv = backend.backward(problem, dout, q, k, v, out, lse)
    k[0, -1], v[0, -1] = np.nan, -np.inf
    bad_out, bad_lse = backend.forward(problem, q, k, v)
    assert_bitwise(bad_out[0, :-1], out[0, :-1])
    assert_bitwise(bad_lse[0, :, :-1], lse[0, :, :-1])
    assert np.isnan(bad_out[0, -1]).all()
    assert np.isnan(bad_lse[0, :, -1]).all()
    bad = backend.backward(problem, dout, q, k, v, bad_out, bad_lse)
    assert_bitwise(bad[0][0, :-1], dq[0, :-1])
    for got, clean in zip((bad_out, *bad), (out, dq, dk, dv), strict=True):
        assert_bitwise(got[1], clean[1])
    for got, want in zip(bad, reference_backward(problem, dout, q, k, v), strict=True):
        assert_same_strangeness(got, want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 3)}], ids=str)
def test_case_10_an_infinite_query_reaches_no_hidden_key_where_scores_are_capped(backend, dtype, options):
    """The cap keeps its scores and LSE finite, so that nothing but q itself tells of it."""
    q, k, v = qkv(1, 70, 70, 2, 1, 64, dtype)
    dout = randn(1, 70, 2, 64, dtype=dtype)
    q[0, 0, :, 5] = np.inf
    problem = Problem.of(q, k, v, softcap=3.0, **options)
    out, lse = backend.forward(problem, q, k, v)
    gradients = backend.backward(problem, dout, q, k, v, out, lse)
    for got, want in zip(gradients, reference_backward(problem, dout, q, k, v), strict=True):
        assert_same_strangeness(got, want)
    assert np.isfinite(gradients[1][0, 4:].astype(float)).all()


def test_case_11_right_window_beyond_the_keys_is_a_window(backend):
    q, k, v = uniform(8, 3, 8)
    out, lse = backend.forward(Problem.of(q, k, v, window=(None, 4)), q, k, v)
    expected = [-np.inf, 0, math.log(2), *[math.log(3)] * 5]
    np.testing.assert_allclose(lse[0, 0], expected, rtol=1e-6)
    assert (out[:, 0] == 0).all()

    _, lse = backend.forward(Problem.of(q, k, v, window=(2, 2**31 - 1)), q, k, v)
    counts = [min(3, 3 - max(0, i - 5 - 2)) for i in range(8)]
    np.testing.assert_allclose(lse[0, 0], np.log(counts), rtol=1e-6)

    q, k, v = uniform(3, 8, 8)
    _, lse = backend.forward(Problem.of(q, k, v, window=(4, None)), q, k, v)
    np.testing.assert_allclose(lse[0, 0], np.log([7, 6, 5]), rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_13_window_of_one_key(backend, dtype):
    """out is v, dv is dout, and dq and dk are 0."""
    q, k, v = qkv(2, 6, 6, 2, 2, 32, dtype)
    problem = Problem.of(q, k, v, window=(0, 0))
    out, lse = backend.forward(problem, q, k, v)
    assert_lone_value(out, v, backend.splits(problem))
    scores = np.einsum("bshd,bshd->bhs", q.astype(float), k.astype(float)) * problem.scale
    assert_lse_close(lse, scores)
    dout = randn(*v.shape, dtype=dtype)
    dq, dk, dv = backend.backward(problem, dout, q, k, v, out, lse)
    if backend.splits(problem):
        # dP = dO v is off by 2^-22 for low_a low_b and twice 2^-23 for what is cut off the rests, delta by 2^-22 for
        # out, of the sum of the products' sizes; as much again for rounding. The difference is all of dS.
        bound = 2.0**-20 * problem.scale * np.abs(dout.astype(float) * v).sum(axis=-1, keepdims=True)
        assert (np.abs(dq) <= bound * np.abs(k)).all()
        assert (np.abs(dk) <= bound * np.abs(q)).all()
    else:
        assert max_error(dq, np.zeros(q.shape)) < 1e-6
        assert max_error(dk, np.zeros(q.shape)) < 1e-6
    np.testing.assert_allclose(dv.astype(float), dout.astype(float), rtol=1e-6)


@pytest.mark.parametrize(
    ("S", "window", "counts"),
    [
        (6, (1, 1), {0: 2, 1: 3, 2: 3, 3: 3, 4: 3, 5: 2}),
        (6, (2, 0), {0: 1, 1: 2, 2: 3, 3: 3, 4: 3, 5: 3}),
        (129, (32, 64), {0: 65, 64: 97, 128: 33}),
    ],
)
def test_case_13_small_windows(backend, S, window, counts):
    q, k, v = uniform(S, S, 32)
    _, lse = backend.forward(Problem.of(q, k, v, window=window), q, k, v)
    for row, count in counts.items():
        assert lse[0, 0, row] == pytest.approx(math.log(count), rel=1e-6)
    assert np.isfinite(lse).all()


BANDS = {
    "causal": {"causal": True},
    "left": {"window": (8, 0)},
    "both": {"window": (8, 8)},
    "right": {"window": (None, 3)},
    "causal left": {"window": (8, None), "causal": True},
}


@pytest.mark.parametrize("options", BANDS.values(), ids=BANDS)
def test_case_14_backward_has_the_mask_of_forward(backend, options):
    q, k, v = qkv(1, 64, 64, 2, 2, 64)
    problem = Problem.of(q, k, v, **options)
    out, lse, *_ = check(backend, problem, q, k, v)

    sees_last = visible_pairs(problem)[:, 63]
    more_k, more_v = k.copy(), v.copy()
    more_k[:, 63] += 1
    more_v[:, 63] += 1
    changed, changed_lse = backend.forward(problem, q, more_k, more_v)
    assert_bitwise(changed[:, ~sees_last], out[:, ~sees_last])
    assert_bitwise(changed_lse[..., ~sees_last], lse[..., ~sees_last])

    dout = randn(*out.shape)
    dout[:, sees_last] = 0
    _, dk, dv = backend.backward(problem, dout, q, k, v, out, lse)
    assert (dk[:, 63] == 0).all()
    assert (dv[:, 63] == 0).all()


@pytest.mark.parametrize("options", [{"causal": "top_left", "window": (2, None)}, {"causal": True, "window": (5, 0)}])
@pytest.mark.parametrize("Sk", [3, 7, 130])
def test_case_2_last_or_first_of_many_rows_see_nothing(backend, Sk, options):
    """Whole tiles of rows lie beyond the band, on either side of it."""
    q, k, v = qkv(1, 1300, Sk, 1, 1, 16)
    check(backend, Problem.of(q, k, v, **options), q, k, v)


def test_band_that_hides_everything(backend):
    q, k, v = qkv(1, 5, 7, 2, 1, 16)
    for first, last in ((50, None), (None, -50), (3, 1)):
        problem = with_band(Problem.of(q, k, v), first, last)
        out, lse = backend.forward(problem, q, k, v)
        assert (out == 0).all()
        assert np.isneginf(lse).all()
        for gradient in backend.backward(problem, np.full_like(out, np.nan), q, k, v, out, lse):
            assert (gradient == 0).all()


# ---- numerics


@pytest.mark.parametrize("S", [1, 129])
def test_case_19_huge_equal_scores(backend, S):
    q = constant((1, S, 1, 64), 133120, "bfloat16")
    problem = Problem.of(q, q, q)
    out, lse = backend.forward(problem, q, q, q)
    assert (out.astype(float) == 133120).all()
    np.testing.assert_allclose(lse, 1.41767475e11, rtol=1e-6)
    if S == 1:
        dout = randn(*q.shape, dtype="bfloat16")
        dq, dk, dv = backend.backward(problem, dout, q, q, q, out, lse)
        assert (dq == 0).all()
        assert (dk == 0).all()
        assert_bitwise(dv, dout)


def test_case_20_scores_beyond_float16(backend):
    q, k = constant((1, 3, 1, 128), 256, "float16"), constant((1, 3, 1, 128), 256, "float16")
    v = randn(1, 3, 1, 128, dtype="float16")
    problem = Problem.of(q, k, v)
    out, lse = backend.forward(problem, q, k, v)
    np.testing.assert_allclose(lse, 256 * 256 * 128 * problem.scale + math.log(3), rtol=1e-6)
    expected = np.broadcast_to(v.astype(float).mean(axis=1, keepdims=True), v.shape)
    assert_close(out, expected, expected.astype(np.float16))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("Sk", [4096, 131072])
def test_case_22_sum_of_many_ones(backend, dtype, Sk):
    q, k, v = constant((1, 1, 1, 16), 0, dtype), constant((1, Sk, 1, 16), 0, dtype), constant((1, Sk, 1, 16), 1, dtype)
    out, lse = backend.forward(Problem.of(q, k, v), q, k, v)
    assert (out == 1).all()
    np.testing.assert_allclose(lse, math.log(Sk), rtol=0, atol=1e-6)


def test_case_23_gradient_of_scores_beyond_float16(backend):
    q = constant((1, 1, 1, 64), 0, "float16")
    k, v = constant((1, 2, 1, 64), 2.0**-10, "float16"), constant((1, 2, 1, 64), 256, "float16")
    k[:, 1], v[:, 1] = -(2.0**-10), -256
    dout = constant(q.shape, 256, "float16")
    dq, dk, dv = backend.gradients(Problem.of(q, k, v), dout, q, k, v)
    assert (dq == 512).all()
    assert (dk == 0).all()
    assert (dv == 128).all()
    k, v = k[:, :1], v[:, :1]
    dq, dk, dv = backend.gradients(Problem.of(q, k, v), dout, q, k, v)
    assert (dq == 0).all()
    assert (dk == 0).all()
    assert (dv == 256).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_25_gradient_of_one_key(backend, dtype):
    q, k, v = qkv(1, 1, 1, 5, 5, 16, dtype, times=3)
    dout = randn(*q.shape, dtype=dtype)
    dq, dk, dv = backend.gradients(Problem.of(q, k, v), dout, q, k, v)
    bound = 1e-3 * np.abs(dout.astype(float)).max()
    assert max_error(dq, np.zeros(q.shape)) < bound
    assert max_error(dk, np.zeros(q.shape)) < bound
    np.testing.assert_allclose(dv.astype(float), dout.astype(float), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_case_26_gradients_of_huge_scores_are_finite(backend, dtype):
    q, k, _ = qkv(1, 64, 64, 1, 1, 64, dtype, times=1e8)
    v, dout = randn(1, 64, 1, 64, dtype=dtype, seed=5), randn(1, 64, 1, 64, dtype=dtype, seed=6)
    problem = Problem.of(q, k, v)
    out, lse = backend.forward(problem, q, k, v)
    assert np.isfinite(out).all()
    gradients = backend.backward(problem, dout, q, k, v, out, lse)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    largest = np.abs(dout.astype(float)).sum(axis=1, keepdims=True)  # P is at most 1
    assert (np.abs(gradients[2].astype(float)) <= largest * 1.01).all()


@pytest.mark.parametrize("where", INPUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_case_28_visible_nan_is_not_swallowed(backend, where, causal):
    """D4: the rows and columns of the float64 reference, and no other bit changes."""
    arrays = dict(zip(INPUTS, qkv(2, 4, 4, 2, 2, 8), strict=True))
    dout = randn(2, 4, 2, 8)
    problem = Problem.of(*arrays.values(), causal=causal)
    clean, clean_lse = backend.forward(problem, *arrays.values())
    arrays[where][1, {"q": 2, "k": 1, "v": 1}[where], 1, 0] = np.nan
    out, lse = backend.forward(problem, *arrays.values())
    expected, expected_lse = reference_forward(problem, *arrays.values())
    assert np.isnan(expected).any()
    assert_same_strangeness(out, expected)
    assert_same_strangeness(lse, expected_lse)
    same = ~np.isnan(expected).any(axis=-1)
    assert_bitwise(out[same], clean[same])
    assert_bitwise(lse.swapaxes(1, 2)[same], clean_lse.swapaxes(1, 2)[same])
    gradients = backend.backward(problem, dout, *arrays.values(), out, lse)
    for got, want in zip(gradients, reference_backward(problem, dout, *arrays.values()), strict=True):
        assert_same_strangeness(got, want)


@pytest.mark.parametrize("position", [0, 3])
def test_case_28_nan_in_dout(backend, position):
    q, k, v = qkv(1, 4, 6, 1, 1, 8)
    dout = randn(1, 4, 1, 8)
    dout[0, position, 0, 2] = np.nan
    problem = Problem.of(q, k, v, causal=True)
    gradients = backend.gradients(problem, dout, q, k, v)
    for got, want in zip(gradients, reference_backward(problem, dout, q, k, v), strict=True):
        assert_same_strangeness(got, want)


@pytest.mark.parametrize(
    ("q", "k", "v", "expected", "expected_lse"),
    [
        (1, [0, -np.inf], [3, 5], 3, 0),
        (1, [0, np.inf], [3, 5], np.nan, np.nan),
        (1, [-np.inf, -np.inf], [3, 5], 0, -np.inf),
        (1, [0, 0], [1, np.inf], np.inf, math.log(2)),
        (1, [0, 0], [np.inf, -np.inf], np.nan, math.log(2)),
        (0, [np.inf, 1], [3, 5], np.nan, np.nan),
    ],
)
@pytest.mark.parametrize("Sk", [2, 700])
def test_case_29_infinities(backend, q, k, v, expected, expected_lse, Sk):
    """The second key's data stands at the end, where it meets a running maximum; what lies between is -inf or 0."""
    fill = -np.inf if q else 1
    K = np.full((1, Sk, 1, 1), fill, np.float32)
    V = np.full((1, Sk, 1, 1), 3, np.float32)
    K[0, [0, -1], 0, 0], V[0, [0, -1], 0, 0] = k, v
    Q = np.full((1, 1, 1, 1), q, np.float32)
    problem = Problem.of(Q, K, V, scale=1.0)
    out, lse = backend.forward(problem, Q, K, V)
    assert_same_strangeness(out.ravel(), [expected])
    assert_same_strangeness(lse.ravel(), [expected_lse])
    np.testing.assert_allclose(out.ravel(), [expected], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), [expected_lse], rtol=1e-6)


@pytest.mark.parametrize("Sk", [3, 700])
def test_case_29_row_of_scores_that_are_all_infinitely_low(backend, Sk):
    """It counts as one that sees nothing, though it sees all."""
    q, k, v = qkv(1, 5, Sk, 1, 1, 4)
    q[..., 0], k[..., 0] = 1, -np.inf
    q[:, 3] = np.nan
    out, lse = backend.forward(Problem.of(q, k, v), q, k, v)
    assert np.isneginf(np.delete(lse, 3, axis=2)).all()
    assert (np.delete(out, 3, axis=1) == 0).all()


@pytest.mark.parametrize("Sk", [3, 700])
def test_case_29_row_of_scores_that_are_all_infinitely_low_has_no_gradient(backend, Sk, request):
    """It counts as one that sees nothing, though it sees all (D3): whatever its dout is."""
    if backend.name != "cpu":
        reason = "without a mask the kernels multiply the row's weights of 0 with infinite keys and a NaN dout"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    q, k, v = qkv(1, 5, Sk, 1, 1, 4)
    q[..., 0], k[..., 0] = 1, -np.inf
    q[:, 3] = np.nan
    dout = randn(1, 5, 1, 4)
    dout[:, 1] = np.nan
    problem = Problem.of(q, k, v)
    out, lse = backend.forward(problem, q, k, v)
    gradients = backend.backward(problem, dout, q, k, v, out, lse)
    assert (np.delete(gradients[0], 3, axis=1) == 0).all()
    q, dout = q[:, :3], dout[:, :3]
    gradients = backend.gradients(Problem.of(q, k, v), dout, q, k, v)
    for gradient in gradients:
        assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_31_sum_over_many_queries(backend, dtype):
    for Sq, expected in ((4096, 4096), (70000, {"float16": np.inf, "bfloat16": 70144, "float32": 70000}[dtype])):
        q, k, dout = (constant((1, S, 1, 16), x, dtype) for S, x in ((Sq, 0), (1, 0), (Sq, 1)))
        _, _, dv = backend.gradients(Problem.of(q, k, k), dout, q, k, k)
        assert (dv.astype(float) == expected).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "options", "times"),
    [
        ((4, 10, 10, 8, 8, 64), {"causal": True}, 1),
        ((1, 900, 900, 2, 2, 64), {}, 10),
        ((1, 768, 768, 2, 2, 128), {}, 1),
    ],
)
def test_case_32_tolerance(backend, dtype, shape, options, times):
    q, k, v = qkv(*shape, dtype)
    v = (v.astype(np.float32) * times).astype(v.dtype)
    check(backend, Problem.of(q, k, v, **options), q, k, v)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0, -1e-3, 30.0])
def test_any_scale(backend, scale):
    """D7."""
    q, k, v = qkv(1, 40, 70, 2, 1, 16)
    check(backend, Problem.of(q, k, v, scale=scale, causal=True), q, k, v, gradients=abs(scale) < 10)


def test_scores_that_rise_and_fall(backend):
    """A running maximum that has to follow by hundreds, from tile to tile, in both directions."""
    q, k, v = qkv(1, 70, 1500, 1, 1, 32)
    steps = np.repeat(np.array([0, 40, -40, 90, 89, -700, 300], np.float32), 215)[:1500]
    q[..., 0], k[0, :, 0, 0] = 1, steps
    problem = Problem.of(q, k, v, scale=1.0)
    check(backend, problem, q, k, v, gradients=False)
    check(backend, Problem.of(q, k, v, scale=-1.0, causal=True), q, k, v, gradients=False)


@pytest.mark.parametrize("lower", [3.3, 333.3, -700000.1, -800000.2])
def test_equal_scores_keep_equal_weights_when_the_maximum_rises(backend, lower):
    """Keys 600 to 1599 have one large score: each must weigh the same, wherever it lies in its tile."""
    q, k = constant((1, 4, 1, 8), 0), constant((1, 1600, 1, 8), 0)
    v = randn(1, 1600, 1, 8)
    q[..., 0], k[:, :600, :, 0], k[:, 600:, :, 0] = 1, lower, 741455.2
    problem = Problem.of(q, k, v, scale=1.0)
    check(backend, problem, q, k, v, gradients=False)


# ---- lse


@pytest.mark.parametrize("shape", [(2, 3, 0, 2, 1, 16), (2, 5, 2, 2, 2, 16)])
def test_case_34_lse_of_empty_rows(backend, shape):
    q, k, v = qkv(*shape)
    out, lse = backend.forward(Problem.of(q, k, v, causal=True), q, k, v)
    empty = shape[1] - shape[2]
    assert np.isneginf(lse[..., :empty]).all()
    assert (out[:, :empty] == 0).all()


def test_case_35_lse_is_natural(backend):
    q, k, v = uniform(1, 8, 8)
    _, lse = backend.forward(Problem.of(q, k, v), q, k, v)
    np.testing.assert_allclose(lse, math.log(8), rtol=1e-6)

    q, k, v = qkv(1, 5, 37, 2, 2, 32)
    whole, _ = backend.forward(Problem.of(q, k, v), q, k, v)
    parts = [(k[:, :16], v[:, :16]), (k[:, 16:], v[:, 16:])]
    outs, lses = zip(*(backend.forward(Problem.of(q, *part), q, *part) for part in parts), strict=True)
    weights = [np.exp(lse - np.logaddexp(*lses)).swapaxes(1, 2)[..., None] for lse in lses]
    assert max_error(weights[0] * outs[0] + weights[1] * outs[1], whole) < 1e-6


def test_case_37_lse_of_every_head_and_row(backend):
    for Sq in (1, 2):
        q, k, v = qkv(3, Sq, 100, 8, 2, 64)
        check(backend, Problem.of(q, k, v), q, k, v, gradients=False)


# ---- the gradient of LSE


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"window": (9, 3), "scale": -0.4}])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_of_lse(backend, dtype, options, deterministic):
    """Beside that of out; the first rows of a causal mask see nothing."""
    q, k, v = qkv(1, 50, 35, 4, 2, 16, dtype)
    problem = Problem.of(q, k, v, deterministic=deterministic, **options)
    out, lse = backend.forward(problem, q, k, v)
    dout, dlse = randn(*out.shape, dtype=dtype, seed=8), randn(*lse.shape, seed=9)
    gradients = backend.backward(problem, dout, q, k, v, out, lse, dlse)
    Answer.of(problem, q, k, v, dout, dlse).assert_gradients_close(gradients)
    if deterministic:
        for first, again in zip(gradients, backend.backward(problem, dout, q, k, v, out, lse, dlse), strict=True):
            assert_bitwise(again, first)


def test_gradient_of_lse_where_all_scores_are_equal(backend):
    """All that a query sees weighs the same, so lse = log(keys seen) + the mean score: gradients are means."""
    Sq, Sk, D = 40, 30, 16
    q, k, v = qkv(1, Sq, Sk, 4, 2, D)
    problem = Problem.of(q, k, v, causal=True)
    dout, dlse = constant(q.shape, 0), randn(1, 4, Sq, seed=9)
    seen = np.tri(Sq, Sk, Sk - Sq)
    weights = seen / np.maximum(seen.sum(axis=1, keepdims=True), 1)

    zero = constant(q.shape, 0)
    dq, dk, dv = backend.backward(problem, dout, zero, k, v, *backend.forward(problem, zero, k, v), dlse)
    mean_key = np.einsum("ij,bjhd->bihd", weights, k.repeat(2, axis=2))
    np.testing.assert_allclose(dq, dlse.swapaxes(1, 2)[..., None] * mean_key / math.sqrt(D), rtol=1e-5, atol=1e-6)
    assert (dk == 0).all()
    assert (dv == 0).all()

    zero = constant(k.shape, 0)
    dq, dk, dv = backend.backward(problem, dout, q, zero, v, *backend.forward(problem, q, zero, v), dlse)
    of_head = np.einsum("bhi,ij,bihd->bjhd", dlse, weights, q) / math.sqrt(D)
    np.testing.assert_allclose(dk, of_head.reshape(1, Sk, 2, 2, D).sum(axis=3), rtol=1e-5, atol=1e-6)
    assert (dq == 0).all()
    assert (dv == 0).all()


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradient_of_lse_is_a_slope(backend, softcap):
    """Central differences in float64 of NumPy's own log-sum-exp."""
    q, k, v = qkv(1, 20, 33, 2, 1, 8)
    problem = Problem.of(q, k, v, window=(12, 2), softcap=softcap)
    dlse = randn(1, 2, 20, seed=9)

    def loss(q, k):
        S = np.einsum("bihd,bjhd->bhij", q, k.repeat(2, axis=2)) / math.sqrt(8)
        S = softcap * np.tanh(S / softcap) if softcap else S
        return (np.logaddexp.reduce(np.where(visible_pairs(problem), S, -np.inf), axis=-1) * dlse).sum()

    out, lse = backend.forward(problem, q, k, v)
    dq, dk, dv = backend.backward(problem, constant(q.shape, 0), q, k, v, out, lse, dlse)
    assert (dv == 0).all()
    q, k = q.astype(np.float64), k.astype(np.float64)
    for seed in range(5):
        along_q, along_k = (randn(*x.shape, dtype="float64", seed=20 + seed) for x in (q, k))
        slope_q = (loss(q + 1e-5 * along_q, k) - loss(q - 1e-5 * along_q, k)) / 2e-5
        slope_k = (loss(q, k + 1e-5 * along_k) - loss(q, k - 1e-5 * along_k)) / 2e-5
        np.testing.assert_allclose((dq * along_q).sum(), slope_q, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose((dk * along_k).sum(), slope_k, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_through_merging_are_those_of_the_whole(backend, dtype):
    """Attention over two halves of the keys, merged: its lse and its out lead back to both halves (ring attention)."""
    q, k, v = qkv(1, 37, 60, 4, 2, 16, dtype)
    dout, dlse = randn(*q.shape, dtype=dtype, seed=8), randn(1, 4, 37, seed=9)
    halves = [(k[:, :23], v[:, :23]), (k[:, 23:], v[:, 23:])]
    parts = [backend.forward(Problem.of(q, *half), q, *half) for half in halves]
    (out_a, lse_a), (out_b, lse_b) = ((out.astype(np.float64), lse.astype(np.float64)) for out, lse in parts)

    # out = a out_a + (1 - a) out_b and lse = lse_b + log(1 + exp(lse_a - lse_b)), a = sigmoid(lse_a - lse_b)
    a = 1 / (1 + np.exp(lse_b - lse_a))
    along = ((out_a - out_b) * dout).sum(axis=-1).swapaxes(1, 2) * a * (1 - a)
    dq, dk, dv = 0, [], []
    for half, part, weight, sign in zip(halves, parts, (a, 1 - a), (1, -1), strict=True):
        part_dout = (weight.swapaxes(1, 2)[..., None] * dout).astype(q.dtype)
        part_dlse = (weight * dlse + sign * along).astype(np.float32)
        gradients = backend.backward(Problem.of(q, *half), part_dout, q, *half, *part, part_dlse)
        dq = dq + gradients[0].astype(np.float64)
        dk.append(gradients[1])
        dv.append(gradients[2])
    whole = Answer.of(Problem.of(q, k, v), q, k, v, dout, dlse)
    whole.assert_gradients_close((dq, np.concatenate(dk, axis=1), np.concatenate(dv, axis=1)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_of_lse_where_nothing_is_seen(backend, dtype, poison, deterministic):
    """D3: rows without a key contribute nothing, whatever their dlse and their dout are."""
    q, k, v = qkv(1, 40, 25, 2, 1, 16, dtype)
    problem = Problem.of(q, k, v, causal=True, deterministic=deterministic)
    out, lse = backend.forward(problem, q, k, v)
    dout, dlse = randn(*out.shape, dtype=dtype, seed=8), randn(*lse.shape, seed=9)
    dout[:, :15], dlse[..., :15] = 0, 0
    clean = Answer.of(problem, q, k, v, dout, dlse)
    dlse[..., :15] = poison
    for unseen in (0, poison):
        dout[:, :15] = unseen
        dq, dk, dv = backend.backward(problem, dout, q, k, v, out, lse, dlse)
        assert (dq[:, :15] == 0).all()
        clean.assert_gradients_close((dq, dk, dv))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_in_the_gradient_of_lse_shows(backend, dtype, deterministic):
    """D4: in dq of its row, in dk of what the row sees, and nowhere else; dv does not depend on it."""
    q, k, v = qkv(2, 40, 40, 2, 2, 16, dtype)
    problem = Problem.of(q, k, v, causal=True, deterministic=deterministic)
    out, lse = backend.forward(problem, q, k, v)
    dout, dlse = randn(*out.shape, dtype=dtype, seed=8), randn(*lse.shape, seed=9)
    clean = backend.backward(problem, dout, q, k, v, out, lse, dlse)
    dlse[1, 0, 17] = np.nan
    dq, dk, dv = backend.backward(problem, dout, q, k, v, out, lse, dlse)
    expected_dq, expected_dk = np.zeros(dq.shape, bool), np.zeros(dk.shape, bool)
    expected_dq[1, 17, 0], expected_dk[1, :18, 0] = True, True
    np.testing.assert_array_equal(np.isnan(dq), expected_dq)
    np.testing.assert_array_equal(np.isnan(dk), expected_dk)
    for got, want in zip((dq, dk, dv), clean, strict=True):
        got, want = got.astype(np.float64), want.astype(np.float64)
        np.testing.assert_allclose(np.where(np.isnan(got), want, got), want, rtol=1e-2, atol=1e-5)


# ---- shapes

LENGTHS = [(1, 1), (1, 239), (239, 1), (97, 97), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (257, 257)]
LONG = [(799, 3), (3, 799), (512, 256), (1023, 1024), (1024, 1023), (1024, 128), (2048, 2048)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("Sq", "Sk"), LENGTHS)
def test_case_41_lengths(backend, Sq, Sk, dtype, causal):
    q, k, v = qkv(2, Sq, Sk, 2, 1, 40, dtype)
    check(backend, Problem.of(q, k, v, causal=causal), q, k, v)


@pytest.mark.parametrize(("Sq", "Sk"), LONG)
def test_case_41_long_lengths(backend, Sq, Sk):
    q, k, v = qkv(1, Sq, Sk, 1, 1, 64, "bfloat16")
    check(backend, Problem.of(q, k, v, causal=True), q, k, v)


@pytest.mark.parametrize("D", [1, 8, 16, 32, 40, 59, 64, 72, 80, 96, 104, 111, 112, 120, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("dtype", FLOATS)
def test_case_43_head_dims(backend, D, dtype):
    """The arrays are columns of wider buffers whose other columns are NaN."""
    arrays = []
    for array in qkv(1, 65, 65, 2, 2, D, dtype):
        wider = np.full((*array.shape[:3], 264), np.nan, array.dtype)
        wider[..., :D] = array
        arrays.append(wider[..., :D])
    problem = Problem.of(*arrays, causal=True)
    assert problem.scale == pytest.approx(D**-0.5)
    check(backend, problem, *arrays)


@pytest.mark.parametrize("D", [160, 192, 224, 256])
@pytest.mark.parametrize("S", [1, 63, 64, 65, 97, 128, 129])
def test_case_44_backward_of_large_head_dims(backend, D, S):
    q, k, v = qkv(1, S, S, 2, 2, D, "bfloat16")
    check(backend, Problem.of(q, k, v, causal=S % 2 == 0), q, k, v)


@pytest.mark.parametrize(("D", "Dv"), [(64, 128), (128, 64), (192, 128), (40, 24), (16, 256)])
def test_head_dim_of_values_may_differ(backend, D, Dv):
    q, k, v = qkv(1, 70, 90, 4, 2, D, "float16", Dv=Dv)
    check(backend, Problem.of(q, k, v, causal=True), q, k, v)


@pytest.mark.parametrize("D", [64, 72, 96, 128, 256])
def test_case_47_last_column_counts(backend, D):
    q, k, v = constant((1, 1, 1, D), 0), constant((1, 2, 1, D), 0), constant((1, 2, 1, D), 0)
    q[..., -1] = 1
    k[0, 1, 0, -1] = math.log(3) * math.sqrt(D)
    v[0, 1, 0, -1] = 1
    out, _ = backend.forward(Problem.of(q, k, v), q, k, v)
    np.testing.assert_allclose(out[0, 0, 0, -1], 0.75, rtol=1e-5)
    assert (out[..., :-1] == 0).all()


@pytest.mark.parametrize(
    "shape",
    [(0, 3, 3, 2, 2, 8), (2, 0, 3, 2, 2, 8), (2, 3, 0, 2, 2, 8), (2, 3, 3, 0, 0, 8), (1, 0, 0, 1, 1, 8)],
)
def test_empty_dimensions(backend, shape):
    q, k, v = qkv(*shape)
    check(backend, Problem.of(q, k, v), q, k, v)


# ---- strides


def contiguous(arrays):
    return [np.ascontiguousarray(x) for x in arrays]


def assert_same_as_contiguous(backend, arrays, **options):
    """The results of views are bitwise those of contiguous copies; dout is a view too.

    Gradients whose dQ is summed in any order differ in their last bits from run to run; they are compared with float64.
    """
    check(backend, Problem.of(*arrays, **options), *arrays)
    problem = Problem.of(*arrays, deterministic=True, **options)
    out, lse = backend.forward(problem, *arrays)
    expected, expected_lse = backend.forward(problem, *contiguous(arrays))
    assert_bitwise(out, expected, "out")
    assert_bitwise(lse, expected_lse, "lse")
    dout = randn(out.shape[0], 2 * out.shape[1], *out.shape[2:], dtype=problem.dtype, seed=7)[:, ::2]
    gradients = backend.backward(problem, dout, *arrays, out, lse)
    expected = backend.backward(problem, np.ascontiguousarray(dout), *contiguous(arrays), out, lse)
    for name, got, want in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        assert_bitwise(got, want, name)


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_49_packed_qkv(backend, dtype):
    packed = randn(2, 62, 3, 4, 64, dtype=dtype)
    assert_same_as_contiguous(backend, [packed[:, :, i] for i in range(3)], causal=True)


def test_case_49_every_array_in_another_layout(backend):
    """q is (B, H, S, D), k is (S, B, H, D), v is every other batch entry; what is not used is NaN."""
    q = randn(2, 4, 62, 32).swapaxes(1, 2)
    k = randn(62, 2, 4, 32).swapaxes(0, 1)
    buffer = np.full((4, 62, 4, 32), np.nan, np.float32)
    buffer[::2] = randn(2, 62, 4, 32, seed=4)
    assert_same_as_contiguous(backend, [q, k, buffer[::2]], causal=True)


@pytest.mark.parametrize("layout", ["transposed", "fortran", "every other column"])
def test_case_50_dout_with_strides_of_its_own(backend, layout):
    q, k, v = qkv(2, 50, 50, 4, 4, 32)
    problem = Problem.of(q, k, v)
    out, lse = backend.forward(problem, q, k, v)
    dout = {
        "transposed": lambda: randn(50, 4, 4, 32)[:, ::2].swapaxes(0, 1),
        "fortran": lambda: np.asfortranarray(randn(2, 50, 4, 32)),
        "every other column": lambda: randn(2, 50, 4, 64)[..., ::2],
    }[layout]()
    gradients = backend.backward(problem, dout, q, k, v, out, lse)
    expected = backend.backward(problem, np.ascontiguousarray(dout), q, k, v, out, lse)
    for got, want in zip(gradients, expected, strict=True):
        assert_bitwise(got, want)


@pytest.mark.parametrize("Sk", [1, 31, 32, 33, 63, 65, 97, 129])
def test_case_52_broadcast_keys_and_values(backend, Sk):
    q = randn(4, 9, 8, 64)
    k, v = (np.broadcast_to(randn(1, Sk, 1, 64, seed=i), (4, Sk, 8, 64)) for i in (1, 2))
    assert_same_as_contiguous(backend, [q, k, v])
    assert_same_as_contiguous(backend, [np.broadcast_to(q[:, :1], q.shape), k, v])


def test_case_52_gradients_of_broadcast_heads_are_those_of_one_head(backend):
    q, k, v = qkv(1, 20, 33, 8, 1, 64)
    many = [np.broadcast_to(x, (1, 33, 8, 64)) for x in (k, v)]
    dout = randn(*q.shape)
    _, dk, dv = backend.gradients(Problem.of(q, *many), dout, q, *many)
    assert dk.shape == (1, 33, 8, 64)
    problem = Problem.of(q, k, v)
    reference, naive = reference_backward(problem, dout, q, k, v), naive_backward(problem, dout, q, k, v)
    for i, gradient in ((1, dk), (2, dv)):
        assert_close(gradient.sum(axis=2, keepdims=True), reference[i], naive[i], "gradient")


def test_case_53_negative_strides(backend):
    forwards = qkv(1, 37, 37, 2, 2, 64)
    backwards = [x[:, ::-1] for x in forwards]
    assert_same_as_contiguous(backend, backwards, causal=True)
    out, _ = backend.forward(Problem.of(*backwards), *backwards)
    expected, _ = reference_forward(Problem.of(*forwards), *forwards)
    assert_close(out, expected[:, ::-1], naive_forward(Problem.of(*forwards), *forwards)[:, ::-1])

    q, k, v = forwards
    mirrored = [q[..., ::-1], k[..., ::-1], v]
    out, _ = backend.forward(Problem.of(*mirrored), *mirrored)
    assert_close(out, expected, naive_forward(Problem.of(*forwards), *forwards))


def test_case_55_strides_of_axes_of_length_1(backend):
    base = randn(64, 64, dtype="float16")
    nonsense = as_strided(base, (1, 64, 1, 64), (10**9 * 2, 128, 6, 2), writeable=False)
    plain = base.reshape(1, 64, 1, 64)
    assert_same_as_contiguous(backend, [nonsense] * 3)
    out, _ = backend.forward(Problem.of(plain, plain, plain), nonsense, nonsense, nonsense)
    assert_bitwise(out, backend.forward(Problem.of(plain, plain, plain), plain, plain, plain)[0])
    one_head = [randn(1, 64, 16, 64, seed=i)[:, :, 5:6] for i in range(3)]
    assert_same_as_contiguous(backend, one_head)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8])
def test_case_56_any_alignment(backend, dtype, offset):
    """Arrays that begin at any element; D = 40 out of rows of 41."""
    shape, results = (1, 37, 2, 40), []
    for start in (0, offset):
        arrays = []
        for i in range(4):
            buffer = np.full(math.prod(shape[:3]) * 41 + 8, np.nan, DTYPES[dtype])
            array = buffer[start : start + math.prod(shape[:3]) * 41].reshape(*shape[:3], 41)[..., :40]
            array[...] = randn(*shape, dtype=dtype, seed=i)
            arrays.append(array)
        dout, q, k, v = arrays
        problem = Problem.of(q, k, v, causal=True)
        out, lse = backend.forward(problem, q, k, v)
        results.append((out, lse, *backend.backward(problem, dout, q, k, v, out, lse)))
    for got, want in zip(*results, strict=True):
        assert_bitwise(got, want)


def test_case_58_equal_shapes_of_other_dtypes_and_strides(backend):
    """One after the other and back: nothing kept from an earlier call may be taken for this one's."""
    shape = 2, 33, 4, 64
    variants = [
        *(qkv(2, 33, 33, 4, 4, 64, dtype) for dtype in backend.dtypes),
        [randn(2, 4, 33, 64, seed=i).swapaxes(1, 2) for i in range(3)],
        [randn(*shape), np.broadcast_to(randn(2, 33, 1, 64), shape), randn(*shape, seed=1)],
        [randn(2, 33, 4, 65, seed=i)[..., :64] for i in range(3)],
    ]
    for arrays in (*variants, *reversed(variants)):
        check(backend, Problem.of(*arrays), *arrays, gradients=False)


# ---- grouped queries


@pytest.mark.parametrize(("H", "Hk"), [(33, 1), (5, 5), (12, 4), (6, 2), (71, 1), (40, 8), (128, 1)])
@pytest.mark.parametrize("Sq", [1, 2, 3, 5])
def test_cases_92_and_95_groups(backend, H, Hk, Sq):
    q, k, v = qkv(1, Sq, 130, H, Hk, 32)
    check(backend, Problem.of(q, k, v, causal=True, window=(90, None)), q, k, v)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("Hk", [1, 2, 4, 8])
def test_case_94_gradients_are_summed_over_the_group(backend, dtype, Hk):
    q, k, v = qkv(1, 65, 65, 8, Hk, 64, dtype)
    check(backend, Problem.of(q, k, v), q, k, v)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 0)}, {"softcap": 2.0}])
def test_case_109_deterministic_backward(backend, options):
    q, k, v = qkv(2, 130, 130, 4, 2, 64, "bfloat16")
    problem = Problem.of(q, k, v, deterministic=True, **options)
    dout = randn(*q.shape, dtype="bfloat16")
    out, lse = backend.forward(problem, q, k, v)
    first = backend.backward(problem, dout, q, k, v, out, lse)
    for _ in range(4):
        for got, want in zip(backend.backward(problem, dout, q, k, v, out, lse), first, strict=True):
            assert_bitwise(got, want)


# ---- softcap


def test_case_103_mask_comes_after_softcap(backend):
    q = constant((1, 1, 1, 8), 100)
    k, v = constant((1, 2, 1, 8), 50), constant((1, 2, 1, 8), 1)
    v[:, 1] = 1000
    problem = Problem.of(q, k, v, causal="top_left", softcap=5.0)
    out, lse = backend.forward(problem, q, k, v)
    assert (out == 1).all()
    np.testing.assert_allclose(lse, 5, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_case_104_softcap(backend, dtype, softcap):
    q, k, v = qkv(1, 70, 90, 4, 2, 64, dtype, times=2)
    check(backend, Problem.of(q, k, v, causal=True, softcap=softcap), q, k, v)


@pytest.mark.parametrize("softcap", [1e6, 1e30, 3e38])
def test_case_104_huge_softcap_is_none(backend, softcap):
    q, k, v = qkv(1, 30, 30, 2, 2, 64)
    dout = randn(*q.shape)
    off, on = Problem.of(q, k, v), Problem.of(q, k, v, softcap=softcap)
    for problem in (off, on):
        out, lse = backend.forward(problem, q, k, v)
        results = (out, lse, *backend.backward(problem, dout, q, k, v, out, lse))
        if problem is off:
            expected = results
    for got, want in zip(results, expected, strict=True):
        assert max_error(got, want) < 1e-4
        assert np.isfinite(got).all()


def test_everything_at_once(backend):
    for causal, window, softcap, scale in itertools.product(
        [True, "top_left"], [(33, None), (5, 70)], [0.0, 1.5], [None, -0.3]
    ):
        q, k, v = qkv(2, 131, 77, 4, 2, 24, "float16", Dv=40)
        check(backend, Problem.of(q, k, v, causal=causal, window=window, softcap=softcap, scale=scale), q, k, v)
