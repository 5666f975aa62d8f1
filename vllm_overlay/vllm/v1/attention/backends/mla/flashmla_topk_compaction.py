# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Where FlashMLA sparse uses `topk_compaction`: if it may, and whether it is right."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.ops.topk_compaction import (
    BLOCK_TOKENS,
    narrowed_sched_meta,
    num_sm_parts,
)

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger(__name__)

# Of the self-check: rows that split and rows that do not, and what differs by rounding.
_CHECK_ROWS = (1, 5, 40, 150)
_CHECK_PAGES = 8
_OUT_TOLERANCE = 2e-3
_LSE_TOLERANCE = 1e-5


def may_compact_topk(parallel_config: "ParallelConfig", kv_cache_dtype: str) -> bool:
    """Whether the flag is on and this engine calls the kernel that it is for."""
    return (
        envs.VLLM_DCP_COMPACT_TOPK
        and parallel_config.decode_context_parallel_size > 1
        and parallel_config.prefill_context_parallel_size == 1
        and kv_cache_dtype == "fp8_ds_mla"
        and current_platform.is_device_capability_family(90)
    )


class FlashMLATopkCompactionMixin:
    """The part of FlashMLASparseImpl that narrows the fp8 kernel's walk."""

    compact_topk: bool = False

    def init_topk_compaction(self: Any, vllm_config: "VllmConfig") -> None:
        """Take the flag, while the model is built."""
        self.compact_topk = may_compact_topk(
            vllm_config.parallel_config, self.kv_cache_dtype
        )

    def narrowed_metadata(
        self: Any,
        kernel_metadata: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        topk: int,
        counts: torch.Tensor,
    ) -> Any:
        """`kernel_metadata` for a call whose rows have `counts` valid ids in front.

        Args:
            kernel_metadata: an FP8KernelMetadata of the step.
            q: [T, heads, 576], of all ranks of the DCP group.
            kv: [pages, page size, record], the cache that the kernel will read.
            topk: ids of a row.
            counts: int32 [T].

        """
        heads = self._compute_fp8_decode_padded_heads(q.shape[1])
        return replace(
            kernel_metadata,
            scheduler_metadata=narrowed_sched_meta(
                counts, topk, heads, kv.shape[1], num_compute_units()
            ),
        )

    def check_topk_compaction(self: Any, vllm_config: "VllmConfig") -> str | None:
        """Why narrowed and full results differ for this layer's heads; None: they do
        not. On random data, on the GPU, when the model is built."""
        heads = self.num_heads * vllm_config.parallel_config.decode_context_parallel_size
        topk = vllm_config.model_config.hf_text_config.index_topk
        return check_narrowing(
            self._compute_fp8_decode_padded_heads(heads), topk, self.softmax_scale
        )


def check_narrowing(heads: int, topk: int, softmax_scale: float) -> str | None:
    """Compare the fp8 kernel with and without narrowed metadata.

    Args:
        heads: 64 or 128.
        topk: ids of a row.
        softmax_scale: of the layer.

    Returns:
        What differs, or None.

    """
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    device = torch.device("cuda", torch.accelerator.current_device_index())
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    tokens = _CHECK_PAGES * BLOCK_TOKENS
    cache = torch.zeros((tokens, 656), dtype=torch.uint8, device=device)
    cache[:, :512] = random(tokens, 512).to(torch.float8_e4m3fn).view(torch.uint8)
    # Small values: outputs are bfloat16, and one that rounds another way is to be within
    # the tolerance.
    scales = torch.full((tokens, 4), 0.05, device=device)
    cache[:, 512:528] = scales.view(torch.uint8)
    cache[:, 528:] = random(tokens, 64).to(torch.bfloat16).view(torch.uint8)
    cache = cache.view(_CHECK_PAGES, BLOCK_TOKENS, 1, 656)

    for rows in _CHECK_ROWS:
        q = random(1, rows, heads, 576).to(torch.bfloat16)
        most = min(topk, tokens)
        counts = torch.randint(
            1, most // 2, (rows,), device=device, generator=generator, dtype=torch.int32
        )
        ids = torch.randint(
            0, tokens, (rows, topk), device=device, generator=generator,
            dtype=torch.int32,
        )  # fmt: skip
        ids[torch.arange(topk, device=device) >= counts[:, None]] = -1
        full, _ = get_mla_metadata()
        narrowed = narrowed_sched_meta(
            counts, topk, heads, BLOCK_TOKENS, num_compute_units()
        )
        results = []
        for meta in (full, narrowed):
            results.append(
                flash_mla_with_kvcache(
                    q=q,
                    k_cache=cache,
                    block_table=None,
                    cache_seqlens=None,
                    head_dim_v=512,
                    tile_scheduler_metadata=meta,
                    is_fp8_kvcache=True,
                    indices=ids[None],
                    softmax_scale=softmax_scale,
                )
            )
        parts = num_sm_parts(num_compute_units(), rows, heads)
        shape = tuple(full.tile_scheduler_metadata.shape)
        if shape != tuple(narrowed.tile_scheduler_metadata.shape):
            return f"FlashMLA has metadata of the shape {shape} for {parts} parts"
        (out, lse), (narrow_out, narrow_lse) = results
        by_out = (out.float() - narrow_out.float()).abs().max().item()
        by_lse = (lse - narrow_lse).abs().max().item()
        if not (by_out <= _OUT_TOLERANCE and by_lse <= _LSE_TOLERANCE):
            return (
                f"{rows} rows of {heads} heads differ by {by_out:.2e} in the output "
                f"and {by_lse:.2e} in the LSE"
            )
    return None
