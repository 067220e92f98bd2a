// Warpgroups: four warps in a row that share the register budget of a role and issue wgmma together.
// PTX ISA: setmaxnreg, barrier (named barriers 0 to 15; block_sync is number 0).
#pragma once
#include "platform/thread.cuh"
#include "platform/types.cuh"

/// Index of the warpgroup in its block, known to the compiler to be the same for all its threads.
DEVICE u32 warpgroup_index() { return uniform(threadIdx.x / 128); }

/// Gives registers back: all warps of the warpgroup; kRegisters per thread remain (a multiple of 8, 24 to 256).
template <u32 kRegisters>
DEVICE void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Waits for registers that other warpgroups gave back: kRegisters per thread.
template <u32 kRegisters>
DEVICE void registers_acquire() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Waits at barrier `id` (1 to 15) until `threads` threads, a multiple of 32, have arrived there.
DEVICE void named_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/// Arrives at barrier `id` without waiting.
DEVICE void named_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
