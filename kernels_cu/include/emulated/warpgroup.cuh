// Warpgroups: four warps in a row that share the register budget of a role and issue wgmma together; named barriers.
// Contracts of the functions: ptx/warpgroup.cuh.
#pragma once
#include "platform/block.cuh"
#include "platform/types.cuh"

namespace emulated {

constexpr u32 kRegistersPerBlock = 65536;

/// Registers per thread as launched: what ptxas gives a kernel that has the multiprocessor for itself.
inline u32 registers_at_launch() {
    const u32 most = kRegistersPerBlock / block_threads() & ~7u;
    return most < 256 ? most : 256;
}

inline void describe_registers(const void*, u32 wanted, char* text, u64 bytes) {
    __builtin_snprintf(text, bytes, "registers_acquire of %u per thread: the block has %u left", wanted,
                       block_state().registers_free);
}

/// The calling thread's share; all lanes of a warp do the same.
inline void set_registers(u32 wanted, bool release, const char* who) {
    meet_warp(who, nullptr, nullptr);
    BlockState& state = block_state();
    u32& own = state.registers[thread_index()];
    if (own == 0)
        own = registers_at_launch();
    if (release ? wanted > own : wanted < own)
        fail("%s: %u registers wanted, the thread has %u", who, wanted, own);
    while (state.registers_free + own < wanted)
        wait_for(&state.registers_free, wanted, describe_registers);
    state.registers_free += own - wanted;
    own = wanted;
    wake(&state.registers_free);
}

inline void describe_named(const void* object, u32 id, char* text, u64 bytes) {
    const NamedBarrier& barrier = *static_cast<const NamedBarrier*>(object);
    __builtin_snprintf(text, bytes, "named barrier %u: %u of %u threads are there", id, barrier.arrived,
                       barrier.threads);
}

/// True for the thread that completes the barrier.
inline bool arrive_named(u32 id, u32 threads, const char* who) {
    if (id < 1 || id > 15 || threads == 0 || threads % kLanes != 0 || threads > block_threads())
        fail("%s: barrier %u for %u threads; there are barriers 1 to 15, for whole warps of the block", who, id,
             threads);
    meet_warp(who, nullptr, nullptr);
    NamedBarrier& barrier = block_state().named[id];
    if (barrier.arrived != 0 && barrier.threads != threads)
        fail("%s: barrier %u for %u threads, while others use it for %u", who, id, threads, barrier.threads);
    barrier.threads = threads;
    if (++barrier.arrived < threads)
        return false;
    barrier.arrived = 0;
    wake(&barrier);
    return true;
}

}  // namespace emulated

DEVICE u32 warpgroup_index() {
    emulated::meet_warp("warpgroup_index", nullptr, nullptr);
    return emulated::thread_index() / emulated::kWarpgroup;
}

template <u32 kRegisters>
DEVICE void registers_release() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    emulated::set_registers(kRegisters, true, "registers_release");
}

template <u32 kRegisters>
DEVICE void registers_acquire() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    emulated::set_registers(kRegisters, false, "registers_acquire");
}

DEVICE void named_sync(u32 id, u32 threads) {
    emulated::trace("named sync", id, threads);
    if (!emulated::arrive_named(id, threads, "named_sync"))
        emulated::wait_for(&emulated::block_state().named[id], id, emulated::describe_named);
}

DEVICE void named_arrive(u32 id, u32 threads) {
    emulated::trace("named arrive", id, threads);
    emulated::arrive_named(id, threads, "named_arrive");
}
