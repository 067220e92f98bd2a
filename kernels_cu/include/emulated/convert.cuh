// float32 from and to the element types, round to nearest even as the hardware does it. On bits, so that the results do
// not hang on the host's own half-precision support. Contracts of the functions: ptx/convert.cuh.
#pragma once
#include "platform/types.cuh"

DEVICE float to_float(float x) { return x; }

DEVICE float to_float(Float16 x) {
    const u32 magnitude = x.bits & 0x7fffu;
    const u32 sign = (x.bits & 0x8000u) << 16;
    // Exponent and mantissa in float32's places; 2^112 corrects the bias, exactly, for subnormals too.
    const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;
    const u32 special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN keep a full exponent
    return bits_to_float(float_to_bits(scaled) | special | sign);
}

DEVICE float to_float(BFloat16 x) { return bits_to_float(static_cast<u32>(x.bits) << 16); }

template <typename T>
DEVICE T from_float(float x);

template <>
DEVICE float from_float<float>(float x) {
    return x;
}

template <>
DEVICE Float16 from_float<Float16>(float x) {
    if (x != x)
        return Float16{0x7fff};  // the hardware's only NaN
    const u32 sign = float_to_bits(x) >> 16 & 0x8000u;
    const u32 magnitude = float_to_bits(x) & 0x7fffffffu;
    u32 bits;
    if (magnitude >= 0x477ff000u) {  // 65520, halfway from the largest number to 2^16, and above
        bits = 0x7c00u;
    } else if (magnitude <
               0x38800000u) {  // below 2^-14 the spacing is 2^-24; at 0.5 float32 spaces so, and rounds for us
        bits = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        // Half an ulp less one, plus the last kept bit: ties go to even. A carry moves the exponent, as it should.
        bits = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    }
    return Float16{static_cast<u16>(sign | bits)};
}

template <>
DEVICE BFloat16 from_float<BFloat16>(float x) {
    if (x != x)
        return BFloat16{0x7fff};
    const u32 bits = float_to_bits(x);
    return BFloat16{static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <typename T>
DEVICE u32 pack(float low, float high) {
    return from_float<T>(low).bits | static_cast<u32>(from_float<T>(high).bits) << 16;
}

/// Ties to even from sm_90 on, where that is one instruction; before, away from zero.
DEVICE u32 to_tf32(float x) {
    if (x != x)
        return 0x7fffffffu;
    const u32 bits = float_to_bits(x);
    constexpr u32 kHalf = CF_ARCH >= 90 ? 0xfffu : 0x1000u;
    const u32 odd = CF_ARCH >= 90 ? bits >> 13 & 1u : 0u;
    return (is_finite(x) ? bits + kHalf + odd : bits) & ~0x1fffu;
}

DEVICE u32 mark_nonfinite(u32 mark, u32 pair) {
    return mark | ((pair & 0x7c00u) == 0x7c00u) | ((pair & 0x7c000000u) == 0x7c000000u);
}
