// What the threads of a block ask for, in order: for `cupyflash trace` (cupyflash/trace). Recorded only where
// CF_EMULATED_TRACED is defined; the body is in launch.cu.
#pragma once
#include "platform/types.cuh"

namespace emulated {

#if defined(CF_EMULATED_TRACED)
void trace(const char* what, u64 a = 0, u64 b = 0);
#else
inline void trace(const char*, u64 = 0, u64 = 0) {}
#endif

}  // namespace emulated
