// What standard attention computes between its matrix products, on score matrices that lie in memory.
//
//   standard_softmax    S becomes P = softmax(mask(softcap(S))), row by row, with the LSE of each row
//   standard_rows       delta = rowsum(O * dO) - dLSE
//   standard_gradient   S becomes P = exp(S - LSE) once more, and dP becomes dS = P * (dP - delta); or P has been kept
//
// S is scale * Q K^T, rounded to the element type. Rows are padded to whole pieces of 16 bytes; padding becomes 0.
#include "score_row.cuh"

struct SharedStorage {
    Wide per_warp[32];
};

/// The score as the softmax has it.
DEVICE Wide capped(Wide s, Wide softcap) { return kCapped ? softcap * hyperbolic_tangent(s / softcap) : s; }

KERNEL(kThreads, 1) void standard_softmax(PARAMS(SoftmaxParams) params) {
    SharedStorage& shared = shared_storage<SharedStorage>();
    const ScoreRow row(params);
    if (row.index >= params.rows)
        return;
    Piece* scores = reinterpret_cast<Piece*>(params.scores + row.index * params.row_stride);
    const OwnPieces own(row, scores);
    const Wide softcap = params.softcap;

    const Wide none = -infinity();
    Wide m = none;
    own.each_visible([&](Wide s) { m = greater(m, capped(s, softcap)); });
    m = over_row(m, shared.per_warp, [](Wide a, Wide b) { return greater(a, b); });
    if (m == none)
        m = 0;  // sees nothing, or scores of -inf only: all weights are 0

    Wide l = 0;
    own.each_visible([&](Wide s) { l += exponential(capped(s, softcap) - m); });
    l = over_row(l, shared.per_warp, [](Wide a, Wide b) { return a + b; });
    const Wide inverse = l == 0 ? l : 1 / l;
    if (row.lane == 0)
        params.lse[row.at] = l == 0 ? none : m + logarithm(l);

    own.each([&](u32 piece, const Piece& content) {
        Piece P;
#pragma unroll
        for (u32 n = 0; n < kPieceElements; ++n)
            P.set(n, row.sees(row.key(piece) + static_cast<i32>(n))
                         ? exponential(capped(content.get(n), softcap) - m) * inverse
                         : Wide(0));
        scores[piece] = P;
    });
}

/// A warp per query row, which reads O and dO where they are.
KERNEL(kThreads, 1) void standard_rows(PARAMS(RowsParams) params) {
    const i64 index = static_cast<i64>(block_index()) * (kThreads / 32) + thread_index() / 32;
    if (index >= params.rows)
        return;
    const i64 of_all_heads = index / params.seqlen_q, query = index % params.seqlen_q;
    const i64 batch = of_all_heads / params.num_heads, head = of_all_heads % params.num_heads;
    const Element* out =
        params.out + batch * params.out_batch_stride + query * params.out_row_stride + head * params.out_head_stride;
    const Element* dout = params.dout + batch * params.dout_batch_stride + query * params.dout_row_stride +
                          head * params.dout_head_stride;

    Wide sum = 0;
    for (i32 col = static_cast<i32>(lane_index()); col < params.head_dim_v; col += 32)
        sum += to_wide(out[col * params.out_col_stride]) * to_wide(dout[col * params.dout_col_stride]);
#pragma unroll
    for (u32 mask = 1; mask < 32; mask *= 2)
        sum += from_lane(sum, mask);
    if (lane_index() == 0) {
        const i64 at = of_all_heads * params.lse_head_stride + query;
        params.delta[at] = params.dlse == nullptr ? sum : sum - params.dlse[at];
    }
}

KERNEL(kThreads, 1) void standard_gradient(PARAMS(GradientParams) params) {
    const ScoreRow row(params);
    if (row.index >= params.rows)
        return;
    Piece* scores = reinterpret_cast<Piece*>(params.scores + row.index * params.row_stride);
    Piece* gradients = reinterpret_cast<Piece*>(params.gradients + row.index * params.row_stride);
    const Wide softcap = params.softcap, lse = params.lse[row.at], delta = params.delta[row.at];
    const bool attends = lse != -infinity(), kept = params.kept != 0;  // P stands where S would

    for (u32 piece = row.lane; piece < row.pieces; piece += kRowThreads) {
        const Piece S = scores[piece], dP = gradients[piece];
        Piece P, dS;
#pragma unroll
        for (u32 n = 0; n < kPieceElements; ++n) {
            Wide p = 0, ds = 0;
            if (attends && row.sees(row.key(piece) + static_cast<i32>(n))) {
                const Wide s = capped(S.get(n), softcap);
                p = kept ? S.get(n) : exponential(s - lse);
                ds = p * (dP.get(n) - delta);
                if (kCapped)
                    ds *= 1 - (s / softcap) * (s / softcap);
            }
            P.set(n, p);
            dS.set(n, ds);
        }
        if (!kept)
            scores[piece] = P;
        gradients[piece] = dS;
    }
}
