// mma.sync: D (16 x 8, float32) += A B, one warp. What a lane holds of them: ptx/mma.cuh.
// Products are exact (two 11-bit mantissas fit float32). Of 16-bit elements they are added to D one by one in float32, in the
// order of k: the order in which a tensor core adds, its wider sums and its truncation are not modelled. Of TF32 they are:
// what errors grow to is the matter where float32 is split.
#pragma once
#include "platform/block.cuh"
#include "platform/convert.cuh"
#include "platform/types.cuh"

namespace emulated {

/// How many elements of T a register holds, and what they are as float32.
template <typename T>
struct Elements {
    static constexpr u32 kCount = 2;
    static float get(u32 bits, u32 n) { return to_float(T{static_cast<u16>(bits >> 16 * n)}); }
};
template <>
struct Elements<float> {
    static constexpr u32 kCount = 1;
    /// The tensor core ignores the other bits.
    static float get(u32 bits, u32) { return bits_to_float(bits & ~0x1fffu); }
};

/// A[k][i] from the lanes' registers.
template <typename T>
void read_a(float (&A)[8 * Elements<T>::kCount][16], const u32* const (&a)[kLanes]) {
    constexpr u32 kCount = Elements<T>::kCount;
    for (u32 l = 0; l < kLanes; ++l)
        for (u32 r = 0; r < 4; ++r)
            for (u32 n = 0; n < kCount; ++n)
                A[kCount * (l % 4 + 4 * (r / 2)) + n][l / 4 + 8 * (r % 2)] = Elements<T>::get(a[l][r], n);
}

/// A row of D += the eight products of each column as a tensor core adds them: fixed-point numbers of the largest addend's
/// scale, two bits finer than float32 (as published of Hopper; other GPUs have one, or none), whatever is below cut off; the
/// sum cut off to float32.
template <u32 kN>
void add_cut_off(float (&D)[kN], const double (&products)[8][kN]) {
    double plain[kN], largest[kN], unit[kN], units[kN];
    i32 count[kN];
    for (u32 j = 0; j < kN; ++j) {
        plain[j] = D[j];
        largest[j] = __builtin_fabs(plain[j]);
    }
    for (const auto& row : products)
        for (u32 j = 0; j < kN; ++j) {
            const double size = __builtin_fabs(row[j]);
            largest[j] = size > largest[j] ? size : largest[j];
            plain[j] += row[j];
        }
    bool is_cut[kN];
    for (u32 j = 0; j < kN; ++j) {
        is_cut[j] = largest[j] != 0 && __builtin_fabs(plain[j]) <= 0x1p127;  // else nothing to add, or not finite
        u64 bits;
        __builtin_memcpy(&bits, &largest[j], sizeof(bits));
        bits &= 0x7ff0000000000000;  // of the power of two in it
        __builtin_memcpy(&unit[j], &bits, sizeof(bits));
        unit[j] *= 0x1p-25;
        units[j] = is_cut[j] ? 1 / unit[j] : 0;
        count[j] = is_cut[j] ? static_cast<i32>(D[j] * units[j]) : 0;
    }
    for (const auto& row : products)
        for (u32 j = 0; j < kN; ++j)
            count[j] += static_cast<i32>(is_cut[j] ? row[j] * units[j] : 0);
    for (u32 j = 0; j < kN; ++j) {
        const double sum = is_cut[j] ? count[j] * unit[j] : plain[j];
        const float rounded = static_cast<float>(sum);
        const bool exceeds = is_cut[j] && __builtin_fabs(static_cast<double>(rounded)) > __builtin_fabs(sum);
        D[j] = exceeds ? bits_to_float(float_to_bits(rounded) - 1) : rounded;  // the next one towards zero
    }
}

/// D += or = A B; a depth of 8 is that of TF32. Of each 8 of its columns a lane holds four elements.
template <u32 kDepth, u32 kN>
void add_product(float* const (&d)[kLanes], const float (&A)[kDepth][16], const float (&B)[kDepth][kN],
                 bool accumulate) {
    float D[16][kN] = {};
    const auto place = [&](u32 l, u32 n) -> float& {
        return D[l / 4 + 8 * (n / 2 % 2)][8 * (n / 4) + 2 * (l % 4) + n % 2];
    };
    for (u32 l = 0; l < kLanes && accumulate; ++l)
        for (u32 n = 0; n < kN / 2; ++n)
            place(l, n) = d[l][n];
    for (u32 i = 0; i < 16; ++i)
        if constexpr (kDepth == 8) {
            double products[8][kN];
            for (u32 k = 0; k < 8; ++k)
                for (u32 j = 0; j < kN; ++j)
                    products[k][j] = static_cast<double>(A[k][i]) * B[k][j];
            add_cut_off(D[i], products);
        } else {
            for (u32 k = 0; k < kDepth; ++k)
                for (u32 j = 0; j < kN; ++j)
                    D[i][j] += A[k][i] * B[k][j];
        }
    for (u32 l = 0; l < kLanes; ++l)
        for (u32 n = 0; n < kN / 2; ++n)
            d[l][n] = place(l, n);
}

struct MmaOperands {
    float* d;
    const u32* a;
    u32 b[2];
};

template <typename T>
void mma(void* const* lane) {
    constexpr u32 kCount = Elements<T>::kCount;
    float A[8 * kCount][16], B[8 * kCount][8];
    float* d[kLanes];
    const u32* a[kLanes];
    for (u32 l = 0; l < kLanes; ++l) {
        const MmaOperands& own = *static_cast<MmaOperands*>(lane[l]);
        d[l] = own.d;
        a[l] = own.a;
        for (u32 r = 0; r < 2; ++r)
            for (u32 n = 0; n < kCount; ++n)
                B[kCount * (l % 4 + 4 * r) + n][l / 4] = Elements<T>::get(own.b[r], n);
    }
    read_a<T>(A, a);
    add_product(d, A, B, true);
}

}  // namespace emulated

template <typename T>
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulated::trace("mma", 8 * emulated::Elements<T>::kCount);
    emulated::MmaOperands operands = {d, a, {b0, b1}};
    emulated::meet_warp("mma", &operands, emulated::mma<T>);
}
