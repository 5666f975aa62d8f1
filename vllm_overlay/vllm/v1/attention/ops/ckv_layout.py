# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Where the compressed KV (CKV) of a batch lies in the gathered buffer. Host only.

With W = DCP size, I = interleave and t = position of a token in its request:

    owner(t)  = (t // I) % W
    local(t)  = t // (W * I) * I + t % I
    len(L, r) = L // (W * I) * I + clamp(L % (W * I) - r * I, 0, I)
    slot(t)   = owner(t) * padded_total + rank_req_starts[owner(t)][request] + local(t)
"""

from dataclasses import dataclass

import numpy as np

from vllm.utils.math_utils import round_up

# Sparse kernels read the gathered buffer as pages of this many rows.
CKV_PAGE_ROWS = 64


def shard_lens(
    lens: np.ndarray, dcp_world_size: int, interleave: int
) -> np.ndarray:
    """len(L, r) of every rank: int64 [W, *lens.shape].

    The rows that rank r has of the positions [a, b) of a request are its local rows
    [len(a, r), len(b, r)).

    Args:
        lens: integers >= 0 of any shape.
        dcp_world_size: W.
        interleave: I.

    Raises:
        ValueError: a size below 1 or a negative length.

    """
    lens = np.asarray(lens, dtype=np.int64)
    if dcp_world_size < 1 or interleave < 1:
        raise ValueError(
            "dcp_world_size and interleave must be at least 1, but got "
            f"{dcp_world_size} and {interleave}."
        )
    if (lens < 0).any():
        raise ValueError(f"Lengths must not be negative, but got {lens}.")
    stripe = dcp_world_size * interleave
    ranks = np.arange(dcp_world_size, dtype=np.int64)
    offsets = ranks.reshape(-1, *[1] * lens.ndim) * interleave
    return lens // stripe * interleave + np.clip(lens % stripe - offsets, 0, interleave)


@dataclass(frozen=True)
class CKVLayout:
    """Where the records of a batch lie in the gathered buffer.

    rank_req_lens, rank_req_starts: int32 [W, requests]. padded_total: rows of every
    rank's share, so rank r's rows start at `r * padded_total`. interleave: I.
    """

    rank_req_lens: np.ndarray
    rank_req_starts: np.ndarray
    padded_total: int
    interleave: int

    @property
    def dcp_world_size(self) -> int:
        return self.rank_req_lens.shape[0]


def ckv_layout(
    seq_lens: np.ndarray,
    dcp_world_size: int,
    interleave: int,
    align: int = CKV_PAGE_ROWS,
) -> CKVLayout:
    """Lay out requests of global lengths `seq_lens`, packed per rank.

    Args:
        seq_lens: integers [requests], each >= 0.
        dcp_world_size: W.
        interleave: I.
        align: `padded_total` is the largest rank total rounded up to it.

    Raises:
        ValueError: a size below 1, a negative length, or not one dimension.

    """
    if np.ndim(seq_lens) != 1 or align < 1:
        raise ValueError(
            "seq_lens must have one dimension and align be at least 1, but got "
            f"{seq_lens} and {align}."
        )
    rank_lens = shard_lens(seq_lens, dcp_world_size, interleave)
    starts = np.cumsum(rank_lens, axis=1) - rank_lens
    largest = int(rank_lens.sum(axis=1).max())
    return CKVLayout(
        rank_req_lens=rank_lens.astype(np.int32),
        rank_req_starts=starts.astype(np.int32),
        padded_total=round_up(largest, align),
        interleave=interleave,
    )
