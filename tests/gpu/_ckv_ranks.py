# SPDX-License-Identifier: Apache-2.0
"""One rank of a DCP group with vLLM's real FlashMLA sparse builder and impl, real layers and a real paged cache.

The same rank serves GPUs (processes of tests/gpu/ranks.py, over NCCL or gloo) and the CPU, where `tests.distributed`
replaces the compiled operations by torch references (`use_torch_ops`). Everything is made from seeds, so all ranks hold the
same requests, queries, records and ids; each keeps its shard of the cache and its heads.

Two layers run the same batch: MLAAttention.forward_impl ("generic") and the fused DeepSeek-V3.2 attention ("fused").
"""
import contextlib
import math
import os
from types import SimpleNamespace as NS
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

NOPE, ROPE, LATENT, V = 128, 64, 512, 128
PAGE = 64
SCALE = (LATENT + ROPE) ** -0.5
FLAGS = ("VLLM_DCP_CKV_GATHER", "VLLM_DCP_CKV_GATHER_MIN_TOKENS", "VLLM_DCP_CKV_GATHER_MAX_TOKENS", "VLLM_DCP_CKV_PREFETCH")


# ------------------------------------------------------------------------------------------------ configuration


def make_config(dcp, *, tp=None, interleave=1, heads=16, topk=128, max_tokens=512, max_model_len=4096, max_num_seqs=8, cache_dtype="fp8_ds_mla", **more):
    """What the builder, the impl and the layers read of a VllmConfig. `heads`: of the whole model, over `tp` ranks."""
    tp = tp or dcp
    text = NS(index_topk=topk, q_lora_rank=1536, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, num_hidden_layers=2)
    parallel = NS(
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        prefill_context_parallel_size=1,
        cp_kv_cache_interleave_size=interleave,
        pcp_shard_decode_requests=False,
        enable_dbo=False,
        use_ubatching=False,
        num_ubatches=1,
        dcp_comm_backend="ag_rs",
        all2all_backend="allgather_reducescatter",
        enable_expert_parallel=False,
    )
    model = NS(
        dtype=torch.bfloat16,
        max_model_len=max_model_len,
        hf_text_config=text,
        hf_config=text,
        model_arch_config=NS(total_num_attention_heads=heads),
        get_num_attention_heads=lambda parallel_config: heads // tp,
        get_num_layers=lambda parallel_config: 61,
        enable_cumem_allocator=False,
    )
    config = NS(
        model_config=model,
        parallel_config=parallel,
        scheduler_config=NS(max_num_batched_tokens=max_tokens, max_num_seqs=max_num_seqs),
        cache_config=NS(cache_dtype=cache_dtype, block_size=PAGE),
        attention_config=NS(hisparse_config=None, sparse_mla_prefill_workspace_factor=5, sparse_mla_force_mqa=True),
        compilation_config=NS(static_forward_context={}, max_cudagraph_capture_size=0, pass_config=NS(fuse_allreduce_rms=False)),
        kernel_config=NS(enable_jit_warmup=False),
        speculative_config=None,
        kv_transfer_config=None,
        num_speculative_tokens=0,
        use_v2_model_runner=True,
    )
    for path, value in more.items():
        target, *names = config, *path.split("__")
        for name in names[:-1]:
            target = getattr(target, name)
        setattr(target, names[-1], value)
    return config


@contextlib.contextmanager
def current_config(config):
    """`config` as vLLM's current one. Not through set_current_vllm_config: `config` only resembles a VllmConfig."""
    import vllm.config.vllm as module

    before, module._current_vllm_config = module._current_vllm_config, config
    try:
        yield
    finally:
        module._current_vllm_config = before


@contextlib.contextmanager
def flags(**values):
    """Environment flags for the time of the block, the others of the gather unset."""
    before = {name: os.environ.pop(name, None) for name in FLAGS}
    values = {"CKV_PREFETCH": 0} | values  # where it is on, the world must have been made with its group
    os.environ.update({f"VLLM_DCP_{name}": str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name in FLAGS:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


# ------------------------------------------------------------------------------------------------ one batch


def owner(position, world, interleave):
    return position // interleave % world


def rows_of(length, rank, world, interleave):
    """Positions of a request that `rank` stores, in order."""
    positions = np.arange(length)
    return positions[owner(positions, world, interleave) == rank]


class Batch:
    """Requests (context before this step, query length); the first `num_decodes` of them are decodes.

    Holds on every rank the same latents, ids and queries of all heads.
    """

    def __init__(self, requests, *, num_decodes=0, topk=128, heads=16, seed=0, device="cpu", holes=False, prefilling=None):
        self.requests, self.num_decodes, self.topk, self.heads, self.device = requests, num_decodes, topk, heads, device
        generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.query_lens = [q for _, q in requests]
        self.seq_lens = [c + q for c, q in requests]
        self.num_tokens = sum(self.query_lens)
        self.kv_c = [torch.randn(n, LATENT, generator=generator).to(torch.bfloat16) for n in self.seq_lens]
        self.k_pe = [torch.randn(n, ROPE, generator=generator).to(torch.bfloat16) for n in self.seq_lens]
        self.q = torch.randn(self.num_tokens, heads, NOPE + ROPE, generator=generator).to(torch.bfloat16).to(device)
        # Absorption of unit variance, so that scores are of order one.
        self.w_uk = (torch.randn(heads, NOPE, LATENT, generator=generator) / math.sqrt(NOPE)).to(torch.bfloat16).to(device)
        self.w_uv = (torch.randn(heads, LATENT, V, generator=generator) / math.sqrt(LATENT)).to(torch.bfloat16).to(device)
        ids = np.full((self.num_tokens, topk), -1, np.int64)
        self.request_of, self.causal = [], []
        row = 0
        for r, (context, query) in enumerate(requests):
            for i in range(query):
                causal = context + i + 1
                kept = rng.permutation(causal)[:topk] if causal <= 8 * topk else rng.choice(causal, topk, replace=False)
                if causal - 1 not in kept:
                    kept[0] = causal - 1
                if holes and len(kept) > 2:
                    kept = np.where(rng.random(len(kept)) < 0.2, -1, kept)
                    kept[-1] = causal - 1 if causal - 1 not in kept else kept[-1]
                ids[row, : len(kept)] = kept
                self.request_of.append(r)
                self.causal.append(causal)
                row += 1
        self.ids = torch.tensor(ids, dtype=torch.int32, device=device)
        self.prefilling = torch.tensor([r >= num_decodes for r in range(len(requests))] if prefilling is None else prefilling)

    def common(self, rank):
        """CommonAttentionMetadata of the batch, with this rank's block table."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor(np.concatenate([[0], np.cumsum(self.query_lens)]), dtype=torch.int32)
        lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(self.device),
            num_reqs=len(self.requests),
            num_actual_tokens=self.num_tokens,
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.seq_lens),
            block_table_tensor=rank.block_table,
            slot_mapping=torch.zeros(self.num_tokens, dtype=torch.int64, device=self.device),
            is_prefilling=self.prefilling,
            seq_lens_cpu_upper_bound=lens,
        )


def dequantize(records):
    """float64 [n, 576] of fp8_ds_mla records uint8 [n, 656]."""
    latent = records[:, :512].contiguous().view(torch.float8_e4m3fn).to(torch.float64).view(-1, 4, 128)
    scales = records[:, 512:528].contiguous().view(torch.float32).to(torch.float64)
    rope = records[:, 528:].contiguous().view(torch.bfloat16).to(torch.float64)
    return torch.cat([(latent * scales[:, :, None]).view(-1, 512), rope], 1)


def quantize(kv_c, k_pe):
    """fp8_ds_mla records uint8 [n, 656] in torch, for the CPU."""
    groups = kv_c.float().view(-1, 4, 128)
    scales = (groups.abs().amax(-1) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    latent = (groups / scales[:, :, None]).to(torch.float8_e4m3fn).view(-1, 512)
    return torch.cat([latent.view(torch.uint8), scales.contiguous().view(torch.uint8).view(-1, 16), k_pe.contiguous().view(torch.uint8).view(-1, 128)], 1)


# ------------------------------------------------------------------------------------------------ one rank


class Rank:
    """This process's rank of a DCP group of `world`, which exists already."""

    record = 656  # bytes
    dequantize = staticmethod(dequantize)
    indexer_op = None  # called by the fused layer where it selects tokens

    def __init__(self, rank, world, device, **config):
        self.rank, self.world = rank, world
        self.device = torch.empty(0, device=device).device  # of "cuda", the current GPU
        self.config_args = config
        self.interleave = config.get("interleave", 1)

    def backend(self):
        from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

        return FlashMLASparseBackend

    def flags(self, values):
        return flags(**values)

    def write(self, kv_c, k_pe, cache, slots):
        from vllm import _custom_ops as ops

        ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, kv_cache_dtype="fp8_ds_mla", scale=torch.ones((), device=self.device))

    def build(self, **flag_values):
        """New workspaces, layer, impl and builder under the given flags, as `flags` names them."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        from vllm.v1.attention.ops.dcp import MLADCPManager
        from vllm.v1.worker import workspace

        backend = self.backend()
        self.config = config = make_config(self.world, **self.config_args)
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        self.heads = slice(self.rank * heads, (self.rank + 1) * heads)
        topk = config.model_config.hf_text_config.index_topk
        max_tokens = config.scheduler_config.max_num_batched_tokens
        self.topk_buffer = torch.full((max_tokens, topk), -1, dtype=torch.int32, device=self.device)
        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(self.device)
        with self.flags(flag_values), current_config(config):
            self.impl = backend.get_impl_cls()(
                num_heads=heads,
                head_size=LATENT + ROPE,
                scale=SCALE,
                num_kv_heads=1,
                alibi_slopes=None,
                sliding_window=None,
                kv_cache_dtype=config.cache_config.cache_dtype,
                logits_soft_cap=None,
                attn_type="decoder",
                kv_sharing_target_layer_name=None,
                topk_indices_buffer=self.topk_buffer,
                q_lora_rank=None,
                kv_lora_rank=LATENT,
                qk_nope_head_dim=NOPE,
                qk_rope_head_dim=ROPE,
                qk_head_dim=NOPE + ROPE,
                v_head_dim=V,
                kv_b_proj=None,
            )
            manager = None
            if self.world > 1:
                manager = MLADCPManager(
                    vllm_config=config,
                    device=self.device,
                    num_heads=heads,
                    query_head_dim=LATENT + ROPE,
                    output_head_dim=LATENT,
                    query_dtype=torch.bfloat16,
                    output_dtype=torch.bfloat16,
                    padded_num_heads=None,
                    is_lse_base_on_e=self.impl.lse_base_on_e,
                    use_pcp=False,
                )
            self.layer = self._layer(MLAAttention, manager, backend, heads)
            config.compilation_config.static_forward_context["layer"] = self.layer
            if getattr(self.impl, "ckv_gather", None) is not None:
                self.impl.allocate_ckv_gather()  # as the worker does when the model is built
            spec = NS(block_size=PAGE, kv_quant_mode=None)
            self.builder = backend.get_builder_cls()(spec, ["layer"], config, self.device)
        workspace.lock_workspace()
        return self

    def _layer(self, cls, manager, backend, heads):
        """An MLAAttention without its constructor, which would build weights and choose a backend."""
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        values = dict(
            impl=self.impl,
            num_heads=heads,
            num_local_heads=heads,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            qk_head_dim=NOPE + ROPE,
            kv_lora_rank=LATENT,
            v_head_dim=V,
            kv_cache_dtype=self.config.cache_config.cache_dtype,
            use_pcp=False,
            q_pad_num_heads=None,
            is_amx_bmm_enabled=False,
            is_aiter_triton_fp4_bmm_enabled=False,
            is_aiter_triton_fp8_bmm_enabled=False,
            W_UK_T_dcp_qrep=None,
            dcp_manager=manager,
            prefill_backend=None,
            hisparse_cache=None,
            attn_backend=backend,
            _vllm_config=self.config,
            layer_name="layer",
            indexer=None,
            skip_topk=True,
            pcp_shard_decode_requests=False,
            topk_indices_buffer=self.topk_buffer,
            _dense_mha_metadata_layer_name="",
            _fp8_query=False,
            _fp8_kv_needs_view=False,
        )
        for name, value in values.items():
            setattr(layer, name, value)
        return layer

    def load(self, batch, seed=0):
        """Write this rank's shard of the batch to a new paged cache, pages in random order, other pages full of NaN."""
        local = [rows_of(n, self.rank, self.world, self.interleave) for n in batch.seq_lens]
        pages = [len(positions) // PAGE + 1 for positions in local]
        total = sum(pages) + 3
        order = np.random.default_rng(seed + 17 * self.rank).permutation(total)
        self.cache = torch.full((total, PAGE, self.record), 255, dtype=torch.uint8, device=self.device)
        table = np.zeros((len(pages), max(pages)), np.int32)
        self.records = []
        used = 0
        for r, positions in enumerate(local):
            table[r, : pages[r]] = order[used : used + pages[r]]
            used += pages[r]
            kv_c, k_pe = batch.kv_c[r].to(self.device), batch.k_pe[r].to(self.device)
            index = np.arange(len(positions))
            slots = torch.tensor(table[r][index // PAGE].astype(np.int64) * PAGE + index % PAGE, device=self.device)
            where = torch.tensor(positions, device=self.device)
            if len(positions):
                self.write(kv_c[where], k_pe[where], self.cache, slots)
            # All records of the request, for the reference.
            whole = torch.full((len(kv_c) // PAGE + 1, PAGE, self.record), 255, dtype=torch.uint8, device=self.device)
            self.write(kv_c, k_pe, whole, torch.arange(len(kv_c), device=self.device))
            self.records.append(whole.view(-1, self.record)[: len(kv_c)])
        self.block_table = torch.tensor(table, device=self.device)
        self.topk_buffer.fill_(-1)
        self.topk_buffer[: batch.num_tokens] = batch.ids
        self.layer.W_UK_T = batch.w_uk[self.heads]
        self.layer.W_UV = batch.w_uv[self.heads]

    def poison(self):
        """NaN everywhere that a run could read without having written it."""
        from vllm.v1.worker.workspace import current_workspace_manager

        for arena in current_workspace_manager()._current_workspaces:
            if arena is not None:
                arena.fill_(255)
        if getattr(self.impl, "ckv_gather", None) is not None:  # upstream's impl has no such name
            self.impl.ckv_workspace.gathered.fill_(255)

    def metadata(self, batch):
        return self.builder.build(0, batch.common(self))

    def run(self, batch, layer="generic", metadata=None, poison=True):
        """The layer's output [tokens, local heads * V] for a loaded batch."""
        if poison:
            self.poison()
        metadata = metadata or self.metadata(batch)
        q = batch.q[:, self.heads].contiguous()
        output = torch.full((batch.num_tokens, q.shape[1] * V), float("nan"), dtype=torch.bfloat16, device=self.device)
        with current_config(self.config):
            if layer == "generic":
                dummy = torch.empty((batch.num_tokens, LATENT), dtype=torch.bfloat16, device=self.device)
                self.layer.forward_impl(q, dummy, dummy[:, None, :ROPE], self.cache, metadata, output)
            else:
                self._run_fused(q, metadata, output)
        return output

    def _run_fused(self, q, metadata, output):
        import vllm.models.deepseek_v32.attention as fused

        q_nope, q_pe = q.split([NOPE, ROPE], dim=-1)
        ql_nope = torch.bmm(q_nope.transpose(0, 1), self.layer.W_UK_T).transpose(0, 1)
        if self.indexer_op is not None:
            self.layer.indexer, self.layer.skip_topk = mock.MagicMock(), False
        replaced = {"get_attention_context": lambda name: (metadata, self.layer, self.cache, None), "sparse_attn_indexer": lambda *args, **kwargs: self.indexer_op()}
        with mock.patch.multiple(fused, **replaced):
            # In place of the indexer's queries and weights: something.
            fused.DeepseekV32Attention._sparse_indexer_and_attn(self.layer, None, None, q_nope, q_pe, q, None, q, None, None, ql_nope, q_pe.contiguous(), output)

    def reference(self, batch, rows=None):
        """float64 [rows, local heads * V]: dense attention of this rank's heads over the selected records."""
        rows = range(batch.num_tokens) if rows is None else rows
        q_nope, q_pe = batch.q[:, self.heads].split([NOPE, ROPE], dim=-1)
        # The absorbed query is an input of the attention: round it as the layer does.
        ql_nope = torch.bmm(q_nope.transpose(0, 1), self.layer.W_UK_T).transpose(0, 1)
        query = torch.cat([ql_nope, q_pe], -1).to(torch.float64)
        keys = {}
        out = []
        for row in rows:
            r = batch.request_of[row]
            if r not in keys:
                keys = {r: self.dequantize(self.records[r])}
            ids = batch.ids[row]
            chosen = keys[r][ids[(ids >= 0) & (ids < batch.causal[row])].long()]
            scores = query[row] @ chosen.T * SCALE
            latent = torch.softmax(scores, -1) @ chosen[:, :LATENT]
            out.append(torch.einsum("hl,hlv->hv", latent, self.layer.W_UV.to(torch.float64)).flatten())
        return torch.stack(out)


def error(got, reference):
    """Largest difference over the largest reference value; infinite where something is not finite."""
    if not torch.isfinite(got).all():
        return math.inf
    return ((got.to(torch.float64) - reference).abs().max() / reference.abs().max()).item()


# ------------------------------------------------------------------------------------------------ break it on purpose


@contextlib.contextmanager
def broken(how):
    """A wrong gather: "local-clamp", "wrong-start", "wrong-unit", "stale-workspace", a wrong look-ahead: "own-history", or "nothing"."""
    import vllm.v1.attention.backends.mla.flashmla_ckv_gather as backend
    import vllm.v1.attention.ops.ckv_gather as core

    import vllm.v1.attention.ops.ckv_plan as planning

    remap, gather, written = backend.map_global_topk_to_gathered_ckv, core.all_gather_bytes, planning.rows_written_by_batch

    def local_clamp(ids, req_ids, causal, starts, padded, world, interleave, **kwargs):
        causal = causal // (world * interleave) * interleave + (causal % (world * interleave)).clamp(max=interleave)
        return remap(ids, req_ids, causal, starts, padded, world, interleave, **kwargs)

    def wrong_start(ids, req_ids, causal, starts, padded, world, interleave, **kwargs):
        starts = starts.clone()
        starts[-1, -1] += 1
        return remap(ids, req_ids, causal, starts, padded, world, interleave, **kwargs)

    def wrong_unit(ids, req_ids, causal, starts, padded, world, interleave, **kwargs):
        return remap(ids, req_ids, causal, starts, padded, world, 2 * interleave, **kwargs)

    def own_history(table, table_rows, starts, ends, readers, history, world):
        return np.empty((0, 3), dtype=np.int64)

    if how == "local-clamp":
        backend.map_global_topk_to_gathered_ckv = local_clamp
    elif how == "wrong-start":
        backend.map_global_topk_to_gathered_ckv = wrong_start
    elif how == "wrong-unit":
        backend.map_global_topk_to_gathered_ckv = wrong_unit
    elif how == "own-history":
        planning.rows_written_by_batch = own_history
    elif how == "stale-workspace":
        core.all_gather_bytes = lambda gathered, local, group: None
    else:
        assert how == "nothing"
    try:
        yield
    finally:
        backend.map_global_topk_to_gathered_ckv, core.all_gather_bytes, planning.rows_written_by_batch = remap, gather, written


# ------------------------------------------------------------------------------------------------ the CPU


def use_torch_ops():
    """Replace the compiled operations of the sparse path by torch references, in this process for good."""
    import vllm.v1.attention.backends.mla.flashmla_sparse as flashmla
    from vllm import _custom_ops as ops
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.v1.attention.ops import dcp

    def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, skip_scale=False):
        kv_cache.view(-1, 656)[slot_mapping] = quantize(kv_c, k_pe)

    def cp_gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts=None):
        assert src_cache.dtype == dst.dtype and batch_size == len(cu_seq_lens) - 1 and len(dst) == cu_seq_lens[-1]
        bounds = cu_seq_lens.tolist()
        for r in range(batch_size):
            index = torch.arange(bounds[r + 1] - bounds[r])
            dst[bounds[r] : bounds[r + 1]] = src_cache[block_table[r, index // PAGE].long(), index % PAGE]

    def upconvert(src_cache, dst, block_table, workspace_starts, batch_size, seq_starts=None):
        assert batch_size == 1 and workspace_starts.tolist() == [0]
        index = torch.arange(len(dst))
        dst[:] = dequantize(src_cache[block_table[0, index // PAGE].long(), index % PAGE]).to(torch.bfloat16)

    def concat_mla_q(ql_nope, q_pe, q_out):
        heads = ql_nope.shape[1]
        q_out[:, :heads, :LATENT], q_out[:, :heads, LATENT:] = ql_nope, q_pe

    def attend(q, rows, ids, length, scale):
        """One token: q [heads, 576], float64 (out, lse); (NaN, NaN) for no ids, which callers must not use."""
        ids = ids[:length] if length is not None else ids
        chosen = rows(ids[ids >= 0].long())
        scores = q.double() @ chosen.T * scale
        return torch.softmax(scores, -1) @ chosen[:, :LATENT], torch.logsumexp(scores, -1)

    def flash_mla_sparse_fwd(q, kv, indices, scale, topk_length=None, out=None):
        assert q.shape[1] % 64 == 0 and q.dtype == kv.dtype == torch.bfloat16 and out.shape == (*q.shape[:2], LATENT)
        lse = torch.empty(q.shape[:2])
        for t in range(len(q)):
            out[t], lse[t] = attend(q[t], lambda i: kv[i, 0].double(), indices[t, 0], topk_length[t] if topk_length is not None else None, scale)
        return out, None, lse

    def flash_mla_with_kvcache(q, k_cache, indices, softmax_scale, head_dim_v, **kwargs):
        assert q.shape[2] in (64, 128) and head_dim_v == LATENT and k_cache.dtype == torch.uint8
        records = k_cache.reshape(-1, 656)
        out, lse = torch.empty((*q.shape[:3], LATENT), dtype=q.dtype), torch.empty((q.shape[0], q.shape[2], q.shape[1]))
        for b in range(q.shape[0]):
            for t in range(q.shape[1]):
                out[b, t], lse[b, :, t] = attend(q[b, t], lambda i: dequantize(records[i]), indices[b, t], None, softmax_scale)
        return out, lse

    def reduce_scatter(self, x, dim=-1):
        dim = dim % x.dim()
        y = x.contiguous().clone()
        dist.all_reduce(y, group=self.device_group)
        n = x.shape[dim] // self.world_size
        return y.narrow(dim, self.rank_in_group * n, n).contiguous()

    def correct_attn_out(out, lses, cp_rank, ctx, is_lse_base_on_e=True):
        """The interpreter cannot run this upstream kernel: its launcher asks for attributes of a compiled one."""
        assert is_lse_base_on_e
        lse = torch.logsumexp(lses, 0)
        return (out * torch.exp(lses[cp_rank] - lse)[..., None]).to(out.dtype), lse

    dcp.correct_attn_out = correct_attn_out
    for function in (concat_and_cache_mla, cp_gather_cache, concat_mla_q):
        setattr(ops, function.__name__, function)
    ops.cp_gather_and_upconvert_fp8_kv_cache = upconvert
    flashmla.flash_mla_sparse_fwd, flashmla.flash_mla_with_kvcache = flash_mla_sparse_fwd, flash_mla_with_kvcache
    flashmla.get_mla_metadata = lambda: (object(), None)
    flashmla.num_compute_units = lambda index: 132
    torch.accelerator.empty_cache = lambda: None
    for cls in (DeviceCommunicatorBase, *DeviceCommunicatorBase.__subclasses__()):
        cls.reduce_scatter = reduce_scatter
