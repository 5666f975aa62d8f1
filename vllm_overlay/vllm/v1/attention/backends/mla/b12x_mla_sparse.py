# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Sparse MLA on SM120 and SM121 with the kernels of the package `b12x`, with DCP.

Decode and prefill rows attend selected records of a paged cache. With DCP, decode rows
attend the local shard with the gathered heads and return their LSE for the merge;
prefill rows do the same, or gather the compressed KV and attend it with local heads
(`vllm.v1.attention.ops.ckv_gather`).
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.distributed.parallel_state import get_dcp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.model_executor.warmup.cutedsl_warmup import register_cutedsl_warmup_provider
from vllm.platforms.interface import DeviceCapability
from vllm.utils.math_utils import round_up
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.backends.mla.b12x_sparse_plans import (
    HEAD_MULTIPLE,
    LATENT_DIM,
    PAGE_ROWS,
    QUERY_DIM,
    RECORD_FORMATS,
    TOPK_WIDTHS,
    B12xGeometry,
    b12x_refusal,
    get_b12x_sparse_mla,
    write_nvfp4_records,
)
from vllm.v1.attention.backends.mla.sparse_utils import (
    align_blocks_to_rows,
    flat_kv_row_view,
)
from vllm.v1.attention.ops.ckv_config import CKVGatherConfig
from vllm.v1.attention.ops.ckv_gather import (
    gather_ckv,
    later_in_this_lane,
    reserve_ckv_gather_workspace,
)
from vllm.v1.attention.ops.ckv_plan import (
    CKVGatherPlan,
    capturing,
    make_ckv_gather_planner,
)
from vllm.v1.attention.ops.ckv_remap import map_global_topk_to_gathered_ckv
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


# ------------------------------------------------------------------------ backend


class B12xMLASparseBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "fp8",
        "fp8_e4m3",
        "fp8_ds_mla",
        "nvfp4_ds_mla",
    ]

    @staticmethod
    def get_name() -> str:
        return "B12X_MLA_SPARSE"

    @staticmethod
    def get_builder_cls() -> type["B12xMLASparseMetadataBuilder"]:
        return B12xMLASparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type["B12xMLASparseImpl"]:
        return B12xMLASparseImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        # Larger blocks are read as several pages.
        return [MultipleOf(PAGE_ROWS)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        record = RECORD_FORMATS.get(getattr(spec, "cache_dtype_str", None) or "")
        if record is not None:
            spec = replace(spec, state_content_bytes=record.record_bytes)
        return align_blocks_to_rows(spec, PAGE_ROWS)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [QUERY_DIM]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return (capability.major, capability.minor) in ((12, 0), (12, 1))

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        if not (use_mla and use_sparse):
            return None
        vllm_config = get_current_vllm_config()
        if vllm_config.attention_config.hisparse_config is not None:
            return "HiSparse not supported"
        if vllm_config.model_config is not None:
            text_config = vllm_config.model_config.hf_text_config
            topk = getattr(text_config, "index_topk", None)
            if topk not in TOPK_WIDTHS:
                return f"index_topk must be one of {TOPK_WIDTHS}, but is {topk}"
            if text_config.kv_lora_rank != LATENT_DIM:
                return (
                    f"kv_lora_rank must be {LATENT_DIM}, but is "
                    f"{text_config.kv_lora_rank}"
                )
        # Another GPU is a reason of its own, given elsewhere.
        if cls.supports_compute_capability(device_capability):
            return b12x_refusal()
        return None


# ----------------------------------------------------------------------- metadata


@dataclass
class B12xMLASparseMetadata(SparseMLACommonMetadata):
    ckv_gather: CKVGatherPlan | None = None


def ckv_gather_config(
    vllm_config: "VllmConfig", cache_dtype: str
) -> CKVGatherConfig | None:
    """The gather's config with this backend's flags and records, see there."""
    record = RECORD_FORMATS.get(cache_dtype)
    return CKVGatherConfig.from_vllm_config(
        vllm_config,
        cache_dtype,
        record_bytes=None if record is None else record.record_bytes,
        b12x=True,
    )


class B12xMLASparseMetadataBuilder(
    SparseMLACommonMetadataBuilder[B12xMLASparseMetadata]
):
    metadata_cls = B12xMLASparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Rows are independent: verified drafts are as good a decode as single tokens.
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        self.ckv_gather = make_ckv_gather_planner(
            ckv_gather_config(vllm_config, vllm_config.cache_config.cache_dtype),
            vllm_config,
            layer_names,
            device,
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> B12xMLASparseMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.ckv_gather is not None:
            metadata.ckv_gather = self.ckv_gather.plan(common_attn_metadata, metadata)
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> B12xMLASparseMetadata:
        with capturing(self.ckv_gather):
            return super().build_for_cudagraph_capture(common_attn_metadata)


# --------------------------------------------------------------------------- impl


def decode_plan_rows(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """Batch sizes of decode plans: those of CUDA graphs and the largest batch."""
    scheduler_config = vllm_config.scheduler_config
    largest = min(
        scheduler_config.max_num_seqs * max_decode_query_len(vllm_config),
        scheduler_config.max_num_batched_tokens,
    )
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    return tuple(sorted({size for size in sizes if 0 < size < largest} | {largest}))


class B12xMLASparseImpl(SparseMLACommonImpl[B12xMLASparseMetadata]):
    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    # Like upstream's backend for SM120; and no operation reads the package's records.
    supports_dense_mha_prefill: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: object | None = None,
        **mla_args: Any,
    ) -> None:
        if any((alibi_slopes, sliding_window, logits_soft_cap)):
            raise NotImplementedError(
                "B12X_MLA_SPARSE supports no alibi_slopes, sliding_window or "
                "logits_soft_cap."
            )
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError("B12X_MLA_SPARSE supports decoders only.")
        if kv_cache_dtype not in RECORD_FORMATS:
            raise NotImplementedError(
                f"B12X_MLA_SPARSE supports the KV cache formats {list(RECORD_FORMATS)},"
                f" but got {kv_cache_dtype!r}."
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            indexer=indexer,
            topk_indices_buffer=topk_indices_buffer,
            **mla_args,
        )
        buffer = self.topk_indices_buffer
        assert buffer is not None, "B12X_MLA_SPARSE needs a sparse indexer's buffer."
        topk = buffer.shape[-1]
        if topk not in TOPK_WIDTHS:
            raise NotImplementedError(
                f"B12X_MLA_SPARSE needs rows of {TOPK_WIDTHS} ids, but got {topk}."
            )
        self.supports_quant_query_input = False
        # The layer must not let another kernel write this cache.
        self.writes_own_records = RECORD_FORMATS[kv_cache_dtype].own_writer

        vllm_config = get_current_vllm_config()
        scheduler_config = vllm_config.scheduler_config
        max_tokens = scheduler_config.max_num_batched_tokens
        self.ckv_gather = ckv_gather_config(vllm_config, kv_cache_dtype)
        query_heads = num_heads * self.dcp_world_size
        geometry = B12xGeometry(
            device=buffer.device,
            cache_dtype=kv_cache_dtype,
            softmax_scale=self.scale,
            topk=topk,
            query_heads=round_up(query_heads, HEAD_MULTIPLE),
            local_heads=round_up(num_heads, HEAD_MULTIPLE),
            return_lse=self.need_to_return_lse_for_decode,
            decode_rows=decode_plan_rows(vllm_config),
            extend_rows=max_tokens,
            max_num_seqs=scheduler_config.max_num_seqs,
            gathered_rows=self.ckv_gather.gathered_rows if self.ckv_gather else 0,
        )
        self.kernels = get_b12x_sparse_mla(geometry)
        register_cutedsl_warmup_provider(self.kernels)
        self._reserve_workspace(geometry, query_heads, max_tokens)
        # Nobody asked for it, so it was the platform's last choice.
        attention_config = vllm_config.attention_config
        if not (attention_config.backend or attention_config.backend_per_kind):
            logger.info_once(
                "No sparse MLA backend of upstream vLLM supports this configuration "
                "on SM12x: using B12X_MLA_SPARSE."
            )

    def _reserve_workspace(
        self, geometry: B12xGeometry, query_heads: int, max_tokens: int
    ) -> None:
        """Reserve scratch while the model is built, so that KV sizing sees it."""
        # DCP gathers whole queries, which need a copy only to be padded.
        heads = geometry.local_heads if self.ckv_gather is not None else 0
        if self.dcp_world_size == 1 or query_heads != geometry.query_heads:
            heads = max(heads, geometry.query_heads)
        query_spec = ((max_tokens * heads * QUERY_DIM,), torch.bfloat16)
        self.workspace_specs = [
            ((self.kernels.scratch_bytes,), torch.uint8),
            query_spec,
        ]
        if self.ckv_gather is not None:
            ids_specs = [
                ((max_tokens, geometry.topk), torch.int32),
                ((max_tokens,), torch.int32),
            ]
            self.workspace_specs += ids_specs
            self.reserve_ckv_gather = later_in_this_lane(
                reserve_ckv_gather_workspace,
                self.ckv_gather,
                scratch_bytes=sum(
                    math.prod(shape) * dtype.itemsize
                    for shape, dtype in [query_spec, *ids_specs]
                ),
            )
        current_workspace_manager().get_simultaneous(*self.workspace_specs)

    def allocate_ckv_gather(self) -> None:
        """Allocate the buffers, see `dcp_features`. Collective where it prefetches."""
        self.ckv_workspace = self.reserve_ckv_gather()

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        if not self.writes_own_records:
            super().do_kv_cache_update(
                kv_c_normed,
                k_pe,
                kv_cache,
                slot_mapping,
                kv_cache_dtype,
                k_scale,
                skip_scale,
            )
        elif kv_cache.numel():
            write_nvfp4_records(
                kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten()
            )

    @staticmethod
    def _padded_query(
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        heads: int,
        buffer: torch.Tensor,
    ) -> torch.Tensor:
        """The query as one contiguous bfloat16 [T, heads, 576]; in `buffer` if copied.

        Args:
            q: [T, N, 576], or its parts of 512 and 64 columns; N <= heads.
            heads: padded count.
            buffer: bfloat16, flat.

        """
        whole = not isinstance(q, tuple)
        if whole and q.shape[1] == heads and q.is_contiguous():
            return q
        rows, num_heads = (q if whole else q[0]).shape[:2]
        padded = buffer[: rows * heads * QUERY_DIM].view(rows, heads, QUERY_DIM)
        if whole:
            padded[:, :num_heads].copy_(q)
        else:
            ops.concat_mla_q(*q, padded[:, :num_heads])
        # Heads share no result, but they do share tiles: no NaN in the padding.
        if num_heads < heads:
            padded[:, num_heads:].zero_()
        return padded

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: AttentionLayer,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The exchange path, and all of attention without DCP.

        Args:
            q: [T, N, 576], or its parts; N heads of all DCP ranks.
            kv_cache: [blocks, block_size, record].
            topk_indices: int32 [T, topk], rows of the cache, valid ones first.
            valid_counts: int32 [T].
            layer: unused.
            block_size: of the cache.
            is_decode: no row belongs to a prefill.

        Returns:
            (bfloat16 [T, N, 512], float32 [T, N] with DCP: the natural logarithm of
            the sum of exponentials). (0, -inf) for rows without ids.

        """
        rows, heads = (q[0] if isinstance(q, tuple) else q).shape[:2]
        scratch, query, *_ = current_workspace_manager().get_simultaneous(
            *self.workspace_specs
        )
        plan = self.kernels.select(rows, is_decode)
        cache_rows, _ = flat_kv_row_view(kv_cache.view(torch.uint8), block_size)
        out, lse = self.kernels(
            plan,
            scratch,
            self._padded_query(q, plan.heads, query),
            cache_rows.view(-1, PAGE_ROWS, cache_rows.shape[-1]),
            topk_indices,
            valid_counts,
            # Lengths bound nothing here: the ids of a row are causal already.
            valid_counts,
        )
        out = out[:, :heads]
        if lse is not None:
            lse = lse[:, :heads]
            empty = (valid_counts == 0)[:, None]
            out.masked_fill_(empty[:, :, None], 0)
            lse.masked_fill_(empty, float("-inf"))
        return out, lse

    def forward_ckv_gather(
        self,
        q: tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: B12xMLASparseMetadata,
    ) -> torch.Tensor:
        """Gather, remap, attend. Collective over the DCP group.

        Args:
            q: (ql_nope [T, N, 512], q_pe [T, N, 64]) of the T prefill rows, local
                heads.
            kv_c_and_k_pe_cache: this layer's paged cache.
            attn_metadata: with a plan in `ckv_gather`.

        Returns:
            bfloat16 [T, N, 512], valid until the scratch arena is next borrowed.

        """
        gather, plan = attn_metadata.ckv_gather, self.kernels.gathered
        assert gather is not None and plan is not None, (
            "A batch without a plan does not gather."
        )
        gather_ckv(kv_c_and_k_pe_cache, gather, self.ckv_workspace, get_dcp_group())
        scratch, query, slots, counts = current_workspace_manager().get_simultaneous(
            *self.workspace_specs
        )
        rows, heads = q[0].shape[:2]
        assert self.topk_indices_buffer is not None, "The indexer's buffer is gone."
        slots, counts = map_global_topk_to_gathered_ckv(
            self.topk_indices_buffer[gather.rows],
            gather.req_ids,
            gather.causal_lens,
            gather.rank_req_starts,
            gather.padded_total,
            gather.dcp_world_size,
            gather.interleave,
            out=slots[:rows],
            counts=counts[:rows],
        )
        out, _ = self.kernels(
            plan,
            scratch,
            self._padded_query(q, plan.heads, query),
            # The whole buffer: a view that grows would change the launch.
            self.ckv_workspace.pages(),
            slots,
            counts,
            gather.causal_lens,
        )
        return out[:, :heads]
