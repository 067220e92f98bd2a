// Small kernels about Hopper's asynchronous units. Run by test_emulated_hopper.py, which also plants faults in them:
// FAULT(x) marks, by name, a line that a test leaves out.
#include "platform/atomic.cuh"
#include "platform/cluster.cuh"
#include "platform/convert.cuh"
#include "platform/mbarrier.cuh"
#include "platform/stmatrix.cuh"
#include "platform/thread.cuh"
#include "platform/tma.cuh"
#include "platform/types.cuh"
#include "platform/warpgroup.cuh"
#include "platform/wgmma.cuh"

#if defined(CF_BFLOAT)
using Element = BFloat16;
#else
using Element = Float16;
#endif

constexpr u32 kPanel = 64;        // columns of a panel: 128 bytes
constexpr u32 kRows = 64;         // of A
constexpr u32 kDepth = CF_DEPTH;  // K of one stage
constexpr u32 kN = CF_N;
constexpr u32 kStages = 2;
constexpr bool kTransposedA = CF_TRANSPOSED_A, kTransposedB = CF_TRANSPOSED_B;
constexpr bool kRegistersA = CF_REGISTERS_A;

/// An operand with `rows` rows (or columns, transposed) and kDepth of K: panels of 64 of the inner dimension.
constexpr u32 inner(bool transposed, u32 rows) { return transposed ? rows : kDepth; }
constexpr u32 outer(bool transposed, u32 rows) { return transposed ? kDepth : rows; }
constexpr u32 panels(bool transposed, u32 rows) { return (inner(transposed, rows) + kPanel - 1) / kPanel; }
constexpr u32 panel_bytes(bool transposed, u32 rows) { return (outer(transposed, rows) * 128 + 1023) / 1024 * 1024; }

struct SharedStorage {
    alignas(1024) u8 A[kStages][panels(kTransposedA, kRows)][panel_bytes(kTransposedA, kRows)];
    alignas(1024) u8 B[kStages][panels(kTransposedB, kN)][panel_bytes(kTransposedB, kN)];
    alignas(1024) float D[kRows][kN];
    Barrier full[kStages], empty[kStages];
};

struct ProductParams {
    TensorMap A, B;              // boxes of one panel
    const Element* registers_A;  // 64 x K, for A in registers
    float* D;                    // 64 x kN, to which the product is added
    i32 blocks;                  // K = blocks * kDepth
};

template <bool kTransposed, u32 kCount, u32 kPanels, u32 kPanelBytes>
DEVICE void load_operand(u8 (&shared)[kPanels][kPanelBytes], const TensorMap& map, Barrier& barrier, i32 block) {
    for (u32 p = 0; p < kPanels; ++p) {
        const i32 inner_at = p * kPanel, at = block * kDepth;
        tma_load(shared[p], map, barrier, inner_at + (kTransposed ? 0 : at), kTransposed ? at : 0, 0, 0);
    }
}

DEVICE void produce(const ProductParams& params, SharedStorage& shared) {
    for (i32 j = 0; j < params.blocks; ++j) {
        const u32 stage = j % kStages, parity = j / kStages % 2;
        barrier_wait(shared.empty[stage], parity ^ 1);  // FAULT(empty)
        constexpr u32 kBytes = outer(kTransposedB, kN) * 128 * panels(kTransposedB, kN) +
                               (kRegistersA ? 0 : outer(kTransposedA, kRows) * 128 * panels(kTransposedA, kRows));
        barrier_arrive_expect(shared.full[stage], kBytes + CF_MORE_BYTES);
        if (!kRegistersA)
            load_operand<kTransposedA, kRows>(shared.A[stage], params.A, shared.full[stage], j);
        load_operand<kTransposedB, kN>(shared.B[stage], params.B, shared.full[stage], j);
    }
}

/// Descriptor of the 16 of K from k on.
template <bool kTransposed, u32 kPanels, u32 kPanelBytes>
DEVICE u64 step(const u8 (&shared)[kPanels][kPanelBytes], u32 k) {
    const SharedAddress address = shared_address(shared[0]);
    return kTransposed ? matrix_descriptor(address + k * 128, kPanelBytes, 1024)
                       : matrix_descriptor(address + k / kPanel * kPanelBytes + k % kPanel * 2, 0, 1024);
}

DEVICE void consume(const ProductParams& params, SharedStorage& shared) {
    const u32 row = thread_index() % 128 / 32 * 16 + lane_index() / 4, column = 2 * (lane_index() % 4);
    auto target = [&](u32 n) { return params.D + (row + 8 * (n / 2 % 2)) * kN + 8 * (n / 4) + column + n % 2; };
    float d[kN / 2];
    for (u32 n = 0; n < kN / 2; ++n)
        d[n] = *target(n);
    for (i32 j = 0; j < params.blocks; ++j) {
        const u32 stage = j % kStages, parity = j / kStages % 2;
        u32 a[kDepth / 16][4];
        for (u32 k = 0; k < kDepth && kRegistersA; k += 16)
            for (u32 n = 0; n < 4; ++n) {
                const Element* two = params.registers_A + (row + 8 * (n % 2)) * (params.blocks * kDepth) + j * kDepth +
                                     k + 8 * (n / 2) + column;
                a[k / 16][n] = two[0].bits | static_cast<u32>(two[1].bits) << 16;
            }
        barrier_wait(shared.full[stage], parity ^ CF_WRONG_PARITY);  // FAULT(full)
        wgmma_fence();                                               // FAULT(fence)
        for (u32 k = 0; k < kDepth; k += 16) {
            const u64 b = step<kTransposedB>(shared.B[stage], k);
            if constexpr (kRegistersA)
                Wgmma<Element, kN>::template registers<true, kTransposedB>(d, a[k / 16], b);
            else
                Wgmma<Element, kN>::template shared<true, kTransposedA, kTransposedB>(
                    d, step<kTransposedA>(shared.A[stage], k), b);
        }
        wgmma_commit();  // FAULT(commit)
#if defined(CF_RELEASE_EARLY)
        barrier_arrive(shared.empty[stage]);
        wgmma_wait<0>();
#else
        wgmma_wait<0>();                      // FAULT(wait)
        barrier_arrive(shared.empty[stage]);  // FAULT(release)
#endif
        wgmma_settle(d);
    }
    for (u32 n = 0; n < kN / 2; ++n)
        *target(n) = d[n];
}

KERNEL(256, 1) void multiply(PARAMS(ProductParams) params) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    if (thread_index() == 0) {
        for (u32 n = 0; n < kStages; ++n) {
            barrier_init(shared.full[n], 1);
            barrier_init(shared.empty[n], 128);
        }
        barrier_init_fence();  // FAULT(init)
    }
    block_sync();  // FAULT(sync)
    if (warpgroup_index() == 1) {
        registers_release<56>();
        if (thread_index() == 128)
            produce(params, shared);
    } else {
        registers_acquire<256>();
        consume(params, shared);
    }
}

// ---- Boxes, stores and reductions.

struct BoxParams {
    TensorMap from, to;
    float* sums;  // 32
    i32 at[4], to_at[4];
};

struct BoxStorage {
    alignas(1024) u8 box[8192];
    alignas(16) float addends[32];
    Barrier full, empty, told;
    volatile i32 place;
};

DEVICE BoxStorage& box_storage() { return *reinterpret_cast<BoxStorage*>(shared_storage<SharedStorage>().A); }

/// Loads a box, stores it elsewhere, and adds the lanes' indices to the sums, twice with two sources.
KERNEL(32, 1) void move_box(PARAMS(BoxParams) params) {
    BoxStorage& shared = box_storage();
    if (lane_index() == 0) {
        barrier_init(shared.full, 1);
        barrier_init_fence();
        tensor_map_prefetch(params.from);
        barrier_arrive_expect(shared.full, CF_BOX_BYTES);
        tma_load(shared.box, params.from, shared.full, params.at[0], params.at[1], params.at[2], params.at[3]);
    }
    warp_sync();
    barrier_wait(shared.full, 0);  // FAULT(box_full)
    if (lane_index() == 0) {
        tma_store(params.to, shared.box, params.to_at[0], params.to_at[1], params.to_at[2], params.to_at[3]);
        bulk_commit();
    }
    for (u32 n = 0; n < 2; ++n) {
        shared.addends[lane_index()] = lane_index() + n;
        fence_async_shared();  // FAULT(async_fence)
        warp_sync();           // FAULT(addends)
        if (lane_index() == 0) {
            bulk_reduce_add(params.sums, shared.addends, sizeof shared.addends);
            bulk_commit();        // FAULT(bulk_commit)
            bulk_wait_read<0>();  // FAULT(bulk_wait)
        }
        warp_sync();
    }
}

/// The box as it lies in shared memory.
KERNEL(32, 1) void show_box(PARAMS(BoxParams) params) {
    BoxStorage& shared = box_storage();
    if (lane_index() != 0)
        return;
    barrier_init(shared.full, 1);
    barrier_init_fence();
    barrier_arrive_expect(shared.full, CF_BOX_BYTES);
    tma_load(shared.box, params.from, shared.full, params.at[0], params.at[1], params.at[2], params.at[3]);
    barrier_wait(shared.full, 0);
    for (u32 n = 0; n < CF_BOX_BYTES / 4; ++n)
        params.sums[n] = reinterpret_cast<float*>(shared.box)[n];
}

// ---- Blocks that wait for one another.

struct RelayParams {
    float *addends, *sums;  // 32 per block; 32
    u32* counter;           // blocks that are done
};

/// Adds the blocks' numbers one after the other, in the order of the blocks; the first stores its own.
KERNEL(32, 1) void relay(PARAMS(RelayParams) params) {
    BoxStorage& shared = box_storage();
    shared.addends[lane_index()] = params.addends[32 * block_index() + lane_index()];
    fence_async_shared();  // FAULT(relay_fence)
    warp_sync();
    if (lane_index() != 0)
        return;
    spin_until(params.counter, [](u32 done) { return done == block_index(); });  // FAULT(relay_wait)
    fence_async_global();                                                        // FAULT(relay_seen)
    if (block_index() == 0)
        bulk_store(params.sums, shared.addends, sizeof shared.addends);
    else
        bulk_reduce_add(params.sums, shared.addends, sizeof shared.addends);
    bulk_commit();
    bulk_wait_read<0>();
    bulk_wait<0>();                  // FAULT(relay_done)
    release_add(params.counter, 1);  // FAULT(relay_told)
}

struct PollParams {
    TensorMap from;  // a box of 32 float
    u32* counter;
};

/// The first warp tells the second that a box has landed, and the second the third; those who poll run all the while.
KERNEL(96, 1) void poll(PARAMS(PollParams) params) {
    BoxStorage& shared = box_storage();
    if (thread_index() == 0) {
        barrier_init(shared.full, 1);
        barrier_init_fence();
        barrier_arrive_expect(shared.full, 128);
        tma_load(shared.box, params.from, shared.full, 0, 0, 0, 0);
    }
    block_sync();
    const u32 place = warp_index() == CF_POLL_LAST ? 2 : warp_index() == (CF_POLL_LAST + 1) % 3 ? 0 : 1;
    if (place == 0)
        barrier_wait(shared.full, 0);
    else if (lane_index() == 0)
        spin_until(params.counter, [=](u32 told) { return told == place; });
    warp_sync();
    if (lane_index() == 0)
        release_add(params.counter, 1);
}

// ---- Clusters.

struct ShareParams {
    TensorMap from;  // boxes of 8 x 32 float
    float* shown;    // of each block and round two boxes, as they lie in shared memory
};

/// Blocks of a cluster load a box each, for both of them, from the place that the first one tells; twice.
KERNEL(64, 1) CLUSTERED void share(PARAMS(ShareParams) params) {
    constexpr u32 kBytes = 1024;
    BoxStorage& shared = box_storage();
    const u32 rank = cluster_rank();
    if (thread_index() == 0) {
        barrier_init(shared.full, 1);
        barrier_init(shared.empty, CF_CLUSTER * 2);
        barrier_init(shared.told, 1);
        barrier_init_fence();
    }
    cluster_sync();  // FAULT(share_start)
    for (u32 round = 0; round < 2; ++round) {
        if (thread_index() == 0) {
            if (rank == 0)
                for (u32 other = 0; other < CF_CLUSTER; ++other) {
                    cluster_store(shared.place, other, 8 * CF_CLUSTER * static_cast<i32>(round + 1));
                    cluster_fence();
                    barrier_arrive_at(shared.told, other);
                }
            barrier_wait(shared.told, round);  // FAULT(share_told)
            cluster_fence();
            const i32 place = shared.place + 8 * static_cast<i32>(rank);
            barrier_wait(shared.empty, round + 1 & 1);  // FAULT(share_empty)
            barrier_arrive_expect(shared.full, CF_CLUSTER * kBytes);
            tma_load_to_all<CF_CLUSTER>(shared.box + kBytes * rank, params.from, shared.full, 0, place, 0, 0);
        }
        barrier_wait(shared.full, round);  // FAULT(share_full)
        const u32 first = (2 * block_index() + round) * CF_CLUSTER * kBytes / 4;
        for (u32 n = thread_index(); n < CF_CLUSTER * kBytes / 4; n += 64)
            params.shown[first + n] = reinterpret_cast<float*>(shared.box)[n];
        warp_sync();
        if (lane_index() < CF_CLUSTER) {
            barrier_arrive_at(shared.empty, lane_index());  // FAULT(share_release)
        }
    }
    cluster_sync();  // FAULT(share_end)
}

/// The first block arrives at a barrier of the second, which does not wait for it.
KERNEL(32, 1) CLUSTERED void leave_alone(PARAMS(ShareParams)) {
    BoxStorage& shared = box_storage();
    if (lane_index() == 0)
        barrier_init(shared.full, 1);
    cluster_sync();
    if (cluster_rank() == 0 && lane_index() == 0)
        barrier_arrive_at(shared.full, 1);
}

/// A thread that ends where others of the cluster wait for it.
KERNEL(32, 1) CLUSTERED void one_thread_less(PARAMS(ShareParams)) {
    if (cluster_rank() == 0 || lane_index() != 7)
        cluster_sync();
}

KERNEL(32, 1) CLUSTERED void no_such_block(PARAMS(ShareParams)) {
    if (lane_index() == 0)
        barrier_arrive_at(box_storage().full, CF_CLUSTER);
}

/// stmatrix takes addresses of any block.
KERNEL(32, 1) CLUSTERED void place_of_the_first_block(PARAMS(ShareParams)) {
    const u32 r[4] = {};
    auto& row = box_storage().box[16 * lane_index()];
    stmatrix_x4(own_address(&row), r);
    stmatrix_x4(shared_address(&row), r);
}

// ---- Named barriers, registers, and what is not allowed.

struct OutParams {
    u32* out;
};

/// The first warpgroup writes, the second reads, twice over one word per thread.
KERNEL(256, 1) void hand_over(PARAMS(OutParams) params) {
    u32* words = reinterpret_cast<u32*>(shared_storage<SharedStorage>().A);
    const u32 n = thread_index() % 128;
    for (u32 round = 0; round < 2; ++round) {
        if (warpgroup_index() == 0) {
            if (round == 1)
                named_sync(2, 256);  // FAULT(read)
            words[n] = n + 1000 * round;
            named_arrive(1, 256);  // FAULT(written)
        } else {
            named_sync(1, 256);  // FAULT(named_sync)
            params.out[128 * round + n] = words[127 - n];
            if (round == 0)
                named_arrive(2, 256);
        }
    }
}

KERNEL(256, 1) void wrong_count(PARAMS(OutParams)) { named_sync(1, warp_index() == 0 ? 64 : 256); }
KERNEL(256, 1) void wrong_barrier(PARAMS(OutParams)) { named_sync(16, 256); }
/// 168 registers per thread at the start: 24 and twice 256 are more than three times that.
KERNEL(384, 1) void too_many_registers(PARAMS(OutParams)) {
    if (warpgroup_index() == 0)
        registers_release<24>();
    else
        registers_acquire<256>();
}

KERNEL(128, 1) void one_warp_less(PARAMS(OutParams)) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    if (warp_index() == 3)
        return;
    float d[kN / 2];
    wgmma_fence();
    Wgmma<Element, kN>::template shared<false>(d, matrix_descriptor(shared_address(shared.A), 0, 1024),
                                               matrix_descriptor(shared_address(shared.B), 0, 1024));
    wgmma_commit();
    wgmma_wait<0>();
}

KERNEL(128, 1) void panel_misaligned(PARAMS(OutParams)) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    float d[kN / 2];
    wgmma_fence();
    Wgmma<Element, kN>::template shared<false>(d, matrix_descriptor(shared_address(shared.A) + 256, 0, 1024),
                                               matrix_descriptor(shared_address(shared.B), 0, 1024));
}

/// Small whole numbers, of which products are exact.
DEVICE float whole(u32 row, u32 column) { return static_cast<float>((3 * row + 5 * column) % 7); }

/// A B^T for 16 columns of both without a swizzle; of B rows are 8 columns, which stand for the other eight, too, and of A one
/// group of eight rows stands for all.
KERNEL(128, 1) void plain_operands(PARAMS(OutParams) params) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    Element(*A)[8][8] = reinterpret_cast<Element(*)[8][8]>(shared.A);  // [half of the columns][row][column]
    Element(*B)[8] = reinterpret_cast<Element(*)[8]>(shared.B);        // [row][column]
    const u32 thread = thread_index();
    A[thread / 64][thread / 8 % 8][thread % 8] =
        from_float<Element>(whole(thread / 8 % 8, thread / 64 * 8 + thread % 8));
    for (u32 n = thread; n < 8 * kN; n += 128)
        B[n / 8][n % 8] = from_float<Element>(whole(n / 8, n % 8));
    fence_async_shared();  // FAULT(plain_fence)
    block_sync();
    float d[kN / 2];
    wgmma_fence();
    Wgmma<Element, kN>::template shared<false>(d, plain_descriptor(shared_address(A), 128, 0),
                                               plain_descriptor(shared_address(B), 0, 128));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(d);
    const u32 row = thread / 32 * 16 + lane_index() / 4;
    for (u32 n = 0; n < kN / 2; ++n)
        params.out[(row + 8 * (n / 2 % 2)) * kN + 8 * (n / 4) + 2 * (lane_index() % 4) + n % 2] =
            static_cast<u32>(d[n]);
}

KERNEL(128, 1) void plain_along_rows(PARAMS(OutParams)) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    float d[kN / 2];
    wgmma_fence();
    Wgmma<Element, kN>::template shared<false, true>(d, plain_descriptor(shared_address(shared.A), 128, 0),
                                                     plain_descriptor(shared_address(shared.B), 0, 128));
}

KERNEL(32, 1) void one_arrival_too_many(PARAMS(OutParams)) {
    BoxStorage& shared = box_storage();
    if (lane_index() != 0)
        return;
    barrier_init(shared.full, 1);
    barrier_arrive_expect(shared.full, 16);
    barrier_arrive(shared.full);
}

KERNEL(32, 1) void written_without_fence(PARAMS(OutParams) params) {
    if (lane_index() != 0)
        return;
    box_storage().addends[0] = 1.0f;
    bulk_reduce_add(reinterpret_cast<float*>(params.out), box_storage().addends, 16);
    bulk_commit();
    bulk_wait<0>();
}

KERNEL(32, 1) void store_of_24_bytes(PARAMS(OutParams) params) {
    if (lane_index() == 0)
        bulk_store(reinterpret_cast<float*>(params.out), box_storage().addends, 24);
}
