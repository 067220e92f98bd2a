"""What the plain multiply-add kernels (family "simt") need: shared memory by exact formulas, and tiles that always fit.

Pure functions of tile sizes. Head dims are those of tiles (``tiles.tile_head_dim``). Queries and keys are kept in their
own dtype; the weights P and dS that pass between the lanes of a warp are float32.
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
    """Bytes of backward_dkv_simt's ``SharedStorage``: K, V, Q, dO, P or dS, LSE and delta.

    dK and dV leave through the space of K and V.
    """
    streamed = Br * ((d + dv) * itemsize + 2 * _PADDING + 2 * _FLOAT)
    return Bc * (d + dv) * itemsize + stages * streamed + Bc * Br * _FLOAT


def backward_dq_shared_bytes(Br: int, Bc: int, d: int, dv: int, stages: int, itemsize: int) -> int:
    """Bytes of backward_dq_simt's ``SharedStorage``: Q, dO, K, V and dS. dQ leaves through the space of Q."""
    streamed = Bc * ((d + dv) * itemsize + 2 * _PADDING)
    return Br * (d + dv) * itemsize + stages * streamed + Br * Bc * _FLOAT


def default_tiles(direction: str, d: int, dv: int, shared_limit: int) -> tuple[int, int, int, int]:
    """Tiles for a pass where nothing has been measured: the first of a short list that fits, for float32.

    Args:
        direction: "forward", "backward_dkv" or "backward_dq".
        d, dv: head dims of tiles.
        shared_limit: shared memory that a block may use, in bytes.

    Returns:
        (Br, Bc, warps, stages). From 48 KiB on they fit every head dim; below that they may not, the smallest being
        returned.
    """
    table, shared_bytes = _DEFAULTS[direction]
    listed = next(tiles for largest, tiles in table if max(d, dv) <= largest)
    for Br, Bc, warps, stages in listed:
        if shared_bytes(Br, Bc, d, dv, stages, _FLOAT) <= shared_limit:
            return Br, Bc, warps, stages
    return listed[-1]


# (largest head dim of a tile, tiles), best first: for 227, 163, 99, 64 and 48 KiB of shared memory. A lane should hold
# eight rows of a product and at least four columns; where the sums allow it a warp has 32 rows, else 16, and two blocks
# fit an SM.
_DEFAULTS = {
    "forward": (
        (
            (64, ((128, 64, 4, 1), (64, 32, 2, 1))),
            (128, ((64, 64, 4, 1), (64, 32, 2, 1), (32, 32, 2, 1), (16, 16, 1, 1))),
            (256, ((128, 32, 8, 1), (64, 32, 4, 1), (32, 16, 4, 1), (16, 16, 2, 1), (8, 16, 1, 1))),
        ),
        forward_shared_bytes,
    ),
    "backward_dkv": (
        (
            (64, ((64, 64, 4, 1), (32, 64, 4, 1), (32, 32, 2, 1))),
            (128, ((64, 128, 8, 1), (32, 64, 4, 1), (32, 32, 2, 1), (16, 32, 2, 1), (16, 16, 1, 1))),
            (256, ((32, 64, 8, 1), (32, 32, 4, 1), (16, 32, 4, 1), (8, 16, 2, 1), (8, 8, 1, 1))),
        ),
        backward_dkv_shared_bytes,
    ),
    "backward_dq": (
        (
            (64, ((128, 32, 4, 1), (64, 32, 2, 1), (32, 32, 2, 1))),
            (128, ((128, 64, 8, 1), (64, 32, 4, 1), (32, 32, 2, 1), (32, 16, 2, 1), (16, 16, 1, 1))),
            (256, ((64, 32, 8, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 8, 2, 1), (8, 8, 1, 1))),
        ),
        backward_dq_shared_bytes,
    ),
}
