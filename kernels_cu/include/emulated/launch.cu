// The emulated device: runs a kernel for every block of a grid, one fiber per thread. A translation unit of its own, built
// once for all kernels, whose sight the standard headers below stay out of.
//
// Only one fiber of a block runs at a time, until it waits at a collective; which one is next is the scheduler's
// choice (Order). A fiber that waits is switched away from in a few nanoseconds, without a system call. The threads of
// a warp are fibers of their own: between collectives they do not move in step, as on any GPU since Volta.
#define CF_SHARED_BYTES 0  // of a kernel; there is none in this file
#include "platform/block.cuh"

#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated {

using Kernel = void (*)(const void* params);

/// Who runs first. kForward and kReverse let one end of the block run ahead as far as the barriers allow, which is the
/// hardest on missing ones; kRandom draws again at every switch.
enum class Order : u32 { kForward, kReverse, kRandom };
/// When an asynchronous copy lands.
enum class CopyMode : u32 { kAtIssue, kAtWait, kRandom };

/// How far the blocks of a launch are, all together.
struct Pace {
    std::atomic<u32> awake;     // host threads that do not hold their block back
    std::atomic<u64> steps{0};  // that threads have given way
};

/// As emulated.py packs it.
struct Launch {
    Kernel kernel;
    const void* params;
    u64 params_bytes, shared_bytes, seed;
    u32 grid, threads, workers;
    Order order;
    CopyMode copy_mode;
};

constexpr u32 kMaxThreads = 1024;
constexpr u64 kSharedAlignment = 1024;
// What memory holds that nobody has written (host.py fills workspaces with it too). NaN in every floating-point type, so
// that it shows in results, and no NaN that anybody else makes, so that reads of it can be reported.
constexpr u16 kPoison = 0xffd5;

// ---- Contexts: a stack and where it was left.

struct Context {
    ucontext_t start;  // on its stack
    bool started = true;
    void* left_at[5];  // after that
    void* stack = nullptr;
    u64 stack_bytes = 0;
    void* sanitizer_stack = nullptr;
};

/// Threads leave their last frames without returning from them; AddressSanitizer must not hold that against the next user.
void forget_frames([[maybe_unused]] void* stack, [[maybe_unused]] u64 bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, bytes);
#endif
}

/// Makes `context` start in `entry` on its stack when it is switched to, `offset` below the stack's end.
void prepare(Context& context, void (*entry)(), u64 offset) {
    forget_frames(context.stack, context.stack_bytes);
    getcontext(&context.start);
    context.start.uc_stack.ss_sp = context.stack;
    context.start.uc_stack.ss_size = context.stack_bytes - offset;
    makecontext(&context.start, entry, 0);
    context.started = false;
}

/// Not part of switch_context, because both ends of a jump may not be in one function. To AddressSanitizer, a jump would
/// leave frames for good.
[[noreturn]] __attribute__((noinline, no_sanitize_address)) void go_on(Context& context) {
    if (context.started)
        __builtin_longjmp(context.left_at, 1);
    context.started = true;
    setcontext(&context.start);
    std::abort();
}

/// `leaving`: `from` will not be continued. A jump and no swapcontext, which would ask the system for the signal mask.
void switch_context(Context& from, Context& to, [[maybe_unused]] bool leaving) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(leaving ? nullptr : &from.sanitizer_stack, to.stack, to.stack_bytes);
#endif
    if (__builtin_setjmp(from.left_at) == 0)
        go_on(to);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.sanitizer_stack, nullptr, nullptr);
#endif
}

constexpr u64 kStackBytes = 256 * 1024, kGuardBytes = 64 * 1024;  // multiples of any page
using Stacks = std::unique_ptr<u8, std::function<void(u8*)>>;

u8* stack(const Stacks& stacks, u32 n) { return stacks.get() + n * (kGuardBytes + kStackBytes) + kGuardBytes; }

/// The stacks of one block's fibers, reused from block to block. What is below each one is out of bounds.
Stacks map_stacks(u32 count) {
    const u64 bytes = count * (kGuardBytes + kStackBytes);
    void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        throw std::bad_alloc();
    Stacks stacks(static_cast<u8*>(memory), [bytes](u8* begin) {
        forget_frames(begin, bytes);
        munmap(begin, bytes);
    });
    for (u32 n = 0; n < count; ++n)
        mprotect(stack(stacks, n), kStackBytes, PROT_READ | PROT_WRITE);
    return stacks;
}

// ---- The block.

/// What is under way for a thread, a warp or the block, oldest first.
struct Queue {
    struct Item {
        std::unique_ptr<Work> work;  // null once performed
        u64 group;
    };
    std::vector<Item> items;
    u64 groups_committed = 0;
};

struct UnitTraits {
    const char *works, *wait;
    u32 patience;  // of how many meetings one moves some work on, at random
};
constexpr UnitTraits kUnits[] = {{"asynchronous copies", "copy_async_wait", 4},
                                 {"bulk copies from shared memory", "bulk_wait", 4},
                                 {"products", "wgmma_wait", 64},
                                 {"loads", "barrier_wait", 256},
                                 {"bulk copies to global memory", "bulk_wait", 4}};

struct Fiber {
    Context context;
    const char* waits_at = nullptr;
    // Of a thread that waits for no collective:
    const void* waits_for = nullptr;
    u32 detail = 0;
    Describe describe = nullptr;
    bool returned = false;
    bool has_acquired = false;  // since the last publish_global
    Queue copies, stores, writes;
};

struct Warp {
    void* operands[kLanes];
    // Lanes, one bit each:
    u32 arrived = 0;    // at the current collective
    u32 ready = 0;      // able to run
    u32 running = ~0u;  // not yet returned
    Queue products;
    u64 products_started = 0;
    bool fenced = false;  // since the last wait for products
};

using Memory = std::unique_ptr<u8, decltype(&std::free)>;

/// Exactly as large as asked for, so that AddressSanitizer sees the end.
Memory allocate(u64 bytes, u64 alignment) {
    void* memory = nullptr;
    if (bytes != 0 && posix_memalign(&memory, alignment, bytes) != 0)
        std::abort();
    return Memory(static_cast<u8*>(memory), &std::free);
}

struct Cluster;

struct Block {
    const Launch& launch;
    Pace& pace;
    Cluster& cluster;
    const u32 index;
    u64 random_state = std::max((launch.seed + 1) * 0x9e3779b97f4a7c15ull ^ (index + 1) * 0xbf58476d1ce4e5b9ull, 1ull);
    std::vector<Fiber> fibers{launch.threads};
    std::vector<Warp> warps{launch.threads / kLanes};
    u32 current = 0;      // the running thread
    u32 ready_warps = 0;  // warps with a lane that can run, one bit each
    u32 running = launch.threads;
    u32 at_barrier = 0;
    const char* barrier = nullptr;
    bool any = false, any_result = false;
    CopyMode modes[std::size(kUnits)];  // of the units in this block
    Queue loads;
    std::vector<Signature> products[kMaxThreads / kWarpgroup];  // of each warpgroup, by the first warp to start them
    Memory shared = allocate(launch.shared_bytes, kSharedAlignment),
           async_view = allocate(launch.shared_bytes, kSharedAlignment);
    BlockState state = {};
    std::string error;
};

/// Blocks that run on one host thread: the threads of all of them take turns.
struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    u32 arrived = 0;  // threads, at meet_cluster
    Context main;
};

/// The block that this host thread is running, or that the running thread visits, and then its own. Fibers never move
/// between host threads.
thread_local Block *block = nullptr, *visitor = nullptr;

Fiber& fiber() { return block->fibers[block->current]; }
Warp& warp() { return block->warps[block->current / kLanes]; }

u32 random(u32 bound) {
    // xorshift64*; the upper half is the good one.
    block->random_state ^= block->random_state >> 12;
    block->random_state ^= block->random_state << 25;
    block->random_state ^= block->random_state >> 27;
    return static_cast<u32>((block->random_state * 0x2545f4914f6cdd1dull) >> 32) % bound;
}

/// One of the bits set in `mask`.
u32 pick_any(u32 mask) {
    const u32 turn = random(32);
    const u32 turned = mask >> turn | mask << (31 - turn) << 1;
    return (static_cast<u32>(__builtin_ctz(turned)) + turn) % 32;
}

/// The same by the launch's order.
u32 pick(u32 mask) {
    if (block->launch.order == Order::kForward)
        return static_cast<u32>(__builtin_ctz(mask));
    if (block->launch.order == Order::kReverse)
        return 31 - static_cast<u32>(__builtin_clz(mask));
    return pick_any(mask);
}

void set_ready(u32 warp, u32 lanes) {
    block->warps[warp].ready = lanes;
    block->ready_warps = lanes != 0 ? block->ready_warps | 1u << warp : block->ready_warps & ~(1u << warp);
}

/// The current thread will not run before somebody makes it ready.
void suspend(const char* name) {
    fiber().waits_at = name;
    set_ready(block->current / kLanes, warp().ready & ~(1u << block->current % kLanes));
}

/// Back to run(), for good.
[[noreturn]] void leave() {
    switch_context(fiber().context, block->cluster.main, true);
    __builtin_unreachable();
}

void fail(const char* format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    block = visitor != nullptr ? visitor : block;
    visitor = nullptr;
    const u32 warp = block->current / kLanes, lane = block->current % kLanes;
    char who[128];
    std::snprintf(who, sizeof who, "block %u, thread %u (warp %u, lane %u): ", block->index, block->current, warp,
                  lane);
    block->error = std::string(who) + message;
    leave();
}

// ---- Asynchronous work.

Queue& queue(Unit unit) {
    if (unit == Unit::kLoads)
        return block->loads;
    if (unit == Unit::kProducts)
        return warp().products;
    return unit == Unit::kCopies ? fiber().copies : unit == Unit::kStores ? fiber().stores : fiber().writes;
}

/// Performs the n-th of a queue unless that has been done; of products, all before it too.
void perform(Unit unit, u64 n) {
    std::vector<Queue::Item>& items = queue(unit).items;
    for (u64 m = unit == Unit::kProducts ? 0 : n; m <= n; ++m)
        if (items[m].work != nullptr) {
            items[m].work->perform();
            items[m].work.reset();
        }
    if (unit == Unit::kLoads)
        items.erase(items.begin() + static_cast<i64>(n));
}

void start(Unit unit, Work* work) {
    Queue& own = queue(unit);
    own.items.push_back({std::unique_ptr<Work>(work), own.groups_committed});
    const CopyMode mode = block->modes[static_cast<u32>(unit)];
    if (mode == CopyMode::kAtIssue || (mode == CopyMode::kRandom && random(2) == 0))
        perform(unit, own.items.size() - 1);
}

/// One of a unit's works; false if there is none.
bool perform_any(Unit unit) {
    const u64 count = queue(unit).items.size();
    if (count != 0)
        perform(unit, random(static_cast<u32>(count)));
    return count != 0;
}

/// A thread that comes to a meeting may find that some work has been done.
void perform_some() {
    for (u32 n = 0; n < std::size(kUnits); ++n)
        if (const Unit unit = static_cast<Unit>(n);
            block->modes[n] == CopyMode::kRandom && !queue(unit).items.empty() && random(kUnits[n].patience) == 0)
            perform_any(unit);
}

void wait(Unit unit, u32 pending) {
    Queue& own = queue(unit);
    u64 done = 0;
    for (; done < own.items.size() && own.items[done].group + pending < own.groups_committed; ++done)
        perform(unit, done);
    own.items.erase(own.items.begin(), own.items.begin() + static_cast<i64>(done));
}

void start_product(Work* work, const Signature& signature) {
    Warp& own = warp();
    std::vector<Signature>& started = block->products[block->current / kWarpgroup];
    if (!own.fenced)
        fail("wgmma: no wgmma_fence since the last wgmma_wait");
    const u64 n = own.products_started++;
    if (n == started.size())
        started.push_back(signature);
    else if (std::memcmp(&started[n], &signature, sizeof signature) != 0)
        fail("wgmma: product %llu is not that of the other warps of its warpgroup", n);
    start(Unit::kProducts, work);
}

void commit(Unit unit) { ++queue(unit).groups_committed; }

void fence_products() { warp().fenced = true; }

void wait_products(u32 pending) {
    Warp& own = warp();
    const Queue& products = own.products;
    if (!products.items.empty() && products.items.back().group == products.groups_committed)
        fail("wgmma_wait: no wgmma_commit since the last product");
    own.fenced = false;
    wait(Unit::kProducts, pending);
}

void check_finished(Unit unit) {
    const UnitTraits& traits = kUnits[static_cast<u32>(unit)];
    if (const u64 left = queue(unit).items.size(); left != 0)
        fail("returned with %llu %s that no %s has covered", left, traits.works, traits.wait);
}

// ---- Waiting.

std::string describe_waiting() {
    auto state = [&](u32 thread) -> std::string {
        const Fiber& fiber = block->fibers[thread];
        if (fiber.returned)
            return "returned";
        char text[256];
        if (fiber.waits_for != nullptr)
            fiber.describe(fiber.waits_for, fiber.detail, text, sizeof text);
        return std::string("at ") + (fiber.waits_for != nullptr ? text : fiber.waits_at);
    };
    std::string text;
    for (u32 first = 0; first < block->launch.threads;) {
        u32 last = first;
        while ((last + 1) % kLanes != 0 && state(last + 1) == state(first))
            ++last;
        text += "\n  warp " + std::to_string(first / kLanes) + ", lanes " + std::to_string(first % kLanes) + "-" +
                std::to_string(last % kLanes) + ": " + state(first);
        first = last + 1;
    }
    return text;
}

u32 one_of(u32 mask) { return (mask & (mask - 1)) == 0 ? static_cast<u32>(__builtin_ctz(mask)) : pick(mask); }

/// To a block with a thread that can run, mostly the same one. Where there is none, loads land, or everybody waits.
void turn_to_block() {
    Block* const own = block;
    const auto& blocks = own->cluster.blocks;
    for (u32 loading = 1; loading != 0;) {
        u32 able = loading = 0;
        for (u32 n = 0; n < blocks.size(); ++n) {
            able |= u32{blocks[n]->ready_warps != 0} << n;
            loading |= u32{!blocks[n]->loads.items.empty()} << n;
        }
        if (able != 0) {
            const bool stays = own->launch.order == Order::kRandom && own->ready_warps != 0;
            if (blocks.size() > 1 && (!stays || random(16) == 0))
                block = blocks[one_of(able)].get();
            return;
        }
        if (loading != 0) {
            block = blocks[one_of(loading)].get();
            perform_any(Unit::kLoads);
            block = own;
        }
    }
    for (const auto& each : blocks) {
        block = each.get();
        own->error += (own->error.empty() ? "block " : "\nblock ") + std::to_string(block->index) +
                      ": deadlock, every thread waits" + describe_waiting();
    }
    block = own;
    leave();
}

/// From a thread, which may be ready or not, to one of the block that is.
void switch_thread(Fiber& from, u32 warp, u32 lane) {
    block->current = warp * kLanes + lane;
    if (&fiber() != &from)
        switch_context(from.context, fiber().context, from.returned);
}

/// Leaves the current thread for the next one that is ready.
void run_next() {
    Fiber& from = fiber();
    turn_to_block();
    u32 warp = block->current / kLanes;
    // Random order mostly stays in a warp: long runs of one warp expose more than a fair shuffle.
    if (block->launch.order != Order::kRandom || block->warps[warp].ready == 0 || random(16) == 0)
        warp = pick(block->ready_warps);
    switch_thread(from, warp, pick(block->warps[warp].ready));
}

void meet_warp(const char* name, void* operands, WarpOperation operation) {
    perform_some();
    const u32 w = block->current / kLanes, l = block->current % kLanes;
    Warp& warp = block->warps[w];
    if (warp.arrived != 0) {
        const char* other = block->fibers[w * kLanes + static_cast<u32>(__builtin_ctz(warp.arrived))].waits_at;
        if (other != name && std::strcmp(other, name) != 0)  // equal names mostly are one string
            fail("at %s while other lanes of its warp wait at %s", name, other);
    }
    warp.operands[l] = operands;
    warp.arrived |= 1u << l;
    if (warp.arrived == ~0u) {
        if (operation != nullptr)
            operation(warp.operands);
        warp.arrived = 0;
        set_ready(w, ~0u);
    } else {
        suspend(name);
    }
    run_next();
}

void release_barrier() {
    block->at_barrier = 0;
    block->any_result = block->any;
    block->any = false;
    for (u32 w = 0; w < block->warps.size(); ++w)
        set_ready(w, block->warps[w].running);
}

bool meet_block(const char* name, bool predicate) {
    trace("block barrier");
    perform_some();
    if (block->at_barrier != 0 && std::strcmp(block->barrier, name) != 0)
        fail("at %s while other threads of the block wait at %s", name, block->barrier);
    block->barrier = name;
    block->any = block->any || predicate;
    ++block->at_barrier;
    suspend(name);
    if (block->at_barrier == block->running)
        release_barrier();
    run_next();
    // Nobody can complete the next barrier before this thread gets there, so the result still stands.
    return block->any_result;
}

void wait_for(const void* object, u32 detail, Describe describe) {
    Fiber& own = fiber();
    own.waits_for = object;
    own.detail = detail;
    own.describe = describe;
    suspend(nullptr);
    run_next();
}

void wake(const void* object) {
    for (u32 n = 0; n < block->launch.threads; ++n)
        if (block->fibers[n].waits_for == object) {
            block->fibers[n].waits_for = nullptr;
            set_ready(n / kLanes, block->warps[n / kLanes].ready | 1u << n % kLanes);
        }
}

Visit::Visit(u32 rank, const char* who) {
    const auto& blocks = block->cluster.blocks;
    visitor = block;
    block = rank < blocks.size() ? blocks[rank].get() : block;
    if (rank >= blocks.size() || block->running == 0)
        fail("%s: block %u of the cluster %s", who, rank, rank < blocks.size() ? "has ended" : "does not exist");
}

Visit::~Visit() {
    block = visitor;
    visitor = nullptr;
}

u32 cluster_threads() { return static_cast<u32>(block->cluster.blocks.size()) * block->launch.threads; }

void meet_cluster() {
    perform_some();
    Cluster& own = block->cluster;
    if (++own.arrived == cluster_threads()) {
        own.arrived = 0;
        for (u32 n = 0; n < own.blocks.size(); ++n) {
            const Visit each(n, "cluster_sync");
            wake(&own);
        }
        give_way();
    } else {
        wait_for(&own, own.arrived, [](const void*, u32 nth, char* text, u64 bytes) {
            std::snprintf(text, bytes, "cluster_sync, as number %u of %u", nth, cluster_threads());
        });
    }
}

void give_way() {
    ++block->pace.steps;
    perform_some();
    run_next();
}

/// Not by the launch's order: whom it puts behind the calling thread, another block may be waiting for. Nor do loads wait
/// until no thread can run.
void poll() {
    constexpr u32 kLoadsPatience = 16;
    ++block->pace.steps;
    perform_some();
    if (!block->loads.items.empty() && random(kLoadsPatience) == 0)
        perform_any(Unit::kLoads);
    const u32 own = block->current, warp = pick_any(block->ready_warps), lane = pick_any(block->warps[warp].ready);
    if (warp * kLanes + lane == own)
        std::this_thread::yield();  // to another block's
    switch_thread(fiber(), warp, lane);
}

#ifndef CF_PATIENCE
#define CF_PATIENCE (1 << 22)  // polls; another block's thread may have to wait for a core
#endif
u32 patience() { return block->launch.workers == 1 ? 1 << 18 : CF_PATIENCE; }

/// Until they have done so many steps, or all of them have ended or lag, too.
void lag() {
    constexpr u32 kMostSteps = 1024;
    Pace& pace = block->pace;
    const u64 end = pace.steps + random(kMostSteps);
    --pace.awake;
    while (pace.awake != 0 && pace.steps < end)
        std::this_thread::yield();
    ++pace.awake;
}

// ---- Running.

[[noreturn]] void run_fiber() {
#if defined(__SANITIZE_ADDRESS__)
    const void* previous_stack;
    size_t previous_bytes;
    __sanitizer_finish_switch_fiber(nullptr, &previous_stack, &previous_bytes);
    // The very first fiber is entered from run(), whose stack nobody else knows.
    if (Context& main = block->cluster.main; main.stack == nullptr) {
        main.stack = const_cast<void*>(previous_stack);
        main.stack_bytes = previous_bytes;
    }
#endif
    block->launch.kernel(block->launch.params);
    for (const Unit unit : {Unit::kCopies, Unit::kStores, Unit::kProducts})
        check_finished(unit);
    commit(Unit::kWrites);
    wait(Unit::kWrites, 0);
    if (block->running == 1) {
        check_finished(Unit::kLoads);
        for (u32 w = 0; w < block->warps.size(); ++w)
            if (const u64 took = block->warps[w].products_started, all = block->products[w / 4].size(); took != all)
                fail("warp %u took part in %llu of the %llu products of its warpgroup", w, took, all);
    }
    fiber().returned = true;
    suspend(nullptr);
    warp().running &= ~(1u << block->current % kLanes);
    --block->running;
    const auto& blocks = block->cluster.blocks;
    if (std::all_of(blocks.begin(), blocks.end(), [](const auto& each) { return each->running == 0; }))
        leave();
    if (block->at_barrier == block->running)
        release_barrier();
    run_next();
    __builtin_unreachable();
}

/// Makes all threads of a block ready to start.
void begin(Block& own, const Stacks& stacks, u32 first_stack) {
    block = &own;
    for (u8* memory : {own.shared.get(), own.async_view.get()})
        std::fill_n(reinterpret_cast<u16*>(memory), own.launch.shared_bytes / sizeof(u16), kPoison);
    // At random, one unit may be as fast and another as slow as can be: together they show more than in step.
    for (CopyMode& mode : own.modes)
        mode = own.launch.copy_mode == CopyMode::kRandom ? static_cast<CopyMode>(random(3)) : own.launch.copy_mode;
    own.modes[static_cast<u32>(Unit::kCopies)] = own.launch.copy_mode;
    for (u32 w = 0; w < own.warps.size(); ++w)
        set_ready(w, ~0u);
    for (u32 n = 0; n < own.launch.threads; ++n) {
        Context& context = own.fibers[n].context;
        context.stack = stack(stacks, first_stack + n);
        context.stack_bytes = kStackBytes;
        // All stacks begin at the same place of a page; shifting them keeps the busy ends out of the same cache sets.
        prepare(context, &run_fiber, n % 64 * 64);
    }
    own.current = pick(own.ready_warps) * kLanes + pick(~0u);
}

/// Runs the cluster whose first block has this index to its end. The reason why it failed, or nothing.
std::string run(const Launch& launch, Pace& pace, u32 first, const Stacks& stacks) {
    Cluster cluster;
    for (u32 n = 0; n < cluster_blocks(); ++n)
        cluster.blocks.emplace_back(new Block{launch, pace, cluster, first + n});
    for (u32 n = 0; n < cluster_blocks(); ++n)
        begin(*cluster.blocks[n], stacks, n * launch.threads);
    switch_context(cluster.main, fiber().context, false);
    std::string error;
    for (const auto& each : cluster.blocks)
        error += each->error;
    return error;
}

// ---- What the other headers call.

u32 thread_index() { return block->current; }
u32 block_index() { return block->index; }
u32 block_threads() { return block->launch.threads; }
u32 grid_size() { return block->launch.grid; }
u32 cluster_rank() { return block->index % cluster_blocks(); }
__attribute__((weak)) u32 cluster_blocks() { return 1; }
BlockState& block_state() { return block->state; }

u8* shared_memory(u64 bytes) {
    if (bytes > block->launch.shared_bytes)
        fail("the kernel uses %llu bytes of shared memory but is launched with %llu", bytes,
             block->launch.shared_bytes);
    return block->shared.get();
}

u32 shared_offset(const void* pointer) {
    const u64 offset = static_cast<u64>(static_cast<const u8*>(pointer) - block->shared.get());
    if (offset > block->launch.shared_bytes)
        fail("shared_address: %p is not in shared memory", pointer);
    return static_cast<u32>(offset);
}

u8* shared_pointer(SharedAddress address, u32 bytes, const char* who) {
    const u64 offset = static_cast<u64>(address) - kSharedBase;
    if (offset + bytes > block->launch.shared_bytes || offset + bytes < bytes)
        fail("%s: %u bytes at shared offset %lld, outside the block's %llu bytes", who, bytes, static_cast<i64>(offset),
             block->launch.shared_bytes);
    if (address % bytes != 0)
        fail("%s: shared offset %llu is not aligned to %u bytes", who, offset, bytes);
    return block->shared.get() + offset;
}

u8* own_pointer(SharedAddress address, u32 bytes, const char* who) {
    if (address >> kAddressBits != cluster_rank())
        fail("%s: the address is in block %u of the cluster", who, address >> kAddressBits);
    return shared_pointer(address & ((1u << kAddressBits) - 1), bytes, who);
}

const u8* async_view(SharedAddress address, u32 bytes, const char* who) {
    return block->async_view.get() + (shared_pointer(address, bytes, who) - block->shared.get());
}

const u8* async_read(SharedAddress address, u32 bytes, const char* who) {
    const u8* view = async_view(address, bytes, who);
    if (std::memcmp(view, shared_pointer(address, bytes, who), bytes) != 0)
        fail("%s: reads shared offset %u, where a thread has written: before, without fence_async_shared, or too early",
             who, address - kSharedBase);
    return view;
}

void async_write(SharedAddress address, const u8* data, u32 bytes, const char* who) {
    std::memcpy(shared_pointer(address, bytes, who), data, bytes);
    std::memcpy(block->async_view.get() + (address - kSharedBase), data, bytes);
}

void publish_shared() { std::memcpy(block->async_view.get(), block->shared.get(), block->launch.shared_bytes); }

void acquire_global() { fiber().has_acquired = true; }

void publish_global() { fiber().has_acquired = false; }

void check_published_global(const char* who) {
    if (fiber().has_acquired)
        fail("%s: no fence_async_global since the thread saw what others did in global memory", who);
}

/// The blocks of a grid, the first of each cluster, in the order in which they are started.
std::vector<u32> block_order(const Launch& launch) {
    const u32 clusters = launch.grid / cluster_blocks();
    std::vector<u32> blocks(clusters);
    for (u32 n = 0; n < clusters; ++n)
        blocks[n] = cluster_blocks() * (launch.order == Order::kReverse ? clusters - 1 - n : n);
    if (launch.order == Order::kRandom) {
        std::minstd_rand random(static_cast<u32>(launch.seed));
        std::shuffle(blocks.begin(), blocks.end(), random);
    }
    return blocks;
}

}  // namespace emulated

/// Runs a kernel over its grid. Returns 0, or 1 with the reason in `message`.
extern "C" __attribute__((visibility("default"))) int emulated_launch(const emulated::Launch* packed, char* message,
                                                                      u64 message_bytes) {
    using namespace emulated;
    Launch launch = *packed;
    // A copy of exactly this size, so that AddressSanitizer sees a kernel read beyond it; aligned for tensor maps.
    const Memory params = allocate(launch.params_bytes, 64);
    std::memcpy(params.get(), launch.params, launch.params_bytes);
    launch.params = params.get();
    Pace pace{{launch.workers}};
    const std::vector<u32> blocks = block_order(launch);
    std::atomic<u32> next{0};
    std::mutex mutex;
    std::string error = launch.grid % cluster_blocks() == 0 ? "" : "the grid is no multiple of the cluster's blocks";
    if (!error.empty())
        next = launch.grid;

    auto work = [&] {
        const Stacks stacks = map_stacks(cluster_blocks() * launch.threads);
        for (u32 n; (n = next++) < blocks.size();) {
            const std::string found = run(launch, pace, blocks[n], stacks);
            if (found.empty())
                continue;
            next = launch.grid;  // the others finish what they are at
            const std::lock_guard<std::mutex> lock(mutex);
            if (error.empty())
                error = found;
        }
        --pace.awake;
    };
    std::vector<std::thread> others;
    for (u32 n = 1; n < launch.workers; ++n)
        others.emplace_back(work);
    work();
    for (std::thread& other : others)
        other.join();

    std::snprintf(message, message_bytes, "%s", error.c_str());
    return error.empty() ? 0 : 1;
}

// ---- What `cupyflash trace` reads.

#if defined(CF_EMULATED_TRACED)
namespace emulated {

/// What a warp's first lane asked for, and where: the innermost caller first.
struct Record {
    const char* what;
    u64 a, b;
    void* callers[12];
};
std::vector<Record> records[kMaxThreads / kLanes];
u32 traced_block = 0;
u64 traced_memory[2];  // accesses to these addresses are recorded

/// The first lane speaks for its warp: what a single lane does, kernels let that one do.
void trace(const char* what, u64 a, u64 b) {
    if (block->index != traced_block || block->current % kLanes != 0)
        return;
    std::vector<Record>& own = records[block->current / kLanes];
    own.push_back({what, a, b, {}});
    backtrace(own.back().callers, static_cast<int>(std::size(own.back().callers)));
}

void on_access(u64 address, u64 bytes, bool is_read, void*) {
    if (address >= traced_memory[0] && address < traced_memory[1])
        trace(is_read ? "read" : "write", bytes);
}

}  // namespace emulated

/// Begins anew.
extern "C" __attribute__((visibility("default"))) void emulated_trace(u32 traced, u64 first, u64 end) {
    using namespace emulated;
    for (std::vector<Record>& own : records)
        own.clear();
    traced_block = traced;
    traced_memory[0] = first;
    traced_memory[1] = end;
}
extern "C" __attribute__((visibility("default"))) const emulated::Record* emulated_records(u32 warp, u64* count) {
    *count = emulated::records[warp].size();
    return emulated::records[warp].data();
}

#else  // ---- Reads of memory that nobody has written: emulated.py, WATCHED.
namespace emulated {

void on_access(u64 address, u64 bytes, bool is_read, void* reader) {
    // Only shared memory is read by 2 bytes; elsewhere such a read is half of something else.
    const u64 offset = address - reinterpret_cast<u64>(block->shared.get());
    const u64 element = bytes == 2 && offset < block->launch.shared_bytes ? 2 : 4;
    const u16* halves = reinterpret_cast<const u16*>(address);
    for (u64 n = 0; is_read && n + element <= bytes && address % element == 0; n += element)
        if (halves[n / 2] == kPoison && halves[(n + element) / 2 - 1] == kPoison) {
            Dl_info library;
            dladdr(reader, &library);
            fail("reads memory that nobody has written; addr2line -i -e %s %#llx names the line", library.dli_fname,
                 static_cast<u64>(static_cast<u8*>(reader) - static_cast<u8*>(library.dli_fbase)) - 1);
        }
}

}  // namespace emulated
#endif

// ---- The compiler calls these at every access of a kernel, if emulated.py asks it to.

#if !defined(__SANITIZE_ADDRESS__)
#define CF_ACCESS(size)                                                         \
    extern "C" void __asan_load##size##_noabort(u64 address) {                  \
        emulated::on_access(address, size, true, __builtin_return_address(0));  \
    }                                                                           \
    extern "C" void __asan_store##size##_noabort(u64 address) {                 \
        emulated::on_access(address, size, false, __builtin_return_address(0)); \
    }
CF_ACCESS(1)
CF_ACCESS(2)
CF_ACCESS(4)
CF_ACCESS(8)
CF_ACCESS(16)
extern "C" void __asan_loadN_noabort(u64 address, u64 bytes) {
    emulated::on_access(address, bytes, true, __builtin_return_address(0));
}
extern "C" void __asan_storeN_noabort(u64 address, u64 bytes) {
    emulated::on_access(address, bytes, false, __builtin_return_address(0));
}
extern "C" void __asan_handle_no_return() {}
#endif
