# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Do all ranks decide alike? Asked once, before anything depends on it.

Which collectives a step runs follows from flags, the config and the libraries. Each
rank reads its own: a launch on several nodes with one different value starts, serves,
and hangs at the first batch on which two ranks decide differently. So ranks compare
what they read, over the CPU group, and a difference ends the start on all of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import vllm.envs as envs
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

# Beside every variable with DCP in its name: what else changes collectives or kernels.
_MORE_VARIABLES = (
    "VLLM_B12X_MLA_CKV_GATHER",
    "VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS",
    "VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS",
    "VLLM_BATCH_INVARIANT",
    "VLLM_DISABLE_PYNCCL",
    "VLLM_USE_NCCL_SYMM_MEM",
)

# Those that switch a feature of this stack on.
FEATURE_FLAGS = (
    "VLLM_DCP_QUERY_SPLIT",
    "VLLM_DCP_CKV_GATHER",
    "VLLM_B12X_MLA_CKV_GATHER",
)


def _variables() -> dict[str, Any]:
    """Values of the environment variables, or the error of a value that is refused."""
    names = [
        name
        for name in envs.environment_variables
        if "DCP" in name or name in _MORE_VARIABLES
    ]
    values = {}
    for name in names:
        try:
            values[name] = getattr(envs, name)
        except ValueError as error:
            # Raised once all ranks are here: alone, this rank would leave them waiting.
            values[name] = f"refused: {error}"
    return values


def _config_facts(vllm_config: "VllmConfig") -> dict[str, Any]:
    """What of the config decides which rows gather, how much fits, and what runs."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    speculative = vllm_config.speculative_config
    transfer = vllm_config.kv_transfer_config
    facts = {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "cp_kv_cache_interleave_size": parallel.cp_kv_cache_interleave_size,
        "use_ubatching": parallel.use_ubatching,
        "all2all_backend": parallel.all2all_backend,
        "attention_backend": vllm_config.attention_config.backend,
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "num_speculative_tokens": speculative and speculative.num_speculative_tokens,
        "kv_connector": transfer and transfer.kv_connector,
        "cudagraph_mode": vllm_config.compilation_config.cudagraph_mode,
    }
    if model is not None:
        facts |= {
            "max_model_len": model.max_model_len,
            "enable_sleep_mode": model.enable_sleep_mode,
        }
    return facts


def _library_facts() -> dict[str, Any]:
    facts = {"torch": torch.__version__, "device": current_platform.device_type}
    if current_platform.is_cuda():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["compute capability"] = current_platform.get_device_capability()
    return facts


def _rank_list(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    )


def differences(facts: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[str]:
    """One line for each name whose value is not the same everywhere.

    Args:
        facts: of each rank, name: value.
        ranks: their global ranks, ascending.

    """
    lines = []
    for name in dict.fromkeys(name for own in facts for name in own):
        holders: dict[str, list[int]] = {}
        for own, rank in zip(facts, ranks):
            value = str(own[name]) if name in own else "not there"
            holders.setdefault(value, []).append(rank)
        if len(holders) > 1:
            values = (f"{v} on ranks {_rank_list(r)}" for v, r in holders.items())
            lines.append(f"{name}: {', '.join(values)}")
    return lines


def require_same(
    facts: dict[str, Any], group: "GroupCoordinator", matters: bool = True
) -> None:
    """Compare `facts` over `group`. Collective over its CPU group.

    Args:
        facts: name: value; compared as text.
        group: whose ranks must agree.
        matters: something of this rank depends on it. Where that holds for no rank, a
            difference is nobody's business.

    Raises:
        ValueError: a value differs, on every rank of the group alike.

    """
    everyone: list[Any] = [None] * group.world_size
    own = {name: str(value) for name, value in facts.items()}, matters
    dist.all_gather_object(everyone, own, group=group.cpu_group)
    if not any(cares for _, cares in everyone):
        return
    lines = differences([facts for facts, _ in everyone], group.ranks)
    if lines:
        raise ValueError(
            "Ranks differ in what decides about their collectives, and would hang "
            "under load. Start all nodes with the same values and versions:\n  "
            + "\n  ".join(lines)
        )


def agree_on_dcp_settings(vllm_config: "VllmConfig") -> None:
    """Compare flags, config and library versions of all ranks. Collective over the
    world, also where every flag is off: only the others can tell.

    Args:
        vllm_config: of the engine.

    Raises:
        ValueError: a flag of this stack is on somewhere, and ranks differ.

    """
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    if world.world_size == 1 or vllm_config.parallel_config.enable_elastic_ep:
        # Ranks of elastic EP come and go; it refuses these features.
        return
    variables = _variables()
    require_same(
        variables | _config_facts(vllm_config) | _library_facts(),
        world,
        matters=any(variables.get(flag) for flag in FEATURE_FLAGS),
    )
