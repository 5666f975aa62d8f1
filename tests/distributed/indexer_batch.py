# SPDX-License-Identifier: Apache-2.0
"""Batches for the sparse indexer: the same on all ranks from one seed, cached by each rank for its DCP shard, run by the real op."""
import dataclasses
import os
import random
import types

import torch

from tests.oracle import deal

LAYER = "model.layers.0.self_attn.indexer.k_cache"
FLAG = "VLLM_DCP_QUERY_SPLIT"


@dataclasses.dataclass
class Shape:
    """Sizes that hold for all batches of a run."""

    topk: int = 8
    heads: int = 2
    dim: int = 8
    block_size: int = 4
    max_tokens: int = 256
    max_len: int = 512
    device: str = "cpu"


@dataclasses.dataclass
class Batch:
    """Requests as (context length after the step, query tokens), decodes first, and their tensors.

    q: [tokens, heads, dim] fp8; weights: [tokens, heads] float32; keys: per request [length, dim] float32, exact in fp8 for
    `ties`; logits_elems: what bounds the rows of a chunk.
    """

    requests: list[tuple[int, int]]
    interleave: int
    logits_elems: int
    workspace: int
    q: torch.Tensor
    weights: torch.Tensor
    keys: list[torch.Tensor]

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.requests)

    @property
    def decodes(self) -> int:
        return sum(n == 1 for _, n in self.requests)


def random_requests(rng: random.Random, max_len: int, max_tokens: int) -> list[tuple[int, int]]:
    """Decode rows, then one to four prefills: fresh prompts, later chunks of long ones, some of two or three tokens."""
    requests = [(rng.randint(1, max_len), 1) for _ in range(rng.choice([0, 0, 1, 3]))]
    room = max_tokens - len(requests)
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        tokens = rng.choice([2, 3, rng.randint(2, 9), rng.randint(10, max(11, max_tokens // 3))])
        if tokens > room:
            break
        room -= tokens
        length = tokens if rng.random() < 0.4 else rng.randint(tokens, max_len)
        requests.append((length, tokens))
    return requests


def make_batch(seed: int, shape: Shape, ties: bool, interleaves: list[int], requests=None) -> Batch:
    """The batch of `seed`. With `ties`, small integers, whose scores collide all the time."""
    rng = random.Random(seed)
    requests = requests or random_requests(rng, shape.max_len, shape.max_tokens // 2)
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(n for _, n in requests)

    def values(*size):
        if ties:
            return torch.randint(-2, 3, size, generator=generator).float()
        return torch.randn(size, generator=generator)

    longest = max(length for length, _ in requests)
    most_rows = max(n for _, n in requests)
    return Batch(
        requests=requests,
        interleave=rng.choice(interleaves),
        # From one row a chunk to all rows in one.
        logits_elems=rng.choice([longest * max(1, most_rows // 3), longest * most_rows, 1 << 20]),
        workspace=rng.choice([longest, 2 * longest, 1 << 14]),
        q=values(tokens, shape.heads, shape.dim).to(torch.float8_e4m3fn).to(shape.device),
        weights=(torch.randint(-1, 3, (tokens, shape.heads), generator=generator).float() if ties else values(tokens, shape.heads)).to(shape.device),
        keys=[values(length, shape.dim) for length, _ in requests],
    )


def common_metadata(batch: Batch, shape: Shape, rank: int, world: int):
    """What the model runner gives the builder on this DCP rank; block tables number the pages of each request in turn."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lens = [length for length, _ in batch.requests]
    queries = torch.tensor([n for _, n in batch.requests], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), queries.cumsum(0, dtype=torch.int32)])
    local = torch.tensor([len(deal(length, world, batch.interleave)[rank]) for length in lens], dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    pages = [-(-length // shape.block_size) for length in lens]
    table = torch.zeros((len(lens), max(pages)), dtype=torch.int32)
    page = 1
    for row, count in enumerate(pages):
        table[row, :count] = torch.arange(page, page + count)
        page += count
    return CommonAttentionMetadata(
        query_start_loc=starts.to(shape.device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(shape.device),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(lens),
        num_actual_tokens=batch.tokens,
        max_query_len=int(queries.max()),
        max_seq_len=max(lens),
        block_table_tensor=table.to(shape.device),
        slot_mapping=torch.zeros(batch.tokens, dtype=torch.int64, device=shape.device),
        dcp_local_seq_lens=local.to(shape.device),
    )


def local_keys(batch: Batch, request: int, rank: int, world: int) -> torch.Tensor:
    length = batch.requests[request][0]
    return batch.keys[request][torch.tensor(deal(length, world, batch.interleave)[rank], dtype=torch.long)]


def reference_cache(batch: Batch, shape: Shape, common, rank: int, world: int) -> torch.Tensor:
    """This rank's keys, paged as `indexer_reference` reads them: per token `dim` fp8 bytes and a float32 scale of 0.5."""
    pages = int(common.block_table_tensor.max()) + 1
    cache = torch.zeros((pages, shape.block_size, shape.dim + 4), dtype=torch.uint8)
    scale = torch.tensor([0.5]).view(torch.uint8)
    for request in range(len(batch.requests)):
        keys = local_keys(batch, request, rank, world).to(torch.float8_e4m3fn).view(torch.uint8)
        for i, row in enumerate(keys):
            page = int(common.block_table_tensor[request, i // shape.block_size])
            cache[page, i % shape.block_size] = torch.cat([row, scale])
    return cache


def make_config(shape: Shape, tp: int, dcp: int, interleave: int):
    """The parts of a VllmConfig that the builder and the op read."""
    from vllm.config import AttentionConfig, CompilationConfig, CUDAGraphMode, ParallelConfig

    parallel = ParallelConfig(cp_kv_cache_interleave_size=interleave)
    parallel.tensor_parallel_size, parallel.decode_context_parallel_size = tp, dcp
    attention = AttentionConfig()
    attention.sparse_mla_prefill_workspace_factor = 1
    return types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=shape.max_tokens, max_num_seqs=64),
        parallel_config=parallel,
        attention_config=attention,
        compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE),
        model_config=types.SimpleNamespace(max_model_len=shape.max_len * 64),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def make_builder(config, shape: Shape, split: bool, compress_ratio: int = 1):
    """The real metadata builder, with the flag on or off."""
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=shape.block_size * compress_ratio, num_kv_heads=1, head_size=shape.dim + 4, dtype=torch.uint8, tokens_per_state=compress_ratio
    )
    os.environ[FLAG] = "1" if split else "0"
    return DeepseekV32IndexerMetadataBuilder(spec, [LAYER], config, torch.device(shape.device), block_table_width=shape.max_len)


def build(builder, batch: Batch, common):
    """Metadata with the chunk bounds of the batch instead of megabytes."""
    split_chunks = type(builder)._split_indexer_prefill_chunks

    def small_chunks(lens, queries, workspace, max_logits_bytes, request_offset=0):
        return split_chunks(lens, queries, batch.workspace, 4 * batch.logits_elems, request_offset=request_offset)

    builder._split_indexer_prefill_chunks = small_chunks
    return builder.build(0, common)


def run_indexer(metadata, batch: Batch, shape: Shape, cache: torch.Tensor, rank: int, world: int, skip_clear: bool = False) -> torch.Tensor:
    """Top-k ids [tokens, topk] from the real op. `skip_clear`: as the fused DeepSeek V3.2 layer calls it, with a cleared buffer."""
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.layers import sparse_attn_indexer as indexer

    context = types.SimpleNamespace(attn_metadata={LAYER: metadata}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    indexer.get_forward_context = lambda: context
    buffer = torch.full((batch.tokens + 3, shape.topk), -1 if skip_clear else -7, dtype=torch.int32, device=shape.device)
    indexer.sparse_attn_indexer(
        hidden_states=torch.empty((batch.tokens, 1), device=shape.device),
        k_cache_prefix=LAYER,
        kv_cache=cache,
        q_quant=batch.q,
        q_scale=None,
        k=None,
        weights=batch.weights,
        quant_block_size=128,
        scale_fmt=None,
        topk_tokens=shape.topk,
        head_dim=shape.dim,
        max_model_len=shape.max_len,
        total_seq_lens=max(1 << 14, sum(length for length, _ in batch.requests)),
        topk_indices_buffer=buffer,
        skip_k_cache_insert=True,
        use_pcp=False,
        pcp_shard_decode_requests=False,
        dense_mha_metadata_layer_name="",
        dcp_rank=rank,
        dcp_world_size=world,
        cp_kv_cache_interleave_size=batch.interleave,
        skip_topk_buffer_clear=skip_clear,
        topk_backend="auto",
    )
    assert (buffer[batch.tokens :] == (-1 if skip_clear else -7)).all(), "rows behind the batch were written"
    return buffer[: batch.tokens]


def oracle_ids(batch: Batch, topk: int) -> torch.Tensor:
    """[tokens, topk] by scoring every key of the request up to the token's position; the lower position wins a tie."""
    from tests.distributed.indexer_reference import _scores

    rows, token = [], 0
    for (length, count), keys in zip(batch.requests, batch.keys, strict=True):
        keys = keys.to(torch.float8_e4m3fn).double() * 0.5
        for position in range(length - count, length):
            scores = _scores(batch.q[token : token + 1], keys[: position + 1], batch.weights[token : token + 1])[0].tolist()
            order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:topk]
            rows.append(order + [-1] * (topk - len(order)))
            token += 1
    return torch.tensor(rows, dtype=torch.int32)
