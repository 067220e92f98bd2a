// wgmma: D (64 x N, float32) = or += A (64 x 16) B (16 x N), 16-bit elements, one warpgroup, asynchronous. B, and A unless
// it is in registers, lie in shared memory. PTX ISA: wgmma.mma_async.
// With warp w of the warpgroup, g = lane / 4 and t = lane % 4 a lane holds
//   D: d[4j], d[4j+1] = (16w + g, 8j + 2t), (.., 8j + 2t + 1);  d[4j+2], d[4j+3] = the same columns of row 16w + g + 8
//   A in registers, as for mma.sync: a[0] = (g, 2t..2t+1), a[1] = (g+8, same), a[2] = (g, 2t+8..), a[3] = (g+8, 2t+8..)
// Registers of D and A must not be touched between wgmma_fence and the wait that covers the products.
#pragma once
#include "platform/types.cuh"

/// An operand without a swizzle, rows along K: units of eight rows of 16 bytes, one after the other. `leading` = bytes between
/// units along K, `stride` = bytes between groups of eight rows; either may be 0, for the same again.
DEVICE u64 plain_descriptor(SharedAddress address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffffu) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32;
}

/// Where an operand lies: panels of 64 columns (128 bytes a row) with the 128-byte swizzle, each 1,024-byte aligned; `address`
/// may point to a 32-byte step inside the first 128 bytes.
/// Rows along K (K-major): `stride` = bytes between groups of eight rows (1,024); `leading` is not used.
/// Columns along K (MN-major, "transposed"): `stride` = bytes between groups of eight rows, `leading` between panels.
DEVICE u64 matrix_descriptor(SharedAddress address, u32 leading, u32 stride) {
    constexpr u64 kSwizzle128 = 1;
    return plain_descriptor(address, leading, stride) | kSwizzle128 << 62;
}

/// Before the first product after registers of A or D were written.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes the group of all products since the last commit.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most kPending groups are under way.
template <u32 kPending>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Tells the compiler that products under way write these registers up to here: no use of them moves above this line.
template <u32 kCount>
DEVICE void wgmma_settle(float (&d)[kCount]) {
#pragma unroll
    for (u32 n = 0; n < kCount; ++n)
        asm volatile("" : "+f"(d[n])::"memory");
}

/// The two forms of the instruction for one element type and one N.
template <typename T, u32 kN>
struct Wgmma;

// An instruction names each of its N / 2 accumulators; the operands after those are numbered from N / 2 on.

#define CF_D_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CF_D_32 CF_D_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CF_D_48 CF_D_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CF_D_64 CF_D_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CF_D_80 CF_D_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CF_D_96 CF_D_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CF_D_112 CF_D_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CF_D_128 CF_D_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CF_D_144 CF_D_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CF_D_160 CF_D_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CF_D_176 CF_D_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CF_D_192 CF_D_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CF_D_208 CF_D_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CF_D_224 CF_D_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CF_D_240 CF_D_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CF_D_256 CF_D_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CF_OUT_8(i)                                                                                             \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define CF_OUT_16 CF_OUT_8(0)
#define CF_OUT_32 CF_OUT_16, CF_OUT_8(8)
#define CF_OUT_48 CF_OUT_32, CF_OUT_8(16)
#define CF_OUT_64 CF_OUT_48, CF_OUT_8(24)
#define CF_OUT_80 CF_OUT_64, CF_OUT_8(32)
#define CF_OUT_96 CF_OUT_80, CF_OUT_8(40)
#define CF_OUT_112 CF_OUT_96, CF_OUT_8(48)
#define CF_OUT_128 CF_OUT_112, CF_OUT_8(56)
#define CF_OUT_144 CF_OUT_128, CF_OUT_8(64)
#define CF_OUT_160 CF_OUT_144, CF_OUT_8(72)
#define CF_OUT_176 CF_OUT_160, CF_OUT_8(80)
#define CF_OUT_192 CF_OUT_176, CF_OUT_8(88)
#define CF_OUT_208 CF_OUT_192, CF_OUT_8(96)
#define CF_OUT_224 CF_OUT_208, CF_OUT_8(104)
#define CF_OUT_240 CF_OUT_224, CF_OUT_8(112)
#define CF_OUT_256 CF_OUT_240, CF_OUT_8(120)

#define CF_WGMMA_OF(T, TYPE, N, o0, o1, o2, o3, o4, o5, o6)                                                          \
    template <>                                                                                                      \
    struct Wgmma<T, N> {                                                                                             \
        /* A and B by descriptors. kAccumulate: D +=, else D =. */                                                   \
        template <bool kAccumulate, bool kTransposedA = false, bool kTransposedB = false>                            \
        DEVICE static void shared(float (&d)[N / 2], u64 a, u64 b) {                                                 \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" CF_D_##N               \
                         "}, " o0 ", " o1 ", " o2 ", 1, 1, " o3 ", " o4 ";"                                          \
                         : CF_OUT_##N                                                                                \
                         : "l"(a), "l"(b), "n"(kAccumulate), "n"(kTransposedA), "n"(kTransposedB));                  \
        }                                                                                                            \
        /* A in registers, B by descriptor. */                                                                       \
        template <bool kAccumulate, bool kTransposedB = false>                                                       \
        DEVICE static void registers(float (&d)[N / 2], const u32* a, u64 b) {                                       \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" CF_D_##N               \
                         "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", " o5 ", 1, 1, " o6 ";"                        \
                         : CF_OUT_##N                                                                                \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate), "n"(kTransposedB)); \
        }                                                                                                            \
    };
#define CF_WGMMA(N, ...)                        \
    CF_WGMMA_OF(Float16, "f16", N, __VA_ARGS__) \
    CF_WGMMA_OF(BFloat16, "bf16", N, __VA_ARGS__)

CF_WGMMA(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
CF_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
CF_WGMMA(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
CF_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
CF_WGMMA(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
CF_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
CF_WGMMA(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
CF_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
CF_WGMMA(144, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
CF_WGMMA(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
CF_WGMMA(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
CF_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
CF_WGMMA(208, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
CF_WGMMA(224, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
CF_WGMMA(240, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
CF_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
