// Clusters: blocks that run at the same time and reach into each other's shared memory.
// Contracts of the functions: ptx/cluster.cuh.
#pragma once
#include "platform/block.cuh"
#include "platform/mbarrier.cuh"
#include "platform/types.cuh"

#define CLUSTERED

namespace emulated {

u32 cluster_blocks() { return CF_CLUSTER; }

}  // namespace emulated

DEVICE u32 cluster_rank() { return emulated::cluster_rank(); }
DEVICE void cluster_sync() { emulated::meet_cluster(); }

DEVICE void barrier_arrive_at(Barrier& barrier, u32 rank) {
    using namespace emulated;
    const SharedAddress at = shared_address(&barrier);
    {
        const Visit block(rank, "barrier_arrive_at");
        count_arrival(barrier_at(at, "barrier_arrive_at"), 0, "barrier_arrive_at");
    }
    give_way();
}

DEVICE void cluster_store(const volatile i32& place, u32 rank, i32 value) {
    using namespace emulated;
    const SharedAddress at = shared_address(const_cast<const i32*>(&place));
    const Visit block(rank, "cluster_store");
    *reinterpret_cast<i32*>(shared_pointer(at, sizeof value, "cluster_store")) = value;
}

DEVICE void cluster_fence() {}
