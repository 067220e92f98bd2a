// The first FlashAttention's forward, Algorithm 2 of arXiv:2205.14135, on tensor cores by mma.sync (sm_75 and up).
//
// A block owns one head. Outside are tiles of kBc keys, which are loaded once each; inside are tiles of kBr queries. What is
// known of a query tile, O, m and l, lies in global memory between two visits, and each visit reads it, takes it to the new
// m and l, and writes it: the traffic that FlashAttention-2 saves by exchanging the loops. As in the paper's own code, O is
// kept in float32, a tile's first visit starts from 0 and its last one writes out, tiles that a mask hides are left out, and P
// is relative to the new m at once. The warps share the queries of a tile.
// The time goes to that traffic, so tiles of keys are as large as shared memory and the registers for S allow.
#include "band.cuh"
#include "copy_tile.cuh"
#include "hidden.cuh"
#include "mask_scores.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "traits.cuh"
#include "v1_params.cuh"
#include "warp_gemm.cuh"

constexpr u32 kM = kBr / (16 * kWarps);
static_assert(kM * 16 * kWarps == kBr, "each warp owns whole 16-row tiles");

using OutputTile = SumTile<Element, kM, kDv / 8>;

struct SharedStorage {
    SharedTile<Element, kBc, kD> K;
    SharedTile<Element, kBc, kDv> V;
    union {
        SharedTile<Element, kBr, kD> Q;
        SharedTile<Element, kBr, kDv> O;  // on its way out
    } rows[kStages];
};

/// What global memory keeps of one query tile, O as the warps' fragments lie, then m and l of its rows: this lane's part.
struct KeptRows {
    static constexpr u32 kFloats = kBr * (kDv + 2);
    float4* O;  // of one fragment; a warp's is 512 bytes
    float *m, *l;

    DEVICE explicit KeptRows(float* first) {
        const u32 warp = warp_index();
        O = reinterpret_cast<float4*>(first) + warp * kM * (kDv / 8) * 32 + lane_index();
        m = first + kBr * kDv + warp * 16 * kM + OutputTile::row(0, 0);
        l = m + kBr;
    }
    /// Rows from the lane's first one on.
    DEVICE static constexpr u32 row(u32 i, u32 half) { return 16 * i + 8 * half; }

    DEVICE void read(OutputTile& tile, SoftmaxState<kM>& state) const {
#pragma unroll
        for (u32 i = 0; i < kM; ++i) {
#pragma unroll
            for (u32 n = 0; n < kDv / 8; ++n) {
                const float4 x = O[(i * (kDv / 8) + n) * 32];
                tile.x[i][n][0] = x.x, tile.x[i][n][1] = x.y, tile.x[i][n][2] = x.z, tile.x[i][n][3] = x.w;
            }
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                state.m[i][half] = m[row(i, half)];
                state.l[i][half] = l[row(i, half)];
            }
        }
    }
    DEVICE void write(const OutputTile& tile, const SoftmaxState<kM>& state) const {
#pragma unroll
        for (u32 i = 0; i < kM; ++i) {
#pragma unroll
            for (u32 n = 0; n < kDv / 8; ++n)
                O[(i * (kDv / 8) + n) * 32] =
                    float4{tile.x[i][n][0], tile.x[i][n][1], tile.x[i][n][2], tile.x[i][n][3]};
            if (lane_index() % 4 == 0)
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    m[row(i, half)] = state.m[i][half];
                    l[row(i, half)] = state.l[i][half];
                }
        }
    }
};

/// Takes O = P V / l back to the sum P V; of the four lanes of a row one keeps l, which is summed over them again.
DEVICE void undo_division(OutputTile& O, SoftmaxState<kM>& state) {
#pragma unroll
    for (u32 i = 0; i < kM; ++i)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
#pragma unroll
            for (u32 n = 0; n < kDv / 8; ++n) {
                O.x[i][n][2 * half] *= state.l[i][half];
                O.x[i][n][2 * half + 1] *= state.l[i][half];
            }
            if (lane_index() % 4 != 0)
                state.l[i][half] = 0.0f;
        }
}

/// Queries [first, end) of tile i that exist.
DEVICE Range queries_of_tile(const ForwardV1Params& params, i32 i) {
    const i32 first = i * static_cast<i32>(kBr);
    return {first, smaller(first + static_cast<i32>(kBr), params.seqlen_q)};
}

/// out = 0 and lse = -inf of queries that see no key, which no tile of keys visits.
DEVICE void write_nothing(const ForwardV1Params& params, Element* out, float* lse, Range queries) {
    for (u32 n = thread_index(); n < (queries.end - queries.first) * kHeadDimV; n += kThreads)
        out[(queries.first + static_cast<i32>(n / kHeadDimV)) * params.out_row_stride + n % kHeadDimV] =
            from_float<Element>(0.0f);
    if (lse != nullptr)
        for (i32 query = queries.first + static_cast<i32>(thread_index()); query < queries.end; query += kThreads)
            lse[query] = -infinity();
}

/// Attention of one head. careful: hidden non-finite values of V are kept out. Returns whether out is finite.
DEVICE bool attend(const ForwardV1Params& params, bool careful) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const i32 batch = static_cast<i32>(block_index()) / params.num_heads;
    const i32 head = static_cast<i32>(block_index()) % params.num_heads, kv_head = head / params.group;
    const Element* q = params.q + batch * params.q_batch_stride + head * params.q_head_stride;
    const Element* k = params.k + batch * params.k_batch_stride + kv_head * params.k_head_stride;
    const Element* v = params.v + batch * params.v_batch_stride + kv_head * params.v_head_stride;
    Element* out = params.out + batch * params.out_batch_stride + head * params.out_head_stride;
    float* lse = params.lse == nullptr ? nullptr : params.lse + static_cast<i64>(block_index()) * params.seqlen_q;
    const i32 query_tiles = (params.seqlen_q + static_cast<i32>(kBr) - 1) / static_cast<i32>(kBr);
    float* kept = params.kept + static_cast<i64>(block_index()) * query_tiles * KeptRows::kFloats;

    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const u32 warp_row = warp_index() * 16 * kM;
    auto load_Q = [&](i32 i, u32 stage) {
        load_tile<kHeadDim>(shared.rows[stage].Q, q, params.q_row_stride, i * static_cast<i32>(kBr), params.seqlen_q);
        copy_async_commit();
    };

    bool finite = true;
#pragma unroll 1
    for (i32 j = 0; j * static_cast<i32>(kBc) < params.seqlen_k; ++j) {
        const i32 first_key = j * static_cast<i32>(kBc);
        const Range keys = {first_key, first_key + static_cast<i32>(kBc)};  // some may lie beyond the last key
        const Range tiles = band.query_tiles({first_key, smaller(keys.end, params.seqlen_k)});
        if (tiles.empty())
            continue;
        block_sync();  // nobody reads the tiles of the step before any more
        load_tile<kHeadDim>(shared.K, k, params.k_row_stride, first_key, params.seqlen_k);
        load_tile<kHeadDimV>(shared.V, v, params.v_row_stride, first_key, params.seqlen_k);
        load_Q(tiles.first, 0);
        if (kBand && careful) {
            copy_async_wait<0>();
            clear_nonfinite(shared.V);
        }

        u32 stage = 0;
#pragma unroll 1
        for (i32 i = tiles.first; i < tiles.end; ++i) {
            const Range queries = queries_of_tile(params, i), seen = band.key_tiles(queries);
            const Range rows = Range{i * static_cast<i32>(kBr), 0}.part(warp_row, 16 * kM);  // of this warp
            const KeptRows kept_rows(kept + static_cast<i64>(i) * KeptRows::kFloats);
            SoftmaxState<kM> state(score.unit());
            OutputTile O;
            O.clear();
            if (j != seen.first)
                kept_rows.read(O, state);  // arrives under S = Q_i K_j^T

            copy_async_wait<0>();
            block_sync();  // Q_i has landed, nobody reads what lay in the next stage, and m and l are written
            if (kStages > 1 && i + 1 < tiles.end)
                load_Q(i + 1, stage ^ 1);
            Accumulator<kM, kBc / 8> S;
            S.clear();
            warp_gemm<Element, kD / kStepK<Element>>(S, RowMajorA(shared.rows[stage].Q, warp_row),
                                                     ColumnMajorB(shared.K, 0));  // S = Q_i K_j^T
            if constexpr (kScoreKind != 0)
                S.each([&](float& s) { s = score(s); });
            if (!band.all_visible(rows, keys))
                mask_scores(S, band, rows.first, first_key);

            undo_division(O, state);
            state.update(S, O);  // S becomes P = exp(S - m), O is taken to the new m
            warp_gemm<Element, kBc / kStepK<Element>>(
                O, RegisterA<Element, kM, kBc / 8>(S),
                RowMajorB<Element, true, 1, kBc, kDv>(shared.V, 0));  // O += P V_j
            state.finish(O);                                          // O is divided by the new l

            if (j + 1 < seen.end) {
                kept_rows.write(O, state);
            } else {
                if (lse != nullptr && lane_index() % 4 == 0)
#pragma unroll
                    for (u32 m = 0; m < kM; ++m)
#pragma unroll
                        for (u32 half = 0; half < 2; ++half) {
                            const i32 query = rows.first + static_cast<i32>(O.row(m, 2 * half));
                            if (query < params.seqlen_q)
                                lse[query] = state.log_sum_exp(m, half);
                        }
                if constexpr (kBand)
                    finite &= O.all_finite();
                block_sync();  // nobody reads Q_i any more
                auto& leaving = shared.rows[stage].O;
                store_accumulator(leaving, O, warp_row, 0);
                if (kBand && careful)
                    restore_nonfinite<kHeadDimV>(leaving, v, params.v_row_stride, {0, params.seqlen_k},
                                                 [&](i32 key) { return band.queries_of(key).from(queries.first); });
                block_sync();
                store_tile<kHeadDimV>(leaving, out, params.out_row_stride, queries.first, params.seqlen_q);
            }
            if (kStages == 1 && i + 1 < tiles.end) {
                block_sync();
                load_Q(i + 1, 0);
            }
            stage ^= kStages - 1;
        }
    }
    if constexpr (kBand)
#pragma unroll 1
        for (i32 i = 0; i < query_tiles; ++i)
            if (const Range queries = queries_of_tile(params, i); band.key_tiles(queries).empty())
                write_nothing(params, out, lse, queries);
    return !kBand || !block_any(!finite);
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void forward_v1(PARAMS(ForwardV1Params) params) {
    // A result that is not finite may be the fault of a hidden NaN in V: the head is computed once more, with care.
    bool careful = false;
#pragma unroll 1
    while (!attend(params, careful) && !careful) {
        careful = true;
        block_sync();  // the first run still reads shared memory
    }
}
