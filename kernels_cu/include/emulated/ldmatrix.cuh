// ldmatrix: four 8x8 matrices of 16-bit elements, 8 rows of 16 bytes each, from shared memory to one warp's registers.
// Contracts of the functions: ptx/ldmatrix.cuh.
#pragma once
#include "platform/block.cuh"
#include "platform/types.cuh"

namespace emulated {

/// Of a lane, of either direction.
struct MatrixOperands {
    u8* row;  // l % 8 of matrix l / 8
    u32* loaded;
    const u32* stored;
};

/// The element that is the lower or upper `half` of lane l's register.
inline u16& element(u16 (&matrix)[8][8], u32 l, u32 half, bool transposed) {
    const u32 i = l / 4, j = 2 * (l % 4) + half;
    return transposed ? matrix[j][i] : matrix[i][j];
}

template <bool kTransposed>
void ldmatrix_x4(void* const* lane) {
    u16 matrix[4][8][8];
    for (u32 l = 0; l < kLanes; ++l)
        __builtin_memcpy(matrix[l / 8][l % 8], static_cast<MatrixOperands*>(lane[l])->row, 16);
    for (u32 l = 0; l < kLanes; ++l)
        for (u32 n = 0; n < 4; ++n)
            static_cast<MatrixOperands*>(lane[l])->loaded[n] =
                element(matrix[n], l, 0, kTransposed) | u32{element(matrix[n], l, 1, kTransposed)} << 16;
}

}  // namespace emulated

DEVICE void ldmatrix_x4(u32 (&r)[4], SharedAddress row) {
    emulated::MatrixOperands operands = {emulated::own_pointer(row, 16, "ldmatrix_x4"), r, nullptr};
    emulated::meet_warp("ldmatrix_x4", &operands, emulated::ldmatrix_x4<false>);
}

DEVICE void ldmatrix_x4_transposed(u32 (&r)[4], SharedAddress row) {
    emulated::MatrixOperands operands = {emulated::own_pointer(row, 16, "ldmatrix_x4_transposed"), r, nullptr};
    emulated::meet_warp("ldmatrix_x4_transposed", &operands, emulated::ldmatrix_x4<true>);
}
