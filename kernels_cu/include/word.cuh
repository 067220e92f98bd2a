// Registers for a number of bytes.
#pragma once
#include "platform/types.cuh"

/// Word of kBytes bytes (a power of two up to 16), for copies through registers.
template <u32 kBytes>
struct Word;
template <>
struct Word<2> {
    using type = u16;
};
template <>
struct Word<4> {
    using type = u32;
};
template <>
struct Word<8> {
    using type = uint2;
};
template <>
struct Word<16> {
    using type = uint4;
};
