// The works that do not make a round of all blocks, in a backward without a mask: keys for some, none for others. Their query
// tiles, of one work after the other, are shared out evenly instead ("stream-K", arXiv:2301.03598): a block has `share` of
// them in a row, of two works at most. What has part of a work has a part of its dK and dV; the block with the first tiles
// adds them, in the order of the tiles. cupyflash/shares.py decides, and knows what it costs.
#pragma once
#include "dq_halves.cuh"
#include "query_tile.cuh"
#include "traits.cuh"

// Deterministic, what comes to a sum of dQ has a place in one order, which parts have not.
constexpr bool kShares = kSpread && !kDeterministic;

// A tile of each of its works, fewer than blocks, for whose sums there is memory: their number fits 32 bits.
struct Shares {
    i32 whole;  // works before these
    i32 tiles;  // of a work
    i32 all;    // tiles of all these works
    i32 share;  // tiles of a block; the last may have fewer

    template <typename Params>
    DEVICE explicit Shares(const Params& params)
        : whole(params.whole_works),
          tiles(query_tile_count(params)),
          all((key_tile_count(params) * params.batch * params.num_kv_heads - whole) * tiles),
          share(params.share) {}

    /// Blocks that have any.
    DEVICE u32 blocks() const { return static_cast<u32>((all + share - 1) / share); }
    DEVICE i32 end(i32 block) const { return smaller(all, (block + 1) * share); }
    /// The last block that has part of a work.
    DEVICE i32 last_block(i32 index) const { return ((index - whole + 1) * tiles - 1) / share; }
};

constexpr u32 kPart = 64 * (kD + kDv);  // floats: dK and dV of 64 keys

/// Whether a block's part of dK and dV is there, of each warpgroup's keys. Behind the other counters.
template <typename Params>
DEVICE u32* part_counter(const Params& params, u32 block, u32 warpgroup) {
    return work_counter(params) + 1 + kConsumers * block + warpgroup;
}

/// This part, as fragments. Behind all the counters.
template <typename Params>
DEVICE float* part_sums(const Params& params, u32 block, u32 warpgroup) {
    const u64 counters = static_cast<u64>(part_counter(params, Shares(params).blocks(), 0) - dq_progress(params, 0));
    float* first = dq_sum_half(params, dq_tile(params, params.batch, 0, 0), 0) + (counters + 3) / 4 * 4;
    return first + (kConsumers * block + warpgroup) * kPart;
}

/// Nothing summed yet, for this block's query tile; all threads of the block. A tile that no key is seen from stays 0. Of a
/// head whose keys are all shared out nobody comes first.
template <u32 kBlockThreads, typename Params>
DEVICE void begin_dq(const Params& params) {
    const QueryTile at(params);
    const u32 tile = dq_tile(params, at.batch, at.head, at.index);
    bool all_add = false;
    if constexpr (kShares) {
        // Works are dealt out from the last head on.
        const i32 heads_before = (params.batch - at.batch) * params.num_kv_heads - at.head / params.group - 1;
        all_add = heads_before * key_tile_count(params) >= params.whole_works;
        if (block_index() == 0 && params.share != 0)
            for (u32 n = thread_index(); n < kConsumers * Shares(params).blocks(); n += kBlockThreads)
                part_counter(params, 0, 0)[n] = 0;
    }
    if (!kFirstStores || all_add || (kBand && Band::of(params).key_tiles(dq_queries(params, at.index)).empty())) {
        uint4* sum = reinterpret_cast<uint4*>(dq_sum_half(params, tile, 0));
        for (u32 n = thread_index(); n < 2 * kDqHalf / 4; n += kBlockThreads)
            sum[n] = uint4{};
    }
    if (thread_index() == 0)
        *dq_progress(params, tile) = all_add;
    if (thread_index() == 0 && block_index() == 0)
        *work_counter(params) = 0;
}
