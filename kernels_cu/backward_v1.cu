// The first FlashAttention's backward, Algorithm 4 of arXiv:2205.14135, on tensor cores by mma.sync (sm_75 and up).
//
// A block owns one key/value head. Outside are tiles of kBc keys, whose dK and dV are summed in registers; inside are tiles of
// kBr queries, for every query head of the group:
//   S^T = K Q^T,  P^T = exp(S^T - LSE),  dV += P^T dO,  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q,  dQ += dS K
// dQ lies in global memory between two visits: each reads it, adds to it, and writes it. Nobody else does, so nothing is atomic
// and every run gives the same bits. As in the paper's own code, dQ is kept in float32, a tile's first visit starts from 0 and
// its last one writes the gradient, tiles that a mask hides are left out, m and l come as LSE = m + log l, and delta is computed
// once, before all else (the paper writes it into the inner loop). P and dS pass between the warps in shared memory.
#include "params.cuh"
#include "backward_rows.cuh"
#include "band.cuh"
#include "copy_tile.cuh"
#include "dq_sum.cuh"
#include "hidden.cuh"
#include "platform/prefetch.cuh"
#include "probability.cuh"
#include "score.cuh"
#include "traits.cuh"
#include "transposed_scores.cuh"
#include "warp_gemm.cuh"

// Up to here there are registers for dQ beside dK and dV, and it can be read before their products; else it waits in L2.
constexpr bool kReadEarly = kD <= 64 && sizeof(Element) == 2;

struct SharedStorage {
    struct Operands {
        SharedTile<Element, kBc, kD> K;
        SharedTile<Element, kBc, kDv> V;
        SharedTile<Element, kBr, kD> Q[kStages];  // and dQ, on its way out
        SharedTile<Element, kBr, kDv> dO[kStages];
        WeightTile P, dS;  // transposed
        alignas(16) float lse[kStages][kBr];
        float delta[kStages][kBr];
    };
    struct Gradients {
        SharedTile<Element, kBc, kD> dK;
        SharedTile<Element, kBc, kDv> dV;
    };
    union {
        Operands in;
        Gradients out;
    };
    // Kept here while registers are short:
    bool nonfinite_key;   // of the tile: it has a NaN or infinity, to be kept out of dQ of queries that do not see it
    bool nonfinite_keys;  // some tile so far has
    bool cleaned;         // for these keys some tile was cleaned, and what was visible of it is missing in the sums
};

/// dQ of a query tile between two visits, in fragment order.
DEVICE void read_dq(const float* kept, DqTile& dQ) {
#pragma unroll
    for (u32 m = 0; m < kDqM; ++m)
#pragma unroll
        for (u32 n = 0; n < kDqN; ++n) {
            const float4 x = *reinterpret_cast<const float4*>(kept + dq_fragment(m, n));
            dQ.x[m][n][0] = x.x, dQ.x[m][n][1] = x.y, dQ.x[m][n][2] = x.z, dQ.x[m][n][3] = x.w;
        }
}
DEVICE void write_dq(float* kept, const DqTile& dQ) {
#pragma unroll
    for (u32 m = 0; m < kDqM; ++m)
#pragma unroll
        for (u32 n = 0; n < kDqN; ++n) {
            const float (&x)[4] = dQ.x[m][n];
            *reinterpret_cast<float4*>(kept + dq_fragment(m, n)) = float4{x[0], x[1], x[2], x[3]};
        }
}

/// The key/value head that a block owns.
struct Owned {
    i32 batch, kv_head;
    DEVICE explicit Owned(const BackwardParams& params) {
        const i32 block = static_cast<i32>(block_index());
        batch = block / params.num_kv_heads;
        kv_head = block % params.num_kv_heads;
    }
};

/// Row 0 of a query head's dQ.
DEVICE Element* dq_of(const BackwardParams& params, i32 head) {
    return params.dq + Owned(params).batch * params.dq_batch_stride + head * params.dq_head_stride;
}

/// Queries of a tile that exist.
DEVICE Range queries_of_tile(const BackwardParams& params, i32 tile) {
    const i32 first = tile * static_cast<i32>(kBr);
    return {first, smaller(first + static_cast<i32>(kBr), params.seqlen_q)};
}

/// dQ = 0 of queries that see no key, which no tile of keys visits; of all heads that share the keys.
DEVICE void write_nothing(const BackwardParams& params, const Band& band) {
    const i32 kv_head = Owned(params).kv_head;
#pragma unroll 1
    for (i32 tile = 0; tile < query_tile_count(params); ++tile) {
        const Range queries = queries_of_tile(params, tile);
        if (!band.key_tiles(queries).empty())
            continue;
        const u32 elements = static_cast<u32>(queries.end - queries.first) * kHeadDim;
#pragma unroll 1
        for (i32 head = kv_head * params.group; head < (kv_head + 1) * params.group; ++head)
#pragma unroll 1
            for (u32 n = thread_index(); n < elements; n += kThreads)
                dq_of(params,
                      head)[(queries.first + static_cast<i32>(n / kHeadDim)) * params.dq_row_stride + n % kHeadDim] =
                    from_float<Element>(0.0f);
    }
}

KERNEL(kThreads, 1) void backward_rows(PARAMS(BackwardParams) params) { prepare_rows(params); }

KERNEL(kThreads, CF_BLOCKS_PER_SM) void backward_v1(PARAMS(BackwardParams) params) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    auto load_K = [&](i32 first_key) {
        const Owned own(params);
        load_tile<kHeadDim>(shared.in.K,
                            params.k + own.batch * params.k_batch_stride + own.kv_head * params.k_head_stride,
                            params.k_row_stride, first_key, params.seqlen_k);
        copy_async_commit();
    };
    auto load_queries = [&](i32 head, i32 tile, u32 stage) {
        const i32 first = tile * static_cast<i32>(kBr), batch = Owned(params).batch;
        load_tile<kHeadDim>(shared.in.Q[stage], params.q + batch * params.q_batch_stride + head * params.q_head_stride,
                            params.q_row_stride, first, params.seqlen_q);
        load_tile<kHeadDimV>(shared.in.dO[stage],
                             params.dout + batch * params.dout_batch_stride + head * params.dout_head_stride,
                             params.dout_row_stride, first, params.seqlen_q);
        load_rows(params, shared.in.lse[stage], shared.in.delta[stage], batch, head, first);
        copy_async_commit();
    };

    // This warp's part of each product.
    const u32 warp = warp_index();
    const u32 score_key = warp / kWarpsScoreQ * (16 * kScoreM), score_query = warp % kWarpsScoreQ * (8 * kScoreN);
    const u32 grad_key = warp / kWarpsGradD * (16 * kGradM), grad_col = warp % kWarpsGradD * 16;

#pragma unroll 1
    for (i32 j = 0; j * static_cast<i32>(kBc) < params.seqlen_k; ++j) {
        const i32 first_key = j * static_cast<i32>(kBc);
        const Range keys = {first_key, first_key + static_cast<i32>(kBc)};  // some may lie beyond the last key
        const Range tiles = band.query_tiles({first_key, smaller(keys.end, params.seqlen_k)});
        SumTile<Element, kGradM, kGradN, kWarpsGradD> dK;
        SumTile<Element, kGradM, kGradNV, kWarpsGradD> dV;
        dK.clear();
        dV.clear();

        // A thread overwrites what it has stored itself of the last keys' dK and dV: that needs no barrier.
        const Owned own(params);
        load_tile<kHeadDimV>(shared.in.V,
                             params.v + own.batch * params.v_batch_stride + own.kv_head * params.v_head_stride,
                             params.v_row_stride, first_key, params.seqlen_k);
        load_K(first_key);
        i32 head = own.kv_head * params.group, tile = tiles.first;
        const i32 end_head = tiles.empty() ? head : head + params.group;
        if (head < end_head)
            load_queries(head, tile, 0);
        if constexpr (kBand) {
            copy_async_wait<0>();
            block_sync();
            const bool nonfinite = has_nonfinite(shared.in.K);
            if (thread_index() == 0) {
                shared.nonfinite_key = nonfinite;
                shared.nonfinite_keys = nonfinite || (j > 0 && shared.nonfinite_keys);
                shared.cleaned = false;
            }
        }

        u32 stage = 0;
#pragma unroll 1
        while (head < end_head) {
            const i32 first_query = tile * static_cast<i32>(kBr);
            const i32 next_tile = tile + 1 < tiles.end ? tile + 1 : tiles.first;
            const i32 next_head = next_tile == tiles.first ? head + 1 : head;
            copy_async_wait<0>();
            block_sync();  // this visit's tiles have landed, and nobody reads those of the visit before, P or dS any more
            if (kStages > 1 && next_head < end_head)
                load_queries(next_head, next_tile, stage ^ 1);

            const Range seen = band.key_tiles(queries_of_tile(params, tile));
            // Derived anew where it is needed: registers are short.
            auto kept = [&] { return dq_sum_tile(params, Owned(params).batch, head, static_cast<i32>(opaque(tile))); };
            if (!kReadEarly && j != seen.first)
                for (u32 n = thread_index() * 32; n < kBr * kD; n += kThreads * 32)
                    prefetch_to_l2(kept() + n);
            const Range queries = {first_query, first_query + static_cast<i32>(kBr)};
            const Range score_queries = queries.part(opaque(score_query), 8 * kScoreN),
                        score_keys = keys.part(opaque(score_key), 16 * kScoreM);
            bool hidden_nonfinite = false, too_large = false, careful = false, shrink = false;
            {
                ScoreTile S, dP;
                S.clear();
                dP.clear();
                warp_gemm<Element, kD / kStepK<Element>>(S, RowMajorA(shared.in.K, score_key),
                                                         ColumnMajorB(shared.in.Q[stage], score_query));
                warp_gemm<Element, kDv / kStepK<Element>>(dP, RowMajorA(shared.in.V, score_key),
                                                          ColumnMajorB(shared.in.dO[stage], score_query));
                differentiate(S, dP, score, shared.in.lse[stage] + score_query, shared.in.delta[stage] + score_query);
                if (!band.all_visible(score_queries, score_keys) || score_queries.end > params.seqlen_q)
                    hide(S, dP, band, score_queries.first, score_keys.first);
                if constexpr (kMayOverflow)
                    dP.each([&](float& ds) { too_large |= overflows(ds); });
                if (kBand && !band.all_visible(queries, keys)) {
                    hidden_nonfinite = shared.nonfinite_key;
                    // A query with NaN or infinity in its q or dO has such an LSE or delta, but for a cap.
                    if constexpr (kCapHides)
                        hidden_nonfinite |= has_nonfinite(shared.in.Q[stage]);
                    for (u32 n = thread_index(); n < kBr; n += kThreads)
                        hidden_nonfinite |=
                            !is_finite(shared.in.lse[stage][n]) || !is_finite(shared.in.delta[stage][n]);
                }
                store_accumulator(shared.in.P, S, score_key, score_query);
                store_accumulator(shared.in.dS, dP, score_key, score_query);
                // Behind the barrier P and dS are complete, and rare trouble is known to all.
                if (block_any(hidden_nonfinite || too_large)) {
                    careful = block_any(hidden_nonfinite);
                    shrink = block_any(too_large);
                    if (shrink) {
                        dP.multiply(kShrinkFactor);
                        store_accumulator(shared.in.dS, dP, score_key, score_query);
                        block_sync();
                    }
                    if (careful) {
                        shared.cleaned = true;
                        clear_nonfinite(shared.in.dO[stage]);
                        clear_nonfinite(shared.in.Q[stage]);
                        clear_nonfinite(shared.in.K);
                    }
                }
            }

            DqTile dQ;
            auto start_dQ = [&] {
                if (j == seen.first)
                    dQ.clear();
                else
                    read_dq(kept(), dQ);
            };
            if constexpr (kReadEarly)
                start_dQ();  // arrives under the products of dV and dK
            warp_gemm<Element, kBr / kStepK<Element>>(
                dV, RowMajorA(shared.in.P, grad_key),
                RowMajorB<Element, false, kWarpsGradD, kBr, kDv>(shared.in.dO[stage], grad_col));
            if (shrink)
                dK.multiply(kShrinkFactor);
            warp_gemm<Element, kBr / kStepK<Element>>(
                dK, RowMajorA(shared.in.dS, grad_key),
                RowMajorB<Element, false, kWarpsGradD, kBr, kD>(shared.in.Q[stage], grad_col));
            if constexpr (!kReadEarly)
                start_dQ();
            if (shrink)
                dQ.multiply(kShrinkFactor);
            warp_gemm<Element, kBc / kStepK<Element>>(
                dQ, TransposedA(shared.in.dS, dq_first_row()),
                RowMajorB<Element, false, kWarpsDqD, kBc, kD>(shared.in.K, dq_first_col()));
            if (shrink) {
                dK.multiply(1.0f / kShrinkFactor);
                dQ.multiply(1.0f / kShrinkFactor);
            }

            if (j + 1 < seen.end) {
                write_dq(kept(), dQ);
            } else {
                dQ.multiply(params.scale);
                block_sync();  // nobody reads Q any more: dQ leaves through its space
                const Owned own(params);
                store_accumulator(shared.in.Q[stage], dQ, dq_first_row(), dq_first_col());
                if (kBand && shared.nonfinite_keys)
                    restore_nonfinite<kHeadDim, true>(
                        shared.in.Q[stage],
                        params.k + own.batch * params.k_batch_stride + own.kv_head * params.k_head_stride,
                        params.k_row_stride, {0, params.seqlen_k},
                        [&](i32 key) { return band.queries_of(key).from(first_query); });
                block_sync();
                store_tile<kHeadDim>(shared.in.Q[stage], dq_of(params, head), params.dq_row_stride, first_query,
                                     params.seqlen_q);
            }
            if (kBand && careful) {
                block_sync();  // K, cleaned above, is read no more: fetch it as it was
                load_K(first_key);
            }
            if (kStages == 1 && next_head < end_head) {
                block_sync();
                load_queries(next_head, next_tile, 0);
            }
            head = next_head;
            tile = next_tile;
            stage ^= kStages - 1;
        }
        copy_async_wait<0>();
        block_sync();  // nobody reads the tiles any more: dK and dV leave through their space
        dK.multiply(params.scale);
        store_accumulator(shared.out.dK, dK, grad_key, grad_col);
        store_accumulator(shared.out.dV, dV, grad_key, grad_col);
        block_sync();
        const Owned at(params);
        if (kBand && shared.cleaned)
#pragma unroll 1
            for (i32 of = at.kv_head * params.group; of < (at.kv_head + 1) * params.group; ++of)
                restore_key_gradients(params, shared.out.dK, shared.out.dV, at.batch, of, keys, band);
        store_tile<kHeadDim>(shared.out.dK,
                             params.dk + at.batch * params.dk_batch_stride + at.kv_head * params.dk_head_stride,
                             params.dk_row_stride, first_key, params.seqlen_k);
        store_tile<kHeadDimV>(shared.out.dV,
                              params.dv + at.batch * params.dv_batch_stride + at.kv_head * params.dv_head_stride,
                              params.dv_row_stride, first_key, params.seqlen_k);
    }
    if constexpr (kBand)
        write_nothing(params, band);
}
