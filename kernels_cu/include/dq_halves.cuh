// The float32 sum of dQ over key blocks, for kernels of warpgroups. Its layout is private to them: for each query tile the
// fragments of two warpgroups' halves of dQ^T, each contiguous, as one bulk reduction adds it.
#pragma once
#include "panel_tile.cuh"
#include "query_tile.cuh"
#include "traits.cuh"
#include "warpgroup_tile.cuh"

constexpr u32 kConsumers = 2;  // warpgroups
// 64 head dims are the rows of a product. With two panels of them each warpgroup has one, and all queries; with a single
// panel each has half of the queries.
constexpr u32 kDqPanels = (kD + 63) / 64;
constexpr u32 kDqCols = kDqPanels == 2 ? kBr : kBr / 2;
constexpr u32 kDqHalf = 64 * kDqCols;  // floats
static_assert(kDqPanels <= 2 && kDqCols % 16 == 0, "two warpgroups share dQ evenly");

using DqTile = WarpgroupTile<kDqCols>;

DEVICE u32 dq_panel(u32 half) { return kDqPanels == 2 ? half : 0; }
DEVICE u32 dq_first_query(u32 half) { return kDqPanels == 2 ? 0 : half * kDqCols; }

/// Half of the sum of one query tile.
template <typename Params>
DEVICE float* dq_sum_half(const Params& params, i32 batch, i32 head, i32 tile, u32 half) {
    const i64 tiles = (static_cast<i64>(batch) * params.num_heads + head) * query_tile_count(params) + tile;
    return params.dq_sum + (2 * tiles + half) * kDqHalf;
}

/// Zeros to sum into, for this block's query tile; all threads of the block.
template <u32 kBlockThreads, typename Params>
DEVICE void clear_dq_sum(const Params& params) {
    const QueryTile tile(params);
    uint4* sum = reinterpret_cast<uint4*>(dq_sum_half(params, tile.batch, tile.head, tile.index, 0));
    for (u32 n = thread_index(); n < 2 * kDqHalf / 4; n += kBlockThreads)
        sum[n] = uint4{};
}
