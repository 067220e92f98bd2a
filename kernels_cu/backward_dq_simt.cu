// dQ of the FlashAttention-2 backward by plain float32 multiply-adds (every GPU).
//
// A block owns kBr query rows of one head, a warp kWarpRows of them, and walks over the key tiles that they see, as the
// forward does:
//   dP = dO V_j^T,  S = Q K_j^T,  P = exp(S - LSE),  dS = P (dP - delta),  dQ += dS K_j
// With one stage K_j is fetched under dP, and V_{j-1} under S and dQ; with two both are fetched a whole tile ahead. Nothing
// is shared between blocks: the result is bitwise the same in every run.
#include "params.cuh"
#include "band.cuh"
#include "copy_tile.cuh"
#include "hidden.cuh"
#include "probability.cuh"
#include "row_tile.cuh"
#include "schedule.cuh"
#include "score.cuh"
#include "thread_gemm.cuh"
#include "traits.cuh"

constexpr u32 kWarpRows = kBr / kWarps;
static_assert(kWarpRows * kWarps == kBr, "warps share the rows evenly");

using ScoreTile = ThreadTile<kWarpRows, kBc, lanes_over_rows(kWarpRows, kBc), 1>;
using GradientQ = ThreadTile<kWarpRows, kD, lanes_over_rows(kWarpRows, kD), 4>;

struct SharedStorage {
    struct Operands {
        RowTile<Element, kBr, kD, ReadBy::kTwoRows> Q;
        RowTile<Element, kBr, kDv, ReadBy::kTwoRows> dO;
        RowTile<Element, kBc, kD, ReadBy::kEightRows> K[kStages];
        RowTile<Element, kBc, kDv, ReadBy::kEightRows> V[kStages];
        RowTile<float, kBr, kBc, ReadBy::kTwoRows> dS;
    };
    union {
        Operands in;
        RowTile<Element, kBr, kD, ReadBy::kOneRow> dQ;
    };
};

/// S becomes P and dP becomes dS, in registers.
template <bool kFused>
DEVICE void differentiate(ScoreTile& S, ScoreTile& dP, const Score& score, const float (&lse)[ScoreTile::kM],
                          const float (&delta)[ScoreTile::kM]) {
#pragma unroll
    for (u32 m = 0; m < ScoreTile::kM; ++m)
#pragma unroll
        for (u32 n = 0; n < ScoreTile::kN; ++n) {
            const float s = score(S.x[m][n][0]);
            const float p = probability<kFused>(s, score.unit(), lse[m]);
            dP.x[m][n][0] = p * (dP.x[m][n][0] - delta[m]) * score.slope(s);
        }
}

/// Clears dS of pairs that do not see each other.
DEVICE void hide(ScoreTile& dS, const Band& band, i32 first_query, i32 first_key) {
#pragma unroll
    for (u32 m = 0; m < ScoreTile::kM; ++m) {
        // Relative to this lane's first column, so that the comparisons below are with constants.
        const i32 origin = first_key + static_cast<i32>(dS.col(0));
        const Range keys = band.keys_of(first_query + static_cast<i32>(dS.row(m))).from(origin);
#pragma unroll
        for (u32 n = 0; n < ScoreTile::kN; ++n) {
            const i32 col = static_cast<i32>(ScoreTile::kLanesN * n);
            if ((kBandFirst && col < keys.first) || col >= keys.end)
                dS.x[m][n][0] = 0.0f;
        }
    }
}

/// dQ of one block's rows. careful: hidden non-finite values of K are kept out. Returns whether dQ is finite, if anything can
/// be hidden.
DEVICE bool differentiate_rows(const BackwardParams& params, bool careful) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const QueryWork work(params);
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const Range tiles = band.key_tiles(work.queries);

    auto load_K = [&](const Element* k, i32 j, u32 stage) {
        load_tile<kHeadDim>(shared.in.K[stage], k, params.k_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };
    auto load_V = [&](const Element* v, i32 j, u32 stage) {
        load_tile<kHeadDimV>(shared.in.V[stage], v, params.v_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };
    load_tile<kHeadDim>(shared.in.Q, params.q + work.batch * params.q_batch_stride + work.head * params.q_head_stride,
                        params.q_row_stride, work.queries.first, params.seqlen_q);
    load_tile<kHeadDimV>(shared.in.dO,
                         params.dout + work.batch * params.dout_batch_stride + work.head * params.dout_head_stride,
                         params.dout_row_stride, work.queries.first, params.seqlen_q);
    copy_async_commit();
    if (!tiles.empty()) {
        load_V(work.v, tiles.end - 1, 0);
        if (kStages > 1)
            load_K(work.k, tiles.end - 1, 0);
    }

    const u32 warp_row = warp_index() * kWarpRows;
    const Range rows = work.queries.part(warp_row, kWarpRows);  // of this warp; some may lie beyond the last query
    float lse[ScoreTile::kM], delta[ScoreTile::kM];
    bool fused = true;
#pragma unroll
    for (u32 m = 0; m < ScoreTile::kM; ++m) {
        const i32 query = rows.first + static_cast<i32>(ScoreTile::row(m));
        const bool exists = query < params.seqlen_q;
        const i64 at = (static_cast<i64>(work.batch) * params.num_heads + work.head) * params.seqlen_q + query;
        lse[m] = exists ? backward_lse(params.lse[at]) : infinity();
        delta[m] = exists ? params.delta[at] : 0.0f;
        fused &= fuses(lse[m]);
    }
    fused = !warp_any(!fused);

    GradientQ dQ;
    dQ.clear();
    u32 stage = 0;
#pragma unroll 1
    for (i32 j = tiles.end - 1; j >= tiles.first; --j) {
        const i32 first_key = j * static_cast<i32>(kBc);
        copy_async_wait<0>();
        block_sync();  // V_j has landed, and nobody reads K_{j+1}, dS or the other stage any more
        if (kStages == 1) {
            load_K(work.k, j, 0);
        } else if (j > tiles.first) {
            load_V(work.v, j - 1, stage ^ 1);
            load_K(work.k, j - 1, stage ^ 1);
        }

        const Range keys = {first_key, first_key + static_cast<i32>(kBc)};
        auto between_products = [&] {
            if (kStages == 1) {
                copy_async_wait<0>();
                block_sync();  // K_j has landed, and nobody reads V_j any more
                if (j > tiles.first)
                    load_V(work.v, j - 1, 0);
            }
        };
        auto clean = [&] {
            if (kBand && careful && !band.all_visible(work.queries, keys))
                clear_nonfinite(shared.in.K[stage]);
        };
        if (kBand && !band.any_visible(rows, keys)) {
            between_products();  // near the diagonal some warps have rows that see none of the tile's keys
            clean();
        } else {
            ScoreTile S, dP;
            dP.clear();
            add_product_transposed(dP, shared.in.dO, warp_row, shared.in.V[stage]);  // dP = dO V_j^T
            between_products();
            S.clear();
            add_product_transposed(S, shared.in.Q, warp_row, shared.in.K[stage]);  // S = Q K_j^T
            if (fused)
                differentiate<true>(S, dP, score, lse, delta);
            else
                differentiate<false>(S, dP, score, lse, delta);
            if (!band.all_visible(rows, keys))
                hide(dP, band, rows.first, first_key);
            clean();
            store_result(shared.in.dS, dP, warp_row);
            warp_sync();                                                  // the warp's rows of dS are complete
            add_product(dQ, shared.in.dS, warp_row, shared.in.K[stage]);  // dQ += dS K_j
        }
        stage ^= kStages - 1;
    }
    copy_async_wait<0>();
    block_sync();                // nobody reads the tiles any more: dQ leaves through their space
    const QueryWork at(params);  // computed again: registers are short in the loop above
    dQ.multiply(params.scale);
    const bool finite = !kBand || !block_any(!dQ.all_finite());
    store_result(shared.dQ, dQ, warp_row);
    if (kBand && careful)
        restore_nonfinite<kHeadDim, true>(shared.dQ, at.k, params.k_row_stride, {0, params.seqlen_k},
                                          [&](i32 key) { return band.queries_of(key).from(at.queries.first); });
    block_sync();
    store_tile<kHeadDim>(shared.dQ, params.dq + at.batch * params.dq_batch_stride + at.head * params.dq_head_stride,
                         params.dq_row_stride, at.queries.first, params.seqlen_q);
    return finite;
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void backward_dq_simt(PARAMS(BackwardParams) params) {
    // As in the forward: a result that is not finite may be the fault of hidden data, and is computed once more with care.
    bool careful = false;
#pragma unroll 1
    while (!differentiate_rows(params, careful) && !careful) {
        careful = true;
        block_sync();  // the first run still reads shared memory
    }
}
