// float32 from and to the element types, round to nearest even as the hardware does it.
#pragma once
#include "platform/types.cuh"

DEVICE float to_float(float x) { return x; }

DEVICE float to_float(Float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

DEVICE float to_float(BFloat16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

template <typename T>
DEVICE T from_float(float x);

template <>
DEVICE float from_float<float>(float x) {
    return x;
}

template <>
DEVICE Float16 from_float<Float16>(float x) {
    Float16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

/// Two floats as two elements in one register, `low` in the lower half (the lower column of a fragment).
template <typename T>
DEVICE u32 pack(float low, float high);

template <>
DEVICE u32 pack<Float16>(float low, float high) {
    u32 y;
#if CF_ARCH >= 80
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    y = from_float<Float16>(low).bits | static_cast<u32>(from_float<Float16>(high).bits) << 16;
#endif
    return y;
}

template <>
DEVICE u32 pack<BFloat16>(float low, float high) {
    u32 y;
#if CF_ARCH >= 80
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    // No bf16 conversion below sm_80. Adding half an ulp, and the last kept bit for ties, rounds to nearest even;
    // NaN keeps its sign and becomes quiet.
    const u32 bits[2] = {__float_as_uint(low), __float_as_uint(high)};
    u32 half[2];
    for (u32 n = 0; n < 2; ++n)
        half[n] = (bits[n] & 0x7fffffffu) > 0x7f800000u ? (bits[n] >> 16 | 0x40u)
                                                        : (bits[n] + 0x7fffu + (bits[n] >> 16 & 1u)) >> 16;
    y = half[0] | half[1] << 16;
#endif
    return y;
}

template <>
DEVICE BFloat16 from_float<BFloat16>(float x) {
    return BFloat16{static_cast<u16>(pack<BFloat16>(x, 0.0f) & 0xffffu)};
}

/// float32 rounded to TF32 (10 mantissa bits), as the tensor core wants its operand: to nearest, ties to even from sm_90 on,
/// where that is one instruction; before, away from zero.
DEVICE u32 to_tf32(float x) {
    u32 y;
#if CF_ARCH >= 90
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#endif
    return y;
}

/// mark, which starts as 0, and something else once a number of a pair of Float16 was not finite: its product with 0 is NaN.
DEVICE u32 mark_nonfinite(u32 mark, u32 pair) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(mark) : "r"(pair), "r"(0));
    return mark;
}
