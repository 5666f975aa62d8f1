# SPDX-License-Identifier: Apache-2.0
"""What several benchmarks share: turns of variants, random input made on the GPU, metadata of one chunk, the indexer of one rank, tables."""
import pathlib
import random
import types
from collections.abc import Iterable

import torch

OUT = pathlib.Path(__file__).resolve().parent / "out"
PAGE, RECORD, LATENT, ROPE = 64, 656, 512, 64
LINKS = (25, 50, 400)  # GB/s, the links that benchmarks on one GPU model
INDEX_HEADS, INDEX_DIM = 64, 128
MAX_MODEL_LEN = 163840  # of DeepSeek-V3.2
CYCLES = 1.98e9  # a second of an H200 below its power limit


def turns(names: Iterable[str], number: int) -> list[str]:
    """The names in the order of round `number`, the same on all ranks. Over rounds each stands behind each other one.

    What ran just before matters: clocks sink at the power limit and recover while a GPU waits.
    """
    names = list(names)
    return random.Random(number).sample(names, len(names))


def rest(seconds: float) -> None:
    """Let the GPU do next to nothing: the host gets ahead, clocks stay up, and a GPU at its power limit recovers."""
    torch.cuda._sleep(int(seconds * CYCLES))


def make_records(rows, device):
    """fp8_ds_mla records uint8 [rows, RECORD] that decode to finite values."""
    data = torch.randint(0, 256, (rows, RECORD), dtype=torch.uint8, device=device)
    data[:, :LATENT] &= 0xBF  # e4m3 below 2
    data[:, LATENT : LATENT + 16] = torch.ones((rows, 4), device=device).view(torch.uint8)
    data[:, LATENT + 16 :] = torch.randn((rows, ROPE), device=device).to(torch.bfloat16).view(torch.uint8)
    return data


def spread_ids(rows, context, topk, generator):
    """int32 [rows, topk]: distinct ids below the row's causal bound in random order, -1 behind them. The last `rows` rows of `context`.

    One id from each of `topk` strata of the row's context, in an order that each row begins elsewhere: no sort over the
    context, which takes longer the longer it is.
    """
    device = generator.device
    causal = torch.arange(context - rows + 1, context + 1, device=device)[:, None]
    column = torch.arange(topk, device=device)[None]
    low = column * causal // topk
    width = ((column + 1) * causal // topk - low).clamp(min=1)
    ids = low + (torch.rand((rows, topk), device=device, generator=generator) * width).long().clamp(max=width - 1)
    order = torch.randperm(topk, device=device, generator=generator)
    begin = torch.randint(topk, (rows, 1), device=device, generator=generator)
    shuffled = ids.gather(1, order[(column + begin) % topk])
    # Below topk tokens every one of them is selected.
    return torch.where(causal >= topk, shuffled, torch.where(column < causal, column, -1)).to(torch.int32)


def chunk_metadata(context, tokens, block_table):
    """CommonAttentionMetadata of one request that prefills its last `tokens` tokens; block_table: int32 [1, pages]."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device = block_table.device
    lens = torch.tensor([context], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(device),
        num_reqs=1,
        num_actual_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=context,
        block_table_tensor=block_table,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
        is_prefilling=torch.tensor([True]),
        seq_lens_cpu_upper_bound=lens,
    )


def host_table(block_table):
    """The HostBlockTable of a device block table, int32 [requests, pages]."""
    import numpy as np
    from vllm.v1.attention.ops.step_writes import HostBlockTable

    requests, pages = block_table.shape
    return HostBlockTable(block_table.cpu().numpy(), np.full(requests, pages), PAGE)


class StubDcpGroup:
    """Rank 0 of `world` in the indexer's exchange; the other ranks' candidates are random, made once. Takes no time for transfers."""

    def __init__(self, world, rows, topk):
        self.world_size, self.rank_in_group, self.topk = world, 0, topk
        self.pool = torch.randn((rows, world * topk, 2), device="cuda")
        self.pool[..., 1] = torch.randint(0, 1 << 20, self.pool.shape[:2], device="cuda").float()

    def all_gather(self, packed, dim):
        gathered = self.pool[: len(packed)]
        gathered[:, : self.topk] = packed
        return gathered


class IndexerChunk:
    """DeepSeek-V3.2's sparse indexer on one rank: the last `tokens` tokens of a context, vLLM's own builder and op.

    The process groups, real or stubs, are the caller's, and so is the workspace manager.
    """

    def __init__(self, tp, dcp, dcp_rank, context, tokens, interleave, topk, device):
        from tests.distributed.indexer_batch import Batch, Shape, common_metadata
        from vllm import _custom_ops as ops

        self.tp, self.dcp, self.dcp_rank, self.context, self.tokens, self.interleave = tp, dcp, dcp_rank, context, tokens, interleave
        self.shape = Shape(topk=topk, heads=INDEX_HEADS, dim=INDEX_DIM, block_size=PAGE, max_tokens=tokens, max_len=-(-context // PAGE), device=str(device))
        torch.manual_seed(0)  # the same queries on all ranks
        self.batch = Batch([(context, tokens)], interleave, 0, 0, torch.randn(tokens, INDEX_HEADS, INDEX_DIM, device=device).to(torch.float8_e4m3fn),
                           torch.randn(tokens, INDEX_HEADS, device=device), [])  # fmt: skip
        self.common = common_metadata(self.batch, self.shape, dcp_rank, dcp)
        pages = int(self.common.block_table_tensor.max()) + 1
        keys = torch.randn(pages * PAGE, INDEX_DIM, device=device, dtype=torch.bfloat16)
        self.cache = torch.zeros((pages, PAGE, INDEX_DIM + 4), dtype=torch.uint8, device=device)
        ops.indexer_k_quant_and_cache(keys, self.cache, torch.arange(pages * PAGE, device=device), 128, "ue8m0")
        self.buffer = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)

    def call(self, split):
        """(a function that runs the op, its prefill metadata), with VLLM_DCP_QUERY_SPLIT on or off."""
        from tests.distributed.indexer_batch import LAYER, make_builder, make_config
        from vllm.config import CUDAGraphMode
        from vllm.model_executor.layers import sparse_attn_indexer as indexer

        config = make_config(self.shape, self.tp, self.dcp, self.interleave)
        config.model_config.max_model_len = MAX_MODEL_LEN
        config.attention_config.sparse_mla_prefill_workspace_factor = 5
        metadata = make_builder(config, self.shape, split).build(0, self.common)
        assert (metadata.prefill.row_shard_sizes is not None) == split
        forward_context = types.SimpleNamespace(attn_metadata={LAYER: metadata}, cudagraph_runtime_mode=CUDAGraphMode.NONE)

        def run():
            indexer.get_forward_context = lambda: forward_context
            indexer.sparse_attn_indexer(
                self.batch.q, LAYER, self.cache, self.batch.q, None, None, self.batch.weights, 128, None, self.shape.topk, INDEX_DIM, self.context, self.context,
                self.buffer, True, False, False, "", dcp_rank=self.dcp_rank, dcp_world_size=self.dcp, cp_kv_cache_interleave_size=self.interleave,
                skip_topk_buffer_clear=True,
            )  # fmt: skip

        return run, metadata.prefill


def table(rows):
    """Rows of strings, the head first, as lines of right-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
