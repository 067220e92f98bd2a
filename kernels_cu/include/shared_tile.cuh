// A matrix tile in shared memory whose rows can be read eight at a time without bank conflicts.
#pragma once
#include "platform/types.cuh"

/// kRows x kCols elements, row-major, 16-byte chunks of a row permuted by the row index (the swizzle): ldmatrix reads the
/// same chunk column of eight neighbouring rows, and these must lie in different banks (128 bytes). Rows of a multiple of
/// 128 bytes all start in bank 0, so three row bits are mixed in; rows of 64 (mod 128) bytes start in two places and need
/// two bits; rows of 32 (mod 64) bytes need one.
template <typename T, u32 kRows_, u32 kCols_>
struct alignas(128) SharedTile {
    using Element = T;
    static constexpr u32 kRows = kRows_;
    static constexpr u32 kCols = kCols_;
    static constexpr u32 kChunkElements = 16 / sizeof(T);
    static constexpr u32 kRowBytes = kCols * sizeof(T);
    static_assert(kRowBytes % 32 == 0, "a k-step of the tensor core is two chunks");
    static constexpr u32 kSwizzleMask = kRowBytes % 128 == 0 ? 7 : kRowBytes % 64 == 0 ? 3 : 1;
    static constexpr u32 kSwizzleShift = kRowBytes % 128 == 0 ? 0 : kRowBytes % 64 == 0 ? 1 : 2;

    T data[kRows * kCols];

    DEVICE static constexpr u32 byte_offset(u32 row, u32 chunk) {
        return row * kRowBytes + (chunk ^ (row >> kSwizzleShift & kSwizzleMask)) * 16;
    }

    DEVICE T* pointer(u32 row, u32 col) {
        return data + byte_offset(row, col / kChunkElements) / sizeof(T) + col % kChunkElements;
    }
    DEVICE const T* pointer(u32 row, u32 col) const { return const_cast<SharedTile*>(this)->pointer(row, col); }
    DEVICE T& at(u32 row, u32 col) { return *pointer(row, col); }
    DEVICE const T& at(u32 row, u32 col) const { return *pointer(row, col); }
};
