// dQ of the FlashAttention-2 backward in a fixed order: bitwise the same in every run (mma.sync, sm_75 and up).
//
// A block owns kBr query rows of one head and walks over the key tiles that they see, as the forward does:
//   S = Q K_j^T,  P = exp(S - LSE),  dP = dO V_j^T,  dS = P (dP - delta),  dQ += dS K_j
// Nothing is shared between blocks, so there is nothing to reduce; the price is that S and dP are computed twice, here and
// in backward_mma (seven products in place of five).
#include "params.cuh"
#include "band.cuh"
#include "copy_tile.cuh"
#include "hidden.cuh"
#include "probability.cuh"
#include "schedule.cuh"
#include "score.cuh"
#include "traits.cuh"
#include "warp_gemm.cuh"

constexpr u32 kM = kBr / (16 * kWarps);
static_assert(kM * 16 * kWarps == kBr, "each warp owns whole 16-row tiles");

using ScoreTile = Accumulator<kM, kBc / 8>;

struct SharedStorage {
    struct Operands {
        SharedTile<Element, kBr, kD> Q;
        SharedTile<Element, kBr, kDv> dO;
        SharedTile<Element, kBc, kD> K[kStages];
        SharedTile<Element, kBc, kDv> V[kStages];
    };
    union {
        Operands in;
        SharedTile<Element, kBr, kD> dQ;
    };
};

/// S becomes P and dP becomes dS, in registers; pairs that do not see each other get 0.
template <bool kFused>
DEVICE void differentiate(ScoreTile& S, ScoreTile& dP, const Score& score, const float (&lse)[kM][2],
                          const float (&delta)[kM][2]) {
#pragma unroll
    for (u32 m = 0; m < kM; ++m)
#pragma unroll
        for (u32 n = 0; n < kBc / 8; ++n)
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const float s = score(S.x[m][n][e]);
                const float p = probability<kFused>(s, score.unit(), lse[m][e / 2]);
                dP.x[m][n][e] = p * (dP.x[m][n][e] - delta[m][e / 2]) * score.slope(s);
            }
}

/// dQ of one block's rows. kRepair: by products that take every float32; careful: hidden non-finite values of K are kept out.
/// Returns whether dQ is finite.
template <bool kRepair>
DEVICE bool differentiate_rows(const BackwardParams& params, bool careful) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const QueryWork work(params);
    const i32 batch = work.batch, head = work.head;
    const Range queries = work.queries;
    const Element *k = work.k, *v = work.v;
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const Range tiles = band.key_tiles(queries);

    auto load_keys = [&](i32 j, u32 stage) {
        load_tile<kHeadDim>(shared.in.K[stage], k, params.k_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        load_tile<kHeadDimV>(shared.in.V[stage], v, params.v_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };
    load_tile<kHeadDim>(shared.in.Q, params.q + batch * params.q_batch_stride + head * params.q_head_stride,
                        params.q_row_stride, queries.first, params.seqlen_q);
    load_tile<kHeadDimV>(shared.in.dO, params.dout + batch * params.dout_batch_stride + head * params.dout_head_stride,
                         params.dout_row_stride, queries.first, params.seqlen_q);
    copy_async_commit();
    if (!tiles.empty())
        load_keys(tiles.end - 1, 0);

    const u32 warp_row = warp_index() * 16 * kM;
    const i32 first_query = queries.first + static_cast<i32>(warp_row);
    float lse[kM][2], delta[kM][2];
    bool fused = true;
#pragma unroll
    for (u32 m = 0; m < kM; ++m)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const i32 query = first_query + static_cast<i32>(ScoreTile::row(m, 2 * half));
            const bool exists = query < params.seqlen_q;
            const i64 at = (static_cast<i64>(batch) * params.num_heads + head) * params.seqlen_q + query;
            lse[m][half] = exists ? backward_lse(params.lse[at]) : infinity();
            delta[m][half] = exists ? params.delta[at] : 0.0f;
            fused &= fuses(lse[m][half]);
        }
    fused = !warp_any(!fused);

    SumTile<Element, kM, kD / 8> dQ;
    dQ.clear();
    u32 stage = 0;
#pragma unroll 1
    for (i32 j = tiles.end - 1; j >= tiles.first; --j) {
        const i32 first_key = j * static_cast<i32>(kBc);
        copy_async_wait<0>();
        block_sync();  // K_j and V_j have landed, and nobody reads those of the step before any more
        if (kStages > 1 && j > tiles.first)
            load_keys(j - 1, stage ^ 1);

        ScoreTile S, dP;
        S.clear();
        dP.clear();
        warp_gemm<Element, kD / kStepK<Element>, kRepair>(S, RowMajorA(shared.in.Q, warp_row),
                                                          ColumnMajorB(shared.in.K[stage], 0));
        warp_gemm<Element, kDv / kStepK<Element>, kRepair>(dP, RowMajorA(shared.in.dO, warp_row),
                                                           ColumnMajorB(shared.in.V[stage], 0));
        if (fused)
            differentiate<true>(S, dP, score, lse, delta);
        else
            differentiate<false>(S, dP, score, lse, delta);

        const bool masked = !band.all_visible(queries, {first_key, first_key + static_cast<i32>(kBc)});
        if (masked) {
#pragma unroll
            for (u32 m = 0; m < kM; ++m)
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const i32 origin = first_key + static_cast<i32>(dP.col(0, 0));
                    const Range keys = band.keys_of(first_query + static_cast<i32>(dP.row(m, 2 * half)));
                    const i32 first = keys.first - origin, end = keys.end - origin;
#pragma unroll
                    for (u32 n = 0; n < kBc / 8; ++n)
#pragma unroll
                        for (u32 odd = 0; odd < 2; ++odd) {
                            const i32 col = static_cast<i32>(8 * n + odd);
                            if ((kBandFirst && col < first) || col >= end)
                                dP.x[m][n][2 * half + odd] = 0.0f;
                        }
                }
        }
        if (kBand && careful && masked)
            clear_nonfinite(shared.in.K[stage]);

        bool shrink = false;
        if constexpr (kMayOverflow) {
            dP.each([&](float& ds) { shrink |= overflows(ds); });
            shrink = warp_any(shrink);
            if (shrink) {
                dP.multiply(kShrinkFactor);
                dQ.multiply(kShrinkFactor);
            }
        }
        warp_gemm<Element, kBc / kStepK<Element>, kRepair>(dQ, RegisterA<Element, kM, kBc / 8>(dP),
                                                           RowMajorB<Element, true, 1, kBc, kD>(shared.in.K[stage], 0));
        if (shrink)
            dQ.multiply(1.0f / kShrinkFactor);
        if (kStages == 1 && j > tiles.first) {
            block_sync();
            load_keys(j - 1, 0);
        }
        stage ^= kStages - 1;
    }
    copy_async_wait<0>();
    block_sync();  // nobody reads the tiles any more: dQ leaves through their space
    dQ.multiply(params.scale);
    const bool finite = !(kBand || kSplit) || !block_any(!dQ.all_finite());
    store_accumulator(shared.dQ, dQ, warp_row, 0);
    if (kBand && careful)
        restore_nonfinite<kHeadDim, true>(shared.dQ, k, params.k_row_stride, {0, params.seqlen_k},
                                          [&](i32 key) { return band.queries_of(key).from(queries.first); });
    block_sync();
    store_tile<kHeadDim>(shared.dQ, params.dq + batch * params.dq_batch_stride + head * params.dq_head_stride,
                         params.dq_row_stride, queries.first, params.seqlen_q);
    return finite;
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void backward_dq_mma(PARAMS(BackwardParams) params) {
    // As in the forward: a result that is not finite may be the fault of hidden data, or of a float32 that cannot be split, and
    // is computed once more with care.
    if constexpr (kSplit) {
        if (!differentiate_rows<false>(params, false)) {
            block_sync();  // the first run still reads shared memory
            differentiate_rows<true>(params, true);
        }
        return;
    }
    bool careful = false;
#pragma unroll 1
    while (!differentiate_rows<false>(params, careful) && !careful) {
        careful = true;
        block_sync();
    }
}
