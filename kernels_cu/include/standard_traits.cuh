// The numbers of one specialisation of standard attention's kernels; the host passes them as -D macros.
#pragma once
#include "platform/types.cuh"

using Element = CF_ELEMENT;  // of S and P in memory: Float16, BFloat16, float or double
using Wide = CF_WIDE;        // what is computed in: double for double, else float

constexpr u32 kThreads = CF_THREADS;         // of a block
constexpr u32 kRowThreads = CF_ROW_THREADS;  // that share a row: a warp or the block
constexpr i32 kPieces = CF_PIECES;  // of a row that a thread keeps in registers; 0: it reads the row again and again
constexpr bool kCapped = CF_SOFTCAP;

static_assert(kRowThreads == 32 || kRowThreads == kThreads, "a row is shared by a warp or by the block");
