// Element types, address types and the words that every kernel is written with. CUDA side.
// NVRTC is given no headers at all, so that compiling needs no toolkit: the few types needed are named here.
#pragma once
#include "basic_types.cuh"

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks_per_sm) extern "C" __global__ __launch_bounds__(threads, blocks_per_sm)
#define PARAMS(Type) const __grid_constant__ Type

extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];

/// CF_SHARED_BASE: where dynamic shared memory begins, if the host knows. An address is then a constant plus an index; else
/// the compiler computes the base anew from a special register in every iteration of a loop that holds many registers.
DEVICE SharedAddress shared_address(const void* pointer) {
#ifdef CF_SHARED_BASE
    return CF_SHARED_BASE + static_cast<SharedAddress>(static_cast<const u8*>(pointer) - dynamic_shared_memory);
#else
    return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
#endif
}

/// Index of the block in its cluster.
DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/// In a cluster: where `pointer` points in the shared memory of its block `rank`. PTX ISA: mapa.
DEVICE SharedAddress address_in_block(const void* pointer, u32 rank) {
    SharedAddress address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
    return address;
}

/// An address for who may take one of any block: this block's.
DEVICE SharedAddress own_address(const void* pointer) {
#if CF_CLUSTER > 1
    return address_in_block(pointer, cluster_rank());
#else
    return shared_address(pointer);
#endif
}

/// The kernel's whole shared memory, seen as one struct. Its size is checked against the host's formula at compile time.
template <typename Storage>
DEVICE Storage& shared_storage() {
    static_assert(sizeof(Storage) == CF_SHARED_BYTES, "resources.py and SharedStorage disagree");
#ifdef CF_SHARED_BASE
    SharedAddress base = static_cast<SharedAddress>(__cvta_generic_to_shared(dynamic_shared_memory));
#if CF_CLUSTER > 1
    base &= 0xffffff;  // above them is the block's rank
#endif
    if (base != CF_SHARED_BASE)
        __trap();
#endif
    return *reinterpret_cast<Storage*>(dynamic_shared_memory);
}

DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 float_to_bits(float x) { return __float_as_uint(x); }
DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }
DEVICE bool is_finite(float x) { return (__float_as_int(x) & 0x7f800000) != 0x7f800000; }

/// x, of which the compiler no longer knows where it comes from. What a loop derives from it is computed in the loop and not
/// kept in registers across it; worth it where registers bind and the derivation is an instruction or two.
DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
DEVICE u64 opaque64(u64 x) {
    asm volatile("" : "+l"(x));
    return x;
}
