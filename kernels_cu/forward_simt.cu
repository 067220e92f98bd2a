// FlashAttention-2 forward, Algorithm 1 of arXiv:2307.08691, by plain float32 multiply-adds (every GPU).
//
// A block owns kBr query rows of one head, a warp kWarpRows of them; keys come in tiles of kBc, last tile first, so that the
// tiles which need a mask are met while the pipeline fills. With one stage V_j is fetched under S = Q K_j^T, and K_{j-1}
// under O += P V_j; with two both are fetched a whole tile ahead. A row's statistics and its weights P stay in its warp.
// Multiply-adds bind, so everything else is arranged to take few instructions (thread_gemm.cuh).
#include "params.cuh"
#include "band.cuh"
#include "copy_tile.cuh"
#include "hidden.cuh"
#include "row_tile.cuh"
#include "schedule.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "thread_gemm.cuh"
#include "traits.cuh"

constexpr u32 kWarpRows = kBr / kWarps;
static_assert(kWarpRows * kWarps == kBr, "warps share the rows evenly");

constexpr u32 kLanesM = lanes_over_rows(kWarpRows, kBc);
using ScoreTile = ThreadTile<kWarpRows, kBc, kLanesM, 1>;
using OutputTile = ThreadTile<kWarpRows, kDv, kLanesM, 4>;

struct SharedStorage {
    struct Operands {
        RowTile<Element, kBr, kD, ReadBy::kTwoRows> Q;
        RowTile<Element, kBc, kD, ReadBy::kEightRows> K[kStages];
        RowTile<Element, kBc, kDv, ReadBy::kOneRow> V[kStages];
        RowTile<float, kBr, kBc, ReadBy::kTwoRows> P;
    };
    union {
        Operands in;
        RowTile<Element, kBr, kDv, ReadBy::kOneRow> O;  // on its way out, when the others are no longer needed
    };
};

/// Hides the scores of keys that a query may not see.
DEVICE void mask_scores(ScoreTile& S, const Band& band, i32 first_query, i32 first_key) {
#pragma unroll
    for (u32 m = 0; m < ScoreTile::kM; ++m) {
        // Relative to this lane's first column, so that the comparisons below are with constants.
        const i32 origin = first_key + static_cast<i32>(S.col(0));
        const Range keys = band.keys_of(first_query + static_cast<i32>(S.row(m))).from(origin);
#pragma unroll
        for (u32 n = 0; n < ScoreTile::kN; ++n) {
            const i32 col = static_cast<i32>(ScoreTile::kLanesN * n);
            if ((kBandFirst && col < keys.first) || col >= keys.end)
                S.x[m][n][0] = -infinity();
        }
    }
}

/// Attention of one block's rows. careful: hidden non-finite values of V are kept out. Returns whether out is finite, if
/// anything can be hidden.
DEVICE bool attend(const ForwardParams& params, bool careful) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const QueryWork work(params);
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const Range tiles = band.key_tiles(work.queries);

    auto load_K = [&](const Element* k, i32 j, u32 stage) {
        load_tile<kHeadDim>(shared.in.K[stage], k, params.k_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };
    auto load_V = [&](const Element* v, i32 j, u32 stage) {
        load_tile<kHeadDimV>(shared.in.V[stage], v, params.v_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };

    const u32 warp_row = warp_index() * kWarpRows;
    const Range rows = work.queries.part(warp_row, kWarpRows);  // of this warp; some may lie beyond the last query
    SoftmaxState<ScoreTile::kM, 1, sizeof(Element) == 2> state(score.unit());
    OutputTile O;
    O.clear();
    load_tile<kHeadDim>(shared.in.Q, params.q + work.batch * params.q_batch_stride + work.head * params.q_head_stride,
                        params.q_row_stride, work.queries.first, params.seqlen_q);
    copy_async_commit();
    if (!tiles.empty()) {
        load_K(work.k, tiles.end - 1, 0);
        if (kStages > 1)
            load_V(work.v, tiles.end - 1, 0);
    }
    u32 stage = 0;
#pragma unroll 1
    for (i32 j = tiles.end - 1; j >= tiles.first; --j) {
        const i32 first_key = j * static_cast<i32>(kBc);
        copy_async_wait<0>();
        block_sync();  // K_j has landed, and nobody reads V_{j+1}, P or the other stage any more
        if (kStages == 1) {
            load_V(work.v, j, 0);
        } else if (j > tiles.first) {
            load_K(work.k, j - 1, stage ^ 1);
            load_V(work.v, j - 1, stage ^ 1);
        }

        const Range keys = {first_key, first_key + static_cast<i32>(kBc)};
        auto between_products = [&] {
            if (kStages == 1) {
                copy_async_wait<0>();
                block_sync();  // V_j has landed, and nobody reads K_j any more
                if (j > tiles.first)
                    load_K(work.k, j - 1, 0);
            }
            if (kBand && careful && !band.all_visible(work.queries, keys))
                clear_nonfinite(shared.in.V[stage]);
        };
        if (kBand && !band.any_visible(rows, keys)) {
            between_products();  // near the diagonal some warps have rows that see none of the tile's keys
        } else {
            ScoreTile S;
            S.clear();
            add_product_transposed(S, shared.in.Q, warp_row, shared.in.K[stage]);  // S = Q K_j^T
            if constexpr (kScoreKind != 0)
                S.each([&](float& s) { s = score(s); });
            if (!band.all_visible(rows, keys))
                mask_scores(S, band, rows.first, first_key);
            between_products();
            state.update(S, O);  // S becomes P = exp(S - m)
            store_result(shared.in.P, S, warp_row);
            warp_sync();                                                // the warp's rows of P are complete
            add_product(O, shared.in.P, warp_row, shared.in.V[stage]);  // O += P V_j
        }
        stage ^= kStages - 1;
    }
    copy_async_wait<0>();
    state.finish(O);

    block_sync();                // nobody reads Q, K, V or P any more
    const QueryWork at(params);  // computed again: registers are short in the loop above
    if (params.lse != nullptr && O.lane_col() == 0) {
        float* lse = params.lse + (static_cast<i64>(at.batch) * params.num_heads + at.head) * params.seqlen_q;
#pragma unroll
        for (u32 m = 0; m < OutputTile::kM; ++m) {
            const i32 query = at.queries.first + static_cast<i32>(warp_row + O.row(m));
            if (query < params.seqlen_q)
                lse[query] = state.log_sum_exp(m, 0);
        }
    }
    const bool finite = !kBand || !block_any(!O.all_finite());
    store_result(shared.O, O, warp_row);
    if (kBand && careful)
        restore_nonfinite<kHeadDimV>(shared.O, at.v, params.v_row_stride, {0, params.seqlen_k},
                                     [&](i32 key) { return band.queries_of(key).from(at.queries.first); });
    block_sync();
    store_tile<kHeadDimV>(shared.O, params.out + at.batch * params.out_batch_stride + at.head * params.out_head_stride,
                          params.out_row_stride, at.queries.first, params.seqlen_q);
    return finite;
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void forward_simt(PARAMS(ForwardParams) params) {
    // A result that is not finite may be the fault of a hidden NaN in V: those rows are computed once more, with care.
    bool careful = false;
#pragma unroll 1
    while (!attend(params, careful) && !careful) {
        careful = true;
        block_sync();  // the first run still reads shared memory
    }
}
