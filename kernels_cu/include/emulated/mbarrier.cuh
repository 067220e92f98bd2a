// mbarrier: a barrier in shared memory that counts arrivals of threads and bytes of asynchronous copies: ptx/mbarrier.cuh.
// Stricter than the hardware: bytes have to be announced before they come, unless blocks of a cluster load for each other,
// and a barrier that nobody initialised, or that something was written over, is an error.
#pragma once
#include "platform/block.cuh"
#include "platform/types.cuh"

/// The whole state, as on the GPU, is in these eight bytes.
struct alignas(8) Barrier {
    u32 mark : 10;  // kMark once initialised; poison and zeros are not
    u32 phase : 11;
    u32 arrivals : 11;  // that complete a phase
    u32 arrivals_due : 11;
    i32 bytes_due : 21;
};
static_assert(sizeof(Barrier) == 8);

namespace emulated {

constexpr u32 kMark = 0x2b5;
constexpr u32 kMaxBytesDue = (1 << 20) - 1;

inline u32 offset(const Barrier& barrier) { return shared_address(&barrier) - kSharedBase; }

inline Barrier& barrier_at(SharedAddress address, const char* who) {
    return *reinterpret_cast<Barrier*>(shared_pointer(address, 8, who));
}

inline Barrier& checked(Barrier& barrier, const char* who) {
    if (barrier_at(shared_address(&barrier), who).mark != kMark)
        fail("%s: there is no initialised barrier at shared offset %u", who, offset(barrier));
    return barrier;
}

inline void begin_next_phase_if_complete(Barrier& barrier) {
    if (barrier.arrivals_due != 0 || barrier.bytes_due != 0)
        return;
    ++barrier.phase;
    barrier.arrivals_due = barrier.arrivals;
    wake(&barrier);
}

/// An asynchronous copy has brought `bytes` bytes.
inline void complete_bytes(Barrier& barrier, u32 bytes, const char* who) {
    const bool early = cluster_blocks() > 1 && checked(barrier, who).arrivals_due != 0;
    if (!early && checked(barrier, who).bytes_due < i64{bytes})
        fail("%s: brings %u bytes to the barrier at shared offset %u, which expects %d", who, bytes, offset(barrier),
             barrier.bytes_due);
    barrier.bytes_due -= bytes;
    begin_next_phase_if_complete(barrier);
}

inline void count_arrival(Barrier& barrier, u32 bytes, const char* who) {
    trace("arrive", bytes, reinterpret_cast<u64>(&barrier));
    if (checked(barrier, who).arrivals_due == 0)
        fail("%s: all %u arrivals of phase %u have come to the barrier at shared offset %u, only bytes are due", who,
             barrier.arrivals, barrier.phase, offset(barrier));
    if (barrier.bytes_due + i64{bytes} > kMaxBytesDue)
        fail("%s: %u bytes in one phase, more than a barrier can count", who, barrier.bytes_due + bytes);
    barrier.bytes_due += bytes;
    --barrier.arrivals_due;
    begin_next_phase_if_complete(barrier);
}

inline void arrive(Barrier& barrier, u32 bytes, const char* who) {
    count_arrival(barrier, bytes, who);
    give_way();
}

inline void describe_barrier(const void* object, u32 parity, char* text, u64 bytes) {
    const Barrier& barrier = *static_cast<const Barrier*>(object);
    __builtin_snprintf(
        text, bytes, "barrier_wait, parity %u, shared offset %u: phase %u lacks %u of %u arrivals and %d bytes", parity,
        offset(barrier), barrier.phase, barrier.arrivals_due, barrier.arrivals, barrier.bytes_due);
}

}  // namespace emulated

DEVICE void barrier_init(Barrier& barrier, u32 arrivals) {
    emulated::shared_pointer(shared_address(&barrier), 8, "barrier_init");
    if (arrivals == 0 || arrivals > 1024)
        emulated::fail("barrier_init: %u arrivals; a block has 1 to 1024 threads", arrivals);
    emulated::trace("barrier", arrivals, reinterpret_cast<u64>(&barrier));
    barrier = {emulated::kMark, 0, arrivals, arrivals, 0};
}

DEVICE void barrier_init_fence() { emulated::publish_shared(); }
DEVICE void barrier_arrive(Barrier& barrier) { emulated::arrive(barrier, 0, "barrier_arrive"); }

DEVICE void barrier_arrive_expect(Barrier& barrier, u32 bytes) {
    emulated::arrive(barrier, bytes, "barrier_arrive_expect");
}

DEVICE void barrier_wait(Barrier& barrier, u32 parity) {
    emulated::trace("wait", parity, reinterpret_cast<u64>(&barrier));
    if (parity > 1)
        emulated::fail("barrier_wait: parity is %u; it must be 0 or 1", parity);
    while (emulated::checked(barrier, "barrier_wait").phase % 2 == parity)
        emulated::wait_for(&barrier, parity, emulated::describe_barrier);
}
