// A matrix tile in shared memory as the tensor memory accelerator writes it and wgmma reads it.
#pragma once
#include "platform/tma.cuh"
#include "platform/types.cuh"
#include "platform/wgmma.cuh"

/// The descriptor of what lies `bytes` further. Addresses in shared memory need fewer bits than the field has: no carry,
/// and 32 bits are added where 64 would cost three times the instructions.
DEVICE u64 advance(u64 descriptor, u32 bytes) {
    return (descriptor & ~0xffffffffull) | static_cast<u32>(static_cast<u32>(descriptor) + (bytes >> 4));
}

/// kRows x kCols 16-bit elements in panels of 64 columns: a row of a panel is 128 bytes, whose 16-byte chunks are permuted
/// by the row index (the 128-byte swizzle). Columns beyond kCols fill up the last panel and are not looked at.
template <typename T, u32 kRows_, u32 kCols_>
struct alignas(1024) PanelTile {
    using Element = T;
    static constexpr u32 kRows = kRows_;
    static constexpr u32 kCols = kCols_;
    static constexpr u32 kPanelCols = 64;
    static constexpr u32 kPanels = (kCols + kPanelCols - 1) / kPanelCols;
    static constexpr u32 kRowBytes = 128;
    static constexpr u32 kPanelBytes = kRows * kRowBytes;
    static constexpr u32 kStepsPerPanel = 4;  // k-steps of 16 columns
    static_assert(sizeof(T) == 2 && kRows % 8 == 0, "the swizzle repeats every eight rows");

    T data[kPanels * kRows * kPanelCols];

    DEVICE T& at(u32 row, u32 col) {
        const u32 chunk = col % kPanelCols / 8 ^ row % 8;
        return data[(col / kPanelCols * kRows + row) * kPanelCols + 8 * chunk + col % 8];
    }

    /// Starts loading the rows from `row` on of one head; one thread. The barrier expects sizeof(data) bytes.
    DEVICE void load(const TensorMap& map, Barrier& full, i32 row, i32 head, i32 batch) {
#pragma unroll
        for (u32 n = 0; n < kPanels; ++n)
            tma_load(data + n * kRows * kPanelCols, map, full, static_cast<i32>(n * kPanelCols), row, head, batch);
    }

    /// One of kBlocks equal parts of the rows, for all blocks of a cluster: each loads its own. Every block's barrier expects
    /// sizeof(data) bytes in all.
    template <u32 kBlocks>
    DEVICE void load_part(u32 part, const TensorMap& map, Barrier& full, i32 row, i32 head, i32 batch) {
        constexpr u32 kPartRows = kRows / kBlocks;
        static_assert(kRows % kBlocks == 0 && kPartRows % 8 == 0, "a part begins where the swizzle does");
#pragma unroll
        for (u32 n = 0; n < kPanels; ++n)
            tma_load_to_all<kBlocks>(data + (n * kRows + part * kPartRows) * kPanelCols, map, full,
                                     static_cast<i32>(n * kPanelCols), row + static_cast<i32>(part * kPartRows), head,
                                     batch);
    }

    /// As an operand whose rows run along the summed index, and bytes from one step of 16 columns to the k-th.
    DEVICE u64 along_cols() const { return matrix_descriptor(shared_address(data), 0, 8 * kRowBytes); }
    DEVICE static constexpr u32 step_along_cols(u32 k) {
        return k / kStepsPerPanel * kPanelBytes + k % kStepsPerPanel * 32;
    }
    /// As an operand whose columns run along the summed index, and bytes from one step of 16 rows to the k-th.
    DEVICE u64 along_rows() const { return matrix_descriptor(shared_address(data), kPanelBytes, 8 * kRowBytes); }
    DEVICE static constexpr u32 step_along_rows(u32 k) { return k * 16 * kRowBytes; }
};
