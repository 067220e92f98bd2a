// FlashAttention backward for Hopper (sm_90a) and head dims above 128: Algorithm 2 of arXiv:2307.08691 with loads by the
// tensor memory accelerator and products of warpgroups that have one role each.
//
// A block owns 64 keys of one key/value head and walks over the query tiles that see them, for every query head of the
// group. dK and dV of 64 keys fill half of the registers, so that two warpgroups share them by kind and not by key. With the
// keys as rows, P^T and dS^T come out of one product as the operand of the next:
//   first:   S^T = K Q^T,    P^T = exp(S^T - LSE),         dV += P^T dO
//   second:  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),    dK += dS^T Q
//   third:   dQ = dS K
// P passes from the first to the second as float32, each thread's for the same thread of the other. dS passes to the third
// as a tile, and dQ leaves from registers for a float32 sum in global memory: there is no room to stage it, and nobody but
// the third waits for it. A fourth warpgroup loads.
//
// Nobody takes turns: while one exponentiates, the products of the others run. The second starts dK of one tile and dP of the
// next together, the first dV and S where it has registers enough. By count, shared memory is busy for 2750 cycles per tile of
// 256 head dims, the tensor cores for 2560; and the reductions of dQ are 64 KB.
#include "tensor_params.cuh"
#include "backward_rows.cuh"
#include "band.cuh"
#include "dq_parts.cuh"
#include "hidden_rows.cuh"
#include "key_block.cuh"
#include "panel_tile.cuh"
#include "platform/mbarrier.cuh"
#include "platform/tma.cuh"
#include "platform/warpgroup.cuh"
#include "probability.cuh"
#include "query_rows.cuh"
#include "query_tile.cuh"
#include "ring.cuh"
#include "score.cuh"
#include "traits.cuh"
#include "warpgroup_tile.cuh"
#include "weights.cuh"

constexpr u32 kProductCols = 128;  // of dK or dV that one product computes

// Warpgroups by their roles, and the registers of their threads: together what 512 threads are launched with.
// Whom the tensor cores and the schedulers prefer may depend on the order.
constexpr bool kDqFirst = CF_DQ_FIRST;
constexpr u32 kKeyRole = 1, kQueryRole = kDqFirst ? 0 : 2, kProducerRole = 3;  // the other one: values
constexpr u32 kValueRegisters = 200, kKeyRegisters = 208, kQueryRegisters = 80, kProducerRegisters = 24;
static_assert(kValueRegisters + kKeyRegisters + kQueryRegisters + kProducerRegisters == 4 * 128);
static_assert(kThreads == 4 * 128 && kBc == 64 && kBr == 64, "four warpgroups, and one product per tile");
// Does the first warpgroup start S of the next tile while dV of this one is computed? Beside 256 columns of dV there are not
// registers enough for S and the P that dV is computed with.
constexpr bool kValueOverlaps = kDv <= 224;
// dS from the P that dV is computed with: fewer bytes to pass, a little less precision. A capped score has its slope in P.
constexpr bool kRoundedP = CF_ROUNDED_P && kScoreKind != 2;

using TileK = PanelTile<Element, kBc, kD>;
using TileV = PanelTile<Element, kBc, kDv>;
using TileQ = PanelTile<Element, kBr, kD>;
using TileDO = PanelTile<Element, kBr, kDv>;
using TileDS = PanelTile<Element, kBr, kBc>;

constexpr u32 kBuffers = 2;                   // of dS
constexpr u32 kPBuffers = kRoundedP ? 2 : 1;  // as many as fit the room of one in float32
constexpr u32 kPBytes = kBr * kBc * 4 / kPBuffers;

struct SharedStorage {
    TileK K;
    TileV V;
    TileQ Q[kStages];
    TileDO dO[kStages];
    TileDS dS[kBuffers];
    alignas(16) u8 P[kPBuffers][kPBytes];
    float lse[kStages][kBr];  // see QueryRows
    float delta[kStages][kBr];
    Barrier K_full, V_full, Q_full[kStages], Q_empty[kStages], dO_full[kStages], dO_empty[kStages];
    Barrier P_full[kPBuffers], P_empty[kPBuffers], dS_full[kBuffers], dS_empty[kBuffers];
    alignas(4) u8 shrunk[kBuffers][4];  // which warps have divided their dS by 2^24
    volatile u32 rare[kStages];         // what is unusual about the rows of a tile
};

// Named barriers.
constexpr u32 kValueAndKeyMeet = 1, kValueMeets = 2, kKeyMeets = 3;

DEVICE void init_barriers(SharedStorage& shared) {
    barrier_init(shared.K_full, 1);
    barrier_init(shared.V_full, 1);
    for (u32 n = 0; n < kStages; ++n) {
        barrier_init(shared.Q_full[n], 2);  // Q, and the rows' LSE and delta
        barrier_init(shared.dO_full[n], 1);
        barrier_init(shared.Q_empty[n], 8);
        barrier_init(shared.dO_empty[n], 8);
    }
    for (u32 n = 0; n < kPBuffers; ++n) {
        barrier_init(shared.P_full[n], 4);
        barrier_init(shared.P_empty[n], 4);
    }
    for (u32 n = 0; n < kBuffers; ++n) {
        barrier_init(shared.dS_full[n], 4);
        barrier_init(shared.dS_empty[n], 4);
    }
    barrier_init_fence();
}

/// This warp arrives; what its lanes did before is seen by whoever waits.
DEVICE void arrive(Barrier& barrier) {
    warp_sync();
    if (lane_index() == 0)
        barrier_arrive(barrier);
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
        barrier_wait(shared.Q_empty[ring.at], ring.parity ^ 1);
        barrier_arrive_expect(shared.Q_full[ring.at], sizeof(TileQ::data));
        shared.Q[ring.at].load(params.q_map, shared.Q_full[ring.at], walk.first_query(), walk.head, work.batch);
        if (n == 0) {
            barrier_arrive_expect(shared.V_full, sizeof(TileV::data));
            shared.V.load(params.v_map, shared.V_full, work.keys.first, work.kv_head, work.batch);
        }
        barrier_wait(shared.dO_empty[ring.at], ring.parity ^ 1);
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
        const QueryRows rows(params, work.batch, walk.head, walk.first_query());
        barrier_wait(shared.Q_empty[ring.at], ring.parity ^ 1);
        rows.store(shared.lse[ring.at], shared.delta[ring.at]);
        if (lane_index() == 0)
            shared.rare[ring.at] = rows.rare();
        arrive(shared.Q_full[ring.at]);
        ring.advance();
        walk.advance(work.tiles);
    }
}

/// Pairs n of both rows of P, with the slope of a capped score as float32 (`exact`) or as dV takes it, for the same thread
/// of another warpgroup.
DEVICE void pass_weights(u8* to, u32 n, const Scores& exact, const Weights& rounded) {
    const u32 place = 128 * n + thread_index() % 128;
    if constexpr (kRoundedP)
        reinterpret_cast<uint2*>(to)[place] = {rounded.x[2 * n], rounded.x[2 * n + 1]};
    else
        reinterpret_cast<float4*>(to)[place] = {exact.x[4 * n], exact.x[4 * n + 1], exact.x[4 * n + 2],
                                                exact.x[4 * n + 3]};
}

/// dP becomes dS = P (dP - delta), P as it has been passed.
DEVICE void differentiate(const u8* passed, const float* delta, Scores& dP) {
    const u32 thread = thread_index() % 128;
    delta += Scores::col(0);
#pragma unroll
    for (u32 n = 0; n < dP.kPairs; ++n) {
        const float2 row_delta = *reinterpret_cast<const float2*>(delta + 8 * n);
        float4 p;
        if constexpr (kRoundedP) {
            const uint2 pairs = reinterpret_cast<const uint2*>(passed)[128 * n + thread];
            p = {to_float(Element{static_cast<u16>(pairs.x)}), to_float(Element{static_cast<u16>(pairs.x >> 16)}),
                 to_float(Element{static_cast<u16>(pairs.y)}), to_float(Element{static_cast<u16>(pairs.y >> 16)})};
        } else {
            p = reinterpret_cast<const float4*>(passed)[128 * n + thread];
        }
        dP.at(n, 0, 0) = p.x * (dP.at(n, 0, 0) - row_delta.x);
        dP.at(n, 0, 1) = p.y * (dP.at(n, 0, 1) - row_delta.y);
        dP.at(n, 1, 0) = p.z * (dP.at(n, 1, 0) - row_delta.x);
        dP.at(n, 1, 1) = p.w * (dP.at(n, 1, 1) - row_delta.y);
    }
}

/// What the first two warpgroups have in common: a walk over the query tiles, whatever their head.
struct Consumer {
    const BackwardTensorParams& params;
    SharedStorage& shared;
    const Work& work;
    const Band band;
    Ring<kStages> ring;
    i32 first_query;  // of the current tile
    bool cleaned = false;

    DEVICE Consumer(const BackwardTensorParams& params_, SharedStorage& shared_, const Work& work_)
        : params(params_),
          shared(shared_),
          work(work_),
          band(Band::of(params_)),
          first_query(work_.tiles.first * static_cast<i32>(kBr)) {}

    DEVICE void advance() {
        ring.advance();
        first_query += static_cast<i32>(kBr);
        if (first_query >= work.tiles.end * static_cast<i32>(kBr))
            first_query = work.tiles.first * static_cast<i32>(kBr);
    }

    /// Is some pair of the current tile hidden, by the band or because it is none?
    DEVICE bool hides() const {
        return !band.all_visible(queries_of(first_query), work.keys) ||
               first_query > params.seqlen_q - static_cast<i32>(kBr);
    }

    /// Where rows hidden from some key are not finite: of the current tile, once S and dP are computed. Both warpgroups.
    DEVICE void clean_rows(u32 rare) {
        if (!kBand || !may_be_nonfinite(rare) || band.all_visible(queries_of(first_query), work.keys) ||
            !has_nonfinite_rows(rare, shared.Q[ring.at]))
            return;
        constexpr u32 kCount = 2 * 128;  // neighbours
        const u32 index = thread_index() - (kDqFirst ? 128 : 0);
        named_sync(kValueAndKeyMeet, kCount);
        ::clean_rows(shared.Q[ring.at], index, kCount);
        ::clean_rows(shared.dO[ring.at], index, kCount);
        fence_async_shared();
        named_sync(kValueAndKeyMeet, kCount);
        cleaned = true;
    }

    /// dK or dV leaves; `matrix`: row 0 of the group's first head of what it was computed from.
    template <u32 kCols, bool kWeighted, typename Sums>
    DEVICE void store(Element* result, i64 row_stride, const Sums& sums, const Element* matrix, i64 matrix_head_stride,
                      i64 matrix_row_stride, u32 meeting) const {
        store_rows<Element, kCols>(result, row_stride, params.seqlen_k - work.keys.first, sums);
        if (!kBand || !cleaned)
            return;
        named_sync(meeting, 128);  // all rows are stored
#pragma unroll 1
        for (i32 head = 0; head < params.group; ++head)
            restore_rows<kCols, kWeighted>(result, row_stride, matrix + head * matrix_head_stride, matrix_row_stride,
                                           band, work.keys);
    }
};

/// The first warpgroup: P and dV.
DEVICE void compute_dV(const BackwardTensorParams& params, SharedStorage& shared, const Work& work) {
    Consumer at(params, shared, work);
    const Score score = Score::of(params);
    WarpgroupTile<kDv> dV;
    Weights P;
    dV.clear();
    const u64 K = shared.K.along_cols();

    // Descriptors of which it is seen how they come about are added to in 64 bits, at three times the instructions.
    auto start_S = [&](Scores& S) {
        wgmma_fence();
        wgmma_settle(S.x);
        multiply_transposed<TileK, TileQ>(S, K, opaque64(shared.Q[at.ring.at].along_cols()));
        wgmma_commit();
    };
    auto start_dV = [&] {
        wgmma_fence();
        wgmma_settle(dV.x);
        add_product_by_parts<kProductCols, TileDO>(dV, P, opaque64(shared.dO[at.ring.at].along_rows()));
        wgmma_commit();
    };
    /// S becomes P, for dV and for the second warpgroup.
    auto finish_S = [&](Scores& S, i32 step) {
        const Ring<kPBuffers> room(step);
        wgmma_settle(S.x);
        const u32 rare = shared.rare[at.ring.at];
        if constexpr (kScoreKind != 0)
            S.each([&](float& s) { s = score(s); });
        // Passed pair by pair: as a whole, both forms of P would take too many registers.
        barrier_wait(shared.P_empty[room.at], room.parity ^ 1);
        auto pass = [&](u32 n) { pass_weights(shared.P[room.at], n, S, P); };
        if (warp_any((rare & kPrecise) != 0))
            exponentiate<false>(S, P, score, shared.lse[at.ring.at], pass);
        else
            exponentiate<true>(S, P, score, shared.lse[at.ring.at], pass);
        arrive(shared.P_full[room.at]);
        if (at.hides())
            hide(P, at.band, work.keys, at.first_query);
        at.clean_rows(rare);
        arrive(shared.Q_empty[at.ring.at]);
    };

    if (work.steps > 0) {
        barrier_wait(shared.K_full, 0);
        {
            Scores S;
            barrier_wait(shared.Q_full[0], 0);
            start_S(S);
            wgmma_wait<0>();
            finish_S(S, 0);
        }
#pragma unroll 1
        for (i32 n = 1; n < work.steps; ++n) {
            Scores S;
            Barrier& dO_empty = shared.dO_empty[at.ring.at];
            barrier_wait(shared.dO_full[at.ring.at], at.ring.parity);
            start_dV();
            at.advance();
            if constexpr (!kValueOverlaps) {
                wgmma_wait<0>();
                wgmma_settle(dV.x);
                arrive(dO_empty);
            }
            barrier_wait(shared.Q_full[at.ring.at], at.ring.parity);
            start_S(S);
            if constexpr (kValueOverlaps) {
                wgmma_wait<1>();
                wgmma_settle(dV.x);
                arrive(dO_empty);
            }
            wgmma_wait<0>();
            finish_S(S, n);
        }
        barrier_wait(shared.dO_full[at.ring.at], at.ring.parity);
        start_dV();
        wgmma_wait<0>();
        wgmma_settle(dV.x);
    }
    at.store<kHeadDimV, false>(
        params.dv + work.batch * params.dv_batch_stride + work.kv_head * params.dv_head_stride +
            work.keys.first * params.dv_row_stride,
        params.dv_row_stride, dV,
        params.dout + work.batch * params.dout_batch_stride + work.kv_head * params.group * params.dout_head_stride,
        params.dout_head_stride, params.dout_row_stride, kValueMeets);
}

/// The second warpgroup: dS and dK.
DEVICE void compute_dK(const BackwardTensorParams& params, SharedStorage& shared, const Work& work) {
    Consumer at(params, shared, work);
    WarpgroupTile<kD> dK;
    Weights dS;
    bool shrunk = false;  // this warp's dS of the current tile
    dK.clear();
    const u64 V = shared.V.along_cols();
    const SharedAddress dS_place = opaque(transposed_place(shared.dS[0], 0, 0));  // one register in place of its parts

    auto start_dP = [&](Scores& dP) {
        wgmma_fence();
        wgmma_settle(dP.x);
        multiply_transposed<TileV, TileDO>(dP, V, opaque64(shared.dO[at.ring.at].along_cols()));
        wgmma_commit();
    };
    auto start_dK = [&] {
        wgmma_fence();
        wgmma_settle(dK.x);
        add_product_by_parts<kProductCols, TileQ>(dK, dS, opaque64(shared.Q[at.ring.at].along_rows()));
        wgmma_commit();
    };
    auto finish_dK = [&] {
        wgmma_settle(dK.x);
        if (kMayOverflow && shrunk)
            dK.each([](float& x) { x *= 1.0f / kShrinkFactor; });
    };
    /// dP becomes dS, for dK and for the third warpgroup.
    auto finish_dP = [&](Scores& dP, i32 step) {
        const Ring<kPBuffers> weights(step);
        const Ring<kBuffers> room(step);
        wgmma_settle(dP.x);
        barrier_wait(shared.Q_full[at.ring.at], at.ring.parity);
        const u32 rare = shared.rare[at.ring.at];
        barrier_wait(shared.P_full[weights.at], weights.parity);
        differentiate(shared.P[weights.at], shared.delta[at.ring.at], dP);
        arrive(shared.P_empty[weights.at]);
        dS.round(dP);
        const bool hidden = at.hides();
        if (hidden)
            hide(dS, at.band, work.keys, at.first_query);
        if constexpr (kMayOverflow) {
            shrunk = warp_any(overflown(dS, dP));
            if (shrunk) {
                dP.each([](float& x) { x *= kShrinkFactor; });
                dK.each([](float& x) { x *= kShrinkFactor; });
                dS.round(dP);
                if (hidden)
                    hide(dS, at.band, work.keys, at.first_query);
            }
        }
        barrier_wait(shared.dS_empty[room.at], room.parity ^ 1);
        if (kMayOverflow && lane_index() == 0)
            shared.shrunk[room.at][thread_index() % 128 / 32] = shrunk;
        store_transposed<TileDS>(dS_place + room.at * sizeof(TileDS), dS);
        arrive(shared.dS_full[room.at]);
        at.clean_rows(rare);
        arrive(shared.dO_empty[at.ring.at]);
    };

    if (work.steps > 0) {
        barrier_wait(shared.V_full, 0);
        {
            Scores dP;
            barrier_wait(shared.dO_full[0], 0);
            start_dP(dP);
            wgmma_wait<0>();
            finish_dP(dP, 0);
        }
#pragma unroll 1
        for (i32 n = 1; n < work.steps; ++n) {
            Scores dP;
            Barrier& Q_empty = shared.Q_empty[at.ring.at];
            start_dK();
            at.advance();
            barrier_wait(shared.dO_full[at.ring.at], at.ring.parity);
            start_dP(dP);
            wgmma_wait<1>();
            finish_dK();
            arrive(Q_empty);
            wgmma_wait<0>();
            finish_dP(dP, n);
        }
        start_dK();
        wgmma_wait<0>();
        finish_dK();
    }
    dK.each([&](float& x) { x *= params.scale; });
    at.store<kHeadDim, true>(
        params.dk + work.batch * params.dk_batch_stride + work.kv_head * params.dk_head_stride +
            work.keys.first * params.dk_row_stride,
        params.dk_row_stride, dK,
        params.q + work.batch * params.q_batch_stride + work.kv_head * params.group * params.q_head_stride,
        params.q_head_stride, params.q_row_stride, kKeyMeets);
}

/// Computes elements of a part of dQ once more, and adds them to the sum: over the keys that a query sees, with dS as large
/// as it is. wrong: one bit per element of this lane.
DEVICE void amend_dQ(SharedStorage& shared, const Band& band, const Range& keys, i32 first_query, u32 buffer, u32 part,
                     u64 wrong, float* sum) {
#pragma unroll 1
    for (u32 i = 0; i < kDqCols / 2; ++i) {
        if ((wrong >> i & 1) == 0)
            continue;
        const u32 row = DqTile::row(i / 2 % 2), col = part * kDqCols + DqTile::col(i / 4) + i % 2;
        const Range seen = band.keys_of(first_query + static_cast<i32>(row)).from(keys.first);
        float element = 0.0f;
#pragma unroll 1
        for (i32 n = larger(0, seen.first); n < smaller(static_cast<i32>(kBc), seen.end); ++n) {
            const u32 key = static_cast<u32>(n);
            const float ds = to_float(shared.dS[buffer].at(row, key));
            const bool shrunk = kMayOverflow && shared.shrunk[buffer][key / 16] != 0;
            element += (shrunk ? ds / kShrinkFactor : ds) * to_float(shared.K.at(key, col));
        }
        reduce_add(sum + i / 4 * 512 + 4 * (thread_index() % 128) + i % 4, element);
    }
}

/// The third warpgroup: dQ.
DEVICE void compute_dQ(const BackwardTensorParams& params, SharedStorage& shared, const Work& work) {
    const Band band = Band::of(params);
    Walk walk(params, work);
    const u64 K = shared.K.along_rows();
    if (work.steps > 0)
        barrier_wait(shared.K_full, 0);
#pragma unroll 1
    for (i32 n = 0; n < work.steps; ++n) {
        const Ring<kBuffers> ring(n);
        barrier_wait(shared.dS_full[ring.at], ring.parity);
        bool all_wrong = false;
        if constexpr (kMayOverflow)
            all_wrong = warp_any(*reinterpret_cast<const volatile u32*>(shared.shrunk[ring.at]) != 0);
        // Where some key may be hidden from some query.
        const bool doubtful = all_wrong || (kBand && !band.all_visible(queries_of(walk.first_query()), work.keys));
        WarpgroupOperand<Element, kBc> dS;
        load_operand(dS, shared.dS[ring.at], 0);
        if (!doubtful)
            arrive(shared.dS_empty[ring.at]);
        float* sum = dq_sum_part(params, work.batch, walk.head, walk.tile, 0);
        // Not unrolled: the registers have room for one part.
#pragma unroll 1
        for (u32 part = 0; part < kDqParts; ++part) {
            DqTile dQ;
            wgmma_fence();
            wgmma_settle(dQ.x);
            multiply<TileK>(dQ, dS, advance(K, part * TileK::kPanelBytes));
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_settle(dQ.x);
            u64 wrong = 0;
            if ((kBand || kMayOverflow) && doubtful && (all_wrong || warp_any(!dQ.all_finite())))
#pragma unroll
                for (u32 i = 0; i < dQ.kCols / 2; ++i)
                    if (all_wrong || !is_finite(dQ.x[i])) {
                        wrong |= 1ull << i;
                        dQ.x[i] = 0.0f;
                    }
            add_fragments(sum, dQ);
            if ((kBand || kMayOverflow) && wrong != 0)
                amend_dQ(shared, band, work.keys, walk.first_query(), ring.at, part, wrong, sum);
            sum += kDqPart;
        }
        if (doubtful)
            arrive(shared.dS_empty[ring.at]);
        walk.advance(work.tiles);
    }
}

constexpr u32 kRowThreads = kLanesPerRow * kBr;  // so that all loads of a block are under way at once

KERNEL(kRowThreads, 1) void backward_rows(PARAMS(BackwardTensorParams) params) {
    clear_dq_sum<kRowThreads>(params);
    prepare_rows<kRowThreads>(params);
}

KERNEL(kThreads, 1) void backward_wgmma_wide(PARAMS(BackwardTensorParams) params) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const u32 role = warpgroup_index();
    if (thread_index() == 0)
        init_barriers(shared);
    block_sync();
    const Work work(params);
    if (role == kProducerRole) {
        registers_release<kProducerRegisters>();
        const u32 warp = warp_index() % 4;
        if (warp == 0)
            load_rows(params, shared, work);
        else if (warp == 1 && lane_index() == 0)
            load_tiles(params, shared, work);
    } else if (role == kQueryRole) {
        registers_release<kQueryRegisters>();
        compute_dQ(params, shared, work);
    } else if (role == kKeyRole) {
        registers_acquire<kKeyRegisters>();
        compute_dK(params, shared, work);
    } else {
        registers_acquire<kValueRegisters>();
        compute_dV(params, shared, work);
    }
}

/// dQ = scale * its float32 sum, one query tile of one head per block, a warpgroup for every other part.
KERNEL(2 * 128, 1) void backward_dq_store(PARAMS(BackwardTensorParams) params) {
    const QueryTile at(params);
    const i32 first_query = at.index * static_cast<i32>(kBr);
    Element* dq = params.dq + at.batch * params.dq_batch_stride + at.head * params.dq_head_stride +
                  first_query * params.dq_row_stride;
    for (u32 part = warpgroup_index(); part < kDqParts; part += 2) {
        DqTile dQ;
        load_fragments(dQ, dq_sum_part(params, at.batch, at.head, at.index, part));
        dQ.each([&](float& x) { x *= params.scale; });
        store_rows<Element>(dq + part * kDqCols, params.dq_row_stride, params.seqlen_q - first_query,
                            kHeadDim - part * kDqCols, dQ);
    }
}
