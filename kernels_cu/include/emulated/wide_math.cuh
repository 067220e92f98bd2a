// Elementary functions in full precision, for float32 and float64 alike.
#pragma once
#include "platform/types.cuh"

DEVICE float exponential(float x) { return __builtin_expf(x); }
DEVICE double exponential(double x) { return __builtin_exp(x); }
DEVICE float logarithm(float x) { return __builtin_logf(x); }
DEVICE double logarithm(double x) { return __builtin_log(x); }
DEVICE float hyperbolic_tangent(float x) { return __builtin_tanhf(x); }
DEVICE double hyperbolic_tangent(double x) { return __builtin_tanh(x); }
/// The larger; a NaN gives way to the other.
DEVICE float greater(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE double greater(double a, double b) { return __builtin_fmax(a, b); }
