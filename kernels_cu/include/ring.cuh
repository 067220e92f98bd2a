// A ring of buffers between those who fill and those who read them.
#pragma once
#include "platform/types.cuh"

/// A position in a ring of kSize buffers, and the parity of the phase that their barriers are in.
template <u32 kSize>
struct Ring {
    u32 at = 0, parity = 0;

    DEVICE void advance() {
        if (++at == kSize) {
            at = 0;
            parity ^= 1;
        }
    }
};
