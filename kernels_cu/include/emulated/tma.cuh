// The tensor memory accelerator: boxes of tensors, copied asynchronously. What lies outside is read as 0 and not written.
// Contracts of the functions: ptx/tma.cuh.
#pragma once
#include "platform/mbarrier.cuh"
#include "platform/reduce.cuh"
#include "platform/types.cuh"

/// What HostRuntime.tensor_map packs, checked there: a tensor of four dimensions and the box of it that a copy moves.
struct alignas(64) TensorMap {
    u8* address;
    u64 sizes[4];
    u64 strides[3];  // bytes, of dimensions 1 to 3
    u32 box[4];
    u32 element_bytes;
    u32 swizzle;  // 128: chunks of 16 bytes are permuted within 1,024 bytes of shared memory; 0: they are not
};
static_assert(sizeof(TensorMap) == 128);

namespace emulated {

constexpr u32 kMaxRowBytes = 256 * 8;

/// The 128-byte swizzle, on absolute addresses: the chunk of a 128-byte row is exclusive-ored with the row modulo 8.
inline SharedAddress swizzled(SharedAddress address) { return address ^ (address >> 7 & 7) << 4; }

/// A box of a tensor and its place in shared memory.
struct Box {
    const TensorMap& map;
    SharedAddress shared;
    i32 first[4];  // coordinates
    const char* who;

    u32 rows() const { return map.box[1] * map.box[2] * map.box[3]; }
    u32 row_bytes() const { return map.box[0] * map.element_bytes; }

    const Box& checked() const {
        const u32 alignment = map.swizzle ? 1024 : 128;
        if (reinterpret_cast<u64>(&map) % 64 != 0)
            fail("%s: the tensor map at %p is not aligned to 64 bytes", who, static_cast<const void*>(&map));
        if (shared % alignment != 0)
            fail("%s: shared offset %u is not aligned to %u bytes", who, shared - kSharedBase, alignment);
        return *this;
    }

    /// The part of row n that lies inside the tensor: `bytes` bytes at `global`, the row's from `skipped` on.
    struct Inside {
        u8* global;
        u64 skipped, bytes;
    };
    Inside inside(u32 n) const {
        const i64 place[3] = {n % map.box[1], n / map.box[1] % map.box[2], n / map.box[1] / map.box[2]};
        const i64 size = static_cast<i64>(map.sizes[0]), box_end = i64{first[0]} + map.box[0];
        const i64 begin = first[0] > 0 ? first[0] : 0, end = box_end < size ? box_end : size;
        bool any = begin < end;
        i64 offset = begin * map.element_bytes;
        for (u32 d = 0; d < 3; ++d) {
            const i64 c = first[d + 1] + place[d];
            any = any && c >= 0 && c < static_cast<i64>(map.sizes[d + 1]);
            offset += c * static_cast<i64>(map.strides[d]);
        }
        if (!any)
            return {nullptr, 0, 0};
        return {map.address + offset, static_cast<u64>(begin - first[0]) * map.element_bytes,
                static_cast<u64>(end - begin) * map.element_bytes};
    }

    SharedAddress chunk(u32 n, u32 byte) const {
        const SharedAddress linear = shared + n * row_bytes() + byte;
        return map.swizzle ? swizzled(linear) : linear;
    }

    void load(Barrier& barrier) const {
        for (u32 n = 0; n < rows(); ++n) {
            u8 row[kMaxRowBytes] = {};
            if (const Inside part = inside(n); part.bytes != 0)
                __builtin_memcpy(row + part.skipped, part.global, part.bytes);
            for (u32 byte = 0; byte < row_bytes(); byte += 16)
                async_write(chunk(n, byte), row + byte, 16, who);
        }
        complete_bytes(barrier, rows() * row_bytes(), who);
    }

    void read(u8* data) const {
        for (u32 n = 0; n < rows(); ++n)
            for (u32 byte = 0; byte < row_bytes(); byte += 16)
                __builtin_memcpy(data + n * row_bytes() + byte, async_read(chunk(n, byte), 16, who), 16);
    }

    void write(const u8* data) const {
        for (u32 n = 0; n < rows(); ++n)
            if (const Inside part = inside(n); part.bytes != 0)
                __builtin_memcpy(part.global, data + n * row_bytes() + part.skipped, part.bytes);
    }
};

/// What a store has read from shared memory and not yet written, while somebody may still ask for it.
class Store {
    struct Shared {
        u32 users;
        bool has_read;
        u8* data;
    };
    Shared* shared;

  public:
    explicit Store(u32 bytes) : shared(new Shared{1, false, new u8[bytes]}) {}
    Store(const Store& other) : shared(other.shared) { ++shared->users; }
    Store& operator=(const Store&) = delete;
    ~Store() {
        if (--shared->users != 0)
            return;
        delete[] shared->data;
        delete shared;
    }

    /// What was read, now or before.
    template <typename Read>
    const u8* data(Read read) const {
        if (!shared->has_read)
            read(shared->data);
        shared->has_read = true;
        return shared->data;
    }
};

/// Starts read(data) of shared memory, and at some time after that write(data) of global memory.
template <typename Read, typename Write>
void start_store(u32 bytes, const char* who, Read read, Write write) {
    check_published_global(who);
    trace("store", bytes);
    const Store store(bytes);
    start(Unit::kStores, work([=] { store.data(read); }));
    start(Unit::kWrites, work([=] { write(store.data(read)); }));
}

inline Box checked_load(void* shared, const TensorMap& map, Barrier& barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
    const u8* seen = async_view(shared_address(&checked(barrier, "tma_load")), 8, "tma_load");
    if (reinterpret_cast<const Barrier*>(seen)->mark != kMark)
        fail("tma_load: no barrier_init_fence since barrier_init");
    return Box{map, shared_address(shared), {c0, c1, c2, c3}, "tma_load"}.checked();
}

/// Starts copying 16 bytes at a time: copy(target, 4 floats).
template <typename Copy>
void bulk(float* global, const void* shared, u32 bytes, const char* who, Copy copy) {
    if (reinterpret_cast<u64>(global) % 16 != 0 || bytes % 16 != 0)
        fail("%s: %u bytes at %p: both must be multiples of 16", who, bytes, static_cast<const void*>(global));
    const SharedAddress from = shared_address(shared);
    auto read = [=](u8* data) {
        for (u32 n = 0; n < bytes; n += 16)
            __builtin_memcpy(data + n, async_read(from + n, 16, who), 16);
    };
    start_store(bytes, who, read, [=](const u8* data) {
        for (u32 n = 0; n < bytes; n += 16)
            copy(global + n / 4, reinterpret_cast<const float*>(data + n));
    });
}

}  // namespace emulated

DEVICE void tensor_map_prefetch(const TensorMap&) {}

/// Global memory is read when the bytes land.
DEVICE void tma_load(void* shared, const TensorMap& map, Barrier& barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
    using namespace emulated;
    const Box box = checked_load(shared, map, barrier, c0, c1, c2, c3);
    trace("load", box.rows() * box.row_bytes(), reinterpret_cast<u64>(&barrier));
    start(Unit::kLoads, work([box, &barrier] { box.load(barrier); }));
}

/// They land in one block after the other.
template <u32 kBlocks>
DEVICE void tma_load_to_all(void* shared, const TensorMap& map, Barrier& barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
    using namespace emulated;
    const Box box = checked_load(shared, map, barrier, c0, c1, c2, c3);
    for (u32 n = 0; n < kBlocks; ++n)
        start(Unit::kLoads, work([box, n, at = shared_address(&barrier)] {
                  const Visit block(n, box.who);
                  box.load(barrier_at(at, box.who));
              }));
}

DEVICE void tma_store(const TensorMap& map, const void* shared, i32 c0, i32 c1, i32 c2, i32 c3) {
    using namespace emulated;
    const Box box = Box{map, shared_address(shared), {c0, c1, c2, c3}, "tma_store"}.checked();
    start_store(
        box.rows() * box.row_bytes(), box.who, [box](u8* data) { box.read(data); },
        [box](const u8* data) { box.write(data); });
}

DEVICE void bulk_reduce_add(float* global, const void* shared, u32 bytes) {
    emulated::bulk(global, shared, bytes, "bulk_reduce_add", [](float* target, const float* x) {
        for (u32 n = 0; n < 4; ++n)
            emulated::atomic_add(target + n, x[n]);
    });
}

DEVICE void bulk_store(float* global, const void* shared, u32 bytes) {
    emulated::bulk(global, shared, bytes, "bulk_store",
                   [](float* target, const float* x) { __builtin_memcpy(target, x, 16); });
}

DEVICE void bulk_commit() {
    emulated::trace("store commit");
    emulated::commit(emulated::Unit::kStores);
    emulated::commit(emulated::Unit::kWrites);
}

template <u32 kPending>
DEVICE void bulk_wait_read() {
    emulated::trace("store wait", kPending);
    emulated::wait(emulated::Unit::kStores, kPending);
}

template <u32 kPending>
DEVICE void bulk_wait() {
    bulk_wait_read<kPending>();
    emulated::wait(emulated::Unit::kWrites, kPending);
}

DEVICE void fence_async_global() { emulated::publish_global(); }

/// Other threads' writes are published too: who wrote what is not known.
DEVICE void fence_async_shared() { emulated::publish_shared(); }
