# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Optional process groups beside the decode context parallel (DCP) group.

DCP reuses the TP ranks: one TP row of `tp` ranks is cut into `tp // dcp` contiguous
DCP groups, so every KV shard exists `tp // dcp` times. Two groups follow from that:

- The query split group joins the ranks of one TP row that hold the same KV shard.
  They can divide query rows among themselves, as each sees the same keys.
- The CKV prefetch group has the ranks of the DCP group and a communicator of its
  own, so that a transfer on a side stream cannot mix with the layer's collectives.
  It gathers bytes and nothing else, through `device_group`: no device communicator,
  so sleep mode, which suspends those, leaves its NCCL memory where it is.

`vllm.distributed.parallel_state` calls `check_dcp_side_groups` before it creates any
group, `init_dcp_side_groups` after the DCP group and `destroy_dcp_side_groups` before
it destroys that one. It also re-exports the accessors. What exists depends on facts
that all ranks share (`dcp_features.wanted_groups`), and they compare these first
(`dcp_agreement`), so every rank makes the same collective calls.
"""

from contextlib import ExitStack
from typing import TYPE_CHECKING

import vllm.envs as envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

_QUERY_SPLIT: "GroupCoordinator | None" = None
_CKV_PREFETCH: "GroupCoordinator | None" = None
_flags: dict[str, object] = {}


def query_split_group_ranks(
    tp_rows: list[list[int]], dcp_size: int
) -> list[list[int]]:
    """Return the ranks of every query split group, TP row by TP row.

    A TP row is cut into contiguous chunks of `dcp_size` ranks, its DCP groups. Group
    `j` of the row is column `j` of the chunks: `row[j], row[j + dcp_size], ...`.
    Rows are TP groups of different replicas or pipeline stages and are never mixed.

    Args:
        tp_rows: global ranks of each TP group, in TP rank order.
        dcp_size: ranks in one DCP group.

    Returns:
        `dcp_size` groups of `len(row) // dcp_size` ranks for each row. Each rank of
        `tp_rows` is in exactly one of them.

    Raises:
        ValueError: `dcp_size` is below 1, a row is empty or not a multiple of
            `dcp_size`, or a rank appears twice.
    """
    if dcp_size < 1:
        raise ValueError(f"dcp_size must be at least 1, but got {dcp_size}.")
    seen: set[int] = set()
    groups = []
    for i, row in enumerate(tp_rows):
        if not row or len(row) % dcp_size != 0:
            raise ValueError(
                f"TP row {i} {row} has {len(row)} ranks, which is not a positive "
                f"multiple of dcp_size={dcp_size}."
            )
        if len(set(row)) != len(row) or not seen.isdisjoint(row):
            raise ValueError(
                f"TP row {i} {row} repeats a rank, alone or of an earlier row."
            )
        seen.update(row)
        groups += [row[j::dcp_size] for j in range(dcp_size)]
    return groups


def check_dcp_side_groups(
    vllm_config: "VllmConfig", tp_size: int, pcp_size: int, dcp_size: int
) -> None:
    """Refuse what `init_dcp_side_groups` cannot build, before any group exists.

    Collective over the world's CPU group: ranks compare their settings.

    Raises:
        ValueError: a flag asks for a group and `pcp_size > 1`, elastic EP is on or
            `tp_size % dcp_size != 0`. Also for a flag that is neither 0 nor 1, and
            where ranks differ (`dcp_agreement`).
    """
    from vllm.distributed.dcp_agreement import agree_on_dcp_settings
    from vllm.v1.attention.ops.dcp_features import wanted_groups

    agree_on_dcp_settings(vllm_config)
    wanted = wanted_groups(vllm_config, dcp_size)
    if not any(wanted):
        return
    flags = " and ".join(
        flag
        for flag, on in zip(("VLLM_DCP_QUERY_SPLIT", "VLLM_DCP_CKV_GATHER"), wanted)
        if on
    )
    if pcp_size > 1:
        # DCP groups then cross TP rows: a row holds each shard a different number
        # of times.
        raise ValueError(
            f"{flags} with decode context parallelism does not support prefill "
            f"context parallelism, but prefill_context_parallel_size={pcp_size}."
        )
    if vllm_config.parallel_config.enable_elastic_ep:
        raise ValueError(
            f"{flags} with decode context parallelism does not support elastic EP."
        )
    if tp_size % dcp_size != 0:
        raise ValueError(
            f"{flags}: tensor_parallel_size={tp_size} must be divisible by "
            f"decode_context_parallel_size={dcp_size}."
        )


def init_dcp_side_groups(
    vllm_config: "VllmConfig",
    tp_rows: list[list[int]],
    dcp_ranks: list[list[int]],
    local_rank: int,
    backend: str,
) -> None:
    """Create the groups that the flags ask for. Collective over the world.

    With TP == DCP the query split groups have one rank each: the group exists, has no
    device communicator, and its all_gather returns the input.

    Args:
        vllm_config: of the engine.
        tp_rows: global ranks of each TP group.
        dcp_ranks: global ranks of each DCP group.
        local_rank: local rank of this process.
        backend: torch.distributed backend of the new groups.

    Raises:
        ValueError: see `query_split_group_ranks`.
        AssertionError: a group exists already.
    """
    from vllm.distributed.copy_engines import prefer_copy_engines
    from vllm.distributed.parallel_state import init_model_parallel_group
    from vllm.v1.attention.ops.dcp_features import wanted_groups

    global _QUERY_SPLIT, _CKV_PREFETCH, _flags
    dcp_size = len(dcp_ranks[0])
    query_split, ckv_prefetch = wanted_groups(vllm_config, dcp_size)
    _flags = _group_flags()
    assert _QUERY_SPLIT is None, "query split group is already initialized"
    assert _CKV_PREFETCH is None, "CKV prefetch group is already initialized"
    with ExitStack() as undo:
        # If the second group fails, the first must not stay.
        undo.callback(destroy_dcp_side_groups)
        if query_split:
            _QUERY_SPLIT = init_model_parallel_group(
                query_split_group_ranks(tp_rows, dcp_size),
                local_rank,
                backend,
                group_name="query_split",
            )
        if ckv_prefetch:
            _CKV_PREFETCH = init_model_parallel_group(
                dcp_ranks,
                local_rank,
                backend,
                group_name="ckv_prefetch",
                use_device_communicator=False,
            )
            prefer_copy_engines(_CKV_PREFETCH)
        undo.pop_all()


def _group_flags() -> dict[str, object]:
    names = ("VLLM_DCP_QUERY_SPLIT", "VLLM_DCP_CKV_GATHER", "VLLM_DCP_CKV_PREFETCH")
    return {name: getattr(envs, name) for name in names}


def ensure_dcp_side_groups() -> None:
    """Assert that the flags are those with which the groups were created."""
    assert _flags == _group_flags(), (
        "model parallel groups already initialized, but with other flags: "
        f"{_flags} vs. wanted: {_group_flags()}"
    )


def destroy_dcp_side_groups() -> None:
    """Destroy the groups in reverse order of creation. Does nothing without any."""
    global _QUERY_SPLIT, _CKV_PREFETCH
    ckv_prefetch, _CKV_PREFETCH = _CKV_PREFETCH, None
    query_split, _QUERY_SPLIT = _QUERY_SPLIT, None
    if ckv_prefetch is not None:
        ckv_prefetch.destroy()
    if query_split is not None:
        query_split.destroy()


def get_query_split_group() -> "GroupCoordinator":
    """Return the ranks of this TP row that hold the same KV shard as this rank.

    `rank_in_group` is the index of the DCP group in the TP row, the same on all ranks
    of a DCP group. `world_size` is 1 when TP == DCP: nothing to split, and no
    all_gatherv, which needs a device communicator.

    Raises:
        RuntimeError: the group does not exist.
    """
    if _QUERY_SPLIT is None:
        raise RuntimeError(
            "The query split group is not initialized. It is created only with "
            "VLLM_DCP_QUERY_SPLIT=1, decode_context_parallel_size > 1 and a model with "
            "a sparse indexer."
        )
    return _QUERY_SPLIT


def get_ckv_prefetch_group() -> "GroupCoordinator":
    """Return the group with the DCP group's ranks and its own communicator.

    It has no device communicator: gather through `device_group`.

    Raises:
        RuntimeError: the group does not exist.
    """
    if _CKV_PREFETCH is None:
        raise RuntimeError(
            "The CKV prefetch group is not initialized. It is created only with "
            "VLLM_DCP_CKV_GATHER=1, VLLM_DCP_CKV_PREFETCH=1, "
            "decode_context_parallel_size > 1 and an attention backend that gathers."
        )
    return _CKV_PREFETCH
