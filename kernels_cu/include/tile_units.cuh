// Units of work for a cluster of blocks: as many query tiles as it has blocks, all of one KV head, so that the blocks share
// the keys and values that they load.
#pragma once
#include "band.cuh"
#include "platform/math.cuh"
#include "schedule.cuh"
#include "traits.cuh"

/// One of a unit's query tiles. Rows may lie beyond the last query, some or all; key_tiles is what some tile of the unit
/// sees.
struct UnitTile {
    i32 batch, head, first_query;
    Range key_tiles;
};

/// The tiles of a unit are the same rows of kMembers heads that share keys and values, where such heads come in groups of
/// that many; then they see the same keys. Else they are neighbours.
template <u32 kMembers>
struct TileUnits {
    i32 heads_each = 1, tiles_each = 1;  // of a unit
    i32 tile_rows, heads;                // as many rows, and so many heads in one, does a unit have

    template <typename Params>
    DEVICE explicit TileUnits(const Params& params) {
        constexpr i32 kCount = static_cast<i32>(kMembers);
        (params.group % kCount == 0 ? heads_each : tiles_each) = kCount;
        tile_rows = tiles_each * static_cast<i32>(kBr);
        heads = params.batch * params.num_heads / heads_each;
    }

    template <typename Params>
    DEVICE i32 count(const Params& params) const {
        return (params.seqlen_q + tile_rows - 1) / tile_rows * heads;
    }

    /// Tile `member` of unit `index`.
    template <typename Params>
    DEVICE UnitTile at(i32 index, i32 member, const Params& params) const {
        const i32 section = larger(1, params.section / heads_each);
        const TileWork work =
            tile_work_at(index, params.seqlen_q, static_cast<u32>(tile_rows), heads, section, kBandLast);
        const i32 batch_head = heads_each > 1 ? work.batch_head * heads_each + member : work.batch_head;
        const i32 first_query = heads_each > 1 ? work.rows.first : work.rows.first + member * static_cast<i32>(kBr);
        return {batch_head / params.num_heads, batch_head % params.num_heads, first_query,
                Band::of(params).key_tiles(work.rows)};
    }
};
