// Elementary functions in full precision, for float32 and float64 alike: where memory is the limit they cost nothing.
#pragma once
#include "platform/types.cuh"

DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }
DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
DEVICE double hyperbolic_tangent(double x) { return tanh(x); }
/// The larger; a NaN gives way to the other.
DEVICE float greater(float a, float b) { return fmaxf(a, b); }
DEVICE double greater(double a, double b) { return fmax(a, b); }
