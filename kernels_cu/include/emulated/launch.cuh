// The emulated device: runs a kernel for every block of a grid, one fiber per thread. emulated.py puts this file after the
// kernel, so that the standard headers below stay out of the kernel's sight.
//
// Only one fiber of a block runs at a time, until it waits at a collective; which one is next is the scheduler's
// choice (Order). A fiber that waits is switched away from in a few nanoseconds, without a system call. The threads of
// a warp are fibers of their own: between collectives they do not move in step, as on any GPU since Volta.
#pragma once

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

struct Launch {
    Kernel kernel;
    u32 grid;
    u32 threads;
    u64 shared_bytes;
    const void* params;
    u64 seed;
    Order order;
    CopyMode copy_mode;
};

constexpr u32 kMaxWarps = 32;
constexpr u32 kMaxThreads = kLanes * kMaxWarps;
constexpr u64 kSharedAlignment = 1024;
// NaN in every floating-point type: what a kernel reads before it is written shows in the result.
constexpr int kPoison = 0xff;

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

class Block {
  public:
    Block(const Launch& launch_, Stacks& stacks)
        : launch(launch_),
          warps_used_(launch_.threads / kLanes),
          fibers_(launch_.threads),
          shared_(allocate(launch_.shared_bytes, kSharedAlignment)),
          async_view_(allocate(launch_.shared_bytes, kSharedAlignment)) {
        for (u32 n = 0; n < launch.threads; ++n)
            stacks.assign(fibers_[n].context, n);
    }

    /// Runs block `index` to its end; false when it failed, with the reason in `error`.
    bool run(u32 index);

    [[noreturn]] void fail(const std::string& message);
    void meet_warp(const char* name, void* operands, WarpOperation operation);
    bool meet_block(const char* name, bool predicate);
    void wait_for(const void* object, u32 detail, Describe describe);
    void wake(const void* object);
    void give_way();
    void start(Unit unit, Work* work);
    void commit(Unit unit) { ++queue(unit).groups_committed; }
    void wait(Unit unit, u32 pending);
    void start_product(Work* work, const Signature& signature);
    void wait_products(u32 pending);
    void fence_products() { warps_[current / kLanes].fenced = true; }
    u8* shared_memory() { return shared_.get(); }
    u8* async_view() { return async_view_.get(); }

    const Launch& launch;
    u32 index = 0;
    u32 current = 0;  // the running thread
    std::string error;
    BlockState state;

  private:
    static void start_fiber();
    [[noreturn]] void run_fiber();

    u32 random(u32 bound);
    u32 pick(u32 mask);
    void set_ready(u32 warp, u32 lanes);
    void suspend(const char* name);
    void run_next();
    [[noreturn]] void leave();
    void release_barrier();
    Queue& queue(Unit unit);
    void perform(Unit unit, u64 n);
    void perform_some();
    void check_finished(Unit unit);
    std::string describe_waiting() const;

    u32 warps_used_;
    std::vector<Fiber> fibers_;
    Warp warps_[kMaxWarps];
    u32 ready_warps_ = 0;  // warps with a lane that can run, one bit each
    u32 running_ = 0;      // threads that have not returned
    u32 at_barrier_ = 0;
    const char* barrier_ = nullptr;
    bool any_ = false;
    bool any_result_ = false;
    u64 random_state_ = 1;
    Context main_;
    CopyMode modes_[std::size(kUnits)];  // of the units in this block
    Queue loads_;
    std::vector<Signature> products_[kMaxThreads / kWarpgroup];  // of each warpgroup, by the first warp to start them
    Memory shared_, async_view_;
};

/// The block that this host thread is running. Fibers never move between host threads.
thread_local Block* block = nullptr;

u32 Block::random(u32 bound) {
    // xorshift64*; the upper half is the good one.
    random_state_ ^= random_state_ >> 12;
    random_state_ ^= random_state_ << 25;
    random_state_ ^= random_state_ >> 27;
    return static_cast<u32>((random_state_ * 0x2545f4914f6cdd1dull) >> 32) % bound;
}

/// One of the bits set in `mask`, by the launch's order.
u32 Block::pick(u32 mask) {
    switch (launch.order) {
        case Order::kForward:
            return static_cast<u32>(__builtin_ctz(mask));
        case Order::kReverse:
            return 31 - static_cast<u32>(__builtin_clz(mask));
        case Order::kRandom:
            break;
    }
    const u32 turn = random(32);
    const u32 turned = mask >> turn | mask << (31 - turn) << 1;
    return (static_cast<u32>(__builtin_ctz(turned)) + turn) % 32;
}

void Block::set_ready(u32 warp, u32 lanes) {
    warps_[warp].ready = lanes;
    ready_warps_ = lanes != 0 ? ready_warps_ | 1u << warp : ready_warps_ & ~(1u << warp);
}

/// The current thread will not run before somebody makes it ready.
void Block::suspend(const char* name) {
    fibers_[current].waits_at = name;
    set_ready(current / kLanes, warps_[current / kLanes].ready & ~(1u << current % kLanes));
}

/// Leaves the current thread, which may be ready or not, for the next one that is.
void Block::run_next() {
    while (ready_warps_ == 0 && !loads_.items.empty())
        perform(Unit::kLoads, random(static_cast<u32>(loads_.items.size())));
    if (ready_warps_ == 0) {
        error = "block " + std::to_string(index) + ": deadlock, every thread waits" + describe_waiting();
        leave();
    }
    u32 warp = current / kLanes;
    // Random order mostly stays in a warp: long runs of one warp expose more than a fair shuffle.
    if (launch.order != Order::kRandom || warps_[warp].ready == 0 || random(16) == 0)
        warp = pick(ready_warps_);
    Fiber& from = fibers_[current];
    current = warp * kLanes + pick(warps_[warp].ready);
    if (&fibers_[current] != &from)
        switch_context(from.context, fibers_[current].context, from.returned);
}

/// Back to run(), for good.
void Block::leave() {
    switch_context(fibers_[current].context, main_, true);
    __builtin_unreachable();
}

void Block::fail(const std::string& message) {
    error = "block " + std::to_string(index) + ", thread " + std::to_string(current) + " (warp " +
            std::to_string(current / kLanes) + ", lane " + std::to_string(current % kLanes) + "): " + message;
    leave();
}

std::string Block::describe_waiting() const {
    auto state = [&](u32 thread) -> std::string {
        const Fiber& fiber = fibers_[thread];
        if (fiber.returned)
            return "returned";
        char text[256];
        if (fiber.waits_for != nullptr)
            fiber.describe(fiber.waits_for, fiber.detail, text, sizeof text);
        return std::string("at ") + (fiber.waits_for != nullptr ? text : fiber.waits_at);
    };
    std::string text;
    for (u32 first = 0; first < launch.threads;) {
        u32 last = first;
        while ((last + 1) % kLanes != 0 && state(last + 1) == state(first))
            ++last;
        text += "\n  warp " + std::to_string(first / kLanes) + ", lanes " + std::to_string(first % kLanes) + "-" +
                std::to_string(last % kLanes) + ": " + state(first);
        first = last + 1;
    }
    return text;
}

void Block::meet_warp(const char* name, void* operands, WarpOperation operation) {
    perform_some();
    const u32 w = current / kLanes, l = current % kLanes;
    Warp& warp = warps_[w];
    if (warp.arrived != 0) {
        const char* other = fibers_[w * kLanes + static_cast<u32>(__builtin_ctz(warp.arrived))].waits_at;
        if (other != name && std::strcmp(other, name) != 0)  // equal names mostly are one string
            fail(std::string("at ") + name + " while other lanes of its warp wait at " + other);
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

bool Block::meet_block(const char* name, bool predicate) {
    perform_some();
    if (at_barrier_ != 0 && std::strcmp(barrier_, name) != 0)
        fail(std::string("at ") + name + " while other threads of the block wait at " + barrier_);
    barrier_ = name;
    any_ = any_ || predicate;
    ++at_barrier_;
    suspend(name);
    if (at_barrier_ == running_)
        release_barrier();
    run_next();
    // Nobody can complete the next barrier before this thread gets there, so the result still stands.
    return any_result_;
}

void Block::release_barrier() {
    at_barrier_ = 0;
    any_result_ = any_;
    any_ = false;
    for (u32 w = 0; w < warps_used_; ++w)
        set_ready(w, warps_[w].running);
}

void Block::wait_for(const void* object, u32 detail, Describe describe) {
    Fiber& fiber = fibers_[current];
    fiber.waits_for = object;
    fiber.detail = detail;
    fiber.describe = describe;
    suspend(nullptr);
    run_next();
}

void Block::wake(const void* object) {
    for (u32 n = 0; n < launch.threads; ++n)
        if (fibers_[n].waits_for == object) {
            fibers_[n].waits_for = nullptr;
            set_ready(n / kLanes, warps_[n / kLanes].ready | 1u << n % kLanes);
        }
}

void Block::give_way() {
    perform_some();
    run_next();
}

// ---- Asynchronous work.

Queue& Block::queue(Unit unit) {
    switch (unit) {
        case Unit::kCopies:
            return fibers_[current].copies;
        case Unit::kStores:
            return fibers_[current].stores;
        case Unit::kProducts:
            return warps_[current / kLanes].products;
        case Unit::kLoads:
            break;
    }
    return loads_;
}

/// Performs the n-th of a queue unless that has been done; of products, all before it too.
void Block::perform(Unit unit, u64 n) {
    std::vector<Queue::Item>& items = queue(unit).items;
    for (u64 m = unit == Unit::kProducts ? 0 : n; m <= n; ++m)
        if (items[m].work != nullptr) {
            items[m].work->perform();
            items[m].work.reset();
        }
    if (unit == Unit::kLoads)
        items.erase(items.begin() + static_cast<i64>(n));
}

void Block::start(Unit unit, Work* work) {
    Queue& own = queue(unit);
    own.items.push_back({std::unique_ptr<Work>(work), own.groups_committed});
    const CopyMode mode = modes_[static_cast<u32>(unit)];
    if (mode == CopyMode::kAtIssue || (mode == CopyMode::kRandom && random(2) == 0))
        perform(unit, own.items.size() - 1);
}

/// A thread that comes to a meeting may find that some work has been done.
void Block::perform_some() {
    for (u32 n = 0; n < std::size(kUnits); ++n) {
        const Unit unit = static_cast<Unit>(n);
        const u32 count = static_cast<u32>(queue(unit).items.size());
        if (count != 0 && modes_[n] == CopyMode::kRandom && random(kUnits[n].patience) == 0)
            perform(unit, random(count));
    }
}

void Block::wait(Unit unit, u32 pending) {
    Queue& own = queue(unit);
    u64 done = 0;
    for (; done < own.items.size() && own.items[done].group + pending < own.groups_committed; ++done)
        perform(unit, done);
    own.items.erase(own.items.begin(), own.items.begin() + static_cast<i64>(done));
}

void Block::start_product(Work* work, const Signature& signature) {
    Warp& warp = warps_[current / kLanes];
    std::vector<Signature>& started = products_[current / kWarpgroup];
    if (!warp.fenced)
        fail("wgmma: no wgmma_fence since the last wgmma_wait");
    const u64 n = warp.products_started++;
    if (n == started.size())
        started.push_back(signature);
    else if (std::memcmp(&started[n], &signature, sizeof signature) != 0)
        fail("wgmma: product " + std::to_string(n) + " is not that of the other warps of its warpgroup");
    start(Unit::kProducts, work);
}

void Block::wait_products(u32 pending) {
    Warp& warp = warps_[current / kLanes];
    const Queue& products = warp.products;
    if (!products.items.empty() && products.items.back().group == products.groups_committed)
        fail("wgmma_wait: no wgmma_commit since the last product");
    warp.fenced = false;
    wait(Unit::kProducts, pending);
}

void Block::check_finished(Unit unit) {
    if (const u64 left = queue(unit).items.size(); left != 0)
        fail("returned with " + std::to_string(left) + " " + kUnits[static_cast<u32>(unit)].works + " that no " +
             kUnits[static_cast<u32>(unit)].wait + " has covered");
}

// ---- Running.

void Block::run_fiber() {
    launch.kernel(launch.params);
    for (const Unit unit : {Unit::kCopies, Unit::kStores, Unit::kProducts})
        check_finished(unit);
    if (running_ == 1) {
        check_finished(Unit::kLoads);
        for (u32 w = 0; w < warps_used_; ++w)
            if (warps_[w].products_started != products_[w / 4].size())
                fail("warp " + std::to_string(w) + " took part in " + std::to_string(warps_[w].products_started) +
                     " of the " + std::to_string(products_[w / 4].size()) + " products of its warpgroup");
    }
    fibers_[current].returned = true;
    suspend(nullptr);
    warps_[current / kLanes].running &= ~(1u << current % kLanes);
    --running_;
    if (running_ == 0)
        leave();
    if (at_barrier_ == running_)
        release_barrier();
    run_next();
    __builtin_unreachable();
}

bool Block::run(u32 index_) {
    index = index_;
    random_state_ = (launch.seed + 1) * 0x9e3779b97f4a7c15ull ^ (index + 1) * 0xbf58476d1ce4e5b9ull;
    if (random_state_ == 0)
        random_state_ = 1;
    if (launch.shared_bytes != 0) {
        std::memset(shared_.get(), kPoison, launch.shared_bytes);
        std::memset(async_view_.get(), kPoison, launch.shared_bytes);
    }
    state = {};
    // At random, one unit may be as fast and another as slow as can be: together they show more than in step.
    for (CopyMode& mode : modes_)
        mode = launch.copy_mode == CopyMode::kRandom ? static_cast<CopyMode>(random(3)) : launch.copy_mode;
    modes_[static_cast<u32>(Unit::kCopies)] = launch.copy_mode;
    running_ = launch.threads;
    for (u32 w = 0; w < warps_used_; ++w) {
        warps_[w].running = ~0u;
        warps_[w].products_started = 0;
        warps_[w].fenced = false;
        products_[w / 4].clear();
        set_ready(w, ~0u);
    }
    for (u32 n = 0; n < launch.threads; ++n) {
        Fiber& fiber = fibers_[n];
        fiber.returned = false;
        // All stacks begin at the same place of a page; shifting them keeps the busy ends out of the same cache sets.
        prepare(fiber.context, &start_fiber, n % 64 * 64);
    }
    current = pick(ready_warps_) * kLanes + pick(~0u);
    block = this;
    switch_context(main_, fibers_[current].context, false);
    block = nullptr;
    return error.empty();
}

void Block::start_fiber() {
#if defined(__SANITIZE_ADDRESS__)
    const void* previous_stack;
    u64 previous_bytes;
    static_assert(sizeof(size_t) == sizeof previous_bytes);
    __sanitizer_finish_switch_fiber(nullptr, &previous_stack, reinterpret_cast<size_t*>(&previous_bytes));
    // The very first fiber is entered from run(), whose stack nobody else knows.
    if (block->main_.stack == nullptr) {
        block->main_.stack = const_cast<void*>(previous_stack);
        block->main_.stack_bytes = previous_bytes;
    }
#endif
    block->run_fiber();
}

// ---- What the other headers call.

void fail(const char* format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    block->fail(message);
}

u32 thread_index() { return block->current; }
u32 block_index() { return block->index; }
u32 block_threads() { return block->launch.threads; }
u32 grid_size() { return block->launch.grid; }
void meet_warp(const char* name, void* operands, WarpOperation operation) {
    block->meet_warp(name, operands, operation);
}
bool meet_block(const char* name, bool predicate) { return block->meet_block(name, predicate); }
void wait_for(const void* object, u32 detail, Describe describe) { block->wait_for(object, detail, describe); }
void wake(const void* object) { block->wake(object); }
void give_way() { block->give_way(); }
void start(Unit unit, Work* work) { block->start(unit, work); }
void commit(Unit unit) { block->commit(unit); }
void wait(Unit unit, u32 pending) { block->wait(unit, pending); }

void start_product(Work* work, const Signature& signature) { block->start_product(work, signature); }
void wait_products(u32 pending) { block->wait_products(pending); }
void fence_products() { block->fence_products(); }
BlockState& block_state() { return block->state; }

u8* shared_memory(u64 bytes) {
    if (bytes > block->launch.shared_bytes)
        fail("the kernel uses %llu bytes of shared memory but is launched with %llu", bytes,
             block->launch.shared_bytes);
    return block->shared_memory();
}

u8* shared_pointer(SharedAddress address, u32 bytes, const char* who) {
    const u64 offset = static_cast<u64>(address) - kSharedBase;
    if (offset + bytes > block->launch.shared_bytes || offset + bytes < bytes)
        fail("%s: %u bytes at shared offset %lld, outside the block's %llu bytes", who, bytes, static_cast<i64>(offset),
             block->launch.shared_bytes);
    if (address % bytes != 0)
        fail("%s: shared offset %llu is not aligned to %u bytes", who, offset, bytes);
    return block->shared_memory() + offset;
}

const u8* async_view(SharedAddress address, u32 bytes, const char* who) {
    return block->async_view() + (shared_pointer(address, bytes, who) - block->shared_memory());
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
    std::memcpy(block->async_view() + (address - kSharedBase), data, bytes);
}

void publish_shared() { std::memcpy(block->async_view(), block->shared_memory(), block->launch.shared_bytes); }

/// The blocks of a grid in the order in which they are started.
std::vector<u32> block_order(const Launch& launch) {
    std::vector<u32> blocks(launch.grid);
    for (u32 n = 0; n < launch.grid; ++n)
        blocks[n] = launch.order == Order::kReverse ? launch.grid - 1 - n : n;
    if (launch.order == Order::kRandom) {
        std::minstd_rand random(static_cast<u32>(launch.seed));
        std::shuffle(blocks.begin(), blocks.end(), random);
    }
    return blocks;
}

}  // namespace emulated

DEVICE SharedAddress shared_address(const void* pointer) {
    const u64 offset = static_cast<u64>(static_cast<const u8*>(pointer) - emulated::block->shared_memory());
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
    const Launch launch = {kernel,
                           grid,
                           threads,
                           shared_bytes,
                           own_params.get(),
                           seed,
                           static_cast<Order>(order),
                           static_cast<CopyMode>(copy_mode)};
    const std::vector<u32> blocks = block_order(launch);
    std::atomic<u32> next{0};
    std::mutex mutex;
    std::string error;

    auto work = [&] {
        Stacks stacks(threads);
        Block own_block(launch, stacks);
        for (u32 n; (n = next++) < grid;) {
            if (own_block.run(blocks[n]))
                continue;
            next = grid;  // the others finish the block they are at
            const std::lock_guard<std::mutex> lock(mutex);
            if (error.empty())
                error = own_block.error;
        }
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
