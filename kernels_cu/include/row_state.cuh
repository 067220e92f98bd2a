// Online softmax (FlashAttention-2, Algorithm 1) over the rows of one warpgroup's score tile, with two ways to go on.
//
// exact:  the reference m of a row is the maximum of all scores seen; each tile may raise it and rescale l and O.
// stale:  m stays what it was. exp(s - m) may then exceed 1; bfloat16 has the exponents of float32, float16 goes up to
//         65,504, so that weights keep their relative precision. A row whose scores rise far beyond its first ones
//         overflows; it shows in l or O, and the tile is computed again the exact way.
//
// The exact way makes the largest weight of a row 1, which rounding does not change. The stale way rounds it like any other,
// and where few weights make up a row their rounding would be the error of the row. So O is divided by the sum of the
// weights as they were rounded (l + rounding), which cancels that; only of tiles that weigh enough it is worth adding up.
#pragma once
#include "platform/math.cuh"
#include "platform/thread.cuh"
#include "softmax.cuh"
#include "warpgroup_tile.cuh"

// 2/3 of a lane's sum: against float64 the error is then at most 1.1 times that of the exact way for needles and for scores
// of a standard deviation from 4 on, and 1.17 times in between; 1/2 costs a second tile of every row and gains 0.02.
constexpr float kHeavy = 0.667f;

struct RowState {
    float m[2];         // reference of this lane's two rows, in units of the scores
    float l[2];         // this lane's part of the sum of exp(s - m)
    float last[2];      // what the last tile, if it was stale, added to l
    float rounding[2];  // by how much the sum of the rounded weights is more than l, as far as it matters
    float to_log2;      // log2 e times what one unit of the scores is worth

    DEVICE explicit RowState(float unit)
        : m{-infinity(), -infinity()}, l{}, last{}, rounding{}, to_log2(unit * kLog2e) {}

    /// The exact way: m becomes the maximum with S, S becomes P = exp(S - m), summed into l. factor: by how much O
    /// shrinks. exact: exponents too large for one multiply-add per weight (see kFusedExponentLimit) are computed in two
    /// steps; else they are left to `trustworthy`.
    template <u32 kCols>
    DEVICE void update(WarpgroupTile<kCols>& S, float (&factor)[2], bool exact) {
        bool large = false;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float row_maximum = maximum(m[half], over_row(highest(S, half), maximum));
            const float before = m[half];
            m[half] = row_maximum;
            factor[half] = exp2_approx((before - reference(half)) * to_log2);
            l[half] *= factor[half];
            rounding[half] *= factor[half];
            large |= absolute(reference(half) * to_log2) > kFusedExponentLimit;
        }
        last[0] = last[1] = 0.0f;
        float sum[2];
        if (exact && warp_any(large))
            exponentiate<false>(S, sum);
        else
            exponentiate<true>(S, sum);
        l[0] += sum[0];
        l[1] += sum[1];
    }

    /// The stale way: S becomes P = exp(S - m), summed into l.
    template <u32 kCols>
    DEVICE void update_stale(WarpgroupTile<kCols>& S) {
        exponentiate<true>(S, last);
        l[0] += last[0];
        l[1] += last[1];
    }

    /// Whether the last tile is most of what some lane of the warp has seen of a row. (A single weight has to be a third
    /// of the row for that.)
    DEVICE bool heavy() const { return warp_any(last[0] > kHeavy * l[0] || last[1] > kHeavy * l[1]); }

    /// Accounts for the rounding of the last tile's weights; called while they are there, if the tile is heavy.
    template <typename T, u32 kCols>
    DEVICE void account_for_rounding(const WarpgroupOperand<T, kCols>& P) {
        float sum[2] = {};
#pragma unroll
        for (u32 i = 0; i < kCols / 4; ++i) {
            sum[i % 2] += to_float(T{static_cast<u16>(P.x[i])});
            sum[i % 2] += to_float(T{static_cast<u16>(P.x[i] >> 16)});
        }
        rounding[0] += sum[0] - last[0];
        rounding[1] += sum[1] - last[1];
    }

    /// Sums l over the lanes of a row. Afterwards: what O is to be multiplied by (0 for a row without any weight).
    DEVICE void finish(float (&factor)[2]) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            l[half] = over_row(l[half], add);
            rounding[half] = over_row(rounding[half], add);
            factor[half] = l[half] == 0.0f ? 0.0f : 1.0f / (l[half] + rounding[half]);
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

    DEVICE static float add(float a, float b) { return a + b; }

    /// A reduction over the four lanes of a row.
    template <typename Combine>
    DEVICE static float over_row(float value, Combine combine) {
        value = combine(value, shuffle_xor(value, 1));
        return combine(value, shuffle_xor(value, 2));
    }

    /// A row that has seen nothing but -inf keeps m = -inf; any finite reference then gives P = 0.
    DEVICE float reference(u32 half) const { return m[half] == -infinity() ? 0.0f : m[half]; }
};
