// The numbers of one specialisation. The host passes them as -D macros (cupyflash/tiles.py); kernels use these names only.
#pragma once
#include "platform/types.cuh"

using Element = CF_ELEMENT;  // Float16, BFloat16, or float (tensor cores: TF32)

constexpr u32 kHeadDim = CF_HEAD_DIM;     // of q and k, as the caller has it
constexpr u32 kHeadDimV = CF_HEAD_DIM_V;  // of v and out
constexpr u32 kD = CF_TILE_D;             // as tiles hold them: rounded up, the added columns zero
constexpr u32 kDv = CF_TILE_DV;

constexpr u32 kBr = CF_BR;  // query rows per tile
constexpr u32 kBc = CF_BC;  // keys per tile
constexpr u32 kWarps = CF_WARPS;
constexpr u32 kThreads = 32 * kWarps;
constexpr u32 kStages = CF_STAGES;  // streamed tiles in flight

// Bytes that one global access moves: 16 where pointers, strides and rows allow it.
constexpr u32 kVectorBytes = CF_VECTOR_BYTES;
