# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""What of the CKV gather and its prefetch stays fixed while the engine runs.

All of it follows from flags and the engine's config, so it is the same on every rank
but for the rank itself.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.distributed.parallel_state import get_dcp_group
from vllm.logger import init_logger
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


# --------------------------------------------------------------------------- gather


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
        )

    @property
    def rows_per_rank(self) -> int:
        """Capacity of one rank's share of the gathered buffer.

        A rank holds at most `interleave` tokens of a request above its even share.
        """
        share = cdiv(self.max_tokens, self.dcp_world_size)
        return round_up(share + self.max_num_seqs * self.interleave, CKV_PAGE_ROWS)

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


def ckv_prefetch_refusal(vllm_config: "VllmConfig") -> str | None:
    """Why the CKV gather of this engine does not prefetch; None: it does.

    Args:
        vllm_config: of an engine with the CKV gather on and DCP > 1.

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
    if transfer is not None and transfer.kv_connector is not None:
        connector = _layerwise_connector(transfer)
        if connector is not None:
            return f"the KV connector {connector} may load KV layer by layer"
    if vllm_config.model_config.get_num_layers(parallel_config) < 2:
        return "a single layer"
    return None


def ckv_prefetch_enabled(vllm_config: "VllmConfig", gather: bool) -> bool:
    """Whether the CKV gather prefetches. Says so in one log line at start.

    Args:
        gather: the CKV gather is on and DCP > 1.

    """
    if not gather:
        # On by default: only whoever set it is to hear that it does nothing.
        if envs.is_set("VLLM_DCP_CKV_PREFETCH") and envs.VLLM_DCP_CKV_PREFETCH:
            logger.warning_once(
                "VLLM_DCP_CKV_PREFETCH=1 has no effect: the prefetch works only with "
                "VLLM_DCP_CKV_GATHER=1 and decode_context_parallel_size > 1."
            )
        return False
    refusal = ckv_prefetch_refusal(vllm_config)
    if refusal is None:
        logger.info_once("DCP CKV prefetch is on.")
    else:
        logger.info_once("DCP CKV prefetch is off: %s.", refusal)
    return refusal is None
