// The mask on a score tile whose rows are queries.
#pragma once
#include "band.cuh"
#include "traits.cuh"
#include "warp_gemm.cuh"

/// Hides the scores of keys that a query may not see.
template <u32 kM>
DEVICE void mask_scores(Accumulator<kM, kBc / 8>& S, const Band& band, i32 first_query, i32 first_key) {
#pragma unroll
    for (u32 m = 0; m < kM; ++m)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            // Relative to this lane's first column, so that the comparisons below are with constants.
            const i32 origin = first_key + static_cast<i32>(S.col(0, 0));
            const Range keys =
                band.keys_of(static_cast<i32>(opaque(first_query)) + static_cast<i32>(S.row(m, 2 * half)));
            const i32 first = keys.first - origin, end = keys.end - origin;
#pragma unroll
            for (u32 n = 0; n < kBc / 8; ++n)
#pragma unroll
                for (u32 odd = 0; odd < 2; ++odd) {
                    const i32 col = static_cast<i32>(8 * n + odd);
                    if ((kBandFirst && col < first) || col >= end)
                        S.x[m][n][2 * half + odd] = -infinity();
                }
        }
}
