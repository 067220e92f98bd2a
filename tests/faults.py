"""Planted faults: kernels with one thing wrong, each of which the emulated suite must catch.

A tolerance, a schedule or an engineered case is worth something only if a kernel that is wrong in its neighbourhood
fails. ``python tests/faults.py`` plants them all, ``python tests/faults.py NAME ...`` some; with ``--cases WORD`` it
tries all cases whose name has the word in place of those of the table.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import emulated_cases

from cupyflash import kernels_cu

KERNELS = Path(kernels_cu.__file__).parent


@dataclass(frozen=True)
class Fault:
    """``old``, which is in ``file`` once, becomes ``new``; ``cases`` of the suite fail then."""

    name: str
    file: str
    old: str
    new: str
    why: str
    cases: tuple


def fault(name, file, old, new, why, *cases):
    return Fault(name, file, old, new, why, cases)


FAULTS = [
    # ---- forward_mma.cu
    fault(
        "forward: no barrier before K is read",
        "forward_mma.cu",
        "block_sync();  // K_j has landed, and nobody reads V_{j+1} any more",
        "",
        "other threads' copies have not landed",
        "half, plain, 33x70",
    ),
    fault(
        "forward: no barrier before V is read",
        "forward_mma.cu",
        "block_sync();  // V_j has landed, and nobody reads K_j any more",
        "",
        "other threads' copies have not landed",
        "half, plain, 33x70",
    ),
    fault(
        "forward: wait one group too few",
        "forward_mma.cu",
        "copy_async_wait<0>();\n        block_sync();  // V_j",
        "copy_async_wait<1>();\n        block_sync();  // V_j",
        "V is still under way",
        "half, plain, 33x70",
    ),
    fault(
        "forward: no last wait",
        "forward_mma.cu",
        "copy_async_wait<0>();\n    state.finish(O);",
        "state.finish(O);",
        "a block that sees no key leaves while Q is under way",
        "half, causal, 37x1",
    ),
    fault(
        "forward: next K is this K",
        "forward_mma.cu",
        "load_K(shared.work.k, j - 1);",
        "load_K(shared.work.k, j);",
        "a stale buffer",
        "half, plain, 33x70",
    ),
    fault(
        "forward: last visible key hidden",
        "forward_mma.cu",
        "|| col >= end)",
        "|| col >= end - 1)",
        "off by one at the diagonal and at the last key",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "forward: first hidden key visible",
        "forward_mma.cu",
        "|| col >= end)",
        "|| col > end)",
        "off by one at the diagonal and behind the last key",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "forward: window one key short",
        "forward_mma.cu",
        "col < first)",
        "col <= first)",
        "off by one at the window's left end",
        "half, left, 40x66",
    ),
    fault(
        "forward: mask by the wrong warp's rows",
        "forward_mma.cu",
        "mask_scores(S, band, rows.first, first_key);",
        "mask_scores(S, band, work.queries.first, first_key);",
        "each warp has rows of its own",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "forward: lse written behind the last row",
        "forward_mma.cu",
        "if (query < params.seqlen_q)",
        "if (true)",
        "a missed tail",
        "half, plain, 33x70",
    ),
    fault(
        "forward: no careful second run",
        "forward_mma.cu",
        "while (!attend(params, careful) && !careful)",
        "while (!attend(params, careful) && careful)",
        "a hidden NaN reaches rows that do not see it",
        "half, causal, 70x70, hidden value",
    ),
    fault(
        "forward: careful run cleans nothing",
        "forward_mma.cu",
        "&& shared.careful)\n            clear_nonfinite(shared.V);",
        "&& false)\n            clear_nonfinite(shared.V);",
        "a hidden NaN reaches rows that do not see it",
        "half, causal, 70x70, hidden value",
    ),
    fault(
        "forward: what was cleaned is not restored",
        "forward_mma.cu",
        "if (kBand && shared.careful)\n        restore_nonfinite",
        "if (false)\n        restore_nonfinite",
        "rows that see an infinity must show it",
        "half, causal, 70x70, infinite value",
    ),
    fault(
        "forward: no barrier before O takes the place of Q",
        "forward_mma.cu",
        "block_sync();  // nobody reads Q, K or V any more",
        "",
        "other warps still read what is overwritten",
        "half tall, plain, 70x70",
    ),
    fault(
        "forward: rows of the second warp at the place of the first's",
        "forward_mma.cu",
        "store_accumulator(shared.O, O, warp_row, 0);",
        "store_accumulator(shared.O, O, 0, 0);",
        "each warp has rows of its own",
        "half, plain, 33x70",
    ),
    # ---- softmax.cuh, score.cuh, probability.cuh
    fault(
        "softmax: O is not rescaled",
        "include/softmax.cuh",
        "if (warp_any(moved))\n            rescale(O);",
        "",
        "a lost rescale shows only if the maximum rises from tile to tile",
        "half, plain, 33x130, falling",
    ),
    fault(
        "softmax: l is not rescaled",
        "include/softmax.cuh",
        "l[i][half] *= rescale;",
        "",
        "a lost rescale",
        "half, plain, 33x130, falling",
    ),
    fault(
        "softmax: O is rescaled by one thread's word",
        "include/softmax.cuh",
        "moved |= row_maximum != m[i][half];",
        "moved = row_maximum != m[i][half];",
        "only the last row of a thread is asked",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "softmax: the maximum forgets earlier tiles",
        "include/softmax.cuh",
        "float row_maximum = m[i][half];",
        "float row_maximum = -infinity();",
        "weights of earlier tiles overflow",
        "half, plain, 33x130, rising",
    ),
    fault(
        "softmax: an empty row divides by zero",
        "include/softmax.cuh",
        "l[i][half] == 0.0f ? 0.0f : 1.0f / l[i][half];",
        "1.0f / l[i][half];",
        "0 / 0",
        "half, causal, 95x64",
    ),
    fault(
        "softmax: reference of an empty row",
        "include/softmax.cuh",
        "row_maximum == -infinity() ? 0.0f : row_maximum;",
        "row_maximum;",
        "-inf - -inf",
        "half, causal, 95x64",
    ),
    fault(
        "softmax: lse in base 2",
        "include/softmax.cuh",
        "+ log2_approx(l[i][half]) * kLn2;",
        "+ log2_approx(l[i][half]);",
        "LSE is natural",
        "half, plain, 33x70",
    ),
    fault(
        "softmax: lse without the scale",
        "include/softmax.cuh",
        "multiply_rounded(m[i][half], unit) + log2",
        "m[i][half] + log2",
        "m is in units of raw products",
        "half, plain, 33x70",
    ),
    fault(
        "softmax: always fused",
        "include/softmax.cuh",
        "large |= absolute(reference[i][half] * to_log2) > kFusedExponentLimit;",
        "",
        "the rounding of a huge m c overflows the exponential",
        "half, plain, 35x70, huge",
    ),
    fault(
        "softmax: float32 fused",
        "include/softmax.cuh",
        "if (!kMayFuse || warp_any(large))",
        "if (warp_any(large))",
        "a lone key does not weigh exactly 1",
        "float, diagonal, 35x35, large",
    ),
    fault(
        "score: cap before scale",
        "include/score.cuh",
        "return softcap * tanh_accurate(scaled / softcap);",
        "return softcap * tanh_accurate(product / softcap) * scale;",
        "scale, then cap",
        "half, softcap, 67x67x1x4x1",
    ),
    fault(
        "score: slope of the cap",
        "include/score.cuh",
        "return 1.0f - t * t;",
        "return 1.0f - t;",
        "1 - tanh^2",
        "half, softcap, 67x67x1x4x1",
    ),
    fault(
        "score: no slope beyond a cap of one",
        "include/score.cuh",
        "const float t = score / softcap;",
        "const float t = score;",
        "1 - tanh^2 of the score in caps",
        "half, softcap, 67x67x1x4x1",
    ),
    fault(
        "probability: a row that saw nothing",
        "include/probability.cuh",
        "return lse == -infinity() ? infinity() : lse;",
        "return lse;",
        "exp(0 + inf)",
        "half, causal, 20x20, infinite keys",
    ),
    fault(
        "probability: always fused",
        "include/probability.cuh",
        "return !(absolute(lse) > kFusedExponentLimit * kLn2) || lse == infinity();",
        "return true;",
        "the rounding of a large lse shows in P",
        "half, diagonal, 35x35, steep",
    ),
    fault(
        "probability: above 1",
        "include/probability.cuh",
        "exp2_approx(exponent > 0.0f ? 0.0f : exponent);",
        "exp2_approx(exponent);",
        "a rounded lse below the score",
        "half, diagonal, 35x35, steep",
    ),
    fault(
        "probability: small shrinks",
        "include/probability.cuh",
        "constexpr float kOverflowAbove = 32768.0f;",
        "constexpr float kOverflowAbove = 1e30f;",
        "dS beyond 65504 becomes infinite in float16",
        "half, plain, 40x70, overflow",
    ),
    # ---- forward_wgmma.cu, row_state.cuh
    fault(
        "forward (wgmma): skipped buffers are released before they are full",
        "forward_wgmma.cu",
        "            wait_K();\n            wait_V();\n            warp_sync();\n",
        "",
        "two releases of one consumer stand for one of each",
        "hopper three, plain, 300x100x2x3x3",
    ),
    fault(
        "forward (wgmma): a warp's first lane releases what the others wait for",
        "forward_wgmma.cu",
        "            warp_sync();\n            release_K();",
        "            release_K();",
        "the others miss the phase",
        "hopper wide, causal, 300x300x1x4x2",
    ),
    fault(
        "forward (wgmma): V before it has landed",
        "forward_wgmma.cu",
        "                if constexpr (kPlain)\n                    wait_V();\n",
        "",
        "the producer may be late",
        "hopper, plain, 130x70x1x5x1",
    ),
    fault(
        "forward (wgmma): V is released while it is read",
        "forward_wgmma.cu",
        "                wgmma_wait<0>();\n                wgmma_settle(O.x);\n                release_V();\n",
        "                release_V();\n                wgmma_wait<0>();\n                wgmma_settle(O.x);\n",
        "products read late",
        "hopper wide, plain, 130x70x1x5x1",
    ),
    fault(
        "forward (wgmma): scores before their product is done",
        "forward_wgmma.cu",
        "                pass_turn();\n                wgmma_wait<1>();\n",
        "                pass_turn();\n",
        "products land late",
        "hopper, causal, 300x300x1x4x2",
    ),
    fault(
        "forward (wgmma): O is not rescaled",
        "forward_wgmma.cu",
        "                if constexpr (kRaise)\n                    O.multiply(factor);\n",
        "",
        "the maximum rises",
        "hopper, causal, 300x300x1x4x2",
    ),
    fault(
        "forward (wgmma): a reference goes stale before it has seen a key",
        "forward_wgmma.cu",
        "keys_of(n).end + kBandLast}",
        "keys_of(n).end}",
        "a tile of keys that ends where the first row's keys end",
        "hopper, causal, 300x299",
    ),
    fault(
        "forward (wgmma): no left mask",
        "forward_wgmma.cu",
        "(kBandFirst && col < keys.first) || ",
        "",
        "windows",
        "hopper, window, 300x300x1x3x1",
    ),
    fault(
        "forward (wgmma): overflow goes unnoticed",
        "forward_wgmma.cu",
        "warp_any(!state.trustworthy() || !O.all_finite())",
        "warp_any(!state.trustworthy())",
        "weights beyond float16 with sums below 2^100",
        "hopper, plain, 260x230x1x5x5, steep heads",
    ),
    fault(
        "forward (wgmma): marks of the last tiles are not looked at",
        "forward_wgmma.cu",
        "        if (repeat_marked())\n            announce_none();\n",
        "",
        "nothing is announced behind them",
        "hopper, plain, 260x230x1x5x5, steep heads",
    ),
    fault(
        "forward (wgmma): cleaned values are not shown to the asynchronous proxy",
        "forward_wgmma.cu",
        "        fence_async_shared();\n        named_sync(kBarrier, kCount);\n",
        "        named_sync(kBarrier, kCount);\n",
        "the product reads what was there",
        "hopper, causal, 260x230x1x5x5, hidden value",
    ),
    fault(
        "forward (wgmma): what was cleaned stays away",
        "forward_wgmma.cu",
        "            restore_nonfinite(tile, out);\n",
        "            (void)out;\n",
        "rows that saw it are not finite",
        "hopper, causal, 260x230x1x5x5, hidden value",
    ),
    fault(
        "stale: huge exponents are fused",
        "include/row_state.cuh",
        "l[half] < 0x1p100f && absolute(reference(half) * to_log2) <= kFusedExponentLimit",
        "l[half] < 0x1p100f",
        "a rounded m c is off by more than float32 can raise 2 to",
        "hopper wide, diagonal, 260x260x1x5x5, steep",
    ),
    fault(
        "forward (wgmma): rows of another consumer",
        "forward_wgmma.cu",
        "same(tile.first_query) + static_cast<i32>(64 * index)",
        "same(tile.first_query)",
        "every consumer has its own",
        "hopper, plain, 130x70x1x5x1",
    ),
    # ---- band.cuh, schedule.cuh
    fault(
        "band: keys of a query",
        "include/band.cuh",
        "smaller(seqlen_k, query + last + 1)",
        "smaller(seqlen_k, query + last)",
        "the last visible key",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "band: queries of a key",
        "include/band.cuh",
        "smaller(seqlen_q, key - first + 1)",
        "smaller(seqlen_q, key - first)",
        "the last query that sees a key, in the backward only",
        "half, window, 64x64",
    ),
    fault(
        "band: keys that do not exist",
        "include/band.cuh",
        "return key < seqlen_k ? range : Range{0, 0};",
        "return range;",
        "a key of zeros behind the last one has a weight, and an infinite one below e^-88",
        "half, plain, 40x70, far below",
    ),
    fault(
        "band: last key tile",
        "include/band.cuh",
        "smaller(seqlen_k, queries.end + last)",
        "smaller(seqlen_k, queries.end + last - 1)",
        "shows only where a tile begins with the last visible key",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "band: first key tile",
        "include/band.cuh",
        "larger(0, queries.first + first)",
        "larger(0, queries.first + first + 1)",
        "shows only where a tile ends with the first visible key",
        "half, left, 66x40",
    ),
    fault(
        "band: last query tile",
        "include/band.cuh",
        "smaller(seqlen_q, keys.end - first)",
        "smaller(seqlen_q, keys.end - first - 1)",
        "shows only where a tile begins with the last query that sees a key",
        "half, left, 66x40",
    ),
    fault(
        "band: first query tile",
        "include/band.cuh",
        "larger(0, keys.first - last)",
        "larger(0, keys.first - last + 1)",
        "shows only where a tile ends with the first query that sees a key",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "band: tiles rounded down",
        "include/band.cuh",
        "(end_index + size - 1) / size}",
        "end_index / size}",
        "a missed tail",
        "half, plain, 33x70",
    ),
    fault(
        "band: a tile that needs no mask by one key",
        "include/band.cuh",
        "keys.end - 1 - queries.first <= last)",
        "keys.end - 2 - queries.first <= last)",
        "one corner of the tile is hidden",
        "half, causal, 64x94",
    ),
    fault(
        "band: a tile that needs no mask at the window's left end",
        "include/band.cuh",
        "keys.first - (queries.end - 1) >= first)",
        "keys.first - (queries.end - 2) >= first)",
        "one corner of the tile is hidden",
        "half, left, 55x64",
    ),
    fault(
        "band: no mask at the last key",
        "include/band.cuh",
        "&& keys.end <= seqlen_k;",
        ";",
        "zeros behind the last key take part",
        "half, plain, 33x70",
    ),
    fault(
        "band: a warp that sees one corner sees nothing",
        "include/band.cuh",
        "keys.first - (queries.end - 1) <= last)",
        "keys.first - (queries.end - 1) < last)",
        "one corner of the tile is visible",
        "half, causal, 40x41",
    ),
    fault(
        "schedule: key/value head of a query head",
        "include/schedule.cuh",
        "const i32 kv_head = head / params.group;",
        "const i32 kv_head = head % params.num_kv_heads;",
        "groups are neighbours",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "schedule: the last section is as long as the others",
        "include/schedule.cuh",
        "smaller(section, heads - first_head)",
        "section",
        "shows only where heads do not fill the sections",
        "half, causal, 40x40x1x5x5, small L2",
    ),
    fault(
        "schedule: batch entry",
        "include/schedule.cuh",
        "batch = work.batch_head / params.num_heads;",
        "batch = 0;",
        "more than one batch entry",
        "half, plain, 70x33x2x3x1",
    ),
    # ---- copy_tile.cuh, shared_tile.cuh, hidden.cuh
    fault(
        "copy: 32-bit offset of a tile",
        "include/copy_tile.cuh",
        "global + first_row * row_stride;",
        "global + static_cast<i32>(first_row * row_stride);",
        "neighbouring rows may be 2^26 elements apart",
        "half, plain, 65x66, far rows",
    ),
    fault(
        "copy: 32-bit offset of a stored tile",
        "include/copy_tile.cuh",
        "for_each_piece<Tile>(global + first_row * row_stride,",
        "for_each_piece<Tile>(global + static_cast<i32>(first_row * row_stride),",
        "neighbouring rows may be 2^26 elements apart",
        "half, plain, 65x66, far rows",
    ),
    fault(
        "copy: 32-bit offset in a tile",
        "include/copy_tile.cuh",
        "body(row, col, global + row * row_stride + col);",
        "body(row, col, global + static_cast<i32>(row * row_stride) + col);",
        "neighbouring rows may be 2^26 elements apart",
        "half, plain, 20x24, far rows",
    ),
    fault(
        "schedule: 32-bit offset of a batch entry",
        "include/schedule.cuh",
        "k = params.k + batch * params.k_batch_stride",
        "k = params.k + static_cast<i32>(batch * params.k_batch_stride)",
        "batch entries may be 2^31 elements apart",
        "half, plain, 40x66x2x2x1, far batches",
    ),
    fault(
        "copy: a row too many",
        "include/copy_tile.cuh",
        "static_cast<i32>(row) < rows_left && (kColsUsed == Tile::kCols || col < kColsUsed);",
        "static_cast<i32>(row) <= rows_left && (kColsUsed == Tile::kCols || col < kColsUsed);",
        "what lies behind the array is read",
        "half, plain, 33x70",
    ),
    fault(
        "copy: columns behind the head dim",
        "include/copy_tile.cuh",
        "static_cast<i32>(row) < rows_left && (kColsUsed == Tile::kCols || col < kColsUsed);",
        "static_cast<i32>(row) < rows_left;",
        "what lies beside the array is read",
        "half, plain, 33x70",
    ),
    fault(
        "copy: a row too many is written",
        "include/copy_tile.cuh",
        "if (static_cast<i32>(row) < rows_left &&",
        "if (static_cast<i32>(row) <= rows_left &&",
        "what lies behind the result is overwritten",
        "half, plain, 33x70",
    ),
    fault(
        "copy: step of the rows",
        "include/copy_tile.cuh",
        "const i64 step = kRowStep * row_stride;",
        "const i64 step = kRowStep * Tile::kCols;",
        "rows of the matrix are not those of the tile",
        "bfloat, plain, 31x129",
    ),
    fault(
        "shared tile: swizzle across the row's end",
        "include/shared_tile.cuh",
        "kRowBytes % 128 == 0 ? 7 : kRowBytes % 64 == 0 ? 3 : 1;",
        "7;",
        "two rows in one place",
        "half, plain, 33x70",
    ),
    fault(
        "hidden: no barrier after cleaning",
        "include/hidden.cuh",
        "tile.data[n] = from_float<T>(0.0f);\n    block_sync();",
        "tile.data[n] = from_float<T>(0.0f);",
        "others read before it is clean",
        "half, causal, 70x70, hidden value",
    ),
    fault(
        "hidden: restored from the wrong row on",
        "include/hidden.cuh",
        "i32 row = larger(0, rows.first);",
        "i32 row = larger(0, rows.first + 1);",
        "the first row that sees a NaN",
        "half, causal, 70x70, hidden value",
    ),
    fault(
        "hidden: a weight that may be negative",
        "include/hidden.cuh",
        "(kWeighted ? not_a_number() : x)",
        "x",
        "an infinity times 0 or a negative weight",
        "half, deterministic causal, 70x70, infinite key",
    ),
    # ---- warp_gemm.cuh
    fault(
        "product: fragments of B exchanged",
        "include/warp_gemm.cuh",
        "mma<T>(D.x[m][2 * n], a[step % 2][m], bn[0], bn[1]);",
        "mma<T>(D.x[m][2 * n], a[step % 2][m], bn[1], bn[0]);",
        "swapped fragments",
        "half, plain, 33x70",
    ),
    fault(
        "product: stale operand",
        "include/warp_gemm.cuh",
        "const u32(&bn)[4] = b[step % 2][n];",
        "const u32(&bn)[4] = b[(step + 1) % 2][n];",
        "a stale double buffer",
        "half, plain, 33x70",
    ),
    fault(
        "product: TF32 operand cut, not rounded",
        "include/warp_gemm.cuh",
        "r[n] = to_tf32(bits_to_float(r[n]));",
        "r[n] = r[n];",
        "a bias of half a unit in the last place; the tolerance must see it",
        "tf32, causal, 40x70, biased",
    ),
    fault(
        "product: TF32 weights cut, not rounded",
        "include/warp_gemm.cuh",
        "a[0] = to_tf32(d[0]);",
        "a[0] = float_to_bits(d[0]);",
        "a bias of half a unit in the last place of some weights",
        "tf32, causal, 40x70, biased",
    ),
    fault(
        "product: TF32 values cut, not rounded",
        "include/warp_gemm.cuh",
        "b[r] = to_tf32(tile.at(k,",
        "b[r] = float_to_bits(tile.at(k,",
        "a bias of half a unit in the last place; the tolerance must see it",
        "tf32, causal, 40x70, biased",
    ),
    fault(
        "product: TF32 fragments exchanged",
        "include/warp_gemm.cuh",
        "a[1] = to_tf32(d[2]);",
        "a[1] = to_tf32(d[1]);",
        "swapped fragments",
        "tf32, plain, 33x65x2x2x1",
    ),
    fault(
        "product: TF32 rows of B in another order",
        "include/warp_gemm.cuh",
        "kPairedK ? 2 * t + r % 2 : t + 4 * (r % 2)",
        "t + 4 * (r % 2)",
        "the columns of the weights and the rows of the values go together",
        "tf32, plain, 33x65x2x2x1",
    ),
    fault(
        "product: weights rounded to the wrong half",
        "include/warp_gemm.cuh",
        "a[1] = pack<T>(low[2], low[3]);",
        "a[1] = pack<T>(low[3], low[2]);",
        "swapped fragments",
        "half, plain, 33x70",
    ),
    # ---- the backward's headers
    fault(
        "delta: a row without",
        "include/backward_rows.cuh",
        "row < kBr; row += kThreads / kLanesPerRow",
        "row < kBr - 1; row += kThreads / kLanesPerRow",
        "the last row of each tile",
        "half, plain, 33x70",
    ),
    fault(
        "delta: not summed over all lanes",
        "include/backward_rows.cuh",
        "mask < kLanesPerRow; mask *= 2",
        "mask < kLanesPerRow / 2; mask *= 2",
        "half the columns",
        "bfloat, plain, 31x129",
    ),
    fault(
        "query tile: head and batch entry exchanged",
        "include/query_tile.cuh",
        "head = block / tiles % params.num_heads;",
        "head = block / tiles % params.batch;",
        "more than one of both",
        "half, plain, 70x33x2x3x1",
    ),
    fault(
        "dq sum: tiles overlap",
        "include/dq_sum.cuh",
        "+ head) * query_tile_count(params) + tile) * (kBr * kD);",
        "+ head) * (query_tile_count(params) - 1) + tile) * (kBr * kD);",
        "a wrong stride",
        "half, plain, 70x33x2x3x1",
    ),
    fault(
        "dq sum: a NaN at another place",
        "include/dq_sum.cuh",
        "e = row % 16 / 8 * 2 + col % 2;",
        "e = row % 16 / 8 + col % 2 * 2;",
        "fragment order",
        "half, causal, 70x70, infinite key",
    ),
    fault(
        "dq sum: not cleared",
        "backward_mma.cu",
        "clear_dq_sum(params);\n}",
        "}",
        "missing zeroing",
        "half, plain, 33x70",
    ),
    # ---- backward_mma.cu
    fault(
        "backward: no barrier before tiles are read",
        "backward_mma.cu",
        "block_sync();  // this step's tiles have landed, and nobody reads those of the step before, dS or P any more",
        "",
        "other threads' copies have not landed",
        "half, plain, 33x70",
    ),
    fault(
        "backward: no barrier before dS is read",
        "backward_mma.cu",
        "block_sync();  // P and dS are complete",
        "",
        "other warps' rows",
        "bfloat, plain, 31x129",
    ),
    fault(
        "backward: next tile into this stage",
        "backward_mma.cu",
        "load_queries(next_head, next_tile, stage ^ 1);",
        "load_queries(next_head, next_tile, stage);",
        "a stale double buffer",
        "half, plain, 70x33x2x3x1",
    ),
    fault(
        "backward: one head of the group",
        "backward_mma.cu",
        "tiles.empty() ? head : head + params.group;",
        "tiles.empty() ? head : head + 1;",
        "gradients are summed over the group",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "backward: dK without its scale",
        "backward_mma.cu",
        "dK.multiply(params.scale);",
        "",
        "gradient missing its scale",
        "half, plain, 33x70",
    ),
    fault(
        "backward: dQ without its scale",
        "backward_mma.cu",
        "dQ.multiply(params.scale);",
        "",
        "gradient missing its scale",
        "half, plain, 33x70",
    ),
    fault(
        "backward: a hidden query more",
        "backward_mma.cu",
        "|| col >= end)",
        "|| col > end)",
        "off by one at the window's left end",
        "half, left, 40x66",
    ),
    fault(
        "backward: a visible query less",
        "backward_mma.cu",
        "col < first)",
        "col <= first)",
        "off by one at the diagonal",
        "half, causal, 65x65x1x4x2",
    ),
    fault(
        "backward: delta of another row",
        "backward_mma.cu",
        "row_delta = delta[query];",
        "row_delta = delta[query ^ 1];",
        "each query has its own",
        "half, plain, 33x70",
    ),
    fault(
        "backward: dS is not multiplied by P",
        "backward_mma.cu",
        "p * (dP.x[m][n][e] - row_delta) * score.slope(s);",
        "p * dP.x[m][n][e] * score.slope(s);",
        "softmax without its normalisation",
        "half, plain, 33x70",
    ),
    fault(
        "backward: no slope",
        "backward_mma.cu",
        "- row_delta) * score.slope(s);",
        "- row_delta);",
        "the soft cap has a derivative",
        "half, softcap, 67x67x1x4x1",
    ),
    fault(
        "backward: fused for all if for one",
        "backward_mma.cu",
        "if (warp_any(!fused))",
        "if (false)",
        "a dropped careful path",
        "half, diagonal, 35x35, steep",
    ),
    fault(
        "backward: dK is not shrunk with dS",
        "backward_mma.cu",
        "dK.multiply(kShrinkFactor);",
        "",
        "the sum of earlier tiles is raised by 2^24",
        "half, plain, 40x70, overflow",
    ),
    fault(
        "backward: dQ stays shrunk",
        "backward_mma.cu",
        "if (shrink)\n                    dQ.multiply(1.0f / kShrinkFactor);",
        "",
        "2^24 is missing",
        "half, plain, 40x70, overflow",
    ),
    fault(
        "backward: dO is not cleaned",
        "backward_mma.cu",
        "clear_nonfinite(shared.dO[stage]);",
        "",
        "a hidden infinity reaches dV",
        "half, causal, 70x70, hidden gradient",
    ),
    fault(
        "backward: Q is not cleaned",
        "backward_mma.cu",
        "clear_nonfinite(shared.Q[stage]);",
        "",
        "a hidden NaN reaches dK",
        "half, causal, 70x70, hidden query",
    ),
    fault(
        "backward: K is not cleaned",
        "backward_mma.cu",
        "clear_nonfinite(shared.K);",
        "",
        "a hidden NaN reaches dQ",
        "half, causal, 70x70, hidden key",
    ),
    fault(
        "backward: K stays clean",
        "backward_mma.cu",
        "load_tile<kHeadDim>(shared.K, k, params.k_row_stride, work.keys.first, params.seqlen_k);\n        "
        "        copy_async_commit();",
        "",
        "an infinite key has a weight of 0 where it is seen",
        "half, causal, 70x70, infinite key",
    ),
    fault(
        "backward: other warps' keys",
        "backward_mma.cu",
        "const u32 grad_key = warp / kWarpsGradD * (16 * kGradM);",
        "const u32 grad_key = warp % kWarpsGradK * (16 * kGradM);",
        "warps split the products differently",
        "bfloat wide, causal, 40x130",
    ),
    fault(
        "backward: whole tiles end with the queries",
        "backward_mma.cu",
        "band.all_visible(queries, keys) && queries.end <= params.seqlen_q)",
        "band.any_visible(queries, keys) && queries.end <= params.seqlen_q)",
        "the loop body without tests is for whole tiles only",
        "bfloat wide, causal, 70x64",
    ),
    # ---- backward_dq_mma.cu
    fault(
        "dq: no barrier before tiles are read",
        "backward_dq_mma.cu",
        "block_sync();  // K_j and V_j have landed, and nobody reads those of the step before any more",
        "",
        "other threads' copies have not landed",
        "half, deterministic, 33x65x1x4x2",
    ),
    fault(
        "dq: next tile into this stage",
        "backward_dq_mma.cu",
        "load_keys(j - 1, stage ^ 1);",
        "load_keys(j - 1, stage);",
        "a stale double buffer",
        "half, deterministic, 33x65x1x4x2",
    ),
    fault(
        "dq: no barrier before the one stage is overwritten",
        "backward_dq_mma.cu",
        "block_sync();\n            load_keys(j - 1, 0);",
        "load_keys(j - 1, 0);",
        "other warps still read it",
        "half narrow, deterministic, 35x67",
    ),
    fault(
        "dq: without its scale",
        "backward_dq_mma.cu",
        "dQ.multiply(params.scale);",
        "",
        "gradient missing its scale",
        "half, deterministic, 33x65x1x4x2",
    ),
    fault(
        "dq: a hidden key more",
        "backward_dq_mma.cu",
        "|| col >= end)",
        "|| col > end)",
        "off by one at the diagonal",
        "half, deterministic causal, 97x97x2x2x1",
    ),
    fault(
        "dq: no slope",
        "backward_dq_mma.cu",
        "- delta[m][e / 2]) * score.slope(s);",
        "- delta[m][e / 2]);",
        "the soft cap has a derivative",
        "half, deterministic softcap, 50x70",
    ),
    fault(
        "dq: lse of the row's neighbour",
        "backward_dq_mma.cu",
        "lse[m][e / 2])",
        "lse[m][0])",
        "a fragment has two rows",
        "half, deterministic, 33x65x1x4x2",
    ),
    fault(
        "dq: stays shrunk",
        "backward_dq_mma.cu",
        "if (shrink)\n            dQ.multiply(1.0f / kShrinkFactor);",
        "",
        "2^24 is missing",
        "half, deterministic, 40x70, overflow",
    ),
    fault(
        "dq: no careful second run",
        "backward_dq_mma.cu",
        "while (!differentiate_rows(params, careful) && !careful)",
        "while (!differentiate_rows(params, careful) && careful)",
        "a hidden NaN reaches rows that do not see it",
        "half, deterministic causal, 70x70, hidden key",
    ),
    # ---- forward_simt.cu, backward_simt.cu, backward_dq_simt.cu, thread_gemm.cuh, row_tile.cuh
    fault(
        "simt forward: no barrier before K is read",
        "forward_simt.cu",
        "block_sync();  // K_j has landed, and nobody reads V_{j+1}, P or the other stage any more",
        "",
        "other threads' copies have not landed",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt forward: no barrier before V is read",
        "forward_simt.cu",
        "block_sync();  // V_j has landed, and nobody reads K_j any more",
        "",
        "other threads' copies have not landed",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt forward: lanes do not wait for P",
        "forward_simt.cu",
        "warp_sync();  ",
        "",
        "lanes of a warp do not move in step",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt forward: next V into this stage",
        "forward_simt.cu",
        "load_V(work.v, j - 1, stage ^ 1);",
        "load_V(work.v, j - 1, stage);",
        "a stale double buffer",
        "float staged, causal, 65x97x1x2x1",
    ),
    fault(
        "simt forward: first hidden key visible",
        "forward_simt.cu",
        "|| col >= keys.end)",
        "|| col > keys.end)",
        "off by one at the diagonal and behind the last key",
        "float, causal, 65x130",
    ),
    fault(
        "simt forward: window one key short",
        "forward_simt.cu",
        "col < keys.first)",
        "col <= keys.first)",
        "off by one at the window's left end",
        "float, left, 66x66",
    ),
    fault(
        "simt forward: no careful second run",
        "forward_simt.cu",
        "while (!attend(params, careful) && !careful)",
        "while (!attend(params, careful) && careful)",
        "a hidden NaN reaches rows that do not see it",
        "float, window, 70x70, hidden value",
    ),
    fault(
        "simt backward: no barrier before Q is read",
        "backward_simt.cu",
        "block_sync();  // Q_i has landed",
        "",
        "other threads' copies have not landed",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt backward: no barrier before dO is overwritten",
        "backward_simt.cu",
        "block_sync();  // nobody reads dO_i or P^T any more",
        "warp_sync();",
        "other warps still read it",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt backward: dK without its scale",
        "backward_simt.cu",
        "dK.multiply(params.scale);",
        "",
        "gradient missing its scale",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt backward: a visible query less",
        "backward_simt.cu",
        "col < queries.first)",
        "col <= queries.first)",
        "off by one at the diagonal",
        "float, causal, 65x130",
    ),
    fault(
        "simt backward: no slope",
        "backward_simt.cu",
        "- row_delta) * score.slope(s);",
        "- row_delta);",
        "the soft cap has a derivative",
        "float, softcap, 67x99x1x4x1",
    ),
    fault(
        "simt backward: lse rows of the first head",
        "backward_simt.cu",
        "work.kv_head * params.group + head;",
        "work.kv_head * params.group;",
        "each head of the group has its own",
        "float, causal, 130x65x1x4x2",
    ),
    fault(
        "simt backward: dQ is not cleared",
        "backward_simt.cu",
        "clear_dq(params);\n}",
        "}",
        "missing zeroing",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt backward: dQ without its scale",
        "backward_simt.cu",
        "dQ.multiply(params.scale);",
        "",
        "gradient missing its scale",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt backward: no barrier before dS is read",
        "backward_simt.cu",
        "block_sync();  // dS is complete",
        "warp_sync();",
        "dQ sums over the keys of all warps",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt backward: dQ behind the last row",
        "backward_simt.cu",
        "if (static_cast<i32>(dQ.row(m)) >= rows_left)",
        "if (static_cast<i32>(dQ.row(m)) > rows_left)",
        "a missed tail",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "simt dq: no barrier before K is read",
        "backward_dq_simt.cu",
        "block_sync();  // K_j has landed, and nobody reads V_j any more",
        "",
        "other threads' copies have not landed",
        "float, deterministic causal, 70x70",
    ),
    fault(
        "simt dq: a hidden key more",
        "backward_dq_simt.cu",
        "|| col >= keys.end)",
        "|| col > keys.end)",
        "off by one at the diagonal",
        "float, deterministic causal, 70x70",
    ),
    fault(
        "simt dq: without its scale",
        "backward_dq_simt.cu",
        "dQ.multiply(params.scale);",
        "",
        "gradient missing its scale",
        "float, deterministic causal, 70x70",
    ),
    fault(
        "simt dq: wait one group too few",
        "backward_dq_simt.cu",
        "copy_async_wait<0>();\n                block_sync();  // K_j",
        "copy_async_wait<1>();\n                block_sync();  // K_j",
        "K is still under way",
        "float, deterministic causal, 70x70",
    ),
    fault(
        "thread product: maximum over half the lanes",
        "include/thread_gemm.cuh",
        "mask < 2 * kLanesN; mask *= 2",
        "mask < kLanesN; mask *= 2",
        "the other columns of a row",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "thread product: chunks of odd rows not exchanged",
        "include/thread_gemm.cuh",
        "k / Tile::kChunkElements % 2 == 0 ? even_chunk : odd_chunk;",
        "even_chunk;",
        "odd rows are stored otherwise",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "thread product: rows of both operands read as even ones",
        "include/thread_gemm.cuh",
        "(k % 2 == 0 ? even : odd) + k * Tile::kStride",
        "even + k * Tile::kStride",
        "odd rows are stored otherwise",
        "float, plain, 65x70x2x3x1",
    ),
    fault(
        "row tile: chunks of odd rows",
        "include/row_tile.cuh",
        "col ^ row % 2 * kChunkElements : col);",
        "col ^ row % 2 : col);",
        "a chunk is no longer whole",
        "float, plain, 65x70x2x3x1",
    ),
]


def copied(folder):
    """A copy of the kernels below a folder."""
    return shutil.copytree(KERNELS, Path(folder) / "kernels_cu", ignore=shutil.ignore_patterns("__pycache__"))


def planted(fault, folder):
    """A copy of the kernels with the fault, below a folder."""
    sources = copied(folder)
    file = sources / fault.file
    text = file.read_text()
    found = text.count(fault.old)
    assert found == 1, f"{fault.name}: {found} places in {fault.file} have {fault.old!r}; the table has to follow"
    file.write_text(text.replace(fault.old, fault.new))
    return sources


def _fails(case, sources, answer):
    """In a process of its own: a wrong kernel may write anywhere."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        try:
            emulated_cases.run(case, sources=sources)
        except (AssertionError, RuntimeError) as error:
            answer.send(str(error).splitlines()[0])
        else:
            answer.send("")


def failure(case, sources, seconds=60):
    """How a case fails with the kernels of a folder; empty if it does not."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_fails, args=(case, sources, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(seconds) else f"no end within {seconds} s"
    except EOFError:
        process.join()
        return f"ended by signal {-process.exitcode}"
    finally:
        process.kill()
        process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults; all by default")
    parser.add_argument("--cases", help="try the cases whose name has this word")
    args = parser.parse_args()
    missed = 0
    for fault in FAULTS:
        if args.names and fault.name not in args.names:
            continue
        cases = fault.cases if args.cases is None else [case for case in emulated_cases.CASES if args.cases in case]
        with tempfile.TemporaryDirectory() as folder:
            sources = planted(fault, folder)
            results = {case: failure(case, sources) for case in cases}
        missed += not any(results.values())
        print(f"{fault.name}: {'caught' if any(results.values()) else 'MISSED'}")
        for case, how in results.items():
            print(f"    {case}: {how[:100] or 'passes'}")
        sys.stdout.flush()
    return f"{missed} faults missed" if missed else 0


if __name__ == "__main__":
    sys.exit(main())
