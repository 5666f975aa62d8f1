# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Who takes the DCP flags: what can be known before the model is built, and what is.

Flags are environment variables, and whether a layer can follow one depends on the
attention backend that upstream selects for it. So once the model is built, and before
memory is profiled, `finish_dcp_features` looks at its layers: it compares over the DCP
group what they resolved to, lets those that gather allocate their buffers, and warns
of a flag that no layer took.
"""

from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.distributed.dcp_agreement import require_same
from vllm.logger import init_logger
from vllm.v1.attention.ops.ckv_config import (
    ckv_gather_flags,
    world_prefetch_refusal,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

GATHER_BACKENDS = ("FLASHMLA_SPARSE", "B12X_MLA_SPARSE")
INDEXER_BACKEND = "DEEPSEEK_V32_INDEXER"


# ------------------------------------------------------------- before the model is built


def _selected_backend(vllm_config: "VllmConfig") -> str | None:
    """Name of the backend that sparse MLA layers will have, None: not known.

    Asks upstream's selection as `MLAAttention` will.

    Raises:
        ValueError: no backend is valid; building the model would raise the same.

    """
    from vllm.v1.attention.selector import get_attn_backend

    model_config = vllm_config.model_config
    hf_config = model_config.hf_text_config
    lora_rank = getattr(hf_config, "kv_lora_rank", None)
    rope_dim = getattr(hf_config, "qk_rope_head_dim", None)
    if not model_config.use_mla or lora_rank is None or rope_dim is None:
        return None
    return get_attn_backend(
        lora_rank + rope_dim,
        model_config.dtype,
        vllm_config.cache_config.cache_dtype,
        use_mla=True,
        use_sparse=True,
        num_heads=model_config.get_num_attention_heads(vllm_config.parallel_config),
    ).get_name()


def has_indexer(vllm_config: "VllmConfig") -> bool | None:
    """Whether the model selects tokens by a sparse indexer. None: there is no model."""
    model_config = vllm_config.model_config
    if model_config is None:
        return None
    return hasattr(model_config.hf_text_config, "index_topk")


def wanted_groups(vllm_config: "VllmConfig", dcp_size: int) -> tuple[bool, bool]:
    """Whether to create (the query split group, the CKV prefetch group).

    From facts that all ranks share. The flags are read even without DCP: a bad value
    must not wait for DCP to show. A group that surely nobody would use is not made.
    """
    query_split = envs.VLLM_DCP_QUERY_SPLIT
    prefetch = bool(envs.VLLM_DCP_CKV_GATHER) and envs.VLLM_DCP_CKV_PREFETCH
    if dcp_size == 1 or has_indexer(vllm_config) is False:
        return False, False
    if prefetch and vllm_config.model_config is not None:
        prefetch = world_prefetch_refusal(vllm_config) is None and _selected_backend(
            vllm_config
        ) in (None, *GATHER_BACKENDS)
    return query_split, prefetch


# ------------------------------------------------------------- when the model is built


def _layers(vllm_config: "VllmConfig") -> dict[str, Any]:
    """The layers that have an attention backend, by name. Also of a draft model."""
    context = vllm_config.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in context.items()
        if hasattr(layer, "get_attn_backend")
    }


def _why_untaken(vllm_config: "VllmConfig", backends: list[str]) -> str:
    """Why a flag has no effect in this engine, and what to set."""
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return "decode_context_parallel_size is 1. Set --decode-context-parallel-size"
    if INDEXER_BACKEND not in backends:
        return (
            f"the model has no sparse indexer (its attention backends: "
            f"{', '.join(backends) or 'none'}). Leave it off for this model"
        )
    used = ", ".join(name for name in backends if name != INDEXER_BACKEND)
    return (
        f"the attention backend {used} does not know it. Set "
        "--attention-backend FLASHMLA_SPARSE, on SM12x B12X_MLA_SPARSE"
    )


def finish_dcp_features(vllm_config: "VllmConfig") -> None:
    """What follows from the layers of a model that is built, and must be in place
    before memory is profiled. Collective over the DCP group where a flag is on.

    Call it outside the memory pool of the weights. Does nothing with all flags off.

    Args:
        vllm_config: of the engine.

    Raises:
        ValueError: ranks of the DCP group resolved to different things.

    """
    gather = ckv_gather_flags().enabled or ckv_gather_flags(b12x=True).enabled
    if not (gather or envs.VLLM_DCP_QUERY_SPLIT):
        if envs.is_set("VLLM_DCP_CKV_PREFETCH") and envs.VLLM_DCP_CKV_PREFETCH:
            # On by default: only whoever set it is to hear that it does nothing.
            logger.warning_once(
                "VLLM_DCP_CKV_PREFETCH=1 has no effect: set VLLM_DCP_CKV_GATHER=1, too."
            )
        return
    layers = _layers(vllm_config)
    backends = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
    gathering = {
        name: layer.impl
        for name, layer in layers.items()
        if getattr(getattr(layer, "impl", None), "ckv_gather", None) is not None
    }
    parallel_config = vllm_config.parallel_config
    if parallel_config.decode_context_parallel_size > 1:
        from vllm.distributed.parallel_state import get_dcp_group

        require_same(
            {"attention backends": backends}
            | {
                f"CKV gather of {name}": impl.ckv_gather.shared_by_ranks
                for name, impl in gathering.items()
            },
            get_dcp_group(),
        )
    for impl in gathering.values():
        impl.allocate_ckv_gather()

    untaken = []
    if gather and not gathering:
        own = ckv_gather_flags().enabled
        untaken.append(f"VLLM_{'DCP' if own else 'B12X_MLA'}_CKV_GATHER")
    if envs.VLLM_DCP_QUERY_SPLIT and (
        INDEXER_BACKEND not in backends
        or parallel_config.decode_context_parallel_size == 1
    ):
        untaken.append("VLLM_DCP_QUERY_SPLIT")
    for flag in untaken:
        logger.warning_once(
            "%s=1 has no effect: %s.", flag, _why_untaken(vllm_config, backends)
        )
