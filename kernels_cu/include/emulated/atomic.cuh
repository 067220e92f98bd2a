// Counters in global memory. Contracts of the functions: ptx/atomic.cuh.
#pragma once
#include "platform/block.cuh"
#include "platform/types.cuh"

/// Who comes first to a counter need not stay first.
DEVICE u32 atomic_add(u32* counter, u32 x) {
    const u32 before = __atomic_fetch_add(counter, x, __ATOMIC_RELAXED);
    emulated::lag();
    return before;
}

/// Who is told may go on before who tells.
DEVICE void release_add(u32* counter, u32 x) {
    __atomic_fetch_add(counter, x, __ATOMIC_RELEASE);
    emulated::lag();
}

/// The others may belong to other blocks, which run at the same time or, if they come later, not at all.
template <typename Condition>
DEVICE void spin_until(const u32* counter, Condition enough) {
    for (u32 n = 0; !enough(__atomic_load_n(counter, __ATOMIC_ACQUIRE)); ++n) {
        if (n == emulated::patience())
            emulated::fail("spin_until: a counter in global memory stays at %u",
                           __atomic_load_n(counter, __ATOMIC_RELAXED));
        emulated::poll();
    }
    emulated::acquire_global();
}
