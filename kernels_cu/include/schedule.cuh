// The order in which blocks take up their work.
#pragma once
#include "band.cuh"
#include "platform/math.cuh"
#include "platform/thread.cuh"

/// One tile of rows (queries or keys) of one head.
struct TileWork {
    i32 batch_head;  // batch * heads + head
    Range rows;
};

/// This block's work. Heads are taken in sections whose data fits the L2 cache; inside a section the tile index varies
/// slowest, so that with a mask the longest tiles of all its heads come first and the last blocks to run are short.
/// reversed: the last tiles of a head are the long ones.
DEVICE TileWork tile_work(i32 rows, u32 tile_rows, i32 heads, i32 section, bool reversed) {
    const i32 size = static_cast<i32>(tile_rows);
    const i32 tiles = (rows + size - 1) / size;
    const i32 index = static_cast<i32>(block_index());
    const i32 first_head = index / (section * tiles) * section;
    const i32 in_section = index - first_head * tiles;
    const i32 heads_here = smaller(section, heads - first_head);
    const i32 order = in_section / heads_here;
    const i32 tile = reversed ? tiles - 1 - order : order;
    return {first_head + in_section % heads_here, {tile * size, smaller((tile + 1) * size, rows)}};
}

/// The query rows of one head that a block works on, and where their keys and values are.
struct QueryWork {
    i32 batch, head;
    Range queries;
    const Element *k, *v;  // row 0 of the head's keys and values

    QueryWork() = default;
    template <typename Params>
    DEVICE explicit QueryWork(const Params& params) {
        // With an upper bound late rows see most keys.
        const TileWork work =
            tile_work(params.seqlen_q, kBr, params.batch * params.num_heads, params.section, kBandLast);
        batch = work.batch_head / params.num_heads;
        head = work.batch_head % params.num_heads;
        queries = work.rows;
        const i32 kv_head = head / params.group;
        k = params.k + batch * params.k_batch_stride + kv_head * params.k_head_stride;
        v = params.v + batch * params.v_batch_stride + kv_head * params.v_head_stride;
    }
};
