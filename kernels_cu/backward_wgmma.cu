// FlashAttention backward for Hopper (sm_90a): Algorithm 2 of arXiv:2307.08691 with loads by the tensor memory
// accelerator, products of warpgroups, and dQ summed by bulk reductions.
//
// A block owns kBc keys of one key/value head and walks over the query tiles that see them, for every query head of the
// group, so that dK and dV are summed over the group in registers. Each of two consumer warpgroups has 64 of the keys.
// With the keys as rows, P^T and dS^T come out of one product as the operand of the next:
//   S^T = K Q^T,  P^T = exp(S^T - LSE),  dV += P^T dO,  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q
// Only dQ += dS K needs the dS of both: it passes through shared memory, and each consumer computes one half of dQ^T,
// which leaves by way of shared memory for a float32 sum in global memory.
//
// The consumers take turns at the tensor cores. In its turn, one starts dV and dK of tile j, a dQ, and S of tile j + 1;
// then it exponentiates while the other multiplies. The order of the turns alone makes dS complete for whoever reads it,
// and its two buffers free for whoever writes them: the first consumer computes dQ of tile j - 1, the second dQ of tile j.
// Nothing is under way where the loop begins anew, which is what lets the compiler keep the products asynchronous.
//
// The producer warpgroup has a thread that loads Q and dO, a warp that loads LSE and delta, and one warp per consumer
// that sends its dQ. The bandwidth of shared memory binds.
#include "tensor_params.cuh"
#include "backward_rows.cuh"
#include "band.cuh"
#include "dq_halves.cuh"
#include "hidden_rows.cuh"
#include "key_block.cuh"
#include "panel_tile.cuh"
#include "platform/mbarrier.cuh"
#include "platform/tma.cuh"
#include "platform/warpgroup.cuh"
#include "query_rows.cuh"
#include "query_tile.cuh"
#include "ring.cuh"
#include "score.cuh"
#include "traits.cuh"
#include "warpgroup_tile.cuh"
#include "weights.cuh"

static_assert(kThreads == 128 * (kConsumers + 1) && kBc == 64 * kConsumers, "each consumer owns 64 keys");
constexpr u32 kProducerRegisters = 24;
constexpr u32 kConsumerRegisters = 240;
constexpr u32 kConsumerWarps = 4 * kConsumers;
// dS from the P that dV is computed with: fewer registers, a little less precision. A capped score has its slope in P.
constexpr bool kRoundedP = CF_ROUNDED_P && kScoreKind != 2;
constexpr bool kRegisterV = CF_REGISTER_V;  // V, the same for all tiles, stays in registers
constexpr bool kEarlyTurn = CF_EARLY_TURN;  // the turn is passed while dQ is still being computed

using TileK = PanelTile<Element, kBc, kD>;
using TileV = PanelTile<Element, kBc, kDv>;
using TileQ = PanelTile<Element, kBr, kD>;
using TileDO = PanelTile<Element, kBr, kDv>;
using TileDS = PanelTile<Element, kBr, kBc>;

struct SharedStorage {
    TileK K;
    TileV V;
    TileQ Q[kStages];
    TileDO dO[kStages];
    TileDS dS[2];
    float dQ[kConsumers][kDqHalf];
    float lse[kStages][kBr];  // see QueryRows
    float delta[kStages][kBr];
    Barrier K_full, V_full, Q_full[kStages], dO_full[kStages], empty[kStages];
    Barrier dS_read[kConsumers];              // a consumer has computed a dQ (kEarlyTurn)
    alignas(8) u8 shrunk[2][kConsumerWarps];  // which warps have divided their dS by 2^24
    volatile u32 rare[kStages];               // what is unusual about the rows of a tile
};
// Named barriers.
constexpr u32 kTurn = 1, kDqFull = 3, kDqEmpty = 5, kConsumersMeet = 7, kConsumerMeets = 8;

DEVICE void init_barriers(SharedStorage& shared) {
    barrier_init(shared.K_full, 1);
    barrier_init(shared.V_full, 1);
    for (u32 n = 0; n < kStages; ++n) {
        barrier_init(shared.Q_full[n], 2);  // Q, and the rows' LSE and delta
        barrier_init(shared.dO_full[n], 1);
        barrier_init(shared.empty[n], kConsumerWarps);
    }
    for (u32 n = 0; n < kConsumers; ++n)
        barrier_init(shared.dS_read[n], 4);
    barrier_init_fence();
}

/// One thread: loads K, V, and every Q and dO in the order of their use.
DEVICE void load_tiles(const BackwardTensorParams& params, SharedStorage& shared, const Work& work) {
    tensor_map_prefetch(params.q_map);
    tensor_map_prefetch(params.k_map);
    tensor_map_prefetch(params.v_map);
    tensor_map_prefetch(params.dout_map);
    Ring<kStages> ring;
    Walk walk(params, work);
    if (work.steps > 0) {
        barrier_arrive_expect(shared.K_full, sizeof(TileK::data));
        shared.K.load(params.k_map, shared.K_full, work.keys.first, work.kv_head, work.batch);
    }
#pragma unroll 1
    for (i32 n = 0; n < work.steps; ++n) {
        barrier_wait(shared.empty[ring.at], ring.parity ^ 1);
        barrier_arrive_expect(shared.Q_full[ring.at], sizeof(TileQ::data));
        shared.Q[ring.at].load(params.q_map, shared.Q_full[ring.at], walk.first_query(), walk.head, work.batch);
        if (n == 0) {
            barrier_arrive_expect(shared.V_full, sizeof(TileV::data));
            shared.V.load(params.v_map, shared.V_full, work.keys.first, work.kv_head, work.batch);
        }
        barrier_arrive_expect(shared.dO_full[ring.at], sizeof(TileDO::data));
        shared.dO[ring.at].load(params.dout_map, shared.dO_full[ring.at], walk.first_query(), walk.head, work.batch);
        ring.advance();
        walk.advance(work.tiles);
    }
}

/// One warp: LSE and delta of every query tile.
DEVICE void load_rows(const BackwardTensorParams& params, SharedStorage& shared, const Work& work) {
    Ring<kStages> ring;
    Walk walk(params, work);
#pragma unroll 1
    for (i32 n = 0; n < work.steps; ++n) {
        const QueryRows rows(params, work, walk);
        barrier_wait(shared.empty[ring.at], ring.parity ^ 1);
        rows.store(shared.lse[ring.at], rows.lse);
        rows.store(shared.delta[ring.at], rows.delta);
        if (lane_index() == 0)
            shared.rare[ring.at] = rows.rare;
        warp_sync();
        if (lane_index() == 0)
            barrier_arrive(shared.Q_full[ring.at]);
        ring.advance();
        walk.advance(work.tiles);
    }
}

/// One warp: adds a consumer's halves of dQ to the sum.
DEVICE void send_dQ(const BackwardTensorParams& params, SharedStorage& shared, const Work& work, u32 consumer) {
    constexpr u32 kCount = 128 + 32;
    if (work.steps == 0)
        return;
    const i32 skipped = consumer == 0 ? 1 : 0;  // its first dQ is of no tile
    Walk walk(params, work);
#pragma unroll 1
    for (i32 n = -skipped; n < work.steps; ++n) {
        named_arrive(kDqEmpty + consumer, kCount);
        named_sync(kDqFull + consumer, kCount);
        if (n < 0)
            continue;
        if (lane_index() == 0) {
            bulk_reduce_add(dq_sum_half(params, work.batch, walk.head, walk.tile, consumer), shared.dQ[consumer],
                            sizeof(shared.dQ[consumer]));
            bulk_commit();
            bulk_wait_read<0>();
        }
        warp_sync();
        walk.advance(work.tiles);
    }
    if (lane_index() == 0)
        bulk_wait<0>();
}

/// One warpgroup, which owns 64 of the keys.
struct Consumer {
    const BackwardTensorParams& params;
    SharedStorage& shared;
    const Work& work;
    const u32 index;
    const Band band;
    const Score score;
    const Range keys;  // its own
    Ring<kStages> ring;

    DEVICE Consumer(const BackwardTensorParams& params_, SharedStorage& shared_, const Work& work_, u32 index_)
        : params(params_),
          shared(shared_),
          work(work_),
          index(index_),
          band(Band::of(params_)),
          score(Score::of(params_)),
          keys(work_.keys.part(64 * index_, 64)) {}

    using Sums = WarpgroupTile<kD>;
    using SumsV = WarpgroupTile<kDv>;

    // Consumers use the tensor cores in turns.
    DEVICE void take_turn() { named_sync(kTurn + index, 128 * kConsumers); }
    DEVICE void pass_turn() { named_arrive(kTurn + (index ^ 1), 128 * kConsumers); }

    DEVICE void release(Barrier& barrier) {
        if (lane_index() == 0)
            barrier_arrive(barrier);
    }

    /// dP becomes dS = P (dP - delta).
    DEVICE void differentiate(const Scores& S, const Weights& P, Scores& dP) const {
        const float* delta = shared.delta[ring.at] + S.col(0);
#pragma unroll
        for (u32 n = 0; n < S.kPairs; ++n) {
            const float2 row_delta = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 pair = P.x[2 * n + half];
                const float p[2] = {kRoundedP ? to_float(Element{static_cast<u16>(pair)}) : S.at(n, half, 0),
                                    kRoundedP ? to_float(Element{static_cast<u16>(pair >> 16)}) : S.at(n, half, 1)};
                dP.at(n, half, 0) = p[0] * (dP.at(n, half, 0) - row_delta.x);
                dP.at(n, half, 1) = p[1] * (dP.at(n, half, 1) - row_delta.y);
            }
        }
    }

    /// Of the current tile, once S and dP are computed. Both consumers.
    DEVICE void clean_rows() {
        constexpr u32 kCount = 128 * kConsumers;
        named_sync(kConsumersMeet, kCount);
        ::clean_rows(shared.Q[ring.at], thread_index(), kCount);
        ::clean_rows(shared.dO[ring.at], thread_index(), kCount);
        fence_async_shared();
        named_sync(kConsumersMeet, kCount);
    }

    /// Computes elements of dQ^T in shared memory, where this thread has stored them, once more: over the keys that a
    /// query sees, with dS as large as it is. Those that are not finite, which a hidden key may have made so, or all.
    DEVICE void amend_dQ(i32 first_query, u32 buffer, bool all) {
        DqTile place;
        float* mine = shared.dQ[index] + 4 * (thread_index() % 128);
#pragma unroll 1
        for (u32 i = 0; i < kDqCols / 2; ++i) {
            float& element = mine[i / 4 * 512 + i % 4];
            if (!all && is_finite(element))
                continue;
            const u32 col = dq_panel(index) * TileK::kPanelCols + place.row(i / 2 % 2);
            const u32 row = dq_first_query(index) + place.col(i / 4) + i % 2;
            const Range seen = band.keys_of(first_query + static_cast<i32>(row)).from(work.keys.first);
            float sum = 0.0f;
#pragma unroll 1
            for (i32 n = larger(0, seen.first); n < smaller(static_cast<i32>(kBc), seen.end); ++n) {
                const u32 key = static_cast<u32>(n);
                const float ds = to_float(shared.dS[buffer].at(row, key));
                const bool shrunk = kMayOverflow && shared.shrunk[buffer][key / 16] != 0;
                sum += (shrunk ? ds / kShrinkFactor : ds) * to_float(shared.K.at(key, col));
            }
            element = sum;
        }
    }

    /// Puts what clean_rows took away into the rows of dK and dV that saw it.
    DEVICE void restore_rows(Element* dk, Element* dv) const {
        named_sync(kConsumerMeets + index, 128);  // all rows are stored
        const Element* q = params.q + work.batch * params.q_batch_stride;
        const Element* dout = params.dout + work.batch * params.dout_batch_stride;
#pragma unroll 1
        for (i32 head = work.kv_head * params.group; head < (work.kv_head + 1) * params.group; ++head) {
            ::restore_rows<kHeadDim, true>(dk, params.dk_row_stride, q + head * params.q_head_stride,
                                           params.q_row_stride, band, keys);
            ::restore_rows<kHeadDimV, false>(dv, params.dv_row_stride, dout + head * params.dout_head_stride,
                                             params.dout_row_stride, band, keys);
        }
    }

    DEVICE void run();
};

/// dK and dV of this warpgroup's keys, and its halves of dQ.
DEVICE void Consumer::run() {
    Sums dK;
    SumsV dV;
    Weights P, dS;  // of the current tile, as operands
    WarpgroupOperand<Element, kDv> V;
    i32 first_query = work.tiles.first * static_cast<i32>(kBr), query_before = first_query;
    u32 buffer = 0;       // of the current tile's dS
    bool shrunk = false;  // this warp's dS of the current tile
    bool cleaned = false;
    dK.clear();
    dV.clear();

    const u64 K_rows = advance(shared.K.along_cols(), 64 * index * TileK::kRowBytes),
              V_rows = advance(shared.V.along_cols(), 64 * index * TileV::kRowBytes),
              K_panel = advance(shared.K.along_rows(), dq_panel(index) * TileK::kPanelBytes);
    // Descriptors of which it is seen how they come about are added to in 64 bits, at three times the instructions.
    auto start_S = [&](Scores& S) {
        wgmma_fence();
        wgmma_settle(S.x);
        multiply_transposed<TileK, TileQ>(S, K_rows, opaque64(shared.Q[ring.at].along_cols()));
        wgmma_commit();
    };
    auto start_dP = [&](Scores& dP) {
        wgmma_fence();
        wgmma_settle(dP.x);
        if constexpr (kRegisterV)
            multiply_transposed<TileDO>(dP, V, opaque64(shared.dO[ring.at].along_cols()));
        else
            multiply_transposed<TileV, TileDO>(dP, V_rows, opaque64(shared.dO[ring.at].along_cols()));
        wgmma_commit();
    };
    auto start_dV_dK = [&] {
        wgmma_fence();
        wgmma_settle(dV.x);
        wgmma_settle(dK.x);
        add_product<TileDO>(dV, P, opaque64(shared.dO[ring.at].along_rows()));
        add_product<TileQ>(dK, dS, opaque64(shared.Q[ring.at].along_rows()));
        wgmma_commit();
    };
    // The tile before the current one for the first consumer, the current one for the second.
    auto dQ_buffer = [&] { return index == 0 ? buffer ^ 1 : buffer; };
    auto dQ_query = [&] { return index == 0 ? query_before : first_query; };
    auto start_dQ = [&](DqTile& dQ, u32 of) {
        wgmma_settle(dQ.x);
        multiply_transposes<TileK, TileDS>(
            dQ, K_panel, advance(opaque64(shared.dS[of].along_cols()), dq_first_query(index) * TileDS::kRowBytes));
        wgmma_commit();
    };
    auto finish_dV_dK = [&] {
        wgmma_settle(dV.x);
        wgmma_settle(dK.x);
        if (kMayOverflow && shrunk)
            dK.each([](float& x) { x *= 1.0f / kShrinkFactor; });
        release(shared.empty[ring.at]);
    };
    /// Sends dQ. proceed: what happens as soon as nobody looks at its dS any more.
    auto finish_dQ = [&](DqTile& dQ, i32 query, u32 of, auto proceed) {
        wgmma_settle(dQ.x);
        bool all_wrong = false;
        if constexpr (kMayOverflow)
            all_wrong = warp_any(*reinterpret_cast<const volatile u64*>(shared.shrunk[of]) != 0);
        // Where some key may be hidden from some query. All warps agree.
        const bool doubtful = all_wrong || (kBand && !band.all_visible(queries_of(query), work.keys));
        if (!doubtful)
            proceed();
        named_sync(kDqEmpty + index, 128 + 32);
        store_fragments(shared.dQ[index], dQ);
        if ((kBand || kMayOverflow) && doubtful) {
            if (all_wrong || warp_any(!dQ.all_finite()))
                amend_dQ(query, of, all_wrong);
            named_sync(kConsumerMeets + index, 128);
            proceed();
        }
        fence_async_shared();
        named_arrive(kDqFull + index, 128 + 32);
    };
    /// S and dP, which are under way in this order, become P and dS.
    auto finish_S_dP = [&](Scores& S, Scores& dP) {
        const u32 rare = shared.rare[ring.at];
        wgmma_wait<1>();
        wgmma_settle(S.x);
        const bool hidden =
            !band.all_visible(queries_of(first_query), keys) || first_query > params.seqlen_q - static_cast<i32>(kBr);
        if constexpr (kScoreKind != 0)
            S.each([&](float& s) { s = score(s); });
        if (warp_any((rare & kPrecise) != 0))
            exponentiate<false>(S, P, score, shared.lse[ring.at]);
        else
            exponentiate<true>(S, P, score, shared.lse[ring.at]);
        if (hidden)
            hide(P, band, keys, first_query);
        wgmma_wait<0>();
        wgmma_settle(dP.x);
        differentiate(S, P, dP);
        dS.round(dP);
        if (hidden)
            hide(dS, band, keys, first_query);
        if constexpr (kMayOverflow) {
            shrunk = warp_any(overflown(dS, dP));
            if (shrunk) {
                dP.each([](float& x) { x *= kShrinkFactor; });
                dK.each([](float& x) { x *= kShrinkFactor; });
                dS.round(dP);
                if (hidden)
                    hide(dS, band, keys, first_query);
            }
            if (lane_index() == 0)
                shared.shrunk[buffer][thread_index() / 32] = shrunk;
        }
        store_transposed(shared.dS[buffer], 0, index, dS);
        fence_async_shared();
        if (kBand && (rare & kNonfinite) != 0 && !band.all_visible(queries_of(first_query), work.keys)) {
            clean_rows();
            cleaned = true;
        }
    };

    if (work.steps > 0) {
        if (index == 0) {
            uint4* zeros = reinterpret_cast<uint4*>(shared.dS[1].data);
            for (u32 n = thread_index(); n < sizeof(TileDS::data) / sizeof(uint4); n += 128)
                zeros[n] = uint4{};
            if (kMayOverflow && thread_index() < kConsumerWarps)
                shared.shrunk[1][thread_index()] = 0;
            fence_async_shared();
        } else {
            pass_turn();
        }
        barrier_wait(shared.K_full, 0);
        barrier_wait(shared.V_full, 0);
        if constexpr (kRegisterV)
            load_operand(V, shared.V, 64 * index);
        {
            Scores S, dP;
            barrier_wait(shared.Q_full[0], 0);
            barrier_wait(shared.dO_full[0], 0);
            take_turn();
            start_S(S);
            start_dP(dP);
            pass_turn();
            finish_S_dP(S, dP);
        }
#pragma unroll 1
        for (i32 n = 1; n < work.steps; ++n) {
            Scores S, dP;
            DqTile dQ;
            take_turn();
            start_dV_dK();
            const u32 of = dQ_buffer();
            const i32 query = dQ_query();
            start_dQ(dQ, of);
            wgmma_wait<1>();
            finish_dV_dK();
            ring.advance();
            buffer ^= 1;
            query_before = first_query;
            first_query += static_cast<i32>(kBr);
            if (first_query >= work.tiles.end * static_cast<i32>(kBr))
                first_query = work.tiles.first * static_cast<i32>(kBr);
            barrier_wait(shared.Q_full[ring.at], ring.parity);
            start_S(S);
            if constexpr (kEarlyTurn) {
                // Whoever passed the turn first could find the barrier two phases ahead.
                barrier_wait(shared.dS_read[index ^ 1], buffer ^ index);
                pass_turn();
            }
            wgmma_wait<1>();
            finish_dQ(dQ, query, of, [&] {
                if constexpr (kEarlyTurn)
                    release(shared.dS_read[index]);
                else
                    pass_turn();
            });
            barrier_wait(shared.dO_full[ring.at], ring.parity);
            start_dP(dP);
            finish_S_dP(S, dP);
        }
        DqTile dQ;
        take_turn();
        start_dV_dK();
        const u32 of = dQ_buffer();
        const i32 query = dQ_query();
        start_dQ(dQ, of);
        wgmma_wait<0>();
        finish_dV_dK();
        finish_dQ(dQ, query, of, [&] { pass_turn(); });
        if (index == 0) {
            take_turn();
            wgmma_fence();
            start_dQ(dQ, buffer);
            wgmma_wait<0>();
            finish_dQ(dQ, first_query, buffer, [] {});
        }
    }
    dK.each([&](float& x) { x *= params.scale; });
    Element* dk = params.dk + work.batch * params.dk_batch_stride + work.kv_head * params.dk_head_stride +
                  keys.first * params.dk_row_stride;
    Element* dv = params.dv + work.batch * params.dv_batch_stride + work.kv_head * params.dv_head_stride +
                  keys.first * params.dv_row_stride;
    store_rows<Element, kHeadDim>(dk, params.dk_row_stride, params.seqlen_k - keys.first, dK);
    store_rows<Element, kHeadDimV>(dv, params.dv_row_stride, params.seqlen_k - keys.first, dV);
    if (kBand && cleaned)
        restore_rows(dk, dv);
}

constexpr u32 kRowThreads = kLanesPerRow * kBr;  // so that all loads of a block are under way at once

KERNEL(kRowThreads, 1) void backward_rows(PARAMS(BackwardTensorParams) params) {
    clear_dq_sum<kRowThreads>(params);
    prepare_rows<kRowThreads>(params);
}

KERNEL(kThreads, 1) void backward_wgmma(PARAMS(BackwardTensorParams) params) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const u32 role = warpgroup_index();
    if (thread_index() == 0)
        init_barriers(shared);
    block_sync();
    const Work work(params);
    if (role == kConsumers) {
        registers_release<kProducerRegisters>();
        const u32 warp = warp_index() % 4;
        if (warp < kConsumers)
            send_dQ(params, shared, work, warp);
        else if (warp == kConsumers)
            load_rows(params, shared, work);
        else if (lane_index() == 0)
            load_tiles(params, shared, work);
    } else {
        registers_acquire<kConsumerRegisters>();
        Consumer(params, shared, work, role).run();
    }
}

/// dQ = scale * its float32 sum, one query tile of one head per block.
KERNEL(128 * kConsumers, 1) void backward_dq_store(PARAMS(BackwardTensorParams) params) {
    using Tile = PanelTile<Element, kBr, kDqPanels * 64>;
    Tile& tile = *reinterpret_cast<Tile*>(dynamic_shared_memory);
    const QueryTile at(params);
    const u32 part = warpgroup_index();
    DqTile dQ;
    WarpgroupOperand<Element, kDqCols> rounded;
    load_fragments(dQ, dq_sum_half(params, at.batch, at.head, at.index, part));
    dQ.each([&](float& x) { x *= params.scale; });
    rounded.round(dQ);
    store_transposed(tile, dq_first_query(part), dq_panel(part), rounded);
    block_sync();
    constexpr u32 kChunkElements = 16 / sizeof(Element), kChunks = kHeadDim / kChunkElements;
    const i32 first_query = at.index * static_cast<i32>(kBr);
    Element* dq = params.dq + at.batch * params.dq_batch_stride + at.head * params.dq_head_stride +
                  first_query * params.dq_row_stride;
    for (u32 n = thread_index(); n < kBr * kChunks; n += 128 * kConsumers) {
        const u32 row = n / kChunks, col = n % kChunks * kChunkElements;
        if (first_query + static_cast<i32>(row) < params.seqlen_q)
            *reinterpret_cast<uint4*>(dq + row * params.dq_row_stride + col) =
                *reinterpret_cast<const uint4*>(&tile.at(row, col));
    }
}
