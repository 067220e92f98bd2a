// Counters in global memory.
#pragma once
#include "platform/types.cuh"

/// *counter += x in one step; the value before.
DEVICE u32 atomic_add(u32* counter, u32 x) { return __atomic_fetch_add(counter, x, __ATOMIC_RELAXED); }
