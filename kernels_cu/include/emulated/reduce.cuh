// Reductions into global memory whose old value nobody needs. Contracts of the functions: ptx/reduce.cuh.
#pragma once
#include "platform/trace.cuh"
#include "platform/types.cuh"

namespace emulated {

/// Blocks may run on several host threads, hence a real atomic.
inline void atomic_add(float* target, float x) {
    u32* bits = reinterpret_cast<u32*>(target);
    u32 seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &seen, float_to_bits(bits_to_float(seen) + x), true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
}

}  // namespace emulated

DEVICE void reduce_add4(float* target, float x0, float x1, float x2, float x3) {
    emulated::trace("reduce", 16);
    if (reinterpret_cast<u64>(target) % 16 != 0)
        emulated::fail("reduce_add4: target %p is not aligned to 16 bytes", static_cast<void*>(target));
    emulated::atomic_add(target, x0);
    emulated::atomic_add(target + 1, x1);
    emulated::atomic_add(target + 2, x2);
    emulated::atomic_add(target + 3, x3);
}

DEVICE void reduce_add2(float* target, float x0, float x1) {
    emulated::trace("reduce", 8);
    if (reinterpret_cast<u64>(target) % 8 != 0)
        emulated::fail("reduce_add2: target %p is not aligned to 8 bytes", static_cast<void*>(target));
    emulated::atomic_add(target, x0);
    emulated::atomic_add(target + 1, x1);
}

DEVICE void reduce_add(float* target, float x) {
    emulated::trace("reduce", 4);
    emulated::atomic_add(target, x);
}
