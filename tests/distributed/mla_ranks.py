# SPDX-License-Identifier: Apache-2.0
"""v0.11.0's real MLA code on one DCP rank of a CPU world: sharded paged caches, and torch references for the compiled operations."""
from types import SimpleNamespace

import numpy as np
import torch

from tests.runtime.v0_11_0 import mla

COMMON = "vllm.v1.attention.backends.mla.common"
BLOCK_SIZE = 64
HEADS = 2  # of each rank
WIDTH = mla.LORA + mla.ROPE


def cp_gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts):
    """Copy rows seq_starts[b].. of each request from its blocks to rows cu_seq_lens[b]..cu_seq_lens[b + 1] of dst."""
    block_size = src_cache.shape[1]
    for b in range(batch_size):
        first, last = int(cu_seq_lens[b]), int(cu_seq_lens[b + 1])
        rows = int(seq_starts[b]) + torch.arange(last - first)
        dst[first:last] = src_cache[block_table[b, rows // block_size].long(), rows % block_size]


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    """Write each token's row to its slot, if it has one."""
    rows = torch.cat([kv_c, k_pe], dim=-1)
    kept = slot_mapping >= 0
    kv_cache.view(-1, WIDTH)[slot_mapping[kept]] = rows[kept]


def attend(q, k, v, scale, mask=None):
    """q [T, N, D], k [S, N, D], v [S, N, V], mask [T, S] -> out [T, N, V], lse [N, T]; nothing to see: NaN and -inf, as some kernels do."""
    scores = torch.einsum("tnd,snd->nts", q, k) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1) if k.shape[0] else torch.full(scores.shape[:2], -torch.inf, dtype=q.dtype)
    return torch.einsum("nts,snv->tnv", torch.exp(scores - lse[..., None]), v) + torch.where(lse == -torch.inf, torch.nan, 0.0).T[..., None], lse


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, max_seqlen_q, max_seqlen_k,
                           return_softmax_lse=False, return_attn_probs=False):
    outs, lses = [], []
    for b in range(len(cu_seqlens_q) - 1):
        here, there = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1]), slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        assert q[here].shape[0] <= max_seqlen_q and k[there].shape[0] <= max_seqlen_k
        mask = torch.ones(q[here].shape[0], k[there].shape[0], dtype=torch.bool).tril() if causal else None
        out, lse = attend(q[here], k[there], v[there], softmax_scale, mask)
        outs.append(out.nan_to_num() if not k[there].shape[0] else out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse) if return_softmax_lse or return_attn_probs else out


def merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    output.copy_(prefix_output * torch.exp(prefix_lse - lse).nan_to_num().T[..., None] +
                 suffix_output * torch.exp(suffix_lse - lse).nan_to_num().T[..., None])
    if output_lse is not None:
        output_lse.copy_(lse)


def use_references(config):
    """Replace what is compiled, and what a whole engine would provide, in the MLA module of this process."""
    from vllm.v1.attention.backends.mla import common

    torch.zeros = mla.zeros_without_pinning()
    common.ops = SimpleNamespace(cp_gather_cache=cp_gather_cache, concat_and_cache_mla=concat_and_cache_mla)
    common.flash_attn_varlen_func = flash_attn_varlen_func
    common.merge_attn_states = merge_attn_states
    common.get_current_vllm_config = lambda: config


class Batch:
    """Requests with all their tokens known, and this rank's shard of their context in a paged cache.

    rows[r]: [tokens, WIDTH] cache rows of request r; the last query_lens[r] tokens are new. Everything in the cache that no token
    was written to is NaN, so a row too many cannot go unnoticed.
    """

    def __init__(self, rng: np.random.Generator, query_lens, context_lens, interleave):
        from vllm.v1.worker.block_table import MultiGroupBlockTable

        self.query_lens, self.context_lens = query_lens, context_lens
        lengths = [q + c for q, c in zip(query_lens, context_lens)]
        self.rows = [torch.from_numpy(rng.standard_normal((n, WIDTH), dtype=np.float32)) for n in lengths]
        tables = MultiGroupBlockTable(max_num_reqs=len(lengths), max_model_len=max(lengths), max_num_batched_tokens=sum(lengths), pin_memory=False,
                                      device=torch.device("cpu"), block_sizes=[BLOCK_SIZE], cp_kv_cache_interleave_size=interleave)
        self.table = tables[0]
        per_row = self.table.max_num_blocks_per_req
        self.cache = torch.full((len(lengths) * per_row, BLOCK_SIZE, WIDTH), torch.nan)
        for r, ids in enumerate(rng.permutation(len(lengths) * per_row).reshape(len(lengths), per_row)):
            tables.add_row((ids.tolist(), ), r)
        self.write([range(c) for c in context_lens])
        new = [range(c, c + q) for q, c in zip(query_lens, context_lens)]
        self.new_rows = torch.cat([rows[c:] for rows, c in zip(self.rows, context_lens)])
        self.slots = self.map_slots(new)

    def map_slots(self, positions):
        requests = np.repeat(np.arange(len(positions)), [len(p) for p in positions])
        flat = np.concatenate([np.asarray(p, dtype=np.int64) for p in positions])
        self.table.compute_slot_mapping(requests, flat)
        return torch.from_numpy(self.table.slot_mapping.np[:len(flat)].copy())

    def write(self, positions):
        rows = torch.cat([rows[list(p)] for rows, p in zip(self.rows, positions)])
        concat_and_cache_mla(rows[:, :mla.LORA], rows[:, mla.LORA:], self.cache, self.map_slots(positions), "auto", None)

    def metadata(self, builder):
        common = mla.common_metadata(self.query_lens, self.context_lens, block_table=torch.from_numpy(self.table.block_table.np.copy()))
        common.slot_mapping = self.slots
        return builder.build(0, common)


def make_impl(weight):
    """MLA with reference decode; `weight` [LORA, HEADS * (NOPE + V_DIM)] is this rank's kv_b_proj."""
    from vllm.v1.attention.backends.mla.common import MLACommonImpl

    class ReferenceImpl(MLACommonImpl):
        can_return_lse_for_decode = True

        def _forward_decode(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
            decode = attn_metadata.decode
            q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
            outs, lses = [], []
            for b, length in enumerate(decode.seq_lens.tolist()):
                rows = kv_c_and_k_pe_cache[decode.block_table[b].long()].reshape(-1, WIDTH)[:length].unsqueeze(1).expand(-1, q.shape[1], -1)
                out, lse = attend(q[b:b + 1], rows, rows[..., :self.kv_lora_rank], self.scale)
                outs.append(out)
                lses.append(lse.T)
            return torch.cat(outs), torch.cat(lses)

    impl = ReferenceImpl(HEADS, WIDTH, (mla.NOPE + mla.ROPE)**-0.5, 1, None, None, "auto", None, "decoder", None, q_lora_rank=None,
                         kv_lora_rank=mla.LORA, qk_nope_head_dim=mla.NOPE, qk_rope_head_dim=mla.ROPE, qk_head_dim=mla.NOPE + mla.ROPE,
                         v_head_dim=mla.V_DIM, kv_b_proj=lambda x: (x @ weight, ))
    w_uk, w_uv = weight.view(mla.LORA, HEADS, mla.NOPE + mla.V_DIM).split([mla.NOPE, mla.V_DIM], dim=-1)
    impl.W_UV, impl.W_UK_T = w_uv.transpose(0, 1), w_uk.permute(1, 2, 0)
    return impl
