// FlashAttention backward for Hopper (sm_90a): Algorithm 2 of arXiv:2307.08691 with loads by the tensor memory
// accelerator, products of warpgroups, and dQ summed by bulk reductions.
//
// A block owns kBc keys of one key/value head and walks over the query tiles that see them, for every query head of the
// group, so that dK and dV are summed over the group in registers. Each of two consumer warpgroups has 64 of the keys.
// With the keys as rows, P^T and dS^T come out of one product as the operand of the next:
//   S^T = K Q^T,  P^T = exp(S^T - LSE),  dV += P^T dO,  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q
// Only dQ += dS K needs the dS of both: it passes through shared memory, and each consumer computes one half of dQ, which
// leaves by way of shared memory for a float32 sum in global memory (dq_halves.cuh).
//
// The consumers take turns at the tensor cores. In its turn, one starts dV and dK of tile j, a dQ, and S of tile j + 1;
// then it exponentiates while the other multiplies. The order of the turns alone makes dS complete for whoever reads it,
// and its two buffers free for whoever writes them: the first consumer computes dQ of tile j - 1, the second dQ of tile j.
// Nothing is under way where the loop begins anew, which is what lets the compiler keep the products asynchronous.
//
// Blocks stay and take keys after keys: the next ones are loaded while the last gradients are being stored. Without a mask
// the keys that do not make a round of all blocks are shared out by their queries (shares.cuh). The producer warpgroup has a
// thread that loads, a warp that loads LSE and delta, and two that send dQ. The bandwidth of shared memory binds.
#include "tensor_params.cuh"
#include "backward_rows.cuh"
#include "band.cuh"
#include "dq_halves.cuh"
#include "hidden_rows.cuh"
#include "panel_tile.cuh"
#include "platform/atomic.cuh"
#include "platform/mbarrier.cuh"
#include "platform/tma.cuh"
#include "platform/warpgroup.cuh"
#include "query_rows.cuh"
#include "query_tile.cuh"
#include "ring.cuh"
#include "row_stage.cuh"
#include "schedule.cuh"
#include "score.cuh"
#include "shares.cuh"
#include "tile_rows.cuh"
#include "traits.cuh"
#include "warpgroup_tile.cuh"
#include "weights.cuh"

static_assert(kStages >= 2, "S of a tile is started before the one before is released");
static_assert(kThreads == 128 * (kConsumers + 1) && kBc == 64 * kConsumers, "each consumer owns 64 keys");
constexpr u32 kProducerRegisters = 24;
constexpr u32 kConsumerRegisters = 240;
constexpr u32 kConsumerWarps = 4 * kConsumers;
// The dS of the last queries of a tile comes from the P that dV is computed with: fewer registers, a little less precision.
// A capped score has its slope in P.
constexpr u32 kExactQueries = kScoreKind == 2 ? kBr : kBr - CF_ROUNDED_QUERIES;
static_assert(kExactQueries % 8 == 0);
constexpr bool kRegisterV = CF_REGISTER_V;  // V, the same for all tiles, stays in registers

constexpr bool kFoldedRows = CF_FOLDED_ROWS;  // the tensor cores subtract LSE and delta
static_assert(!kFoldedRows || kScoreKind == 0, "a score is the product that LSE is subtracted from");
using Rows = RowsOf<kFoldedRows>::type;

using TileK = PanelTile<Element, kBc, kD>;
using TileV = PanelTile<Element, kBc, kDv>;
using TileQ = PanelTile<Element, kBr, kD>;
using TileDO = PanelTile<Element, kBr, kDv>;
using TileDS = PanelTile<Element, kBr, kBc>;

/// The keys of one key/value head that a block works on, and the query tiles that see them. index -1: there are no more.
struct alignas(16) Work {
    i32 index, batch, kv_head;
    i32 first_key;  // of kBc, some of which may lie beyond the last
    Range tiles;    // of every query head of the group
    i32 start;      // of these the first to be walked over
    i32 steps;      // tiles of all heads
};
constexpr u32 kSlots = 2;    // works announced ahead
constexpr u32 kSenders = 2;  // warps that send dQ

struct SharedStorage {
    TileK K;
    TileV V;
    TileQ Q[kStages];
    TileDO dO[kStages];
    TileDS dS[2];
    Rows rows;  // not last: memcheck takes it that a product reads 2 KB of what is there once and read again and again
    float dQ[kConsumers][kDqHalf];
    Work slots[kSlots];
    Barrier slot_full[kSlots], slot_empty[kSlots];
    Barrier K_full, K_empty, V_full, V_empty, Q_full[kStages], dO_full[kStages], empty[kStages];
    alignas(8) u8 shrunk[2][kConsumerWarps];  // which warps have divided their dS by 2^24
    volatile u32 rare[kStages];               // what is unusual about the rows of a tile, see Rows
};

// Named barriers; all but one for each consumer, kDqFull for each sender, too.
constexpr u32 kTurn = 1, kDqFull = 3, kDqEmpty = 7, kConsumersMeet = 9, kConsumerMeets = 10;
constexpr u32 kDqThreads = 128 + 32;  // a consumer and the warp that sends for it

DEVICE void init_barriers(SharedStorage& shared) {
    barrier_init(shared.K_full, 1);
    barrier_init(shared.V_full, 1);
    barrier_init(shared.K_empty, kConsumerWarps);
    barrier_init(shared.V_empty, kConsumerWarps);
    for (u32 n = 0; n < kStages; ++n) {
        barrier_init(shared.Q_full[n], 2);  // Q, and the rows' LSE and delta
        barrier_init(shared.dO_full[n], 1);
        barrier_init(shared.empty[n], kConsumerWarps);
    }
    for (u32 n = 0; n < kSlots; ++n) {
        barrier_init(shared.slot_full[n], 1);
        barrier_init(shared.slot_empty[n], kConsumerWarps + kSenders + 1);
    }
    barrier_init_fence();
}

/// The works of a block, as its warps come to know of them; all lanes of a warp, or of a warpgroup, call alike.
struct Works {
    SharedStorage& shared;
    Ring<kSlots> slot;

    DEVICE explicit Works(SharedStorage& shared_) : shared(shared_) {}
    DEVICE const Work& next() {
        barrier_wait(shared.slot_full[slot.at], slot.parity);
        return shared.slots[slot.at];
    }
    DEVICE void release() {
        warp_sync();
        if (lane_index() == 0)
            barrier_arrive(shared.slot_empty[slot.at]);
        slot.advance();
    }
};

/// Where a warp is in its walk over the query tiles of a work: downwards, by default from the last one on, so that with an
/// upper bound of the band, too, the first keys, which come first to a sum of dQ, need not be waited for.
struct Walk {
    i32 head, tile;

    DEVICE Walk(const BackwardTensorParams& params, const Work& work)
        : head(work.kv_head * params.group), tile(work.start) {}

    DEVICE void advance(const Work& work) {
        tile = (tile == work.tiles.first ? work.tiles.end : tile) - 1;
        head += tile == work.start;
    }
    DEVICE i32 first_query() const { return tile * static_cast<i32>(kBr); }
};

/// A value that is the same for all lanes, as the compiler shall know, or 0 in all but one.
DEVICE i32 same(i32 x) { return static_cast<i32>(uniform(static_cast<u32>(x))); }

/// The one thread that announces works and loads their operands.
struct Producer {
    const BackwardTensorParams& params;
    SharedStorage& shared;
    Ring<kSlots> slot;
    Ring<1> keys;
    Ring<kStages> ring;
    i32 index = -1;  // of the last work that was dealt out whole
    i32 share = 0;   // the next tile of those that are shared out

    DEVICE Producer(const BackwardTensorParams& params_, SharedStorage& shared_) : params(params_), shared(shared_) {
        if constexpr (kShares)
            share = static_cast<i32>(block_index()) * params.share;
    }

    /// Returns the work where it stays, in shared memory, for registers are short.
    DEVICE const Work& announce(const Work& work) {
        barrier_wait(shared.slot_empty[slot.at], slot.parity ^ 1);
        Work& place = shared.slots[slot.at];
        place = work;
        barrier_arrive(shared.slot_full[slot.at]);
        slot.advance();
        return place;
    }

    DEVICE Work work_at(i32 index) const {
        const TileWork at =
            tile_work_at(index, params.seqlen_k, kBc, params.batch * params.num_kv_heads, params.section, false);
        const Range tiles = Band::of(params).query_tiles(at.rows);
        i32 start = tiles.end - 1;
        if constexpr (kSpread)
            start = static_cast<i32>(
                Party::of(params, index, at.rows.first / static_cast<i32>(kBc)).start(static_cast<u32>(tiles.end)));
        return {
            index, at.batch_head / params.num_kv_heads,     at.batch_head % params.num_kv_heads, at.rows.first, tiles,
            start, (tiles.end - tiles.first) * params.group};
    }

    template <typename Tile>
    DEVICE void load(Tile& tile, const TensorMap& map, Barrier& full, i32 row, i32 head, i32 batch) {
        barrier_arrive_expect(full, sizeof(Tile::data));
        tile.load(map, full, row, head, batch);
    }

    /// K, V, and every Q and dO, each as early as its buffer is free: K is read longest.
    DEVICE void stream(const Work& work) {
        Walk walk(params, work);
#pragma unroll 1
        for (i32 n = 0; n < work.steps; ++n) {
            barrier_wait(shared.empty[ring.at], ring.parity ^ 1);
            load(shared.Q[ring.at], params.q_map, shared.Q_full[ring.at], walk.first_query(), walk.head, work.batch);
            if (n == 0) {
                barrier_wait(shared.V_empty, keys.parity ^ 1);
                load(shared.V, params.v_map, shared.V_full, work.first_key, work.kv_head, work.batch);
            }
            load(shared.dO[ring.at], params.dout_map, shared.dO_full[ring.at], walk.first_query(), walk.head,
                 work.batch);
            if (n == 0) {
                barrier_wait(shared.K_empty, keys.parity ^ 1);
                load(shared.K, params.k_map, shared.K_full, work.first_key, work.kv_head, work.batch);
                keys.advance();
            }
            ring.advance();
            walk.advance(work);
        }
    }

    /// Whoever is free takes the next keys, as late as their loads can begin. No block has keys before it runs: others may
    /// wait for what becomes of them. Those that wait for one another (Party) are dealt out, or a block might take two.
    DEVICE i32 first_work() { return kSpread ? static_cast<i32>(block_index()) : take(); }
    DEVICE i32 work_after(i32 index) { return kSpread ? index + static_cast<i32>(grid_size()) : take(); }
    DEVICE i32 take() { return static_cast<i32>(atomic_add(work_counter(params), 1)); }

    /// The next whole work, or part of one, or none.
    DEVICE Work next() {
        index = index < 0 ? first_work() : work_after(index);
        if (index < params.whole_works)
            return work_at(index);
        if constexpr (kShares) {
            const Shares shares(params);
            const i32 end = shares.end(static_cast<i32>(block_index()));
            if (share < end) {
                const i32 number = share / shares.tiles, before = number * shares.tiles;
                Work work = work_at(shares.whole + number);
                work.tiles = {share - before, smaller(shares.tiles, end - before)};
                work.start = work.tiles.end - 1;
                work.steps = (work.tiles.end - work.tiles.first) * params.group;
                share = before + work.tiles.end;
                return work;
            }
        }
        return {-1, 0, 0, 0, {0, 0}, 0, 0};
    }

    DEVICE void run() {
        tensor_map_prefetch(params.q_map);
        tensor_map_prefetch(params.k_map);
        tensor_map_prefetch(params.v_map);
        tensor_map_prefetch(params.dout_map);
#pragma unroll 1
        for (;;) {
            const Work& work = announce(next());
            if (work.index < 0)
                break;
            stream(work);
        }
    }
};

/// One warp: LSE and delta of every query tile, as Rows has them. Rows beyond the last query are hidden later.
DEVICE void load_rows(const BackwardTensorParams& params, SharedStorage& shared) {
    Works works(shared);
    Ring<kStages> ring;
#pragma unroll 1
    for (;;) {
        const Work& work = works.next();
        if (work.index < 0)
            break;
        Walk walk(params, work);
#pragma unroll 1
        for (i32 n = 0; n < work.steps; ++n) {
            const QueryRows rows(params, work.batch, walk.head, walk.first_query());
            barrier_wait(shared.empty[ring.at], ring.parity ^ 1);
            const u32 rare = shared.rows.store(ring.at, rows, walk.head, params.scale);
            if (lane_index() == 0)
                shared.rare[ring.at] = rare;
            warp_sync();
            if (lane_index() == 0)
                barrier_arrive(shared.Q_full[ring.at]);
            ring.advance();
            walk.advance(work);
        }
        works.release();
    }
}

/// One warp: adds the consumers' halves of dQ to their sums.
///
/// Of all that is added to a sum, the first stores, if nobody has cleared it. The others wait for that or, deterministic, each
/// for the one before. Those before have keys that were taken up before these, or are worked on at the same time (Party), so
/// that somebody always goes on. Two warps take every other tile: an addition takes longer than one.
struct Sender {
    const BackwardTensorParams& params;
    SharedStorage& shared;
    const u32 number;

    DEVICE void add(u32 tile, u32 half, bool first) {
        float* sum = dq_sum_half(params, tile, half);
        if (first)
            bulk_store(sum, shared.dQ[half], sizeof(shared.dQ[half]));
        else
            bulk_reduce_add(sum, shared.dQ[half], sizeof(shared.dQ[half]));
        bulk_commit();
        bulk_wait_read<0>();
    }

    /// The halves of one tile, in the order of the turns.
    DEVICE void send(const Work& work, const Walk& walk) {
        const u32 tile = dq_tile(params, work.batch, walk.head, walk.tile);
        const i32 key_tile = work.first_key / static_cast<i32>(kBc);
        u32 before = static_cast<u32>(key_tile - Band::of(params).key_tiles(dq_queries(params, walk.tile)).first);
        if constexpr (kSpread)
            before = kShares && work.index >= params.whole_works
                         ? 1  // never the first
                         : Party::of(params, work.index, key_tile)
                               .before(static_cast<u32>(walk.tile), static_cast<u32>(work.tiles.end));
#pragma unroll 1
        for (u32 half = kConsumers; half-- > 0;) {
            named_sync(kDqFull + kConsumers * number + half, kDqThreads);
            if (lane_index() == 0) {
                if (kFirstStores && before > 0 && half == kConsumers - 1) {
                    spin_until(dq_progress(params, tile),
                               [&](u32 done) { return kDeterministic ? done == before : done > 0; });
                    fence_async_global();
                }
                add(tile, half, kFirstStores && before == 0);
            }
            warp_sync();
            named_arrive(kDqEmpty + half, kDqThreads);
        }
        if ((kDeterministic || (kFirstStores && before == 0)) && lane_index() == 0) {
            bulk_wait<0>();  // what the copy engine has done is then seen by all that is ordered after this thread
            release_add(dq_progress(params, tile), 1);
        }
    }

    DEVICE void run() {
        if (number == 0)
            for (u32 half = 0; half < kConsumers; ++half)
                named_arrive(kDqEmpty + half, kDqThreads);
        Works works(shared);
#pragma unroll 1
        for (;;) {
            const Work& work = works.next();
            if (work.index < 0)
                break;
            Walk walk(params, work);
#pragma unroll 1
            for (i32 n = 0; n < work.steps; ++n, walk.advance(work))
                if (static_cast<u32>(n) % kSenders == number)
                    send(work, walk);
            works.release();
        }
        if (lane_index() == 0)
            bulk_wait<0>();
    }
};

/// One warpgroup, which owns 64 of the keys.
struct Consumer {
    const BackwardTensorParams& params;
    SharedStorage& shared;
    const u32 index;
    const Band band;
    const Score score;
    const Work* work = nullptr;  // stays in shared memory, for registers are short
    Range keys;                  // its own of the work
    Range tiles;
    i32 steps;
    Ring<kStages> ring;
    Ring<1> loaded;  // K and V
    u32 buffer = 0;  // of the current tile's dS
    u32 sender = 0;  // of the next dQ

    DEVICE Consumer(const BackwardTensorParams& params_, SharedStorage& shared_, u32 index_)
        : params(params_), shared(shared_), index(index_), band(Band::of(params_)), score(Score::of(params_)) {}

    using Sums = WarpgroupTile<kD>;
    using SumsV = WarpgroupTile<kDv>;

    // Consumers use the tensor cores in turns.
    DEVICE void take_turn() { named_sync(kTurn + index, 128 * kConsumers); }
    DEVICE void pass_turn() { named_arrive(kTurn + (index ^ 1), 128 * kConsumers); }

    DEVICE void release(Barrier& barrier) {
        if (lane_index() == 0)
            barrier_arrive(barrier);
    }

    /// Of both consumers.
    DEVICE Range work_keys() const { return Range{keys.first - static_cast<i32>(64 * index), 0}.part(0, kBc); }

    /// LSE (0) and delta (1) of a rare tile's queries, where all lanes of a warp can load them: in a part, this warp's own, of
    /// the place where the warpgroup's dS will be.
    DEVICE const float* rare_numbers(i32 first_query, u32 rare, u32 which) {
        float* numbers = reinterpret_cast<float*>(shared.dS[buffer].data) + index * (TileDS::kPanelBytes / 4) +
                         thread_index() % 128 / 32 * (2 * kBr);
        if (which == 0) {
            QueryRows rows(params, work->batch, static_cast<i32>(rare >> kRareBits), first_query);
            rows.fused = false;
            rows.store(numbers, numbers + kBr);
            warp_sync();
        }
        return numbers + which * kBr;
    }

    /// Cleans the current tile's Q and dO, once S and dP are computed. Both consumers.
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
    DEVICE void amend_dQ(i32 first_query, u32 of, bool all) {
        DqTile place;
        float* mine = shared.dQ[index] + 4 * (thread_index() % 128);
#pragma unroll 1
        for (u32 i = 0; i < DqTile::kCols / 2; ++i) {
            float& element = mine[i / 4 * 512 + i % 4];
            if (!all && is_finite(element))
                continue;
            const u32 place_row = place.row(i / 2 % 2), place_col = place.col(i / 4) + i % 2;
            const u32 col = dq_panel(index) * TileK::kPanelCols + (kDqTransposed ? place_row : place_col);
            const u32 row = dq_first_query(index) + (kDqTransposed ? place_col : place_row);
            const Range seen = band.keys_of(first_query + static_cast<i32>(row)).from(work_keys().first);
            float sum = 0.0f;
#pragma unroll 1
            for (i32 n = larger(0, seen.first); n < smaller(static_cast<i32>(kBc), seen.end); ++n) {
                const u32 key = static_cast<u32>(n);
                const float ds = to_float(shared.dS[of].at(row, key));
                const bool shrunk = kMayOverflow && shared.shrunk[of][key / 16] != 0;
                sum += (shrunk ? ds / kShrinkFactor : ds) * to_float(shared.K.at(key, col));
            }
            element = sum;
        }
    }

    /// Rows of dK or dV. With a mask (without, all blocks store at once, and it was 1% slower) they leave through the dS that
    /// is not the last tile's: nobody reads it any more, and nobody writes it before both consumers have had another turn.
    template <u32 kColsUsed, u32 kCols>
    DEVICE void store_gradient(Element* out, i64 row_stride, const WarpgroupTile<kCols>& sums) {
        const i32 rows = params.seqlen_k - keys.first;
        using Stage = RowStage<Element>;
        if constexpr (kBand && sizeof(TileDS::data) >= kConsumerWarps * sizeof(Stage))
            reinterpret_cast<Stage*>(shared.dS[buffer ^ 1].data)[thread_index() / 32].template store_rows<kColsUsed>(
                out, row_stride, rows, sums);
        else
            store_rows<Element, kColsUsed>(out, row_stride, rows, sums);
    }

    /// Puts what clean_rows took away into the rows of dK and dV that saw it.
    DEVICE void restore_nonfinite(Element* dk, Element* dv) const {
        named_sync(kConsumerMeets + index, 128);  // all rows are stored
        const Element* q = params.q + work->batch * params.q_batch_stride;
        const Element* dout = params.dout + work->batch * params.dout_batch_stride;
#pragma unroll 1
        for (i32 head = work->kv_head * params.group; head < (work->kv_head + 1) * params.group; ++head) {
            restore_rows<kHeadDim, true>(dk, params.dk_row_stride, q + head * params.q_head_stride, params.q_row_stride,
                                         band, keys);
            restore_rows<kHeadDimV, false>(dv, params.dv_row_stride, dout + head * params.dout_head_stride,
                                           params.dout_row_stride, band, keys);
        }
    }

    /// Completes dK and dV, if this block has the first tiles of the work; else gives this part to the one that has.
    DEVICE bool gather(Sums& dK, SumsV& dV) {
        if (work->index < params.whole_works)
            return true;
        const u32 block = block_index();
        if (tiles.first != 0) {
            float* part = part_sums(params, block, index);
            store_fragments(part, dK);
            store_fragments(part + 64 * kD, dV);
            named_sync(kConsumerMeets + index, 128);
            if (thread_index() % 128 == 0)
                release_add(part_counter(params, block, index), 1);
            return false;
        }
        const u32 last = static_cast<u32>(Shares(params).last_block(work->index));
#pragma unroll 1
        for (u32 other = block + 1; other <= last; ++other) {
            if (thread_index() % 128 == 0)
                spin_until(part_counter(params, other, index), [](u32 there) { return there != 0; });
            named_sync(kConsumerMeets + index, 128);
            const float* part = part_sums(params, other, index);
            gather_fragments(dK, part);
            gather_fragments(dV, part + 64 * kD);
        }
        return true;
    }

    DEVICE void run();
    DEVICE void compute();
};

/// dK and dV of this warpgroup's keys, and its halves of dQ.
DEVICE void Consumer::compute() {
    Sums dK;
    SumsV dV;
    Weights P, dS;  // of the current tile, as operands
    WarpgroupOperand<Element, kDv> V;
    i32 first_query = same(work->start) * static_cast<i32>(kBr), query_before = first_query;
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
        shared.rows.subtract_lse(S, ring.at);
        wgmma_commit();
    };
    auto start_dP = [&](Scores& dP) {
        wgmma_fence();
        wgmma_settle(dP.x);
        if constexpr (kRegisterV)
            multiply_transposed<TileDO>(dP, V, opaque64(shared.dO[ring.at].along_cols()));
        else
            multiply_transposed<TileV, TileDO>(dP, V_rows, opaque64(shared.dO[ring.at].along_cols()));
        shared.rows.subtract_delta(dP, ring.at);
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
        const u64 dS_rows = advance(opaque64(shared.dS[of].along_cols()), dq_first_query(index) * TileDS::kRowBytes);
        if constexpr (kDqTransposed)
            multiply_transposes<TileK, TileDS>(dQ, K_panel, dS_rows);
        else
            multiply<TileDS, TileK>(dQ, dS_rows, K_panel);
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
    auto finish_dQ = [&](DqTile& dQ, i32 query, u32 of, bool wanted, auto proceed) {
        wgmma_settle(dQ.x);
        if (!wanted) {
            named_sync(kConsumerMeets + index, 128);  // a warp that goes on writes the dS that others still read
            proceed();
            return;
        }
        bool all_wrong = false;
        if constexpr (kMayOverflow)
            all_wrong = warp_any(*reinterpret_cast<const volatile u64*>(shared.shrunk[of]) != 0);
        // Where some key may be hidden from some query. All warps agree.
        const bool doubtful = all_wrong || (kBand && !band.all_visible(queries_of(query), work_keys()));
        if (!doubtful)
            proceed();
        named_sync(kDqEmpty + index, kDqThreads);
        store_fragments(shared.dQ[index], dQ);
        if ((kBand || kMayOverflow) && doubtful) {
            if (all_wrong || warp_any(!dQ.all_finite()))
                amend_dQ(query, of, all_wrong);
            named_sync(kConsumerMeets + index, 128);
            proceed();
        }
        fence_async_shared();
        named_arrive(kDqFull + kConsumers * sender + index, kDqThreads);
        sender = (sender + 1) % kSenders;
    };
    /// S and dP, which are under way in this order, become P and dS.
    auto finish_S_dP = [&](Scores& S, Scores& dP) {
        const u32 rare = shared.rare[ring.at];
        const auto numbers = [&](u32 which) { return rare_numbers(first_query, rare, which); };
        wgmma_wait<1>();
        wgmma_settle(S.x);
        const bool hidden =
            !band.all_visible(queries_of(first_query), keys) || first_query > params.seqlen_q - static_cast<i32>(kBr);
        if constexpr (kScoreKind != 0)
            S.each([&](float& s) { s = score(s); });
        shared.rows.exponentiate(S, P, score, ring.at, rare, numbers);
        if (hidden)
            hide(P, band, keys, first_query);
        wgmma_wait<0>();
        wgmma_settle(dP.x);
        shared.rows.template differentiate<kExactQueries>(S, P, dP, ring.at, rare, numbers);
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
        if (kFoldedRows && warp_any((rare & kPrecise) != 0))
            named_sync(kConsumerMeets + index, 128);  // the numbers of other warps are no longer looked at
        store_transposed(shared.dS[buffer], 0, index, dS);
        fence_async_shared();
        if (kBand && may_be_nonfinite(rare) && !band.all_visible(queries_of(first_query), work_keys()) &&
            has_nonfinite_rows(rare, shared.Q[ring.at])) {
            clean_rows();
            cleaned = true;
        }
    };

    auto store = [&] {
        if (kShares && !gather(dK, dV))
            return;
        dK.each([&](float& x) { x *= params.scale; });
        Element* dk = params.dk + work->batch * params.dk_batch_stride + work->kv_head * params.dk_head_stride +
                      keys.first * params.dk_row_stride;
        Element* dv = params.dv + work->batch * params.dv_batch_stride + work->kv_head * params.dv_head_stride +
                      keys.first * params.dv_row_stride;
        store_gradient<kHeadDim>(dk, params.dk_row_stride, dK);
        store_gradient<kHeadDimV>(dv, params.dv_row_stride, dV);
        if (kBand && cleaned)
            restore_nonfinite(dk, dv);
    };
    auto next_step = [&] {
        ring.advance();
        buffer ^= 1;
    };

    if (kBand && steps == 0) {
        store();
        return;
    }
    sender = 0;
    barrier_wait(shared.K_full, loaded.parity);
    barrier_wait(shared.V_full, loaded.parity);
    loaded.advance();
    if constexpr (kRegisterV)
        load_operand(V, shared.V, 64 * index);
    {
        Scores S, dP;
        barrier_wait(shared.Q_full[ring.at], ring.parity);
        barrier_wait(shared.dO_full[ring.at], ring.parity);
        take_turn();
        start_S(S);
        start_dP(dP);
        pass_turn();
        finish_S_dP(S, dP);
    }
#pragma unroll 1
    for (i32 n = 1; n < steps; ++n) {
        Scores S, dP;
        DqTile dQ;
        take_turn();
        start_dV_dK();
        const u32 of = dQ_buffer();
        const i32 query = dQ_query();
        start_dQ(dQ, of);
        wgmma_wait<1>();
        finish_dV_dK();
        next_step();
        query_before = first_query;
        first_query =
            (first_query == tiles.first * static_cast<i32>(kBr) ? tiles.end * static_cast<i32>(kBr) : first_query) -
            static_cast<i32>(kBr);
        barrier_wait(shared.Q_full[ring.at], ring.parity);
        start_S(S);
        wgmma_wait<1>();
        finish_dQ(dQ, query, of, index != 0 || n > 1,
                  [&] { pass_turn(); });  // the first consumer's first is of no tile
        barrier_wait(shared.dO_full[ring.at], ring.parity);
        start_dP(dP);
        finish_S_dP(S, dP);
    }
    release(shared.V_empty);
    DqTile dQ;
    take_turn();
    start_dV_dK();
    const u32 of = dQ_buffer();
    const i32 query = dQ_query();
    start_dQ(dQ, of);
    wgmma_wait<0>();
    finish_dV_dK();
    finish_dQ(dQ, query, of, index != 0 || steps > 1, [&] { pass_turn(); });
    if (index != 0)
        release(shared.K_empty);
    // Once for both consumers: where each had a copy, ptxas kept the thread index in a register, and all took 3% longer.
    store();
    take_turn();
    if (index == 0) {
        wgmma_fence();
        start_dQ(dQ, buffer);
        wgmma_wait<0>();
        finish_dQ(dQ, first_query, buffer, true, [&] { pass_turn(); });
        release(shared.K_empty);
    } else {
        pass_turn();  // as many turns as the first
    }
    next_step();
}

/// Gradients of this warpgroup's keys of all works of the block.
DEVICE void Consumer::run() {
    if (index == 0) {
        // What the first dQ of all is computed from, and nobody wants.
        uint4* zeros = reinterpret_cast<uint4*>(shared.dS[1].data);
        for (u32 n = thread_index(); n < sizeof(TileDS::data) / sizeof(uint4); n += 128)
            zeros[n] = uint4{};
        fence_async_shared();
    } else {
        pass_turn();
    }
    if (kBand)
        named_sync(kConsumersMeet, 128 * kConsumers);  // keys that nobody sees are stored at once, through these zeros
    Works works(shared);
#pragma unroll 1
    for (;;) {
        work = &works.next();
        if (same(work->index) < 0)
            break;
        keys = Range{same(work->first_key), 0}.part(64 * index, 64);
        tiles = {same(work->tiles.first), same(work->tiles.end)};
        steps = same(work->steps);
        compute();
        works.release();
    }
}

constexpr u32 kRowThreads = kLanesPerRow * kBr;  // so that all loads of a block are under way at once

KERNEL(kRowThreads, 1) void backward_rows(PARAMS(BackwardTensorParams) params) {
    begin_dq<kRowThreads>(params);
    prepare_rows<kRowThreads>(params);
}

KERNEL(kThreads, 1) void backward_wgmma(PARAMS(BackwardTensorParams) params) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const u32 role = warpgroup_index();
    if (thread_index() == 0)
        init_barriers(shared);
    shared.rows.init(thread_index());
    block_sync();
    if (role == kConsumers) {
        registers_release<kProducerRegisters>();
        const u32 role = warp_index() % 4;
        if (role < kSenders)
            Sender{params, shared, role}.run();
        else if (role == kSenders)
            load_rows(params, shared);
        else if (lane_index() == 0)
            Producer(params, shared).run();
    } else {
        registers_acquire<kConsumerRegisters>();
        Consumer(params, shared, role).run();
    }
}

/// dQ = scale * its float32 sum, one query tile of one head per block.
KERNEL(128 * kConsumers, 1) void backward_dq_store(PARAMS(BackwardTensorParams) params) {
    const QueryTile at(params);
    const u32 part = warpgroup_index();
    DqTile dQ;
    load_fragments(dQ, dq_sum_half(params, dq_tile(params, at.batch, at.head, at.index), part));
    dQ.each([&](float& x) { x *= params.scale; });
    const i32 first_query = at.index * static_cast<i32>(kBr);
    Element* dq = params.dq + at.batch * params.dq_batch_stride + at.head * params.dq_head_stride +
                  first_query * params.dq_row_stride;
    if constexpr (kDqTransposed) {
        using Tile = PanelTile<Element, kBr, kDqPanels * 64>;
        Tile& tile = *reinterpret_cast<Tile*>(dynamic_shared_memory);
        WarpgroupOperand<Element, DqTile::kCols> rounded;
        rounded.round(dQ);
        store_transposed(tile, dq_first_query(part), dq_panel(part), rounded);
        block_sync();
        constexpr u32 kChunkElements = 16 / sizeof(Element), kChunks = kHeadDim / kChunkElements;
        for (u32 n = thread_index(); n < kBr * kChunks; n += 128 * kConsumers) {
            const u32 row = n / kChunks, col = n % kChunks * kChunkElements;
            if (first_query + static_cast<i32>(row) < params.seqlen_q)
                *reinterpret_cast<uint4*>(dq + row * params.dq_row_stride + col) =
                    *reinterpret_cast<const uint4*>(&tile.at(row, col));
        }
    } else {
        const i32 first = static_cast<i32>(dq_first_query(part)), rows = params.seqlen_q - first_query - first;
        dq += first * params.dq_row_stride;
        store_rows(dq + 64 * dq_panel(part), params.dq_row_stride, rows, kHeadDim - 64 * dq_panel(part), dQ);
    }
}
