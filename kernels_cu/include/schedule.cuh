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
