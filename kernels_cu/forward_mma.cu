// FlashAttention-2 forward, Algorithm 1 of arXiv:2307.08691, on tensor cores by mma.sync (sm_75 and up).
//
// A block owns kBr query rows of one head, a warp 16 kM of them; keys come in tiles of kBc, last tile first, so that the
// tiles which need a mask are met while the pipeline fills. K and V have one buffer each: V_j is fetched under S = Q K_j^T,
// and K_{j-1} under O += P V_j. Shared memory binds for small head dims, registers (O and S, float32) for large ones.
#include "params.cuh"
#include "band.cuh"
#include "copy_tile.cuh"
#include "hidden.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "traits.cuh"
#include "warp_gemm.cuh"

constexpr u32 kM = kBr / (16 * kWarps);
static_assert(kM * 16 * kWarps == kBr, "each warp owns whole 16-row tiles");

struct SharedStorage {
    union {
        struct {
            SharedTile<Element, kBr, kD> Q;
            SharedTile<Element, kBc, kD> K;
            SharedTile<Element, kBc, kDv> V;
        };
        SharedTile<Element, kBr, kDv> O;  // on its way out, when the others are no longer needed
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
DEVICE void mask_scores(Accumulator<kM, kBc / 8>& S, const Band& band, i32 first_query, i32 first_key) {
#pragma unroll
    for (u32 m = 0; m < kM; ++m)
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const i32 query = first_query + static_cast<i32>(S.row(m, e));
#pragma unroll
            for (u32 n = 0; n < kBc / 8; ++n)
                if (!band.visible(query, first_key + static_cast<i32>(S.col(n, e))))
                    S.x[m][n][e] = -infinity();
        }
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
    auto load_K = [&](i32 j) {
        load_tile<kHeadDim>(shared.K, k, params.k_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };
    auto load_V = [&](i32 j) {
        load_tile<kHeadDimV>(shared.V, v, params.v_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };

    const u32 warp_row = warp_index() * 16 * kM;
    const i32 first_query = work.queries.first + static_cast<i32>(warp_row);
    const RowMajorA<Element, kBr, kD> Q(shared.Q, warp_row);
    const ColumnMajorB<Element, kBc, kD> K_transposed(shared.K, 0);
    const RowMajorB<Element, true, 1, kBc, kDv> V(shared.V, 0);

    SoftmaxState<kM> state(score.unit());
    Accumulator<kM, kDv / 8> O;
    O.clear();
    load_tile<kHeadDim>(shared.Q, q, params.q_row_stride, work.queries.first, params.seqlen_q);
    if (!tiles.empty())
        load_K(tiles.end - 1);
#pragma unroll 1
    for (i32 j = tiles.end - 1; j >= tiles.first; --j) {
        const i32 first_key = j * static_cast<i32>(kBc);
        copy_async_wait<0>();
        block_sync();  // K_j has landed, and nobody reads V_{j+1} any more
        load_V(j);

        Accumulator<kM, kBc / 8> S;
        S.clear();
        warp_gemm<Element, kD / kStepK<Element>>(S, Q, K_transposed);  // S = Q K_j^T
        if constexpr (kScoreKind != 0)
            S.each([&](float& s) { s = score(s); });
        const bool masked = !band.all_visible(work.queries, first_key);
        if (masked)
            mask_scores(S, band, first_query, first_key);

        copy_async_wait<0>();
        block_sync();  // V_j has landed, and nobody reads K_j any more
        if (j > tiles.first)
            load_K(j - 1);
        if (kBand && careful && masked)
            clear_nonfinite(shared.V);

        state.update(S, O);                                                                   // S becomes P = exp(S - m)
        warp_gemm<Element, kBc / kStepK<Element>>(O, RegisterA<Element, kM, kBc / 8>(S), V);  // O += P V_j
        if (kBand && careful && masked)
            add_visible_nonfinite<kHeadDimV>(O, v + first_key * params.v_row_stride, params.v_row_stride,
                                             smaller(kBc, params.seqlen_k - first_key), [&](u32 row, i32 key) {
                                                 return band.visible(first_query + static_cast<i32>(row), first_key + key);
                                             });
    }
    copy_async_wait<0>();
    state.finish(O);

    if (params.lse != nullptr && lane_index() % 4 == 0) {
        float* lse = params.lse + (static_cast<i64>(work.batch) * params.num_heads + work.head) * params.seqlen_q;
#pragma unroll
        for (u32 m = 0; m < kM; ++m)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const i32 query = first_query + static_cast<i32>(O.row(m, 2 * half));
                if (query < params.seqlen_q)
                    lse[query] = state.log_sum_exp(m, half);
            }
    }
    block_sync();  // nobody reads Q, K or V any more
    store_accumulator(shared.O, O, warp_row, 0);
    block_sync();
    store_tile<kHeadDimV>(shared.O, params.out + work.batch * params.out_batch_stride + work.head * params.out_head_stride,
                          params.out_row_stride, work.queries.first, params.seqlen_q);
    return O.all_finite();
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void forward_mma(PARAMS(ForwardParams) params) {
    // A result that is not finite may be the fault of a hidden NaN in V: those rows are computed once more, with care.
    // block_any also keeps the second run from overwriting shared memory that the first still reads.
    bool careful = false;
#pragma unroll 1
    while (block_any(!attend(params, careful)) && kBand && !careful)
        careful = true;
}
