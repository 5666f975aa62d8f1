# SPDX-License-Identifier: Apache-2.0
"""One rank of a DCP group with the real B12X_MLA_SPARSE builder and impl, and a stand-in for the kernels of `b12x`.

No SM12x GPU is at hand. What runs is the package's own declaration (`Caps`), scratch layout and binding checks; instead of
its kernels, its pure-torch reference or FlashMLA. `StandIn` keeps the kernels' habits, as the package's code has them: a
decode plan takes no more rows than its first run had, an extend plan always returns an LSE and in base 2, outputs lie in the
scratch. What no kernel promises is NaN: rows without ids.
"""

import contextlib
import math
import os
from types import SimpleNamespace as NS

import torch

from tests.gpu._ckv_ranks import FLAGS, LATENT, PAGE, ROPE, Rank, dequantize, flags

B12X_FLAGS = ("VLLM_B12X_MLA_CKV_GATHER", "VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS", "VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS")
TOPK = 512
RECORD_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 368}

# ------------------------------------------------------------------------------------------------ nvfp4_ds_mla records

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantize_nvfp4(kv_c, k_pe):
    """uint8 [n, 368], in the layout that `b12x.attention._shared.mla.kv_cache` documents, with an inline scale of the latent."""
    device = kv_c.device
    groups = kv_c.float().view(-1, 32, 16)
    token = (groups.abs().amax((1, 2)) / (6 * 448)).clamp(min=1e-30)
    scales = (groups.abs().amax(2) / 6 / token[:, None]).to(torch.float8_e4m3fn)
    step = scales.float() * token[:, None]
    scaled = torch.where(step[:, :, None] > 0, groups / step[:, :, None], 0).view(-1, 512)
    codes = (scaled[:, :, None] - E2M1.to(device)).abs().argmin(2).to(torch.uint8)
    rope_scale = (k_pe.float().abs().amax(1) / 448).clamp(min=1e-30)
    rope = (k_pe.float() / rope_scale[:, None]).to(torch.float8_e4m3fn)
    records = torch.zeros((len(kv_c), 368), dtype=torch.uint8, device=device)
    records[:, :256] = codes[:, 0::2] | codes[:, 1::2] << 4
    records[:, 256:288] = scales.view(torch.uint8)
    records[:, 288:292] = rope_scale[:, None].contiguous().view(torch.uint8)
    records[:, 292:296] = token[:, None].contiguous().view(torch.uint8)
    records[:, 304:] = rope.view(torch.uint8)
    return records


def dequantize_nvfp4(records):
    """float64 [n, 576]."""
    table = E2M1.to(torch.float64).to(records.device)
    codes = torch.stack([records[:, :256] & 15, records[:, :256] >> 4], 2).view(-1, 512)
    scales = records[:, 256:288].contiguous().view(torch.float8_e4m3fn).double()
    rope_scale, token = (records[:, i : i + 4].contiguous().view(torch.float32).double() for i in (288, 292))
    latent = table[codes.long()].view(-1, 32, 16) * (scales * token)[:, :, None]
    rope = records[:, 304:].contiguous().view(torch.float8_e4m3fn).double() * rope_scale
    return torch.cat([latent.view(-1, 512), rope], 1)


DEQUANTIZE = {656: dequantize, 368: dequantize_nvfp4}

# ------------------------------------------------------------------------------------------------ kernels


def reference_kernel(q, kv_cache, slots, counts, scale):
    """(out, LSE in base 2) by the package's own reference."""
    from b12x.attention._shared.mla import reference

    record = kv_cache.shape[-1]
    # The reference multiplies what it masks: zero the records that no id names, so that only named ones can give NaN.
    used = torch.zeros(kv_cache.numel() // record, dtype=torch.bool, device=q.device)
    columns = torch.arange(slots.shape[1], device=q.device)
    used[slots[(columns < counts[:, None]) & (slots >= 0)].long()] = True
    records = torch.where(used[:, None], kv_cache.reshape(-1, record), 0)
    arguments = dict(q_all=q, page_table_1=slots, active_token_counts=counts, sm_scale=scale, return_lse=True)
    if record == 656:
        return reference.sparse_mla_reference(kv_cache=records[:, None], v_head_dim=LATENT, **arguments)
    keys = dequantize_nvfp4(records).float()
    return reference._sparse_attention_reference(k_all=keys, v_all=keys[:, :LATENT], **arguments)


def flashmla_kernel(q, kv_cache, slots, counts, scale):
    """(out, LSE in base 2) by vLLM's FlashMLA, of fp8_ds_mla records."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    rows, heads, _ = q.shape
    padded = q.new_zeros((rows, 64 if heads <= 64 else 128, LATENT + ROPE))
    padded[:, :heads] = q
    columns = torch.arange(slots.shape[1], device=q.device)
    ids = torch.where(columns < counts[:, None], slots, -1)
    metadata, _ = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q=padded[None],
        k_cache=kv_cache.unsqueeze(-2),
        block_table=torch.zeros((1, 1), dtype=torch.int32, device=q.device),
        head_dim_v=LATENT,
        cache_seqlens=torch.full((1,), kv_cache.shape[0] * PAGE, dtype=torch.int32, device=q.device),
        tile_scheduler_metadata=metadata,
        is_fp8_kvcache=True,
        indices=ids[None],
        softmax_scale=scale,
    )
    return out[0, :, :heads], lse[0, :heads].T / math.log(2)


def graph_kernel(q, kv_cache, slots, counts, scale):
    """(out, LSE in base 2) of fp8_ds_mla records, in operations that a CUDA graph can capture."""
    rows, width = slots.shape
    valid = (torch.arange(width, device=q.device) < counts[:, None]) & (slots >= 0)
    records = kv_cache.reshape(-1, kv_cache.shape[-1])[torch.where(valid, slots, 0).long()]
    keys = dequantize(records.view(rows * width, -1)).float().view(rows, width, -1)
    keys = torch.where(valid[..., None], keys, 0)
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * scale
    scores = torch.where(valid[:, None], scores, -math.inf)
    return torch.einsum("thk,tkd->thd", torch.softmax(scores, -1), keys[..., :LATENT]), torch.logsumexp(scores, -1) / math.log(2)


class StandIn:
    """The modules of `b12x` that the backend asks for. `kernel`: see `reference_kernel`."""

    def __init__(self, kernel=reference_kernel):
        from b12x.attention import sparse_mla

        self.kernel, self.Caps, self.ModelType = kernel, sparse_mla.Caps, sparse_mla.ModelType
        self.prepared, self.runs = [], []

    def is_supported(self, device=None):
        return True

    # b12x.attention.sparse_mla.api

    def plan(self, caps):
        from b12x.attention.sparse_mla._scratch import plan_sparse_mla_scratch

        layout = plan_sparse_mla_scratch(caps)
        return NS(caps=caps, layout=layout, scratch_specs=layout.scratch_specs, request=lambda **request: NS(caps=caps, **request), first_rows=None)

    def bind(self, plan, *, scratch, q, kv_cache, selected_indices, cache_lengths, selected_lengths, attention_sink=None):
        runtime = plan.layout.bind(
            scratch=scratch,
            q=q,
            selected_indices=selected_indices,
            cache_seqlens_int32=cache_lengths,
            nsa_cache_seqlens_int32=selected_lengths,
            kv_cache=kv_cache,
        )
        return NS(plan=plan, runtime=runtime)

    def run(self, binding):
        plan, runtime = binding.plan, binding.runtime
        caps, q, scratch = plan.caps, runtime.q, runtime.scratch
        assert caps in [request.caps for request in self.prepared], "not prepared"
        if plan.first_rows is None:
            plan.first_rows = len(q)
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            assert torch.isfinite(q).all(), "NaN in a padded head"
        self.runs.append((caps.mode, len(q), caps.num_q_heads))
        out, lse = self.kernel(q, runtime.kv_cache, runtime.selected_indices, runtime.nsa_cache_seqlens_int32, caps.softmax_scale)
        empty = runtime.nsa_cache_seqlens_int32 == 0
        if caps.mode == "decode":
            assert len(q) <= plan.first_rows, "more rows than the first run had"
            if caps.lse_scale == "natural":
                lse = lse * math.log(2)
        else:
            assert q.shape[1] % 8 == 0
        scratch.output_buffer[: len(q)] = torch.where(empty[:, None, None], math.nan, out).to(torch.bfloat16)
        scratch.final_lse[: len(q)] = torch.where(empty[:, None], math.nan, lse)
        results = scratch.output_buffer[: len(q)], scratch.final_lse[: len(q)]
        return results if caps.return_lse or caps.mode != "decode" else results[0]

    # b12x.preparation

    def PreparationSession(self, *, device, autotune, compile_workers):
        def prepare(requests):
            for request in requests:
                request.prepare_call(None).run()
                self.prepared.append(request)

        return NS(prepare=prepare)

    def PreparedCall(self, *, run):
        return NS(run=run)

    # b12x.attention._shared.mla.kv_cache

    def concat_and_cache_nvfp4_mla_fp8_rope(self, kv_c, k_pe, kv_cache, slot_mapping, scale=None, per_token_scale=False):
        assert per_token_scale and slot_mapping.dtype == torch.int64 and kv_cache.shape[-1] == 368 and k_pe.ndim == 2
        kept = slot_mapping >= 0
        slots = slot_mapping[kept]
        kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = quantize_nvfp4(kv_c[: len(kept)][kept], k_pe[: len(kept)][kept])


def use_stand_in(kernel=reference_kernel):
    """Replace the kernels in this process for good."""
    import vllm.v1.attention.backends.mla.b12x_sparse_plans as plans

    stand_in = StandIn(kernel)
    plans.b12x_module = lambda name: stand_in
    plans.get_b12x_sparse_mla.cache_clear()
    if not torch.cuda.is_available():
        plans.num_compute_units = lambda index: 188
        _convert_without_streams()
    return stand_in


def _convert_without_streams():
    """Upstream converts ids on a side stream without DCP; a CPU has no streams."""
    from vllm.v1.attention.backends.mla import index_group

    def convert_once(self, layer_index, ids, req_ids, block_table, block_size, *, block_stride_rows, return_valid_counts, idx_mapping=None):
        return index_group.triton_convert_req_index_to_global_index(
            req_ids,
            block_table,
            ids,
            BLOCK_SIZE=block_size,
            BLOCK_STRIDE_ROWS=block_stride_rows,
            NUM_TOPK_TOKENS=ids.shape[1],
            return_valid_counts=return_valid_counts,
        )

    index_group.SparseMLAIndexGroup._convert_once = convert_once


# ------------------------------------------------------------------------------------------------ one rank


@contextlib.contextmanager
def b12x_flags(values):
    """Flags by full name, all others of the gather unset. The prefetch is off: its process group is not always there."""
    with flags():
        before = {name: os.environ.pop(name, None) for name in B12X_FLAGS}
        os.environ.update({name: str(value) for name, value in {"VLLM_DCP_CKV_PREFETCH": 0, **values}.items()})
        try:
            yield
        finally:
            for name in (*FLAGS, *B12X_FLAGS):
                os.environ.pop(name, None)
            os.environ.update({name: value for name, value in before.items() if value is not None})


class B12xRank(Rank):
    """`Rank` with B12X_MLA_SPARSE; `build` takes flags by full name. `stand_in`: what `use_stand_in` returned."""

    def __init__(self, rank, world, device, stand_in, **config):
        config = {
            "topk": TOPK,
            "attention_config__backend": "B12X_MLA_SPARSE",
            "attention_config__backend_per_kind": {},
            "compilation_config__cudagraph_capture_sizes": [1, 2, 4],
            "kv_transfer_config": None,
            **config,
        }
        super().__init__(rank, world, device, **config)
        self.stand_in = stand_in
        self.dtype = config.get("cache_dtype", "fp8_ds_mla")
        self.record = RECORD_BYTES[self.dtype]
        self.dequantize = DEQUANTIZE[self.record]

    def backend(self):
        from vllm.v1.attention.backends.mla.b12x_mla_sparse import B12xMLASparseBackend

        return B12xMLASparseBackend

    def flags(self, values):
        return b12x_flags(values)

    def write(self, kv_c, k_pe, cache, slots):
        """By the impl's writer."""
        self.impl.do_kv_cache_update(kv_c, k_pe[:, None], cache, slots, self.dtype, torch.ones((), device=self.device))
