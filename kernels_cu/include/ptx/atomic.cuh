// Counters in global memory.
#pragma once
#include "platform/types.cuh"

/// *counter += x in one step; the value before.
DEVICE u32 atomic_add(u32* counter, u32 x) { return atomicAdd(counter, x); }

/// *counter += x; whoever sees the sum in `spin_until` sees what this thread did before.
DEVICE void release_add(u32* counter, u32 x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

/// Waits until other threads have brought *counter to where `enough` is true of it.
template <typename Condition>
DEVICE void spin_until(const u32* counter, Condition enough) {
    u32 x;
    do
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
    while (!enough(x));
}
