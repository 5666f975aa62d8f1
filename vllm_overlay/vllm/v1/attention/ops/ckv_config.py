# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""What of the CKV gather and its prefetch stays fixed while the engine runs.

All of it follows from flags and the engine's config, so it is the same on every rank
but for the rank itself.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.distributed.parallel_state import get_dcp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.attention.ops.ckv_layout import CKV_PAGE_ROWS
from vllm.v1.attention.ops.ckv_prefetch import NUM_BUFFERS

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

logger = init_logger(__name__)

# Bytes of one token's cache record. Only opaque byte records can travel raw.
CKV_RECORD_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}

# KV connectors whose `wait_for_layer_load` does nothing: what they load is in place
# before the forward pass begins, so the next layer's history may be read early.
CONNECTORS_NOT_LAYERWISE = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "HF3FSKVConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MoRIIOConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)


# Requests that may lie wholly on one rank before the capacity is bounded by an eighth of
# an even share.
UNEVEN_REQUESTS = 16


# --------------------------------------------------------------------------- gather


def _later_interleave(vllm_config: "VllmConfig") -> int:
    """What EngineCore may push as interleave after the model was built, or 0.

    With NIXL it becomes the block size of the KV cache groups, unless it was given
    (`VllmConfig.adjust_dcp_kv_cache_interleave_size`). The block size is not final
    either: sparse backends ask for pages of `CKV_PAGE_ROWS`.
    """
    transfer = vllm_config.kv_transfer_config
    if (
        transfer is None
        or not transfer.is_kv_transfer_instance
        or not transfer.has_connector("NixlConnector")
        or not vllm_config.parallel_config._allow_auto_resolve_cp_interleave_size
    ):
        return 0
    return max(vllm_config.cache_config.block_size or 0, CKV_PAGE_ROWS)


@dataclass(frozen=True)
class CKVGatherFlags:
    """always: gather whenever the bounds allow it, whatever it costs."""

    enabled: bool
    always: bool
    min_tokens: int
    max_tokens: int


def ckv_gather_flags(b12x: bool = False) -> CKVGatherFlags:
    """The flags of the CKV gather.

    Args:
        b12x: for the b12x backend, whose own `VLLM_B12X_MLA_CKV_GATHER*` names win
            where they are set.

    Raises:
        ValueError: a value that `vllm.envs` refuses.

    """

    def flag(name: str) -> Any:
        own = getattr(envs, f"VLLM_B12X_MLA_{name}") if b12x else None
        return getattr(envs, f"VLLM_DCP_{name}") if own is None else own

    return CKVGatherFlags(
        enabled=bool(flag("CKV_GATHER")),
        always=flag("CKV_GATHER") == "always",
        min_tokens=flag("CKV_GATHER_MIN_TOKENS"),
        max_tokens=flag("CKV_GATHER_MAX_TOKENS"),
    )


@dataclass(frozen=True)
class CKVGatherConfig:
    """What stays fixed while the engine runs, the same on all ranks but `dcp_rank`."""

    dcp_world_size: int
    dcp_rank: int
    interleave: int
    min_tokens: int
    max_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    record_bytes: int
    decode_query_len: int
    """Longest query that speculative decoding verifies, 1 without it."""
    local_heads: int
    link_gbps: int
    """What a rank receives from the others, in GB/s: weighs bytes against kernels."""
    always: bool = False
    dbo: bool = False
    num_layers: int = 1
    prefetch: bool = False
    later_interleave: int = 0
    """What the interleave may become after the buffers were sized; 0: it is final."""
    discard_on_sleep: bool = False
    """Sleep mode is on: the buffers go to sleep, and need not be kept."""
    exchange_share: float = 1.0
    """Of the exchange path's kernel time, where its layers compact top-k."""
    waits_in_kernels: str | None = None
    """See the function."""

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: "VllmConfig",
        cache_dtype: str,
        record_bytes: int | None = None,
        b12x: bool = False,
    ) -> "CKVGatherConfig | None":
        """The config, or None where the gather is off or DCP is 1.

        Args:
            vllm_config: of the engine, or of the draft model.
            cache_dtype: KV cache format of the layer.
            record_bytes: bytes of a cache record, where the backend's differ from
                `CKV_RECORD_BYTES`.
            b12x: see `ckv_gather_flags`.

        Raises:
            NotImplementedError: a cache format that has no raw records, or PCP.
            ValueError: see `ckv_gather_flags`.

        """
        flags = ckv_gather_flags(b12x)
        parallel_config = vllm_config.parallel_config
        world_size = parallel_config.decode_context_parallel_size
        gather = flags.enabled and world_size > 1
        prefetch = ckv_prefetch_enabled(vllm_config, gather)
        if not gather:
            return None
        if cache_dtype not in CKV_RECORD_BYTES:
            raise NotImplementedError(
                "The DCP CKV gather sends raw cache records and supports the KV cache "
                f"formats {sorted(CKV_RECORD_BYTES)}, but got {cache_dtype!r}. "
                "Set VLLM_DCP_CKV_GATHER=0 for this format."
            )
        if parallel_config.prefill_context_parallel_size > 1:
            raise NotImplementedError(
                "The DCP CKV gather does not support prefill context parallelism, "
                "which has a KV gather of its own. Set VLLM_DCP_CKV_GATHER=0."
            )
        speculative = vllm_config.speculative_config
        if speculative is not None and getattr(
            speculative, "enable_adaptive_verification", False
        ):
            raise NotImplementedError(
                "The DCP CKV gather plans from host query lengths, which adaptive "
                "verification decides on the device. Set VLLM_DCP_CKV_GATHER=0."
            )
        scheduler_config = vllm_config.scheduler_config
        model_config = vllm_config.model_config
        return cls(
            dcp_world_size=world_size,
            dcp_rank=get_dcp_group().rank_in_group,
            interleave=parallel_config.cp_kv_cache_interleave_size,
            min_tokens=flags.min_tokens,
            # A batch cannot hold more context than this: do not reserve for it.
            max_tokens=min(
                flags.max_tokens,
                model_config.max_model_len * scheduler_config.max_num_seqs,
            ),
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            record_bytes=record_bytes or CKV_RECORD_BYTES[cache_dtype],
            decode_query_len=max_decode_query_len(vllm_config),
            local_heads=model_config.get_num_attention_heads(parallel_config),
            link_gbps=envs.VLLM_DCP_LINK_GBPS,
            always=flags.always,
            dbo=parallel_config.use_ubatching,
            num_layers=model_config.get_num_layers(parallel_config),
            prefetch=prefetch,
            later_interleave=_later_interleave(vllm_config),
            discard_on_sleep=model_config.enable_cumem_allocator,
            waits_in_kernels=waits_in_kernels(vllm_config) if prefetch else None,
        )

    def __post_init__(self) -> None:
        """Raises ValueError where a share is beyond what upstream's copy can address."""
        if self.rows_per_rank * self.record_bytes >= 2**31:
            # `cp_gather_cache` multiplies rows and bytes in 32 bits.
            interleave = max(self.interleave, self.later_interleave)
            rows = 2**31 // self.record_bytes - CKV_PAGE_ROWS
            most = max(
                rows - self.max_num_seqs * interleave,
                min(rows * 8 // 9, rows - UNEVEN_REQUESTS * interleave),
            )
            raise ValueError(
                f"VLLM_DCP_CKV_GATHER_MAX_TOKENS={self.max_tokens} needs "
                f"{self.rows_per_rank} rows of {self.record_bytes} bytes on a rank, "
                "more than a copy of the KV cache can address (2 GiB). Set it to at "
                f"most {most * self.dcp_world_size}."
            )

    @property
    def shared_by_ranks(self) -> dict[str, Any]:
        """All fields that must not differ between the ranks of a DCP group."""
        return {k: v for k, v in asdict(self).items() if k != "dcp_rank"}

    @property
    def rows_per_rank(self) -> int:
        """Capacity of one rank's share of the gathered buffer.

        A rank holds at most `interleave` tokens of a request above its even share. For
        many requests that is mostly more than ever comes together, so it is bounded,
        and a batch beyond it keeps the exchange path.
        """
        share = cdiv(self.max_tokens, self.dcp_world_size)
        interleave = max(self.interleave, self.later_interleave)
        uneven = max(cdiv(share, 8), UNEVEN_REQUESTS * interleave)
        return round_up(
            share + min(self.max_num_seqs * interleave, uneven), CKV_PAGE_ROWS
        )

    @property
    def gathered_rows(self) -> int:
        return self.dcp_world_size * self.rows_per_rank

    @property
    def num_buffers(self) -> int:
        return NUM_BUFFERS if self.prefetch else 1

    @property
    def workspace_bytes(self) -> int:
        """The gathered buffers: a rank's own rows are gathered in place."""
        return self.num_buffers * self.gathered_rows * self.record_bytes


# ------------------------------------------------------------------------- prefetch


def _layerwise_connector(config: "KVTransferConfig") -> str | None:
    """The first connector that may load KV layer by layer, also in a MultiConnector."""
    if config.kv_connector == "MultiConnector":
        for child in config.kv_connector_extra_config.get("connectors", []):
            name = child.get("kv_connector")
            if (
                name not in CONNECTORS_NOT_LAYERWISE
                or child.get("kv_connector_module_path") is not None
            ):
                return str(name)
        return None
    if (
        config.kv_connector in CONNECTORS_NOT_LAYERWISE
        and config.kv_connector_module_path is None
    ):
        return None
    return config.kv_connector


def world_prefetch_refusal(vllm_config: "VllmConfig") -> str | None:
    """Why no rank of this engine prefetches, from facts that all ranks share.

    Decides whether the prefetch group is made. Does not look at what differs between
    pipeline stages.

    Args:
        vllm_config: of an engine with DCP > 1.

    """
    parallel_config = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    if not envs.VLLM_DCP_CKV_PREFETCH:
        return "VLLM_DCP_CKV_PREFETCH=0"
    if not envs.VLLM_DCP_CKV_GATHER:
        return "its process group exists only with VLLM_DCP_CKV_GATHER=1"
    if parallel_config.prefill_context_parallel_size > 1:
        return "prefill context parallelism"
    if parallel_config.use_ubatching:
        return "dual batch overlap"
    if getattr(vllm_config.model_config, "enable_nccl_comm_suspend", False):
        # It suspends device communicators: the prefetch's is none of these.
        return "enable_nccl_comm_suspend does not know its communicator"
    if transfer is not None and transfer.kv_connector is not None:
        connector = _layerwise_connector(transfer)
        if connector is not None:
            return f"the KV connector {connector} may load KV layer by layer"
    return None


def ckv_prefetch_refusal(vllm_config: "VllmConfig") -> str | None:
    """Why the CKV gather of this rank does not prefetch; None: it does.

    Args:
        vllm_config: of an engine with the CKV gather on and DCP > 1.

    """
    refusal = world_prefetch_refusal(vllm_config)
    model_config = vllm_config.model_config
    if refusal is None and model_config.get_num_layers(vllm_config.parallel_config) < 2:
        return "a single layer"
    return refusal


def waits_in_kernels(vllm_config: "VllmConfig") -> str | None:
    """What of this engine waits for other ranks in kernels that fill the GPU.

    Such a kernel ends when all its thread blocks ran, on all ranks. An NCCL kernel
    beside it holds SMs while it waits for its peers: where the one comes first on one
    rank and the other on another, both wait for ever. A gather by copy engines
    (`vllm.distributed.copy_engines`) holds none. Custom and NCCL all-reduces take few
    SMs and fit beside it.
    """
    parallel_config = vllm_config.parallel_config
    backend = parallel_config.all2all_backend
    if parallel_config.enable_expert_parallel and backend != "allgather_reducescatter":
        return f"all2all_backend={backend}"
    if not current_platform.is_cuda() or parallel_config.tensor_parallel_size == 1:
        return None
    if vllm_config.compilation_config.pass_config.fuse_allreduce_rms:
        return "pass_config.fuse_allreduce_rms"
    # The CUDA model of DeepSeek-V3.2 calls it without a pass, wherever it exists.
    from vllm.model_executor.layers import fused_allreduce_gemma_rms_norm as fused

    if fused.flashinfer_trtllm_fused_allreduce_norm is not None:
        return "FlashInfer's fused all-reduce and RMSNorm"
    return None


def ckv_prefetch_enabled(vllm_config: "VllmConfig", gather: bool) -> bool:
    """Whether the CKV gather prefetches. Says so in one log line at start.

    Args:
        gather: the CKV gather is on and DCP > 1.

    """
    if not gather:
        return False
    refusal = ckv_prefetch_refusal(vllm_config)
    if refusal is None:
        logger.info_once("DCP CKV prefetch is on.")
    else:
        logger.info_once("DCP CKV prefetch is off: %s.", refusal)
    return refusal is None
