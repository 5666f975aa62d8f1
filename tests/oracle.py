# SPDX-License-Identifier: Apache-2.0
"""Brute-force references for the DCP layout: they deal tokens out one by one and count, and share no formula with the code under test."""


def deal(length: int, world: int, interleave: int) -> list[list[int]]:
    """Token positions that each DCP rank stores, in storage order: `interleave` tokens to rank 0, the next to rank 1, ..."""
    shards: list[list[int]] = [[] for _ in range(world)]
    rank = taken = 0
    for position in range(length):
        if taken == interleave:
            rank, taken = (rank + 1) % world, 0
        shards[rank].append(position)
        taken += 1
    return shards


def local_lens(length: int, world: int, interleave: int) -> list[int]:
    """Tokens of a request of `length` tokens that each rank stores."""
    return [len(shard) for shard in deal(length, world, interleave)]


def slot(position: int, rank: int, world: int, interleave: int, block_size: int, block_table: list[int]) -> int:
    """Cache slot of `position` on `rank`, -1 if another rank owns it. `block_size`: tokens per rank in one manager block."""
    shard = deal(position + 1, world, interleave)[rank]
    if not shard or shard[-1] != position:
        return -1
    index = len(shard) - 1
    return block_table[index // block_size] * block_size + index % block_size
