"""Problem and Band: what a call means, and which calls mean nothing."""

import itertools
import math
import re

import numpy as np
import pytest

from cupyflash.problem import Band, Problem, check_gpu, mask_band


def problem(q=(2, 5, 4, 8), k=(2, 7, 2, 8), v=None, dtype=np.float32, **options):
    v = k if v is None else v
    return Problem.of(np.empty(q, dtype), np.empty(k, dtype), np.empty(v, dtype), **options)


def counts(band, seqlen_q, seqlen_k):
    """Keys that each query sees."""
    return band.visible(np.arange(seqlen_q)[:, None], np.arange(seqlen_k)).sum(axis=1).tolist()


def test_dimensions_and_defaults():
    p = problem()
    assert (p.batch, p.seqlen_q, p.seqlen_k, p.num_heads, p.num_kv_heads, p.head_dim, p.head_dim_v) == (
        2,
        5,
        7,
        4,
        2,
        8,
        8,
    )
    assert (p.dtype, p.itemsize, p.group) == ("float32", 4, 2)
    assert p.band == Band(None, None)
    assert p.scale == 1 / math.sqrt(8)
    assert (p.softcap, p.precision, p.deterministic) == (0.0, "ieee", False)
    assert p == problem(q=(2, 4, 5, 8), k=(2, 2, 7, 8), layout="bhsd")
    assert hash(p) == hash(problem())


def test_value_head_dim_is_free():
    assert problem(v=(2, 7, 2, 13)).head_dim_v == 13


# ---- bands


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 5), (5, 1), (4, 4), (3, 6), (6, 3)])
def test_band_is_the_mask_written_out(seqlen_q, seqlen_k, causal, alignment):
    offset = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
    for left, right in itertools.product([None, 0, 1, 3, 100], repeat=2):
        band = mask_band(causal, (left, right), seqlen_q, seqlen_k, alignment)
        for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
            seen = (
                (left is None or j >= i + offset - left)
                and (right is None or j <= i + offset + right)
                and (not causal or j <= i + offset)
            )
            assert band.visible(i, j) == seen


def test_equal_masks_are_equal_bands():
    assert mask_band(False, (4, 4), 5, 5) == mask_band(False, None, 5, 5) == Band(None, None)
    assert mask_band(True, None, 1, 9) == Band(None, None)  # the last query sees everything
    assert mask_band(True, (None, 0), 5, 5) == mask_band(True, (None, 3), 5, 5) == mask_band(True, None, 5, 5)


def test_bounds_fit_an_int32():
    huge = 2**62
    assert mask_band(False, (huge, huge), 8, 3) == Band(None, None)
    assert Band.of(huge, None, 8, 3) == Band(3, None)  # hides everything, still
    assert Band.of(None, -huge, 8, 3) == Band(None, -8)


def test_causal_corners():
    assert counts(mask_band(True, None, 2, 5), 2, 5) == [4, 5]
    assert counts(mask_band("bottom_right", None, 2, 5), 2, 5) == [4, 5]
    assert counts(mask_band("top_left", None, 2, 5), 2, 5) == [1, 2]
    assert counts(mask_band(True, None, 5, 2), 5, 2) == [0, 0, 0, 1, 2]


def test_windows():
    """Among them: a right bound beyond the last key is no unbounded one when there are more queries than keys."""
    assert counts(mask_band(False, (None, 4), 8, 3), 8, 3) == [0, 1, 2, 3, 3, 3, 3, 3]
    assert counts(mask_band(False, (2, 2**31 - 1), 8, 3), 8, 3) == [3] * 8
    assert counts(mask_band(False, (4, None), 3, 8), 3, 8) == [7, 6, 5]
    assert counts(mask_band(False, (0, 0), 6, 6), 6, 6) == [1] * 6
    assert counts(mask_band(False, (1, 1), 6, 6), 6, 6) == [2, 3, 3, 3, 3, 2]
    assert counts(mask_band(True, (2, 9), 6, 6), 6, 6) == [1, 2, 3, 3, 3, 3]
    assert counts(mask_band("top_left", (1, 5), 2, 5), 2, 5) == [1, 2]
    assert counts(mask_band(False, (1, 1), 2, 5, "top_left"), 2, 5) == [2, 3]


# ---- options


@pytest.mark.parametrize("scale", [0, -1.5, np.float32(0.25), 3])
def test_any_finite_scale(scale):
    assert problem(scale=scale).scale == scale


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "scale is nan", {"scale": math.nan}),
        (ValueError, "scale is inf", {"scale": math.inf}),
        (ValueError, "it must be finite (in float32)", {"scale": 10**400}),
        (ValueError, "scale / softcap must be finite", {"scale": 1e3, "softcap": 1e-37}),
        (ValueError, "finite (in float32)", {"scale": 1e39}),
        (TypeError, "scale is a str", {"scale": "1"}),
        (TypeError, "scale is a ndarray", {"scale": np.ones(())}),
        (ValueError, "softcap is -1", {"softcap": -1}),
        (ValueError, "softcap is nan", {"softcap": math.nan}),
        (ValueError, "softcap is inf", {"softcap": math.inf}),
        (ValueError, "softcap is 1e-40", {"softcap": 1e-40}),
        (ValueError, "causal is 'bottom_left'", {"causal": "bottom_left"}),
        (ValueError, "causal is 2", {"causal": 2}),
        (ValueError, "causal is array([ True, False])", {"causal": np.array([True, False])}),
        (ValueError, "deterministic is 'no'; expected True or False", {"deterministic": "no"}),
        (ValueError, "contradicts", {"causal": "top_left", "alignment": "bottom_right"}),
        (ValueError, "layout is 'sbhd'", {"layout": "sbhd"}),
        (ValueError, "precision is 'fast'", {"precision": "fast"}),
        (ValueError, "window left is -2", {"window": (-2, 0)}),
        (ValueError, "window right is -1", {"window": (None, -1)}),
        (TypeError, "window left is 1.5", {"window": (1.5, 0)}),
        (ValueError, "expected None or (left, right)", {"window": 5}),
        (ValueError, "expected None or (left, right)", {"window": (1, 2, 3)}),
    ],
)
def test_bad_options(error, message, options):
    with pytest.raises(error, match=re.escape(message)):
        problem(**options)


def test_softcap_off():
    assert problem(softcap=None) == problem(softcap=0) == problem()


# ---- shapes and dtypes


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (7, 3), (2, 4), (1, 2), (4, 0), (0, 4)])
def test_heads_that_do_not_divide(heads, kv_heads):
    message = f"k has {kv_heads} heads but q has {heads}; num_heads must be a multiple of num_kv_heads"
    with pytest.raises(ValueError, match=message):
        problem(q=(2, 5, heads, 8), k=(2, 7, kv_heads, 8))


@pytest.mark.parametrize(("heads", "kv_heads", "group"), [(33, 1, 33), (33, 33, 1), (12, 4, 3), (6, 2, 3), (0, 0, 1)])
def test_heads_that_divide(heads, kv_heads, group):
    assert problem(q=(2, 5, heads, 8), k=(2, 7, kv_heads, 8)).group == group


@pytest.mark.parametrize(
    ("message", "shapes"),
    [
        ("q has 3 dimensions, shape (2, 5, 8); layout 'bshd' needs 4", {"q": (2, 5, 8)}),
        ("v has 5 dimensions", {"v": (2, 7, 2, 8, 1)}),
        ("batch sizes 2, 3 and 3", {"k": (3, 7, 2, 8)}),
        ("v has 6 rows but k has 7", {"v": (2, 6, 2, 8)}),
        ("v has 4 heads but k has 2", {"v": (2, 7, 4, 8)}),
        ("k has head_dim 16 but q has 8", {"k": (2, 7, 2, 16)}),
        ("head_dim is 0", {"q": (2, 5, 4, 0), "k": (2, 7, 2, 0)}),
        ("head_dim is 8 for q and k and 0 for v", {"v": (2, 7, 2, 0)}),
    ],
)
def test_bad_shapes(message, shapes):
    with pytest.raises(ValueError, match=re.escape(message)):
        problem(**shapes)


@pytest.mark.parametrize("empty", [{"q": (0, 5, 4, 8), "k": (0, 7, 2, 8)}, {"q": (2, 0, 4, 8)}, {"k": (2, 0, 2, 8)}])
def test_empty_problems_have_no_scores(empty):
    assert problem(**empty).scores == 0
    assert problem().scores == 2 * 4 * 5 * 7


def test_mixed_dtypes_are_named():
    q, k, v = np.empty((1, 2, 3, 4), np.float16), np.empty((1, 2, 3, 4), np.float32), np.empty((1, 2, 3, 4), np.float64)
    with pytest.raises(TypeError, match="q is float16, k is float32, v is float64; all must have one dtype"):
        Problem.of(q, k, v)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, bool, np.complex64, np.longdouble, object, "S4"])
def test_unsupported_dtypes(dtype):
    with pytest.raises(TypeError, match=r"q has dtype .*; expected one of float16, bfloat16, float32, float64"):
        problem(dtype=dtype)


def test_foreign_byte_order():
    with pytest.raises(TypeError, match="foreign byte order"):
        problem(dtype=np.dtype(np.float32).newbyteorder())


def test_bfloat16():
    assert problem(dtype=pytest.importorskip("ml_dtypes").bfloat16).itemsize == 2


def test_limits_of_the_gpu():
    check_gpu(problem(q=(2, 5, 4, 256), k=(2, 7, 2, 256)))
    with pytest.raises(TypeError, match="float64; the GPU computes float16, bfloat16, float32"):
        check_gpu(problem(dtype=np.float64))
    with pytest.raises(ValueError, match="q and k have head_dim 264; the GPU computes up to 256"):
        check_gpu(problem(q=(2, 5, 4, 264), k=(2, 7, 2, 264)))
    with pytest.raises(ValueError, match="v has head_dim 257"):
        check_gpu(problem(v=(2, 7, 2, 257)))
