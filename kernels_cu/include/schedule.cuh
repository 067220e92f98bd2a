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

/// The tile that `behind` others follow. Heads are taken in sections whose data fits the L2 cache; inside a section the
/// tile index varies slowest, so that with a mask the longest tiles of all its heads come first and the last to run are
/// short. Counted from the end, it is the first section that may have fewer heads: the last one must have short tiles
/// enough for everybody.
/// reversed: the last tiles of a head are the long ones.
DEVICE TileWork tile_work_before(i32 behind, i32 rows, u32 tile_rows, i32 heads, i32 section, bool reversed) {
    const i32 size = static_cast<i32>(tile_rows);
    const i32 tiles = (rows + size - 1) / size;
    const i32 first_head = behind / (section * tiles) * section;
    const i32 in_section = behind - first_head * tiles;
    const i32 heads_here = smaller(section, heads - first_head);
    const i32 order = in_section / heads_here;
    const i32 tile = reversed ? order : tiles - 1 - order;
    return {first_head + in_section % heads_here, {tile * size, smaller((tile + 1) * size, rows)}};
}

/// Number `index` of all the tiles.
DEVICE TileWork tile_work_at(i32 index, i32 rows, u32 tile_rows, i32 heads, i32 section, bool reversed) {
    const i32 size = static_cast<i32>(tile_rows);
    const i32 behind = (rows + size - 1) / size * heads - 1 - index;
    return tile_work_before(behind, rows, tile_rows, heads, section, reversed);
}

/// This block's work where every tile has a block.
DEVICE TileWork tile_work(i32 rows, u32 tile_rows, i32 heads, i32 section, bool reversed) {
    const i32 behind = static_cast<i32>(grid_size() - 1 - block_index());
    return tile_work_before(behind, rows, tile_rows, heads, section, reversed);
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
