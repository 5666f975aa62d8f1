# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Map the indexer's global token ids to slots of the gathered compressed KV.

The formula of a slot, and the layout that it needs, are in `ckv_layout`.
"""

import torch

from vllm.triton_utils import tl, triton

_REMAP_WARPS = 4


@triton.jit(do_not_specialize=["padded_total", "num_reqs", "starts_stride"])
def _map_global_topk_to_gathered_ckv_kernel(
    ids_ptr,  # int32 [T, K]
    req_ids_ptr,  # int32 [T]
    causal_lens_ptr,  # int32 [T]
    starts_ptr,  # int32 [W, R]
    out_ptr,  # int32 [T, K]
    counts_ptr,  # int32 [T]
    padded_total,
    num_reqs,
    starts_stride,
    ids_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    RANKS: tl.constexpr,  # W, or the power of two above it
    I: tl.constexpr,  # noqa: E741
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    req = tl.load(req_ids_ptr + row)
    causal_len = tl.load(causal_lens_ptr + row)
    # Padding rows belong to no request of the layout.
    known = (req >= 0) & (req < num_reqs)
    causal_len = tl.where(known, tl.maximum(causal_len, 0), 0)
    req = tl.where(known, req, 0)
    if BLOCK == K:
        ids = tl.load(ids_ptr + row * ids_stride + col)
    else:
        ids = tl.load(ids_ptr + row * ids_stride + col, mask=col < K, other=-1)
    # Unsigned: a negative id is a large one, and division by the constants is a shift
    # or a multiplication. Garbage of dropped ids stays in this row's registers.
    token = ids.to(tl.uint32, bitcast=True)
    keep = token < causal_len.to(tl.uint32)

    # The request's first slots, one for each rank: a lookup in registers. From memory
    # it is 5% slower.
    rank = tl.arange(0, RANKS)
    start = tl.load(starts_ptr + rank * starts_stride + req, mask=rank < W, other=0)
    owner = ((token // I) % W).to(tl.int32)
    local = (token // (W * I) * I + token % I).to(tl.int32)
    slot = tl.gather(rank * padded_total + start, owner, 0) + local

    # One reduction for the count and for "the kept columns are the first ones", which
    # holds exactly if their sum is the least that `count` columns can have.
    packed = tl.sum(tl.where(keep, col.to(tl.int64) + (1 << 32), 0), axis=0)
    count = packed >> 32
    if (packed & 0xFFFFFFFF) == count * (count - 1) // 2:
        # What the indexer usually gives. Nothing moves: aligned, coalesced stores.
        slot = tl.where(keep, slot, -1)
        if BLOCK == K:
            tl.store(out_ptr + row * out_stride + col, slot)
        else:
            tl.store(out_ptr + row * out_stride + col, slot, mask=col < K)
    else:
        kept = keep.to(tl.int32)
        dest = tl.cumsum(kept, axis=0) - kept
        tl.store(out_ptr + row * out_stride + dest, slot, mask=keep)
        tl.store(out_ptr + row * out_stride + col, -1, mask=(col >= count) & (col < K))
    tl.store(counts_ptr + row, count.to(tl.int32))


def map_global_topk_to_gathered_ckv(
    topk_ids: torch.Tensor,
    req_ids: torch.Tensor,
    causal_lens: torch.Tensor,
    rank_req_starts: torch.Tensor,
    padded_total: int,
    dcp_world_size: int,
    interleave: int,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map global token ids to slots of the gathered buffer, in one launch.

    An id is kept if `0 <= id < causal_lens[row]`, a global length: a local length
    would drop tokens of short prompts. Kept slots move to the front of their row in
    their order, the rest is -1. Deterministic. Ids of one row must be distinct for
    attention, but need not be here.

    Args:
        topk_ids: int32 [T, K], rows contiguous; -1 is no token.
        req_ids: int32 [T]; a row whose request is outside [0, R) keeps nothing.
        causal_lens: int32 [T].
        rank_req_starts: int32 [W, R], see `CKVLayout`.
        padded_total: rows of each rank's share.
        dcp_world_size: W.
        interleave: I.
        out: int32 [T, K] to write, rows contiguous, not overlapping `topk_ids`.
        counts: int32 [T] to write.

    Returns:
        (out, counts), counts being the kept ids of each row.

    Raises:
        TypeError: a tensor is not int32.
        ValueError: a wrong shape, stride, device or size.

    """
    if topk_ids.ndim != 2:
        raise ValueError(f"topk_ids must be [T, K], but got {tuple(topk_ids.shape)}.")
    num_rows, topk = topk_ids.shape
    if dcp_world_size < 1 or interleave < 1:
        raise ValueError(
            "dcp_world_size and interleave must be at least 1, but got "
            f"{dcp_world_size} and {interleave}."
        )
    if topk < 1:
        raise ValueError("topk_ids must have at least one column.")
    if rank_req_starts.ndim != 2 or rank_req_starts.shape[0] != dcp_world_size:
        raise ValueError(
            f"rank_req_starts must be [{dcp_world_size}, requests], but got "
            f"{tuple(rank_req_starts.shape)}."
        )
    if padded_total < 0 or dcp_world_size * padded_total >= 2**31:
        raise ValueError(
            f"{dcp_world_size} shares of {padded_total} rows do not fit int32 slots."
        )
    if out is None:
        out = torch.empty_like(topk_ids, memory_format=torch.contiguous_format)
    if counts is None:
        counts = torch.empty(num_rows, dtype=torch.int32, device=topk_ids.device)
    for name, tensor, shape in (
        ("topk_ids", topk_ids, (num_rows, topk)),
        ("req_ids", req_ids, (num_rows,)),
        ("causal_lens", causal_lens, (num_rows,)),
        ("rank_req_starts", rank_req_starts, tuple(rank_req_starts.shape)),
        ("out", out, (num_rows, topk)),
        ("counts", counts, (num_rows,)),
    ):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, but is {tensor.dtype}.")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape}, but has {tuple(tensor.shape)}."
            )
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension.")
        if tensor.device != topk_ids.device:
            raise ValueError(f"{name} is on {tensor.device}, not {topk_ids.device}.")
    if num_rows:
        _map_global_topk_to_gathered_ckv_kernel[(num_rows,)](
            topk_ids,
            req_ids,
            causal_lens,
            rank_req_starts,
            out,
            counts,
            padded_total,
            rank_req_starts.shape[1],
            rank_req_starts.stride(0),
            topk_ids.stride(0),
            out.stride(0),
            K=topk,
            BLOCK=triton.next_power_of_2(topk),
            W=dcp_world_size,
            RANKS=triton.next_power_of_2(dcp_world_size),
            I=interleave,
            num_warps=_REMAP_WARPS,
        )
    return out, counts


def warm_up_remap(
    dcp_world_size: int, interleave: int, topk: int, device: torch.device
) -> None:
    """Compile the kernel: the first long prompt should not wait for it. Does nothing
    off CUDA."""
    if device.type != "cuda":
        return
    zeros = torch.zeros((dcp_world_size, 1), dtype=torch.int32, device=device)
    ids = torch.zeros((1, topk), dtype=torch.int32, device=device)
    map_global_topk_to_gathered_ckv(
        ids, zeros[0], zeros[0], zeros, 0, dcp_world_size, interleave
    )
