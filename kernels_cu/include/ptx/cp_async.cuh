// cp.async: global to shared memory without passing registers, in groups that complete in order. PTX ISA: cp.async.
// On sm_75, which lacks it, a copy is done at once and waiting is free.
#pragma once
#include "platform/types.cuh"
#include "word.cuh"

/// Starts copying kBytes (2, 4, 8 or 16; both addresses so aligned) to shared memory; with valid = false nothing is read
/// and zeros are written.
template <u32 kBytes>
DEVICE void copy_async(void* shared, const void* global, bool valid) {
#if CF_ARCH >= 80
    if constexpr (kBytes == 16) {
        // .cg: past the L1, which is better used as shared memory.
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                     "l"(global), "r"(valid ? 16 : 0)
                     : "memory");
        return;
    } else if constexpr (kBytes >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global),
                     "n"(kBytes), "r"(valid ? kBytes : 0)
                     : "memory");
        return;
    }
#endif
    using W = typename Word<kBytes>::type;
    *static_cast<W*>(shared) = valid ? *static_cast<const W*>(global) : W{};
}

/// Closes the group of all copies this thread has started since the last commit.
DEVICE void copy_async_commit() {
#if CF_ARCH >= 80
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until at most kPending of this thread's groups are still under way. Other threads see the data after a barrier.
template <u32 kPending>
DEVICE void copy_async_wait() {
#if CF_ARCH >= 80
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
