// A ring of buffers between those who fill and those who read them.
#pragma once
#include "platform/types.cuh"

/// A position in a ring of kSize buffers, and the parity of the phase that their barriers are in.
template <u32 kSize>
struct Ring {
    u32 at = 0, parity = 0;

    Ring() = default;
    /// Where it is after `steps`; for who would rather compute it than keep it.
    DEVICE explicit Ring(i32 steps)
        : at(static_cast<u32>(steps) % kSize), parity(static_cast<u32>(steps) / kSize % 2) {}

    DEVICE void advance() {
        if (++at == kSize) {
            at = 0;
            parity ^= 1;
        }
    }
};
