// The float32 sum of dQ over key blocks, for kernels of warpgroups. Its layout is private to them: for each query tile the
// fragments of two warpgroups' halves of dQ, each contiguous, as one bulk reduction adds it.
#pragma once
#include "band.cuh"
#include "panel_tile.cuh"
#include "query_tile.cuh"
#include "traits.cuh"
#include "warpgroup_tile.cuh"

constexpr u32 kConsumers = 2;                      // warpgroups
constexpr bool kDeterministic = CF_DETERMINISTIC;  // what is added to dQ has a fixed order
// What comes first to a sum is stored instead of added; else all sums are cleared before.
constexpr bool kFirstStores = CF_FIRST_STORES || kDeterministic;
// With two panels of 64 head dims each warpgroup has one, and all queries; with a single panel each has half of the queries.
constexpr u32 kDqPanels = (kD + 63) / 64;
constexpr u32 kDqQueries = kDqPanels == 2 ? kBr : kBr / 2;
constexpr u32 kDqHalf = 64 * kDqQueries;  // floats
static_assert(kDqPanels <= 2 && kDqQueries % 16 == 0, "two warpgroups share dQ evenly");
// A product has 64 rows: the queries where there are so many, else the head dims.
constexpr bool kDqTransposed = kDqQueries != 64;

using DqTile = WarpgroupTile<kDqTransposed ? kDqQueries : 64>;

DEVICE u32 dq_panel(u32 half) { return kDqPanels == 2 ? half : 0; }
DEVICE u32 dq_first_query(u32 half) { return kDqPanels == 2 ? 0 : half * kDqQueries; }

/// Number of a query tile among those of all heads. (So many have blocks of a launch: fewer than 2^31.)
template <typename Params>
DEVICE u32 dq_tile(const Params& params, i32 batch, i32 head, i32 tile) {
    return static_cast<u32>((batch * params.num_heads + head) * query_tile_count(params) + tile);
}

/// Half of the sum of one query tile.
template <typename Params>
DEVICE float* dq_sum_half(const Params& params, u32 tile, u32 half) {
    return params.dq_sum + (static_cast<u64>(tile) * 2 + half) * kDqHalf;
}

/// How many key tiles have been added to the sum of a query tile, or whether any: see Sender. Behind all the sums.
template <typename Params>
DEVICE u32* dq_progress(const Params& params, u32 tile) {
    return reinterpret_cast<u32*>(dq_sum_half(params, dq_tile(params, params.batch, 0, 0), 0)) + tile;
}

/// Counts the keys that blocks have taken up. Behind that.
template <typename Params>
DEVICE u32* work_counter(const Params& params) {
    return dq_progress(params, dq_tile(params, params.batch, 0, 0));
}

template <typename Params>
DEVICE i32 key_tile_count(const Params& params) {
    return (params.seqlen_k + static_cast<i32>(kBc) - 1) / static_cast<i32>(kBc);
}

// Without a mask all blocks of a head would begin with the same query tile, and wait there for the first addition;
// deterministic, each for the one before, at every tile, 2 to 4 us for an addition. So they begin at tiles of their own,
// evenly apart, and come to no tile at once. Then they wait for others that began later: all blocks of the launch must run
// at once (a cooperative one).
constexpr bool kSpread = kFirstStores && !kBand;

/// The key tiles of one head that are worked on at once, and which of them one is. Works are dealt out in rounds, one to each
/// block, head after head: of a head that two rounds share each has a party, lest the first wait for the second.
struct Party {
    // A size, as many as blocks at most, times the query tiles, for whose sums there is memory, fits 32 bits.
    u32 first, size, place;

    /// Of work `index`, which has this key tile.
    template <typename Params>
    DEVICE static Party of(const Params& params, i32 index, i32 key_tile) {
        const i32 key_tiles = key_tile_count(params);
        const i32 blocks = static_cast<i32>(grid_size()), in_round = index % blocks;
        const i32 place = smaller(key_tile, in_round);
        const i32 size = place + smaller(key_tiles - key_tile, blocks - in_round);
        return {static_cast<u32>(key_tile - place), static_cast<u32>(size), static_cast<u32>(place)};
    }

    /// The query tile with which it begins; it goes on downwards, and from 0 to the last.
    DEVICE u32 start(u32 query_tiles) const { return place * query_tiles / size; }

    /// How many key tiles come to a query tile before it: earlier parties, and of this one those that begin nearer above it.
    DEVICE u32 before(u32 query_tile, u32 query_tiles) const {
        const u32 below = query_tile == 0 ? 0 : (query_tile * size - 1) / query_tiles + 1;  // begin below it, of size
        return first + (place < below ? place + size : place) - below;
    }
};

/// The queries of a tile; none lie beyond the last.
template <typename Params>
DEVICE Range dq_queries(const Params& params, i32 tile) {
    const i32 first = tile * static_cast<i32>(kBr);
    return {first, smaller(first + static_cast<i32>(kBr), params.seqlen_q)};
}
