// FlashAttention-2 backward, Algorithm 2 of arXiv:2307.08691, by plain float32 multiply-adds (every GPU): dK and dV.
//
// A block owns kBc keys of one key/value head, a warp kWarpKeys of them, and walks over the query tiles that see them, for
// every query head of the group, so that dK and dV are summed over the group in registers and in a fixed order. It works on
// the transposes, with the keys as rows:
//   dP^T = V dO^T,  S^T = K Q^T,  P^T = exp(S^T - LSE),  dS^T = P^T (dP^T - delta),  dV += P^T dO,  dK += dS^T Q
// With one stage Q_i is fetched under dP, and dO_{i+1} under dK; with two both are fetched a whole tile ahead. P and dS pass
// between the lanes of a warp through the same shared memory, one after the other. dQ is backward_dq_simt's.
#include "params.cuh"
#include "backward_rows.cuh"
#include "band.cuh"
#include "copy_tile.cuh"
#include "hidden.cuh"
#include "probability.cuh"
#include "row_tile.cuh"
#include "score.cuh"
#include "thread_gemm.cuh"
#include "traits.cuh"

constexpr u32 kWarpKeys = kBc / kWarps;
static_assert(kWarpKeys * kWarps == kBc, "warps share the keys evenly");

constexpr u32 kLanesM = lanes_over_rows(kWarpKeys, kBr);
using ScoreTile = ThreadTile<kWarpKeys, kBr, kLanesM, 1>;
using GradientK = ThreadTile<kWarpKeys, kD, kLanesM, 4>;
using GradientV = ThreadTile<kWarpKeys, kDv, kLanesM, 4>;

struct SharedStorage {
    union {
        struct {
            RowTile<Element, kBc, kD, ReadBy::kTwoRows> K;
            RowTile<Element, kBc, kDv, ReadBy::kTwoRows> V;
            RowTile<Element, kBr, kD, ReadBy::kEightRows> Q[kStages];
            RowTile<Element, kBr, kDv, ReadBy::kEightRows> dO[kStages];
            RowTile<float, kBc, kBr, ReadBy::kTwoRows> weights;  // P^T, then dS^T
            float lse[kStages][kBr];
            float delta[kStages][kBr];
        };
        struct {
            RowTile<Element, kBc, kD, ReadBy::kOneRow> dK;
            RowTile<Element, kBc, kDv, ReadBy::kOneRow> dV;
        };
    };
};

/// The keys of one key/value head that a block works on.
struct Work {
    i32 batch, kv_head;
    Range keys;

    DEVICE explicit Work(const BackwardParams& params) {
        // Early keys are seen by most queries under a causal mask: the natural order starts with the longest blocks.
        const i32 tiles = (params.seqlen_k + static_cast<i32>(kBc) - 1) / static_cast<i32>(kBc);
        const i32 index = static_cast<i32>(block_index());
        const i32 of_batch = index / tiles, tile = index % tiles;
        batch = of_batch / params.num_kv_heads;
        kv_head = of_batch % params.num_kv_heads;
        keys = {tile * static_cast<i32>(kBc), smaller((tile + 1) * static_cast<i32>(kBc), params.seqlen_k)};
    }
};

/// S^T becomes P^T and dP^T becomes dS^T, in registers.
template <bool kFused>
DEVICE void differentiate(ScoreTile& S, ScoreTile& dP, const Score& score, const float* lse, const float* delta) {
#pragma unroll
    for (u32 n = 0; n < ScoreTile::kN; ++n) {
        const float row_lse = backward_lse(lse[S.col(n)]), row_delta = delta[S.col(n)];
#pragma unroll
        for (u32 m = 0; m < ScoreTile::kM; ++m) {
            const float s = score(S.x[m][n][0]);
            const float p = probability<kFused>(s, score.unit(), row_lse);
            S.x[m][n][0] = p;
            dP.x[m][n][0] = p * (dP.x[m][n][0] - row_delta) * score.slope(s);
        }
    }
}

/// Clears P and dS of pairs that do not see each other.
DEVICE void hide(ScoreTile& P, ScoreTile& dS, const Band& band, i32 first_query, i32 first_key) {
#pragma unroll
    for (u32 m = 0; m < ScoreTile::kM; ++m)
#pragma unroll
        for (u32 n = 0; n < ScoreTile::kN; ++n) {
            const i32 query = first_query + static_cast<i32>(P.col(n)), key = first_key + static_cast<i32>(P.row(m));
            if (query >= band.seqlen_q || !band.visible(query, key)) {
                P.x[m][n][0] = 0.0f;
                dS.x[m][n][0] = 0.0f;
            }
        }
}

/// dK and dV of one block's keys. careful: hidden non-finite values of Q and dO are kept out. Returns whether both are
/// finite.
DEVICE bool differentiate_keys(const BackwardParams& params, bool careful) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const Work work(params);
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const Range tiles = band.query_tiles(work.keys);

    const Element* q = params.q + work.batch * params.q_batch_stride;
    const Element* dout = params.dout + work.batch * params.dout_batch_stride;
    auto load_Q = [&](i32 head, i32 tile, u32 stage) {
        load_tile<kHeadDim>(shared.Q[stage], q + head * params.q_head_stride, params.q_row_stride,
                            tile * static_cast<i32>(kBr), params.seqlen_q);
        copy_async_commit();
    };
    auto load_dO = [&](i32 head, i32 tile, u32 stage) {
        const i32 first = tile * static_cast<i32>(kBr);
        load_tile<kHeadDimV>(shared.dO[stage], dout + head * params.dout_head_stride, params.dout_row_stride, first,
                             params.seqlen_q);
        const i64 row = (static_cast<i64>(work.batch) * params.num_heads + head) * params.seqlen_q + first;
        for (u32 n = thread_index(); n < kBr; n += kThreads) {
            const bool valid = first + static_cast<i32>(n) < params.seqlen_q;
            copy_async<4>(&shared.lse[stage][n], params.lse + (valid ? row + n : 0), valid);
            copy_async<4>(&shared.delta[stage][n], params.delta + (valid ? row + n : 0), valid);
        }
        copy_async_commit();
    };

    const u32 warp_key = warp_index() * kWarpKeys;
    GradientK dK;
    GradientV dV;
    dK.clear();
    dV.clear();
    load_tile<kHeadDim>(shared.K, params.k + work.batch * params.k_batch_stride + work.kv_head * params.k_head_stride,
                        params.k_row_stride, work.keys.first, params.seqlen_k);
    load_tile<kHeadDimV>(shared.V, params.v + work.batch * params.v_batch_stride + work.kv_head * params.v_head_stride,
                         params.v_row_stride, work.keys.first, params.seqlen_k);
    i32 head = work.kv_head * params.group, tile = tiles.first;
    const i32 end_head = tiles.empty() ? head : head + params.group;
    if (head < end_head) {
        load_dO(head, tile, 0);
        if (kStages > 1)
            load_Q(head, tile, 0);
    }

    u32 stage = 0;
#pragma unroll 1
    while (head < end_head) {
        const i32 first_query = tile * static_cast<i32>(kBr);
        const i32 next_tile = tile + 1 < tiles.end ? tile + 1 : tiles.first;
        const i32 next_head = tile + 1 < tiles.end ? head : head + 1;
        copy_async_wait<0>();
        block_sync();  // dO_i has landed, and nobody reads Q_{i-1}, the weights or the other stage any more
        if (kStages == 1) {
            load_Q(head, tile, 0);
        } else if (next_head < end_head) {
            load_dO(next_head, next_tile, stage ^ 1);
            load_Q(next_head, next_tile, stage ^ 1);
        }

        ScoreTile S, dP;
        dP.clear();
        S.clear();
        add_product_transposed(dP, shared.V, warp_key, shared.dO[stage]);  // dP^T = V dO^T
        if (kStages == 1) {
            copy_async_wait<0>();
            block_sync();  // Q_i has landed
        }
        add_product_transposed(S, shared.K, warp_key, shared.Q[stage]);  // S^T = K Q^T

        const float* lse = shared.lse[stage];
        const float* delta = shared.delta[stage];
        bool fused = true;
#pragma unroll
        for (u32 n = 0; n < ScoreTile::kN; ++n)
            fused &= fuses(lse[S.col(n)]);
        if (warp_any(!fused))
            differentiate<false>(S, dP, score, lse, delta);
        else
            differentiate<true>(S, dP, score, lse, delta);

        const bool masked = !band.all_visible({first_query, first_query + static_cast<i32>(kBr)}, {work.keys.first, work.keys.first + static_cast<i32>(kBc)}) ||
                            first_query + static_cast<i32>(kBr) > params.seqlen_q;
        if (masked)
            hide(S, dP, band, first_query, work.keys.first + static_cast<i32>(warp_key));
        if (kBand && careful && masked) {
            clear_nonfinite(shared.dO[stage]);
            clear_nonfinite(shared.Q[stage]);
        }

        store_result(shared.weights, S, warp_key);
        warp_sync();                                                  // the warp's rows of P^T are complete
        add_product(dV, shared.weights, warp_key, shared.dO[stage]);  // dV += P^T dO
        if (kStages == 1) {
            block_sync();  // nobody reads dO_i or P^T any more
            if (next_head < end_head)
                load_dO(next_head, next_tile, 0);
        } else {
            warp_sync();
        }
        store_result(shared.weights, dP, warp_key);
        warp_sync();
        add_product(dK, shared.weights, warp_key, shared.Q[stage]);  // dK += dS^T Q

        if (kBand && careful && masked) {
            auto visible = [&](u32 row, i32 query) {
                return band.visible(first_query + query, work.keys.first + static_cast<i32>(warp_key + row));
            };
            const i32 rows = smaller(static_cast<i32>(kBr), params.seqlen_q - first_query);
            add_visible_nonfinite<kHeadDimV>(dV, dout + head * params.dout_head_stride + first_query * params.dout_row_stride,
                                             params.dout_row_stride, rows, visible);
            add_visible_nonfinite<kHeadDim, true>(dK, q + head * params.q_head_stride + first_query * params.q_row_stride,
                                                  params.q_row_stride, rows, visible);
        }
        head = next_head;
        tile = next_tile;
        stage ^= kStages - 1;
    }
    copy_async_wait<0>();
    block_sync();  // nobody reads the tiles any more: dK and dV leave through their space
    dK.multiply(params.scale);
    store_result(shared.dK, dK, warp_key);
    store_result(shared.dV, dV, warp_key);
    block_sync();
    store_tile<kHeadDim>(shared.dK, params.dk + work.batch * params.dk_batch_stride + work.kv_head * params.dk_head_stride,
                         params.dk_row_stride, work.keys.first, params.seqlen_k);
    store_tile<kHeadDimV>(shared.dV, params.dv + work.batch * params.dv_batch_stride + work.kv_head * params.dv_head_stride,
                          params.dv_row_stride, work.keys.first, params.seqlen_k);
    const bool finite = dK.all_finite();
    return dV.all_finite() && finite;
}

KERNEL(kThreads, 1) void backward_rows(PARAMS(BackwardParams) params) {
    prepare_rows(params);
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void backward_dkv_simt(PARAMS(BackwardParams) params) {
    // As in the forward: a result that is not finite may be the fault of hidden data, and is computed once more with care.
    bool careful = false;
#pragma unroll 1
    while (block_any(!differentiate_keys(params, careful)) && kBand && !careful)
        careful = true;
}
