// Where a thread stands in its block and grid, and what it can say to its neighbours. Contracts of the functions:
// ptx/thread.cuh.
#pragma once
#include "platform/block.cuh"
#include "platform/types.cuh"

DEVICE u32 thread_index() { return emulated::thread_index(); }
DEVICE u32 lane_index() { return emulated::thread_index() % emulated::kLanes; }

/// A collective here too, because it is one on the GPU; so is `uniform`.
DEVICE u32 warp_index() {
    emulated::meet_warp("warp_index", nullptr, nullptr);
    return emulated::thread_index() / emulated::kLanes;
}

DEVICE u32 block_index() { return emulated::block_index(); }
DEVICE u32 grid_size() { return emulated::grid_size(); }

DEVICE u32 uniform(u32 value) {
    emulated::meet_warp("uniform", &value, [](void* const* lane) {
        for (u32 l = 1; l < emulated::kLanes; ++l)
            *static_cast<u32*>(lane[l]) = *static_cast<u32*>(lane[0]);
    });
    return value;
}

DEVICE void block_sync() { emulated::meet_block("block_sync", false); }
DEVICE bool block_any(bool predicate) { return emulated::meet_block("block_any", predicate); }
DEVICE void warp_sync() { emulated::meet_warp("warp_sync", nullptr, nullptr); }

DEVICE bool warp_any(bool predicate) {
    emulated::meet_warp("warp_any", &predicate, [](void* const* lane) {
        bool any = false;
        for (u32 l = 0; l < emulated::kLanes; ++l)
            any = any || *static_cast<bool*>(lane[l]);
        for (u32 l = 0; l < emulated::kLanes; ++l)
            *static_cast<bool*>(lane[l]) = any;
    });
    return predicate;
}

DEVICE float shuffle_xor(float value, u32 mask) {
    struct Operands {
        float value;
        u32 mask;
    } operands = {value, mask};
    emulated::meet_warp("shuffle_xor", &operands, [](void* const* lane) {
        float values[emulated::kLanes];
        for (u32 l = 0; l < emulated::kLanes; ++l)
            values[l] = static_cast<Operands*>(lane[l])->value;
        for (u32 l = 0; l < emulated::kLanes; ++l) {
            Operands& own = *static_cast<Operands*>(lane[l]);
            // Only the low five bits of a lane index count.
            own.value = values[(l ^ own.mask) % emulated::kLanes];
        }
    });
    return operands.value;
}

/// The value of the lane with this index (all 32 lanes take part).
DEVICE float shuffle(float value, u32 lane) {
    struct Operands {
        float value;
        u32 lane;
    } operands = {value, lane};
    emulated::meet_warp("shuffle", &operands, [](void* const* lane) {
        float values[emulated::kLanes];
        for (u32 l = 0; l < emulated::kLanes; ++l)
            values[l] = static_cast<Operands*>(lane[l])->value;
        for (u32 l = 0; l < emulated::kLanes; ++l) {
            Operands& own = *static_cast<Operands*>(lane[l]);
            own.value = values[own.lane % emulated::kLanes];
        }
    });
    return operands.value;
}
