# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""The order of a batch in model runner V1, so that what gathers stands together.

The CKV gather takes the last requests of a batch. Model runner V2 sorts requests with
drafts to the front. V1 sorts by the builders' threshold: where that is below the length
of a verification, as with an interleave above 1, requests that verify drafts stand
anywhere among the chunks that have context.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.v1.attention.ops.ckv_config import ckv_gather_flags

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def move_verifications_up(
    input_batch: Any,
    scheduler_output: Any,
    decode_threshold: int,
    vllm_config: "VllmConfig",
) -> None:
    """Put verifications before chunks, where a gather may follow. To call behind
    upstream's `reorder_batch_to_split_decodes_and_prefills`, whose regions stay.

    Args:
        input_batch: of model runner V1; its requests are swapped.
        scheduler_output: of the step.
        decode_threshold: upstream's.
        vllm_config: of the engine.

    """
    if (
        vllm_config.speculative_config is None
        or vllm_config.parallel_config.decode_context_parallel_size == 1
        or not (ckv_gather_flags().enabled or ckv_gather_flags(b12x=True).enabled)
    ):
        return
    scheduled = np.array(
        [scheduler_output.num_scheduled_tokens[i] for i in input_batch.req_ids]
    )
    num_reqs = len(scheduled)
    computed = input_batch.num_computed_tokens_cpu[:num_reqs]
    # What upstream calls a long extend: one region, neither decode nor first chunk.
    region = np.flatnonzero((computed > 0) & (scheduled > decode_threshold))
    verifies = computed[region] >= input_batch.num_prompt_tokens[region]
    front = int(verifies.sum())
    late = region[front:][verifies[front:]]
    for target, source in zip(region[:front][~verifies[:front]], late):
        input_batch.swap_states(int(source), int(target))
