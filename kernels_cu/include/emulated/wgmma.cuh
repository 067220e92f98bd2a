// wgmma: D (64 x N, float32) = or += A (64 x 16) B (16 x N), 16-bit elements, one warpgroup, asynchronous. What a lane
// holds, and contracts of the functions: ptx/wgmma.cuh.
//
// The warps of a warpgroup issue the same products, but as PTX has it only the lanes of a warp wait for one another. Every
// warp therefore does its 16 rows at a moment of its own: what one warp wrote and another reads needs a barrier.
#pragma once
#include "platform/block.cuh"
#include "platform/convert.cuh"
#include "platform/mma.cuh"
#include "platform/types.cuh"

DEVICE u64 plain_descriptor(SharedAddress address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffffu) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32;
}

DEVICE u64 matrix_descriptor(SharedAddress address, u32 leading, u32 stride) {
    constexpr u64 kSwizzle128 = 1;
    return plain_descriptor(address, leading, stride) | kSwizzle128 << 62;
}

namespace emulated {

/// A descriptor's fields, from the bits.
struct Operand {
    u32 address, leading, stride;
    bool transposed, plain;

    Operand(u64 bits, bool transposed_)
        : address((bits & 0x3fff) << 4),
          leading((bits >> 16 & 0x3fff) << 4),
          stride((bits >> 32 & 0x3fff) << 4),
          transposed(transposed_),
          plain(bits >> 62 == 0) {
        if (bits >> 62 > 1 || (bits >> 49 & 7) != 0)
            fail("wgmma: descriptor %#llx is of neither the 128-byte swizzle with base offset 0 nor none", bits);
        if (plain && transposed)
            fail("wgmma: an operand without a swizzle has its rows along K here, address %u", address);
        if (!plain && (address % 1024 >= 128 || stride % 1024 != 0 || (transposed && leading % 1024 != 0)))
            fail("wgmma: address %u, leading %u, stride %u: not panels aligned to 1024 bytes", address, leading,
                 stride);
    }

    /// Where a row's chunk of 16 bytes lies.
    u32 place(u32 row, u32 chunk) const {
        if (plain)
            return address + chunk * leading + row / 8 * stride + row % 8 * 16;
        const u32 at = address + chunk / 8 * leading + row / 8 * stride + row % 8 * 128 + chunk % 8 * 16;
        return at ^ (at >> 7 & 7) << 4;
    }

    /// Rows (of A) or columns (of B) `first` to first + kCount, all of K, as x[k][n].
    template <typename T, u32 kCount>
    void read(float (&x)[16][kCount], u32 first) const {
        const u32 rows = transposed ? 16 : kCount, chunks = transposed ? kCount / 8 : 2;
        for (u32 n = 0; n < rows; ++n)
            for (u32 m = 0; m < chunks; ++m) {
                const u32 row = transposed ? n : first + n, chunk = transposed ? first / 8 + m : m;
                T element[8];
                __builtin_memcpy(element, async_read(place(row, chunk), 16, "wgmma"), 16);
                for (u32 e = 0; e < 8; ++e)
                    x[transposed ? n : 8 * m + e][transposed ? 8 * m + e : n] = to_float(element[e]);
            }
    }
};

/// What every lane brings to a product.
struct WgmmaOperands {
    float* d;
    const u32* a;  // null: A is in shared memory
    u64 a_descriptor, b_descriptor;
    bool accumulate, transposed_a, transposed_b;

    Operand a_operand() const { return Operand(a_descriptor, transposed_a); }
    Operand b_operand() const { return Operand(b_descriptor, transposed_b); }
};

/// One warp's 16 rows of a product.
template <typename T, u32 kN>
struct Product : Work {
    WgmmaOperands own;
    float* d[kLanes];
    const u32* a[kLanes];
    u32 first_row;

    void perform() override {
        float A[16][16], B[16][kN];
        own.b_operand().template read<T, kN>(B, 0);
        if (own.a == nullptr)
            own.a_operand().template read<T, 16>(A, first_row);
        else
            read_a<T>(A, a);
        add_product(d, A, B, own.accumulate);
    }
};

template <typename T, u32 kN>
void issue_product(void* const* lane) {
    auto* product = new Product<T, kN>;
    const WgmmaOperands& own = product->own = *static_cast<WgmmaOperands*>(lane[0]);
    product->first_row = thread_index() % kWarpgroup / kLanes * 16;
    for (u32 l = 0; l < kLanes; ++l) {
        const WgmmaOperands& other = *static_cast<WgmmaOperands*>(lane[l]);
        product->d[l] = other.d;
        product->a[l] = other.a;
        if (other.a_descriptor != own.a_descriptor || other.b_descriptor != own.b_descriptor)
            fail("wgmma: lanes %u and 0 pass different descriptors", l);
    }
    own.b_operand();  // for its checks, while it is known who asks
    if (own.a == nullptr)
        own.a_operand();
    const u32 shape = kN << 3 | own.accumulate << 2 | own.transposed_a << 1 | u32{own.transposed_b};
    start_product(product, {own.a_descriptor, own.b_descriptor, shape});
}

template <typename T, u32 kN>
void multiply(WgmmaOperands operands) {
    static_assert(kN % 16 == 0 && kN >= 16 && kN <= 256);
    trace("wgmma", kN);
    meet_warp("wgmma", &operands, issue_product<T, kN>);
}

}  // namespace emulated

/// Asked for after every wgmma_wait.
DEVICE void wgmma_fence() {
    emulated::meet_warp("wgmma_fence", nullptr, [](void* const*) { emulated::fence_products(); });
}

DEVICE void wgmma_commit() {
    emulated::trace("wgmma commit");
    emulated::meet_warp("wgmma_commit", nullptr, [](void* const*) { emulated::commit(emulated::Unit::kProducts); });
}

template <u32 kPending>
DEVICE void wgmma_wait() {
    emulated::trace("wgmma wait", kPending);
    emulated::meet_warp("wgmma_wait", nullptr, [](void* const*) { emulated::wait_products(kPending); });
}

template <u32 kCount>
DEVICE void wgmma_settle(float (&)[kCount]) {}

template <typename T, u32 kN>
struct Wgmma {
    /// A and B by descriptors. kAccumulate: D +=, else D =.
    template <bool kAccumulate, bool kTransposedA = false, bool kTransposedB = false>
    static void shared(float (&d)[kN / 2], u64 a, u64 b) {
        emulated::multiply<T, kN>({d, nullptr, a, b, kAccumulate, kTransposedA, kTransposedB});
    }
    /// A in registers, B by descriptor.
    template <bool kAccumulate, bool kTransposedB = false>
    static void registers(float (&d)[kN / 2], const u32* a, u64 b) {
        emulated::multiply<T, kN>({d, a, 0, b, kAccumulate, false, kTransposedB});
    }
};
