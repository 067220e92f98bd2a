"""Waves of blocks, and whether the L2 cache still has a head's rows when the next wave walks over them.

As many blocks run at a time as the multiprocessors hold: a wave. Its blocks walk in step over the rows that they
stream, so that memory gives to the first what the cache then serves to the others: one walk is one read, however many
blocks take part. But a wave rarely is a whole number of heads, and a head that lies in two waves is walked twice.
Between a row of the one walk and the same row of the other comes what a wave touches. A cache that replaces what was
used longest ago has all of the head if that fits, and nothing of it otherwise.

What a wave touches is more in the cache than in memory. The L2 cache of NVIDIA's large GPUs has two partitions, each of
which keeps what multiprocessors directly connected to it read (NVIDIA A100 whitepaper, "A100 L2 cache"), while memory
belongs to one of the two. So what many multiprocessors read is held twice; what one of them reads is held where it
belongs, and half of the time at the reader's as well; what is written or added to is held where it belongs.

Blocks that begin at rows of their own, one after the other, as a mask has them do, are not in step. Then somebody is at
work on each part of a head until all are through with it, and one head has to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..resources import Limits

_PARTITIONED = frozenset({80, 90, 100, 103})  # compute capabilities * 10 of A100, H100 and H200, B200, B300


@dataclass(frozen=True, slots=True)
class Blocks:
    """A kernel's blocks in the order in which they run.

    Attributes:
        heads: whose blocks follow one another, key/value head by key/value head.
        per_head: blocks of one of them.
        at_a_time: blocks that the GPU runs at a time.
        in_step: a wave's blocks begin at the same rows.
    """

    heads: int
    per_head: int
    at_a_time: int
    in_step: bool

    @property
    def walks(self) -> int:
        """Pairs of a wave and a head that has blocks in it."""
        blocks = self.heads * self.per_head
        waves = -(-blocks // self.at_a_time)
        whole = -(-blocks // math.lcm(self.per_head, self.at_a_time))  # waves that begin with a head
        return self.heads + waves - whole

    @property
    def heads_of_a_wave(self) -> float:
        """Heads that have blocks in a full wave; the mean over all blocks of a head that one can begin with."""
        apart = math.gcd(self.per_head, self.at_a_time)
        return min(self.heads, 1 + (self.at_a_time - apart) / self.per_head)


@dataclass(frozen=True, slots=True)
class Touched:
    """Bytes that blocks touch.

    Attributes:
        streamed, summed: of a head; all of its blocks read the former, and add to the latter.
        read, written: of one block, which no other touches.
    """

    streamed: int
    summed: int
    read: int
    written: int


def reads_per_head(blocks: Blocks, touched: Touched, limits: Limits) -> float:
    """How often what a head's blocks stream is read from memory, and the sums are read and written, on average."""
    head = touched.streamed * _partitions(limits) + touched.summed
    block = touched.read * copies_for_one_reader(limits) + touched.written
    running = min(blocks.at_a_time, blocks.heads * blocks.per_head)
    between = blocks.heads_of_a_wave * head + running * block if blocks.in_step else head
    return 1.0 if stays(between, limits.l2_bytes) else blocks.walks / blocks.heads


def copies_for_one_reader(limits: Limits) -> float:
    """How often the L2 cache holds what a single multiprocessor reads, on average over where it belongs."""
    return (1 + _partitions(limits)) / 2


def _partitions(limits: Limits) -> int:
    return 2 if limits.arch in _PARTITIONED else 1


def stays(bytes_between: float, cache_bytes: float) -> bool:
    """Whether a cache still has what it was asked for, after so many bytes, itself among them.

    The one used longest ago is replaced: of a loop that fits all stays, of one that does not, nothing. V1's counters on
    an H200 show it: loops over 1.7 and 2.2 times the cache read from memory all that they ask for, within 0.6%.
    """
    return bytes_between <= cache_bytes
