// float32 on tensor cores, which multiply TF32 (11 bits): every operand is split, x = high + low, and
//   a b = low_a high_b + high_a low_b + high_a high_b,
// where low_a low_b, below 2^-22 of the product, is left out. A tensor core cuts its sums off instead of rounding them, always
// towards zero, and over a long sum that adds up: so every two steps of k are summed for themselves, small terms first, and then
// added in float32.
#pragma once
#include "platform/convert.cuh"
#include "platform/math.cuh"
#include "platform/mma.cuh"
#include "platform/thread.cuh"
#include "platform/types.cuh"

constexpr bool kSplit = CF_SPLIT;  // float32 is split; false: it is rounded to TF32
constexpr u32 kStepsPerSum = 2;

/// Four registers of a fragment. Where x is not finite, or high is rounded up to infinity, low is not finite either and of
/// opposite sign: every sum that has such an operand is NaN.
DEVICE void split(const u32 (&bits)[4], u32 (&high)[4], u32 (&low)[4]) {
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
        const float x = bits_to_float(bits[n]);
        high[n] = to_tf32(x);
        low[n] = float_to_bits(x - bits_to_float(high[n]));  // exact; the tensor core takes its first 11 bits of 12
    }
}

/// Fragment (m, 2 n + j) of the products of kStepsPerSum steps, from `first` on, by multiply-adds that take every float32.
/// Operands pass between lanes, from where mma expects them.
template <typename A, typename B>
DEVICE void multiply_plainly(float (&sum)[4], const A& A_operand, const B& B_operand, u32 m, u32 n, u32 j, u32 first) {
    const u32 g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (u32 s = 0; s < kStepsPerSum; ++s) {
        u32 a[4], b[4];
        A_operand.load(a, m, first + s);
        B_operand.load(b, n, first + s);
#pragma unroll 1
        for (u32 k = 0; k < 4; ++k)
#pragma unroll
            for (u32 half = 0; half < 2; ++half)
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    const float row = shuffle(bits_to_float(a[2 * half + e / 2]), 4 * g + k);
                    const float column = shuffle(bits_to_float(b[2 * j + half]), 4 * (2 * t + e % 2) + k);
                    sum[e] = multiply_add(row, column, sum[e]);
                }
    }
}

/// Replaces what is not finite in a fragment of split sums by plain ones. What is finite has met nothing that cannot be split,
/// and keeps its bits.
template <typename A, typename B>
DEVICE void repair(float (&sum)[4], const A& A_operand, const B& B_operand, u32 m, u32 n, u32 j, u32 first) {
    if (!warp_any(!(is_finite(sum[0]) && is_finite(sum[1]) && is_finite(sum[2]) && is_finite(sum[3]))))
        return;
    float plain[4] = {};
    multiply_plainly(plain, A_operand, B_operand, m, n, j, first);
#pragma unroll
    for (u32 e = 0; e < 4; ++e)
        sum[e] = is_finite(sum[e]) ? sum[e] : plain[e];
}

/// D += A B of float32 operands, over kSteps steps of eight. A in shared memory: the loop over k stays one, or the compiler
/// fetches more ahead than it has registers for.
template <u32 kSteps, typename A, typename B, typename Tile>
DEVICE void split_gemm(Tile& D, A A_operand, B B_operand) {
    constexpr u32 kM = Tile::kM, kPairs = Tile::kN / 2;
    constexpr u32 kUnroll = !A::kInMemory      ? kSteps
                            : kM * kPairs == 1 ? 2
                                               : 1;  // four sums at a time hide their latency
    static_assert(kSteps % kStepsPerSum == 0, "a tile's rows are pairs of steps");
    A_operand.forget();
    B_operand.forget();
#pragma unroll kUnroll
    for (u32 first = 0; first < kSteps; first += kStepsPerSum) {
        u32 high[kStepsPerSum][kM][4], low[kStepsPerSum][kM][4];
#pragma unroll
        for (u32 s = 0; s < kStepsPerSum; ++s)
#pragma unroll
            for (u32 m = 0; m < kM; ++m) {
                u32 a[4];
                A_operand.load(a, m, first + s);
                split(a, high[s][m], low[s][m]);
            }
#pragma unroll
        for (u32 n = 0; n < kPairs; ++n) {
            float sum[kM][2][4] = {};
            auto add = [&](const u32(&x)[kM][4], const u32(&y)[4]) {
#pragma unroll
                for (u32 m = 0; m < kM; ++m)
#pragma unroll
                    for (u32 j = 0; j < 2; ++j)
                        mma<float>(sum[m][j], x[m], y[2 * j], y[2 * j + 1]);
            };
#pragma unroll
            for (u32 s = 0; s < kStepsPerSum; ++s) {
                u32 b[4], b_high[4], b_low[4];
                B_operand.load(b, n, first + s);
                split(b, b_high, b_low);
                add(low[s], b_high);
                add(high[s], b_low);
                add(high[s], b_high);
            }
#pragma unroll
            for (u32 m = 0; m < kM; ++m)
#pragma unroll
                for (u32 j = 0; j < 2; ++j)
#pragma unroll
                    for (u32 e = 0; e < 4; ++e)
                        D.x[m][2 * n + j][e] += sum[m][j][e];
        }
    }
}

/// The same, bit by bit, where sums are finite, and the others by plain multiply-adds: for rare tiles with numbers that cannot
/// be split. Operands are fetched and split for each fragment anew, which takes time in place of registers.
template <u32 kSteps, typename A, typename B, typename Tile>
DEVICE void repaired_gemm(Tile& D, A A_operand, B B_operand) {
    constexpr u32 kUnroll = A::kInMemory ? 1 : kSteps;  // registers are not counted through
#pragma unroll kUnroll
    for (u32 first = 0; first < kSteps; first += kStepsPerSum)
#pragma unroll
        for (u32 m = 0; m < Tile::kM; ++m)
#pragma unroll
            for (u32 n = 0; n < Tile::kN / 2; ++n) {
                A_operand.forget();
                B_operand.forget();
                float sum[2][4] = {};
#pragma unroll
                for (u32 s = 0; s < kStepsPerSum; ++s) {
                    u32 a[4], a_high[4], a_low[4], b[4], b_high[4], b_low[4];
                    A_operand.load(a, m, first + s);
                    B_operand.load(b, n, first + s);
                    for (u32& bits : a)
                        bits = opaque(bits);
                    split(a, a_high, a_low);
                    split(b, b_high, b_low);
#pragma unroll
                    for (u32 j = 0; j < 2; ++j) {
                        mma<float>(sum[j], a_low, b_high[2 * j], b_high[2 * j + 1]);
                        mma<float>(sum[j], a_high, b_low[2 * j], b_low[2 * j + 1]);
                        mma<float>(sum[j], a_high, b_high[2 * j], b_high[2 * j + 1]);
                    }
                }
#pragma unroll
                for (u32 j = 0; j < 2; ++j) {
                    repair(sum[j], A_operand, B_operand, m, n, j, first);
#pragma unroll
                    for (u32 e = 0; e < 4; ++e)
                        D.x[m][2 * n + j][e] += sum[j][e];
                }
            }
}

/// D += A B by multiply-adds, for rare tiles where nobody needs the bits of split sums. Operands pass between lanes, from where
/// mma expects them.
template <u32 kSteps, typename A, typename B, typename Tile>
DEVICE void plain_gemm(Tile& D, A A_operand, B B_operand) {
    constexpr u32 kUnroll = A::kInMemory ? 1 : kSteps;  // registers are not counted through
    const u32 g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll 1
    for (u32 k = 0; k < 4; ++k) {
        A_operand.forget();
        B_operand.forget();
#pragma unroll kUnroll
        for (u32 step = 0; step < kSteps; ++step)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                float rows[Tile::kM][2];
#pragma unroll
                for (u32 m = 0; m < Tile::kM; ++m) {
                    u32 a[4];
                    A_operand.load(a, m, step);
#pragma unroll
                    for (u32 e = 0; e < 2; ++e)
                        rows[m][e] = shuffle(bits_to_float(a[2 * half + e]), 4 * g + k);
                }
#pragma unroll
                for (u32 n = 0; n < Tile::kN; ++n) {
                    u32 b[4];
                    B_operand.load(b, n / 2, step);
#pragma unroll
                    for (u32 odd = 0; odd < 2; ++odd) {
                        const float column = shuffle(bits_to_float(b[2 * (n % 2) + half]), 4 * (2 * t + odd) + k);
#pragma unroll
                        for (u32 m = 0; m < Tile::kM; ++m)
#pragma unroll
                            for (u32 e = odd; e < 4; e += 2)
                                D.x[m][n][e] = multiply_add(rows[m][e / 2], column, D.x[m][n][e]);
                    }
                }
            }
    }
}
