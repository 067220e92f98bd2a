// Reductions into global memory whose old value nobody needs. PTX ISA: red.
#pragma once
#include "platform/types.cuh"

// Of vectors since sm_90 and PTX ISA 8.1, which is CUDA 12.1's.
#define CF_REDUCES_VECTORS (CF_ARCH >= 90 && (__CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MINOR__ >= 1))

/// target[0..3] += x[0..3], each addition atomic; target 16-byte aligned.
DEVICE void reduce_add4(float* target, float x0, float x1, float x2, float x3) {
#if CF_REDUCES_VECTORS
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x0), "f"(x1), "f"(x2), "f"(x3)
                 : "memory");
#else
    atomicAdd(target, x0);
    atomicAdd(target + 1, x1);
    atomicAdd(target + 2, x2);
    atomicAdd(target + 3, x3);
#endif
}

/// target[0..1] += x[0..1], likewise; target 8-byte aligned.
DEVICE void reduce_add2(float* target, float x0, float x1) {
#if CF_REDUCES_VECTORS
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(x0), "f"(x1) : "memory");
#else
    atomicAdd(target, x0);
    atomicAdd(target + 1, x1);
#endif
}

/// *target += x, likewise.
DEVICE void reduce_add(float* target, float x) { atomicAdd(target, x); }
