// P recomputed from a score and the row's LSE, as the backward does: P = exp(score - LSE).
#pragma once
#include "platform/math.cuh"
#include "softmax.cuh"
#include "traits.cuh"

/// The LSE as the backward uses it: a row that saw nothing (-inf) gets +inf, so that all its P become 0.
DEVICE float backward_lse(float lse) { return lse == -infinity() ? infinity() : lse; }

/// May exp(score - lse) be one fused multiply-add? See kFusedExponentLimit.
DEVICE bool fuses(float lse) { return !(absolute(lse) > kFusedExponentLimit * kLn2) || lse == infinity(); }

/// kFused: one multiply-add and one exponential. Else the score is rounded as the forward rounded the row's maximum, so
/// that a lone key gets exactly P = 1 however large its score, and P never passes 1.
template <bool kFused>
DEVICE float probability(float score, float unit, float lse) {
    if constexpr (kFused)
        return exp2_approx(multiply_add(score, unit * kLog2e, -lse * kLog2e));
    const float exponent = (multiply_rounded(score, unit) - lse) * kLog2e;
    return exp2_approx(exponent > 0.0f ? 0.0f : exponent);
}

// fp16 ends at 65504, and dS may pass it: such tiles are rounded and multiplied divided by 2^24, a power of two above any
// possible |dS| / 65504 with head dims up to 256 (|dP| <= 256 * 65504^2 < 2^40). A dLSE beyond 2^40 makes gradients that fp16
// cannot hold in any case.
constexpr bool kMayOverflow = CF_ELEMENT_MAX < 1e5f;
constexpr float kOverflowAbove = 32768.0f;
constexpr float kShrinkFactor = 1.0f / (1 << 24);

DEVICE bool overflows(float ds) { return kMayOverflow && is_finite(ds) && absolute(ds) > kOverflowAbove; }
