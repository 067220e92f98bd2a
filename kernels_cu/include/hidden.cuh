// Data that a mask hides must not reach a result even when it is NaN or infinite, but a hidden weight is an exact 0 and
// 0 x NaN is NaN. So, where such data is met (rarely), the tile is cleaned before the product, and what was visible of it
// is put into the result by hand.
#pragma once
#include "band.cuh"
#include "platform/convert.cuh"
#include "platform/thread.cuh"
#include "platform/types.cuh"
#include "traits.cuh"

/// Adds to D, whose columns are those of the global matrix from first_col on, every element (k, col) of the matrix's first
/// `rows` rows that is not finite and that visible(D's row, k) allows. weighted: its weight may be negative or 0, so that the sum is NaN
/// whatever the element; else the weight is a positive probability, and the element itself is added.
template <u32 kColsUsed, bool kWeighted = false, typename Result, typename T, typename Visible>
DEVICE void add_visible_nonfinite(Result& D, const T* matrix, i64 row_stride, i32 rows, Visible visible,
                                  u32 first_col = 0) {
#pragma unroll 1
    for (i32 k = 0; k < rows; ++k)
#pragma unroll
        for (u32 n = 0; n < Result::kN; ++n)
#pragma unroll
            for (u32 e = 0; e < Result::kFragmentCols; ++e) {
                const u32 col = first_col + D.col(n, e);
                const float x = col < kColsUsed ? to_float(matrix[k * row_stride + col]) : 0.0f;
                if (is_finite(x))
                    continue;
#pragma unroll
                for (u32 m = 0; m < Result::kM; ++m)
#pragma unroll
                    for (u32 r = 0; r < Result::kFragmentRows; ++r)
                        if (visible(D.row(m, r * Result::kFragmentCols), k))
                            D.x[m][n][r * Result::kFragmentCols + e] += kWeighted ? not_a_number() : x;
            }
}

/// Puts the elements (k, col) of a matrix that are not finite, k in `range`, into the rows of a result tile that saw them:
/// rows seen_by(k), counted from the tile's first. weighted: see above. All threads of the block, a barrier before and after.
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

/// Whether the tile has a NaN or an infinity; all threads of the block, which agree on the answer.
template <typename Tile>
DEVICE bool has_nonfinite(const Tile& tile) {
    bool nonfinite = false;
#pragma unroll 4
    for (u32 n = thread_index(); n < sizeof(tile.data) / sizeof(uint4); n += kThreads) {
        const uint4 word = reinterpret_cast<const uint4*>(tile.data)[n];
        const auto* elements = reinterpret_cast<const typename Tile::Element*>(&word);
#pragma unroll
        for (u32 e = 0; e < sizeof(uint4) / sizeof(elements[0]); ++e)
            nonfinite |= !is_finite(to_float(elements[e]));
    }
    return block_any(nonfinite);
}
