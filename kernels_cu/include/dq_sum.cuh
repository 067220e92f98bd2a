// The float32 sum of dQ over key blocks. Its layout is private to the backward kernels: for each query tile the
// accumulator fragments of the block's warps one after the other, so that a warp's reduction is 512 contiguous bytes.
#pragma once
#include "band.cuh"
#include "params.cuh"
#include "platform/reduce.cuh"
#include "platform/thread.cuh"
#include "query_tile.cuh"
#include "traits.cuh"
#include "warp_gemm.cuh"

constexpr u32 kWarpsDqD = CF_WARPS_DQ_D;       // dQ: warps over head dims ...
constexpr u32 kWarpsDqQ = kWarps / kWarpsDqD;  // ... and queries
constexpr u32 kDqM = kBr / (16 * kWarpsDqQ), kDqN = kD / (8 * kWarpsDqD);
static_assert(kDqM * 16 * kWarpsDqQ == kBr && kDqN * 8 * kWarpsDqD == kD, "warps share dQ evenly");

using DqTile = SumTile<Element, kDqM, kDqN, kWarpsDqD>;

DEVICE u32 dq_first_row() { return warp_index() / kWarpsDqD * (16 * kDqM); }
DEVICE u32 dq_first_col() { return warp_index() % kWarpsDqD * 16; }

/// The sum of one query tile: kBr * kD floats.
DEVICE float* dq_sum_tile(const BackwardParams& params, i32 batch, i32 head, i32 tile) {
    return params.dq_sum +
           ((static_cast<i64>(batch) * params.num_heads + head) * query_tile_count(params) + tile) * (kBr * kD);
}

/// Zeros to sum into, for this block's query tile.
DEVICE void clear_dq_sum(const BackwardParams& params) {
    const QueryTile tile(params);
    uint4* sum = reinterpret_cast<uint4*>(dq_sum_tile(params, tile.batch, tile.head, tile.index));
    for (u32 n = thread_index(); n < kBr * kD / 4; n += kThreads)
        sum[n] = uint4{};
}

/// Where this lane's fragment (m, n) lies in the tile's sum.
DEVICE u32 dq_fragment(u32 m, u32 n) { return ((warp_index() * kDqM + m) * kDqN + n) * 128 + lane_index() * 4; }

/// Adds this warp's fragments.
DEVICE void add_to_dq_sum(float* sum, const DqTile& dQ) {
#pragma unroll
    for (u32 m = 0; m < kDqM; ++m)
#pragma unroll
        for (u32 n = 0; n < kDqN; ++n) {
            const float (&x)[4] = dQ.x[m][n];
            reduce_add4(sum + dq_fragment(m, n), x[0], x[1], x[2], x[3]);
        }
}

DEVICE void load_dq_sum(const float* sum, DqTile& dQ) {
#pragma unroll
    for (u32 m = 0; m < kDqM; ++m)
#pragma unroll
        for (u32 n = 0; n < kDqN; ++n)
            for (u32 e = 0; e < 4; ++e)
                dQ.x[m][n][e] = sum[dq_fragment(m, n) + e];
}

/// Makes the sum of one element NaN.
DEVICE void add_nan_to_dq_sum(const BackwardParams& params, i32 batch, i32 head, i32 query, u32 col) {
    const u32 row = static_cast<u32>(query) % kBr, group = col / 16;
    const u32 warp = row / (16 * kDqM) * kWarpsDqD + group % kWarpsDqD;
    // Fragment of a group, lane of a row, and element of a lane: the column's highest bit, the next two, and the lowest;
    // where fragments alternate, the lowest, the highest two, and the one between.
    const u32 fragment = DqTile::kAlternate ? col % 2 : col % 16 / 8;
    const u32 in_row = DqTile::kAlternate ? col % 16 / 4 : col % 8 / 2;
    const u32 odd = DqTile::kAlternate ? col % 4 / 2 : col % 2;
    const u32 m = row % (16 * kDqM) / 16, n = group / kWarpsDqD * 2 + fragment;
    const u32 lane = row % 8 * 4 + in_row, e = row % 16 / 8 * 2 + odd;
    const float nan = not_a_number();
    reduce_add4(dq_sum_tile(params, batch, head, query / static_cast<i32>(kBr)) + ((warp * kDqM + m) * kDqN + n) * 128 +
                    lane * 4,
                e == 0 ? nan : 0.0f, e == 1 ? nan : 0.0f, e == 2 ? nan : 0.0f, e == 3 ? nan : 0.0f);
}
