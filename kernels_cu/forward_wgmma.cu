// FlashAttention forward for Hopper (sm_90a), after FlashAttention-3 (arXiv:2407.08608): the tensor memory accelerator
// loads, warpgroups multiply, and nobody waits for a barrier of the whole block.
//
// Blocks stay and take one query tile after the other. The producer warpgroup, one thread of it, streams Q, K and V into
// shared memory. Each consumer warpgroup owns 64 query rows; per tile of kBc keys it starts S = Q K_{j-1}^T, then
// O += P V_j, and computes the softmax of S while the second product runs. The consumers take turns at the tensor cores,
// so that one multiplies while the others exponentiate.
//
// What binds is the issue of instructions beside the tensor cores: row maxima are taken only in a tile's first and masked
// blocks (row_state.cuh, "stale"). A tile whose weights then overflow is marked, and the producer hands it out once more
// to be computed the exact way. So is one with hidden values of V that are not finite.
//
// Two blocks may form a cluster (CF_CLUSTER). They take tiles that see the same keys (tile_units.cuh), and each loads half of
// every K and V for both: a buffer is full when both halves are there, and empty when the consumers of both have read it.
// The first block of a cluster leads: it says which unit of tiles comes next, and notes which tiles are to be repeated.
#include "tensor_params.cuh"
#include "band.cuh"
#include "constant.cuh"
#include "hidden.cuh"
#include "panel_tile.cuh"
#include "platform/atomic.cuh"
#include "platform/cluster.cuh"
#include "platform/mbarrier.cuh"
#include "platform/tma.cuh"
#include "platform/warpgroup.cuh"
#include "ring.cuh"
#include "row_stage.cuh"
#include "row_state.cuh"
#include "schedule.cuh"
#include "score.cuh"
#include "tile_units.cuh"
#include "traits.cuh"
#include "warpgroup_tile.cuh"

constexpr u32 kConsumers = kWarps / 4 - 1;  // warpgroups; the last one produces
static_assert(kBr == 64 * kConsumers, "each consumer owns 64 rows");
constexpr u32 kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr u32 kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
// They move within what the block is launched with, multiples of 8; who asks for more waits forever.
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8));
constexpr bool kStale = CF_STALE_MAXIMUM;
constexpr bool kTurns = CF_TURNS && kConsumers > 1;
constexpr bool kHalves = CF_HALVES && kBandLast;
constexpr u32 kCluster = CF_CLUSTER;
constexpr bool kPaired = kCluster > 1;
static_assert(kCluster == 1 || kCluster == 2, "a leader, and one who follows");

using TileQ = PanelTile<Element, 64, kD>;
using TileK = PanelTile<Element, kBc, kD>;
using TileV = PanelTile<Element, kBc, kDv>;

/// What is computed next: unit `index` of query tiles, one for each block of the cluster; -1: none follows for now, finish
/// what was begun. repeated: of its tiles those that are computed once more, the exact way, one bit each; 0: all for the
/// first time.
struct Unit {
    i32 index, repeated;
};

/// A query tile, as the producer announces it to the consumers; index is that of its unit.
struct alignas(16) Tile {
    i32 index, batch, head, first_query;
    Range key_tiles;
    i32 exact;  // computed the exact way
    u32 mark;   // where to note that it must be
};

// Tiles announced ahead of the one being computed; units with marks of their own are some more, since those may be marked,
// too, before the first mark is seen.
constexpr u32 kSlots = 2, kMarks = 4 * kCluster;

static_assert(!CF_STAGED_ROWS || !kPaired,
              "O leaves through shared memory in blocks without a cluster only: resources.py");
/// What O leaves through, if shared memory has room for it.
template <bool kStaged>
struct Out {
    RowStage<Element> stages[4 * kConsumers];

    DEVICE void store_rows(Element* out, i64 row_stride, i32 rows, const WarpgroupTile<kDv>& O) {
        stages[thread_index() / 32].store_rows<kHeadDimV>(out, row_stride, rows, O);
    }
};
template <>
struct Out<false> {
    DEVICE void store_rows(Element* out, i64 row_stride, i32 rows, const WarpgroupTile<kDv>& O) {
        ::store_rows<Element, kHeadDimV>(out, row_stride, rows, O);
    }
};

struct SharedStorage : Out<CF_STAGED_ROWS> {
    TileQ Q[kConsumers];
    TileK K[kStages];
    TileV V[kStages];
    Tile slots[kSlots];
    Barrier Q_full[kConsumers], Q_empty[kConsumers];
    Barrier K_full[kStages], K_empty[kStages], V_full[kStages], V_empty[kStages];
    Barrier slot_full[kSlots], slot_empty[kSlots];
    Barrier unit_full, unit_empty;  // the latter is looked at in the leading block, the former in the other one
    volatile i32 marks[kMarks]
                      [kCluster];   // indices of units whose tile is to be computed again, -1: none; of the leader
    volatile i32 hidden_nonfinite;  // the last unit with hidden values of V that are not finite
    volatile i32 unit_index, unit_repeated;
    i32 rounds;  // how often a unit was taken without a counter; here, for registers are short
};

DEVICE void init_shared(SharedStorage& shared) {
    constexpr u32 kConsumerWarps = 4 * kConsumers;
    for (u32 n = 0; n < kConsumers; ++n) {
        barrier_init(shared.Q_full[n], 1);
        barrier_init(shared.Q_empty[n], 4);
    }
    for (u32 n = 0; n < kStages; ++n) {
        barrier_init(shared.K_full[n], 1);
        barrier_init(shared.V_full[n], 1);
        barrier_init(shared.K_empty[n], kCluster * kConsumerWarps);
        barrier_init(shared.V_empty[n], kCluster * kConsumerWarps);
    }
    for (u32 n = 0; n < kSlots; ++n) {
        barrier_init(shared.slot_full[n], 1);
        barrier_init(shared.slot_empty[n], kConsumerWarps);
    }
    if (kPaired) {
        barrier_init(shared.unit_full, 1);
        barrier_init(shared.unit_empty, 1);
    }
    barrier_init_fence();
    for (u32 n = 0; n < kMarks; ++n)
        for (u32 member = 0; member < kCluster; ++member)
            shared.marks[n][member] = -1;
    shared.hidden_nonfinite = -1;
    shared.rounds = 0;
    shared.slots[kSlots - 1] = {0, 0, 0, 0, {0, 0}, 0, 0};  // before the first tile
}

/// The one thread that announces tiles and streams their operands.
struct Producer {
    const ForwardTensorParams& params;
    SharedStorage& shared;
    Ring<1> Q;
    Ring<kStages> K, V;
    Ring<kSlots> slot;
    i32 announced = 0;  // tiles

    DEVICE static u32 rank() { return kPaired ? cluster_rank() : 0; }

    /// The first unit of this cluster.
    DEVICE static i32 first() { return static_cast<i32>(block_index() / kCluster); }

    /// A further one. Whoever is free takes the next. Without a counter, every other round goes backwards: with a mask the
    /// tiles become shorter, and nobody gets the longer one each time.
    DEVICE i32 take() {
        const i32 clusters = static_cast<i32>(grid_size() / kCluster);
        if (params.tile_counter != nullptr)
            return clusters + static_cast<i32>(atomic_add(params.tile_counter, 1));
        const i32 rounds = ++shared.rounds;
        return rounds * clusters + (rounds % 2 != 0 ? clusters - 1 - first() : first());
    }

    /// A unit with tiles that are marked: they are handed out once more, each for itself, for what a tile becomes must not
    /// depend on its neighbours. index -1: there is none.
    DEVICE Unit marked() {
        Unit found = {-1, 0};
#pragma unroll 1
        for (u32 n = 0; n < kMarks && found.index < 0; ++n)
#pragma unroll
            for (u32 member = 0; member < kCluster; ++member)
                if (const i32 index = shared.marks[n][member]; index >= 0) {
                    shared.marks[n][member] = -1;
                    found.index = index;
                    found.repeated |= 1 << member;
                }
        return found;
    }

    /// What comes next, as whoever leads decides. exhausted: nothing but what is marked.
    DEVICE Unit choose(bool exhausted) {
        const Unit again = marked();
        if (again.index >= 0 || exhausted)
            return again;
        const i32 index = take();
        return {index < TileUnits<kCluster>(params).count(params) ? index : -1, 0};
    }

    /// What comes next, as the leader tells the other.
    DEVICE Unit next(bool exhausted) {
        if (announced == 0)
            return {first(), 0};
        if (!kPaired)
            return choose(exhausted);
        // The first announcement needed no telling, each later one did.
        static_assert(kSlots == 2);
        const u32 parity = slot.at ^ 1;
        Unit next;
        if (rank() == 0) {
            next = choose(exhausted);
            barrier_wait(shared.unit_empty, parity ^ 1);
            cluster_store(shared.unit_index, 1, next.index);
            cluster_store(shared.unit_repeated, 1, next.repeated);
            cluster_fence();
            barrier_arrive_at(shared.unit_full, 1);
        } else {
            barrier_wait(shared.unit_full, parity);
            cluster_fence();
            next = {shared.unit_index, shared.unit_repeated};
            barrier_arrive_at(shared.unit_empty, 0);
        }
        return next;
    }

    /// What is announced stays readable until the next but one is.
    DEVICE const Tile& announce(Unit next) {
        Tile tile = {-1, 0, 0, 0, {0, 0}, 0, 0};
        if (next.index >= 0) {
            // The blocks take turns at the tiles of a unit, of which one may see fewer keys.
            const u32 nth = static_cast<u32>(announced), member = kPaired ? (rank() + nth) % kCluster : 0;
            const UnitTile work = TileUnits<kCluster>(params).at(next.index, static_cast<i32>(member), params);
            tile = {next.index,
                    work.batch,
                    work.head,
                    work.first_query,
                    work.key_tiles,
                    next.repeated >> member & 1,
                    nth % kMarks * kCluster + member};
            ++announced;
            if (kPaired && next.repeated != 0 && tile.exact == 0)
                tile.first_query = params.seqlen_q;  // no rows: the block only takes part
        }
        barrier_wait(shared.slot_empty[slot.at], slot.parity ^ 1);
        Tile& place = shared.slots[slot.at];
        place = tile;
        barrier_arrive(shared.slot_full[slot.at]);
        slot.advance();
        return place;
    }

    DEVICE void load_Q(const Tile& tile) {
#pragma unroll(kPaired ? 1 : kConsumers)  // addresses in a cluster take more registers
        for (u32 n = 0; n < kConsumers; ++n) {
            barrier_wait(shared.Q_empty[n], Q.parity ^ 1);
            barrier_arrive_expect(shared.Q_full[n], sizeof(TileQ::data));
            shared.Q[n].load(params.q_map, shared.Q_full[n], tile.first_query + static_cast<i32>(64 * n), tile.head,
                             tile.batch);
        }
        Q.advance();
    }

    template <typename Buffer>
    DEVICE void load(Ring<kStages>& ring, Buffer* buffers, Barrier* full, Barrier* empty, const TensorMap& map, i32 j,
                     const Tile& tile) {
        barrier_wait(empty[ring.at], ring.parity ^ 1);
        barrier_arrive_expect(full[ring.at], sizeof(Buffer::data));
        const i32 first_key = j * static_cast<i32>(kBc);
        if constexpr (kPaired)
            buffers[ring.at].template load_part<kCluster>(rank(), map, full[ring.at], first_key,
                                                          tile.head / params.group, tile.batch);
        else
            buffers[ring.at].load(map, full[ring.at], first_key, tile.head / params.group, tile.batch);
        ring.advance();
    }

    /// Loads Q and, last keys first, K and V of an announced tile: V_j after K_{j-1}, in the order of their use.
    DEVICE void stream(const Tile& tile) {
        const Range key_tiles = tile.key_tiles;
#pragma unroll 1
        for (i32 j = key_tiles.end - 1; j >= key_tiles.first - 1; --j) {
            if (j >= key_tiles.first)
                load(K, shared.K, shared.K_full, shared.K_empty, params.k_map, j, tile);
            // Its buffer is free later than K's.
            if (j == key_tiles.end - 1 && !key_tiles.empty())
                load_Q(tile);
            if (j + 1 < key_tiles.end)
                load(V, shared.V, shared.V_full, shared.V_empty, params.v_map, j + 1, tile);
        }
    }

    /// Waits until all that is loaded has been read. The consumers mark a tile before they release its last V.
    DEVICE void wait_until_read() {
        Ring<kStages> last = V;
#pragma unroll 1
        for (u32 n = 0; n < kStages; ++n, last.advance())
            barrier_wait(shared.V_empty[last.at], last.parity ^ 1);
        if (kPaired)
            cluster_fence();
    }

    DEVICE void run() {
        tensor_map_prefetch(params.q_map);
        tensor_map_prefetch(params.k_map);
        tensor_map_prefetch(params.v_map);
        const Tile* tile = &shared.slots[kSlots - 1];  // without keys
        bool ended = false;                            // nothing follows, twice
#pragma unroll 1
        while (!ended) {
            stream(*tile);
            const bool paused = tile->index < 0;
            if (paused)
                wait_until_read();
            const Tile* following = &announce(next(paused));
            ended = paused && following->index < 0;
            tile = following;
        }
        // The last block leaves the counters as it found them.
        if (rank() == 0 && params.tile_counter != nullptr &&
            atomic_add(params.tile_counter + 1, 1) == grid_size() / kCluster - 1)
            params.tile_counter[0] = params.tile_counter[1] = 0;
    }
};

/// A value that is the same for all lanes, as the compiler shall know.
DEVICE i32 same(i32 x) { return static_cast<i32>(uniform(static_cast<u32>(x))); }

/// One warpgroup, which owns 64 rows of each tile.
struct Consumer {
    const ForwardTensorParams& params;
    SharedStorage& shared;
    const u32 index;
    const Band band;
    const Score score;
    Ring<1> Q;
    Ring<kStages> K, V;
    Ring<kSlots> slot;

    DEVICE Consumer(const ForwardTensorParams& params_, SharedStorage& shared_, u32 index_)
        : params(params_), shared(shared_), index(index_), band(Band::of(params_)), score(Score::of(params_)) {}

    /// One thread of each warp tells the producer.
    DEVICE void release(Barrier& empty) {
        if (lane_index() == 0)
            barrier_arrive(empty);
    }
    /// ... and, of what both blocks load, both producers.
    DEVICE void release_to_all(Barrier& empty) {
        if constexpr (!kPaired)
            release(empty);
        else if (lane_index() < kCluster)
            barrier_arrive_at(empty, lane_index());
    }

    /// Notes that a tile must be computed the exact way; the thread that tells the leading block of its last V.
    DEVICE void mark(const Tile& tile) {
        volatile i32& place = shared.marks[tile.mark / kCluster][tile.mark % kCluster];
        if constexpr (kPaired) {
            cluster_store(place, 0, tile.index);
            cluster_fence();
        } else {
            place = tile.index;
        }
    }

    // Consumers use the tensor cores in turns; the last one gives the first its first turn.
    DEVICE void take_turn() {
        if (kTurns)
            named_sync(1 + index, 256);
    }
    DEVICE void pass_turn() {
        if (kTurns)
            named_arrive(index + 1 == kConsumers ? 1 : 2 + index, 256);
    }

    /// The next tile. It stays in shared memory, for registers are short, until it is released.
    DEVICE const Tile& next_tile() {
        barrier_wait(shared.slot_full[slot.at], slot.parity);
        return shared.slots[slot.at];
    }
    DEVICE void release_tile() {
        warp_sync();
        release(shared.slot_empty[slot.at]);
        slot.advance();
    }

    /// This warpgroup's rows of a tile; some may lie beyond the last query.
    DEVICE Range rows_of(const Tile& tile) const {
        const i32 first = same(tile.first_query) + static_cast<i32>(64 * index);
        return {first, first + 64};
    }

    DEVICE static Range keys_of(i32 j) { return {j * static_cast<i32>(kBc), (j + 1) * static_cast<i32>(kBc)}; }

    /// Hides the scores of keys that a query may not see.
    template <u32 kCols>
    DEVICE void mask(WarpgroupTile<kCols>& S, i32 first_query, i32 first_key) const {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            // Relative to this lane's first column, so that the comparisons below are with constants.
            const i32 origin = first_key + static_cast<i32>(S.col(0));
            const Range keys = band.keys_of(first_query + static_cast<i32>(S.row(half))).from(origin);
#pragma unroll
            for (u32 n = 0; n < S.kPairs; ++n)
#pragma unroll
                for (u32 odd = 0; odd < 2; ++odd) {
                    const i32 col = static_cast<i32>(8 * n + odd);
                    if ((kBandFirst && col < keys.first) || col >= keys.end)
                        S.at(n, half, odd) = -infinity();
                }
        }
    }

    /// Hidden elements of V must not reach O, but 0 x NaN is NaN: where a tile is computed the exact way, those that are
    /// not finite become 0 in shared memory. All consumers.
    DEVICE void clean_V(const Tile& tile, i32 j) {
        const Range queries = {tile.first_query, tile.first_query + static_cast<i32>(kBr)};
        if (!kBand || !tile.exact || band.all_visible(queries, keys_of(j)))
            return;
        constexpr u32 kBarrier = 1 + kConsumers, kCount = 128 * kConsumers;
        TileV& buffer = shared.V[V.at];
        named_sync(kBarrier, kCount);
#pragma unroll 1
        for (u32 n = thread_index(); n < sizeof(buffer.data) / sizeof(Element); n += kCount)
            if (!is_finite(to_float(buffer.data[n]))) {
                buffer.data[n] = from_float<Element>(0.0f);
                shared.hidden_nonfinite = tile.index;
            }
        fence_async_shared();
        named_sync(kBarrier, kCount);
    }

    /// Puts what clean_V took away into the rows that saw it: a positive weight times something not finite is that.
    DEVICE void restore_nonfinite(const Tile& tile, Element* out) const {
        constexpr u32 kBarrier = 2 + kConsumers;
        const Range rows = rows_of(tile);
        const Element* v =
            params.v + tile.batch * params.v_batch_stride + tile.head / params.group * params.v_head_stride;
        named_sync(kBarrier + index, 128);  // all rows are stored
#pragma unroll 1
        for (u32 col = thread_index() % 128; col < kHeadDimV; col += 128)
#pragma unroll 1
            for (i32 key = 0; key < params.seqlen_k; ++key) {
                const float x = to_float(v[key * params.v_row_stride + col]);
                if (is_finite(x))
                    continue;
                const Range queries = band.queries_of(key);
#pragma unroll 1
                for (i32 query = larger(rows.first, queries.first);
                     query < smaller(smaller(rows.end, params.seqlen_q), queries.end); ++query) {
                    Element& element = out[(query - rows.first) * params.out_row_stride + col];
                    element = from_float<Element>(to_float(element) + x);
                }
            }
    }

    /// O and its LSE, divided and stored.
    DEVICE void finish(const Tile& tile, const RowState& state, WarpgroupTile<kDv>& O, const float (&factor)[2]) {
        const Range rows = rows_of(tile);
        O.multiply(factor);
        if (params.lse != nullptr && lane_index() % 4 == 0) {
            float* lse = params.lse + (static_cast<i64>(tile.batch) * params.num_heads + tile.head) * params.seqlen_q;
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const i32 query = rows.first + static_cast<i32>(O.row(half));
                if (query < params.seqlen_q)
                    lse[query] = state.log_sum_exp(half);
            }
        }
        Element* out = params.out + tile.batch * params.out_batch_stride + tile.head * params.out_head_stride +
                       rows.first * params.out_row_stride;
        shared.store_rows(out, params.out_row_stride, params.seqlen_q - rows.first, O);
        if (kBand && tile.exact && shared.hidden_nonfinite == tile.index)
            restore_nonfinite(tile, out);
    }

    DEVICE void run();
};

/// Attention of this warpgroup's rows of all tiles of the block.
DEVICE void Consumer::run() {
    if (kTurns && index == kConsumers - 1)
        pass_turn();

    WarpgroupTile<kBc> S;
    WarpgroupTile<kDv> O;
    WarpgroupOperand<Element, kBc> P;

    auto wait_K = [&] { barrier_wait(shared.K_full[K.at], K.parity); };
    auto wait_V = [&] { barrier_wait(shared.V_full[V.at], V.parity); };
    auto release_Q = [&] {
        release(shared.Q_empty[index]);
        Q.advance();
    };
    auto release_K = [&] {
        release_to_all(shared.K_empty[K.at]);
        K.advance();
    };
    auto release_V = [&] {
        release_to_all(shared.V_empty[V.at]);
        V.advance();
    };
    auto start_S = [&](auto& S) {  // S = Q K^T
        wgmma_fence();
        wgmma_settle(S.x);
        multiply_transposed<TileQ, TileK>(S, shared.Q[index].along_cols(), shared.K[K.at].along_cols());
        wgmma_commit();
    };
    auto start_O = [&] {  // O += P V
        wgmma_fence();
        wgmma_settle(O.x);
        add_product<TileV>(O, P, shared.V[V.at].along_rows());
        wgmma_commit();
    };
    auto finish_S = [&](auto& S) {
        wgmma_settle(S.x);
        release_K();
        if constexpr (kScoreKind != 0)
            S.each([&](float& s) { s = score(s); });
    };

    u32 pauses = 0;  // announced since the last tile; the second one is the end
#pragma unroll 1
    while (pauses < 2) {
        const Tile& tile = next_tile();
        if (same(tile.index) < 0) {
            ++pauses;
            release_tile();
            continue;
        }
        pauses = 0;
        const Range rows = rows_of(tile), key_tiles = {same(tile.key_tiles.first), same(tile.key_tiles.end)};
        const bool exact = same(tile.exact) != 0;
        // Of the tiles of keys that some consumer needs, this one needs `own`. (All share the work of clean_V.)
        Range own = key_tiles;
        if (!exact)
            own = rows.first < params.seqlen_q ? band.key_tiles({rows.first, smaller(rows.end, params.seqlen_q)})
                                               : Range{0, 0};
        RowState state(score.unit());
        float factor[2] = {};  // for O: when m rises, and at the end; rows that see nothing become 0
        O.clear();

        auto skip = [&] {
            take_turn();
            pass_turn();
            // Full first: who released a buffer for the next round, too, would stand for a consumer that still reads it.
            wait_K();
            wait_V();
            warp_sync();
            release_K();
            release_V();
        };
        if (!key_tiles.empty())
            barrier_wait(shared.Q_full[index], Q.parity);
#pragma unroll 1
        for (i32 j = key_tiles.end - 1; j >= larger(own.end, key_tiles.first); --j)
            skip();
        if (!own.empty()) {
            i32 j = own.end - 1;
            auto shape = [&](auto& S) {
                if (!band.all_visible(rows, keys_of(j)))
                    mask(S, rows.first, keys_of(j).first);
            };
            auto begin = [&](auto& S) {
                wait_K();
                take_turn();
                start_S(S);
                pass_turn();
                wgmma_wait<0>();
                finish_S(S);
                shape(S);
                state.update(S, factor, exact);
                P.round(S);
            };
            // With an upper bound the first tile of keys may be seen no further than to its middle.
            constexpr u32 kFront = kHalves ? kBc / 2 : kBc;
            const i32 last_seen = band.keys_of(smaller(rows.end, params.seqlen_q) - 1).end;
            if (kHalves && last_seen <= keys_of(j).first + static_cast<i32>(kFront))
                begin(S.template front<kFront>());
            else
                begin(S);

            // Tile j - 1 enters as scores while tile j leaves as weights. kPlain: nothing is hidden, and m stays.
            auto step = [&](auto plain) {
                constexpr bool kPlain = decltype(plain)::value, kRaise = !kPlain || !kStale;
                if constexpr (!kPlain) {
                    if (kStale && state.heavy())
                        state.account_for_rounding(P);
                    wait_V();
                    clean_V(tile, j);
                }
                --j;
                wait_K();
                take_turn();
                start_S(S);
                if constexpr (kPlain)
                    wait_V();
                start_O();
                pass_turn();
                wgmma_wait<1>();
                finish_S(S);
                if constexpr (!kPlain)
                    shape(S);
                if constexpr (kRaise)
                    state.update(S, factor, exact);
                wgmma_wait<0>();
                wgmma_settle(O.x);
                release_V();
                if constexpr (!kRaise)
                    state.update_stale(S);
                P.round(S);
                if constexpr (kRaise)
                    O.multiply(factor);
            };
            // A row must have seen a key before its reference may go stale: a tile that ends where the first row's keys
            // end is not plain, for that row has seen none of the later ones.
            auto is_plain = [&](i32 n) {
                return !exact && band.all_visible(rows, {keys_of(n).first, keys_of(n).end + kBandLast});
            };
#pragma unroll 1
            while (j > own.first && !is_plain(j - 1))
                step(Constant<false>{});
            const auto goes_on = [&] { return j > own.first && (!kBandFirst || is_plain(j - 1)) && !exact; };
#pragma unroll 1
            while (goes_on()) {
                // The rare account stands outside of the loop: jumped over inside of it, it cost 3% of the time.
                bool heavy;
#pragma unroll 1
                do {
                    step(Constant<true>{});
                    heavy = kStale && state.heavy();
                } while (!heavy && goes_on());
                if (heavy && goes_on())
                    state.account_for_rounding(P);
            }
            if (kBandFirst)
#pragma unroll 1
                while (j > own.first)
                    step(Constant<false>{});

            release_Q();
            wait_V();
            clean_V(tile, j);
            if (kStale && state.heavy())
                state.account_for_rounding(P);
            take_turn();
            start_O();
            pass_turn();
            state.finish(factor);
            wgmma_wait<0>();
            wgmma_settle(O.x);
            if (!exact && warp_any(!state.trustworthy() || !O.all_finite()) && lane_index() == 0)
                mark(tile);
            release_V();
        } else if (!key_tiles.empty()) {
            release_Q();
            take_turn();  // as many turns as the others
            pass_turn();
        }
#pragma unroll 1
        for (i32 j = larger(smaller(own.first, key_tiles.end), key_tiles.first) - 1; kBandFirst && j >= key_tiles.first;
             --j)
            skip();
        finish(tile, state, O, factor);
        release_tile();
    }
}

KERNEL(kThreads, 1) CLUSTERED void forward_wgmma(PARAMS(ForwardTensorParams) params) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const u32 role = warpgroup_index();
    if (thread_index() == 0)
        init_shared(shared);
    if (kPaired)
        cluster_sync();
    else
        block_sync();
    if (role == kConsumers) {
        registers_release<kProducerRegisters>();
        if (thread_index() == 128 * kConsumers)
            Producer{params, shared}.run();
    } else {
        registers_acquire<kConsumerRegisters>();
        Consumer(params, shared, role).run();
    }
    if (kPaired)
        cluster_sync();  // nobody leaves whose memory the other may still reach into
}
