// mbarrier: a barrier in shared memory that counts arrivals of threads and bytes of asynchronous copies. A phase is
// complete when all expected arrivals and all expected bytes have come; then the next one begins. PTX ISA: mbarrier.
// What a thread did before it arrives is seen by whoever waits for the phase.
#pragma once
#include "platform/types.cuh"

struct alignas(8) Barrier {
    u64 state;
};

/// One thread, before anybody else uses the barrier: `arrivals` complete a phase.
DEVICE void barrier_init(Barrier& barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(own_address(&barrier)), "r"(arrivals) : "memory");
}

/// After the last barrier_init, by the thread that did them: the copy engine sees them too.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(Barrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(own_address(&barrier)) : "memory");
}

/// Arrives, and announces that copies will bring `bytes` bytes in this phase.
DEVICE void barrier_arrive_expect(Barrier& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(own_address(&barrier)), "r"(bytes)
                 : "memory");
}

/// Waits for the end of the phase of this parity: the first phase has parity 0. On a fresh barrier a wait with parity 1
/// returns at once, as if an earlier phase were over.
DEVICE void barrier_wait(Barrier& barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        "@complete bra done;\n"
        "bra retry;\n"
        "done:\n"
        "}" ::"r"(own_address(&barrier)),
        "r"(parity)
        : "memory");
}
