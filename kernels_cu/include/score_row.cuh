// One row of the score matrix in memory, and the threads that share it: a warp each, or a whole block.
#pragma once
#include "standard_params.cuh"
#include "platform/convert.cuh"
#include "platform/thread.cuh"
#include "platform/wide_math.cuh"
#include "standard_traits.cuh"

constexpr u32 kPieceElements = 16 / sizeof(Element);  // what a thread moves at a time

DEVICE double to_wide(double x) { return x; }
DEVICE float to_wide(float x) { return x; }
DEVICE float to_wide(Float16 x) { return to_float(x); }
DEVICE float to_wide(BFloat16 x) { return to_float(x); }

template <typename T>
DEVICE T from_wide(float x) {
    return from_float<T>(x);
}
template <typename T>
DEVICE T from_wide(double x) {
    return x;
}

/// 16 bytes of a row.
struct Piece {
    uint4 bits;
    DEVICE Wide get(u32 n) const { return to_wide(reinterpret_cast<const Element*>(&bits)[n]); }
    DEVICE void set(u32 n, Wide x) { reinterpret_cast<Element*>(&bits)[n] = from_wide<Element>(x); }
};

struct ScoreRow {
    i64 index;               // among the rows of all heads
    i64 at;                  // of its LSE and dLSE
    u32 lane;                // of this thread among those that share the row
    u32 pieces;              // that they share
    i32 first_key, end_key;  // the keys it sees

    template <typename Params>
    DEVICE explicit ScoreRow(const Params& params)
        : index(static_cast<i64>(block_index()) * (kThreads / kRowThreads) + thread_index() / kRowThreads),
          lane(thread_index() % kRowThreads),
          pieces((static_cast<u32>(params.seqlen_k) + kPieceElements - 1) / kPieceElements) {
        const i64 head = index / params.seqlen_q, query = index % params.seqlen_q;
        at = head * params.lse_head_stride + query;
        const i64 first = query + params.band_first, end = query + params.band_last + 1;
        first_key = first < 0 ? 0 : first < params.seqlen_k ? static_cast<i32>(first) : params.seqlen_k;
        end_key = end < 0 ? 0 : end < params.seqlen_k ? static_cast<i32>(end) : params.seqlen_k;
    }

    DEVICE i32 key(u32 piece) const { return static_cast<i32>(piece * kPieceElements); }
    DEVICE bool sees(i32 key) const { return first_key <= key && key < end_key; }
    DEVICE bool sees_some_of(u32 piece) const {
        return key(piece) < end_key && first_key < key(piece) + static_cast<i32>(kPieceElements);
    }
};

/// The pieces of a row that a thread has: in registers, or in memory if they are too many.
class OwnPieces {
  public:
    DEVICE OwnPieces(const ScoreRow& row, const Piece* memory) : row_(row), memory_(memory) {
#pragma unroll
        for (i32 n = 0; n < kPieces; ++n) {
            const u32 piece = row.lane + static_cast<u32>(n) * kRowThreads;
            if (piece < row.pieces && row.sees_some_of(piece))
                kept_[n] = memory[piece];
        }
    }

    /// visit(piece's number, piece) for each; a piece of which the row sees nothing has no meaningful content.
    template <typename Visit>
    DEVICE void each(Visit visit) const {
        if constexpr (kPieces > 0) {
#pragma unroll
            for (i32 n = 0; n < kPieces; ++n) {
                const u32 piece = row_.lane + static_cast<u32>(n) * kRowThreads;
                if (piece < row_.pieces)
                    visit(piece, kept_[n]);
            }
        } else {
            for (u32 piece = row_.lane; piece < row_.pieces; piece += kRowThreads)
                visit(piece, memory_[piece]);
        }
    }

    /// visit(score) for each that the row sees.
    template <typename Visit>
    DEVICE void each_visible(Visit visit) const {
        each([&](u32 piece, const Piece& content) {
            if (row_.sees_some_of(piece))
#pragma unroll
                for (u32 n = 0; n < kPieceElements; ++n)
                    if (row_.sees(row_.key(piece) + static_cast<i32>(n)))
                        visit(content.get(n));
        });
    }

  private:
    const ScoreRow& row_;
    const Piece* memory_;
    Piece kept_[kPieces > 0 ? kPieces : 1];
};

DEVICE float from_lane(float x, u32 mask) { return shuffle_xor(x, mask); }
DEVICE double from_lane(double x, u32 mask) {
    float halves[2];
    *reinterpret_cast<double*>(halves) = x;
    halves[0] = shuffle_xor(halves[0], mask);
    halves[1] = shuffle_xor(halves[1], mask);
    return *reinterpret_cast<double*>(halves);
}

/// `combine` over what all threads of a row have; all of them get the same. scratch: one value per warp of the block.
template <typename Combine>
DEVICE Wide over_row(Wide x, Wide* scratch, Combine combine) {
#pragma unroll
    for (u32 mask = 1; mask < 32; mask *= 2)
        x = combine(x, from_lane(x, mask));
    if constexpr (kRowThreads == kThreads && kThreads > 32) {
        block_sync();  // nobody reads what was combined before any more
        if (lane_index() == 0)
            scratch[thread_index() / 32] = x;
        block_sync();
        x = scratch[0];
        for (u32 warp = 1; warp < kThreads / 32; ++warp)
            x = combine(x, scratch[warp]);
    }
    return x;
}
