// stmatrix: four 8x8 matrices of 16-bit elements from one warp's registers to shared memory, 8 rows of 16 bytes each.
// PTX ISA: stmatrix, sm_90 and up.
#pragma once
#include "platform/types.cuh"

/// Lane l passes the address of row l % 8 of matrix l / 8, in a cluster by own_address. Of each matrix it holds two
/// neighbours of a row, the elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1): an accumulator's fragment.
DEVICE void stmatrix_x4(SharedAddress row, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

/// The same with every matrix transposed on the way: it holds elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
DEVICE void stmatrix_x4_transposed(SharedAddress row, const u32* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
