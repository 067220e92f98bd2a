// cp.async: global to shared memory without passing registers, in groups that complete in order.
//
// A copy lands at some moment between its start and the wait that covers it (launch: copy_mode); until then the
// destination holds what it held. That is so on every emulated architecture, although sm_75 copies at once: a kernel may
// lean on no more than the contract: ptx/cp_async.cuh.
#pragma once
#include "platform/block.cuh"
#include "platform/types.cuh"

template <u32 kBytes>
DEVICE void copy_async(void* shared, const void* global, bool valid) {
    emulated::trace("copy", kBytes);
    u8* target = emulated::shared_pointer(shared_address(shared), kBytes, "copy_async");
    struct {
        u8 bytes[kBytes];
    } data = {};
    if (valid) {
        if (reinterpret_cast<u64>(global) % kBytes != 0)
            emulated::fail("copy_async: global address %p is not aligned to %u bytes", global, kBytes);
        // Read at once: nobody writes what a kernel copies, and AddressSanitizer then names the line that asked for it.
        __builtin_memcpy(&data, global, kBytes);
    }
    emulated::start(emulated::Unit::kCopies, emulated::work([=] { __builtin_memcpy(target, &data, kBytes); }));
}

DEVICE void copy_async_commit() {
    emulated::trace("copy commit");
    emulated::commit(emulated::Unit::kCopies);
}

template <u32 kPending>
DEVICE void copy_async_wait() {
    emulated::trace("copy wait", kPending);
    emulated::wait(emulated::Unit::kCopies, kPending);
}
