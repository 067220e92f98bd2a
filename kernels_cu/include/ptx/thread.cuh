// Where a thread stands in its block and grid, and what it can say to its neighbours.
#pragma once
#include "platform/types.cuh"

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 lane_index() { return threadIdx.x % 32; }
/// Index of the warp in its block, known to the compiler to be the same for all its lanes.
DEVICE u32 warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
/// Read anew at every call: what is derived from it is then not kept in registers over a loop around the whole work.
DEVICE u32 block_index() {
    u32 x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

DEVICE u32 grid_size() { return gridDim.x; }
/// A value that all lanes of the warp have, in a form of which the compiler knows that: from sm_80 on a reduction's result is in
/// a uniform register, a shuffle's is not.
DEVICE u32 uniform(u32 value) {
#if CF_ARCH >= 80
    return __reduce_or_sync(0xffffffffu, value);
#else
    return __shfl_sync(0xffffffffu, value, 0);
#endif
}

/// Barrier over all threads of the block; shared and global writes before it are visible after it.
DEVICE void block_sync() { __syncthreads(); }
/// block_sync that also tells whether any thread passed true.
DEVICE bool block_any(bool predicate) { return __syncthreads_or(predicate); }
DEVICE void warp_sync() { __syncwarp(); }
DEVICE bool warp_any(bool predicate) { return __any_sync(0xffffffffu, predicate); }
/// The value of the lane whose index differs by `mask` (all 32 lanes take part).
DEVICE float shuffle_xor(float value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
/// The value of the lane with this index (all 32 lanes take part).
DEVICE float shuffle(float value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
