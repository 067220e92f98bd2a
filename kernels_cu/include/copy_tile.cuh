// Tiles between global and shared memory, by all threads of a block.
#pragma once
#include "platform/cp_async.cuh"
#include "platform/thread.cuh"
#include "shared_tile.cuh"
#include "traits.cuh"

/// Calls body(row, col) for this thread's share of the kVectorBytes-wide pieces of a tile; pieces of a row go to
/// neighbouring threads, so that global accesses coalesce.
template <typename Tile, typename Body>
DEVICE void for_each_piece(Body body) {
    constexpr u32 kPieceElements = kVectorBytes / sizeof(typename Tile::Element);
    constexpr u32 kPiecesPerRow = Tile::kCols / kPieceElements;
    constexpr u32 kPieces = Tile::kRows * kPiecesPerRow;
    const u32 first = opaque(thread_index());
    if constexpr (kPieces % kThreads == 0 && kThreads % kPiecesPerRow == 0) {
        // Every thread keeps its column and walks down the rows.
        const u32 row = first / kPiecesPerRow, col = first % kPiecesPerRow * kPieceElements;
#pragma unroll
        for (u32 n = 0; n < kPieces / kThreads; ++n)
            body(row + n * (kThreads / kPiecesPerRow), col);
    } else {
        constexpr u32 kUnroll = kPieces / kThreads > 16 ? 4 : 16;
#pragma unroll kUnroll
        for (u32 piece = first; piece < kPieces; piece += kThreads)
            body(piece / kPiecesPerRow, piece % kPiecesPerRow * kPieceElements);
    }
}

/// Starts copying rows first_row .. of a matrix with kColsUsed columns into the tile; rows at or beyond row_end, and the
/// tile's columns beyond kColsUsed, become zero. `global` is the matrix's row 0; strides in elements, any sign.
template <u32 kColsUsed, typename Tile>
DEVICE void load_tile(Tile& tile, const typename Tile::Element* global, i64 row_stride, i32 first_row, i32 row_end) {
    const auto* base = global + first_row * row_stride;
    const i32 rows_left = row_end - first_row;
    for_each_piece<Tile>([&](u32 row, u32 col) {
        const bool valid = static_cast<i32>(row) < rows_left && (kColsUsed == Tile::kCols || col < kColsUsed);
        copy_async<kVectorBytes>(tile.pointer(row, col), valid ? base + row * row_stride + col : global, valid);
    });
}

/// Writes the tile's rows below row_end and its first kColsUsed columns to the matrix.
template <u32 kColsUsed, typename Tile>
DEVICE void store_tile(const Tile& tile, typename Tile::Element* global, i64 row_stride, i32 first_row, i32 row_end) {
    using Piece = typename Word<kVectorBytes>::type;
    auto* base = global + first_row * row_stride;
    const i32 rows_left = row_end - first_row;
    for_each_piece<Tile>([&](u32 row, u32 col) {
        if (static_cast<i32>(row) < rows_left && (kColsUsed == Tile::kCols || col < kColsUsed))
            *reinterpret_cast<Piece*>(base + row * row_stride + col) =
                *reinterpret_cast<const Piece*>(tile.pointer(row, col));
    });
}
