// stmatrix: the way back of ldmatrix. Contracts of the functions: ptx/stmatrix.cuh.
#pragma once
#include "platform/ldmatrix.cuh"

namespace emulated {

template <bool kTransposed>
void stmatrix_x4(void* const* lane) {
    u16 matrix[4][8][8];
    for (u32 l = 0; l < kLanes; ++l)
        for (u32 n = 0; n < 8; ++n)
            element(matrix[n / 2], l, n % 2, kTransposed) =
                static_cast<u16>(static_cast<MatrixOperands*>(lane[l])->stored[n / 2] >> 16 * (n % 2));
    for (u32 l = 0; l < kLanes; ++l)
        __builtin_memcpy(static_cast<MatrixOperands*>(lane[l])->row, matrix[l / 8][l % 8], 16);
}

}  // namespace emulated

DEVICE void stmatrix_x4(SharedAddress row, const u32 (&r)[4]) {
    emulated::MatrixOperands operands = {emulated::own_pointer(row, 16, "stmatrix_x4"), nullptr, r};
    emulated::meet_warp("stmatrix_x4", &operands, emulated::stmatrix_x4<false>);
}

DEVICE void stmatrix_x4_transposed(SharedAddress row, const u32* r) {
    emulated::MatrixOperands operands = {emulated::own_pointer(row, 16, "stmatrix_x4_transposed"), nullptr, r};
    emulated::meet_warp("stmatrix_x4_transposed", &operands, emulated::stmatrix_x4<true>);
}
