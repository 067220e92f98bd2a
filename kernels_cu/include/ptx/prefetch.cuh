// Global memory on its way to the L2 cache before anybody reads it. PTX ISA: prefetch.
#pragma once
#include "platform/types.cuh"

/// Has the 128 bytes around `global` fetched; takes no register, and is no access.
DEVICE void prefetch_to_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }
