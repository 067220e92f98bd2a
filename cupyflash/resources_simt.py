"""What the plain multiply-add kernels (family "simt") need: shared memory by exact formulas, and tiles that always fit.

Pure functions of tile sizes. Head dims are those of tiles (``tiles.tile_head_dims``). Queries and keys are kept in
their own dtype; the weights P and dS that pass between the lanes of a warp are float32.
"""

from __future__ import annotations

_PADDING = 16  # bytes per row of tiles of which eight rows are read at a time
_FLOAT = 4  # bytes


def forward_shared_bytes(Br: int, Bc: int, d: int, dv: int, stages: int, itemsize: int) -> int:
    """Bytes of forward_simt's ``SharedStorage``: Q, K, V and P, or O on its way out."""
    streamed = Bc * (d * itemsize + _PADDING) + Bc * dv * itemsize
    tiles = Br * d * itemsize + stages * streamed + Br * Bc * _FLOAT
    return max(tiles, Br * dv * itemsize)


def backward_dkv_shared_bytes(Br: int, Bc: int, d: int, dv: int, stages: int, itemsize: int) -> int:
    """Bytes of backward_simt's ``SharedStorage``: K, V, Q, dO, P or dS, LSE and delta.

    dK and dV leave through the space of K and V.
    """
    streamed = Br * ((d + dv) * itemsize + 2 * _PADDING + 2 * _FLOAT)
    return Bc * (d + dv) * itemsize + stages * streamed + Bc * Br * _FLOAT


def backward_dq_shared_bytes(Br: int, Bc: int, d: int, dv: int, stages: int, itemsize: int) -> int:
    """Bytes of backward_dq_simt's ``SharedStorage``: Q, dO, K, V and dS. dQ leaves through the space of Q."""
    streamed = Bc * ((d + dv) * itemsize + 2 * _PADDING)
    return Br * (d + dv) * itemsize + stages * streamed + Br * Bc * _FLOAT


def warps_over_dq_columns(Br: int, d: int, warps: int) -> int:
    """How many warps share the head dims of dQ: as few as leave a warp 8 queries, but 8 columns are a warp's least."""
    split = 1
    while Br * split < 8 * warps and d % (16 * split) == 0:
        split *= 2
    return split


def why_uneven(task: str, Br: int, Bc: int, warps: int, d: int, dv: int, dq_warps: int) -> str | None:
    """Why warps and their lanes cannot share the tiles of a pass, or None if they can; as thread_gemm.cuh asserts."""
    name, rows = ("Br", Br) if task in ("forward", "backward_dq") else ("Bc", Bc)
    if rows % warps or Br % 8 or Bc % 8:
        return f"Br is {Br} and Bc {Bc}; {warps} warps share {name}, and both must be multiples of 8"
    own = rows // warps
    products = {
        "forward": [(own, Bc), (own, dv)],
        "backward": [(own, Br), (own, d), (own, dv)],
        "backward_dkv": [(own, Br), (own, d), (own, dv)],
        "backward_dq": [(own, Bc), (own, d)],
    }[task]
    if task == "backward":
        if warps % dq_warps or Br * dq_warps % warps or d % dq_warps:
            return f"dq_warps_d is {dq_warps}; it must divide {warps} warps and {d} columns, the others Br of {Br}"
        own_dq = Br * dq_warps // warps
        if not _reads_whole_chunks(own_dq, d // dq_warps):
            return f"a warp has {own_dq} rows of dQ; a lane's runs of them must be a multiple of 8 apart"
        products.append((own_dq, d // dq_warps))
    lanes = [lanes_over_rows(*product) for product in products]
    if task == "forward" and lanes[0] and dv * lanes[0] % 32:
        lanes[1] = 0  # O is shared as S is
    for (m, n), found in zip(products, lanes, strict=True):
        if not found:
            return f"the lanes of a warp cannot share {m} x {n} results evenly"
    return None


def _reads_whole_chunks(rows: int, cols: int) -> bool:
    """Whether dS can be read by columns, in runs of up to four; thread_gemm.cuh asserts the same."""
    lanes = lanes_over_rows(rows, cols)
    if not lanes:
        return True  # that is another reason
    own = rows // lanes
    run = 4 if own % 4 == 0 else 2 if own % 2 == 0 else 1
    return own == run or lanes * run % 8 == 0


def lanes_over_rows(rows: int, cols: int) -> int:
    """Lanes over the rows of a warp's results, 0 if no number of them shares evenly; thread_gemm.cuh has the reason."""
    fitting = [lanes for lanes in (2, 4, 8) if rows % lanes == 0 and cols * lanes % 32 == 0]
    return min(fitting, key=lambda lanes: rows // lanes + cols * lanes // 32, default=0)


def default_tiles(direction: str, d: int, dv: int, shared_limit: int) -> tuple[int, int, int, int]:
    """Tiles for a pass where nothing has been measured, by the shared memory that a block may use.

    Args:
        direction: "forward", "backward", "backward_dkv" or "backward_dq".
        d, dv: head dims of tiles.
        shared_limit: in bytes.

    Returns:
        (Br, Bc, warps, stages), which fit in float32 whatever the head dims.

    Raises:
        ValueError: less than 48 KiB.
    """
    by_memory = next(tiles for largest, tiles in _DEFAULTS[direction].items() if max(d, dv) <= largest)
    enough = [kibibytes for kibibytes in by_memory if kibibytes * 1024 <= shared_limit]
    if not enough:
        raise ValueError(f"shared_limit is {shared_limit} bytes; {direction} needs at least {min(by_memory)} KiB")
    Br, Bc, warps = by_memory[max(enough)]
    return Br, Bc, warps, 1


# {direction: {largest head dim of a tile: {KiB of shared memory: (Br, Bc, warps)}}}
# A lane should hold eight rows of a product and four columns; where the sums allow it without a spill a warp has 32
# rows, else 16 (or 8), and two blocks fit an SM.
_DEFAULTS = {
    "forward": {
        64: {163: (128, 64, 4), 99: (128, 32, 4), 48: (64, 32, 2)},
        128: {163: (64, 64, 4), 99: (64, 32, 4), 64: (32, 32, 2), 48: (32, 16, 2)},
        256: {227: (64, 64, 8), 163: (64, 32, 8), 99: (32, 16, 4), 64: (16, 16, 2), 48: (8, 16, 1)},
    },
    "backward": {
        64: {227: (64, 64, 4), 163: (64, 128, 8), 99: (64, 64, 4), 64: (32, 64, 4), 48: (32, 32, 2)},
        128: {163: (64, 64, 8), 99: (32, 32, 4), 64: (16, 32, 4), 48: (16, 16, 2)},
        256: {227: (32, 64, 8), 163: (32, 32, 4), 99: (16, 32, 4), 64: (8, 16, 2), 48: (8, 8, 1)},
    },
    "backward_dkv": {
        64: {99: (64, 64, 4), 64: (32, 64, 4), 48: (32, 32, 2)},
        128: {227: (32, 128, 8), 163: (32, 64, 4), 99: (32, 32, 4), 64: (16, 32, 4), 48: (16, 16, 2)},
        256: {227: (32, 64, 8), 163: (32, 32, 4), 99: (16, 32, 4), 64: (8, 16, 2), 48: (8, 8, 1)},
    },
    "backward_dq": {
        64: {99: (128, 32, 4), 64: (64, 32, 4), 48: (32, 32, 2)},
        128: {227: (128, 64, 8), 163: (64, 32, 4), 99: (32, 32, 4), 64: (32, 16, 4), 48: (16, 16, 2)},
        256: {227: (64, 32, 8), 163: (32, 32, 4), 99: (32, 16, 4), 64: (16, 8, 2), 48: (8, 8, 1)},
    },
}
