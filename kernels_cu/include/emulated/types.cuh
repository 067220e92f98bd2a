// Element types, address types and the words that every kernel is written with. Host side: the twin of ptx/types.cuh.
// No standard header is included before the kernel (launch.cu is built apart), so that a kernel which leans on one
// does not compile here, as it would not under NVRTC.
#pragma once
#include "basic_types.cuh"

/// Not `static`: explicit specialisations may not have a storage class. The library is built with hidden symbols instead.
#define DEVICE inline
#define KERNEL(threads, blocks_per_sm) extern "C" __attribute__((visibility("default")))
/// The launcher calls a kernel with the address of its own copy of the struct.
#define PARAMS(Type) const Type&

/// The vector types that CUDA has built in.
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

// What the headers of this folder ask of the block that is running; launch.cu has the bodies.
namespace emulated {

/// Shared addresses start here, so that 0 is not one; it keeps the arena's alignment.
constexpr SharedAddress kSharedBase = 1024;

/// Ends the block, and with it the launch, with a message that names the calling thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

/// The block's shared memory, of which the caller wants the first `bytes`.
u8* shared_memory(u64 bytes);
/// How far into it a host address lies.
u32 shared_offset(const void* pointer);
/// Host address of `bytes` bytes at `address`; they must lie in shared memory and be aligned to their size.
u8* shared_pointer(SharedAddress address, u32 bytes, const char* who);

/// In a cluster some instructions take addresses of any of its blocks, and need the block's rank above these bits.
constexpr u32 kAddressBits = 24;
u32 cluster_rank();
/// shared_pointer for those that mean this block's.
u8* own_pointer(SharedAddress address, u32 bytes, const char* who);

}  // namespace emulated

DEVICE SharedAddress shared_address(const void* pointer) {
    return emulated::kSharedBase + emulated::shared_offset(pointer);
}

DEVICE SharedAddress own_address(const void* pointer) {
    return shared_address(pointer) | emulated::cluster_rank() << emulated::kAddressBits;
}

/// Where the block's shared memory begins. A macro, for it is another place in every host thread.
#define dynamic_shared_memory emulated::shared_memory(0)

/// The kernel's whole shared memory, seen as one struct. Its size is checked against the host's formula at compile time.
template <typename Storage>
DEVICE Storage& shared_storage() {
    static_assert(sizeof(Storage) == CF_SHARED_BYTES, "resources.py and SharedStorage disagree");
    return *reinterpret_cast<Storage*>(emulated::shared_memory(sizeof(Storage)));
}

DEVICE float bits_to_float(u32 bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

DEVICE u32 float_to_bits(float x) {
    u32 bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

DEVICE float infinity() { return __builtin_inff(); }
DEVICE float not_a_number() { return bits_to_float(0x7fffffffu); }
DEVICE bool is_finite(float x) { return (float_to_bits(x) & 0x7f800000u) != 0x7f800000u; }

/// x, of which the compiler no longer knows where it comes from. The host has no such need.
DEVICE u32 opaque(u32 x) { return x; }
DEVICE u64 opaque64(u64 x) { return x; }
