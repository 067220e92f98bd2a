// LSE and delta of the rows of a query tile, as one warp brings them to the consumers.
#pragma once
#include "key_block.cuh"
#include "platform/thread.cuh"
#include "probability.cuh"
#include "traits.cuh"

// What is unusual about the rows of a tile.
constexpr u32 kPrecise = 1;    // an LSE so large that exponents are computed the precise way
constexpr u32 kNonfinite = 2;  // NaN or infinity in a row's LSE or delta, as NaN or infinity in its q or dO makes them

/// Those of one tile, in the registers of the warp. Rows beyond the last query are hidden later.
struct QueryRows {
    static constexpr u32 kRows = (kBr + 31) / 32;  // of a lane

    float lse[kRows], delta[kRows];
    u32 rare;

    DEVICE QueryRows(const BackwardTensorParams& params, const Work& work, const Walk& walk) {
        const i64 head = (static_cast<i64>(work.batch) * params.num_heads + walk.head) * params.seqlen_q;
        bool fused = true, finite = true;
#pragma unroll
        for (u32 m = 0; m < kRows; ++m) {
            const i32 query = walk.first_query() + static_cast<i32>(32 * m + lane_index());
            const bool valid = query < params.seqlen_q && (kBr % 32 == 0 || 32 * m + lane_index() < kBr);
            lse[m] = valid ? params.lse[head + query] : infinity();
            delta[m] = valid ? params.delta[head + query] : 0.0f;
            finite &= !valid || (is_finite(lse[m]) && is_finite(delta[m]));
            lse[m] = backward_lse(lse[m]);
            fused &= fuses(lse[m]);
        }
        fused = !warp_any(!fused);
        finite = !warp_any(!finite);
        if (fused)
#pragma unroll
            for (u32 m = 0; m < kRows; ++m)
                lse[m] *= kLog2e;  // as the exponents want it
        rare = (fused ? 0 : kPrecise) | (finite ? 0 : kNonfinite);
    }

    DEVICE static void store(float* to, const float (&rows)[kRows]) {
#pragma unroll
        for (u32 m = 0; m < kRows; ++m)
            if (const u32 row = 32 * m + lane_index(); kBr % 32 == 0 || row < kBr)
                to[row] = rows[m];
    }
};
