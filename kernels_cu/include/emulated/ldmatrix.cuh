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

/// Where in shared memory the element lies that is the lower or upper `half` of lane l's n-th register.
inline u8* element(void* const* lane, u32 l, u32 n, u32 half, bool transposed) {
    const u32 i = l / 4, j = 2 * (l % 4) + half;
    return static_cast<MatrixOperands*>(lane[8 * n + (transposed ? j : i)])->row + 2 * (transposed ? i : j);
}

template <bool kTransposed>
void ldmatrix_x4(void* const* lane) {
    for (u32 l = 0; l < kLanes; ++l)
        for (u32 n = 0; n < 4; ++n) {
            u16 halves[2];
            for (u32 half = 0; half < 2; ++half)
                __builtin_memcpy(&halves[half], element(lane, l, n, half, kTransposed), 2);
            static_cast<MatrixOperands*>(lane[l])->loaded[n] = halves[0] | u32{halves[1]} << 16;
        }
}

}  // namespace emulated

DEVICE void ldmatrix_x4(u32 (&r)[4], SharedAddress row) {
    emulated::MatrixOperands operands = {emulated::shared_pointer(row, 16, "ldmatrix_x4"), r, nullptr};
    emulated::meet_warp("ldmatrix_x4", &operands, emulated::ldmatrix_x4<false>);
}

DEVICE void ldmatrix_x4_transposed(u32 (&r)[4], SharedAddress row) {
    emulated::MatrixOperands operands = {emulated::shared_pointer(row, 16, "ldmatrix_x4_transposed"), r, nullptr};
    emulated::meet_warp("ldmatrix_x4_transposed", &operands, emulated::ldmatrix_x4<true>);
}
