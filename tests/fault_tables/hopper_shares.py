"""Faults of the keys that are shared out, in Hopper's backward."""

from .fault import fault

# One work in four parts; three works, of which two blocks have parts of two; a head that nobody comes first to, behind
# heads that are dealt out whole.
FOUR_PARTS = "backward hopper narrow, plain, 520x100x1x1x1"
TWO_WORKS = "backward hopper narrow, plain, 520x350x1x1x1"
LAST_HEAD = "backward hopper narrow, plain, 330x200x1x6x3"

FAULTS = [
    fault(
        "shares: parts are added before they are there",
        "backward_wgmma.cu",
        "                spin_until(part_counter(params, other, index), [](u32 there) { return there != 0; });\n",
        "                ;\n",
        "another block is still at work",
        FOUR_PARTS,
    ),
    fault(
        "shares: the last part is forgotten",
        "backward_wgmma.cu",
        "other <= last; ++other)",
        "other < last; ++other)",
        "dK and dV",
        FOUR_PARTS,
    ),
    fault(
        "shares: dV of the parts is forgotten",
        "backward_wgmma.cu",
        "            gather_fragments(dV, part + 64 * kD);\n",
        "",
        "the block's own part alone",
        TWO_WORKS,
    ),
    fault(
        "shares: every part stores",
        "backward_wgmma.cu",
        "        if (tiles.first != 0) {\n            float* part",
        "        if (tiles.first < 0) {\n            float* part",
        "over one another",
        FOUR_PARTS,
    ),
    fault(
        "shares: a part comes first to a sum",
        "backward_wgmma.cu",
        "? 1  // never the first",
        "? 0",
        "stores instead of adding",
        LAST_HEAD,
    ),
    fault(
        "shares: the second of two works has the tiles of the first",
        "backward_wgmma.cu",
        "work.tiles = {share - before, smaller(shares.tiles, end - before)};",
        "work.tiles = {share - before, shares.tiles};",
        "the tiles beyond the share are another block's, too",
        TWO_WORKS,
    ),
    fault(
        "shares: sums that nobody comes first to are not zero",
        "include/shares.cuh",
        "!kFirstStores || all_add ||",
        "!kFirstStores ||",
        "workspace",
        LAST_HEAD,
    ),
    fault(
        "shares: a head counts as one of the first sequence",
        "include/shares.cuh",
        "(params.batch - at.batch) * params.num_kv_heads - at.head",
        "params.num_kv_heads - at.head",
        "others wait for who comes first, and nobody does",
        "backward hopper narrow, plain, 330x200x5x1x1",
    ),
    fault(
        "shares: parts count as there",
        "include/shares.cuh",
        "                part_counter(params, 0, 0)[n] = 0;",
        "                part_counter(params, 0, 0)[n] = 1;",
        "the counters of the call before",
        FOUR_PARTS,
    ),
    fault(
        "shares: the second warpgroup's part is in the first's place",
        "backward_wgmma.cu",
        "            float* part = part_sums(params, block, index);\n            store",
        "            float* part = part_sums(params, block, 0);\n            store",
        "nobody looks for it there",
        FOUR_PARTS,
    ),
    fault(
        "shares: the last block of a work",
        "include/shares.cuh",
        "((index - whole + 1) * tiles - 1) / share;",
        "(index - whole + 1) * tiles / share;",
        "the next work's, where a work ends with a share",
        "backward hopper narrow, plain, 300x700x1x1x1",
    ),
]
