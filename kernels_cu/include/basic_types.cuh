// The words that kernels are written with on either platform.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

/// IEEE binary16 and bfloat16 as bits; arithmetic is done in float32 only.
struct Float16 {
    u16 bits;
};
struct BFloat16 {
    u16 bits;
};

/// Address in the block's shared window, as ldmatrix and cp.async take it.
using SharedAddress = u32;
