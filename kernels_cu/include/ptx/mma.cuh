// mma.sync: D (16 x 8, float32) += A (16 x K, row-major) B (K x 8, column-major), one warp. K = 16 for 16-bit elements,
// 8 for TF32. With g = lane / 4 and t = lane % 4 a lane holds
//   16-bit  A: a[0] = (g, 2t..2t+1), a[1] = (g+8, same), a[2] = (g, 2t+8..), a[3] = (g+8, 2t+8..);  B: b0 = (2t..2t+1, g), b1 = (2t+8.., g)
//   TF32    A: a[0] = (g, t), a[1] = (g+8, t), a[2] = (g, t+4), a[3] = (g+8, t+4);                  B: b0 = (t, g), b1 = (t+4, g)
//   both    D: d[0], d[1] = (g, 2t), (g, 2t+1);  d[2], d[3] = (g+8, 2t), (g+8, 2t+1)
// PTX ISA: mma.m16n8k16, mma.m16n8k8.
#pragma once
#include "platform/types.cuh"

template <typename T>
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
DEVICE void mma<Float16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if CF_ARCH >= 80
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    // sm_75 has m16n8k8 only; its fragments are the two halves of the m16n8k16 ones.
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

template <>
DEVICE void mma<BFloat16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// float operands are TF32 bits (see to_tf32); K = 8.
template <>
DEVICE void mma<float>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
