// Tiles between global and shared memory, by all threads of a block.
#pragma once
#include "platform/convert.cuh"
#include "platform/cp_async.cuh"
#include "platform/math.cuh"
#include "platform/thread.cuh"
#include "shared_tile.cuh"
#include "traits.cuh"
#include "word.cuh"

/// Calls body(row, col, pointer) for this thread's share of the kVectorBytes-wide pieces of a tile, the pointer leading to
/// the piece in a matrix whose row 0 is at `global`. Pieces of a row go to neighbouring threads, so that accesses coalesce.
template <typename Tile, typename Pointer, typename Body>
DEVICE void for_each_piece(Pointer global, i64 row_stride, Body body) {
    constexpr u32 kPieceElements = kVectorBytes / sizeof(typename Tile::Element);
    constexpr u32 kPiecesPerRow = Tile::kCols / kPieceElements;
    constexpr u32 kPieces = Tile::kRows * kPiecesPerRow;
    const u32 first = opaque(thread_index());
    if constexpr (kVectorBytes == 16 && kPieces % kThreads == 0 && kThreads % kPiecesPerRow == 0) {
        // Every thread keeps its column and walks down the rows: one 64-bit addition per piece.
        constexpr u32 kRowStep = kThreads / kPiecesPerRow;
        const u32 row = first / kPiecesPerRow, col = first % kPiecesPerRow * kPieceElements;
        const i64 step = kRowStep * row_stride;
        Pointer piece = global + row * row_stride + col;
#pragma unroll
        for (u32 n = 0; n < kPieces / kThreads; ++n, piece += step)
            body(row + n * kRowStep, col, piece);
    } else {
        // Narrow pieces pass through registers (see copy_async): only a few at a time.
        constexpr u32 kUnroll = kVectorBytes < 16 || kPieces / kThreads > 16 ? 4 : 16;
#pragma unroll kUnroll
        for (u32 piece = first; piece < kPieces; piece += kThreads) {
            const u32 row = piece / kPiecesPerRow, col = piece % kPiecesPerRow * kPieceElements;
            body(row, col, global + row * row_stride + col);
        }
    }
}

/// Starts copying rows first_row .. of a matrix with kColsUsed columns into the tile; rows at or beyond row_end, and the
/// tile's columns beyond kColsUsed, become zero. `global` is the matrix's row 0; strides in elements, any sign.
template <u32 kColsUsed, typename Tile>
DEVICE void load_tile(Tile& tile, const typename Tile::Element* global, i64 row_stride, i32 first_row, i32 row_end) {
    using Pointer = const typename Tile::Element*;
    const Pointer first = global + first_row * row_stride;
    const i32 rows_left = row_end - first_row;
    for_each_piece<Tile>(first, row_stride, [&](u32 row, u32 col, Pointer piece) {
        const bool valid = static_cast<i32>(row) < rows_left && (kColsUsed == Tile::kCols || col < kColsUsed);
        copy_async<kVectorBytes>(tile.pointer(row, col), piece, valid);
    });
}

/// Writes the tile's rows below row_end and its first kColsUsed columns to the matrix.
template <u32 kColsUsed, typename Tile>
DEVICE void store_tile(const Tile& tile, typename Tile::Element* global, i64 row_stride, i32 first_row, i32 row_end) {
    using Piece = typename Word<kVectorBytes>::type;
    using Pointer = typename Tile::Element*;
    const i32 rows_left = row_end - first_row;
    for_each_piece<Tile>(global + first_row * row_stride, row_stride, [&](u32 row, u32 col, Pointer piece) {
        if (static_cast<i32>(row) < rows_left && (kColsUsed == Tile::kCols || col < kColsUsed))
            *reinterpret_cast<Piece*>(piece) = *reinterpret_cast<const Piece*>(tile.pointer(row, col));
    });
}

/// Takes what is finite in the matrix, where store_tile would write it, in place of the tile's elements.
template <u32 kColsUsed, typename Tile>
DEVICE void keep_finite(Tile& tile, const typename Tile::Element* global, i64 row_stride, i32 first_row, i32 row_end) {
    const u32 rows = static_cast<u32>(smaller(static_cast<i32>(Tile::kRows), row_end - first_row));
    for (u32 n = thread_index(); n < rows * kColsUsed; n += kThreads) {
        const u32 row = n / kColsUsed, col = n % kColsUsed;
        const typename Tile::Element x = global[(first_row + static_cast<i32>(row)) * row_stride + col];
        if (is_finite(to_float(x)))
            tile.at(row, col) = x;
    }
}
