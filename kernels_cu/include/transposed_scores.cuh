// S^T and dP^T of a tile of keys and a tile of queries: how the warps of a backward share them, and what becomes of them.
#pragma once
#include "band.cuh"
#include "hidden.cuh"
#include "params.cuh"
#include "platform/cp_async.cuh"
#include "probability.cuh"
#include "score.cuh"
#include "traits.cuh"
#include "warp_gemm.cuh"

// How the warps split the rows and columns of each product.
constexpr u32 kWarpsScoreQ = CF_WARPS_SCORE_Q;       // S^T, dP^T: over queries ...
constexpr u32 kWarpsScoreK = kWarps / kWarpsScoreQ;  // ... and keys
constexpr u32 kWarpsGradD = CF_WARPS_GRAD_D;         // dK, dV: over head dims ...
constexpr u32 kWarpsGradK = kWarps / kWarpsGradD;    // ... and keys

constexpr u32 kScoreM = kBc / (16 * kWarpsScoreK), kScoreN = kBr / (8 * kWarpsScoreQ);
constexpr u32 kGradM = kBc / (16 * kWarpsGradK);
constexpr u32 kGradN = kD / (8 * kWarpsGradD), kGradNV = kDv / (8 * kWarpsGradD);

using ScoreTile = Accumulator<kScoreM, kScoreN>;
using WeightTile = SharedTile<Element, kBc, kBr>;  // P^T or dS^T

/// Starts copying LSE and delta of a query tile's rows; those beyond the last query become 0.
DEVICE void load_rows(const BackwardParams& params, float (&lse)[kBr], float (&delta)[kBr], i32 batch, i32 head,
                      i32 first_query) {
    const i64 row = (static_cast<i64>(batch) * params.num_heads + head) * params.seqlen_q + first_query;
    for (u32 n = thread_index(); n < kBr; n += kThreads) {
        const bool valid = first_query + static_cast<i32>(n) < params.seqlen_q;
        copy_async<4>(&lse[n], params.lse + (valid ? row + n : 0), valid);
        copy_async<4>(&delta[n], params.delta + (valid ? row + n : 0), valid);
    }
}

/// S^T becomes P^T and dP^T becomes dS^T, in registers.
template <bool kFused>
DEVICE void differentiate(ScoreTile& S, ScoreTile& dP, const Score& score, const float* lse, const float* delta) {
#pragma unroll
    for (u32 n = 0; n < kScoreN; ++n)
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            const u32 query = S.col(n, odd);
            const float row_lse = backward_lse(lse[query]), row_delta = delta[query];
#pragma unroll
            for (u32 m = 0; m < kScoreM; ++m)
#pragma unroll
                for (u32 e = odd; e < 4; e += 2) {
                    const float s = score(S.x[m][n][e]);
                    const float p = probability<kFused>(s, score.unit(), row_lse);
                    S.x[m][n][e] = p;
                    dP.x[m][n][e] = p * (dP.x[m][n][e] - row_delta) * score.slope(s);
                }
        }
}

/// The same, precise enough for any LSE; the warp's lanes go one way.
DEVICE void differentiate(ScoreTile& S, ScoreTile& dP, const Score& score, const float* lse, const float* delta) {
    bool fused = true;
#pragma unroll
    for (u32 n = 0; n < kScoreN; ++n)
        fused &= fuses(lse[S.col(n, 0)]) && fuses(lse[S.col(n, 1)]);
    if (warp_any(!fused))
        differentiate<false>(S, dP, score, lse, delta);
    else
        differentiate<true>(S, dP, score, lse, delta);
}

/// Clears P and dS of pairs that do not see each other.
DEVICE void hide(ScoreTile& P, ScoreTile& dS, const Band& band, i32 first_query, i32 first_key) {
#pragma unroll
    for (u32 m = 0; m < kScoreM; ++m)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            // Relative to this lane's first column, so that the comparisons below are with constants.
            const i32 origin = first_query + static_cast<i32>(P.col(0, 0));
            const Range queries =
                band.queries_of(static_cast<i32>(opaque(first_key)) + static_cast<i32>(P.row(m, 2 * half)));
            const i32 first = queries.first - origin, end = queries.end - origin;
#pragma unroll
            for (u32 n = 0; n < kScoreN; ++n)
#pragma unroll
                for (u32 e = 2 * half; e < 2 * half + 2; ++e) {
                    const i32 col = static_cast<i32>(8 * n + e % 2);
                    if ((kBandLast && col < first) || col >= end) {
                        P.x[m][n][e] = 0.0f;
                        dS.x[m][n][e] = 0.0f;
                    }
                }
        }
}

/// Puts what was visible of the cleaned queries of one head into dK and dV of keys; all threads of the block, with a barrier
/// before and after.
template <typename TileK, typename TileV>
DEVICE void restore_key_gradients(const BackwardParams& params, TileK& dK, TileV& dV, i32 batch, i32 head,
                                  const Range& keys, const Band& band) {
    const Range queries = {0, params.seqlen_q};
    auto keys_of = [&](i32 query) { return band.keys_of(query).from(keys.first); };
    restore_nonfinite<kHeadDim, true>(dK, params.q + batch * params.q_batch_stride + head * params.q_head_stride,
                                      params.q_row_stride, queries, keys_of);
    restore_nonfinite<kHeadDimV>(dV, params.dout + batch * params.dout_batch_stride + head * params.dout_head_stride,
                                 params.dout_row_stride, queries, keys_of);
}
