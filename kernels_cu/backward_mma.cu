// FlashAttention-2 backward, Algorithm 2 of arXiv:2307.08691, on tensor cores by mma.sync (sm_75 and up).
//
// A block owns kBc keys of one key/value head and walks over the query tiles that see them, for every query head of the
// group, so that dK and dV are summed over the group in registers. It works on the transposes: with the keys as rows,
// P^T and dS^T come out of one product in the layout that the next product takes, and each warp owns whole keys.
//   S^T = K Q^T,  P^T = exp(S^T - LSE),  dV += P^T dO,  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q,  dQ += dS K
// Only dQ sums over keys of other blocks; it goes to a float32 buffer by reductions, in fragment order (see dq_sum.cuh).
// Shared memory bandwidth binds, so the warps split each product where its operands are read least often (kWarps*).
#include "params.cuh"
#include "backward_rows.cuh"
#include "band.cuh"
#include "constant.cuh"
#include "copy_tile.cuh"
#include "dq_sum.cuh"
#include "schedule.cuh"
#include "score.cuh"
#include "traits.cuh"
#include "transposed_scores.cuh"
#include "warp_gemm.cuh"

// If a warp has the same keys, and all queries, in both, P^T and dS^T pass from one to the other in registers.
constexpr bool kInRegisters = kWarpsScoreQ == 1 && kWarpsGradD == 1;
constexpr bool kDqFirst = CF_DQ_FIRST;  // dQ before dK and dV
// Whole tiles get a loop body without tests. Worth it at large head dims, +3% at 256 on an H200; below, and with few warps,
// the second body costs more in registers than the tests cost in time.
constexpr bool kPeel = kD > 128 && kWarps >= 8 && !kSplit;
constexpr bool kSumDq = CF_SUM_DQ;  // false: backward_dq_mma computes dQ, in a fixed order

/// The keys of one key/value head that a block works on.
struct Work {
    i32 batch, kv_head;
    Range keys;

    Work() = default;
    DEVICE explicit Work(const BackwardParams& params) {
        const TileWork work =
            tile_work(params.seqlen_k, kBc, params.batch * params.num_kv_heads, params.section, false);
        batch = work.batch_head / params.num_kv_heads;
        kv_head = work.batch_head % params.num_kv_heads;
        keys = work.rows;
    }
};

struct SharedStorage {
    struct Operands {
        SharedTile<Element, kBc, kD> K;
        SharedTile<Element, kBc, kDv> V;
        SharedTile<Element, kBr, kD> Q[kStages];
        SharedTile<Element, kBr, kDv> dO[kStages];
        WeightTile weights[kInRegisters ? 1 : 2];  // dS^T, and P^T if it is exchanged between warps
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
    Work work;
    bool key_nonfinite;  // a key has a NaN or infinity, to be kept out of dQ of the queries that do not see it
    bool cleaned;        // some tile was cleaned, and what was visible of it is missing in the sums
};

/// Puts what was visible of cleaned queries and keys into dK, dV and dQ.
DEVICE void restore(const BackwardParams& params, SharedStorage& shared, const Work& work, const Band& band) {
    const Element* k = params.k + work.batch * params.k_batch_stride + work.kv_head * params.k_head_stride;
#pragma unroll 1
    for (i32 head = work.kv_head * params.group; head < (work.kv_head + 1) * params.group; ++head) {
        restore_key_gradients(params, shared.out.dK, shared.out.dV, work.batch, head, work.keys, band);
        if constexpr (kSumDq) {
#pragma unroll 1
            for (i32 key = work.keys.first; key < work.keys.end; ++key)
#pragma unroll 1
                for (u32 col = thread_index(); col < kHeadDim; col += kThreads) {
                    if (is_finite(to_float(k[key * params.k_row_stride + col])))
                        continue;
                    const Range seen = band.queries_of(key);
#pragma unroll 1
                    for (i32 query = seen.first; query < seen.end; ++query)
                        add_nan_to_dq_sum(params, work.batch, head, query, col);
                }
        }
    }
}

KERNEL(kThreads, 1) void backward_rows(PARAMS(BackwardParams) params) {
    prepare_rows(params);
    if constexpr (kSumDq)
        clear_dq_sum(params);
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void backward_mma(PARAMS(BackwardParams) params) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    WeightTile& shared_dS = shared.in.weights[0];
    WeightTile& shared_P = shared.in.weights[kInRegisters ? 0 : 1];
    const Work work(params);
    if (thread_index() == 0)
        shared.work = work;
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const Range tiles = band.query_tiles(work.keys);

    auto load_K = [&](const Work& of) {
        const Element* k = params.k + of.batch * params.k_batch_stride + of.kv_head * params.k_head_stride;
        load_tile<kHeadDim>(shared.in.K, k, params.k_row_stride, of.keys.first, params.seqlen_k);
    };
    const Element* v = params.v + work.batch * params.v_batch_stride + work.kv_head * params.v_head_stride;
    const Element* q = params.q + work.batch * params.q_batch_stride;
    const Element* dout = params.dout + work.batch * params.dout_batch_stride;
    auto load_queries = [&](i32 head, i32 tile, u32 stage) {
        const i32 first = tile * static_cast<i32>(kBr);
        load_tile<kHeadDim>(shared.in.Q[stage], q + head * params.q_head_stride, params.q_row_stride, first,
                            params.seqlen_q);
        load_tile<kHeadDimV>(shared.in.dO[stage], dout + head * params.dout_head_stride, params.dout_row_stride, first,
                             params.seqlen_q);
        load_rows(params, shared.in.lse[stage], shared.in.delta[stage], work.batch, head, first);
        copy_async_commit();
    };

    // This warp's part of each product.
    const u32 warp = warp_index();
    const u32 score_key = warp / kWarpsScoreQ * (16 * kScoreM), score_query = warp % kWarpsScoreQ * (8 * kScoreN);
    const u32 grad_key = warp / kWarpsGradD * (16 * kGradM);
    const u32 grad_col = warp % kWarpsGradD * 16;

    SumTile<Element, kGradM, kGradN, kWarpsGradD> dK;
    SumTile<Element, kGradM, kGradNV, kWarpsGradD> dV;
    dK.clear();
    dV.clear();
    load_K(work);
    load_tile<kHeadDimV>(shared.in.V, v, params.v_row_stride, work.keys.first, params.seqlen_k);
    i32 head = work.kv_head * params.group, tile = tiles.first;
    const i32 end_head = tiles.empty() ? head : head + params.group;
    copy_async_commit();
    if (head < end_head)
        load_queries(head, tile, 0);
    if constexpr (kBand) {
        copy_async_wait<0>();
        block_sync();
        const bool nonfinite = has_nonfinite(shared.in.K);
        if (thread_index() == 0) {
            shared.key_nonfinite = nonfinite;
            shared.cleaned = false;
        }
    }

    const Range keys = {work.keys.first, work.keys.first + static_cast<i32>(kBc)};  // some may lie beyond the last key
    u32 stage = 0;
#pragma unroll 1
    while (head < end_head) {
        const i32 first_query = tile * static_cast<i32>(kBr);
        const i32 next_tile = tile + 1 < tiles.end ? tile + 1 : tiles.first;
        const i32 next_head = next_tile == tiles.first ? head + 1 : head;
        copy_async_wait<0>();
        block_sync();  // this step's tiles have landed, and nobody reads those of the step before, dS or P any more
        if (kStages > 1 && next_head < end_head)
            load_queries(next_head, next_tile, stage ^ 1);

        // Tiles at a boundary (the diagonal, the end of the queries or of the keys) have pairs, and near the diagonal even
        // warps, that do not see each other. The loop spends its time on whole tiles and shall not carry tests for them.
        const Range queries = {first_query, first_query + static_cast<i32>(kBr)};
        auto step = [&](auto boundary) {
            constexpr bool kBoundary = decltype(boundary)::value;
            const Range score_queries = queries.part(opaque(score_query), 8 * kScoreN),
                        score_keys = keys.part(opaque(score_key), 16 * kScoreM);
            ScoreTile S, dP;
            bool hidden_nonfinite = false, too_large = false, unsplittable = false;
            auto compute_P_dS = [&](auto repaired) {
                constexpr bool kRepair = decltype(repaired)::value;
                S.clear();
                dP.clear();
                // Of split float32 also pairs that do not see each other are looked at.
                if (kBoundary && !kSplit && !band.any_visible(score_queries, score_keys))
                    return;
                warp_gemm<Element, kD / kStepK<Element>, kRepair>(S, RowMajorA(shared.in.K, score_key),
                                                                  ColumnMajorB(shared.in.Q[stage], score_query));
                warp_gemm<Element, kDv / kStepK<Element>, kRepair>(dP, RowMajorA(shared.in.V, score_key),
                                                                   ColumnMajorB(shared.in.dO[stage], score_query));
                differentiate(S, dP, score, shared.in.lse[stage] + score_query, shared.in.delta[stage] + score_query);
                if constexpr (kSplit && !kRepair)
                    unsplittable = !dP.all_finite();
                if (kBoundary && (!band.all_visible(score_queries, score_keys) || score_queries.end > params.seqlen_q))
                    hide(S, dP, band, score_queries.first, score_keys.first);
                if constexpr (kMayOverflow)
                    dP.each([&](float& ds) { too_large |= overflows(ds); });
            };
            compute_P_dS(Constant<false>());
            const bool masked = kBand && kBoundary && (kPeel || !band.all_visible(queries, keys));
            if (masked) {  // a query with NaN or infinity in its q or dO has such an LSE or delta, but for a cap
                if constexpr (kCapHides)
                    hidden_nonfinite = has_nonfinite(shared.in.Q[stage]);
                for (u32 n = thread_index(); n < kBr; n += kThreads)
                    hidden_nonfinite |= !is_finite(shared.in.lse[stage][n]) || !is_finite(shared.in.delta[stage][n]);
                hidden_nonfinite |= shared.key_nonfinite;
            }

            auto share_P_dS = [&] {
                if constexpr (!kInRegisters)
                    store_accumulator(shared_P, S, score_key, score_query);
                if constexpr (kSumDq || !kInRegisters)
                    store_accumulator(shared_dS, dP, score_key, score_query);
            };
            share_P_dS();
            bool careful = false, shrink = false, repair = false;
            if (kMayOverflow || kSplit || masked) {
                // P and dS are complete behind the barrier, and rare trouble is known to all.
                if (block_any(hidden_nonfinite || too_large || unsplittable)) {
                    if constexpr (kSplit) {
                        repair = block_any(unsplittable);
                        if (repair) {
                            compute_P_dS(Constant<true>());
                            share_P_dS();
                            block_sync();
                        }
                    }
                    careful = block_any(hidden_nonfinite);
                    shrink = kMayOverflow && block_any(too_large);
                    if (shrink) {
                        dP.multiply(kShrinkFactor);
                        dK.multiply(kShrinkFactor);
                        if constexpr (kSumDq || !kInRegisters)
                            store_accumulator(shared_dS, dP, score_key, score_query);
                        block_sync();
                    }
                    if (careful) {
                        clear_nonfinite(shared.in.dO[stage]);
                        clear_nonfinite(shared.in.Q[stage]);
                        clear_nonfinite(shared.in.K);
                    }
                }
            } else if (kSumDq || !kInRegisters) {
                block_sync();  // P and dS are complete
            }

            auto accumulate_dK_dV = [&](auto repaired) {
                constexpr bool kRepair = decltype(repaired)::value;
                const RowMajorB<Element, kInRegisters, kWarpsGradD, kBr, kDv> dO_rows(shared.in.dO[stage], grad_col);
                const RowMajorB<Element, kInRegisters, kWarpsGradD, kBr, kD> Q_rows(shared.in.Q[stage], grad_col);
                if (!kBoundary || band.any_visible(queries, keys.part(opaque(grad_key), 16 * kGradM))) {
                    if constexpr (kInRegisters) {
                        warp_gemm<Element, kBr / kStepK<Element>, kRepair>(dV, RegisterA<Element, kScoreM, kScoreN>(S),
                                                                           dO_rows);
                        warp_gemm<Element, kBr / kStepK<Element>, kRepair>(dK, RegisterA<Element, kScoreM, kScoreN>(dP),
                                                                           Q_rows);
                    } else {
                        warp_gemm<Element, kBr / kStepK<Element>, kRepair>(dV, RowMajorA(shared_P, grad_key), dO_rows);
                        warp_gemm<Element, kBr / kStepK<Element>, kRepair>(dK, RowMajorA(shared_dS, grad_key), Q_rows);
                    }
                }
                if (shrink)
                    dK.multiply(1.0f / kShrinkFactor);
            };
            auto reduce_dQ = [&](auto repaired) {
                constexpr bool kRepair = decltype(repaired)::value;
                if (kBoundary && !band.any_visible(queries.part(opaque(dq_first_row()), 16 * kDqM), keys))
                    return;
                DqTile dQ;
                dQ.clear();
                warp_gemm<Element, kBc / kStepK<Element>, kRepair>(
                    dQ, TransposedA(shared_dS, dq_first_row()),
                    RowMajorB<Element, false, kWarpsDqD, kBc, kD>(shared.in.K, dq_first_col()));
                if (shrink)
                    dQ.multiply(1.0f / kShrinkFactor);
                const i32 batch = kSplit ? static_cast<i32>(opaque(work.batch)) : work.batch;  // a register less
                add_to_dq_sum(dq_sum_tile(params, batch, head, tile), dQ);
            };
            // The reductions of dQ drain under whatever follows them.
            auto accumulate = [&](auto repaired) {
                if constexpr (kSumDq && kDqFirst)
                    reduce_dQ(repaired);
                accumulate_dK_dV(repaired);
                if constexpr (kSumDq && !kDqFirst)
                    reduce_dQ(repaired);
            };
            if (!repair) {
                accumulate(Constant<false>());
            } else {
                accumulate(Constant<kSplit>());
            }
            if (kBand && kBoundary && careful) {
                shared.cleaned = true;
                block_sync();  // K, cleaned above, is read no more: fetch it as it was
                load_K(kSplit ? shared.work : work);
                copy_async_commit();
            }
        };
        if (kPeel && band.all_visible(queries, keys) && queries.end <= params.seqlen_q)
            step(Constant<false>());
        else
            step(Constant<true>());
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
    // Found anew: registers are short in the loop.
    const u32 own = warp_index(), own_key = own / kWarpsGradD * (16 * kGradM), own_col = own % kWarpsGradD * 16;
    store_accumulator(shared.out.dK, dK, own_key, own_col);
    store_accumulator(shared.out.dV, dV, own_key, own_col);
    block_sync();
    const Work at = shared.work;
    if (kBand && shared.cleaned)
        restore(params, shared, at, band);
    store_tile<kHeadDim>(shared.out.dK,
                         params.dk + at.batch * params.dk_batch_stride + at.kv_head * params.dk_head_stride,
                         params.dk_row_stride, at.keys.first, params.seqlen_k);
    store_tile<kHeadDimV>(shared.out.dV,
                          params.dv + at.batch * params.dv_batch_stride + at.kv_head * params.dv_head_stride,
                          params.dv_row_stride, at.keys.first, params.seqlen_k);
}

/// dQ = scale * its float32 sum, one query tile of one head per block.
KERNEL(kThreads, 1) void backward_dq_store(PARAMS(BackwardParams) params) {
    auto& tile_dq = *reinterpret_cast<SharedTile<Element, kBr, kD>*>(dynamic_shared_memory);
    const QueryTile tile(params);
    DqTile dQ;
    load_dq_sum(dq_sum_tile(params, tile.batch, tile.head, tile.index), dQ);
    dQ.multiply(params.scale);
    store_accumulator(tile_dq, dQ, dq_first_row(), dq_first_col());
    block_sync();
    store_tile<kHeadDim>(tile_dq, params.dq + tile.batch * params.dq_batch_stride + tile.head * params.dq_head_stride,
                         params.dq_row_stride, tile.index * static_cast<i32>(kBr), params.seqlen_q);
}
