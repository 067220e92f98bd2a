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
    union {
        struct {
            RowTile<Element, kBr, kD, ReadBy::kTwoRows> Q;
            RowTile<Element, kBc, kD, ReadBy::kEightRows> K[kStages];
            RowTile<Element, kBc, kDv, ReadBy::kOneRow> V[kStages];
            RowTile<float, kBr, kBc, ReadBy::kTwoRows> P;
        };
        RowTile<Element, kBr, kDv, ReadBy::kOneRow> O;  // on its way out, when the others are no longer needed
    };
};

/// The rows of one head that a block works on.
struct Work {
    i32 batch, head, kv_head;
    Range queries;

    DEVICE explicit Work(const ForwardParams& params) {
        const i32 tiles = (params.seqlen_q + static_cast<i32>(kBr) - 1) / static_cast<i32>(kBr);
        const i32 index = static_cast<i32>(block_index());
        const i32 of_batch = index / tiles;
        // With an upper bound late rows see most keys: they go first, so that the last blocks to run are short.
        const i32 tile = kBandLast ? tiles - 1 - index % tiles : index % tiles;
        batch = of_batch / params.num_heads;
        head = of_batch % params.num_heads;
        kv_head = head / params.group;
        queries = {tile * static_cast<i32>(kBr), smaller((tile + 1) * static_cast<i32>(kBr), params.seqlen_q)};
    }
};

/// Hides the scores of keys that a query may not see.
DEVICE void mask_scores(ScoreTile& S, const Band& band, i32 first_query, i32 first_key) {
#pragma unroll
    for (u32 m = 0; m < ScoreTile::kM; ++m)
#pragma unroll
        for (u32 n = 0; n < ScoreTile::kN; ++n)
            if (!band.visible(first_query + static_cast<i32>(S.row(m)), first_key + static_cast<i32>(S.col(n))))
                S.x[m][n][0] = -infinity();
}

/// Attention of one block's rows. careful: hidden non-finite values of V are kept out. Returns whether out is finite.
DEVICE bool attend(const ForwardParams& params, bool careful) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const Work work(params);
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const Range tiles = band.key_tiles(work.queries);

    const Element* q = params.q + work.batch * params.q_batch_stride + work.head * params.q_head_stride;
    const Element* k = params.k + work.batch * params.k_batch_stride + work.kv_head * params.k_head_stride;
    const Element* v = params.v + work.batch * params.v_batch_stride + work.kv_head * params.v_head_stride;
    auto load_K = [&](i32 j, u32 stage) {
        load_tile<kHeadDim>(shared.K[stage], k, params.k_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };
    auto load_V = [&](i32 j, u32 stage) {
        load_tile<kHeadDimV>(shared.V[stage], v, params.v_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };

    const u32 warp_row = warp_index() * kWarpRows;
    const i32 first_query = work.queries.first + static_cast<i32>(warp_row);

    SoftmaxState<ScoreTile::kM, 1> state(score.unit());
    OutputTile O;
    O.clear();
    load_tile<kHeadDim>(shared.Q, q, params.q_row_stride, work.queries.first, params.seqlen_q);
    if (!tiles.empty()) {
        load_K(tiles.end - 1, 0);
        if (kStages > 1)
            load_V(tiles.end - 1, 0);
    }
    u32 stage = 0;
#pragma unroll 1
    for (i32 j = tiles.end - 1; j >= tiles.first; --j) {
        const i32 first_key = j * static_cast<i32>(kBc);
        copy_async_wait<0>();
        block_sync();  // K_j has landed, and nobody reads V_{j+1}, P or the other stage any more
        if (kStages == 1) {
            load_V(j, 0);
        } else if (j > tiles.first) {
            load_K(j - 1, stage ^ 1);
            load_V(j - 1, stage ^ 1);
        }

        ScoreTile S;
        S.clear();
        add_product_transposed(S, shared.Q, warp_row, shared.K[stage]);  // S = Q K_j^T
        if constexpr (kScoreKind != 0)
            S.each([&](float& s) { s = score(s); });
        const bool masked = !band.all_visible(work.queries, {first_key, first_key + static_cast<i32>(kBc)});
        if (masked)
            mask_scores(S, band, first_query, first_key);

        if (kStages == 1) {
            copy_async_wait<0>();
            block_sync();  // V_j has landed, and nobody reads K_j any more
            if (j > tiles.first)
                load_K(j - 1, 0);
        }
        if (kBand && careful && masked)
            clear_nonfinite(shared.V[stage]);

        state.update(S, O);  // S becomes P = exp(S - m)
        store_result(shared.P, S, warp_row);
        warp_sync();                                           // the warp's rows of P are complete
        add_product(O, shared.P, warp_row, shared.V[stage]);  // O += P V_j
        if (kBand && careful && masked)
            add_visible_nonfinite<kHeadDimV>(O, v + first_key * params.v_row_stride, params.v_row_stride,
                                             smaller(kBc, params.seqlen_k - first_key), [&](u32 row, i32 key) {
                                                 return band.visible(first_query + static_cast<i32>(row), first_key + key);
                                             });
        stage ^= kStages - 1;
    }
    copy_async_wait<0>();
    state.finish(O);

    if (params.lse != nullptr && O.lane_col() == 0) {
        float* lse = params.lse + (static_cast<i64>(work.batch) * params.num_heads + work.head) * params.seqlen_q;
#pragma unroll
        for (u32 m = 0; m < OutputTile::kM; ++m) {
            const i32 query = first_query + static_cast<i32>(O.row(m));
            if (query < params.seqlen_q)
                lse[query] = state.log_sum_exp(m, 0);
        }
    }
    block_sync();  // nobody reads Q, V or P any more
    store_result(shared.O, O, warp_row);
    block_sync();
    store_tile<kHeadDimV>(shared.O, params.out + work.batch * params.out_batch_stride + work.head * params.out_head_stride,
                          params.out_row_stride, work.queries.first, params.seqlen_q);
    return O.all_finite();
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void forward_simt(PARAMS(ForwardParams) params) {
    // As in forward_mma: a result that is not finite may be the fault of a hidden NaN in V, and is computed once more with
    // care. block_any also keeps the second run from overwriting shared memory that the first still reads.
    bool careful = false;
#pragma unroll 1
    while (block_any(!attend(params, careful)) && kBand && !careful)
        careful = true;
}
