// A warpgroup's result on its way out through shared memory, whole lines at a time: lanes that exchange pairs among
// themselves first (store_rows in warpgroup_tile.cuh) take three times the instructions, and write pieces of lines.
#pragma once
#include "platform/convert.cuh"
#include "platform/stmatrix.cuh"
#include "platform/thread.cuh"
#include "warpgroup_tile.cuh"

/// Where a warp lays its 16 rows, 64 columns after the other. A row's 16-byte chunks are permuted by its index, so that eight
/// lanes write or read all banks.
template <typename T>
struct alignas(128) RowStage {
    static constexpr u32 kRows = 16, kCols = 64, kChunks = 8;
    static_assert(sizeof(T) * kCols == 16 * kChunks, "16-bit elements");

    T data[kRows * kCols];

    DEVICE T* chunk(u32 row, u32 n) { return data + row * kCols + (n ^ row % kChunks) * 8; }

    /// Rows [0, rows) and the first kColsUsed columns, a multiple of 8, of a warpgroup's result, rounded, to global memory:
    /// out is row 0, 16-byte aligned like every row. All warps of the warpgroup, each its own stage.
    template <u32 kColsUsed, u32 kTileCols>
    DEVICE void store_rows(T* out, i64 row_stride, i32 rows, const WarpgroupTile<kTileCols>& tile) {
        const u32 lane = lane_index(), first_row = thread_index() % 128 / 32 * kRows;
#pragma unroll
        for (u32 first = 0; first < kColsUsed; first += kCols) {
            const u32 end = first + kCols < kTileCols ? first + kCols : kTileCols;
#pragma unroll
            for (u32 n = first / 8; n < end / 8; n += 2) {
                const u32 r[4] = {pack<T>(tile.at(n, 0, 0), tile.at(n, 0, 1)),
                                  pack<T>(tile.at(n, 1, 0), tile.at(n, 1, 1)),
                                  pack<T>(tile.at(n + 1, 0, 0), tile.at(n + 1, 0, 1)),
                                  pack<T>(tile.at(n + 1, 1, 0), tile.at(n + 1, 1, 1))};
                stmatrix_x4(own_address(chunk(lane % 16, n - first / 8 + lane / 16)), r);
            }
            warp_sync();
            const u32 chunks = (kColsUsed - first < kCols ? kColsUsed - first : kCols) / 8;
#pragma unroll
            for (u32 i = 0; i < kRows * chunks; i += 32) {
                const u32 row = (i + lane) / chunks, n = (i + lane) % chunks;
                if (row < kRows && static_cast<i32>(first_row + row) < rows)
                    *reinterpret_cast<uint4*>(out + (first_row + row) * row_stride + first + n * 8) =
                        *reinterpret_cast<const uint4*>(chunk(row, n));
            }
            warp_sync();  // read before the next columns come
        }
    }
};
