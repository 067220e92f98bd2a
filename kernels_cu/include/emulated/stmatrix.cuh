// stmatrix: the way back of ldmatrix. Contracts of the functions: ptx/stmatrix.cuh.
#pragma once
#include "platform/block.cuh"
#include "platform/ldmatrix.cuh"
#include "platform/types.cuh"

DEVICE void stmatrix_x4_transposed(SharedAddress row, const u32* r) {
    using namespace emulated;
    MatrixOperands operands = {shared_pointer(row, 16, "stmatrix_x4_transposed"), nullptr, r};
    meet_warp("stmatrix_x4_transposed", &operands, [](void* const* lane) {
        for (u32 l = 0; l < kLanes; ++l)
            for (u32 n = 0; n < 4; ++n)
                for (u32 half = 0; half < 2; ++half) {
                    const u16 bits = static_cast<u16>(static_cast<MatrixOperands*>(lane[l])->stored[n] >> 16 * half);
                    __builtin_memcpy(element(lane, l, n, half, true), &bits, 2);
                }
    });
}
