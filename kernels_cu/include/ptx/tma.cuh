// The tensor memory accelerator: one thread copies a box of a tensor between global and shared memory, or adds to global
// memory, asynchronously. PTX ISA: cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk, tensormap.
// Coordinates count elements, the innermost dimension first; what lies outside the tensor is read as 0 and not written.
#pragma once
#include "platform/mbarrier.cuh"
#include "platform/types.cuh"

/// CUtensorMap: a tensor's address, sizes and strides, the box that a copy moves, and how the box lies in shared memory.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

/// Fetches the map ahead of its first use.
DEVICE void tensor_map_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Starts copying the box at (c0, c1, c2, c3) to shared memory (128-byte aligned; 1,024 with the 128-byte swizzle). The
/// bytes of the whole box, those outside the tensor included, count for the barrier.
DEVICE void tma_load(void* shared, const TensorMap& map, Barrier& barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
            "r"(own_address(shared)),
        "l"(&map), "r"(own_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

/// The same to the shared memory of blocks 0 to kBlocks - 1 of the cluster: in each of them to this place, and counted by
/// the barrier at this place.
template <u32 kBlocks>
DEVICE void tma_load_to_all(void* shared, const TensorMap& map, Barrier& barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(own_address(shared)),
        "l"(&map), "r"(own_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "h"(static_cast<u16>((1 << kBlocks) - 1))
        : "memory");
}

/// Starts copying a box from shared memory; part of the thread's current bulk group.
DEVICE void tma_store(const TensorMap& map, const void* shared, i32 c0, i32 c1, i32 c2, i32 c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

/// Starts adding `bytes` bytes of float32 (a multiple of 16, both addresses 16-byte aligned) to global memory, each
/// addition atomic; part of the thread's current bulk group.
DEVICE void bulk_reduce_add(float* global, const void* shared, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

/// Starts copying `bytes` bytes (a multiple of 16, both addresses 16-byte aligned) from shared memory; part of the thread's
/// current bulk group.
DEVICE void bulk_store(float* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

/// Closes the group of all stores and reductions this thread has started since the last commit.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until at most kPending of this thread's groups still read their shared memory.
template <u32 kPending>
DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Waits until at most kPending of this thread's groups are under way at all.
template <u32 kPending>
DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Between what the copy engine and what ordinary instructions did in global memory, either first.
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// Shared memory this thread wrote by ordinary stores may now be read by the copy engine and by wgmma (its other threads'
/// writes after a barrier that follows their own fences).
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
