// mma.sync: D (16 x 8, float32) += A (16 x K, row-major) B (K x 8, column-major), one warp. K = 16 for 16-bit elements,
// 8 for TF32. With g = lane / 4 and t = lane % 4 a lane holds
//   16-bit  A: a[0] = (g, 2t..2t+1), a[1] = (g+8, same), a[2] = (g, 2t+8..), a[3] = (g+8, 2t+8..);  B: b0 = (2t..2t+1, g), b1 = (2t+8.., g)
//   TF32    A: a[0] = (g, t), a[1] = (g+8, t), a[2] = (g, t+4), a[3] = (g+8, t+4);                  B: b0 = (t, g), b1 = (t+4, g)
//   both    D: d[0], d[1] = (g, 2t), (g, 2t+1);  d[2], d[3] = (g+8, 2t), (g+8, 2t+1)
// Products are exact (two 11-bit mantissas fit float32). Of 16-bit elements they are added to D one by one in float32, in the
// order of k: the order in which a tensor core adds, its wider sums and its truncation are not modelled. Of TF32 they are:
// what errors grow to is the matter where float32 is split.
#pragma once
#include "platform/block.cuh"
#include "platform/convert.cuh"
#include "platform/types.cuh"

namespace emulated {

struct MmaOperands {
    float* d;
    const u32* a;
    u32 b[2];
};

/// How many elements of T a register holds, and what they are as float32.
template <typename T>
struct Elements {
    static constexpr u32 kCount = 2;
    static float get(u32 bits, u32 n) { return to_float(T{static_cast<u16>(bits >> 16 * n)}); }
};
template <>
struct Elements<float> {
    static constexpr u32 kCount = 1;
    static float get(u32 bits, u32) {
        return bits_to_float(bits & ~0x1fffu);
    }  // the tensor core ignores the other bits
};

/// start + all products as a tensor core adds them: fixed-point numbers of the largest addend's scale, two bits finer than
/// float32 (as published of Hopper; other GPUs have one, or none), whatever is below cut off; the sum cut off to float32.
inline float sum_cut_off(float start, const float (&a)[8], const float (&b)[8]) {
    double addends[9] = {start}, largest = __builtin_fabs(addends[0]), plain = addends[0];
    for (u32 k = 0; k < 8; ++k) {
        addends[k + 1] = static_cast<double>(a[k]) * b[k];
        largest = __builtin_fmax(largest, __builtin_fabs(addends[k + 1]));
        plain += addends[k + 1];
    }
    if (largest == 0 || !(__builtin_fabs(plain) <= 0x1p127))
        return static_cast<float>(plain);  // nothing to add, or not finite
    const double unit = __builtin_ldexp(1.0, __builtin_ilogb(largest) - 25);
    double sum = 0;
    for (const double x : addends)
        sum += __builtin_trunc(x / unit);
    sum *= unit;
    const float rounded = static_cast<float>(sum);
    if (__builtin_fabs(static_cast<double>(rounded)) <= __builtin_fabs(sum))
        return rounded;
    return bits_to_float(float_to_bits(rounded) - 1);  // the next one towards zero
}

template <typename T>
void mma(void* const* lane) {
    constexpr u32 kCount = Elements<T>::kCount;
    constexpr u32 kDepth = 8 * kCount;
    float A[16][kDepth], B[kDepth][8], D[16][8];
    for (u32 l = 0; l < kLanes; ++l) {
        const MmaOperands& own = *static_cast<MmaOperands*>(lane[l]);
        const u32 g = l / 4, t = l % 4;
        for (u32 n = 0; n < kCount; ++n) {
            for (u32 r = 0; r < 4; ++r)
                A[g + 8 * (r % 2)][kCount * (t + 4 * (r / 2)) + n] = Elements<T>::get(own.a[r], n);
            for (u32 r = 0; r < 2; ++r)
                B[kCount * (t + 4 * r) + n][g] = Elements<T>::get(own.b[r], n);
        }
        for (u32 r = 0; r < 4; ++r)
            D[g + 8 * (r / 2)][2 * t + r % 2] = own.d[r];
    }
    for (u32 i = 0; i < 16; ++i) {
        if constexpr (kCount == 1) {
            for (u32 j = 0; j < 8; ++j) {
                float column[kDepth];
                for (u32 k = 0; k < kDepth; ++k)
                    column[k] = B[k][j];
                D[i][j] = sum_cut_off(D[i][j], A[i], column);
            }
        } else {
            for (u32 k = 0; k < kDepth; ++k)
                for (u32 j = 0; j < 8; ++j)
                    D[i][j] += A[i][k] * B[k][j];
        }
    }
    for (u32 l = 0; l < kLanes; ++l)
        for (u32 r = 0; r < 4; ++r)
            static_cast<MmaOperands*>(lane[l])->d[r] = D[l / 4 + 8 * (r / 2)][2 * (l % 4) + r % 2];
}

}  // namespace emulated

template <typename T>
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulated::trace("mma", 8 * emulated::Elements<T>::kCount);
    emulated::MmaOperands operands = {d, a, {b0, b1}};
    emulated::meet_warp("mma", &operands, emulated::mma<T>);
}
