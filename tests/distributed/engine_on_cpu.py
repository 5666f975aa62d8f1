# SPDX-License-Identifier: Apache-2.0
"""vLLM's whole engine with the CUDA model of DeepSeek-V3.2, on a CPU, without a compiled extension: scheduler, model runner, metadata
builders, caches, samplers, and the model's layers are the real ones, over gloo where there are several ranks.

`install` puts torch in the place of what is compiled, or is too slow in the interpreter: the GEMM packing of CPU builds, attention
kernels (tests/gpu/_ckv_ranks.py), the indexer's scores and top-k (indexer_reference.py), and the fused query kernel. For a process of
its own: nothing is undone. Engines take block_size=64.
"""
import sys
from unittest import mock

import torch
import torch.nn.functional as F

from tests.distributed import indexer_reference
from tests.gpu._ckv_ranks import use_torch_ops
from tests.gpu.margin_reference import BLOCK
from tests.interpreter import accept_mixed_masks


def _rope(x, cos_sin, positions, interleaved):
    """x [tokens, heads, dim]; cos_sin [positions, dim]."""
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, -1)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def fused_q(positions, q_pe, q_pe_cos_sin, index_q, index_cos_sin, ql_nope, q_scale, index_weights, softmax_scale, head_scale,
            has_indexer=True, index_rope_interleave=False, quantize_mqa=True):  # fmt: skip
    """vllm.models.deepseek_v32.common.kernels.fused_q for bfloat16 queries: 192 programs a token are too many for the interpreter."""
    assert has_indexer and not quantize_mqa
    q = index_q.float()
    dim = index_cos_sin.shape[1]
    q = torch.cat([_rope(q[..., :dim], index_cos_sin, positions, index_rope_interleave), q[..., dim:]], -1)
    assert q.shape[-1] == BLOCK
    scale = torch.exp2(torch.ceil(torch.log2(q.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return (q / scale).to(torch.float8_e4m3fn), index_weights.float() * scale[..., 0] * softmax_scale * head_scale, _rope(q_pe.float(), q_pe_cos_sin, positions, True).to(q_pe.dtype)


def _index_rows(kv_cache, head_dim, block_table, length):
    """Of one request: fp8 bytes [length, head_dim] and scale bytes [length, 4]. A block holds the values of all its tokens, then the scales."""
    size = kv_cache.shape[1]
    token = torch.arange(length)
    block, row = block_table[token // size].long(), token % size
    flat = kv_cache.reshape(len(kv_cache), -1)
    return flat[:, : size * head_dim].unflatten(1, (size, head_dim))[block, row], flat[:, size * head_dim :].unflatten(1, (size, 4))[block, row]


def _physical_ids(self, layer_index, ids, request, block_table, block_size, *, block_stride_rows, return_valid_counts, idx_mapping=None):
    """SparseMLAIndexGroup._convert_once without its stream."""
    assert idx_mapping is None and block_stride_rows in (None, block_size)
    token = ids.clamp(min=0).long()
    slots = block_table[request.long()[:, None], token // block_size] * block_size + token % block_size
    slots = slots.to(torch.int32).masked_fill(ids < 0, -1)
    return (slots, (ids >= 0).sum(1).to(torch.int32)) if return_valid_counts else slots


def install() -> None:
    sys.modules.setdefault("loguru", mock.MagicMock())  # a package wants it for its log lines
    import vllm.models.deepseek_v32 as entry
    from vllm.model_executor.layers import utils
    from vllm.models.deepseek_v32 import attention
    from vllm.models.deepseek_v32.nvidia.model import DeepseekV32ForCausalLM
    from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MTP
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import index_group
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker import workspace

    accept_mixed_masks()
    use_torch_ops()
    indexer_reference.install()
    indexer_reference._cache_rows = _index_rows
    # Of a CPU build: what its worker calls first, and packed weights.
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(layer, "cpu_linear", F.linear)
    # The CPU's own MLA wants blocks of 16, no chunks and no prefix cache, unless it has AMX.
    torch.cpu._is_amx_tile_supported = lambda: True
    type(current_platform).get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: AttentionBackendEnum.FLASHMLA_SPARSE.get_path())
    entry.DeepseekV32ForCausalLM, entry.DeepseekV32MTP = DeepseekV32ForCausalLM, DeepseekV32MTP
    attention.fused_q = fused_q
    index_group.SparseMLAIndexGroup._convert_once = _physical_ids
    index_group.SparseMLAIndexGroup.set_logical_topk_ready = lambda self, layer_index: None
    workspace.init_workspace_manager(torch.device("cpu"))
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []  # they live as long as they are held
