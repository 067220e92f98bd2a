"""How the key tiles of a backward are dealt out to blocks that stay: whole ones in rounds, the last of them in shares.

Key tiles that do not make a round of all blocks would leave the other blocks idle, up to a whole round long. Their
query tiles are shared out evenly instead (Osama et al., "Stream-K", arXiv:2301.03598); kernels_cu/include/shares.cuh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .problem import Problem
from .resources import Limits
from .tiles import TileConfig

# In query tiles, measured on the H200: K and V once more, a pipeline to fill, a part of dK and dV written and read.
_SHARE_COST = 3


@dataclass(frozen=True, slots=True)
class Deal:
    """What blocks compute of the key tiles of all heads.

    Attributes:
        whole: key tiles that have a block each, of which it computes all.
        share: query tiles that every block computes of all that the other key tiles see; 0: there are no others.
        sharers: blocks that have a share.
    """

    whole: int
    share: int = 0
    sharers: int = 0


def deal(problem: Problem, config: TileConfig, limits: Limits) -> Deal:
    """The deal for a backward of family "wgmma" whose blocks stay.

    With a mask the last key tiles to be taken are short. A deterministic backward adds to dQ in one order, in which
    shares have no place.
    """
    works = problem.batch * problem.num_kv_heads * -(-problem.seqlen_k // config.Bc)
    if problem.is_masked or problem.deterministic or not config.first_stores:
        return Deal(works)
    tiles = -(-problem.seqlen_q // config.Br)
    whole, share = share_out(works, tiles, limits.sm_count)
    return Deal(whole, share, -(-(works - whole) * tiles // share) if share else 0)


def share_out(works: int, tiles: int, blocks: int) -> tuple[int, int]:
    """``Deal.whole`` and ``Deal.share``: whichever takes the least time.

    Args:
        works: key tiles of all heads.
        tiles: query tiles that each of them sees.
        blocks: that run at once.

    Example:
        >>> share_out(2048, 103, 132)
        (1980, 54)
    """
    left = works % blocks
    # One block adds the parts of a work: more of them take it longer, more tiles in each take everybody longer.
    share = max(-(-left * tiles // blocks), math.isqrt(tiles))
    if not left or share + _SHARE_COST > tiles:
        return works, 0
    return works - left, share
