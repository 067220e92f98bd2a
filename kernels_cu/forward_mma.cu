// FlashAttention-2 forward, Algorithm 1 of arXiv:2307.08691, on tensor cores by mma.sync (sm_75 and up).
//
// A block owns kBr query rows of one head, a warp 16 kM of them; keys come in tiles of kBc, last tile first, so that the
// tiles which need a mask are met while the pipeline fills. K and V have one buffer each: V_j is fetched under S = Q K_j^T,
// and K_{j-1} under O += P V_j. Shared memory binds for small head dims, registers (O and S, float32) for large ones.
#include "params.cuh"
#include "band.cuh"
#include "copy_tile.cuh"
#include "hidden.cuh"
#include "mask_scores.cuh"
#include "schedule.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "traits.cuh"
#include "warp_gemm.cuh"

constexpr u32 kM = kBr / (16 * kWarps);
static_assert(kM * 16 * kWarps == kBr, "each warp owns whole 16-row tiles");

struct SharedStorage {
    struct Operands {
        SharedTile<Element, kBr, kD> Q;
        SharedTile<Element, kBc, kD> K;
        SharedTile<Element, kBc, kDv> V;
    };
    union {
        Operands in;
        SharedTile<Element, kBr, kDv> O;  // on its way out, when the others are no longer needed
    };
    // Kept here because registers are short:
    QueryWork work;
    bool careful;  // hidden non-finite values of V are kept out
};

/// Attention of one block's rows. kRepair: by products that take every float32. Returns whether out is finite.
template <bool kRepair>
DEVICE bool attend(const ForwardParams& params, bool careful) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const QueryWork work(params);
    if (thread_index() == 0) {
        shared.work = work;
        shared.careful = careful;
    }
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const Range tiles = band.key_tiles(work.queries);

    auto load_K = [&](const Element* k, i32 j) {
        load_tile<kHeadDim>(shared.in.K, k, params.k_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };
    auto load_V = [&](const Element* v, i32 j) {
        load_tile<kHeadDimV>(shared.in.V, v, params.v_row_stride, j * static_cast<i32>(kBc), params.seqlen_k);
        copy_async_commit();
    };

    const u32 warp_row = warp_index() * 16 * kM;
    const RowMajorA<Element, kBr, kD> Q(shared.in.Q, warp_row);
    const ColumnMajorB<Element, kBc, kD> K_transposed(shared.in.K, 0);
    const RowMajorB<Element, true, 1, kBc, kDv> V(shared.in.V, 0);

    SoftmaxState<kM, 2, !kSplit> state(score.unit());
    SumTile<Element, kM, kDv / 8> O;
    O.clear();
    load_tile<kHeadDim>(shared.in.Q, params.q + work.batch * params.q_batch_stride + work.head * params.q_head_stride,
                        params.q_row_stride, work.queries.first, params.seqlen_q);
    copy_async_commit();
    if (!tiles.empty())
        load_K(work.k, tiles.end - 1);
#pragma unroll 1
    for (i32 j = tiles.end - 1; j >= tiles.first; --j) {
        const i32 first_key = j * static_cast<i32>(kBc);
        copy_async_wait<0>();
        block_sync();  // K_j has landed, and nobody reads V_{j+1} any more
        load_V(shared.work.v, j);

        // Where registers are short what a mask asks for is fetched anew.
        const Range queries = kSplit ? shared.work.queries : work.queries;
        const Range rows = queries.part(warp_row, 16 * kM);  // of this warp; some may lie beyond the last query
        // Near the diagonal some warps have rows that see none of the tile's keys.
        const Range keys = {first_key, first_key + static_cast<i32>(kBc)};
        const bool sees = !kBand || band.any_visible(rows, keys);
        Accumulator<kM, kBc / 8> S;
        if (sees) {
            S.clear();
            warp_gemm<Element, kD / kStepK<Element>, kRepair>(S, Q, K_transposed);  // S = Q K_j^T
            if constexpr (kScoreKind != 0)
                S.each([&](float& s) { s = score(s); });
            if (!band.all_visible(rows, keys))
                mask_scores(S, band, rows.first, first_key);
        }

        copy_async_wait<0>();
        block_sync();  // V_j has landed, and nobody reads K_j any more
        if (j > tiles.first)
            load_K(shared.work.k, j - 1);
        if (kBand && !band.all_visible(queries, keys) && shared.careful)
            clear_nonfinite(shared.in.V);
        if (sees) {
            state.update(S, O);  // S becomes P = exp(S - m)
            warp_gemm<Element, kBc / kStepK<Element>, kRepair>(O, RegisterA<Element, kM, kBc / 8>(S), V);  // O += P V_j
        }
    }
    copy_async_wait<0>();
    state.finish(O);

    block_sync();  // nobody reads Q, K or V any more
    const QueryWork at = shared.work;
    const u32 own_row = warp_index() * 16 * kM;  // found anew: registers are short in the loop
    if (params.lse != nullptr && lane_index() % 4 == 0) {
        float* lse = params.lse + (static_cast<i64>(at.batch) * params.num_heads + at.head) * params.seqlen_q;
#pragma unroll
        for (u32 m = 0; m < kM; ++m)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const i32 query = at.queries.first + static_cast<i32>(own_row + O.row(m, 2 * half));
                if (query < params.seqlen_q && !(kRepair && is_finite(lse[query])))
                    lse[query] = state.log_sum_exp(m, half);
            }
    }
    const bool finite = !(kBand || kSplit) || !block_any(!O.all_finite());
    store_accumulator(shared.O, O, own_row, 0);
    if (kBand && shared.careful)
        restore_nonfinite<kHeadDimV>(shared.O, at.v, params.v_row_stride, {0, params.seqlen_k},
                                     [&](i32 key) { return band.queries_of(key).from(at.queries.first); });
    block_sync();
    Element* out = params.out + at.batch * params.out_batch_stride + at.head * params.out_head_stride;
    if constexpr (kRepair) {
        keep_finite<kHeadDimV>(shared.O, out, params.out_row_stride, at.queries.first, params.seqlen_q);
        block_sync();
    }
    store_tile<kHeadDimV>(shared.O, out, params.out_row_stride, at.queries.first, params.seqlen_q);
    return finite;
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void forward_mma(PARAMS(ForwardParams) params) {
    // A result that is not finite may be the fault of a hidden NaN in V, or of a float32 that cannot be split: those rows are
    // computed once more, with care.
    if constexpr (kSplit) {
        if (!attend<false>(params, false)) {
            block_sync();  // the first run still reads shared memory
            attend<true>(params, kBand);
        }
        return;
    }
    bool careful = false;
#pragma unroll 1
    while (!attend<false>(params, careful) && kBand && !careful) {
        careful = true;
        block_sync();
    }
}
