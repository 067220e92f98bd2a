// Hidden elements of Q and dO must not reach dK and dV, but 0 x NaN is NaN: in a tile that has some, those that are not
// finite become 0 in shared memory once S and dP are computed, and are put back into the results that saw them at the end.
#pragma once
#include "band.cuh"
#include "hidden.cuh"
#include "platform/convert.cuh"
#include "platform/thread.cuh"
#include "query_rows.cuh"
#include "traits.cuh"

/// Whether LSE and delta leave it open that a tile's rows have NaN or infinity.
DEVICE bool may_be_nonfinite(u32 rare) { return kCapHides || (rare & kNonfinite) != 0; }

/// Where they may: whether they have. One warp; as yet, all find the same.
template <typename Tile>
DEVICE bool has_nonfinite_rows(u32 rare, const Tile& Q) {
    if constexpr (!kCapHides)
        return true;
    // Opaque, lest addresses for rare tiles take registers in all.
    return (rare & kNonfinite) != 0 || warp_any(finds_nonfinite<1>(Q, opaque(lane_index()), 32));
}

/// The share of thread `index` of `threads` in a tile.
template <typename Tile>
DEVICE void clean_rows(Tile& tile, u32 index, u32 threads) {
#pragma unroll 1
    for (u32 n = index; n < sizeof(tile.data) / sizeof(Element); n += threads)
        if (!is_finite(to_float(tile.data[n])))
            tile.data[n] = from_float<Element>(0.0f);
}

/// Puts what clean_rows took away of a head's matrix into the rows of dK or dV that saw it; one warpgroup, whose keys are
/// `keys` and their first row `result`. A positive weight times something not finite is that; dS, kWeighted, may be
/// negative or 0, and makes NaN of it.
template <u32 kCols, bool kWeighted>
DEVICE void restore_rows(Element* result, i64 result_stride, const Element* matrix, i64 stride, const Band& band,
                         const Range& keys) {
#pragma unroll 1
    for (u32 col = thread_index() % 128; col < kCols; col += 128)
#pragma unroll 1
        for (i32 query = 0; query < band.seqlen_q; ++query) {
            const float x = to_float(matrix[query * stride + col]);
            if (is_finite(x))
                continue;
            const Range seen = band.keys_of(query);
#pragma unroll 1
            for (i32 key = larger(keys.first, seen.first); key < smaller(keys.end, seen.end); ++key) {
                Element& element = result[(key - keys.first) * result_stride + col];
                element = from_float<Element>(to_float(element) + (kWeighted ? not_a_number() : x));
            }
        }
}
