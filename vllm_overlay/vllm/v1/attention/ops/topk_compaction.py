# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""FlashMLA's fp8 sparse kernel on SM90 stops after the tokens that a DCP rank holds.

A rank owns about 1/W of a row's selected tokens, but the kernel walks all top-k of
them in blocks of 64, and an id of -1 costs as much as a token; it refuses
`topk_length`. Which blocks it walks stands in the tile scheduler's metadata, which it
takes from its caller once it exists. So: put the ids that are valid in front, as
upstream's converter can, and write that metadata from their counts.

vLLM calls the kernel with one request of T rows, so one range of blocks governs all
rows: E = ceil(longest row / 64) blocks, at least one, cut into parts of
n = ceil((E + 5) / parts there may be) for idle multiprocessors. In FlashMLA's terms, of struct
DecodingSchedMeta (csrc/params.h), all int32:

    part   begin_req, end_req, begin_block, end_block (exclusive), begin_split,
           is_first_req_splitted, is_last_req_splitted, unused
    used   0, 0, i * n, min((i + 1) * n, E), i, parts > 1, parts > 1
    idle   1, 0, 0, 0, 0, 0, 0: the kernel returns at once
    num_splits = [0, parts used]

The kernel that writes it is one launch of one program with static shapes and no host
synchronization: CUDA graphs hold it, and each layer's counts rewrite it in stream
order. The struct is private to FlashMLA, so `check_narrowing` compares results when
the model is built, and the topic's patch stands beside the pin of its commit.

SM100's kernel takes `topk_length`, one for each request: it would want T requests of
one row, [T, 1, heads, 576], and the counts. Not done here.
"""

from typing import Any

import torch

from vllm.triton_utils import tl, triton

BLOCK_TOKENS = 64  # of the kernel
META_INTS = 8  # of DecodingSchedMeta
# What a part costs besides its blocks, in blocks: FlashMLA's own figure for SM90. So a row
# that is all here is cut as FlashMLA would cut it.
PART_COST = 5
_COUNTS_AT_ONCE = 1024


def num_sm_parts(num_sms: int, rows: int, heads: int) -> int:
    """Over how many thread blocks the kernel may split a row's tokens: FlashMLA's
    `get_meta` for SM90.

    Args:
        num_sms: multiprocessors of the GPU.
        rows: T.
        heads: that the kernel runs, 64 or 128.

    """
    return max(num_sms // rows // (heads // 64), 1)


@triton.jit(do_not_specialize=["num_rows"])
def _write_sched_meta_kernel(
    counts_ptr,
    meta_ptr,
    num_splits_ptr,
    num_rows,
    NUM_PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    META_INTS: tl.constexpr,
    PART_COST: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    longest = tl.zeros((AT_ONCE,), dtype=tl.int32)
    for start in range(0, num_rows, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        longest = tl.maximum(
            longest, tl.load(counts_ptr + row, mask=row < num_rows, other=0)
        )
    blocks = (tl.max(longest, axis=0) + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    blocks = tl.minimum(tl.maximum(blocks, 1), MAX_BLOCKS)
    per_part = (blocks + PART_COST + NUM_PARTS - 1) // NUM_PARTS
    used = (blocks + per_part - 1) // per_part

    part = tl.arange(0, PARTS_BLOCK)
    mask = part < NUM_PARTS
    is_used = part < used
    split = ((used > 1) & is_used).to(tl.int32)
    begin = tl.where(is_used, part * per_part, 0)
    end = tl.where(is_used, tl.minimum(begin + per_part, blocks), 0)
    zero = tl.zeros((PARTS_BLOCK,), dtype=tl.int32)
    place = meta_ptr + part * META_INTS
    tl.store(place, tl.where(is_used, 0, 1), mask=mask)
    tl.store(place + 1, zero, mask=mask)
    tl.store(place + 2, begin, mask=mask)
    tl.store(place + 3, end, mask=mask)
    tl.store(place + 4, tl.where(is_used, part, 0), mask=mask)
    tl.store(place + 5, split, mask=mask)
    tl.store(place + 6, split, mask=mask)
    tl.store(place + 7, zero, mask=mask)
    tl.store(num_splits_ptr, 0)
    tl.store(num_splits_ptr + 1, used)


def write_sched_meta(
    counts: torch.Tensor, topk: int, num_parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tile scheduler's metadata of one request whose rows have these counts.

    Args:
        counts: int32 [T], valid ids of each row, in front; at most `topk`.
        topk: ids of a row, a multiple of 64.
        num_parts: see `num_sm_parts`.

    Returns:
        int32 [num_parts, 8] and int32 [2], views of new memory.

    Raises:
        ValueError: `topk` is no multiple of 64, or there is no row.

    """
    if topk % BLOCK_TOKENS or not counts.numel():
        raise ValueError(
            f"topk={topk} must be a multiple of {BLOCK_TOKENS}, and there must be a "
            f"row, but counts have the shape {tuple(counts.shape)}."
        )
    memory = torch.empty(
        num_parts * META_INTS + 2, dtype=torch.int32, device=counts.device
    )
    meta = memory[: num_parts * META_INTS].view(num_parts, META_INTS)
    num_splits = memory[num_parts * META_INTS :]
    _write_sched_meta_kernel[(1,)](
        counts,
        meta,
        num_splits,
        counts.shape[0],
        NUM_PARTS=num_parts,
        PARTS_BLOCK=triton.next_power_of_2(num_parts),
        MAX_BLOCKS=topk // BLOCK_TOKENS,
        BLOCK_TOKENS=BLOCK_TOKENS,
        META_INTS=META_INTS,
        PART_COST=PART_COST,
        AT_ONCE=_COUNTS_AT_ONCE,
        num_warps=4,
    )
    return meta, num_splits


def narrowed_sched_meta(
    counts: torch.Tensor, topk: int, heads: int, page_size: int, num_sms: int
) -> Any:
    """A `FlashMLASchedMeta` for one call with [1, T, heads, 576] queries.

    Args:
        counts: int32 [T].
        topk: ids of a row.
        heads: that the kernel runs, padded to 64 or 128.
        page_size: tokens of a page of the cache that is passed.
        num_sms: multiprocessors of the GPU.

    """
    from vllm.v1.attention.ops.flashmla import get_mla_metadata

    rows = counts.shape[0]
    parts = num_sm_parts(num_sms, rows, heads)
    sched_meta, _ = get_mla_metadata()
    sched_meta.tile_scheduler_metadata, sched_meta.num_splits = write_sched_meta(
        counts, topk, parts
    )
    # As FlashMLA's first call would leave it; later calls are held against this.
    sched_meta.have_initialized = True
    sched_meta.config = type(sched_meta).Config(
        b=1,
        s_q=rows,
        h_q=heads,
        page_block_size=page_size,
        h_k=1,
        causal=False,
        is_fp8_kvcache=True,
        topk=topk,
        extra_page_block_size=None,
        extra_topk=None,
        enable_batch_invariant=False,
    )
    return sched_meta
