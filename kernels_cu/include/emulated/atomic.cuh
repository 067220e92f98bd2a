// Counters in global memory.
#pragma once
#include "platform/block.cuh"
#include "platform/types.cuh"

/// *counter += x in one step; the value before. Who comes first to a counter need not stay first.
DEVICE u32 atomic_add(u32* counter, u32 x) {
    const u32 before = __atomic_fetch_add(counter, x, __ATOMIC_RELAXED);
    emulated::lag();
    return before;
}

/// *counter += x; whoever sees the sum in `spin_until` sees what this thread did before.
DEVICE void release_add(u32* counter, u32 x) { __atomic_fetch_add(counter, x, __ATOMIC_RELEASE); }

/// Waits until other threads have brought *counter to where `enough` is true of it. They may belong to other blocks, which
/// run at the same time or, if they come later, not at all.
template <typename Condition>
DEVICE void spin_until(const u32* counter, Condition enough) {
    constexpr u32 kPatience = 1 << 22;
    for (u32 n = 0; !enough(__atomic_load_n(counter, __ATOMIC_ACQUIRE)); ++n) {
        if (n == kPatience)
            emulated::fail("spin_until: a counter in global memory stays at %u",
                           __atomic_load_n(counter, __ATOMIC_RELAXED));
        emulated::poll();
    }
}
