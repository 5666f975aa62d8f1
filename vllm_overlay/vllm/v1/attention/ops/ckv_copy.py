# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Copy runs of CKV records from a paged cache to rows, in one launch."""

from dataclasses import dataclass

import torch

from vllm.triton_utils import tl, triton


@dataclass(frozen=True)
class CKVSegments:
    """Runs of records to copy.

    table: int32 [S, 4], a row per run: (row of the block table, first position in it,
    first row of the destination, records). longest: the most records of a run.
    """

    table: torch.Tensor
    longest: int


# Few programs with many bytes in flight: beside a layer that computes, a copy that takes
# all SMs for a short time costs more. On an H200, where a rank packs 21 MB (DCP 2, 64k
# tokens) and gathers as much, a layer got 12 us longer this way, else 20.
_COPY_ROWS = 32
_COPY_PROGRAMS = 16  # of each run
_COPY_WARPS = 8


@triton.jit(
    do_not_specialize=["block_stride", "table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "segments_ptr"],
)
def _copy_ckv_segments_kernel(
    cache_ptr,  # [blocks, PAGE, WORDS]
    block_table_ptr,  # int32 [requests, blocks of a request]
    segments_ptr,  # int32 [S, 4]
    out_ptr,  # [rows, WORDS]
    block_stride,
    table_stride,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    segment = segments_ptr + tl.program_id(0) * 4
    num_rows = tl.load(segment + 3)
    request = tl.load(segment).to(tl.int64)
    source_row = tl.load(segment + 1)
    target_row = tl.load(segment + 2)
    word = tl.arange(0, BLOCK)[None, :]
    for first in range(tl.program_id(1) * ROWS, num_rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < num_rows
        position = source_row + row
        block = tl.load(
            block_table_ptr + request * table_stride + position // PAGE,
            mask=valid,
            other=0,
        ).to(tl.int64)
        source = block * block_stride + (position % PAGE).to(tl.int64) * WORDS
        target = (target_row + row).to(tl.int64) * WORDS
        mask = valid[:, None] & (word < WORDS)
        data = tl.load(cache_ptr + source[:, None] + word, mask=mask)
        tl.store(out_ptr + target[:, None] + word, data, mask=mask)


def copy_ckv_segments(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    segments: CKVSegments,
    out: torch.Tensor,
) -> None:
    """Copy runs of paged records to rows, in one launch.

    Args:
        cache: uint8 [blocks, page, record], records of a block contiguous.
        block_table: int32 [requests, blocks of a request], rows contiguous.
        segments: which records go where; destinations must not overlap.
        out: uint8 [rows, record], contiguous, of another memory than `cache`.

    Raises:
        TypeError: not uint8, or a block table that is not int32.
        ValueError: records of unequal sizes, or memory that is not contiguous.

    """
    if cache.dtype != torch.uint8 or out.dtype != torch.uint8:
        raise TypeError(f"Records must be uint8, not {cache.dtype} and {out.dtype}.")
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table must be int32, but is {block_table.dtype}.")
    num_segments = segments.table.shape[0]
    _, page, record = cache.shape
    if out.shape[-1] != record or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous rows of {record} bytes, but has shape "
            f"{tuple(out.shape)} and strides {out.stride()}."
        )
    if cache.stride(2) != 1 or cache.stride(1) != record or block_table.stride(1) != 1:
        raise ValueError(
            "The records of a block and the rows of the block table must be "
            f"contiguous, but the strides are {cache.stride()} and "
            f"{block_table.stride()}."
        )
    if num_segments == 0:
        return
    word = next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.uint8)
        if not any(
            n % dtype.itemsize
            for n in (record, cache.stride(0), cache.storage_offset())
            + (out.storage_offset(),)
        )
    )
    cache, out = cache.view(word), out.view(word)
    words = cache.shape[-1]
    # At least one block of programs: a run of no records is how the kernel is warmed.
    programs = triton.cdiv(max(segments.longest, 1), _COPY_ROWS)
    grid = (num_segments, min(programs, _COPY_PROGRAMS))
    _copy_ckv_segments_kernel[grid](
        cache,
        block_table,
        segments.table,
        out,
        cache.stride(0),
        block_table.stride(0),
        PAGE=page,
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        ROWS=_COPY_ROWS,
        num_warps=_COPY_WARPS,
    )
