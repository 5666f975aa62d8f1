# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""FlashMLA sparse attention of local heads over the gathered CKV."""

from typing import TYPE_CHECKING, Any

import torch

from vllm import _custom_ops as ops
from vllm.distributed.parallel_state import get_dcp_group
from vllm.platforms import current_platform
from vllm.v1.attention.ops.ckv_config import CKVGatherConfig
from vllm.v1.attention.ops.ckv_gather import (
    await_ckv,
    gather_ckv,
    later_in_this_lane,
    reserve_ckv_gather_workspace,
)
from vllm.v1.attention.ops.ckv_plan import CKVGatherPlanner, make_ckv_gather_planner
from vllm.v1.attention.ops.ckv_remap import map_global_topk_to_gathered_ckv
from vllm.v1.attention.ops.dcp_cost import FLASHMLA_SM90, fp8_is_faster
from vllm.v1.worker.workspace import current_workspace_manager

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def make_flashmla_planner(
    vllm_config: "VllmConfig", layer_names: list[str], device: torch.device
) -> CKVGatherPlanner | None:
    """See `make_ckv_gather_planner`. Kernels were timed on SM90 alone."""
    sm90 = current_platform.is_device_capability_family(90)
    return make_ckv_gather_planner(
        CKVGatherConfig.from_vllm_config(
            vllm_config, vllm_config.cache_config.cache_dtype
        ),
        vllm_config,
        layer_names,
        device,
        times=FLASHMLA_SM90 if sm90 else None,
    )


class FlashMLACKVGatherMixin:
    """The part of FlashMLASparseImpl that attends gathered CKV."""

    ckv_gather: CKVGatherConfig | None = None

    def init_ckv_gather(self: Any, vllm_config: "VllmConfig") -> None:
        """Reserve scratch for the gather, while the model is built.

        Widens the bf16 workspace (second of `workspace_specs`) to the gathered rows
        and adds the remapped ids and their counts behind it. Upstream reads the specs
        from both ends, so these places do not move.

        Raises:
            NotImplementedError, ValueError: see `CKVGatherConfig.from_vllm_config`.

        """
        self.ckv_gather = CKVGatherConfig.from_vllm_config(
            vllm_config, self.kv_cache_dtype
        )
        if self.ckv_gather is None:
            return
        assert len(self.workspace_specs) == 2, (
            f"FlashMLA sparse has other scratch than at the pin: {self.workspace_specs}"
        )
        (rows, width), dtype = self.workspace_specs[1]
        widened = max(rows, self.ckv_gather.gathered_rows)
        topk_buffer = self.topk_indices_buffer
        topk = (
            vllm_config.model_config.hf_text_config.index_topk
            if topk_buffer is None
            else topk_buffer.shape[-1]
        )
        max_tokens = self.ckv_gather.max_num_batched_tokens
        self.workspace_specs[1] = ((widened, width), dtype)
        self.workspace_specs += [
            ((max_tokens, topk), torch.int32),
            ((max_tokens,), torch.int32),
        ]
        self.reserve_ckv_gather = later_in_this_lane(
            reserve_ckv_gather_workspace,
            self.ckv_gather,
            scratch_bytes=(widened - rows) * width * dtype.itemsize
            + max_tokens * (topk + 1) * torch.int32.itemsize,
        )

    def allocate_ckv_gather(self: Any) -> None:
        """Allocate the buffers, see `dcp_features`. Collective where it prefetches."""
        self.ckv_workspace = self.reserve_ckv_gather()

    def forward_ckv_gather(
        self: Any,
        q: tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
    ) -> torch.Tensor:
        """Gather, remap, attend. Collective over the DCP group.

        Args:
            q: (ql_nope [T, heads, 512], q_pe [T, heads, 64 or 0]) of the T prefill
                rows, local heads.
            kv_c_and_k_pe_cache: this layer's paged cache.
            attn_metadata: with a plan in `ckv_gather`.

        Returns:
            [T, heads, 512], valid until the scratch arena is next borrowed.

        """
        plan = attn_metadata.ckv_gather
        workspace = self.ckv_workspace
        gathered = gather_ckv(
            kv_c_and_k_pe_cache, plan, workspace, get_dcp_group(), wait=False
        )
        _, bf16_rows, slots, counts, q_padded, padded_out, _ = (
            current_workspace_manager().get_simultaneous(*self.workspace_specs)
        )
        ql_nope, q_pe = q
        num_rows, num_heads, _ = ql_nope.shape
        topk_ids = self.topk_indices_buffer[plan.rows]
        slots, counts = map_global_topk_to_gathered_ckv(
            topk_ids,
            plan.req_ids,
            plan.causal_lens,
            plan.rank_req_starts,
            plan.padded_total,
            plan.dcp_world_size,
            plan.interleave,
            out=slots[:num_rows],
            counts=counts[:num_rows],
        )

        # Straight into the head padding that both kernels want. Heads are independent:
        # what the padding holds does not matter.
        q_padded = q_padded[:num_rows]
        if q_pe.size(-1) == 0:
            q_padded[:, :num_heads, : self.kv_lora_rank].copy_(ql_nope)
            q_padded[..., self.kv_lora_rank :].zero_()
        else:
            ops.concat_mla_q(ql_nope, q_pe, q_padded)
        await_ckv(workspace)

        if fp8_is_faster(FLASHMLA_SM90, num_rows, num_heads, plan.gathered_rows):
            out, _ = self._fp8_flash_mla_kernel(
                q=q_padded.unsqueeze(0),
                # The whole buffer: a view that grows would change the launch.
                kv_c_and_k_pe_cache=workspace.pages(),
                topk_indices=slots.unsqueeze(0),
                kernel_metadata=plan.kernel_metadata,
            )
            return out.squeeze(0)[:, :num_heads]

        upconvert = (
            ops.cp_gather_and_upconvert_fp8_kv_cache
            if self.kv_cache_dtype == "fp8_ds_mla"
            else ops.cp_gather_and_upconvert_nvfp4_kv_cache
        )
        upconvert(
            workspace.pages(),
            bf16_rows[: gathered.shape[0]],
            plan.page_table,
            plan.page_starts,
            1,
        )
        out, _ = self._bf16_flash_mla_kernel(
            q_padded,
            bf16_rows[: self.ckv_gather.gathered_rows],
            slots,
            counts,
            actual_num_heads=num_heads,
            out=padded_out[:num_rows],
        )
        return out
