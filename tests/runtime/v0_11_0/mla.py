# SPDX-License-Identifier: Apache-2.0
"""MLA attention of v0.11.0 on a CPU: the real metadata builder on a small stand-in config, and batches for it.

Works on the patched and on an unpatched tree, so that unpatched.py can use it for both.
"""
from types import SimpleNamespace

import torch

LORA, ROPE, NOPE, V_DIM = 512, 64, 16, 16  # the cache row is LORA + ROPE = 576 wide, the only size MLA accepts


def stand_in_config(world: int, interleave: int, block_size: int = 64, max_num_seqs: int = 16, max_model_len: int = 32768, num_heads: int = 2):
    """The parts of a VllmConfig that the MLA builder and impl read."""
    hf_config = SimpleNamespace(q_lora_rank=None, kv_lora_rank=LORA, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V_DIM)
    model_config = SimpleNamespace(max_model_len=max_model_len, dtype=torch.float32, hf_text_config=hf_config, get_head_size=lambda: LORA + ROPE,
                                   get_num_attention_heads=lambda parallel_config: num_heads)
    parallel_config = SimpleNamespace(decode_context_parallel_size=world)
    if interleave is not None:  # None: a tree without the feature
        parallel_config.cp_kv_cache_interleave_size = interleave
    return SimpleNamespace(model_config=model_config, parallel_config=parallel_config, compilation_config=SimpleNamespace(),
                           cache_config=SimpleNamespace(block_size=block_size), scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs))


def zeros_without_pinning(zeros=torch.zeros):
    """torch.zeros for machines where `pin_memory=True` is an error."""

    def unpinned(*args, pin_memory=False, **kwargs):
        return zeros(*args, **kwargs)

    return unpinned


def make_builder(config, cuda: bool = True, workspace: int | None = None):
    """The real builder, its constructor included; `cuda`: aligns chunks to pages as it does on CUDA; `workspace`: rows for context."""
    from vllm.v1.attention.backends.mla.common import MLACommonMetadataBuilder

    spec = SimpleNamespace(block_size=config.cache_config.block_size, num_kv_heads=1)
    builder = MLACommonMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    builder.aot_schedule = cuda
    builder.page_size = spec.block_size
    if workspace is not None:
        parts = builder.dcp_world_size + 1 if builder.dcp_world_size > 1 else builder.dcp_world_size
        builder.chunked_prefill_workspace_size = workspace
        builder.chunked_prefill_workspace = torch.full((workspace // builder.dcp_world_size * parts, LORA + ROPE), torch.nan)
    return builder


def common_metadata(query_lens, context_lens, **kwargs):
    """CommonAttentionMetadata of a batch: decodes (one query token) first, as the runner orders them."""
    from vllm.v1.attention.backends.utils import CommonAttentionMetadata

    query, context = torch.tensor(query_lens, dtype=torch.int32), torch.tensor(context_lens, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), query.cumsum(0, dtype=torch.int32)])
    seq_lens = query + context
    tokens = int(query.sum())
    return CommonAttentionMetadata(query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=seq_lens, seq_lens_cpu=seq_lens.clone(),
                                   num_computed_tokens_cpu=context, num_reqs=len(query), num_actual_tokens=tokens, max_query_len=int(query.max()),
                                   max_seq_len=int(seq_lens.max()), slot_mapping=torch.zeros(tokens, dtype=torch.int64),
                                   block_table_tensor=kwargs.pop("block_table", torch.zeros(len(query), 1, dtype=torch.int32)), **kwargs)
