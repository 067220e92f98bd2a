// stmatrix: four 8x8 matrices of 16-bit elements from one warp's registers to shared memory, 8 rows of 16 bytes each.
#pragma once
#include "platform/block.cuh"
#include "platform/types.cuh"

namespace emulated {

struct StmatrixOperands {
    u8* row;
    const u32* r;
};

}  // namespace emulated

/// Lane l passes the address of row l % 8 of matrix l / 8. Of each matrix it holds two neighbours of a column, the elements
/// (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4): an accumulator's fragment is written transposed.
DEVICE void stmatrix_x4_transposed(SharedAddress row, const u32* r) {
    using namespace emulated;
    StmatrixOperands operands = {shared_pointer(row, 16, "stmatrix_x4_transposed"), r};
    meet_warp("stmatrix_x4_transposed", &operands, [](void* const* lane) {
        u16 matrix[4][8][8];
        for (u32 l = 0; l < kLanes; ++l)
            for (u32 n = 0; n < 4; ++n)
                for (u32 odd = 0; odd < 2; ++odd)
                    matrix[n][2 * (l % 4) + odd][l / 4] =
                        static_cast<u16>(static_cast<StmatrixOperands*>(lane[l])->r[n] >> 16 * odd);
        for (u32 l = 0; l < kLanes; ++l)
            __builtin_memcpy(static_cast<StmatrixOperands*>(lane[l])->row, matrix[l / 8][l % 8], 16);
    });
}
