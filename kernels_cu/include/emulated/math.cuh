// Elementary functions with the contracts of ptx/math.cuh. The host's are more accurate than the promised bounds.
#pragma once
#include "platform/trace.cuh"
#include "platform/types.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

namespace emulated {

/// ".ftz": a subnormal becomes zero of the same sign.
inline float flush_subnormal(float x) {
    return (float_to_bits(x) & 0x7f800000u) == 0 ? __builtin_copysignf(0.0f, x) : x;
}

}  // namespace emulated

/// 2^x, ex2.approx.ftz: maximal relative error 2^-22; 2^-inf = 0, NaN stays NaN.
DEVICE float exp2_approx(float x) {
    emulated::trace("exp2");
    return emulated::flush_subnormal(__builtin_exp2f(emulated::flush_subnormal(x)));
}
/// log2 x, lg2.approx.ftz: absolute error 2^-22 near 1, relative elsewhere.
DEVICE float log2_approx(float x) { return __builtin_log2f(emulated::flush_subnormal(x)); }

/// a * b rounded to float32, never fused into a following addition (the library is built with -ffp-contract=off).
DEVICE float multiply_rounded(float a, float b) { return a * b; }
DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float absolute(float x) { return __builtin_fabsf(x); }
DEVICE float tanh_accurate(float x) { return __builtin_tanhf(x); }
DEVICE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
DEVICE i32 larger(i32 a, i32 b) { return a > b ? a : b; }
