// Clusters: blocks that run at the same time and reach into each other's shared memory. How many they are is a property of
// the kernel: CF_CLUSTER, and CLUSTERED before its name. PTX ISA: mapa, barrier.cluster, fence.acq_rel.cluster.
#pragma once
#include "platform/mbarrier.cuh"
#include "platform/types.cuh"

#if CF_CLUSTER > 1
#define CLUSTERED __cluster_dims__(CF_CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

/// Barrier over all threads of the cluster; what they wrote before it, in shared memory of any of its blocks, is visible
/// after it.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}

/// Arrives at the barrier that block `rank` has at this place.
DEVICE void barrier_arrive_at(Barrier& barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(&barrier, rank)) : "memory");
}

/// Writes to what block `rank` has at this place.
DEVICE void cluster_store(const volatile i32& place, u32 rank, i32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in_block(const_cast<const i32*>(&place), rank)),
                 "r"(value)
                 : "memory");
}

/// Between stores to another block and the arrival that announces them, and between the wait for it and the loads.
DEVICE void cluster_fence() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
