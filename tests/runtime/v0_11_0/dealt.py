# SPDX-License-Identifier: Apache-2.0
"""Lookup tables counted out by tests/oracle.py, so that many generated cases cost one deal per (world, interleave)."""
import functools

import numpy as np

from tests import oracle

MAX_LEN = 20_000
BLOCK_SIZES = [1, 2, 4, 6, 8, 16, 32, 48, 64, 128]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@functools.cache
def owner_and_index(world: int, interleave: int) -> tuple[np.ndarray, np.ndarray]:
    """For positions 0..MAX_LEN-1: the rank that stores the token, and its place in that rank's storage order."""
    owner = np.empty(MAX_LEN, dtype=np.int64)
    index = np.empty(MAX_LEN, dtype=np.int64)
    for rank, shard in enumerate(oracle.deal(MAX_LEN, world, interleave)):
        owner[shard] = rank
        index[shard] = np.arange(len(shard))
    return owner, index


@functools.cache
def counts(world: int, interleave: int) -> np.ndarray:
    """[MAX_LEN + 1, world]: tokens that each rank stores of a request of that length, counted one token at a time."""
    owner, _ = owner_and_index(world, interleave)
    one_hot = owner[:, None] == np.arange(world)
    return np.concatenate([np.zeros((1, world), dtype=np.int64), np.cumsum(one_hot, axis=0)])
