// LSE and delta of the query tiles in flight, and what they do to S and dP of one warpgroup. Two ways, with one interface:
//   LoadedRows  Every lane loads both for its columns. All warps load the same, and what shared memory returns is counted by
//               registers: a tenth of its time in the backward, which it binds.
//   FoldedRows  The tensor cores subtract: one step more along the summed index of each product.
#pragma once
#include "platform/convert.cuh"
#include "platform/thread.cuh"
#include "platform/wgmma.cuh"
#include "query_rows.cuh"
#include "score.cuh"
#include "traits.cuh"
#include "weights.cuh"

/// dP becomes dS = P (dP - delta), or P dP where delta has been subtracted. P is taken from S, or as dV takes it for all but
/// the first kExact queries.
template <u32 kExact, bool kSubtract>
DEVICE void differentiate(const Scores& S, const Weights& P, Scores& dP, const float* delta) {
    if constexpr (kSubtract)
        delta += S.col(0);
#pragma unroll
    for (u32 n = 0; n < S.kPairs; ++n) {
        const float2 row_delta = kSubtract ? *reinterpret_cast<const float2*>(delta + 8 * n) : float2{};
        const bool rounded = 8 * n + 8 > kExact;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 pair = P.x[2 * n + half];
            const float p[2] = {rounded ? to_float(Element{static_cast<u16>(pair)}) : S.at(n, half, 0),
                                rounded ? to_float(Element{static_cast<u16>(pair >> 16)}) : S.at(n, half, 1)};
            dP.at(n, half, 0) = p[0] * (kSubtract ? dP.at(n, half, 0) - row_delta.x : dP.at(n, half, 0));
            dP.at(n, half, 1) = p[1] * (kSubtract ? dP.at(n, half, 1) - row_delta.y : dP.at(n, half, 1));
        }
    }
}

struct LoadedRows {
    float lse[kStages][kBr];  // see QueryRows
    float delta[kStages][kBr];

    DEVICE void init(u32) {}
    /// One warp, of a tile of one head. Returns what is unusual about the rows.
    DEVICE u32 store(u32 stage, const QueryRows& rows, i32, float) {
        rows.store(lse[stage], delta[stage]);
        return rows.rare();
    }

    /// In products that are under way.
    DEVICE void subtract_lse(Scores&, u32) const {}
    DEVICE void subtract_delta(Scores&, u32) const {}

    /// S becomes P. numbers(0), numbers(1): LSE and delta of a rare tile, for the precise way; only FoldedRows asks for them.
    template <typename Numbers>
    DEVICE void exponentiate(Scores& S, Weights& P, const Score& score, u32 stage, u32 rare, Numbers) const {
        if (warp_any((rare & kPrecise) != 0))
            ::exponentiate<false>(S, P, score, lse[stage]);
        else
            ::exponentiate<true>(S, P, score, lse[stage]);
    }
    /// dP becomes dS.
    template <u32 kExact, typename Numbers>
    DEVICE void differentiate(const Scores& S, const Weights& P, Scores& dP, u32 stage, u32, Numbers) const {
        ::differentiate<kExact, true>(S, P, dP, delta[stage]);
    }
};

/// S - LSE / scale is K Q^T + picks parts^T: a number is a sum of three 16-bit parts, and picks, whose rows are all alike, has
/// ones for those of LSE or of delta. float16 has nothing below 2^-24, which is what it rounds dS to, and as part of LSE moves
/// an exponent by scale / 2^24: see resources.folds_rows. Parts are finite; a tile with a number that has none is rare, and its
/// parts are 0.
struct FoldedRows {
    static constexpr u32 kParts = 3;
    // A step has 16 columns. Its second eight are the first ones again, in both operands, so that they take no memory: half
    // of what is to be added is stored.
    static constexpr float kStored = -0.5f;
    static constexpr u32 kColumns = 8;
    static_assert(2 * kParts <= kColumns);

    alignas(16) Element parts[kStages][kBr][kColumns];  // of LSE, of delta
    alignas(16) Element picks[2][8][kColumns];

    DEVICE void init(u32 thread) {
        if (thread < sizeof(picks) / sizeof(Element)) {
            const u32 part = thread % kColumns - kParts * (thread / (8 * kColumns));
            (&picks[0][0][0])[thread] = from_float<Element>(part < kParts ? 1.0f : 0.0f);
        }
        fence_async_shared();
    }

    DEVICE static void split(float (&part)[kParts], float x) {
        x *= kStored;
#pragma unroll
        for (u32 n = 0; n < kParts; ++n) {
            part[n] = to_float(from_float<Element>(x));
            x -= part[n];
        }
    }
    /// Returns above kRareBits the head, for who needs the numbers themselves.
    DEVICE u32 store(u32 stage, const QueryRows& rows, i32 head, float scale) {
        const float per_unit = 1.0f / scale;
        // One comparison decides: where three conditions did, ptxas 13.0 took two of them for their opposites, and every tile
        // was rare.
        float lse[QueryRows::kRows], largest = rows.rare() == 0 ? 0.0f : infinity();
#pragma unroll
        for (u32 m = 0; m < QueryRows::kRows; ++m) {
            lse[m] = is_finite(rows.lse[m]) ? rows.lse[m] * per_unit : 0.0f;  // else beyond the last query, or rare
            largest = maximum(largest, maximum(absolute(lse[m]), absolute(rows.delta[m])));
        }
        const bool fits = !warp_any(largest > CF_ELEMENT_MAX);
#pragma unroll
        for (u32 m = 0; m < QueryRows::kRows; ++m) {
            float l[kParts], d[kParts];
            split(l, fits ? lse[m] : 0.0f);
            split(d, fits ? rows.delta[m] : 0.0f);
            if (const u32 row = 32 * m + lane_index(); kBr % 32 == 0 || row < kBr)
                *reinterpret_cast<uint4*>(parts[stage][row]) =
                    uint4{pack<Element>(l[0], l[1]), pack<Element>(l[2], d[0]), pack<Element>(d[1], d[2]), 0};
        }
        fence_async_shared();
        return rows.rare() | (fits ? 0 : kPrecise) | static_cast<u32>(head) << kRareBits;
    }

    DEVICE void subtract(Scores& from, u32 what, u32 stage) const {
        Wgmma<Element, kBr>::template shared<true>(from.x, plain_descriptor(shared_address(picks[what]), 0, 0),
                                                   opaque64(plain_descriptor(shared_address(parts[stage]), 0, 128)));
    }
    DEVICE void subtract_lse(Scores& S, u32 stage) const { subtract(S, 0, stage); }
    DEVICE void subtract_delta(Scores& dP, u32 stage) const { subtract(dP, 1, stage); }

    template <typename Numbers>
    DEVICE void exponentiate(Scores& S, Weights& P, const Score& score, u32, u32 rare, Numbers numbers) const {
        if (warp_any((rare & kPrecise) != 0))
            ::exponentiate<false>(S, P, score, numbers(0));
        else
            exponentiate_differences(S, P, score);
    }
    template <u32 kExact, typename Numbers>
    DEVICE void differentiate(const Scores& S, const Weights& P, Scores& dP, u32, u32 rare, Numbers numbers) const {
        if (warp_any((rare & kPrecise) != 0))
            ::differentiate<kExact, true>(S, P, dP, numbers(1));
        else
            ::differentiate<kExact, false>(S, P, dP, nullptr);
    }
};

template <bool kFolded>
struct RowsOf {
    using type = LoadedRows;
};
template <>
struct RowsOf<true> {
    using type = FoldedRows;
};
