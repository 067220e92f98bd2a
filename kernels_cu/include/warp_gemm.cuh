// Matrix products of one warp: accumulators in registers, operands from shared tiles or from another product's result.
// A step along the summed index k is two 16-byte chunks: 16 elements of 16 bits, or 8 of 32. float32 is rounded to TF32 on
// the way in, or split into two TF32 numbers (see split_float.cuh).
#pragma once
#include "band.cuh"
#include "platform/convert.cuh"
#include "platform/ldmatrix.cuh"
#include "platform/math.cuh"
#include "platform/mma.cuh"
#include "platform/thread.cuh"
#include "shared_tile.cuh"
#include "split_float.cuh"

template <typename T>
constexpr u32 kStepK = 32 / sizeof(T);

/// What a product takes in place of a float32: the number rounded to TF32, or itself where it is split later.
DEVICE u32 operand_bits(float x) { return kSplit ? float_to_bits(x) : to_tf32(x); }

/// The same for elements fresh from memory; 16-bit pairs are taken as they are.
template <typename T>
DEVICE void round_operand(u32 (&r)[4]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (u32 n = 0; n < 4; ++n)
            r[n] = operand_bits(bits_to_float(r[n]));
    }
}

/// (16 kM) x (8 kN) float32 results of one warp, in mma's D layout. Where kSpread warps share the columns of a product, each
/// has every kSpread-th group of 16: a warp's first column then adds to the swizzled address without a carry.
/// kAlternate: of a group's 16 columns the even ones are the first fragment's, the odd ones the second's (see RowMajorB).
template <u32 kM_, u32 kN_, u32 kSpread_ = 1, bool kAlternate_ = false>
struct Accumulator {
    static constexpr u32 kM = kM_;
    static constexpr u32 kN = kN_;
    static constexpr u32 kSpread = kSpread_;
    static constexpr bool kAlternate = kAlternate_;
    static constexpr u32 kFragmentRows = 2, kFragmentCols = 2;  // of x[m][n], in one lane
    static_assert((kSpread & (kSpread - 1)) == 0, "or the swizzled address would carry");
    float x[kM][kN][4];

    /// body(element) for all elements of this lane.
    template <typename Body>
    DEVICE void each(Body body) {
#pragma unroll
        for (u32 m = 0; m < kM; ++m)
#pragma unroll
            for (u32 n = 0; n < kN; ++n)
#pragma unroll
                for (u32 e = 0; e < 4; ++e)
                    body(x[m][n][e]);
    }

    DEVICE void clear() {
        each([](float& value) { value = 0.0f; });
    }

    DEVICE void multiply(float factor) {
        each([&](float& value) { value *= factor; });
    }

    /// x * 0 is NaN where x is not finite: one instruction per element.
    DEVICE bool all_finite() {
        float sum = 0.0f;
        each([&](float& value) { sum = multiply_add(value, 0.0f, sum); });
        return sum == 0.0f;
    }

    /// Row and column of x[m][n][e] in this lane, from the warp's first row and column on.
    DEVICE static u32 row(u32 m, u32 e) { return 16 * m + lane_index() / 4 + 8 * (e / 2); }
    DEVICE static u32 col(u32 n, u32 e) {
        static_assert(!kAlternate, "not asked for");
        return 16 * kSpread * (n / 2) + 8 * (n % 2) + 2 * (lane_index() % 4) + e % 2;
    }

    /// Maximum of x[m][n] in its upper (0) or lower (1) row.
    DEVICE float fragment_maximum(u32 m, u32 n, u32 half) const {
        return maximum(x[m][n][2 * half], x[m][n][2 * half + 1]);
    }
    /// Maximum and sum over the four lanes that hold the same rows.
    DEVICE static float row_maximum(float value) {
        value = maximum(value, shuffle_xor(value, 1));
        return maximum(value, shuffle_xor(value, 2));
    }
    DEVICE static float row_sum(float value) {
        value += shuffle_xor(value, 1);
        return value + shuffle_xor(value, 2);
    }
};

/// Results of a product with B stored by rows.
template <typename T, u32 kM, u32 kN, u32 kSpread = 1>
using SumTile = Accumulator<kM, kN, kSpread, sizeof(T) == 4>;

/// How the four 8 x 16-byte matrices of one ldmatrix.x4 are laid over a 16-row, two-chunk block.
enum class MatrixOrder {
    kRowsFirst,   // (rows 0-7, chunk 0), (rows 8-15, chunk 0), (rows 0-7, chunk 1), (rows 8-15, chunk 1)
    kChunksFirst  // (rows 0-7, chunk 0), (rows 0-7, chunk 1), (rows 8-15, chunk 0), (rows 8-15, chunk 1)
};

/// This lane's place in a tile, from which any 16-row, two-chunk block is one xor and one constant away: the swizzle
/// depends on the row's low bits only, which a step of 16 rows leaves alone.
template <typename Tile>
struct MatrixReader {
    SharedAddress lane;

    DEVICE MatrixReader(const Tile& tile, u32 first_row, MatrixOrder order) {
        const u32 l = lane_index();
        const u32 row = order == MatrixOrder::kRowsFirst ? l % 16 : l / 16 * 8 + l % 8;
        const u32 chunk = order == MatrixOrder::kRowsFirst ? l / 16 : l / 8 % 2;
        lane = opaque(shared_address(tile.data) + Tile::byte_offset(first_row + row, chunk));
    }

    /// The compiler no longer knows what it has derived from this place, and keeps none of it in registers.
    DEVICE void forget() { lane = opaque(lane); }
    DEVICE SharedAddress address(u32 row, u32 chunk) const {
        return (lane ^ (chunk & Tile::kSwizzleMask) * 16) + (chunk & ~Tile::kSwizzleMask) * 16 + row * Tile::kRowBytes;
    }
    DEVICE void load(u32 (&r)[4], u32 row, u32 chunk) const { ldmatrix_x4(r, address(row, chunk)); }
    DEVICE void load_transposed(u32 (&r)[4], u32 row, u32 chunk) const {
        ldmatrix_x4_transposed(r, address(row, chunk));
    }
};

/// Left operand A (rows x k) stored as [row][k].
template <typename T, u32 kRows, u32 kCols>
struct RowMajorA {
    static constexpr bool kInMemory = true;
    MatrixReader<SharedTile<T, kRows, kCols>> reader;
    DEVICE RowMajorA(const SharedTile<T, kRows, kCols>& tile, u32 first_row)
        : reader(tile, first_row, MatrixOrder::kRowsFirst) {}
    DEVICE void forget() { reader.forget(); }
    DEVICE void load(u32 (&a)[4], u32 m, u32 step) const {
        reader.load(a, 16 * m, 2 * step);
        round_operand<T>(a);
    }
};

/// Left operand A (rows x k) stored transposed, as [k][row]; rows start at first_row (a multiple of 16).
template <typename T, u32 kRows, u32 kCols>
struct TransposedA {
    static constexpr bool kInMemory = true;
    MatrixReader<SharedTile<T, kRows, kCols>> reader;
    DEVICE TransposedA(const SharedTile<T, kRows, kCols>& tile, u32 first_row)
        : reader(tile, 0, MatrixOrder::kChunksFirst) {
        reader.lane = reader.address(0, first_row / 8);
    }
    DEVICE void load(u32 (&a)[4], u32 m, u32 step) const { reader.load_transposed(a, 16 * step, 2 * m); }
};

template <u32 kRows, u32 kCols>
struct TransposedA<float, kRows, kCols> {
    static constexpr bool kInMemory = true;
    using Tile = SharedTile<float, kRows, kCols>;
    const Tile& tile;
    u32 lane[2];  // bytes to this lane's column in its two rows of a step: steps are rows whose swizzle is the same
    DEVICE TransposedA(const Tile& tile_, u32 first_row) : tile(tile_) {
        const u32 g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
        for (u32 half = 0; half < 2; ++half)
            lane[half] = opaque(Tile::byte_offset(t + 4 * half, first_row / 4 + g / 4) + g % 4 * 4);
    }
    DEVICE void forget() {
        for (u32& bytes : lane)
            bytes = opaque(bytes);
    }
    DEVICE void load(u32 (&a)[4], u32 m, u32 step) const {
#pragma unroll
        for (u32 r = 0; r < 4; ++r) {
            const u32 chunk = 4 * m + 2 * (r % 2);
            const u32 at = (lane[r / 2] ^ (chunk & Tile::kSwizzleMask) * 16) + (chunk & ~Tile::kSwizzleMask) * 16 +
                           8 * step * Tile::kRowBytes;
            a[r] = operand_bits(*reinterpret_cast<const float*>(reinterpret_cast<const u8*>(tile.data) + at));
        }
    }
};

/// Left operand A that is the result of an earlier product, rounded to T: D's columns become k. For TF32 the columns
/// 2t and 2t + 1 that a lane holds stand in for t and t + 4, so B's rows have to be read in the same order.
template <typename T, u32 kM, u32 kN>
struct RegisterA {
    static constexpr bool kInMemory = false;
    const Accumulator<kM, kN>& source;
    DEVICE explicit RegisterA(const Accumulator<kM, kN>& source_) : source(source_) {}
    DEVICE void forget() {}
    DEVICE void load(u32 (&a)[4], u32 m, u32 step) const {
        if constexpr (sizeof(T) == 2) {
            const float (&low)[4] = source.x[m][2 * step];
            const float (&high)[4] = source.x[m][2 * step + 1];
            a[0] = pack<T>(low[0], low[1]);
            a[1] = pack<T>(low[2], low[3]);
            a[2] = pack<T>(high[0], high[1]);
            a[3] = pack<T>(high[2], high[3]);
        } else {
            const float (&d)[4] = source.x[m][step];
            a[0] = operand_bits(d[0]);
            a[1] = operand_bits(d[2]);
            a[2] = operand_bits(d[1]);
            a[3] = operand_bits(d[3]);
        }
    }
};

/// Right operand B (k x cols) stored as [col][k]: what A B^T needs. load gives columns 16 n .. 16 n + 15.
template <typename T, u32 kRows, u32 kCols>
struct ColumnMajorB {
    MatrixReader<SharedTile<T, kRows, kCols>> reader;
    DEVICE ColumnMajorB(const SharedTile<T, kRows, kCols>& tile, u32 first_col)
        : reader(tile, first_col, MatrixOrder::kChunksFirst) {}
    DEVICE void forget() { reader.forget(); }
    DEVICE void load(u32 (&b)[4], u32 n, u32 step) const {
        reader.load(b, 16 * n, 2 * step);
        round_operand<T>(b);
    }
};

/// Right operand B (k x cols) stored as [k][col]; columns start at first_col (a multiple of 16) and are spread as those of
/// the accumulator. kPairedK: k in the order of RegisterA.
template <typename T, bool kPairedK, u32 kSpread, u32 kRows, u32 kCols>
struct RowMajorB {
    MatrixReader<SharedTile<T, kRows, kCols>> reader;
    DEVICE RowMajorB(const SharedTile<T, kRows, kCols>& tile, u32 first_col)
        : reader(tile, 0, MatrixOrder::kRowsFirst) {
        reader.lane = reader.address(0, first_col / 8);
    }
    DEVICE void load(u32 (&b)[4], u32 n, u32 step) const { reader.load_transposed(b, 16 * step, 2 * kSpread * n); }
};

/// No instruction transposes elements of 32 bits. A lane reads two neighbouring columns of a row, which go to two fragments:
/// their columns alternate in the result.
template <bool kPairedK, u32 kSpread, u32 kRows, u32 kCols>
struct RowMajorB<float, kPairedK, kSpread, kRows, kCols> {
    using Tile = SharedTile<float, kRows, kCols>;
    const Tile& tile;
    u32 lane[2];  // bytes to this lane's columns in its two rows of a step: steps are rows whose swizzle is the same
    DEVICE RowMajorB(const Tile& tile_, u32 first_col) : tile(tile_) {
        const u32 g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 k = kPairedK ? 2 * t + r : t + 4 * r;
            lane[r] = opaque(Tile::byte_offset(k, first_col / 4 + g / 2) + g % 2 * 8);
        }
    }
    DEVICE void forget() {
        for (u32& bytes : lane)
            bytes = opaque(bytes);
    }
    DEVICE void load(u32 (&b)[4], u32 n, u32 step) const {
        const u32 chunk = 4 * kSpread * n;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 at = (lane[r] ^ (chunk & Tile::kSwizzleMask) * 16) + (chunk & ~Tile::kSwizzleMask) * 16 +
                           8 * step * Tile::kRowBytes;
            const float2 x = *reinterpret_cast<const float2*>(reinterpret_cast<const u8*>(tile.data) + at);
            b[r] = operand_bits(x.x);
            b[2 + r] = operand_bits(x.y);
        }
    }
};

/// D += A B of elements as the tensor core takes them. Operands of the next step are fetched while the current one is multiplied.
template <typename T, u32 kSteps, typename A, typename B, typename Tile>
DEVICE void rounded_gemm(Tile& D, const A& A_operand, const B& B_operand) {
    constexpr u32 kM = Tile::kM, kN = Tile::kN;
    u32 a[2][kM][4];
    u32 b[2][kN / 2][4];
    auto fetch = [&](u32 step) {
#pragma unroll
        for (u32 m = 0; m < kM; ++m)
            A_operand.load(a[step % 2][m], m, step);
#pragma unroll
        for (u32 n = 0; n < kN / 2; ++n)
            B_operand.load(b[step % 2][n], n, step);
    };
    fetch(0);
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps)
            fetch(step + 1);
#pragma unroll
        for (u32 n = 0; n < kN / 2; ++n) {
            const u32(&bn)[4] = b[step % 2][n];
#pragma unroll
            for (u32 m = 0; m < kM; ++m) {
                mma<T>(D.x[m][2 * n], a[step % 2][m], bn[0], bn[1]);
                mma<T>(D.x[m][2 * n + 1], a[step % 2][m], bn[2], bn[3]);
            }
        }
    }
}

/// D += A B over kSteps steps of k. kRepair: of split float32 also what cannot be split. Where a mask keeps rows from such
/// numbers they keep their bits, too; where all see all nobody asks for that, and plain products take fewer registers.
template <typename T, u32 kSteps, bool kRepair = false, typename A, typename B, typename Tile>
DEVICE void warp_gemm(Tile& D, const A& A_operand, const B& B_operand) {
    static_assert(Tile::kN % 2 == 0, "B comes in pairs of eight columns");
    if constexpr (kRepair && kBand)
        repaired_gemm<kSteps>(D, A_operand, B_operand);
    else if constexpr (kRepair)
        plain_gemm<kSteps>(D, A_operand, B_operand);
    else if constexpr (kSplit)
        split_gemm<kSteps>(D, A_operand, B_operand);
    else
        rounded_gemm<T, kSteps>(D, A_operand, B_operand);
}

/// Rounds an accumulator to T and writes it into a tile whose rows and columns are the accumulator's, shifted (first_row by
/// a multiple of 8, first_col by the warp's first group of 16).
template <typename Tile, u32 kM, u32 kN, u32 kSpread>
DEVICE void store_accumulator(Tile& tile, const Accumulator<kM, kN, kSpread>& D, u32 first_row, u32 first_col) {
    using T = typename Tile::Element;
    // A lane's first column in its first row. Its other rows are multiples of 8 further and so swizzled alike; its other
    // columns are whole chunks further: an xor with, and an addition of, constants.
    const u32 l = lane_index();
    const u32 bytes = 2 * (l % 4) * sizeof(T);
    u8* const lane = reinterpret_cast<u8*>(tile.data) +
                     Tile::byte_offset(first_row + l / 4, first_col / Tile::kChunkElements + bytes / 16) + bytes % 16;
    const u32 swizzled = static_cast<u32>(lane - reinterpret_cast<u8*>(tile.data)) & (Tile::kSwizzleMask * 16);
#pragma unroll
    for (u32 n = 0; n < kN; ++n) {
        constexpr u32 kChunksPerTile = 8 / Tile::kChunkElements;
        const u32 chunk = (2 * kSpread * (n / 2) + n % 2) * kChunksPerTile;
        u8* const column =
            lane + (swizzled ^ (chunk & Tile::kSwizzleMask) * 16) - swizzled + (chunk & ~Tile::kSwizzleMask) * 16;
#pragma unroll
        for (u32 m = 0; m < kM; ++m)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                u8* const target = column + (16 * m + 8 * half) * Tile::kRowBytes;
                const float x0 = D.x[m][n][2 * half], x1 = D.x[m][n][2 * half + 1];
                if constexpr (sizeof(T) == 2)
                    *reinterpret_cast<u32*>(target) = pack<T>(x0, x1);
                else
                    *reinterpret_cast<uint2*>(target) = uint2{float_to_bits(x0), float_to_bits(x1)};
            }
    }
}

/// The same where columns alternate: of a group of 16 a lane has four neighbours.
template <typename Tile, u32 kM, u32 kN, u32 kSpread>
DEVICE void store_accumulator(Tile& tile, const Accumulator<kM, kN, kSpread, true>& D, u32 first_row, u32 first_col) {
    const u32 l = lane_index();
    const u32 lane = Tile::byte_offset(first_row + l / 4, first_col / 4 + l % 4);
#pragma unroll
    for (u32 n = 0; n < kN; n += 2) {
        const u32 chunk = 2 * kSpread * n;
        u8* const column = reinterpret_cast<u8*>(tile.data) + (lane ^ (chunk & Tile::kSwizzleMask) * 16) +
                           (chunk & ~Tile::kSwizzleMask) * 16;
#pragma unroll
        for (u32 m = 0; m < kM; ++m)
#pragma unroll
            for (u32 e = 0; e < 4; e += 2)
                *reinterpret_cast<uint4*>(column + (16 * m + 4 * e) * Tile::kRowBytes) =
                    uint4{float_to_bits(D.x[m][n][e]), float_to_bits(D.x[m][n + 1][e]), float_to_bits(D.x[m][n][e + 1]),
                          float_to_bits(D.x[m][n + 1][e + 1])};
    }
}
