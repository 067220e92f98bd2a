"""The cases of emulated_cases.py on a backend: what is right, and how near to it the kernels have to come."""

import functools

import numpy as np
from backends import EmulatedBackend, Guarded
from emulated_cases import CASES, KINDS, OPTIONS, SMALL_L2
from engineered import DLSE, HIDDEN, LAYOUTS, NUMBERS, OUTPUTS
from oracles import DTYPES, Answer, assert_bitwise, assert_lone_value, assert_lse_close, assert_same_strangeness

from cupyflash.problem import Problem
from cupyflash.reference import by_head, reference_forward, repeat_heads, softmax, visible_pairs


@functools.lru_cache(maxsize=8)
def prepared(name):
    """(problem, q, k, v, dout, dlse, the right answer) of a case."""
    case = CASES[name]
    kind = KINDS[case.kind]
    Sq, Sk, B, H, Hk = (*case.shape, 1, 2, 1)[:5] if len(case.shape) == 2 else case.shape
    D, Dv = kind.head_dims
    rng = np.random.default_rng(list(map(ord, name)))
    shapes = (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv), (B, Sq, H, Dv)
    numbers = [rng.standard_normal(shape) for shape in shapes]
    rounded = [x.astype(DTYPES[kind.dtype]) for x in numbers]
    options = OPTIONS[case.options] | {"precision": kind.precision}
    problem = Problem.of(*rounded[:3], **options)
    NUMBERS[case.numbers](problem, *numbers)
    q, k, v, dout = (LAYOUTS[case.layout](x.astype(DTYPES[kind.dtype])) for x in numbers)
    dlse = None
    if case.dlse:
        dlse = rng.standard_normal((B, H, Sq)).astype(np.float32)
        DLSE[case.dlse](dlse, reference_forward(problem, q, k, v)[1])
    answer = Answer.of(problem, q, k, v, dout if case.gradients else None, dlse)
    return problem, q, k, v, dout, dlse, answer


def run(name, schedules=(), **runtime):
    """Raises what is wrong with the kernels on a case; ``runtime`` are attributes of the HostRuntime.

    Args:
        schedules: options of ``emulated.launch``; those of the kind, if there are none.
    """
    case = CASES[name]
    kind = KINDS[case.kind]
    limits = SMALL_L2 if case.l2 else kind.gpu
    backends = (
        EmulatedBackend(dict(kind.tiles), limits_=limits, options=options, **runtime)
        for options in schedules or kind.schedules
    )
    run_on(backends, name)


def assert_split_weights_close(problem, q, k, v, out, lse, answer):
    """For values of which one is so large that its weights decide, which are too few to compare with naive errors.

    A score is off by 2^-22 of the sum of its products' sizes, and a weight by twice that: in its own score and in the
    sum of all. Exponentials, sums and the product with v take 2^-20 at most.
    """
    expected, expected_lse = answer.forward
    assert_same_strangeness(out, expected, "out")
    assert_lse_close(lse, expected_lse)
    Q, K = (np.abs(x.astype(np.float64)) for x in (q, np.repeat(k, problem.group, axis=2)))
    sizes = abs(problem.scale) * np.einsum("bihd,bjhd->bihj", Q, K).max(axis=-1, keepdims=True)
    allowed = (2.0**-21 * sizes + 2.0**-20) * reference_forward(problem, q, k, np.abs(v))[0]
    error = np.abs(out - expected)
    assert (error <= allowed).all(), f"out is off by {error.max():.3g}, allowed is {allowed.max():.3g}"


def assert_split_dq_close(problem, q, k, v, dout, dq, answer):
    """The same of dQ, where one key is so large that its dS decides.

    With weights off as above and dP by 2^-22 of the sum of its products' sizes, dS = P (dP - delta) is off by what that
    makes of P, of dP and of delta, the mean of dP; sums and the product with k take 2^-20 at most.
    """
    expected = answer.gradients[0]
    assert_same_strangeness(dq, expected, "dq")
    Q, dO = (by_head(x.astype(np.float64)) for x in (q, dout))
    K, V = (repeat_heads(problem, by_head(x.astype(np.float64))) for x in (k, v))
    P, _ = softmax(np.where(visible_pairs(problem), problem.scale * (Q @ K.swapaxes(-1, -2)), -np.inf))
    dP, sizes = dO @ V.swapaxes(-1, -2), np.abs(dO) @ np.abs(V).swapaxes(-1, -2)
    difference = np.abs(dP - (P * dP).sum(axis=-1, keepdims=True))
    scores = abs(problem.scale) * (np.abs(Q) @ np.abs(K).swapaxes(-1, -2)).max(axis=-1, keepdims=True)
    of_weights = 2.0**-21 * scores + 2.0**-20
    of_delta = (2.0**-22 + of_weights) * (P * sizes).sum(axis=-1, keepdims=True)
    of_dS = P * ((of_weights + 2.0**-20) * difference + 2.0**-22 * sizes + of_delta)
    allowed = abs(problem.scale) * (of_dS @ np.abs(K)).swapaxes(1, 2)
    error = np.abs(dq - expected)
    assert (error <= allowed).all(), f"dq is off by {error.max():.3g}, allowed is {allowed.max():.3g}"


def assert_others_keep_their_bits(backend, problem, arrays, results, right):
    """What, in float64, does not depend on the numbers that are not finite, does not in the kernels either.

    Without a mask that is only said of the forward, of queries beside one with a NaN.

    Args:
        arrays: q, k, v and dout.
        results, right: out, lse, dq, dk and dv of the kernels, and those in float64.
    """
    q, k, v, dout = (np.where(np.isfinite(x), x, np.float32(0)) for x in arrays)
    out, lse = backend.forward(problem, q, k, v)
    clean = (out, lse, *backend.backward(problem, dout, q, k, v, out, lse))
    answer = Answer.of(problem, q, k, v, dout)
    for n, what in enumerate(("out", "lse", "dq", "dk", "dv")):
        same = right[n] == (*answer.forward, *answer.gradients)[n]
        assert same.any() or what not in ("out", "lse")
        ordered = what != "dq" or problem.deterministic  # else blocks add to it in any order
        if n < 2 or (problem.is_masked and ordered):
            assert_bitwise(results[n][same], clean[n][same], what)


def run_on(backends, name):
    """The case on each of these backends, which agree in every bit."""
    case = CASES[name]
    problem, q, k, v, dout, dlse, answer = prepared(name)
    first = None
    for backend in backends:
        backend.max_head_dim = backend.max_scores = None
        backend.output = OUTPUTS.get(case.layout, Guarded)
        out, lse = backend.forward(problem, q, k, v)
        few = case.kind.startswith("split") and case.numbers == "largest"
        if few:
            assert_split_weights_close(problem, q, k, v, out, lse, answer)
        else:
            answer.assert_forward_close(out, lse)
        if case.options.endswith("diagonal"):  # a lone key weighs exactly 1
            assert_lone_value(out, np.repeat(v, problem.group, axis=2), backend.splits(problem))
        results = [out, lse]
        if case.gradients:
            if case.numbers == "steep":  # as another kernel may have rounded it; still no weight is above 1
                lse = np.nextafter(np.nextafter(lse, np.float32(0)), np.float32(0))
            gradients = backend.backward(problem, dout, q, k, v, out, lse, dlse)
            if few:
                assert_split_dq_close(problem, q, k, v, dout, gradients[0], answer)
            answer.assert_gradients_close(gradients, tuple(x for x in case.gradients if x != "dq" or not few))
            if case.kind.startswith("split") and case.numbers in ("normal", "biased") and min(case.shape[:2]) > 1:
                # A tensor core rounds towards zero: in gradients, sums of one sign have errors that do not average.
                answer.assert_precise(out, gradients if case.numbers == "normal" else ())
            hidden = case.numbers in HIDDEN and (problem.is_masked or case.numbers == "hidden query")
            if case.kind.startswith("split") and hidden and first is None:
                right = (*answer.forward, *answer.gradients)
                assert_others_keep_their_bits(backend, problem, (q, k, v, dout), (out, lse, *gradients), right)
            if problem.deterministic:
                results += gradients
        first = first or results
        for got, expected in zip(results, first, strict=True):
            assert_bitwise(got, expected)
