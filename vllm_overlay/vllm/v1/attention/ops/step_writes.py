# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Which context rows of a batch does the same batch write?

With prefix caching a block is registered under its hash when the tokens that fill it
are *scheduled* (`KVCacheManager.allocate_slots` calls `cache_blocks` before anything
ran). A request scheduled after that, in the same step, can hit the block: part of its
context is then written by another request of its own batch, which prefills or decodes.
In a layer that has run this makes no difference; in one that has not, those rows hold
what was there before. So whoever reads a layer's cache ahead of time must leave them
out, and the block tables say which they are.

The scheduler sends block ids to workers once and they only ever grow, so a host copy
of the block tables costs one assignment per new block. Model runner V1 has one; for
V2, whose tables live on the device, `new_host_block_tables` makes one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import vllm.envs as envs


@dataclass(frozen=True)
class HostBlockTable:
    """Block ids of one KV cache group on the host.

    ids: int32 [table rows, blocks]. num_blocks: integers [table rows], how many ids of
    a row are valid. block_size: tokens of a block on one rank; with DCP a block holds
    W times as many of its request.
    """

    ids: np.ndarray
    num_blocks: np.ndarray
    block_size: int


def new_host_block_tables(
    block_sizes: Sequence[int],
    widths: Sequence[int],
    num_blocks: np.ndarray,
    cp_size: int,
) -> list[HostBlockTable] | None:
    """Host tables for a runner without any, or None where nothing looks ahead.

    Args:
        block_sizes: of each KV cache group.
        widths: blocks per request, of each group.
        num_blocks: int32 [groups, table rows], kept by the runner.
        cp_size: decode context parallel size.

    """
    if cp_size == 1 or not (envs.VLLM_DCP_CKV_GATHER and envs.VLLM_DCP_CKV_PREFETCH):
        return None
    return [
        HostBlockTable(np.zeros((counts.shape[0], width), np.int32), counts, block_size)
        for block_size, width, counts in zip(block_sizes, widths, num_blocks)
    ]


def share_host_block_tables(
    attn_groups: Sequence[Sequence[Any]], tables: Sequence[Any] | None
) -> None:
    """Give the planners of a runner's metadata builders its host block tables.

    Args:
        attn_groups: attention groups of each KV cache group.
        tables: of each KV cache group a `HostBlockTable`, or a `BlockTable` of model
            runner V1, whose rows are the batch's. None: nothing looks ahead.

    """
    if tables is None:
        return
    for groups, table in zip(attn_groups, tables):
        for builder in (b for group in groups for b in group.metadata_builders):
            planner = getattr(builder, "ckv_gather", None)
            if planner is None:
                continue
            if not isinstance(table, HostBlockTable):
                table = HostBlockTable(
                    table.block_table.np, table.num_blocks_per_row, table.block_size
                )
            planner.host_blocks = table


def rows_written_by_batch(
    table: HostBlockTable,
    table_rows: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    readers: np.ndarray,
    history: np.ndarray,
    dcp_world_size: int,
) -> np.ndarray:
    """The rows of some requests' contexts that a request of the batch writes.

    Args:
        table: block ids.
        table_rows: integers [requests], the row of `table` that each request of the
            batch has. All requests of the batch: each can be the one who writes.
        starts, ends: integers [requests], positions [start, end) that each writes.
        readers: integers [readers], which requests of the batch are asked about.
        history: integers [readers], their context, as positions [0, history).
        dcp_world_size: W.

    Returns:
        int64 [ranges, 3]: (index in `readers`, first position, end). Ranges of a
        reader ascend and neither touch nor overlap; a request's own positions behind
        its context are not among them.

    """
    tokens = table.block_size * dcp_world_size

    def blocks_of(rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> Any:
        """Blocks [first, last) of each row: (index of the row, block, its id)."""
        # Lookahead slots may be missing behind what is written.
        counts = np.maximum(np.minimum(last, table.num_blocks[rows]) - first, 0)
        owner = np.repeat(np.arange(len(rows)), counts)
        behind = np.repeat(np.cumsum(counts) - counts - first, counts)
        block = np.arange(len(owner)) - behind
        return owner, block, table.ids[rows[owner], block]

    writer, block, ids = blocks_of(table_rows, starts // tokens, -(-ends // tokens))
    written, index = np.unique(ids, return_inverse=True)
    # A block has one writer; were there two, what lies between them would count too.
    low = np.full(len(written), tokens, dtype=np.int64)
    high = np.zeros(len(written), dtype=np.int64)
    np.minimum.at(low, index, np.maximum(starts[writer] - block * tokens, 0))
    np.maximum.at(high, index, np.minimum(ends[writer] - block * tokens, tokens))

    reader, block, ids = blocks_of(
        table_rows[readers], np.zeros_like(history), -(-history // tokens)
    )
    hit = np.isin(ids, written)
    reader, block = reader[hit], block[hit]
    index = np.searchsorted(written, ids[hit])
    begin = block * tokens + low[index]
    end = np.minimum(block * tokens + high[index], history[reader])
    # Of its own last block, a request writes what is behind its context.
    real = begin < end
    reader, begin, end = reader[real], begin[real], end[real]
    if not len(reader):
        return np.empty((0, 3), dtype=np.int64)
    new = np.ones(len(reader), dtype=bool)
    new[1:] = (reader[1:] != reader[:-1]) | (begin[1:] != end[:-1])
    last = np.append(np.flatnonzero(new)[1:], len(reader)) - 1
    return np.stack([reader[new], begin[new], end[last]], axis=1)
