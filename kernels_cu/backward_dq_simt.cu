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
#include "query_tile.cuh"
#include "row_tile.cuh"
#include "score.cuh"
#include "thread_gemm.cuh"
#include "traits.cuh"

constexpr u32 kWarpRows = kBr / kWarps;
static_assert(kWarpRows * kWarps == kBr, "warps share the rows evenly");

constexpr u32 kLanesM = lanes_over_rows(kWarpRows, kBc);
using ScoreTile = ThreadTile<kWarpRows, kBc, kLanesM, 1>;
using GradientQ = ThreadTile<kWarpRows, kD, kLanesM, 4>;

struct SharedStorage {
    union {
        struct {
            RowTile<Element, kBr, kD, ReadBy::kTwoRows> Q;
            RowTile<Element, kBr, kDv, ReadBy::kTwoRows> dO;
            RowTile<Element, kBc, kD, ReadBy::kEightRows> K[kStages];
            RowTile<Element, kBc, kDv, ReadBy::kEightRows> V[kStages];
            RowTile<float, kBr, kBc, ReadBy::kTwoRows> dS;
        };
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

/// dQ of one block's rows. careful: hidden non-finite values of K are kept out. Returns whether dQ is finite.
DEVICE bool differentiate_rows(const BackwardParams& params, bool careful) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    QueryTile work(params);
    if (kBandLast)  // late rows see most keys: they go first
        work.index = query_tile_count(params) - 1 - work.index;
    const Range queries = {work.index * static_cast<i32>(kBr),
                           smaller((work.index + 1) * static_cast<i32>(kBr), params.seqlen_q)};
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const Range tiles = band.key_tiles(queries);

    const i32 kv_head = work.head / params.group;
    const Element* k = params.k + work.batch * params.k_batch_stride + kv_head * params.k_head_stride;
    const Element* v = params.v + work.batch * params.v_batch_stride + kv_head * params.v_head_stride;
    auto load_K = [&](i32 j, u32 stage) {
        load_tile<kHeadDim>(shared.K[stage], k, params.k_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };
    auto load_V = [&](i32 j, u32 stage) {
        load_tile<kHeadDimV>(shared.V[stage], v, params.v_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };
    load_tile<kHeadDim>(shared.Q, params.q + work.batch * params.q_batch_stride + work.head * params.q_head_stride,
                        params.q_row_stride, queries.first, params.seqlen_q);
    load_tile<kHeadDimV>(shared.dO, params.dout + work.batch * params.dout_batch_stride + work.head * params.dout_head_stride,
                         params.dout_row_stride, queries.first, params.seqlen_q);
    if (!tiles.empty()) {
        load_V(tiles.end - 1, 0);
        if (kStages > 1)
            load_K(tiles.end - 1, 0);
    }

    const u32 warp_row = warp_index() * kWarpRows;
    const i32 first_query = queries.first + static_cast<i32>(warp_row);
    float lse[ScoreTile::kM], delta[ScoreTile::kM];
    bool fused = true;
#pragma unroll
    for (u32 m = 0; m < ScoreTile::kM; ++m) {
        const i32 query = first_query + static_cast<i32>(ScoreTile::row(m));
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
            load_K(j, 0);
        } else if (j > tiles.first) {
            load_V(j - 1, stage ^ 1);
            load_K(j - 1, stage ^ 1);
        }

        ScoreTile S, dP;
        dP.clear();
        S.clear();
        add_product_transposed(dP, shared.dO, warp_row, shared.V[stage]);  // dP = dO V_j^T
        if (kStages == 1) {
            copy_async_wait<0>();
            block_sync();  // K_j has landed, and nobody reads V_j any more
            if (j > tiles.first)
                load_V(j - 1, 0);
        }
        add_product_transposed(S, shared.Q, warp_row, shared.K[stage]);  // S = Q K_j^T
        if (fused)
            differentiate<true>(S, dP, score, lse, delta);
        else
            differentiate<false>(S, dP, score, lse, delta);

        const bool masked = !band.all_visible(queries, {first_key, first_key + static_cast<i32>(kBc)});
        if (masked) {
#pragma unroll
            for (u32 m = 0; m < ScoreTile::kM; ++m)
#pragma unroll
                for (u32 n = 0; n < ScoreTile::kN; ++n)
                    if (!band.visible(first_query + static_cast<i32>(dP.row(m)), first_key + static_cast<i32>(dP.col(n))))
                        dP.x[m][n][0] = 0.0f;
        }
        if (kBand && careful && masked)
            clear_nonfinite(shared.K[stage]);

        store_result(shared.dS, dP, warp_row);
        warp_sync();                                            // the warp's rows of dS are complete
        add_product(dQ, shared.dS, warp_row, shared.K[stage]);  // dQ += dS K_j
        if (kBand && careful && masked)
            add_visible_nonfinite<kHeadDim, true>(dQ, k + first_key * params.k_row_stride, params.k_row_stride,
                                                  smaller(static_cast<i32>(kBc), params.seqlen_k - first_key),
                                                  [&](u32 row, i32 key) {
                                                      return band.visible(first_query + static_cast<i32>(row), first_key + key);
                                                  });
        stage ^= kStages - 1;
    }
    copy_async_wait<0>();
    block_sync();  // nobody reads the tiles any more: dQ leaves through their space
    dQ.multiply(params.scale);
    store_result(shared.dQ, dQ, warp_row);
    block_sync();
    store_tile<kHeadDim>(shared.dQ, params.dq + work.batch * params.dq_batch_stride + work.head * params.dq_head_stride,
                         params.dq_row_stride, queries.first, params.seqlen_q);
    return dQ.all_finite();
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void backward_dq_simt(PARAMS(BackwardParams) params) {
    // As in the forward: a result that is not finite may be the fault of hidden data, and is computed once more with care.
    bool careful = false;
#pragma unroll 1
    while (block_any(!differentiate_rows(params, careful)) && kBand && !careful)
        careful = true;
}
