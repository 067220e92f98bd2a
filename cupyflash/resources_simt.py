"""What the plain multiply-add kernels (family "simt") need: shared memory by exact formulas, and tiles that always fit.

Pure functions of tile sizes. Head dims are those of tiles (``tiles.tile_head_dim``). Queries and keys are kept in their own
dtype; the weights P and dS that pass between the lanes of a warp are float32.
"""

from __future__ import annotations

_PADDING = 16  # bytes per row of tiles of which eight rows are read at a time
_FLOAT = 4  # bytes


def forward_shared_bytes(Br: int, Bc: int, d: int, dv: int, stages: int, itemsize: int) -> int:
    """Bytes of forward_simt's ``SharedStorage``: Q, K, V and P, or O on its way out."""
    streamed = Bc * (d * itemsize + _PADDING) + Bc * dv * itemsize
    return max(Br * d * itemsize + stages * streamed + Br * Bc * _FLOAT, Br * dv * itemsize)


def backward_dkv_shared_bytes(Br: int, Bc: int, d: int, dv: int, stages: int, itemsize: int) -> int:
    """Bytes of backward_dkv_simt's ``SharedStorage``: K, V, Q, dO, weights, LSE and delta, or dK and dV on their way out."""
    streamed = Br * ((d + dv) * itemsize + 2 * _PADDING + 2 * _FLOAT)
    return max(Bc * (d + dv) * itemsize + stages * streamed + Bc * Br * _FLOAT, Bc * (d + dv) * itemsize)


def backward_dq_shared_bytes(Br: int, Bc: int, d: int, dv: int, stages: int, itemsize: int) -> int:
    """Bytes of backward_dq_simt's ``SharedStorage``: Q, dO, K, V and weights, or dQ on its way out."""
    streamed = Bc * ((d + dv) * itemsize + 2 * _PADDING)
    return Br * (d + dv) * itemsize + stages * streamed + Br * Bc * _FLOAT


def default_tiles(direction: str, d: int, dv: int, shared_limit: int) -> tuple[int, int, int, int]:
    """Tiles for a pass where nothing has been measured: the first of a short list that fits, for float32.

    Args:
        direction: "forward", "backward_dkv" or "backward_dq".
        d, dv: head dims of tiles.
        shared_limit: shared memory that a block may use, in bytes; from 48 KiB on something fits every head dim.

    Returns:
        (Br, Bc, warps, stages).

    Raises:
        ValueError: nothing fits.
    """
    table, shared_bytes = _DEFAULTS[direction]
    for largest, tiles in table:
        if max(d, dv) <= largest:
            for Br, Bc, warps, stages in tiles:
                if shared_bytes(Br, Bc, d, dv, stages, _FLOAT) <= shared_limit:
                    return Br, Bc, warps, stages
    raise ValueError(
        f"no {direction} tiles for head dims {d} and {dv} fit {shared_limit} bytes of shared memory; "
        "head dims up to 256 and 49152 bytes or more always fit"
    )


# (largest head dim of a tile, tiles), best first; each list ends with what fits 48 KiB. Rows per warp are chosen for eight
# rows per lane where the results still fit the registers: 32 up to head dim 128 in the forward, else 16.
_DEFAULTS = {
    "forward": (
        (
            (64, ((128, 64, 4, 1), (128, 32, 4, 1), (64, 32, 2, 1), (32, 32, 2, 1))),
            (128, ((128, 32, 4, 1), (64, 32, 2, 1), (32, 32, 2, 1), (16, 16, 1, 1))),
            (256, ((128, 32, 8, 1), (64, 16, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1), (8, 16, 1, 1))),
        ),
        forward_shared_bytes,
    ),
    "backward_dkv": (
        (
            (64, ((32, 128, 4, 1), (32, 64, 4, 1), (16, 32, 2, 1))),
            (128, ((64, 128, 8, 1), (32, 64, 4, 1), (16, 32, 2, 1), (16, 16, 1, 1))),
            (256, ((16, 64, 8, 1), (16, 32, 4, 1), (16, 16, 2, 1), (8, 8, 1, 1))),
        ),
        backward_dkv_shared_bytes,
    ),
    "backward_dq": (
        (
            (64, ((128, 32, 4, 1), (64, 32, 4, 1), (32, 16, 2, 1))),
            (128, ((128, 32, 8, 1), (64, 32, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1))),
            (256, ((64, 16, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1), (8, 8, 1, 1))),
        ),
        backward_dq_shared_bytes,
    ),
}
