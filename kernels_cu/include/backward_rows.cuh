// What the backward needs of every query row before its main kernel: delta = sum over dims of O * dO, minus dLSE (fp32).
// With that all kernels have the gradient of LSE too: its derivative by S is P, so that dS = P (dP - D + dLSE).
#pragma once
#include "platform/convert.cuh"
#include "platform/cp_async.cuh"
#include "platform/math.cuh"
#include "platform/thread.cuh"
#include "query_tile.cuh"
#include "traits.cuh"
#include "word.cuh"

constexpr u32 kLanesPerRow = 8;

/// The gradient of a row's LSE. A row that saw nothing has none: its P are 0, and 0 x NaN would be NaN.
template <typename Params>
DEVICE float row_dlse(const Params& params, i64 row) {
    return params.dlse == nullptr || params.lse[row] == -infinity() ? 0.0f : params.dlse[row];
}

/// One query tile of one head; all threads of the block, kBlockThreads.
template <u32 kBlockThreads = kThreads, typename Params>
DEVICE void prepare_rows(const Params& params) {
    using Piece = typename Word<kVectorBytes>::type;
    constexpr u32 kPieceElements = kVectorBytes / sizeof(Element), kChunkElements = 16 / sizeof(Element);
    const QueryTile tile(params);
    const Element* out = params.out + tile.batch * params.out_batch_stride + tile.head * params.out_head_stride;
    const Element* dout = params.dout + tile.batch * params.dout_batch_stride + tile.head * params.dout_head_stride;
    const i64 first_row = (static_cast<i64>(tile.batch) * params.num_heads + tile.head) * params.seqlen_q;

    const u32 lane = thread_index() % kLanesPerRow;
    for (u32 row = thread_index() / kLanesPerRow; row < kBr; row += kBlockThreads / kLanesPerRow) {
        const i32 query = tile.index * static_cast<i32>(kBr) + static_cast<i32>(row);
        float sum = 0.0f;
        // A lane takes whole 16-byte chunks in order, however wide the pieces: the sum does not depend on the alignment.
        if (query < params.seqlen_q)
#pragma unroll 4
            for (u32 chunk = lane * kChunkElements; chunk < kHeadDimV; chunk += kLanesPerRow * kChunkElements)
#pragma unroll
                for (u32 col = chunk; col < chunk + kChunkElements; col += kPieceElements) {
                    if (kHeadDimV % kChunkElements != 0 && col >= kHeadDimV)
                        break;
                    const Piece o = *reinterpret_cast<const Piece*>(out + query * params.out_row_stride + col);
                    const Piece d = *reinterpret_cast<const Piece*>(dout + query * params.dout_row_stride + col);
#pragma unroll
                    for (u32 n = 0; n < kPieceElements; ++n)
                        sum += to_float(reinterpret_cast<const Element*>(&o)[n]) *
                               to_float(reinterpret_cast<const Element*>(&d)[n]);
                }
#pragma unroll
        for (u32 mask = 1; mask < kLanesPerRow; mask *= 2)
            sum += shuffle_xor(sum, mask);
        if (lane == 0 && query < params.seqlen_q)
            params.delta[first_row + query] = sum - row_dlse(params, first_row + query);
    }
}
