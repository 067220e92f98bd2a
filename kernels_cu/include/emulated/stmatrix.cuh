// stmatrix: the way back of ldmatrix. Contracts of the functions: ptx/stmatrix.cuh.
#pragma once
#include "platform/ldmatrix.cuh"

DEVICE void stmatrix_x4_transposed(SharedAddress row, const u32* r) {
    using namespace emulated;
    MatrixOperands operands = {shared_pointer(row, 16, "stmatrix_x4_transposed"), nullptr, r};
    meet_warp("stmatrix_x4_transposed", &operands, [](void* const* lane) {
        u16 matrix[4][8][8];
        for (u32 l = 0; l < kLanes; ++l)
            for (u32 n = 0; n < 8; ++n)
                element(matrix[n / 2], l, n % 2, true) =
                    static_cast<u16>(static_cast<MatrixOperands*>(lane[l])->stored[n / 2] >> 16 * (n % 2));
        for (u32 l = 0; l < kLanes; ++l)
            __builtin_memcpy(static_cast<MatrixOperands*>(lane[l])->row, matrix[l / 8][l % 8], 16);
    });
}
