// Data that a mask hides must not reach a result even when it is NaN or infinite, but a hidden weight is an exact 0 and
// 0 x NaN is NaN. So, where such data is met (rarely), the tile is cleaned before the product, and what was visible of it
// is put into the result by hand.
#pragma once
#include "band.cuh"
#include "platform/convert.cuh"
#include "platform/thread.cuh"
#include "platform/types.cuh"
#include "score.cuh"
#include "traits.cuh"

/// Puts the elements (k, col) of a matrix that are not finite, k in `range`, into the rows of a result tile that saw them:
/// rows seen_by(k), counted from the tile's first. kWeighted: their weight may be negative or 0, so that the result is NaN
/// whatever the element was; else it is a positive probability, and the element itself is added. All threads of the block, a
/// barrier before and after.
template <u32 kColsUsed, bool kWeighted = false, typename Tile, typename SeenBy>
DEVICE void restore_nonfinite(Tile& result, const typename Tile::Element* matrix, i64 row_stride, Range range,
                              SeenBy seen_by) {
    block_sync();
#pragma unroll 1
    for (u32 col = thread_index(); col < kColsUsed; col += kThreads)
#pragma unroll 1
        for (i32 k = range.first; k < range.end; ++k) {
            const float x = to_float(matrix[k * row_stride + col]);
            if (is_finite(x))
                continue;
            const Range rows = seen_by(k);
#pragma unroll 1
            for (i32 row = larger(0, rows.first); row < smaller(static_cast<i32>(Tile::kRows), rows.end); ++row) {
                auto& element = result.at(row, col);
                element = from_float<typename Tile::Element>(to_float(element) + (kWeighted ? not_a_number() : x));
            }
        }
    block_sync();
}

// A cap keeps LSE and delta finite where q is infinite, so that these do not tell of it.
constexpr bool kCapHides = kBand && kScoreKind == 2;

/// Replaces every NaN and infinity of the tile by 0; all threads of the block, with a barrier before and after.
template <typename Tile>
DEVICE void clear_nonfinite(Tile& tile) {
    using T = typename Tile::Element;
    block_sync();
#pragma unroll 1
    for (u32 n = thread_index(); n < sizeof(tile.data) / sizeof(T); n += kThreads)
        if (!is_finite(to_float(tile.data[n])))
            tile.data[n] = from_float<T>(0.0f);
    block_sync();
}

/// Whether the tile has a NaN or an infinity in the share of thread `index` of `threads`.
template <u32 kAtOnce, typename Tile>
DEVICE bool finds_nonfinite(const Tile& tile, u32 index, u32 threads) {
    bool nonfinite = false;
#pragma unroll kAtOnce
    for (u32 n = index; n < sizeof(tile.data) / sizeof(uint4); n += threads) {
        const uint4 word = reinterpret_cast<const uint4*>(tile.data)[n];
        const auto* elements = reinterpret_cast<const typename Tile::Element*>(&word);
#pragma unroll
        for (u32 e = 0; e < sizeof(uint4) / sizeof(elements[0]); ++e)
            nonfinite |= !is_finite(to_float(elements[e]));
    }
    return nonfinite;
}

/// Whether the tile has any; all threads of the block, which agree on the answer.
template <typename Tile>
DEVICE bool has_nonfinite(const Tile& tile) {
    return block_any(finds_nonfinite<4>(tile, thread_index(), kThreads));
}
