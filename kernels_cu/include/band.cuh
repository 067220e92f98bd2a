// Which keys a query may see. Causal masks (either alignment) and windows are all bands: first <= key - query <= last.
// A further kind of mask is one more struct with these functions.
#pragma once
#include "platform/math.cuh"
#include "traits.cuh"

constexpr bool kBandFirst = CF_BAND_FIRST;  // the band has a lower bound
constexpr bool kBandLast = CF_BAND_LAST;    // the band has an upper bound
constexpr bool kBand = kBandFirst || kBandLast;

/// A range [first, end) of rows, keys or tiles.
struct Range {
    i32 first, end;
    DEVICE bool empty() const { return first >= end; }
    /// The range from `offset` on, `size` long.
    DEVICE Range part(u32 offset, u32 size) const {
        return {first + static_cast<i32>(offset), first + static_cast<i32>(offset + size)};
    }
    /// Counted from `origin`.
    DEVICE Range from(i32 origin) const { return {first - origin, end - origin}; }
};

struct Band {
    i32 first, last;  // bounds of key - query; a side without bound is not looked at
    i32 seqlen_q, seqlen_k;

    template <typename Params>
    DEVICE static Band of(const Params& params) {
        return {params.band_first, params.band_last, params.seqlen_q, params.seqlen_k};
    }

    /// The keys that a query sees.
    DEVICE Range keys_of(i32 query) const {
        return {kBandFirst ? larger(0, query + first) : 0, kBandLast ? smaller(seqlen_k, query + last + 1) : seqlen_k};
    }

    /// The queries that see a key.
    DEVICE Range queries_of(i32 key) const {
        const Range range = {kBandLast ? larger(0, key - last) : 0,
                             kBandFirst ? smaller(seqlen_q, key - first + 1) : seqlen_q};
        return key < seqlen_k ? range : Range{0, 0};
    }

    /// Key tiles that some query of [queries.first, queries.end) sees.
    DEVICE Range key_tiles(Range queries) const {
        const i32 first_key = kBandFirst ? larger(0, queries.first + first) : 0;
        const i32 end_key = kBandLast ? smaller(seqlen_k, queries.end + last) : seqlen_k;
        return tiles(first_key, end_key, static_cast<i32>(kBc));
    }

    /// Query tiles that see some key of [keys.first, keys.end).
    DEVICE Range query_tiles(Range keys) const {
        const i32 first_query = kBandLast ? larger(0, keys.first - last) : 0;
        const i32 end_query = kBandFirst ? smaller(seqlen_q, keys.end - first) : seqlen_q;
        return tiles(first_query, end_query, static_cast<i32>(kBr));
    }

    /// Does every one of the queries see every one of the keys? Keys may lie beyond the last, and are then not seen.
    DEVICE bool all_visible(Range queries, Range keys) const {
        return (!kBandFirst || keys.first - (queries.end - 1) >= first) &&
               (!kBandLast || keys.end - 1 - queries.first <= last) && keys.end <= seqlen_k;
    }

    /// Can any of the queries see any of the keys?
    DEVICE bool any_visible(Range queries, Range keys) const {
        return (!kBandFirst || keys.end - 1 - queries.first >= first) &&
               (!kBandLast || keys.first - (queries.end - 1) <= last);
    }

  private:
    DEVICE static Range tiles(i32 first_index, i32 end_index, i32 size) {
        return first_index < end_index ? Range{first_index / size, (end_index + size - 1) / size} : Range{0, 0};
    }
};
