// The numbers of one specialisation. The host passes them as -D macros (cupyflash/tiles.py); kernels use these names only.
#pragma once
#include "platform/types.cuh"

using Element = CF_ELEMENT;  // Float16, BFloat16, or float (tensor cores: TF32)

DEVICE constexpr u32 round_up(u32 x, u32 multiple) { return (x + multiple - 1) / multiple * multiple; }

constexpr u32 kHeadDim = CF_HEAD_DIM;     // of q and k, as the caller has it
constexpr u32 kHeadDimV = CF_HEAD_DIM_V;  // of v and out
constexpr u32 kD = round_up(kHeadDim, 16);    // as tiles hold it; the added columns are zero
constexpr u32 kDv = round_up(kHeadDimV, 16);

constexpr u32 kBr = CF_BR;  // query rows per tile
constexpr u32 kBc = CF_BC;  // keys per tile
constexpr u32 kWarps = CF_WARPS;
constexpr u32 kThreads = 32 * kWarps;
constexpr u32 kStages = CF_STAGES;  // streamed tiles in flight

// Bytes that one global access moves: 16 where pointers, strides and rows allow it.
constexpr u32 kVectorBytes = CF_VECTOR_BYTES;
