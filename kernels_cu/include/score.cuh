// From a raw product q . k to the score that the softmax sees, and back for the gradient. Order: scale, softcap, mask.
#pragma once
#include "platform/math.cuh"
#include "traits.cuh"

// 0: a positive scale, folded into the exponent; scores stay raw products.   1: any finite scale, multiplied first.
// 2: scaled, then capped: cap tanh(scale q.k / cap).
constexpr u32 kScoreKind = CF_SCORE;

struct Score {
    float scale, softcap;

    template <typename Params>
    DEVICE static Score of(const Params& params) {
        return {params.scale, params.softcap};
    }

    /// The score of a raw product, in units of `unit()`.
    DEVICE float operator()(float product) const {
        if constexpr (kScoreKind == 0)
            return product;
        const float scaled = multiply_rounded(product, scale);
        // Far below the cap tanh x is x to the last bit, where x itself may be too small for a normal number.
        if (kScoreKind == 1 || absolute(scaled) < softcap * 0x1p-12f)
            return scaled;
        return softcap * tanh_accurate(scaled / softcap);
    }

    /// One score is worth this much in natural logarithms ...
    DEVICE float unit() const { return kScoreKind == 0 ? scale : 1.0f; }
    /// ... and d score / d (scale product): 1, or for a capped score 1 - tanh^2.
    DEVICE float slope(float score) const {
        if constexpr (kScoreKind != 2)
            return 1.0f;
        const float t = score / softcap;
        return 1.0f - t * t;
    }
};
