// What a thread of the emulated block can do: ask who it is, and meet others. The bodies are in launch.cuh.
//
// A warp collective is a rendezvous: every lane leaves the address of its operands, the last one to arrive computes the
// result for all 32, then all go on. The operands live on the lanes' stacks, which stand still in the meantime.
#pragma once
#include "platform/types.cuh"

namespace emulated {

constexpr u32 kLanes = 32;

u32 thread_index();
u32 block_index();

/// `lane[l]` is what lane l passed to the rendezvous.
using WarpOperation = void (*)(void* const* lane);

/// Meets the 31 other lanes of this warp; the last to arrive calls `operation` (if any). `name` is the collective, for
/// error messages: lanes that meet under different names are an error.
void meet_warp(const char* name, void* operands, WarpOperation operation);

/// Meets all threads of the block that have not returned; true when any of them passed true.
bool meet_block(const char* name, bool predicate);

}  // namespace emulated
