// Matrix products by plain multiply-adds. A warp computes some rows of a product and all its columns; its 32 lanes form a
// grid over them, and each lane keeps a block of the results in registers. What binds is the issue of instructions: an
// 8 x 8 block needs one load (of four elements) for 16 multiply-adds, an 8 x 4 block one for 11.
#pragma once
#include "platform/convert.cuh"
#include "platform/math.cuh"
#include "platform/thread.cuh"
#include "row_tile.cuh"

/// Lanes over the rows of a warp's `rows` x `cols` results; the others share the columns. A lane's block shall be as square
/// as can be: for every four k it loads its rows once and its columns once.
DEVICE constexpr u32 lanes_over_rows(u32 rows, u32 cols) {
    u32 best = 0, fewest_loads = ~0u;
    for (u32 lanes = 2; lanes <= 8; lanes *= 2) {
        const u32 loads = rows / lanes + cols * lanes / 32;
        if (rows % lanes == 0 && cols * lanes % 32 == 0 && loads < fewest_loads) {
            best = lanes;
            fewest_loads = loads;
        }
    }
    return best;
}

/// kRows x kCols float32 results of one warp, kLanesM lanes over the rows. A lane has every kLanesM-th row, and the columns
/// in runs of up to kMaxRun neighbours: runs of four are read as one, single columns spread over neighbouring lanes. With
/// kRowRun > 1 the rows come in runs too.
///
/// Lane bit 0 counts rows and bits 1 .. 3 (at least 1, 2) columns: the two halves of a 16-byte load per quarter-warp are
/// served together only if lanes l and l ^ 1 (or l and l ^ 2) want the same address.
template <u32 kRows, u32 kCols, u32 kLanesM_, u32 kMaxRun, u32 kRowRun_ = 1>
struct ThreadTile {
    static constexpr u32 kLanesM = kLanesM_;
    static constexpr u32 kLanesN = 32 / kLanesM;
    static constexpr u32 kRowRun = kRowRun_;
    static constexpr u32 kM = kRows / kLanesM;
    static constexpr u32 kN = kCols / kLanesN;
    static_assert(kM * kLanesM == kRows && kN * kLanesN == kCols && kM > 0 && kN > 0, "lanes share the tile evenly");
    static_assert(kM % kRowRun == 0, "a lane has whole runs of rows");
    // Columns of a lane in runs of four, then of two, then single ones.
    static constexpr u32 kFours = kMaxRun >= 4 ? kN / 4 * 4 : 0;
    static constexpr u32 kTwos = kMaxRun >= 2 ? (kN - kFours) / 2 * 2 : 0;
    static constexpr u32 kFragmentRows = 1, kFragmentCols = 1;

    float x[kM][kN][1];

    DEVICE static u32 lane_row() { return lane_index() % 2 + lane_index() / (2 * kLanesN) * 2; }
    DEVICE static u32 lane_col() { return lane_index() / 2 % kLanesN; }

    /// Row, from the warp's first on, and column of x[m][n].
    DEVICE static u32 row(u32 m, u32 = 0) { return kRowRun * (lane_row() + kLanesM * (m / kRowRun)) + m % kRowRun; }
    DEVICE static u32 col(u32 n, u32 = 0) {
        if constexpr (kFours != 0)
            if (n < kFours)
                return kLanesN * (n / 4 * 4) + 4 * lane_col() + n % 4;
        if constexpr (kTwos != 0)
            if (n < kFours + kTwos)
                return kLanesN * kFours + 2 * lane_col() + (n - kFours);
        return kLanesN * n + lane_col();
    }

    DEVICE float fragment_maximum(u32 m, u32 n, u32) const { return x[m][n][0]; }

    /// A reduction over the lanes that hold the same rows.
    template <typename Combine>
    DEVICE static float over_row(float value, Combine combine) {
#pragma unroll
        for (u32 mask = 2; mask < 2 * kLanesN; mask *= 2)
            value = combine(value, shuffle_xor(value, mask));
        return value;
    }
    DEVICE static float row_maximum(float value) { return over_row(value, maximum); }
    DEVICE static float row_sum(float value) {
        return over_row(value, [](float a, float b) { return a + b; });
    }

    /// body(element) for all elements of this lane.
    template <typename Body>
    DEVICE void each(Body body) {
#pragma unroll
        for (u32 m = 0; m < kM; ++m)
#pragma unroll
            for (u32 n = 0; n < kN; ++n)
                body(x[m][n][0]);
    }

    DEVICE void clear() {
        each([](float& value) { value = 0.0f; });
    }

    DEVICE void multiply(float factor) {
        each([&](float& value) { value *= factor; });
    }

    DEVICE bool all_finite() {
        bool finite = true;
        each([&](float& value) { finite &= is_finite(value); });
        return finite;
    }
};

/// kCount (1, 2 or 4) neighbouring elements as float32, by one access.
template <u32 kCount, typename T>
DEVICE void load_run(float (&x)[kCount], const T* from) {
    struct alignas(kCount * sizeof(T)) Run {
        T element[kCount];
    };
    const Run run = *reinterpret_cast<const Run*>(from);
#pragma unroll
    for (u32 n = 0; n < kCount; ++n)
        x[n] = to_float(run.element[n]);
}

template <u32 kCount, typename T>
DEVICE void store_run(T* to, const float (&x)[kCount]) {
    struct alignas(kCount * sizeof(T)) Run {
        T element[kCount];
    } run;
#pragma unroll
    for (u32 n = 0; n < kCount; ++n)
        run.element[n] = from_float<T>(x[n]);
    *reinterpret_cast<Run*>(to) = run;
}

/// Rows of a left operand, four columns at a time: those of a lane in D = A B.
template <typename D, typename T, u32 kRows, u32 kCols>
struct LeftRows {
    using Tile = RowTile<T, kRows, kCols, ReadBy::kTwoRows>;
    // A lane's rows are all even or all odd: exchanged chunks are a constant step away from where they would be.
    const T* even_chunk;
    const T* odd_chunk;

    DEVICE LeftRows(const Tile& tile, u32 first_row) {
        const u32 row = first_row + D::row(0);
        even_chunk = tile.pointer(row, 0);
        odd_chunk = tile.pointer(row, Tile::kChunkElements) - Tile::kChunkElements;
    }
    DEVICE void load(float (&a)[4], u32 m, u32 k) const {
        const T* chunk = k / Tile::kChunkElements % 2 == 0 ? even_chunk : odd_chunk;
        load_run(a, chunk + m * (D::kLanesM * Tile::kStride) + k);
    }
    /// Moves on by some columns, a multiple of two chunks.
    DEVICE void advance(u32 columns) {
        even_chunk += columns;
        odd_chunk += columns;
    }
};

// Columns of k per iteration of the products' loops, at least two 16-byte chunks: enough to hide the loop's own instructions,
// few enough for the instruction cache. Compiled for sm_100 and up, longer bodies fetch so far ahead that registers spill.
template <typename T>
constexpr u32 kUnrolledK = sizeof(T) == 4 && CF_ARCH >= 100 ? 8 : 16;

/// D += A B^T: both operands hold k as their columns.
template <u32 kRows, u32 kCols, u32 kLanesM, typename T, u32 kRowsA, u32 kRowsB, u32 kK>
DEVICE void add_product_transposed(ThreadTile<kRows, kCols, kLanesM, 1>& D,
                                   const RowTile<T, kRowsA, kK, ReadBy::kTwoRows>& A, u32 first_row,
                                   const RowTile<T, kRowsB, kK, ReadBy::kEightRows>& B) {
    using Result = ThreadTile<kRows, kCols, kLanesM, 1>;
    using TileB = RowTile<T, kRowsB, kK, ReadBy::kEightRows>;
    LeftRows<Result, T, kRowsA, kK> left(A, first_row);
    const T* right = B.pointer(D.col(0), 0);
    static_assert(kK % kUnrolledK<T> == 0, "head dims of tiles are multiples of 16");
#pragma unroll 1
    for (u32 k0 = 0; k0 < kK; k0 += kUnrolledK<T>) {
#pragma unroll
        for (u32 k = 0; k < kUnrolledK<T>; k += 4) {
            float b[Result::kN][4];
#pragma unroll
            for (u32 n = 0; n < Result::kN; ++n)
                load_run(b[n], right + n * (Result::kLanesN * TileB::kStride) + k);
#pragma unroll
            for (u32 m = 0; m < Result::kM; ++m) {
                float a[4];
                left.load(a, m, k);
#pragma unroll
                for (u32 c = 0; c < 4; ++c)
#pragma unroll
                    for (u32 n = 0; n < Result::kN; ++n)
                        D.x[m][n][0] = multiply_add(a[c], b[n][c], D.x[m][n][0]);
            }
        }
        // Moved, not computed from k0: that would be done anew for every load.
        left.advance(kUnrolledK<T>);
        right += kUnrolledK<T>;
    }
}

/// Column c of the lane's rows of A, times a run of kCount columns of a row of B, from the lane's column `first` on.
template <u32 kCount, typename Result, typename T>
DEVICE void add_run(Result& D, const float (&a)[Result::kM][4], u32 c, const T* row_of_B, u32 first) {
    float b[kCount];
    load_run(b, row_of_B + D.col(first));
#pragma unroll
    for (u32 m = 0; m < Result::kM; ++m)
#pragma unroll
        for (u32 n = 0; n < kCount; ++n)
            D.x[m][first + n][0] = multiply_add(a[m][c], b[n], D.x[m][first + n][0]);
}

/// D += A B: B holds k as its rows.
template <u32 kRows, u32 kCols, u32 kLanesM, typename T, u32 kRowsA, u32 kK, ReadBy kReadBy>
DEVICE void add_product(ThreadTile<kRows, kCols, kLanesM, 4>& D, const RowTile<float, kRowsA, kK, ReadBy::kTwoRows>& A,
                        u32 first_row, const RowTile<T, kK, kCols, kReadBy>& B) {
    using Result = ThreadTile<kRows, kCols, kLanesM, 4>;
    using TileB = RowTile<T, kK, kCols, kReadBy>;
    LeftRows<Result, float, kRowsA, kK> left(A, first_row);
    const T* rows = B.data;
    constexpr u32 kUnrolled = kK % kUnrolledK<float> == 0 ? kUnrolledK<float> : 8;
#pragma unroll 1
    for (u32 k0 = 0; k0 < kK; k0 += kUnrolled) {
#pragma unroll
        for (u32 k = 0; k < kUnrolled; k += 4) {
            float a[Result::kM][4];
#pragma unroll
            for (u32 m = 0; m < Result::kM; ++m)
                left.load(a[m], m, k);
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                const T* row = rows + (k + c) * TileB::kStride;
                if constexpr (Result::kFours != 0)
#pragma unroll
                    for (u32 n = 0; n < Result::kFours; n += 4)
                        add_run<4>(D, a, c, row, n);
                if constexpr (Result::kTwos != 0)
                    add_run<2>(D, a, c, row, Result::kFours);
                if constexpr (Result::kN % 2 != 0)
                    add_run<1>(D, a, c, row, Result::kN - 1);
            }
        }
        left.advance(kUnrolled);
        rows += kUnrolled * TileB::kStride;
    }
}

/// Runs of columns, in row after row, of an operand that holds k as its rows. A lane's runs begin at a column of its own and
/// are `step` columns apart, a multiple of two chunks: those of even rows, and those of odd ones, are a constant step away.
template <typename Tile>
struct RowRuns {
    const typename Tile::Element* even;
    const typename Tile::Element* odd;

    DEVICE RowRuns(const Tile& tile, u32 col) : even(tile.pointer(0, col)), odd(tile.pointer(1, col) - Tile::kStride) {}
    template <u32 kCount>
    DEVICE void load(float (&x)[kCount], u32 k, u32 step) const {
        load_run(x, (k % 2 == 0 ? even : odd) + k * Tile::kStride + step);
    }
    /// Moves on by an even number of rows.
    DEVICE void advance(u32 rows) {
        even += rows * Tile::kStride;
        odd += rows * Tile::kStride;
    }
};

/// Row k of A^T times a run of kCount columns of row k of B, from the lane's column `first` on.
template <u32 kCount, typename Result, typename Tile>
DEVICE void add_outer(Result& D, const float (&a)[Result::kM / Result::kRowRun][Result::kRowRun],
                      const RowRuns<Tile>& right, u32 k, u32 first, u32 step) {
    float b[kCount];
    right.load(b, k, step);
#pragma unroll
    for (u32 m = 0; m < Result::kM; ++m)
#pragma unroll
        for (u32 n = 0; n < kCount; ++n)
            D.x[m][first + n][0] =
                multiply_add(a[m / Result::kRowRun][m % Result::kRowRun], b[n], D.x[m][first + n][0]);
}

/// D += A^T B, rows first_row .. and columns first_col .. of the product: both operands hold k as their rows.
template <u32 kRows, u32 kCols, u32 kLanesM, u32 kRowRun, typename T, u32 kK, u32 kColsA, u32 kColsB>
DEVICE void add_product_of_columns(ThreadTile<kRows, kCols, kLanesM, 4, kRowRun>& D,
                                   const RowTile<float, kK, kColsA, ReadBy::kTwoRows>& A, u32 first_row,
                                   const RowTile<T, kK, kColsB, ReadBy::kTwoRows>& B, u32 first_col) {
    using Result = ThreadTile<kRows, kCols, kLanesM, 4, kRowRun>;
    static_assert(Result::kM == kRowRun || kLanesM * kRowRun % 8 == 0,
                  "a lane's runs are a multiple of two chunks apart");
    using RunsB = RowRuns<RowTile<T, kK, kColsB, ReadBy::kTwoRows>>;
    RowRuns<RowTile<float, kK, kColsA, ReadBy::kTwoRows>> left(A, first_row + D.row(0));
    RunsB fours(B, first_col + D.col(0)), two(B, first_col + D.col(Result::kFours)),
        one(B, first_col + D.col(Result::kN - 1));
    constexpr u32 kUnrolled = kK % kUnrolledK<float> == 0 ? kUnrolledK<float> : 8;
    static_assert(kK % kUnrolled == 0, "tiles have a multiple of eight keys");
#pragma unroll 1
    for (u32 k0 = 0; k0 < kK; k0 += kUnrolled) {
#pragma unroll
        for (u32 k = 0; k < kUnrolled; ++k) {
            float a[Result::kM / kRowRun][kRowRun];
#pragma unroll
            for (u32 m = 0; m < Result::kM / kRowRun; ++m)
                left.load(a[m], k, m * (kLanesM * kRowRun));
            if constexpr (Result::kFours != 0)
#pragma unroll
                for (u32 n = 0; n < Result::kFours; n += 4)
                    add_outer<4>(D, a, fours, k, n, n * Result::kLanesN);
            if constexpr (Result::kTwos != 0)
                add_outer<2>(D, a, two, k, Result::kFours, 0);
            if constexpr (Result::kN % 2 != 0)
                add_outer<1>(D, a, one, k, Result::kN - 1, 0);
        }
        left.advance(kUnrolled);
        fours.advance(kUnrolled);
        two.advance(kUnrolled);
        one.advance(kUnrolled);
    }
}

/// Rounds a result to T and writes it into a tile, the warp's rows from first_row on.
template <typename T, u32 kTileRows, u32 kTileCols, ReadBy kReadBy, u32 kRows, u32 kCols, u32 kLanesM, u32 kMaxRun>
DEVICE void store_result(RowTile<T, kTileRows, kTileCols, kReadBy>& tile,
                         const ThreadTile<kRows, kCols, kLanesM, kMaxRun>& D, u32 first_row) {
    using Result = ThreadTile<kRows, kCols, kLanesM, kMaxRun>;
#pragma unroll
    for (u32 m = 0; m < Result::kM; ++m) {
        if constexpr (Result::kFours != 0)
#pragma unroll
            for (u32 n = 0; n < Result::kFours; n += 4)
                store_run(tile.pointer(first_row + D.row(m), D.col(n)),
                          {D.x[m][n][0], D.x[m][n + 1][0], D.x[m][n + 2][0], D.x[m][n + 3][0]});
#pragma unroll
        for (u32 n = Result::kFours; n < Result::kN; ++n)
            tile.at(first_row + D.row(m), D.col(n)) = from_float<T>(D.x[m][n][0]);
    }
}
