// Reductions into global memory whose old value nobody needs. Contracts of the functions: ptx/reduce.cuh.
#pragma once
#include "platform/types.cuh"

/// Blocks may run on several host threads, hence a real atomic.
DEVICE void reduce_add(float* target, float x) {
    u32* bits = reinterpret_cast<u32*>(target);
    u32 seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &seen, float_to_bits(bits_to_float(seen) + x), true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
}

DEVICE void reduce_add2(float* target, float x0, float x1) {
    if (reinterpret_cast<u64>(target) % 8 != 0)
        emulated::fail("reduce_add2: target %p is not aligned to 8 bytes", static_cast<void*>(target));
    reduce_add(target, x0);
    reduce_add(target + 1, x1);
}

DEVICE void reduce_add4(float* target, float x0, float x1, float x2, float x3) {
    if (reinterpret_cast<u64>(target) % 16 != 0)
        emulated::fail("reduce_add4: target %p is not aligned to 16 bytes", static_cast<void*>(target));
    reduce_add2(target, x0, x1);
    reduce_add2(target + 2, x2, x3);
}
