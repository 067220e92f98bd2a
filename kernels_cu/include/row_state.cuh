// Online softmax (FlashAttention-2, Algorithm 1) over the rows of one warpgroup's score tile, with two ways to go on.
//
// exact:  the reference m of a row is the maximum of all scores seen; each tile may raise it and rescale l and O.
// stale:  m stays what it was. exp(s - m) may then exceed 1; bfloat16 has the exponents of float32, float16 goes up to
//         65,504, so that weights keep their relative precision. Only a weight that outweighs the row's sum so far makes m
//         follow (see rebase). A row whose scores rise too fast even for that overflows; it shows in l or O, and the tile
//         is computed again the exact way.
#pragma once
#include "platform/math.cuh"
#include "platform/thread.cuh"
#include "softmax.cuh"
#include "warpgroup_tile.cuh"

struct RowState {
    float m[2];     // reference of this lane's two rows, in units of the scores
    float l[2];     // this lane's part of the sum of exp(s - m)
    float to_log2;  // log2 e times what one unit of the scores is worth

    DEVICE explicit RowState(float unit) : m{-infinity(), -infinity()}, l{0.0f, 0.0f}, to_log2(unit * kLog2e) {}

    /// The exact way: m becomes the maximum with S, S becomes P = exp(S - m), summed into l. factor: by how much O
    /// shrinks. fused: one multiply-add per weight (see kFusedExponentLimit).
    template <u32 kCols>
    DEVICE void update(WarpgroupTile<kCols>& S, float (&factor)[2], bool fused) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float row_maximum = maximum(m[half], over_row(highest(S, half), maximum));
            const float before = m[half];
            m[half] = row_maximum;
            factor[half] = exp2_approx((before - reference(half)) * to_log2);
            l[half] *= factor[half];
        }
        float sum[2];
        if (fused)
            exponentiate<true>(S, sum);
        else
            exponentiate<false>(S, sum);
        l[0] += sum[0];
        l[1] += sum[1];
    }

    /// The stale way: P = exp(S - m), rounded for the next product, summed into l. O may be rescaled.
    template <typename T, u32 kCols, u32 kColsO>
    DEVICE void update_stale(WarpgroupTile<kCols>& S, WarpgroupOperand<T, kCols>& P, WarpgroupTile<kColsO>& O) {
        float sum[2];
        exponentiate<true>(S, sum);
        P.round(S);
        // A lane has a quarter of a row's sum. With scores of like size only the second tile comes near this.
        if (CF_CHECK && warp_any(sum[0] > CF_BETA * l[0] || sum[1] > CF_BETA * l[1])) {
            rebase(S, O, sum);
            P.round(S);
        }
        l[0] += sum[0];
        l[1] += sum[1];
    }

    /// Sums l over the lanes of a row. Afterwards: what O is to be multiplied by (0 for a row without any weight).
    DEVICE void finish(float (&factor)[2]) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            l[half] = over_row(l[half], [](float a, float b) { return a + b; });
            factor[half] = l[half] == 0.0f ? 0.0f : 1.0f / l[half];
        }
    }

    /// Whether fused multiply-adds were precise enough and l, after finish, has room to be divided by.
    DEVICE bool trustworthy() const {
        bool good = true;
#pragma unroll
        for (u32 half = 0; half < 2; ++half)
            good &= l[half] < 0x1p100f && absolute(reference(half) * to_log2) <= kFusedExponentLimit;
        return good;
    }

    /// log sum exp of a row, natural logarithm, after finish. Empty: -inf.
    DEVICE float log_sum_exp(u32 half) const {
        return l[half] == 0.0f ? -infinity() : multiply_rounded(m[half], to_log2 * kLn2) + log2_approx(l[half]) * kLn2;
    }

  private:
    /// Moves m to the score of a weight that is more than a quarter of the row's sum so far. That weight becomes 1, and
    /// is not rounded: else the rounding of a few large weights would be all of the error of a row. (The exact way has
    /// that for free.) S holds weights, sum their sums.
    template <u32 kCols, u32 kColsO>
    DEVICE void rebase(WarpgroupTile<kCols>& S, WarpgroupTile<kColsO>& O, float (&sum)[2]) {
        float factor[2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float weight = over_row(highest(S, half), maximum);
            const float so_far = over_row(l[half], [](float a, float b) { return a + b; });
            const float rise = weight > 0.25f * so_far ? log2_approx(weight) : 0.0f;
            m[half] = reference(half) + rise / to_log2;
            factor[half] = exp2_approx(-rise);
            l[half] *= factor[half];
            sum[half] *= factor[half];
        }
        S.multiply(factor);
        O.multiply(factor);
    }

    /// S becomes exp(S - m); sum: this lane's part of the sums.
    template <bool kFused, u32 kCols>
    DEVICE void exponentiate(WarpgroupTile<kCols>& S, float (&sum)[2]) const {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float shift = -reference(half) * to_log2;
            float part[2] = {};
#pragma unroll
            for (u32 n = 0; n < S.kPairs; ++n)
#pragma unroll
                for (u32 odd = 0; odd < 2; ++odd) {
                    float& s = S.at(n, half, odd);
                    s = exp2_approx(kFused ? multiply_add(s, to_log2, shift) : (s - reference(half)) * to_log2);
                    part[odd] += s;
                }
            sum[half] = part[0] + part[1];
        }
    }

    /// The highest of this lane's elements in a row.
    template <u32 kCols>
    DEVICE static float highest(const WarpgroupTile<kCols>& S, u32 half) {
        float part[2] = {-infinity(), -infinity()};  // two chains: a maximum waits for the one before it
#pragma unroll
        for (u32 n = 0; n < S.kPairs; ++n)
            part[n % 2] = maximum(part[n % 2], maximum(S.at(n, half, 0), S.at(n, half, 1)));
        return maximum(part[0], part[1]);
    }

    /// A reduction over the four lanes of a row.
    template <typename Combine>
    DEVICE static float over_row(float value, Combine combine) {
        value = combine(value, shuffle_xor(value, 1));
        return combine(value, shuffle_xor(value, 2));
    }

    /// A row that has seen nothing but -inf keeps m = -inf; any finite reference then gives P = 0.
    DEVICE float reference(u32 half) const { return m[half] == -infinity() ? 0.0f : m[half]; }
};
