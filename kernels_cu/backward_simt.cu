// FlashAttention-2 backward, Algorithm 2 of arXiv:2307.08691, by plain float32 multiply-adds (every GPU).
//
// A block owns kBc keys of one key/value head, a warp kWarpKeys of them, and walks over the query tiles that see them, for
// every query head of the group, so that dK and dV are summed over the group in registers and in a fixed order. It works on
// the transposes, with the keys as rows:
//   dP^T = V dO^T,  S^T = K Q^T,  P^T = exp(S^T - LSE),  dS^T = P^T (dP^T - delta),  dV += P^T dO,  dK += dS^T Q,  dQ += dS K
// With one stage Q_i is fetched under dP, and dO_{i+1} under dK and dQ; with two both are fetched a whole tile ahead. P and
// dS pass between lanes through the same shared memory, one after the other. Only dQ sums over keys of other blocks: float32
// reductions add to it where the caller wants it.
#include "params.cuh"
#include "backward_rows.cuh"
#include "band.cuh"
#include "copy_tile.cuh"
#include "hidden.cuh"
#include "platform/reduce.cuh"
#include "probability.cuh"
#include "row_tile.cuh"
#include "schedule.cuh"
#include "score.cuh"
#include "thread_gemm.cuh"
#include "traits.cuh"
#include "word.cuh"

constexpr u32 kWarpKeys = kBc / kWarps;
static_assert(kWarpKeys * kWarps == kBc, "warps share the keys evenly");

constexpr bool kSumDq = CF_SUM_DQ;  // false: backward_dq_simt computes dQ, in a fixed order
static_assert(!kSumDq || sizeof(Element) == sizeof(float), "dQ is summed in place");

using ScoreTile = ThreadTile<kWarpKeys, kBr, lanes_over_rows(kWarpKeys, kBr), 1>;
using GradientK = ThreadTile<kWarpKeys, kD, lanes_over_rows(kWarpKeys, kD), 4>;
using GradientV = ThreadTile<kWarpKeys, kDv, lanes_over_rows(kWarpKeys, kDv), 4>;

constexpr u32 kWarpsDqD = kSumDq ? CF_WARPS_DQ_D : 1;       // dQ: warps over head dims ...
constexpr u32 kWarpsDqQ = kSumDq ? kWarps / kWarpsDqD : 1;  // ... and queries
constexpr u32 kDqRows = kBr / kWarpsDqQ, kDqCols = kD / kWarpsDqD;
static_assert(kDqRows * kWarpsDqQ == kBr && kDqCols * kWarpsDqD == kD, "warps share dQ evenly");
constexpr u32 kDqLanesM = lanes_over_rows(kDqRows, kDqCols);
constexpr u32 kDqRowRun = kDqRows / kDqLanesM % 4 == 0 ? 4 : kDqRows / kDqLanesM % 2 == 0 ? 2 : 1;
using GradientQ = ThreadTile<kDqRows, kDqCols, kDqLanesM, 4, kDqRowRun>;

/// The keys of one key/value head that a block works on.
struct Work {
    i32 batch, kv_head;
    Range keys;
    const Element *q, *dout;  // row 0 of the first query head

    DEVICE explicit Work(const BackwardParams& params) {
        const TileWork work =
            tile_work(params.seqlen_k, kBc, params.batch * params.num_kv_heads, params.section, false);
        batch = work.batch_head / params.num_kv_heads;
        kv_head = work.batch_head % params.num_kv_heads;
        keys = work.rows;
        const i32 head = kv_head * params.group;
        q = params.q + batch * params.q_batch_stride + head * params.q_head_stride;
        dout = params.dout + batch * params.dout_batch_stride + head * params.dout_head_stride;
    }
};

struct SharedStorage {
    struct Operands {
        RowTile<Element, kBc, kD, ReadBy::kTwoRows> K;
        RowTile<Element, kBc, kDv, ReadBy::kTwoRows> V;
        RowTile<Element, kBr, kD, ReadBy::kEightRows> Q[kStages];
        RowTile<Element, kBr, kDv, ReadBy::kEightRows> dO[kStages];
        RowTile<float, kBc, kBr, ReadBy::kTwoRows> weights;  // P^T, then dS^T
        float lse[kStages][kBr];
        float delta[kStages][kBr];
    };
    struct Gradients {
        RowTile<Element, kBc, kD, ReadBy::kOneRow> dK;
        RowTile<Element, kBc, kDv, ReadBy::kOneRow> dV;
    };
    union {
        Operands in;
        Gradients out;
    };
};

/// S^T becomes P^T and dP^T becomes dS^T, in registers.
template <bool kFused>
DEVICE void differentiate(ScoreTile& S, ScoreTile& dP, const Score& score, const float* lse, const float* delta) {
#pragma unroll
    for (u32 n = 0; n < ScoreTile::kN; ++n) {
        const float row_lse = backward_lse(lse[S.col(n)]), row_delta = delta[S.col(n)];
#pragma unroll
        for (u32 m = 0; m < ScoreTile::kM; ++m) {
            const float s = score(S.x[m][n][0]);
            const float p = probability<kFused>(s, score.unit(), row_lse);
            S.x[m][n][0] = p;
            dP.x[m][n][0] = p * (dP.x[m][n][0] - row_delta) * score.slope(s);
        }
    }
}

/// Clears P and dS of pairs that do not see each other.
DEVICE void hide(ScoreTile& P, ScoreTile& dS, const Band& band, i32 first_query, i32 first_key) {
#pragma unroll
    for (u32 m = 0; m < ScoreTile::kM; ++m) {
        // Relative to this lane's first column, so that the comparisons below are with constants.
        const i32 origin = first_query + static_cast<i32>(P.col(0));
        const Range queries =
            band.queries_of(static_cast<i32>(opaque(first_key)) + static_cast<i32>(P.row(m))).from(origin);
#pragma unroll
        for (u32 n = 0; n < ScoreTile::kN; ++n) {
            const i32 col = static_cast<i32>(ScoreTile::kLanesN * n);
            if ((kBandLast && col < queries.first) || col >= queries.end) {
                P.x[m][n][0] = 0.0f;
                dS.x[m][n][0] = 0.0f;
            }
        }
    }
}

/// A head's dQ.
DEVICE float* dq_of(const BackwardParams& params, i32 batch, i32 head) {
    return reinterpret_cast<float*>(params.dq + batch * params.dq_batch_stride + head * params.dq_head_stride);
}

/// Zeros to add to, in this block's query tile.
DEVICE void clear_dq(const BackwardParams& params) {
    using Piece = typename Word<kVectorBytes>::type;
    const QueryTile tile(params);
    const i32 first_query = tile.index * static_cast<i32>(kBr), rows_left = params.seqlen_q - first_query;
    for_each_piece<RowTile<Element, kBr, kD, ReadBy::kOneRow>>(
        params.dq + tile.batch * params.dq_batch_stride + tile.head * params.dq_head_stride +
            first_query * params.dq_row_stride,
        params.dq_row_stride, [&](u32 row, u32 col, Element* piece) {
            if (static_cast<i32>(row) < rows_left && col < kHeadDim)
                *reinterpret_cast<Piece*>(piece) = Piece{};
        });
}

/// Adds four neighbouring elements of a row of dQ, as many at a time as lie aligned.
DEVICE void add_to_row(float* row, u32 col, const float (&x)[4]) {
    if (kVectorBytes == 16) {
        if (kHeadDim == kD || col < kHeadDim)
            reduce_add4(row + col, x[0], x[1], x[2], x[3]);
    } else if (kVectorBytes == 8) {
#pragma unroll
        for (u32 n = 0; n < 4; n += 2)
            if (kHeadDim == kD || col + n < kHeadDim)
                reduce_add2(row + col + n, x[n], x[n + 1]);
    } else {
#pragma unroll
        for (u32 n = 0; n < 4; ++n)
            if (kHeadDim == kD || col + n < kHeadDim)
                reduce_add(row + col + n, x[n]);
    }
}

/// Adds this warp's part of dQ, whose first row is at `first`.
DEVICE void add_to_dq(float* first, i64 row_stride, i32 rows_left, u32 first_col, const GradientQ& dQ) {
#pragma unroll
    for (u32 m = 0; m < GradientQ::kM; ++m) {
        if (static_cast<i32>(dQ.row(m)) >= rows_left)
            continue;
        float* row = first + dQ.row(m) * row_stride;
#pragma unroll
        for (u32 n = 0; n < GradientQ::kFours; n += 4)
            add_to_row(row, first_col + dQ.col(n),
                       {dQ.x[m][n][0], dQ.x[m][n + 1][0], dQ.x[m][n + 2][0], dQ.x[m][n + 3][0]});
#pragma unroll
        for (u32 n = GradientQ::kFours; n < GradientQ::kN; ++n)
            if (kHeadDim == kD || first_col + dQ.col(n) < kHeadDim)
                reduce_add(row + first_col + dQ.col(n), dQ.x[m][n][0]);
    }
}

/// Puts what was visible of cleaned keys into dQ: NaN, since their weights may be negative or 0.
DEVICE void restore_dq(const BackwardParams& params, const Work& work, const Element* k, const Band& band) {
#pragma unroll 1
    for (u32 col = thread_index(); col < kHeadDim; col += kThreads)
#pragma unroll 1
        for (i32 key = work.keys.first; key < work.keys.end; ++key) {
            if (is_finite(to_float(k[key * params.k_row_stride + col])))
                continue;
            const Range queries = band.queries_of(key);
#pragma unroll 1
            for (i32 head = work.kv_head * params.group; head < (work.kv_head + 1) * params.group; ++head)
#pragma unroll 1
                for (i32 query = queries.first; query < queries.end; ++query)
                    reduce_add(dq_of(params, work.batch, head) + query * params.dq_row_stride + col, not_a_number());
        }
}

/// dK and dV of one block's keys, and what these add to dQ. careful: computes dK and dV once more, and hidden non-finite
/// values of Q and dO are kept out. Returns whether both are finite, if anything can be hidden.
DEVICE bool differentiate_keys(const BackwardParams& params, bool careful) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const Work work(params);
    const Band band = Band::of(params);
    const Score score = Score::of(params);
    const Range tiles = band.query_tiles(work.keys);

    // Heads are counted within the group.
    auto load_Q = [&](i32 head, i32 tile, u32 stage) {
        load_tile<kHeadDim>(shared.in.Q[stage], work.q + head * params.q_head_stride, params.q_row_stride,
                            tile * static_cast<i32>(kBr), params.seqlen_q);
        copy_async_commit();
    };
    auto load_dO = [&](i32 head, i32 tile, u32 stage) {
        const i32 first = tile * static_cast<i32>(kBr);
        load_tile<kHeadDimV>(shared.in.dO[stage], work.dout + head * params.dout_head_stride, params.dout_row_stride,
                             first, params.seqlen_q);
        const i32 heads_before = work.batch * params.num_heads + work.kv_head * params.group + head;
        const i64 row = static_cast<i64>(heads_before) * params.seqlen_q + first;
        for (u32 n = thread_index(); n < kBr; n += kThreads) {
            const bool valid = first + static_cast<i32>(n) < params.seqlen_q;
            copy_async<4>(&shared.in.lse[stage][n], params.lse + (valid ? row + n : 0), valid);
            copy_async<4>(&shared.in.delta[stage][n], params.delta + (valid ? row + n : 0), valid);
        }
        copy_async_commit();
    };

    const u32 warp_key = warp_index() * kWarpKeys;
    // Keys of the block and of this warp; some may lie beyond the last key.
    const Range block_keys = {work.keys.first, work.keys.first + static_cast<i32>(kBc)};
    const Range keys = block_keys.part(warp_key, kWarpKeys);
    GradientK dK;
    GradientV dV;
    dK.clear();
    dV.clear();
    const Element* k = params.k + work.batch * params.k_batch_stride + work.kv_head * params.k_head_stride;
    load_tile<kHeadDim>(shared.in.K, k, params.k_row_stride, work.keys.first, params.seqlen_k);
    load_tile<kHeadDimV>(shared.in.V,
                         params.v + work.batch * params.v_batch_stride + work.kv_head * params.v_head_stride,
                         params.v_row_stride, work.keys.first, params.seqlen_k);
    copy_async_commit();
    i32 head = 0, tile = tiles.first;
    if (!tiles.empty()) {
        load_dO(0, tile, 0);
        if (kStages > 1)
            load_Q(0, tile, 0);
    }
    bool key_nonfinite = false;  // a key has a NaN or infinity, to be kept out of dQ of the queries that do not see it
    if (kSumDq && kBand && !careful) {
        copy_async_wait<0>();
        block_sync();
        key_nonfinite = has_nonfinite(shared.in.K);
    }

    u32 stage = 0;
#pragma unroll 1
    while (head < params.group && !tiles.empty()) {
        const i32 first_query = tile * static_cast<i32>(kBr);
        const i32 next_tile = tile + 1 < tiles.end ? tile + 1 : tiles.first;
        const i32 next_head = next_tile == tiles.first ? head + 1 : head;
        copy_async_wait<0>();
        block_sync();  // dO_i has landed, and nobody reads Q_{i-1}, the weights or the other stage any more
        if (kStages == 1) {
            load_Q(head, tile, 0);
        } else if (next_head < params.group) {
            load_dO(next_head, next_tile, stage ^ 1);
            load_Q(next_head, next_tile, stage ^ 1);
        }

        const Range queries = {first_query, first_query + static_cast<i32>(kBr)};
        auto after_dP = [&] {
            if (kStages == 1) {
                copy_async_wait<0>();
                block_sync();  // Q_i has landed
            }
        };
        auto before_dV = [&] {
            if (kBand && careful && !band.all_visible(queries, block_keys)) {
                clear_nonfinite(shared.in.dO[stage]);
                clear_nonfinite(shared.in.Q[stage]);
            }
        };
        auto after_dV = [&] {
            if (kStages == 1) {
                block_sync();  // nobody reads dO_i or P^T any more
                if (next_head < params.group)
                    load_dO(next_head, next_tile, 0);
            } else {
                warp_sync();
            }
        };
        auto dS_stored = [&] {
            if (kSumDq)
                block_sync();  // dS is complete
            else
                warp_sync();  // the warp's rows of dS^T are complete
        };
        if (kBand && !band.any_visible(queries, keys)) {
            after_dP();  // near the diagonal some warps have keys that no query of the tile sees
            before_dV();
            after_dV();
            if (kSumDq) {
                ScoreTile zero;
                zero.clear();
                store_result(shared.in.weights, zero, opaque(warp_key));
            }
            dS_stored();
        } else {
            ScoreTile S, dP;
            dP.clear();
            add_product_transposed(dP, shared.in.V, opaque(warp_key), shared.in.dO[stage]);  // dP^T = V dO^T
            after_dP();
            S.clear();
            add_product_transposed(S, shared.in.K, opaque(warp_key), shared.in.Q[stage]);  // S^T = K Q^T
            const float* lse = shared.in.lse[stage];
            const float* delta = shared.in.delta[stage];
            bool fused = true;
#pragma unroll
            for (u32 n = 0; n < ScoreTile::kN; ++n)
                fused &= fuses(lse[S.col(n)]);
            if (warp_any(!fused))
                differentiate<false>(S, dP, score, lse, delta);
            else
                differentiate<true>(S, dP, score, lse, delta);
            if (!band.all_visible(queries, keys) || queries.end > params.seqlen_q)
                hide(S, dP, band, first_query, keys.first);
            before_dV();
            store_result(shared.in.weights, S, opaque(warp_key));
            warp_sync();  // the warp's rows of P^T are complete
            add_product(dV, shared.in.weights, opaque(warp_key), shared.in.dO[stage]);  // dV += P^T dO
            after_dV();
            store_result(shared.in.weights, dP, opaque(warp_key));
            dS_stored();
            add_product(dK, shared.in.weights, opaque(warp_key), shared.in.Q[stage]);  // dK += dS^T Q
        }
        if (kSumDq && !careful) {
            // This warp's part, not kept: registers are short.
            const u32 warp = opaque(warp_index()), dq_row = warp / kWarpsDqD * kDqRows,
                      dq_col = warp % kWarpsDqD * kDqCols;
            const bool clean = kBand && key_nonfinite && !band.all_visible(queries, block_keys);
            if (clean)
                clear_nonfinite(shared.in.K);
            if (!kBand || band.any_visible(queries.part(dq_row, kDqRows), block_keys)) {
                GradientQ dQ;
                dQ.clear();
                add_product_of_columns(dQ, shared.in.weights, dq_row, shared.in.K, dq_col);  // dQ += dS K
                dQ.multiply(params.scale);
                const i32 first_row = first_query + static_cast<i32>(dq_row);
                add_to_dq(
                    dq_of(params, work.batch, work.kv_head * params.group + head) + first_row * params.dq_row_stride,
                    params.dq_row_stride, params.seqlen_q - first_row, dq_col, dQ);
            }
            if (clean) {
                block_sync();  // K, cleaned above, is read no more: fetch it as it was
                load_tile<kHeadDim>(shared.in.K, k, params.k_row_stride, work.keys.first, params.seqlen_k);
                copy_async_commit();
            }
        }
        head = next_head;
        tile = next_tile;
        stage ^= kStages - 1;
    }
    if (kSumDq && key_nonfinite)
        restore_dq(params, work, k, band);
    copy_async_wait<0>();
    block_sync();           // nobody reads the tiles any more: dK and dV leave through their space
    const Work at(params);  // computed again: registers are short in the loop above
    dK.multiply(params.scale);
    const bool nonfinite = kBand && block_any(!dK.all_finite() || !dV.all_finite());
    store_result(shared.out.dK, dK, warp_key);
    store_result(shared.out.dV, dV, warp_key);
    if (kBand && careful) {
        auto keys_of = [&](i32 query) { return band.keys_of(query).from(at.keys.first); };
#pragma unroll 1
        for (i32 h = 0; h < params.group; ++h) {
            restore_nonfinite<kHeadDim, true>(shared.out.dK, at.q + h * params.q_head_stride, params.q_row_stride,
                                              {0, params.seqlen_q}, keys_of);
            restore_nonfinite<kHeadDimV>(shared.out.dV, at.dout + h * params.dout_head_stride, params.dout_row_stride,
                                         {0, params.seqlen_q}, keys_of);
        }
    }
    block_sync();
    store_tile<kHeadDim>(shared.out.dK,
                         params.dk + at.batch * params.dk_batch_stride + at.kv_head * params.dk_head_stride,
                         params.dk_row_stride, at.keys.first, params.seqlen_k);
    store_tile<kHeadDimV>(shared.out.dV,
                          params.dv + at.batch * params.dv_batch_stride + at.kv_head * params.dv_head_stride,
                          params.dv_row_stride, at.keys.first, params.seqlen_k);
    return !nonfinite;
}

KERNEL(kThreads, 1) void backward_rows(PARAMS(BackwardParams) params) {
    prepare_rows(params);
    if constexpr (kSumDq)
        clear_dq(params);
}

KERNEL(kThreads, CF_BLOCKS_PER_SM) void backward_simt(PARAMS(BackwardParams) params) {
    // As in the forward: a result that is not finite may be the fault of hidden data, and is computed once more with care.
    bool careful = false;
#pragma unroll 1
    while (!differentiate_keys(params, careful) && !careful) {
        careful = true;
        block_sync();  // the first run still reads shared memory
    }
}
