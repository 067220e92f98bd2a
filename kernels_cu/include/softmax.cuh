// Online softmax (FlashAttention-2, Algorithm 1) over the rows of one warp's score tile.
#pragma once
#include "platform/math.cuh"
#include "platform/thread.cuh"

// Up to this exponent, in powers of two, s c - m c may be one fused multiply-add with a rounded m c: the rounding moves all
// weights of a row alike and by less than 2^-12. Beyond it the difference s - m is taken first, or the rounding alone
// could overflow.
constexpr float kFusedExponentLimit = 4096.0f;

/// m and l of the rows this lane holds: [fragment][row in it], as in the tiles S and O. m is in units of the scores, l is
/// this lane's part. kMayFuse: weights go into a 16-bit product, where the rounding of m c is not seen; in float32 it would
/// be, as a lone key's weight that is not exactly 1.
template <u32 kM, u32 kFragmentRows = 2, bool kMayFuse = true>
struct SoftmaxState {
    float m[kM][kFragmentRows];
    float l[kM][kFragmentRows];
    float unit;  // natural logarithms per score

    DEVICE explicit SoftmaxState(float unit_) : unit(unit_) {
#pragma unroll
        for (u32 i = 0; i < kM; ++i)
            for (u32 half = 0; half < kFragmentRows; ++half) {
                m[i][half] = -infinity();
                l[i][half] = 0.0f;
            }
    }

    /// S becomes P = exp(S - m); O and l are rescaled to the new m.
    template <typename ScoreTile, typename OutputTile>
    DEVICE void update(ScoreTile& S, OutputTile& O) {
        const float to_log2 = unit * kLog2e;
        float reference[kM][kFragmentRows];
        bool moved = false, large = false;
#pragma unroll
        for (u32 i = 0; i < kM; ++i)
#pragma unroll
            for (u32 half = 0; half < kFragmentRows; ++half) {
                float row_maximum = m[i][half];
#pragma unroll
                for (u32 n = 0; n < ScoreTile::kN; ++n)
                    row_maximum = maximum(row_maximum, S.fragment_maximum(i, n, half));
                row_maximum = ScoreTile::row_maximum(row_maximum);
                moved |= row_maximum != m[i][half];
                // A row that has seen nothing but -inf keeps m = -inf; any finite reference then gives P = 0.
                reference[i][half] = row_maximum == -infinity() ? 0.0f : row_maximum;
                large |= absolute(reference[i][half] * to_log2) > kFusedExponentLimit;
                const float rescale = exp2_approx((m[i][half] - reference[i][half]) * to_log2);
                m[i][half] = row_maximum;
                l[i][half] *= rescale;
                scale_of_O[i][half] = rescale;
            }
        if (warp_any(moved))
            rescale(O);
        if (!kMayFuse || warp_any(large))
            exponentiate<false>(S, reference, to_log2);
        else
            exponentiate<true>(S, reference, to_log2);
    }

    /// Row sums over all lanes, and O divided by them. A row without any weight becomes 0; NaN stays.
    template <typename OutputTile>
    DEVICE void finish(OutputTile& O) {
#pragma unroll
        for (u32 i = 0; i < kM; ++i)
#pragma unroll
            for (u32 half = 0; half < kFragmentRows; ++half) {
                l[i][half] = OutputTile::row_sum(l[i][half]);
                scale_of_O[i][half] = l[i][half] == 0.0f ? 0.0f : 1.0f / l[i][half];
            }
        rescale(O);
    }

    /// log sum exp of a row, natural logarithm, after finish. Empty: -inf.
    DEVICE float log_sum_exp(u32 i, u32 half) const {
        return l[i][half] == 0.0f ? -infinity() : multiply_rounded(m[i][half], unit) + log2_approx(l[i][half]) * kLn2;
    }

  private:
    float scale_of_O[kM][kFragmentRows];

    template <typename OutputTile>
    DEVICE void rescale(OutputTile& O) {
#pragma unroll
        for (u32 i = 0; i < kM; ++i)
#pragma unroll
            for (u32 n = 0; n < OutputTile::kN; ++n)
#pragma unroll
                for (u32 e = 0; e < kFragmentRows * OutputTile::kFragmentCols; ++e)
                    O.x[i][n][e] *= scale_of_O[i][e / OutputTile::kFragmentCols];
    }

    template <bool kFused, typename ScoreTile>
    DEVICE void exponentiate(ScoreTile& S, const float (&reference)[kM][kFragmentRows], float to_log2) {
        constexpr u32 kCols = ScoreTile::kFragmentCols;
#pragma unroll
        for (u32 i = 0; i < kM; ++i)
#pragma unroll
            for (u32 half = 0; half < kFragmentRows; ++half) {
                const float shift = -reference[i][half] * to_log2;
                float sum = 0.0f;
#pragma unroll
                for (u32 n = 0; n < ScoreTile::kN; ++n)
#pragma unroll
                    for (u32 e = kCols * half; e < kCols * (half + 1); ++e) {
                        const float s = S.x[i][n][e];
                        const float p =
                            exp2_approx(kFused ? multiply_add(s, to_log2, shift) : (s - reference[i][half]) * to_log2);
                        S.x[i][n][e] = p;
                        sum += p;
                    }
                l[i][half] += sum;
            }
    }
};
