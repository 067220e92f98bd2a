// The emulated device: runs a kernel for every block of a grid, one fiber per thread. emulated.py puts this file after the
// kernel, so that the standard headers below stay out of the kernel's sight.
//
// Only one fiber of a block runs at a time, until it waits at a collective; which one is next is the scheduler's
// choice (Order). A fiber that waits is switched away from in a few nanoseconds, without a system call. The threads of
// a warp are fibers of their own: between collectives they do not move in step, as on any GPU since Volta.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

#if defined(__x86_64__) && defined(__linux__) && !defined(CF_EMULATED_UCONTEXT)
#define CF_EMULATED_SWITCH 1
#else
#include <ucontext.h>
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

struct Launch {
    Kernel kernel;
    u32 grid;
    u32 threads;
    u64 shared_bytes;
    const void* params;
    u64 seed;
    Order order;
    CopyMode copy_mode;
    Pace& pace;
};

constexpr u32 kMaxWarps = 32;
constexpr u32 kMaxThreads = kLanes * kMaxWarps;
constexpr u64 kSharedAlignment = 1024;
// What memory holds that nobody has written (host.py fills workspaces with it too). NaN in every floating-point type, so
// that it shows in results, and no NaN that anybody else makes, so that reads of it can be reported.
constexpr u16 kPoison = 0xffd5;

// ---- Contexts: a stack and where it was left.

struct Context {
#if defined(CF_EMULATED_SWITCH)
    void* stack_pointer = nullptr;
#else
    ucontext_t registers;
#endif
    void* stack = nullptr;
    u64 stack_bytes = 0;
    void* sanitizer_stack = nullptr;
};

#if defined(CF_EMULATED_SWITCH)
// Saves the registers a callee must preserve on the old stack and takes the new stack's; the rest is the compiler's.
extern "C" __attribute__((visibility("hidden"))) void emulated_switch(void** save_stack_pointer, void* stack_pointer);
asm(R"(
    .pushsection .text
    .p2align 4
    .hidden emulated_switch
    .type emulated_switch, @function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulated_switch, . - emulated_switch
    .popsection
)");
#endif

/// Threads leave their last frames without returning from them; AddressSanitizer must not hold that against the next user.
void forget_frames([[maybe_unused]] void* stack, [[maybe_unused]] u64 bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, bytes);
#endif
}

/// Makes `context` start in `entry` on its stack when it is switched to.
void prepare(Context& context, void (*entry)(), u64 stack_offset) {
    forget_frames(context.stack, context.stack_bytes);
#if defined(CF_EMULATED_SWITCH)
    auto* top = reinterpret_cast<void**>(static_cast<u8*>(context.stack) + context.stack_bytes - stack_offset);
    *--top = nullptr;                         // the return address of entry, which does not return
    *--top = reinterpret_cast<void*>(entry);  // where emulated_switch returns to
    for (u32 n = 0; n < 6; ++n)
        *--top = nullptr;  // the registers it takes
    context.stack_pointer = top;
#else
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = context.stack;
    context.registers.uc_stack.ss_size = context.stack_bytes - stack_offset;
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, entry, 0);
#endif
}

/// `leaving`: `from` will not be continued.
void switch_context(Context& from, Context& to, [[maybe_unused]] bool leaving) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(leaving ? nullptr : &from.sanitizer_stack, to.stack, to.stack_bytes);
#endif
#if defined(CF_EMULATED_SWITCH)
    emulated_switch(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.registers, &to.registers);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.sanitizer_stack, nullptr, nullptr);
#endif
}

/// The stacks of one block's fibers, reused from block to block. A page below each one is out of bounds.
class Stacks {
  public:
    explicit Stacks(u32 count) : page_(static_cast<u64>(sysconf(_SC_PAGESIZE))), bytes_(count * stride()) {
        memory_ = static_cast<u8*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (memory_ == MAP_FAILED) {
            std::perror("emulated: no memory for the threads' stacks");
            std::abort();
        }
        for (u32 n = 0; n < count; ++n)
            mprotect(memory_ + n * stride(), page_, PROT_NONE);
    }
    ~Stacks() {
        forget_frames(memory_, bytes_);
        munmap(memory_, bytes_);
    }
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;

    void assign(Context& context, u32 n) {
        context.stack = memory_ + n * stride() + page_;
        context.stack_bytes = kStackBytes;
    }

  private:
#if defined(__SANITIZE_ADDRESS__)
    static constexpr u64 kStackBytes = 256 * 1024;
#else
    static constexpr u64 kStackBytes = 128 * 1024;
#endif
    u64 stride() const { return kStackBytes + page_; }

    u64 page_;
    u64 bytes_;
    u8* memory_;
};

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
                                 {"loads", "barrier_wait", 256}};

struct Fiber {
    Context context;
    const char* waits_at = nullptr;
    // Of a thread that waits for no collective:
    const void* waits_for = nullptr;
    u32 detail = 0;
    Describe describe = nullptr;
    bool returned = false;
    Queue copies, stores;
};

struct Warp {
    void* operands[kLanes];
    // Lanes, one bit each:
    u32 arrived = 0;  // at the current collective
    u32 ready = 0;    // able to run
    u32 running = 0;  // not yet returned
    Queue products;
    u64 products_started = 0;
    bool fenced = false;  // since the last wait for products
};

struct Free {
    void operator()(u8* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<u8, Free>;

/// Exactly as large as asked for, so that AddressSanitizer sees the end.
Memory allocate(u64 bytes, u64 alignment) {
    void* memory = nullptr;
    if (bytes != 0 && posix_memalign(&memory, alignment, bytes) != 0)
        std::abort();
    return Memory(static_cast<u8*>(memory));
}

struct Cluster;

struct Block {
    Block(const Launch& launch_, Cluster& cluster_, Stacks& stacks, u32 first_stack)
        : launch(launch_),
          cluster(cluster_),
          warps_used(launch_.threads / kLanes),
          fibers(launch_.threads),
          shared(allocate(launch_.shared_bytes, kSharedAlignment)),
          async_view(allocate(launch_.shared_bytes, kSharedAlignment)) {
        for (u32 n = 0; n < launch.threads; ++n)
            stacks.assign(fibers[n].context, first_stack + n);
    }

    const Launch& launch;
    Cluster& cluster;
    u32 index = 0;
    u32 current = 0;  // the running thread
    std::string error;
    BlockState state;
    u32 warps_used;
    std::vector<Fiber> fibers;
    Warp warps[kMaxWarps];
    u32 ready_warps = 0;  // warps with a lane that can run, one bit each
    u32 running = 0;      // threads that have not returned
    u32 at_barrier = 0;
    const char* barrier = nullptr;
    bool any = false;
    bool any_result = false;
    u64 random_state = 1;
    CopyMode modes[std::size(kUnits)];  // of the units in this block
    Queue loads;
    std::vector<Signature> products[kMaxThreads / kWarpgroup];  // of each warpgroup, by the first warp to start them
    Memory shared, async_view;
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
    switch (block->launch.order) {
        case Order::kForward:
            return static_cast<u32>(__builtin_ctz(mask));
        case Order::kReverse:
            return 31 - static_cast<u32>(__builtin_clz(mask));
        case Order::kRandom:
            break;
    }
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

[[noreturn]] void end_block(const std::string& message) {
    block = visitor != nullptr ? visitor : block;
    visitor = nullptr;
    block->error = "block " + std::to_string(block->index) + ", thread " + std::to_string(block->current) + " (warp " +
                   std::to_string(block->current / kLanes) + ", lane " + std::to_string(block->current % kLanes) +
                   "): " + message;
    leave();
}

// ---- Asynchronous work.

Queue& queue(Unit unit) {
    switch (unit) {
        case Unit::kCopies:
            return fiber().copies;
        case Unit::kStores:
            return fiber().stores;
        case Unit::kProducts:
            return warp().products;
        case Unit::kLoads:
            break;
    }
    return block->loads;
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

/// A thread that comes to a meeting may find that some work has been done.
void perform_some() {
    for (u32 n = 0; n < std::size(kUnits); ++n) {
        const Unit unit = static_cast<Unit>(n);
        const u32 count = static_cast<u32>(queue(unit).items.size());
        if (count != 0 && block->modes[n] == CopyMode::kRandom && random(kUnits[n].patience) == 0)
            perform(unit, random(count));
    }
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
        end_block("wgmma: no wgmma_fence since the last wgmma_wait");
    const u64 n = own.products_started++;
    if (n == started.size())
        started.push_back(signature);
    else if (std::memcmp(&started[n], &signature, sizeof signature) != 0)
        end_block("wgmma: product " + std::to_string(n) + " is not that of the other warps of its warpgroup");
    start(Unit::kProducts, work);
}

void commit(Unit unit) { ++queue(unit).groups_committed; }

void fence_products() { warp().fenced = true; }

void wait_products(u32 pending) {
    Warp& own = warp();
    const Queue& products = own.products;
    if (!products.items.empty() && products.items.back().group == products.groups_committed)
        end_block("wgmma_wait: no wgmma_commit since the last product");
    own.fenced = false;
    wait(Unit::kProducts, pending);
}

void check_finished(Unit unit) {
    if (const u64 left = queue(unit).items.size(); left != 0)
        end_block("returned with " + std::to_string(left) + " " + kUnits[static_cast<u32>(unit)].works + " that no " +
                  kUnits[static_cast<u32>(unit)].wait + " has covered");
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
        for (u32 n = 0; n < kClusterBlocks; ++n) {
            able |= u32{blocks[n]->ready_warps != 0} << n;
            loading |= u32{!blocks[n]->loads.items.empty()} << n;
        }
        if (able != 0) {
            const bool stays = own->launch.order == Order::kRandom && own->ready_warps != 0;
            if (kClusterBlocks > 1 && (!stays || random(16) == 0))
                block = blocks[one_of(able)].get();
            return;
        }
        if (loading != 0) {
            block = blocks[one_of(loading)].get();
            perform(Unit::kLoads, random(static_cast<u32>(block->loads.items.size())));
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

/// Leaves the current thread, which may be ready or not, for the next one that is.
void run_next() {
    Fiber& from = fiber();
    turn_to_block();
    u32 warp = block->current / kLanes;
    // Random order mostly stays in a warp: long runs of one warp expose more than a fair shuffle.
    if (block->launch.order != Order::kRandom || block->warps[warp].ready == 0 || random(16) == 0)
        warp = pick(block->ready_warps);
    block->current = warp * kLanes + pick(block->warps[warp].ready);
    if (&fiber() != &from)
        switch_context(from.context, fiber().context, from.returned);
}

void meet_warp(const char* name, void* operands, WarpOperation operation) {
    perform_some();
    const u32 w = block->current / kLanes, l = block->current % kLanes;
    Warp& warp = block->warps[w];
    if (warp.arrived != 0) {
        const char* other = block->fibers[w * kLanes + static_cast<u32>(__builtin_ctz(warp.arrived))].waits_at;
        if (other != name && std::strcmp(other, name) != 0)  // equal names mostly are one string
            end_block(std::string("at ") + name + " while other lanes of its warp wait at " + other);
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
    for (u32 w = 0; w < block->warps_used; ++w)
        set_ready(w, block->warps[w].running);
}

bool meet_block(const char* name, bool predicate) {
    trace("block barrier");
    perform_some();
    if (block->at_barrier != 0 && std::strcmp(block->barrier, name) != 0)
        end_block(std::string("at ") + name + " while other threads of the block wait at " + block->barrier);
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
    visitor = block;
    block = rank < kClusterBlocks ? block->cluster.blocks[rank].get() : block;
    if (rank >= kClusterBlocks || block->running == 0)
        fail("%s: block %u of the cluster %s", who, rank, rank < kClusterBlocks ? "has ended" : "does not exist");
}

Visit::~Visit() {
    block = visitor;
    visitor = nullptr;
}

void meet_cluster() {
    perform_some();
    Cluster& own = block->cluster;
    if (++own.arrived == kClusterBlocks * block->launch.threads) {
        own.arrived = 0;
        for (u32 n = 0; n < kClusterBlocks; ++n) {
            const Visit each(n, "cluster_sync");
            wake(&own);
        }
        give_way();
    } else {
        wait_for(&own, own.arrived, [](const void*, u32 nth, char* text, u64 bytes) {
            std::snprintf(text, bytes, "cluster_sync, as number %u of %u", nth, kClusterBlocks * block->launch.threads);
        });
    }
}

void give_way() {
    ++block->launch.pace.steps;
    perform_some();
    run_next();
}

/// Not by the launch's order: whom it puts behind the calling thread, another block may be waiting for. Nor do loads wait
/// until no thread can run.
void poll() {
    constexpr u32 kLoadsPatience = 16;
    ++block->launch.pace.steps;
    perform_some();
    if (!block->loads.items.empty() && random(kLoadsPatience) == 0)
        perform(Unit::kLoads, random(static_cast<u32>(block->loads.items.size())));
    Fiber& from = fiber();
    const u32 warp = pick_any(block->ready_warps);
    block->current = warp * kLanes + pick_any(block->warps[warp].ready);
    if (&fiber() != &from)
        switch_context(from.context, fiber().context, false);
    else
        std::this_thread::yield();  // to another block's
}

/// Until they have done so many steps, or all of them have ended or lag, too.
void lag() {
    constexpr u32 kMostSteps = 1024;
    Pace& pace = block->launch.pace;
    const u64 end = pace.steps + random(kMostSteps);
    --pace.awake;
    while (pace.awake != 0 && pace.steps < end)
        std::this_thread::yield();
    ++pace.awake;
}

// ---- Running.

[[noreturn]] void run_fiber() {
    block->launch.kernel(block->launch.params);
    for (const Unit unit : {Unit::kCopies, Unit::kStores, Unit::kProducts})
        check_finished(unit);
    if (block->running == 1) {
        check_finished(Unit::kLoads);
        for (u32 w = 0; w < block->warps_used; ++w)
            if (block->warps[w].products_started != block->products[w / 4].size())
                end_block("warp " + std::to_string(w) + " took part in " +
                          std::to_string(block->warps[w].products_started) + " of the " +
                          std::to_string(block->products[w / 4].size()) + " products of its warpgroup");
    }
    fiber().returned = true;
    suspend(nullptr);
    warp().running &= ~(1u << block->current % kLanes);
    --block->running;
    u32 running = 0;
    for (const auto& each : block->cluster.blocks)
        running += each->running;
    if (running == 0)
        leave();
    if (block->at_barrier == block->running)
        release_barrier();
    run_next();
    __builtin_unreachable();
}

void start_fiber() {
#if defined(__SANITIZE_ADDRESS__)
    const void* previous_stack;
    u64 previous_bytes;
    static_assert(sizeof(size_t) == sizeof previous_bytes);
    __sanitizer_finish_switch_fiber(nullptr, &previous_stack, reinterpret_cast<size_t*>(&previous_bytes));
    // The very first fiber is entered from run(), whose stack nobody else knows.
    if (Context& main = block->cluster.main; main.stack == nullptr) {
        main.stack = const_cast<void*>(previous_stack);
        main.stack_bytes = previous_bytes;
    }
#endif
    run_fiber();
}

/// Makes all threads of `own`, as block `index`, ready to start.
void begin(Block& own, u32 index) {
    block = &own;
    block->index = index;
    block->random_state = (block->launch.seed + 1) * 0x9e3779b97f4a7c15ull ^ (index + 1) * 0xbf58476d1ce4e5b9ull;
    if (block->random_state == 0)
        block->random_state = 1;
    if (block->launch.shared_bytes != 0) {
        for (u8* memory : {block->shared.get(), block->async_view.get()})
            std::fill_n(reinterpret_cast<u16*>(memory), block->launch.shared_bytes / sizeof(u16), kPoison);
    }
    block->state = {};
    // At random, one unit may be as fast and another as slow as can be: together they show more than in step.
    for (CopyMode& mode : block->modes)
        mode =
            block->launch.copy_mode == CopyMode::kRandom ? static_cast<CopyMode>(random(3)) : block->launch.copy_mode;
    block->modes[static_cast<u32>(Unit::kCopies)] = block->launch.copy_mode;
    block->running = block->launch.threads;
    for (u32 w = 0; w < block->warps_used; ++w) {
        block->warps[w].running = ~0u;
        block->warps[w].products_started = 0;
        block->warps[w].fenced = false;
        block->products[w / 4].clear();
        set_ready(w, ~0u);
    }
    for (u32 n = 0; n < block->launch.threads; ++n) {
        Fiber& fiber = block->fibers[n];
        fiber.returned = false;
        // All stacks begin at the same place of a page; shifting them keeps the busy ends out of the same cache sets.
        prepare(fiber.context, &start_fiber, n % 64 * 64);
    }
    block->current = pick(block->ready_warps) * kLanes + pick(~0u);
}

/// Runs the cluster whose first block has this index to its end. The reason why it failed, or nothing.
std::string run(Cluster& cluster, u32 first) {
    for (u32 n = 0; n < kClusterBlocks; ++n)
        begin(*cluster.blocks[n], first + n);
    switch_context(cluster.main, fiber().context, false);
    std::string error;
    for (const auto& each : cluster.blocks)
        error += each->error;
    return error;
}

// ---- What the other headers call.

void fail(const char* format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    end_block(message);
}

u32 thread_index() { return block->current; }
u32 block_index() { return block->index; }
u32 block_threads() { return block->launch.threads; }
u32 grid_size() { return block->launch.grid; }
u32 cluster_rank() { return block->index % kClusterBlocks; }
BlockState& block_state() { return block->state; }

u8* shared_memory(u64 bytes) {
    if (bytes > block->launch.shared_bytes)
        fail("the kernel uses %llu bytes of shared memory but is launched with %llu", bytes,
             block->launch.shared_bytes);
    return block->shared.get();
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

/// The blocks of a grid, the first of each cluster, in the order in which they are started.
std::vector<u32> block_order(const Launch& launch) {
    const u32 clusters = launch.grid / kClusterBlocks;
    std::vector<u32> blocks(clusters);
    for (u32 n = 0; n < clusters; ++n)
        blocks[n] = kClusterBlocks * (launch.order == Order::kReverse ? clusters - 1 - n : n);
    if (launch.order == Order::kRandom) {
        std::minstd_rand random(static_cast<u32>(launch.seed));
        std::shuffle(blocks.begin(), blocks.end(), random);
    }
    return blocks;
}

}  // namespace emulated

DEVICE SharedAddress shared_address(const void* pointer) {
    const u64 offset = static_cast<u64>(static_cast<const u8*>(pointer) - emulated::block->shared.get());
    if (offset > emulated::block->launch.shared_bytes)
        emulated::fail("shared_address: %p is not in shared memory", pointer);
    return emulated::kSharedBase + static_cast<u32>(offset);
}

/// Runs kernel(params) over `grid` blocks on `workers` host threads. Returns 0, or 1 with the reason in `message`.
extern "C" __attribute__((visibility("default"))) int emulated_launch(emulated::Kernel kernel, u32 grid, u32 threads,
                                                                      u64 shared_bytes, const void* params,
                                                                      u64 params_bytes, u64 seed, u32 order,
                                                                      u32 copy_mode, u32 workers, char* message,
                                                                      u64 message_bytes) {
    using namespace emulated;
    // A copy of exactly this size, so that AddressSanitizer sees a kernel read beyond it; aligned for tensor maps.
    const Memory own_params = allocate(params_bytes, 64);
    std::memcpy(own_params.get(), params, params_bytes);
    Pace pace{{workers}};
    const Launch launch = {kernel,
                           grid,
                           threads,
                           shared_bytes,
                           own_params.get(),
                           seed,
                           static_cast<Order>(order),
                           static_cast<CopyMode>(copy_mode),
                           pace};
    const std::vector<u32> blocks = block_order(launch);
    std::atomic<u32> next{0};
    std::mutex mutex;
    std::string error = grid % kClusterBlocks == 0 ? "" : "the grid is no multiple of the cluster's blocks";
    if (!error.empty())
        next = grid;

    auto work = [&] {
        Stacks stacks(threads * kClusterBlocks);
        Cluster own;
        for (u32 n = 0; n < kClusterBlocks; ++n)
            own.blocks.push_back(std::make_unique<Block>(launch, own, stacks, n * threads));
        for (u32 n; (n = next++) < blocks.size();) {
            const std::string found = run(own, blocks[n]);
            if (found.empty())
                continue;
            next = grid;  // the others finish the block they are at
            const std::lock_guard<std::mutex> lock(mutex);
            if (error.empty())
                error = found;
        }
        --pace.awake;
    };
    std::vector<std::thread> others;
    for (u32 n = 1; n < workers; ++n)
        others.emplace_back(work);
    work();
    for (std::thread& other : others)
        other.join();

    std::snprintf(message, message_bytes, "%s", error.c_str());
    return error.empty() ? 0 : 1;
}

// ---- What `cupyflash trace` reads.

#if defined(CF_EMULATED_TRACED)
#include <execinfo.h>

namespace emulated {

/// What a warp's first lane asked for, and where: the innermost caller first.
struct Record {
    const char* what;
    u64 a, b;
    void* callers[12];
};
u32 traced_block = 0;
u64 traced_memory[2];  // accesses to these addresses are recorded

std::vector<Record>& records(u32 warp) {
    static std::vector<Record> all[kMaxWarps];
    return all[warp];
}

/// The first lane speaks for its warp: what a single lane does, kernels let that one do.
void trace(const char* what, u64 a, u64 b) {
    if (block == nullptr || block->index != traced_block || block->current % kLanes != 0)
        return;
    std::vector<Record>& own = records(block->current / kLanes);
    own.push_back({what, a, b, {}});
    backtrace(own.back().callers, static_cast<int>(std::size(own.back().callers)));
}

__attribute__((no_sanitize_address)) void on_access(u64 address, u64 bytes, bool is_read, void*) {
    if (address >= traced_memory[0] && address < traced_memory[1])
        trace(is_read ? "read" : "write", bytes);
}

}  // namespace emulated

/// Begins anew.
extern "C" __attribute__((visibility("default"))) void emulated_trace(u32 traced, u64 first, u64 end) {
    using namespace emulated;
    for (u32 warp = 0; warp < kMaxWarps; ++warp)
        records(warp).clear();
    traced_block = traced;
    traced_memory[0] = first;
    traced_memory[1] = end;
}
extern "C" __attribute__((visibility("default"))) const emulated::Record* emulated_records(u32 warp, u64* count) {
    *count = emulated::records(warp).size();
    return emulated::records(warp).data();
}
#endif

// ---- Reads of memory that nobody has written: emulated.py, WATCHED.

#if defined(CF_EMULATED_WATCHED)
namespace emulated {

thread_local bool is_checking = false;  // what the check itself reads

__attribute__((no_sanitize_address)) void on_access(u64 address, u64 bytes, bool is_read, void* reader) {
    if (block == nullptr || is_checking || !is_read)
        return;
    is_checking = true;
    // Only shared memory is read by 2 bytes; elsewhere such a read is half of something else.
    const u64 offset = address - reinterpret_cast<u64>(block->shared.get());
    const u64 element = bytes == 2 && offset < block->launch.shared_bytes ? 2 : 4;
    const u16* halves = reinterpret_cast<const u16*>(address);
    for (u64 n = 0; n + element <= bytes && address % element == 0; n += element)
        if (halves[n / 2] == kPoison && halves[(n + element) / 2 - 1] == kPoison) {
            Dl_info library;
            dladdr(reader, &library);
            is_checking = false;
            fail("reads memory that nobody has written; addr2line -i -e %s %#llx names the line", library.dli_fname,
                 static_cast<u64>(static_cast<u8*>(reader) - static_cast<u8*>(library.dli_fbase)) - 1);
        }
    is_checking = false;
}

}  // namespace emulated
#endif

// ---- The compiler calls these at every access if emulated.py asks it to.

#if defined(CF_EMULATED_TRACED) || defined(CF_EMULATED_WATCHED)
#define CF_ACCESS(size, bytes)                                                                       \
    extern "C" __attribute__((no_sanitize_address)) void __asan_load##size##_noabort(u64 address) {  \
        emulated::on_access(address, bytes, true, __builtin_return_address(0));                      \
    }                                                                                                \
    extern "C" __attribute__((no_sanitize_address)) void __asan_store##size##_noabort(u64 address) { \
        emulated::on_access(address, bytes, false, __builtin_return_address(0));                     \
    }
CF_ACCESS(1, 1)
CF_ACCESS(2, 2)
CF_ACCESS(4, 4)
CF_ACCESS(8, 8)
CF_ACCESS(16, 16)
extern "C" __attribute__((no_sanitize_address)) void __asan_loadN_noabort(u64 address, u64 bytes) {
    emulated::on_access(address, bytes, true, __builtin_return_address(0));
}
extern "C" __attribute__((no_sanitize_address)) void __asan_storeN_noabort(u64 address, u64 bytes) {
    emulated::on_access(address, bytes, false, __builtin_return_address(0));
}
extern "C" void __asan_handle_no_return() {}
#endif
