// Small kernels, each about one primitive of the platform headers. Run by test_emulated_primitives.py.
#include "platform/convert.cuh"
#include "platform/cp_async.cuh"
#include "platform/ldmatrix.cuh"
#include "platform/math.cuh"
#include "platform/mma.cuh"
#include "platform/reduce.cuh"
#include "platform/stmatrix.cuh"
#include "platform/thread.cuh"
#include "platform/types.cuh"

constexpr u32 kThreads = 64;

struct SharedStorage {
    alignas(16) u8 bytes[CF_SHARED_BYTES];
};

template <typename T>
DEVICE T* shared_array() {
    return reinterpret_cast<T*>(shared_storage<SharedStorage>().bytes);
}

DEVICE u32 global_index() { return block_index() * kThreads + thread_index(); }

// ---- Values.

struct ConvertParams {
    const float* x;
    u32 *half, *bfloat, *pair_half, *pair_bfloat, *tf32;
};

KERNEL(kThreads, 1) void narrow(PARAMS(ConvertParams) params) {
    const u32 n = global_index();
    const float x = params.x[n];
    params.half[n] = from_float<Float16>(x).bits;
    params.bfloat[n] = from_float<BFloat16>(x).bits;
    params.pair_half[n] = pack<Float16>(x, 1.0f);
    params.pair_bfloat[n] = pack<BFloat16>(1.0f, x);
    params.tf32[n] = to_tf32(x);
}

struct WidenParams {
    const u16* bits;
    float *half, *bfloat;
};

KERNEL(kThreads, 1) void widen(PARAMS(WidenParams) params) {
    const u32 n = global_index();
    params.half[n] = to_float(Float16{params.bits[n]});
    params.bfloat[n] = to_float(BFloat16{params.bits[n]});
}

struct MathParams {
    const float* x;
    float *exp2, *log2, *rounded, *fused, *maximum;
    u32* finite;
};

KERNEL(kThreads, 1) void elementary(PARAMS(MathParams) params) {
    const u32 n = global_index();
    const float x = params.x[n];
    params.exp2[n] = exp2_approx(x);
    params.log2[n] = log2_approx(x);
    params.rounded[n] = multiply_rounded(x, x) + -1.0f;
    params.fused[n] = multiply_add(x, x, -1.0f);
    params.maximum[n] = maximum(x, 1.0f);
    params.finite[n] = is_finite(x);
}

// ---- Warps and blocks.

struct MeetParams {
    const float* x;
    float* exchanged;  // with the lane that differs in bits 0 and 2
    u32 *warp, *warp_saw, *block_saw;
};

KERNEL(kThreads, 1) void meet(PARAMS(MeetParams) params) {
    const u32 n = thread_index();
    params.exchanged[n] = shuffle_xor(params.x[n], 5);
    params.warp[n] = warp_index();
    params.warp_saw[n] = warp_any(params.x[n] > 40.0f);
    params.block_saw[n] = block_any(params.x[n] > 40.0f) + 2 * block_any(params.x[n] > 1000.0f);
}

struct MatrixParams {
    const u16* matrix;  // 32 rows of 8
    const u32* row;     // which row each lane points to
    u32 *plain, *transposed;
};

KERNEL(32, 1) void load_matrices(PARAMS(MatrixParams) params) {
    u16* shared = shared_array<u16>();
    const u32 l = lane_index();
    for (u32 n = 0; n < 8; ++n)
        shared[8 * l + n] = params.matrix[8 * l + n];
    warp_sync();
    u32 r[4];
    const SharedAddress address = shared_address(shared + 8 * params.row[l]);
    ldmatrix_x4(r, address);
    for (u32 n = 0; n < 4; ++n)
        params.plain[4 * l + n] = r[n];
    ldmatrix_x4_transposed(r, address);
    for (u32 n = 0; n < 4; ++n)
        params.transposed[4 * l + n] = r[n];
}

struct StoreParams {
    const u32 *r, *row;       // four registers of each lane, and which row it points to
    u16 *plain, *transposed;  // 32 rows of 8
};

KERNEL(32, 1) void store_matrices(PARAMS(StoreParams) params) {
    u16* shared = shared_array<u16>();
    const u32 l = lane_index();
    const SharedAddress address = shared_address(shared + 8 * params.row[l]);
    const u32* own = params.r + 4 * l;
    const u32 r[4] = {own[0], own[1], own[2], own[3]};
    stmatrix_x4(address, r);
    warp_sync();
    for (u32 n = 0; n < 8; ++n)
        params.plain[8 * l + n] = shared[8 * l + n];
    warp_sync();
    stmatrix_x4_transposed(address, r);
    warp_sync();
    for (u32 n = 0; n < 8; ++n)
        params.transposed[8 * l + n] = shared[8 * l + n];
}

struct PairParams {
    const u32* pair;
    u32* marked;
};

KERNEL(32, 1) void mark_pairs(PARAMS(PairParams) params) {
    const u32 l = lane_index();
    params.marked[l] = mark_nonfinite(mark_nonfinite(0, params.pair[l]), 0x3c003c00u) != 0;
}

template <typename T>
struct MmaParams {
    const T *A, *B;  // 16 x K, K x 8
    float* D;        // 16 x 8, accumulated into
};

template <typename T>
DEVICE u32 register_of(T first, T second) {
    return first.bits | static_cast<u32>(second.bits) << 16;
}

template <typename T>
DEVICE void multiply(const MmaParams<T>& params) {
    const u32 g = lane_index() / 4, t = lane_index() % 4;
    float* D[4] = {params.D + 8 * g + 2 * t, params.D + 8 * g + 2 * t + 1, params.D + 8 * (g + 8) + 2 * t,
                   params.D + 8 * (g + 8) + 2 * t + 1};
    float d[4] = {*D[0], *D[1], *D[2], *D[3]};
    u32 a[4], b[2];
    for (u32 r = 0; r < 4; ++r) {
        const u32 row = g + 8 * (r % 2);
        if constexpr (sizeof(T) == 2) {
            const T* A = params.A + 16 * row + 2 * t + 8 * (r / 2);
            a[r] = register_of(A[0], A[1]);
        } else {
            a[r] = float_to_bits(params.A[8 * row + t + 4 * (r / 2)]);
        }
    }
    for (u32 r = 0; r < 2; ++r) {
        if constexpr (sizeof(T) == 2) {
            const T* B = params.B + 8 * (2 * t + 8 * r) + g;
            b[r] = register_of(B[0], B[8]);
        } else {
            b[r] = float_to_bits(params.B[8 * (t + 4 * r) + g]);
        }
    }
    mma<T>(d, a, b[0], b[1]);
    for (u32 r = 0; r < 4; ++r)
        *D[r] = d[r];
}

KERNEL(32, 1) void multiply_half(PARAMS(MmaParams<Float16>) params) { multiply(params); }
KERNEL(32, 1) void multiply_bfloat(PARAMS(MmaParams<BFloat16>) params) { multiply(params); }
KERNEL(32, 1) void multiply_tf32(PARAMS(MmaParams<float>) params) { multiply(params); }

// ---- Memory.

struct CopyParams {
    const u32* source;                               // two words per thread
    u32 *at_once, *after_first, *after_both, *zero;  // what shared memory held; zero: after a copy of nothing
};

KERNEL(kThreads, 1) void copy(PARAMS(CopyParams) params) {
    u32* shared = shared_array<u32>();
    const u32 n = thread_index();
    for (u32 group = 0; group < 2; ++group) {
        copy_async<4>(shared + kThreads * group + n, params.source + kThreads * group + n, true);
        copy_async_commit();
    }
    for (u32 group = 0; group < 2; ++group)
        params.at_once[kThreads * group + n] = shared[kThreads * group + n];
    copy_async_wait<1>();
    for (u32 group = 0; group < 2; ++group)
        params.after_first[kThreads * group + n] = shared[kThreads * group + n];
    copy_async_wait<0>();
    for (u32 group = 0; group < 2; ++group)
        params.after_both[kThreads * group + n] = shared[kThreads * group + n];
    copy_async<4>(shared + n, nullptr, false);
    copy_async_commit();
    copy_async_wait<0>();
    params.zero[n] = shared[n];
}

struct BytesParams {
    const u8* source;
    u8* target;
};

template <u32 kBytes>
DEVICE void copy_bytes(const BytesParams& params) {
    u8* shared = shared_array<u8>();
    const u32 first = kBytes * thread_index();
    copy_async<kBytes>(shared + first, params.source + first, true);
    copy_async_commit();
    copy_async_wait<0>();
    for (u32 n = 0; n < kBytes; ++n)
        params.target[first + n] = shared[first + n];
}

KERNEL(32, 1) void copy_2(PARAMS(BytesParams) params) { copy_bytes<2>(params); }
KERNEL(32, 1) void copy_4(PARAMS(BytesParams) params) { copy_bytes<4>(params); }
KERNEL(32, 1) void copy_8(PARAMS(BytesParams) params) { copy_bytes<8>(params); }
KERNEL(32, 1) void copy_16(PARAMS(BytesParams) params) { copy_bytes<16>(params); }

struct SumParams {
    float* sums;  // seven
};

KERNEL(kThreads, 1) void sum(PARAMS(SumParams) params) {
    reduce_add4(params.sums, 1.0f, 2.0f, thread_index(), -1.0f);
    reduce_add2(params.sums + 4, 3.0f, -2.0f);
    reduce_add(params.sums + 6, 0.5f);
}

// ---- What the emulation has to bring to light.

struct OutParams {
    u32* out;
};

KERNEL(kThreads, 1) void read_unwritten(PARAMS(OutParams) params) {
    params.out[thread_index()] = shared_array<u32>()[thread_index()];
}

struct OrderParams {
    u32 *next, *place;  // place: when each thread passed
};

KERNEL(kThreads, 1) void record_order(PARAMS(OrderParams) params) {
    params.place[global_index()] = (*params.next)++;
    block_sync();
    params.place[global_index()] += 1000 * (*params.next)++;
}

// Every thread reads what the next one wrote.
template <bool kBarrier>
DEVICE void rotate(u32* out) {
    u32* shared = shared_array<u32>();
    shared[thread_index()] = thread_index();
    if (kBarrier)
        block_sync();
    out[thread_index()] = shared[(thread_index() + 1) % kThreads];
}

KERNEL(kThreads, 1) void rotate_synchronised(PARAMS(OutParams) params) { rotate<true>(params.out); }
KERNEL(kThreads, 1) void rotate_unsynchronised(PARAMS(OutParams) params) { rotate<false>(params.out); }

KERNEL(kThreads, 1) void one_warp_returns(PARAMS(OutParams) params) {
    if (thread_index() < 32)
        return;
    block_sync();
    params.out[thread_index()] = block_any(true);
}

KERNEL(kThreads, 1) void one_lane_returns(PARAMS(OutParams) params) {
    if (thread_index() == 35)
        return;
    params.out[thread_index()] = warp_any(true);
}

KERNEL(kThreads, 1) void lanes_diverge(PARAMS(OutParams) params) {
    if (thread_index() == 7)
        params.out[7] = warp_any(true);
    else
        warp_sync();
}

KERNEL(kThreads, 1) void forgets_a_wait(PARAMS(OutParams) params) {
    copy_async<4>(shared_array<u32>() + thread_index(), params.out + thread_index(), true);
    copy_async_commit();
}

KERNEL(32, 1) void matrix_beyond_the_end(PARAMS(OutParams) params) {
    ldmatrix_x4(reinterpret_cast<u32(&)[4]>(params.out[4 * lane_index()]),
                shared_address(shared_array<u8>()) + CF_SHARED_BYTES);
}

KERNEL(32, 1) void matrix_misaligned(PARAMS(OutParams) params) {
    ldmatrix_x4(reinterpret_cast<u32(&)[4]>(params.out[4 * lane_index()]), shared_address(shared_array<u8>() + 8));
}

KERNEL(32, 1) void copy_misaligned(PARAMS(OutParams) params) {
    copy_async<16>(shared_array<u8>(), params.out + 1, true);
}

KERNEL(32, 1) void global_pointer_as_shared(PARAMS(OutParams) params) { params.out[0] = shared_address(params.out); }

KERNEL(kThreads, 1) void write_beyond_the_end(PARAMS(OutParams) params) {
    params.out[thread_index() + 1] = 0;  // line that AddressSanitizer has to name
}
