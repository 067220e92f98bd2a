// A matrix tile in shared memory as plain threads read it: four neighbouring elements of a row at a time, always at a
// constant distance from where the thread began, so that the address costs no instruction.
#pragma once
#include "platform/types.cuh"

/// What the lanes of a half-warp read together, all at the same column (kTwoRows, kEightRows) or all in the same row.
enum class ReadBy {
    kOneRow,  // rows lie one after the other
    kTwoRows,  // an even and an odd row: odd rows have neighbouring 16-byte chunks exchanged, and are found in other banks
    kEightRows  // neighbouring rows: each row is 16 bytes longer, so that eight of them start in eight different places
};

template <typename T, u32 kRows_, u32 kCols_, ReadBy kReadBy>
struct alignas(16) RowTile {
    using Element = T;
    static constexpr u32 kRows = kRows_;
    static constexpr u32 kCols = kCols_;
    static constexpr u32 kChunkElements = 16 / sizeof(T);
    static constexpr u32 kStride = kCols + (kReadBy == ReadBy::kEightRows ? kChunkElements : 0);
    static_assert(kReadBy != ReadBy::kTwoRows || kCols % (2 * kChunkElements) == 0, "chunks are exchanged in pairs");

    T data[kRows * kStride];

    DEVICE T* pointer(u32 row, u32 col) {
        return data + row * kStride + (kReadBy == ReadBy::kTwoRows ? col ^ row % 2 * kChunkElements : col);
    }
    DEVICE const T* pointer(u32 row, u32 col) const { return const_cast<RowTile*>(this)->pointer(row, col); }
    DEVICE T& at(u32 row, u32 col) { return *pointer(row, col); }
};
