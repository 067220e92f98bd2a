"""Key tiles dealt out to blocks: everything is computed once, and in no more time than whole key tiles would take."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash.shares import share_out

numbers = {"works": st.integers(1, 5000), "tiles": st.integers(1, 300), "blocks": st.integers(1, 160)}


def rounds(works, blocks):
    return -(-works // blocks)


@given(**numbers)
@settings(deadline=None)
def test_what_is_not_whole_is_shared_out_once(works, tiles, blocks):
    whole, share = share_out(works, tiles, blocks)
    others = [divmod(tile, tiles) for tile in range((works - whole) * tiles)]
    dealt = [others[block * share : (block + 1) * share] for block in range(blocks)]
    assert [tile for part in dealt for tile in part] == others
    assert all(len({work for work, _ in part}) <= 2 for part in dealt)


@given(**numbers)
@settings(deadline=None)
def test_shares_take_less_time_than_a_round(works, tiles, blocks):
    whole, share = share_out(works, tiles, blocks)
    assert whole == works or whole % blocks == 0
    assert (share == 0) == (whole == works)
    assert rounds(whole, blocks) * tiles + share <= rounds(works, blocks) * tiles


@given(**numbers)
@settings(deadline=None)
def test_few_blocks_have_parts_of_one_work(works, tiles, blocks):
    """One block adds them."""
    _, share = share_out(works, tiles, blocks)
    assert not share or tiles / share <= tiles**0.5 + 2


@pytest.mark.parametrize(
    ("works", "tiles", "dealt"),
    [
        (132, 100, (132, 0)),  # a round
        (133, 100, (132, 10)),  # one work, for ten blocks
        (264 + 66, 100, (264, 50)),
        (264 + 130, 100, (394, 0)),  # 99 of 100 tiles: what a share costs is more than one
        (66, 6, (0, 3)),
        (66, 5, (66, 0)),
        (1, 1, (1, 0)),
    ],
)
def test_shares_of_132_blocks(works, tiles, dealt):
    assert share_out(works, tiles, 132) == dealt
