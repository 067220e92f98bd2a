// Data that a mask hides must not reach a result even when it is NaN or infinite, but a hidden weight is an exact 0 and
// 0 x NaN is NaN. So, where such data is met (rarely), its visible part is added by hand and the tile is then cleaned.
#pragma once
#include "platform/convert.cuh"
#include "platform/thread.cuh"
#include "platform/types.cuh"
#include "traits.cuh"

/// Adds to D, whose columns are those of the global matrix from first_col on, every element (k, col) of the matrix's first
/// `rows` rows that is not finite and that visible(D's row, k) allows. weighted: its weight may be negative or 0, so that the sum is NaN
/// whatever the element; else the weight is a positive probability, and the element itself is added.
template <u32 kColsUsed, bool kWeighted = false, typename Result, typename T, typename Visible>
DEVICE void add_visible_nonfinite(Result& D, const T* matrix, i64 row_stride, i32 rows, Visible visible, u32 first_col = 0) {
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
