# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Gather the compressed KV (CKV) of a prefill batch over the DCP group.

Stock sparse MLA under DCP gathers the query heads, attends the local KV shard and
merges partial outputs by their LSE. For prefill rows it is cheaper to gather the
compressed records once per layer and attend the local heads over the whole context:
no query all-gather, no LSE, no merge.

Whether a batch gathers is decided once per step, in the metadata builder
(`CKVGatherPlanner.plan`), from facts that all ranks share. The layer and the backend
read the result, so they cannot disagree and no rank can skip a collective alone.
The plan is in `ckv_plan`, the formula of a record's slot in `ckv_layout`.
"""

import contextvars
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from vllm import _custom_ops as ops
from vllm.distributed.copy_engines import empty_for_gathers
from vllm.distributed.parallel_state import get_ckv_prefetch_group, get_dcp_group
from vllm.logger import init_logger
from vllm.v1.attention.ops.ckv_config import CKVGatherConfig
from vllm.v1.attention.ops.ckv_layout import CKV_PAGE_ROWS
from vllm.v1.attention.ops.ckv_plan import CKVGatherPlan
from vllm.v1.attention.ops.ckv_prefetch_torch import CKVPrefetcher
from vllm.v1.worker.workspace import current_workspace_manager

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

logger = init_logger(__name__)
T = TypeVar("T")


# ------------------------------------------------------------- workspace and gather


@dataclass
class CKVGatherWorkspace:
    """gathered: uint8 [W * rows_per_rank, record], always seen by kernels in this full
    size. With `prefetch`, it is the buffer of the layer that runs. pool: keeps the
    memory registered."""

    gathered: torch.Tensor
    prefetch: CKVPrefetcher | None = None
    pool: Any = None

    def pages(self) -> torch.Tensor:
        """The gathered buffer as a paged cache: uint8 [pages, 64, record]."""
        return self.gathered.view(-1, CKV_PAGE_ROWS, self.gathered.shape[-1])


def reserve_ckv_gather_workspace(
    config: CKVGatherConfig, scratch_bytes: int = 0
) -> CKVGatherWorkspace:
    """The workspace of this execution lane, allocated on the first call.

    Its own allocation, not the shared scratch arena, whose content the next borrower
    overwrites. Call it when the model is built (`dcp_features`), outside the memory
    pool of its weights, which sleep mode copies to the host, and before the KV cache is
    sized. Collective over the prefetch group with `config.prefetch`.

    Args:
        config: sizes it.
        scratch_bytes: what the caller added to the scratch arena, for the log.

    Raises:
        AssertionError: the first call came after the workspaces were locked.

    """

    def allocate(manager: Any) -> CKVGatherWorkspace:
        device = manager._device
        buffers, pool, early = config.num_buffers, None, False
        if config.prefetch:
            group = get_ckv_prefetch_group()
            memory, pool, early, waits_on_sms = empty_for_gathers(
                (buffers * config.gathered_rows, config.record_bytes),
                device,
                group,
                manager._alloc_context if config.discard_on_sleep else None,
            )
            if waits_on_sms and config.waits_in_kernels is not None:
                del memory
                buffers = 1
                logger.warning_once(
                    "DCP CKV prefetch is off: its gathers would be NCCL kernels, which "
                    "can wait for SMs for ever beside %s.",
                    config.waits_in_kernels,
                )
        if buffers == 1:
            with manager._alloc_context():
                memory = torch.empty(
                    (config.gathered_rows, config.record_bytes),
                    dtype=torch.uint8,
                    device=device,
                )
        total = memory.numel()
        tokens = (
            (total + scratch_bytes)
            * config.dcp_world_size
            // (config.record_bytes * max(config.num_layers, 1))
        )
        logger.info(
            "DCP CKV gather: %d bytes (%.0f MiB) of workspace, %d buffer(s), and up to "
            "%d bytes of scratch, at the cost of about %d tokens of KV cache, for up "
            "to %d tokens of context; larger batches and those of at most %d prefill "
            "tokens keep the exchange path. A lower VLLM_DCP_CKV_GATHER_MAX_TOKENS "
            "takes less, VLLM_DCP_CKV_PREFETCH=0 half.",
            total,
            total / 2**20,
            buffers,
            scratch_bytes,
            tokens,
            config.max_tokens,
            config.min_tokens,
        )
        parts = list(memory.split(config.gathered_rows))
        workspace = CKVGatherWorkspace(parts[0], pool=pool)
        if buffers > 1:
            workspace.prefetch = CKVPrefetcher(parts, CKV_PAGE_ROWS, group, early)
        return workspace

    manager = current_workspace_manager()
    key = ("ckv_gather", config.rows_per_rank, config.gathered_rows)
    return manager.get_persistent_resource(
        (*key, config.record_bytes), functools.partial(allocate, manager)
    )


def later_in_this_lane(call: Callable[..., T], *args: Any, **kwargs: Any) -> Callable[[], T]:
    """`call` with these arguments, for later, in the workspace lane of now."""
    return functools.partial(contextvars.copy_context().run, call, *args, **kwargs)


def all_gather_bytes(
    gathered: torch.Tensor, local: torch.Tensor, group: "GroupCoordinator"
) -> None:
    """All-gather uint8 [n] into uint8 [W * n], in the current stream's order.

    `local` may be this rank's part of `gathered`: then nothing is copied locally.
    """
    assert gathered.numel() == group.world_size * local.numel(), (
        f"{group.world_size} ranks with {local.numel()} bytes each do not make "
        f"{gathered.numel()}."
    )
    comm = getattr(group.device_communicator, "pynccl_comm", None)
    if comm is not None and not comm.disabled:
        # The group's own communicator: torch.distributed would create another one,
        # late, and NCCL buffers with it.
        comm.all_gather(gathered, local)
    else:
        dist.all_gather_into_tensor(gathered, local, group=group.device_group)


def gather_ckv(
    kv_cache: torch.Tensor,
    plan: CKVGatherPlan,
    workspace: CKVGatherWorkspace,
    group: "GroupCoordinator",
    wait: bool = True,
) -> torch.Tensor:
    """Gather the batch's raw records of all ranks. Collective over `group`, or with a
    prefetch over its group.

    Args:
        kv_cache: [blocks, block_size, record] of one-byte elements, this layer's.
        plan: the step's.
        workspace: written; the gathered rows stay until the next gather.
        group: the DCP group, or one with its ranks.
        wait: call `await_ckv`. False: the caller does, before it reads the result.

    Returns:
        uint8 [plan.gathered_rows, record], a view of the workspace. Rows of a share
        beyond its rank's total are zero.

    Raises:
        ValueError: records of another size than the workspace's.

    """
    cache = kv_cache.view(torch.uint8)
    if cache.shape[-1] != workspace.gathered.shape[-1]:
        raise ValueError(
            f"The KV cache has records of {cache.shape[-1]} bytes, the CKV gather "
            f"workspace of {workspace.gathered.shape[-1]}."
        )
    if workspace.prefetch is not None:
        if not workspace.prefetch.begun:
            workspace.prefetch.begin(
                cache, plan, workspace, _gather_ckv_now, all_gather_bytes
            )
        if wait:
            await_ckv(workspace)
        return workspace.gathered[: plan.gathered_rows]
    return _gather_ckv_now(cache, plan, workspace, group)


def await_ckv(workspace: CKVGatherWorkspace) -> None:
    """What the current stream does next may read what `gather_ckv` returned.

    Once for each gather.
    """
    if workspace.prefetch is not None:
        workspace.prefetch.complete()


def _gather_ckv_now(
    cache: torch.Tensor,
    plan: CKVGatherPlan,
    workspace: CKVGatherWorkspace,
    group: "GroupCoordinator",
) -> torch.Tensor:
    """The synchronous gather, into `workspace.gathered`, this rank's rows in place."""
    gathered = workspace.gathered[: plan.gathered_rows]
    local = plan.own_share(gathered)
    if plan.local_rows:
        ops.cp_gather_cache(
            cache,
            local[: plan.local_rows],
            plan.block_table,
            plan.local_cu_seq_lens,
            plan.num_reqs,
        )
    local[plan.local_rows :].zero_()
    all_gather_bytes(gathered.view(-1), local.view(-1), group)
    return gathered


# -------------------------------------------------------------------------- layer


def start_ckv_gather(layer: Any, kv_cache: torch.Tensor, attn_metadata: Any) -> None:
    """Begin the gather of `layer` that `ckv_gather_attend` will read, if it may run
    beside other work: with a prefetch that takes no SMs.

    For a layer that has written the batch's tokens to its cache and still has other
    work before it attends, like selecting tokens. Collective as `gather_ckv`. Does
    nothing for a batch that does not gather.

    Args:
        layer: an MLAAttention.
        kv_cache: this layer's paged cache.
        attn_metadata: the layer's, None in a dummy run.

    """
    plan = getattr(attn_metadata, "ckv_gather", None)
    if plan is None:
        return
    workspace = layer.impl.ckv_workspace
    if workspace.prefetch is not None and workspace.prefetch.early:
        workspace.prefetch.enter(layer)
        gather_ckv(kv_cache, plan, workspace, get_dcp_group(), wait=False)


def ckv_gather_attend(
    layer: Any,
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
) -> int:
    """Attend the prefill rows over the gathered CKV and write them to `output`.

    Args:
        layer: an MLAAttention whose impl has `forward_ckv_gather`.
        ql_nope: [T, local heads, kv_lora_rank], of the prefill rows.
        q_pe: [T, local heads, rope dim], with the position applied.
        kv_cache: this layer's paged cache, the batch's tokens written.
        attn_metadata: with a plan in `ckv_gather`.
        output: [tokens of the batch, local heads * v_head_dim].

    Returns:
        The number of rows before those, which remain for the exchange path.

    """
    plan = attn_metadata.ckv_gather
    prefetch = layer.impl.ckv_workspace.prefetch
    with nullcontext() if prefetch is None else prefetch.attending(layer):
        attn_out = layer.impl.forward_ckv_gather(
            (ql_nope, q_pe), kv_cache, attn_metadata
        )
    layer._v_up_proj(attn_out, out=output[plan.rows])
    return plan.num_exchange_tokens


def ckv_gather_absorb_and_attend(
    layer: Any,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
) -> int:
    """`ckv_gather_attend` for q [tokens of the batch, local heads, nope + rope]."""
    q_nope, q_pe = q[attn_metadata.ckv_gather.rows].split(
        [layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1
    )
    num_rows, num_heads, _ = q_nope.shape
    ql_nope = q_nope.new_empty((num_rows, num_heads, layer.kv_lora_rank))
    torch.bmm(q_nope.transpose(0, 1), layer.W_UK_T, out=ql_nope.transpose(0, 1))
    return ckv_gather_attend(layer, ql_nope, q_pe, kv_cache, attn_metadata, output)
