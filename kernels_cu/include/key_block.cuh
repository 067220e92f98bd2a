// What a block of the backward for warpgroups works on: some keys of one key/value head, and the query tiles that see them.
#pragma once
#include "band.cuh"
#include "schedule.cuh"
#include "tensor_params.cuh"
#include "traits.cuh"

/// The keys of one key/value head that a block works on, and the query tiles that see them.
struct Work {
    i32 batch, kv_head;
    Range keys;   // some may lie beyond the last key
    Range tiles;  // of every query head of the group
    i32 steps;    // tiles of all of them

    DEVICE explicit Work(const BackwardTensorParams& params) {
        const TileWork work =
            tile_work(params.seqlen_k, kBc, params.batch * params.num_kv_heads, params.section, false);
        batch = work.batch_head / params.num_kv_heads;
        kv_head = work.batch_head % params.num_kv_heads;
        keys = {work.rows.first, work.rows.first + static_cast<i32>(kBc)};
        tiles = Band::of(params).query_tiles(work.rows);
        steps = (tiles.end - tiles.first) * params.group;
    }
};

/// Where a warp is in its walk over the query tiles.
struct Walk {
    i32 head, tile;

    DEVICE Walk(const BackwardTensorParams& params, const Work& work)
        : head(work.kv_head * params.group), tile(work.tiles.first) {}

    DEVICE void advance(const Range& tiles) {
        if (++tile == tiles.end) {
            tile = tiles.first;
            ++head;
        }
    }
    DEVICE i32 first_query() const { return tile * static_cast<i32>(kBr); }
};
