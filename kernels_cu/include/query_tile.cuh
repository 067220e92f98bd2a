// Query tiles, as the kernels of the backward that run over them count their blocks.
#pragma once
#include "platform/thread.cuh"
#include "traits.cuh"

template <typename Params>
DEVICE i32 query_tile_count(const Params& params) {
    return (params.seqlen_q + static_cast<i32>(kBr) - 1) / static_cast<i32>(kBr);
}

/// The query tile that this block works on.
struct QueryTile {
    i32 batch, head, index;

    template <typename Params>
    DEVICE explicit QueryTile(const Params& params) {
        const i32 tiles = query_tile_count(params);
        const i32 block = static_cast<i32>(block_index());
        index = block % tiles;
        head = block / tiles % params.num_heads;
        batch = block / tiles / params.num_heads;
    }
};
