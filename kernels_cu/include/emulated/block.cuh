// What a thread of the emulated block can do: ask who it is, and meet others. The bodies are in launch.cu.
//
// A warp collective is a rendezvous: every lane leaves the address of its operands, the last one to arrive computes the
// result for all 32, then all go on. The operands live on the lanes' stacks, which stand still in the meantime.
#pragma once
#include "platform/trace.cuh"
#include "platform/types.cuh"

namespace emulated {

constexpr u32 kLanes = 32;
constexpr u32 kWarpgroup = 4 * kLanes;

u32 thread_index();
u32 block_index();
u32 block_threads();
u32 grid_size();

/// `lane[l]` is what lane l passed to the rendezvous.
using WarpOperation = void (*)(void* const* lane);

/// Meets the 31 other lanes of this warp; the last to arrive calls `operation` (if any). `name` is the collective, for
/// error messages: lanes that meet under different names are an error.
void meet_warp(const char* name, void* operands, WarpOperation operation);

/// Meets all threads of the block that have not returned; true when any of them passed true.
bool meet_block(const char* name, bool predicate);

/// Meets all threads of all blocks of the cluster.
void meet_cluster();
/// 1 unless the kernel says otherwise, in cluster.cuh: launch.cu is the same for all kernels.
u32 cluster_blocks();
/// While it lives, what this thread does is done in block `rank` of its cluster. It must not wait meanwhile.
struct Visit {
    Visit(u32 rank, const char* who);
    ~Visit();
    Visit(const Visit&) = delete;
};

/// The calling thread waits until somebody wakes `object`. `describe` is for the report of a deadlock: it writes what
/// the thread waits for, after "at ".
using Describe = void (*)(const void* object, u32 detail, char* text, u64 bytes);
void wait_for(const void* object, u32 detail, Describe describe);
void wake(const void* object);
/// Others may run before the calling thread goes on.
void give_way();
/// The same for a thread that waits for what another block does, and asks again when it goes on.
void poll();
/// How often it asks. Other blocks may be held up by whatever else the machine does.
u32 patience();
/// Other blocks may get ahead of the calling thread's, at random, if they run at the same time.
void lag();

/// What another unit than the thread does, at some moment between its start and the wait that covers it (launch:
/// copy_mode). It reads its operands at that moment, so that whoever touches them too early spoils the result.
struct Work {
    virtual ~Work() {}
    virtual void perform() = 0;
};

/// A function as work.
template <typename Function>
Work* work(Function function) {
    struct Call : Work {
        Function function;
        explicit Call(Function function_) : function(function_) {}
        void perform() override { function(); }
    };
    return new Call(function);
}

/// Copies and stores belong to a thread, products to a warp, which performs them in order: all are waited for by groups. A
/// store is two works, one that reads shared memory and one that writes global memory; the last moment for that is when the
/// thread ends. Loads belong to the block and tell a barrier; the last moment for them is when no thread can run.
enum class Unit : u32 { kCopies, kStores, kProducts, kLoads, kWrites };
void start(Unit unit, Work* work);  // takes ownership
void commit(Unit unit);
void wait(Unit unit, u32 pending);

/// What the warps of a warpgroup must agree on, product by product.
struct Signature {
    u64 a, b, shape;
};
/// The warp's start, wait and fence of products, which need a fence after every wait and a commit before it.
void start_product(Work* work, const Signature& signature);
void wait_products(u32 pending);
void fence_products();

/// The asynchronous proxy reads shared memory as it was at the last publish_shared, but for what it wrote itself. Where
/// threads have written since, either value may be read: that is an error.
const u8* async_read(SharedAddress address, u32 bytes, const char* who);
void async_write(SharedAddress address, const u8* data, u32 bytes, const char* who);
void publish_shared();
/// That view, without the check.
const u8* async_view(SharedAddress address, u32 bytes, const char* who);

/// The calling thread has seen what others did in global memory. The asynchronous proxy sees it after publish_global; what
/// the thread starts there before is an error.
void acquire_global();
void publish_global();
void check_published_global(const char* who);

/// What the block has one of; zero when it starts.
struct NamedBarrier {
    u32 threads, arrived;
};
struct BlockState {
    NamedBarrier named[16];
    u32 registers[1024];  // of a thread, once it has changed their number
    u32 registers_free;   // given back by threads
};
BlockState& block_state();

}  // namespace emulated
