// The float32 sum of dQ over key blocks, where one warpgroup computes dQ, 64 queries and 64 head dims at a time. Its layout
// is private to the kernels: for each query tile the fragments of one part after the other, so that a warp's reduction is
// 512 contiguous bytes.
#pragma once
#include "panel_tile.cuh"
#include "query_tile.cuh"
#include "traits.cuh"
#include "warpgroup_tile.cuh"

constexpr u32 kDqCols = 64;  // of a part: the head dims of a panel; those beyond kD are zero
constexpr u32 kDqParts = (kD + kDqCols - 1) / kDqCols;
constexpr u32 kDqPart = kBr * kDqCols;  // floats
using DqTile = WarpgroupTile<kDqCols>;
static_assert(kBr == DqTile::kRows);

/// A part of the sum of one query tile.
template <typename Params>
DEVICE float* dq_sum_part(const Params& params, i32 batch, i32 head, i32 tile, u32 part) {
    const i64 tiles = (static_cast<i64>(batch) * params.num_heads + head) * query_tile_count(params) + tile;
    return params.dq_sum + (kDqParts * tiles + part) * kDqPart;
}

/// Zeros to sum into, for this block's query tile; all threads of the block.
template <u32 kBlockThreads, typename Params>
DEVICE void clear_dq_sum(const Params& params) {
    const QueryTile tile(params);
    uint4* sum = reinterpret_cast<uint4*>(dq_sum_part(params, tile.batch, tile.head, tile.index, 0));
    for (u32 n = thread_index(); n < kDqParts * kDqPart / 4; n += kBlockThreads)
        sum[n] = uint4{};
}
