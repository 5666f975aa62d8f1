# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Split the sparse indexer's prefill rows under decode context parallelism (DCP).

A TP row holds every KV shard `tp // dcp` times, so as many ranks would score the same
rows against the same keys. The query split group joins those ranks: each scores a
contiguous slice of the rows and they exchange the final top-k ids.

Ranks of one DCP group have the same index in their query split groups and so the same
rows. They issue the same candidate merges in the same order, and a chunk without rows
for one of them has none for the others either. All decisions here come from the
config, flags and scheduler lengths, which all ranks share.
"""

import itertools
from typing import TYPE_CHECKING

import torch

import vllm.envs as envs
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_query_split_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

logger = init_logger(__name__)

# What a row costs besides scoring, as a number of keys: the candidate exchange and
# merge do not depend on the context. Without it, the slice with the shortest contexts
# of a fresh prompt would get most of the rows and merge the longest.
ROW_COST_KEYS = 8192

# Scoring runs chunk by chunk, and a few rows occupy the GPU as long as one wave of row
# blocks (264 rows on an H200). A slice that reaches this many rows into a chunk would
# pay for them twice; as many rows more or less are within its balance.
MAX_ALIGN_ROWS = 128


def _why_unsplit(vllm_config: "VllmConfig") -> str | None:
    """Name what rules out the split, or None. PCP and elastic EP have no group."""
    if current_platform.is_rocm():
        return "the ROCm sparse indexer does not shard rows"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1 needs slices that do not depend on the batch"
    if envs.VLLM_USE_NCCL_SYMM_MEM:
        return "VLLM_USE_NCCL_SYMM_MEM=1 needs equal sizes on all ranks"
    return None


def captures_prefill_rows(vllm_config: "VllmConfig") -> bool:
    """Whether CUDA graphs of this engine hold prefill rows, whose sizes are then fixed.

    To ask for each batch: upstream resolves `cudagraph_mode` after it has made the
    metadata builders. Says so in one log line.
    """
    mode = vllm_config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE
    if mode.mixed_mode() != CUDAGraphMode.FULL:
        return False
    logger.warning_once(
        "VLLM_DCP_QUERY_SPLIT=1: the sparse indexer does not split prefill rows: "
        "cudagraph_mode=%s captures prefill rows, of fixed sizes.",
        mode.name,
    )
    return True


def query_split_size(vllm_config: "VllmConfig") -> int:
    """Return over how many ranks prefill rows are split under DCP; 1 is unsplit.

    1 without VLLM_DCP_QUERY_SPLIT, without DCP (upstream's TP row sharding is for
    that) and with TP == DCP. Also, with one line in the log, where a setting rules
    the split out. `attention_config.indexer_tp_shard_min_rows` does not apply: its
    default is above usual batch sizes and the flag is an opt-in of its own.

    Raises:
        RuntimeError: the flag and DCP are on but the group does not exist, or PyNCCL
            is off and no setting says so.
    """
    if not envs.VLLM_DCP_QUERY_SPLIT:
        return 1
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return 1
    group = get_query_split_group()
    size = group.world_size
    if size == 1:
        logger.info_once(
            "VLLM_DCP_QUERY_SPLIT=1: TP == DCP, the sparse indexer has no prefill "
            "rows to split."
        )
        return 1
    reason = _why_unsplit(vllm_config)
    if reason is not None:
        logger.warning_once(
            "VLLM_DCP_QUERY_SPLIT=1: the sparse indexer does not split prefill rows: "
            "%s.",
            reason,
        )
        return 1
    if _has_all_gatherv():
        comm = group.device_communicator.pynccl_comm
        if comm is None or comm.disabled:
            # vLLM turns it off without a word where NCCL lacks a function.
            raise RuntimeError(
                "VLLM_DCP_QUERY_SPLIT=1 exchanges rows through PyNCCL, which is off "
                "although VLLM_DISABLE_PYNCCL is not set: NCCL was not found or is "
                "older than 2.29.7. Name another one in VLLM_NCCL_SO_PATH, or set "
                "VLLM_DISABLE_PYNCCL=1 to exchange through torch.distributed."
            )
    logger.info_once(
        "VLLM_DCP_QUERY_SPLIT=1: the sparse indexer splits prefill rows over %d ranks.",
        size,
    )
    return size


def align_row_shards(
    sizes: list[int] | None, chunk_ends: list[int]
) -> list[int] | None:
    """Move the bounds of slices that nearly are chunk bounds onto them.

    By at most MAX_ALIGN_ROWS and 1/16 of a mean slice; a slice keeps at least a row.

    Args:
        sizes: rows of each slice, or None, which stays None.
        chunk_ends: behind the last row of each chunk, counted as the slices are.

    """
    if sizes is None or not chunk_ends:
        return sizes
    limit = min(MAX_ALIGN_ROWS, sum(sizes) // (16 * len(sizes)))
    bounds = list(itertools.accumulate(sizes, initial=0))
    for i in range(1, len(sizes)):
        end = min(chunk_ends, key=lambda end: abs(end - bounds[i]))
        if abs(end - bounds[i]) <= limit and bounds[i - 1] < end < bounds[i + 1]:
            bounds[i] = end
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _has_all_gatherv() -> bool:
    # Only PyNCCL takes uneven sizes. Known from the settings: a rank must not find
    # out by itself.
    return current_platform.is_cuda() and not envs.VLLM_DISABLE_PYNCCL


def all_gather_rows(
    group: "GroupCoordinator", local: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """Concatenate every rank's rows in rank order. Collective over `group`.

    Args:
        group: at least 2 ranks.
        local: [sizes[rank_in_group], width] this rank's rows, contiguous.
        sizes: rows of each rank, the same list on all of them.

    Returns:
        [sum(sizes), width], of the dtype of `local`.

    Raises:
        ValueError: `sizes` does not fit the group or `local`. Checked before the
            collective.
    """
    if len(sizes) != group.world_size or local.shape[0] != sizes[group.rank_in_group]:
        raise ValueError(
            f"rank {group.rank_in_group} of {group.world_size} has "
            f"{local.shape[0]} rows, which does not fit sizes={sizes}."
        )
    if _has_all_gatherv():
        return group.all_gatherv(local, dim=0, sizes=sizes)
    rows = max(sizes)
    padded = local.new_empty((rows, *local.shape[1:]))
    padded[: local.shape[0]] = local
    gathered = group.all_gather(padded, dim=0)
    return torch.cat([gathered[i * rows :][:size] for i, size in enumerate(sizes)])


def reserve_query_split_exchange(
    vllm_config: "VllmConfig", topk_indices_buffer: torch.Tensor, device: torch.device
) -> None:
    """Allocate and free, for memory profiling, what one exchange takes at worst.

    Args:
        vllm_config: as for `query_split_size`; nothing happens if that is 1.
        topk_indices_buffer: [max_tokens, topk] int32; all of it may be exchanged.
        device: where the exchange will allocate.
    """
    num_shards = query_split_size(vllm_config)
    if num_shards == 1:
        return
    # The staged slice and the result; padded, also the slice and all ranks' slices
    # at full size.
    copies = 2 if _has_all_gatherv() else 3 + num_shards
    size = copies * topk_indices_buffer.numel() * topk_indices_buffer.element_size()
    _ = torch.empty(size, dtype=torch.uint8, device=device)
