// ldmatrix: four 8x8 matrices of 16-bit elements (8 rows of 16 bytes each) from shared memory to one warp's registers.
// Lane l passes the address of row l % 8 of matrix l / 8; afterwards it holds, of each matrix, the two neighbouring
// elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1).
#pragma once
#include "platform/block.cuh"
#include "platform/types.cuh"

namespace emulated {

struct LdmatrixOperands {
    u32* r;
    const u8* row;
};

template <bool kTransposed>
void ldmatrix_x4(void* const* lane) {
    u16 matrix[4][8][8];
    for (u32 l = 0; l < kLanes; ++l)
        __builtin_memcpy(matrix[l / 8][l % 8], static_cast<LdmatrixOperands*>(lane[l])->row, 16);
    for (u32 l = 0; l < kLanes; ++l) {
        const u32 i = l / 4, j = 2 * (l % 4);
        for (u32 n = 0; n < 4; ++n) {
            const u32 low = kTransposed ? matrix[n][j][i] : matrix[n][i][j];
            const u32 high = kTransposed ? matrix[n][j + 1][i] : matrix[n][i][j + 1];
            static_cast<LdmatrixOperands*>(lane[l])->r[n] = low | high << 16;
        }
    }
}

}  // namespace emulated

DEVICE void ldmatrix_x4(u32 (&r)[4], SharedAddress row) {
    emulated::LdmatrixOperands operands = {r, emulated::shared_pointer(row, 16, "ldmatrix_x4")};
    emulated::meet_warp("ldmatrix_x4", &operands, emulated::ldmatrix_x4<false>);
}

/// The same with every matrix transposed on the way: lane l holds elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
DEVICE void ldmatrix_x4_transposed(u32 (&r)[4], SharedAddress row) {
    emulated::LdmatrixOperands operands = {r, emulated::shared_pointer(row, 16, "ldmatrix_x4_transposed")};
    emulated::meet_warp("ldmatrix_x4_transposed", &operands, emulated::ldmatrix_x4<true>);
}
