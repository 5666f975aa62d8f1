# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Which records of a batch may travel before their layer runs, and where all go.

*History* are the rows of a request's context that no request of this step writes. They
are in every layer's cache when the step begins, so the next layer's can be gathered
while this one computes. All other rows are *late*: the request's own chunk, and what
another request of the batch writes into blocks that both hold (`step_writes`). They are
in a layer's cache when that layer has written it, and travel then.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.ops.ckv_copy import CKVSegments
from vllm.v1.attention.ops.ckv_layout import CKVLayout, shard_lens

# Tokens of history, summed over the batch, from which looking ahead is worth its extra
# launches and its second all-gather.
CKV_PREFETCH_MIN_HISTORY = 2048


@dataclass(frozen=True)
class CKVLateTables:
    """How history and late rows of a batch come together.

    history: from this rank's paged cache into its share, late rows left out.
    pack: this rank's late records from its paged cache, range by range.
    scatter: all ranks' packed records, received at stride `late_rows`, into the
        holes of the gathered buffer.
    late_rows: the most late records that a rank has.
    """

    history: CKVSegments
    pack: CKVSegments
    scatter: CKVSegments
    late_rows: int


@dataclass(frozen=True)
class CKVPrefetchPlan:
    """The prefetch of one step.

    step: never repeats in this process. tables: None if this step does not look ahead.
    """

    step: int
    tables: CKVLateTables | None


next_step = itertools.count().__next__


def split_history(
    history: np.ndarray, seq_lens: np.ndarray, written: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The positions of a batch's requests: history, and what is late.

    Args:
        history: integers [R], context of each request before this step.
        seq_lens: integers [R], its context and chunk.
        written: integers [ranges, 3], what of the contexts this step writes; see
            `rows_written_by_batch`.

    Returns:
        Two int64 arrays [ranges, 3] of (request, first position, end), requests and
        positions ascending, none empty. Together they are all positions, once each.

    """
    requests = np.arange(len(history))
    chunks = np.stack([requests, history, seq_lens], axis=1)
    late = np.concatenate([written, chunks]).astype(np.int64)
    late = late[np.lexsort((late[:, 1], late[:, 0]))]
    # Between two late ranges of a request, and before its first one, lies history.
    begin = np.zeros(len(late), dtype=np.int64)
    same = late[1:, 0] == late[:-1, 0]
    begin[1:][same] = late[:-1, 2][same]
    early = np.stack([late[:, 0], begin, late[:, 1]], axis=1)
    return early[early[:, 2] > early[:, 1]], late[late[:, 2] > late[:, 1]]


def ckv_late_segments(
    layout: CKVLayout, early: np.ndarray, late: np.ndarray, dcp_rank: int
) -> tuple[list[np.ndarray], int]:
    """The segments of `CKVLateTables` (history, pack, scatter) and `late_rows`.

    A rank's records of the positions [a, b) of a request are rows
    [len(a, rank), len(b, rank)) of its shard, wherever a and b lie in their interleave
    unit. Host only.

    Args:
        layout: of the batch.
        early, late: ranges of positions, see `split_history`.
        dcp_rank: this rank.

    Returns:
        Three int32 arrays [segments, 4] without empty segments, and `late_rows`.

    """

    def rows(ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First local row, rows, first row in the share: each int64 [W, ranges]."""
        bounds = shard_lens(ranges[:, 1:], layout.dcp_world_size, layout.interleave)
        first, end = bounds[..., 0], bounds[..., 1]
        return first, end - first, layout.rank_req_starts[:, ranges[:, 0]] + first

    def segments(*columns: object) -> np.ndarray:
        table = np.stack([np.ravel(c) for c in np.broadcast_arrays(*columns)], axis=1)
        return table[table[:, 3] > 0].astype(np.int32)

    me = dcp_rank
    first, count, target = rows(early)
    history = segments(early[:, 0], first[me], target[me], count[me])
    first, count, target = rows(late)
    packed = np.cumsum(count, axis=1) - count
    late_rows = int(count.sum(axis=1).max())
    ranks = np.arange(layout.dcp_world_size)[:, None]
    return [
        history,
        segments(late[:, 0], first[me], packed[me], count[me]),
        segments(
            0,
            ranks * late_rows + packed,
            ranks * layout.padded_total + target,
            count,
        ),
    ], late_rows


def plan_ckv_prefetch(
    layout: CKVLayout,
    early: np.ndarray,
    late: np.ndarray,
    dcp_rank: int,
    device: torch.device,
) -> CKVPrefetchPlan:
    """The step's prefetch, from facts that all ranks share.

    Args:
        layout: of the batch.
        early, late: ranges of positions, see `split_history`.
        dcp_rank: this rank.
        device: of the tables.

    """
    step = next_step()
    if not looks_ahead(early):
        return CKVPrefetchPlan(step, None)
    parts, late_rows = ckv_late_segments(layout, early, late, dcp_rank)
    # One copy to the device.
    table = async_tensor_h2d(np.concatenate(parts), device=device)
    history, pack, scatter = (
        CKVSegments(rows, int(part[:, 3].max(initial=0)))
        for rows, part in zip(table.split([len(part) for part in parts]), parts)
    )
    return CKVPrefetchPlan(step, CKVLateTables(history, pack, scatter, late_rows))


def looks_ahead(early: np.ndarray) -> bool:
    """Whether a batch has enough history (see `split_history`) to look ahead."""
    tokens = int((early[:, 2] - early[:, 1]).sum())
    return tokens >= max(CKV_PREFETCH_MIN_HISTORY, 1)
