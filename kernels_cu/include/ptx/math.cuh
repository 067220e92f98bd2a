// Elementary functions in the form the hardware has them. ln 2 and log2 e convert between the two bases.
#pragma once
#include "platform/types.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// 2^x, ex2.approx.ftz: maximal relative error 2^-22; 2^-inf = 0, NaN stays NaN.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// log2 x, lg2.approx.ftz: absolute error 2^-22 near 1, relative elsewhere.
DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// a * b rounded to float32, never fused into a following addition.
DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
DEVICE float absolute(float x) { return fabsf(x); }
DEVICE float tanh_accurate(float x) { return tanhf(x); }
DEVICE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
DEVICE i32 larger(i32 a, i32 b) { return a > b ? a : b; }
