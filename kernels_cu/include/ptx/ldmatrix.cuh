// ldmatrix: four 8x8 matrices of 16-bit elements (8 rows of 16 bytes each) from shared memory to one warp's registers.
// Lane l passes the address of row l % 8 of matrix l / 8, in a cluster by own_address; afterwards it holds, of each
// matrix, the two neighbouring elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1). PTX ISA: ldmatrix.
#pragma once
#include "platform/types.cuh"

DEVICE void ldmatrix_x4(u32 (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

/// The same with every matrix transposed on the way: lane l holds elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
DEVICE void ldmatrix_x4_transposed(u32 (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
