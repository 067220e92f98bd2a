// LSE and delta of the rows of a query tile, as one warp brings them to the consumers.
#pragma once
#include "platform/thread.cuh"
#include "probability.cuh"
#include "tensor_params.cuh"
#include "traits.cuh"

// What is unusual about the rows of a tile.
constexpr u32 kPrecise = 1;    // exponents are computed the precise way: LSE is large, or FoldedRows cannot hold it
constexpr u32 kNonfinite = 2;  // NaN or infinity in a row's LSE or delta, as NaN or infinity in its q or dO makes them
constexpr u32 kRareBits = 2;   // of these; FoldedRows has the head above them

/// Those of one tile, in the registers of the warp. Rows beyond the last query are hidden later.
struct QueryRows {
    static constexpr u32 kRows = (kBr + 31) / 32;  // of a lane

    float lse[kRows], delta[kRows];
    bool fused = true, finite = true;

    DEVICE QueryRows(const BackwardTensorParams& params, i32 batch, i32 head, i32 first_query) {
        const i64 row = (static_cast<i64>(batch) * params.num_heads + head) * params.seqlen_q;
#pragma unroll
        for (u32 m = 0; m < kRows; ++m) {
            const i32 query = first_query + static_cast<i32>(32 * m + lane_index());
            const bool valid = query < params.seqlen_q && (kBr % 32 == 0 || 32 * m + lane_index() < kBr);
            lse[m] = valid ? params.lse[row + query] : infinity();
            delta[m] = valid ? params.delta[row + query] : 0.0f;
            finite &= !valid || (is_finite(lse[m]) && is_finite(delta[m]));
            lse[m] = backward_lse(lse[m]);
            fused &= fuses(lse[m]);
        }
        fused = !warp_any(!fused);
        finite = !warp_any(!finite);
    }

    /// What is unusual about them.
    DEVICE u32 rare() const { return (fused ? 0 : kPrecise) | (finite ? 0 : kNonfinite); }

    /// LSE as the exponents want it.
    DEVICE void store(float* lse_to, float* delta_to) const {
#pragma unroll
        for (u32 m = 0; m < kRows; ++m)
            if (const u32 row = 32 * m + lane_index(); kBr % 32 == 0 || row < kBr) {
                lse_to[row] = fused ? lse[m] * kLog2e : lse[m];
                delta_to[row] = delta[m];
            }
    }
};
