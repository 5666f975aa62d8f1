# SPDX-License-Identifier: Apache-2.0
"""Plain references of what the sparse indexer calls on a GPU: logits in float64, top-k and candidate merge with their tie rules.

Each has the signature of the function it stands in for. `install` puts them in place, for runs without a GPU. The GPU tests
check the candidate packing and merge against the real ones.
"""
import sys
import types

import numpy as np
import torch

MERGE_MODULE = "vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl"


def stable_keys(scores: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    """uint64 keys whose order is the merge's: higher float32 score first, then the lower id. 0, the last, for an id below 0."""
    bits = scores.float().cpu().numpy().view(np.uint32)
    ordered = np.where(bits >> 31 == 1, ~bits, bits ^ np.uint32(1 << 31)).astype(np.uint64)
    ids = ids.cpu().numpy().astype(np.int64)
    keys = (ordered << np.uint64(32)) | (~ids.astype(np.uint32)).astype(np.uint64)
    return np.where(ids < 0, np.uint64(0), keys)


def pack_candidates(logits, topk_indices, packed, dcp_rank, dcp_world_size, cp_interleave, row_starts) -> None:
    """Fill packed[row, j] = (score, global id as a float) of local candidate j; (-inf, -1) where it is -1."""
    local = topk_indices.long()
    valid = local >= 0
    column = local.clamp(min=0) + (0 if row_starts is None else row_starts[:, None].long())
    if logits.shape[1] == 0:
        scores = torch.full(local.shape, -torch.inf, device=local.device)
    else:
        scores = logits.gather(1, column.clamp(max=logits.shape[1] - 1)).masked_fill(~valid, -torch.inf)
    period, offset = local // cp_interleave, local % cp_interleave
    ids = (period * dcp_world_size + dcp_rank) * cp_interleave + offset
    packed[..., 0] = scores
    packed[..., 1] = ids.masked_fill(~valid, -1).float()


def stable_topk(gathered, topk, out=None) -> torch.Tensor:
    """The `topk` best candidates of each row of (score, id) pairs, best first, -1 at the end. The real one does not sort."""
    keys = stable_keys(gathered[..., 0], gathered[..., 1])
    best = np.sort(keys, axis=1)[:, ::-1][:, :topk]
    ids = np.where(best == 0, -1, (~best.astype(np.uint32)).astype(np.int64)).astype(np.int32)
    result = torch.from_numpy(np.ascontiguousarray(ids)).to(gathered.device)
    if out is None:
        return result
    out[:] = -1
    out[:, : result.shape[1]] = result
    return out


def _scores(q, k, weights) -> torch.Tensor:
    """float32 sum over heads of weight * relu(q . k), computed in float64; q [rows, heads, dim], k [keys, dim] scaled."""
    dots = torch.einsum("rhd,kd->rhk", q.double(), k.double()).relu_()
    # + 0 makes -0 a 0: they tie.
    return torch.einsum("rhk,rh->rk", dots, weights.double()).float() + 0.0


def mqa_logits(q, kv, weights, starts, ends, max_seqlen_k) -> torch.Tensor:
    """[rows, max_seqlen_k]: row i has the scores of keys starts[i] to ends[i] from column 0, then a value no one may read."""
    (q, q_scale), (k, k_scale) = q, kv
    assert q_scale is None and len(q) == len(starts) == len(ends) == len(weights)
    scores = _scores(q, k.double() * k_scale.double()[:, None], weights)
    logits = torch.full((len(q), max_seqlen_k), 1e30)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        logits[row, : end - start] = scores[row, start:end]
    return logits


def _cache_rows(kv_cache, head_dim, block_table, length):
    """Keys (float64, scaled) of one request from a paged cache of `head_dim` fp8 and 4 scale bytes per token."""
    block_size = kv_cache.shape[1]
    tokens = torch.arange(length)
    rows = kv_cache[block_table[tokens // block_size].long(), tokens % block_size].flatten(1)
    return rows[:, :head_dim], rows[:, head_dim:]


def paged_mqa_logits(q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices=None) -> torch.Tensor:
    """[batch * next_n, max_model_len] of paged keys; one query token per row of the batch."""
    q, q_scale = q
    batch, next_n, heads, dim = q.shape
    assert q_scale is None and next_n == 1 and indices is None
    logits = torch.full((batch, max_model_len), 1e30)
    for row, length in enumerate(context_lens.reshape(-1).tolist()):
        values, scales = _cache_rows(kv_cache, dim, block_tables[row], length)
        keys = values.contiguous().view(torch.float8_e4m3fn).double() * scales.contiguous().view(torch.float32).double()
        logits[row, :length] = _scores(q[row], keys, weights[row : row + 1])[0]
    return logits


def gather_k(kv_cache, values, scales, block_table, cu_seq_lens) -> None:
    """Copy each request's cached keys and scales behind one another."""
    bounds = cu_seq_lens.tolist()
    for request, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        k, scale = _cache_rows(kv_cache, values.shape[1], block_table[request], end - start)
        values[start:end] = k.contiguous().view(values.dtype)
        scales[start:end] = scale


def _best(scores: torch.Tensor, topk: int) -> list[int]:
    """Positions of the best scores, the lower position first among equals, -1 up to `topk`."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:topk]
    return order + [-1] * (topk - len(order))


def topk_prefill(logits, starts, ends, out, num_rows, stride0, stride1, topk) -> None:
    assert num_rows == len(logits) == len(starts) == len(ends) == len(out) and (stride0, stride1) == logits.stride()
    for row in range(num_rows):
        start, end = int(starts[row]), int(ends[row])
        out[row, :topk] = torch.tensor(_best(logits[row, start:end].tolist(), topk), dtype=torch.int32)


def topk_decode(logits, seq_lens, next_n, out, topk, max_seq_len) -> None:
    for row, length in enumerate(seq_lens.reshape(-1).tolist()):
        out[row] = torch.tensor(_best(logits[row, :length].tolist(), topk), dtype=torch.int32)


def install() -> None:
    """Put the references in the place of the GPU functions. For a process of its own: nothing is undone."""
    from vllm.model_executor.layers import sparse_attn_indexer as indexer

    merge = types.ModuleType(MERGE_MODULE)
    merge.pack_dcp_topk_candidates_cutedsl = pack_candidates
    merge.stable_topk_from_gathered_candidates_cutedsl = stable_topk
    sys.modules[MERGE_MODULE] = merge
    indexer._assert_cutedsl_dcp_merge_supported = lambda *args: None
    indexer.fp8_fp4_mqa_logits = mqa_logits
    indexer.fp8_fp4_paged_mqa_logits = paged_mqa_logits
    indexer.get_indexer_topk = lambda backend: topk_decode
    torch.accelerator.empty_cache = lambda: None  # the workspace calls it when it grows; it raises without an accelerator
    indexer.ops = types.SimpleNamespace(cp_gather_indexer_k_quant_cache=gather_k, top_k_per_row_prefill=topk_prefill)
