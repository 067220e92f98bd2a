// 64 x N float32 results of one warpgroup in registers, in wgmma's D layout.
#pragma once
#include "platform/convert.cuh"
#include "platform/ldmatrix.cuh"
#include "platform/math.cuh"
#include "platform/reduce.cuh"
#include "platform/stmatrix.cuh"
#include "platform/thread.cuh"
#include "panel_tile.cuh"

/// A lane holds, of rows row(0) and row(1), the pairs of columns col(n), col(n) + 1.
template <u32 kCols_>
struct WarpgroupTile {
    static constexpr u32 kRows = 64;
    static constexpr u32 kCols = kCols_;
    static constexpr u32 kPairs = kCols / 8;

    float x[kCols / 2];

    /// The first kFewer columns.
    template <u32 kFewer>
    DEVICE WarpgroupTile<kFewer>& front() {
        static_assert(kFewer <= kCols);
        return reinterpret_cast<WarpgroupTile<kFewer>&>(*this);
    }

    DEVICE static u32 row(u32 half) { return thread_index() % 128 / 32 * 16 + lane_index() / 4 + 8 * half; }
    DEVICE static u32 col(u32 n) { return 8 * n + 2 * (lane_index() % 4); }
    DEVICE float& at(u32 n, u32 half, u32 odd) { return x[4 * n + 2 * half + odd]; }
    DEVICE float at(u32 n, u32 half, u32 odd) const { return x[4 * n + 2 * half + odd]; }

    /// body(element) for all elements of this lane.
    template <typename Body>
    DEVICE void each(Body body) {
#pragma unroll
        for (u32 i = 0; i < kCols / 2; ++i)
            body(x[i]);
    }

    DEVICE void clear() {
        each([](float& value) { value = 0.0f; });
    }

    /// Each of this lane's two rows by its own factor.
    DEVICE void multiply(const float (&factor)[2]) {
#pragma unroll
        for (u32 i = 0; i < kCols / 2; ++i)
            x[i] *= factor[i / 2 % 2];
    }

    /// x * 0 is NaN where x is not finite: one instruction per element.
    DEVICE bool all_finite() const {
        float sum[4] = {};
#pragma unroll
        for (u32 i = 0; i < kCols / 2; ++i)
            sum[i % 4] = multiply_add(x[i], 0.0f, sum[i % 4]);
        return (sum[0] + sum[1]) + (sum[2] + sum[3]) == 0.0f;
    }
};

/// A result of one product as operand A of the next: 16-bit pairs, four registers per step of 16 columns.
template <typename T, u32 kCols>
struct WarpgroupOperand {
    u32 x[kCols / 4];

    /// Columns that the tile does not have become 0.
    template <u32 kTileCols>
    DEVICE void round(const WarpgroupTile<kTileCols>& tile) {
        static_assert(kTileCols <= kCols);
#pragma unroll
        for (u32 i = 0; i < kCols / 4; ++i)
            x[i] = i < kTileCols / 4 ? pack<T>(tile.x[2 * i], tile.x[2 * i + 1]) : 0;
    }
};

/// S = A B^T, both in shared memory with the summed index along their columns (descriptors by `along_cols`; that of A may
/// point to any multiple of 64 rows), for the first kCols rows of B. Asynchronous.
template <typename TileA, typename TileB, u32 kCols>
DEVICE void multiply_transposed(WarpgroupTile<kCols>& S, u64 a, u64 b) {
    using Product = Wgmma<typename TileA::Element, kCols>;
    static_assert(TileA::kRows % 64 == 0 && TileA::kCols == TileB::kCols && kCols <= TileB::kRows);
#pragma unroll
    for (u32 k = 0; k < TileA::kCols / 16; ++k) {
        const u64 at_a = advance(a, TileA::step_along_cols(k)), at_b = advance(b, TileB::step_along_cols(k));
        if (k == 0)
            Product::template shared<false>(S.x, at_a, at_b);
        else
            Product::template shared<true>(S.x, at_a, at_b);
    }
}

/// O += P V, P in registers, V in shared memory with the summed index along its rows (`along_rows`). Asynchronous.
template <typename TileV>
DEVICE void add_product(WarpgroupTile<TileV::kCols>& O,
                        const WarpgroupOperand<typename TileV::Element, TileV::kRows>& P, u64 v) {
#pragma unroll
    for (u32 k = 0; k < TileV::kRows / 16; ++k)
        Wgmma<typename TileV::Element, TileV::kCols>::template registers<true, true>(
            O.x, P.x + 4 * k, advance(v, TileV::step_along_rows(k)));
}

/// The same in products of up to kPartCols columns, a multiple of a panel's: ptxas wants one product's accumulators to fit
/// the registers that a thread is launched with.
template <u32 kPartCols, typename TileV>
DEVICE void add_product_by_parts(WarpgroupTile<TileV::kCols>& O,
                                 const WarpgroupOperand<typename TileV::Element, TileV::kRows>& P, u64 v) {
    constexpr u32 kRest = TileV::kCols % kPartCols;
    static_assert(kPartCols % TileV::kPanelCols == 0);
#pragma unroll
    for (u32 k = 0; k < TileV::kRows / 16; ++k) {
        const u64 at = advance(v, TileV::step_along_rows(k));
#pragma unroll
        for (u32 first = 0; first + kPartCols <= TileV::kCols; first += kPartCols)
            Wgmma<typename TileV::Element, kPartCols>::template registers<true, true>(
                reinterpret_cast<float (&)[kPartCols / 2]>(O.x[first / 2]), P.x + 4 * k,
                advance(at, first / TileV::kPanelCols * TileV::kPanelBytes));
        if constexpr (kRest != 0)
            Wgmma<typename TileV::Element, kRest>::template registers<true, true>(
                reinterpret_cast<float (&)[kRest / 2]>(O.x[(TileV::kCols - kRest) / 2]), P.x + 4 * k,
                advance(at, TileV::kCols / kPartCols * kPartCols / TileV::kPanelCols * TileV::kPanelBytes));
    }
}

/// S = A B^T with A in registers.
template <typename TileB>
DEVICE void multiply_transposed(WarpgroupTile<TileB::kRows>& S,
                                const WarpgroupOperand<typename TileB::Element, TileB::kCols>& A, u64 b) {
    using Product = Wgmma<typename TileB::Element, TileB::kRows>;
#pragma unroll
    for (u32 k = 0; k < TileB::kCols / 16; ++k) {
        const u64 at_b = advance(b, TileB::step_along_cols(k));
        if (k == 0)
            Product::template registers<false>(S.x, A.x, at_b);
        else
            Product::template registers<true>(S.x, A.x + 4 * k, at_b);
    }
}

/// S = A^T B^T for 64 columns of A, which has the summed index along its rows (`along_rows`, of the panel), and kCols rows of
/// B, which has it along its columns (`along_cols`, of the first of the rows). Asynchronous.
template <typename TileA, typename TileB, u32 kCols>
DEVICE void multiply_transposes(WarpgroupTile<kCols>& S, u64 a, u64 b) {
    using Product = Wgmma<typename TileA::Element, kCols>;
    static_assert(TileA::kRows == TileB::kCols);
#pragma unroll
    for (u32 k = 0; k < TileA::kRows / 16; ++k) {
        const u64 at_a = advance(a, TileA::step_along_rows(k)), at_b = advance(b, TileB::step_along_cols(k));
        if (k == 0)
            Product::template shared<false, true>(S.x, at_a, at_b);
        else
            Product::template shared<true, true>(S.x, at_a, at_b);
    }
}

/// S = A B for 64 rows of A, which has the summed index along its columns (`along_cols`, of the first of the rows), and
/// kCols columns of B, which has it along its rows (`along_rows`, of the panel). Asynchronous.
template <typename TileA, typename TileB, u32 kCols>
DEVICE void multiply(WarpgroupTile<kCols>& S, u64 a, u64 b) {
    using Product = Wgmma<typename TileA::Element, kCols>;
    static_assert(TileA::kCols == TileB::kRows);
#pragma unroll
    for (u32 k = 0; k < TileA::kCols / 16; ++k) {
        const u64 at_a = advance(a, TileA::step_along_cols(k)), at_b = advance(b, TileB::step_along_rows(k));
        if (k == 0)
            Product::template shared<false, false, true>(S.x, at_a, at_b);
        else
            Product::template shared<true, false, true>(S.x, at_a, at_b);
    }
}

/// O = A B, A in registers, for kCols columns of B, which has the summed index along its rows (`along_rows`, of the first panel
/// of these columns). Asynchronous.
template <typename TileB, u32 kCols>
DEVICE void multiply(WarpgroupTile<kCols>& O, const WarpgroupOperand<typename TileB::Element, TileB::kRows>& A, u64 b) {
    using Product = Wgmma<typename TileB::Element, kCols>;
#pragma unroll
    for (u32 k = 0; k < TileB::kRows / 16; ++k) {
        const u64 at_b = advance(b, TileB::step_along_rows(k));
        if (k == 0)
            Product::template registers<false, true>(O.x, A.x, at_b);
        else
            Product::template registers<true, true>(O.x, A.x + 4 * k, at_b);
    }
}

/// 64 rows of a tile in shared memory, from `first_row` on, as operand A in registers.
template <typename TileA>
DEVICE void load_operand(WarpgroupOperand<typename TileA::Element, TileA::kCols>& A, TileA& tile, u32 first_row) {
    const u32 row = first_row + thread_index() % 128 / 32 * 16 + lane_index() % 16;
#pragma unroll
    for (u32 k = 0; k < TileA::kCols / 16; ++k) {
        u32 r[4];
        ldmatrix_x4(r, shared_address(&tile.at(row, 16 * k + lane_index() / 16 * 8)));
#pragma unroll
        for (u32 n = 0; n < 4; ++n)
            A.x[4 * k + n] = r[n];
    }
}

/// A warpgroup's result, rounded, transposed to a panel in shared memory: its columns become rows, from `first_row` (a
/// multiple of 8) on, its rows the panel's columns. This is where a lane begins ...
template <typename Tile>
DEVICE SharedAddress transposed_place(Tile& tile, u32 first_row, u32 panel) {
    const u32 lane = lane_index(), row = first_row + lane / 16 * 8 + lane % 8;
    const u32 col = panel * Tile::kPanelCols + thread_index() % 128 / 32 * 16 + lane / 8 % 2 * 8;
    return shared_address(&tile.at(row, col));
}
/// ... and this the store.
template <typename Tile, u32 kCols>
DEVICE void store_transposed(SharedAddress place, const WarpgroupOperand<typename Tile::Element, kCols>& x) {
#pragma unroll
    for (u32 k = 0; k < kCols / 16; ++k)
        stmatrix_x4_transposed(place + 16 * k * Tile::kRowBytes, x.x + 4 * k);
}
template <typename Tile, u32 kCols>
DEVICE void store_transposed(Tile& tile, u32 first_row, u32 panel,
                             const WarpgroupOperand<typename Tile::Element, kCols>& x) {
    store_transposed<Tile>(transposed_place(tile, first_row, panel), x);
}

/// A warpgroup's result as it lies in registers: 16 bytes of each thread, a thread after the other.
template <u32 kCols>
DEVICE void store_fragments(float* to, const WarpgroupTile<kCols>& tile) {
#pragma unroll
    for (u32 n = 0; n < kCols / 8; ++n)
        *reinterpret_cast<float4*>(to + 4 * (128 * n + thread_index() % 128)) =
            float4{tile.x[4 * n], tile.x[4 * n + 1], tile.x[4 * n + 2], tile.x[4 * n + 3]};
}
/// The same, added to what is there in global memory.
template <u32 kCols>
DEVICE void add_fragments(float* to, const WarpgroupTile<kCols>& tile) {
    to += 4 * (thread_index() % 128);
#pragma unroll
    for (u32 n = 0; n < kCols / 8; ++n)
        reduce_add4(to + 512 * n, tile.x[4 * n], tile.x[4 * n + 1], tile.x[4 * n + 2], tile.x[4 * n + 3]);
}
template <u32 kCols>
DEVICE void load_fragments(WarpgroupTile<kCols>& tile, const float* from) {
#pragma unroll
    for (u32 n = 0; n < kCols / 8; ++n) {
        const float4 x = *reinterpret_cast<const float4*>(from + 4 * (128 * n + thread_index() % 128));
        tile.x[4 * n] = x.x;
        tile.x[4 * n + 1] = x.y;
        tile.x[4 * n + 2] = x.z;
        tile.x[4 * n + 3] = x.w;
    }
}

/// tile += what is there.
template <u32 kCols>
DEVICE void gather_fragments(WarpgroupTile<kCols>& tile, const float* from) {
    from += 4 * (thread_index() % 128);
#pragma unroll
    for (u32 n = 0; n < kCols / 8; ++n) {
        const float4 x = *reinterpret_cast<const float4*>(from + 512 * n);
        tile.x[4 * n] += x.x;
        tile.x[4 * n + 1] += x.y;
        tile.x[4 * n + 2] += x.z;
        tile.x[4 * n + 3] += x.w;
    }
}

/// The 4 x 4 words of four neighbouring lanes, transposed.
DEVICE void transpose_quad(u32 (&word)[4]) {
#pragma unroll
    for (u32 bit = 1; bit <= 2; bit *= 2) {
        const bool upper = lane_index() & bit;
#pragma unroll
        for (u32 n = 0; n < 4; ++n)
            if ((n & bit) == 0) {
                u32 &low = word[n], &high = word[n | bit];
                const u32 got = float_to_bits(shuffle_xor(bits_to_float(upper ? low : high), bit));
                (upper ? low : high) = got;
            }
    }
}

/// Rows [0, rows) and columns [0, cols) of a warpgroup's result, rounded, to global memory: out is row 0, 16-byte aligned like
/// every row, and cols a multiple of 8. The four lanes of a row exchange pairs so that each writes 16 bytes.
template <typename T, u32 kCols>
DEVICE void store_rows(T* out, i64 row_stride, i32 rows, u32 cols, const WarpgroupTile<kCols>& tile) {
    const u32 quad = lane_index() % 4;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const i32 row = static_cast<i32>(tile.row(half));
#pragma unroll
        for (u32 first = 0; first < tile.kPairs; first += 4) {
            u32 word[4];
#pragma unroll
            for (u32 n = 0; n < 4; ++n)
                word[n] =
                    first + n < tile.kPairs ? pack<T>(tile.at(first + n, half, 0), tile.at(first + n, half, 1)) : 0;
            transpose_quad(word);
            const u32 col = 8 * (first + quad);
            if (row < rows && col < cols)
                *reinterpret_cast<uint4*>(out + row * row_stride + col) = uint4{word[0], word[1], word[2], word[3]};
        }
    }
}
template <typename T, u32 kColsUsed, u32 kCols>
DEVICE void store_rows(T* out, i64 row_stride, i32 rows, const WarpgroupTile<kCols>& tile) {
    // Where whole quads are used, columns are not asked about.
    store_rows(out, row_stride, rows, kColsUsed % 32 == 0 ? ~0u : kColsUsed, tile);
}
