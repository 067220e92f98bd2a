// P^T and dS^T of one warpgroup, 64 keys by kBr queries: from products to operands.
#pragma once
#include "band.cuh"
#include "probability.cuh"
#include "score.cuh"
#include "traits.cuh"
#include "warpgroup_tile.cuh"

using Scores = WarpgroupTile<kBr>;
using Weights = WarpgroupOperand<Element, kBr>;

DEVICE Range queries_of(i32 first_query) { return {first_query, first_query + static_cast<i32>(kBr)}; }

/// Clears P or dS of pairs that do not see each other, whatever has become of them. keys: the warpgroup's.
DEVICE void hide(Weights& weights, const Band& band, const Range& keys, i32 first_query) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        // Relative to this lane's first column, so that the comparisons below are with constants.
        const i32 origin = first_query + static_cast<i32>(Scores::col(0));
        const Range queries = band.queries_of(keys.first + static_cast<i32>(Scores::row(half))).from(origin);
#pragma unroll
        for (u32 n = 0; n < Scores::kPairs; ++n)
#pragma unroll
            for (u32 odd = 0; odd < 2; ++odd) {
                const i32 col = static_cast<i32>(8 * n + odd);
                if ((kBandLast && col < queries.first) || col >= queries.end)
                    weights.x[2 * n + half] &= odd == 0 ? 0xffff0000u : 0xffffu;
            }
    }
}

/// S becomes P = exp(S - LSE), times the slope of a capped score; P: as dV takes it. lse: of the tile's queries.
/// then(n): what happens as soon as pairs n of both rows are there. It may write to shared memory, which the compiler does not
/// reorder: LSE is read kAhead pairs ahead.
template <bool kFused, u32 kAhead = 2, typename Then>
DEVICE void exponentiate(Scores& S, Weights& P, const Score& score, const float* lse, Then then) {
    const float to_log2 = score.unit() * kLog2e;
    lse += S.col(0);
    float2 row_lse[Scores::kPairs];
#pragma unroll
    for (u32 n = 0; n < S.kPairs; ++n) {
#pragma unroll
        for (u32 m = n == 0 ? 0 : n + kAhead; m <= n + kAhead && m < S.kPairs; ++m)
            row_lse[m] = *reinterpret_cast<const float2*>(lse + 8 * m);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            float p[2];
#pragma unroll
            for (u32 odd = 0; odd < 2; ++odd) {
                float& s = S.at(n, half, odd);
                const float of = odd == 0 ? row_lse[n].x : row_lse[n].y;
                p[odd] = kFused ? exp2_approx(multiply_add(s, to_log2, -of)) : probability<false>(s, score.unit(), of);
                s = p[odd] * score.slope(s);
            }
            P.x[2 * n + half] = pack<Element>(p[0], p[1]);
        }
        then(n);
    }
}
template <bool kFused>
DEVICE void exponentiate(Scores& S, Weights& P, const Score& score, const float* lse) {
    exponentiate<kFused, 0>(S, P, score, lse, [](u32) {});
}
/// The same where LSE has been subtracted from S, in its units, and no score is capped.
DEVICE void exponentiate_differences(Scores& S, Weights& P, const Score& score) {
    const float to_log2 = score.unit() * kLog2e;
    S.each([&](float& s) { s = exp2_approx(s * to_log2); });
    P.round(S);
}

/// Has rounding made a number infinite? Nearly always one instruction per pair tells that it has not.
DEVICE bool overflown(const Weights& rounded, const Scores& tile) {
    u32 mark = 0;
#pragma unroll
    for (u32 n = 0; n < kBr / 4; ++n)
        mark = mark_nonfinite(mark, rounded.x[n]);
    bool found = false;
    if (mark != 0)
#pragma unroll
        for (u32 n = 0; n < kBr / 2; ++n)
            found |= (rounded.x[n / 2] >> 16 * (n % 2) & 0x7fffu) == 0x7c00u && is_finite(tile.x[n]);
    return found;
}
