# SPDX-License-Identifier: Apache-2.0
"""v0.33.0 has the interleave topics from upstream: the case files of v0.11.0's patches hold for its own implementation too."""
import inspect
import math

import pytest
import torch

from tests import oracle

pytestmark = [pytest.mark.base("v0.33.0")]


def local_lens(*args):
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    return get_dcp_local_seq_lens(*args)


@pytest.mark.cases("local_seq_lens")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_local_seq_lens_cases(case, dtype):
    seq_lens = torch.tensor(case["seq_lens"], dtype=dtype)
    everyone = local_lens(seq_lens, case["dcp"], None, case["interleave"])
    assert everyone.dtype == torch.int32 and everyone.tolist() == case["expected"]
    for rank in range(case["dcp"]):
        for name in (rank, torch.tensor([rank], dtype=torch.int32)):  # a number or a device tensor
            assert local_lens(seq_lens, case["dcp"], name, case["interleave"]).tolist() == [row[rank] for row in case["expected"]]


@pytest.mark.cases("causal_bounds")
def test_causal_bounds_cases(case):
    bounds = torch.arange(case["query"]) + case["context"] + 1
    for rank, expected in enumerate(case["expected_by_rank"]):
        assert local_lens(bounds, case["dcp"], rank, case["interleave"]).tolist() == expected


def plan(context_lens, chunk, world, interleave):
    """v0.33.0's chunks for prefills with these contexts, in a workspace of `chunk` rows."""
    from vllm.model_executor.layers.attention.mla_attention import build_mla_chunked_context_metadata

    starts = torch.arange(len(context_lens) + 1, dtype=torch.int32) * 2
    return build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor(context_lens, dtype=torch.int32), prefill_query_start_loc_cpu=starts,
        chunked_prefill_workspace=torch.empty(chunk + chunk // world, 1), chunked_prefill_workspace_size=chunk, block_size=interleave,
        align_chunk_to_block=True, device=torch.device("cpu"), dcp_world_size=world, dcp_local_block_size=interleave,
        dcp_virtual_block_size=interleave * world).chunks


def gather(chunk, context_lens, world, interleave):
    """All-gather the padded rows of the chunk from dealt-out shards, run the unpad step, and return (request, position) of each row."""
    from vllm.model_executor.layers.attention.mla_attention import reorg_kvcache

    requests = range(len(context_lens))[chunk.request_slice]
    names = [(r, p) for r in requests for p in range(context_lens[r])]
    rows = []
    for rank in range(world):
        for i, r in enumerate(requests):
            shard = oracle.deal(context_lens[r], world, interleave)[rank]
            here = shard[chunk.local_starts[i]:chunk.local_starts[i] + chunk.padded_local_seq_lens[i]]
            rows += [names.index((r, p)) for p in here] + [-1] * (chunk.padded_local_seq_lens[i] - len(here))
    gathered = torch.tensor(rows).view(-1, 1, 1)
    toks = chunk.num_local_context_tokens
    assert gathered.shape[0] == world * toks
    kv_c, k_pe = reorg_kvcache(gathered, gathered, chunk.padded_local_seq_lens, chunk.local_context_lens_allranks, chunk.local_starts,
                               chunk.num_context_tokens, chunk.max_seq_len, toks)
    assert torch.equal(kv_c, k_pe) and kv_c.min() >= 0
    return [names[i] for i in kv_c.flatten().tolist()]


@pytest.mark.cases("mla_context_chunks")
def test_context_chunk_cases(case):
    """Each request alone, since v0.33.0 packs requests of unequal length into chunks of its own."""
    world, interleave = case["dcp"], case["interleave"]
    for request, context in enumerate(case["context_lens"]):
        expected = [lens[request] for lens in case["real_lens_per_chunk_request_rank"] if any(lens[request])]
        chunks = plan([context], case["chunk"], world, interleave)
        assert len(chunks) == len(expected)
        start = 0
        for chunk, lens in zip(chunks, expected):
            positions = [p for _, p in gather(chunk, [context], world, interleave)]
            shards = oracle.deal(context, world, interleave)
            assert [sum(p in shard for p in positions) for shard in map(set, shards)] == lens
            assert sorted(positions) == list(range(start, start + sum(lens)))  # none lost, none twice
            start += sum(lens)
        assert start == context


@pytest.mark.cases("mla_context_chunks")
def test_context_chunks_of_a_whole_batch(case):
    contexts = case["context_lens"]
    chunks = plan(contexts, case["chunk"], case["dcp"], case["interleave"])
    rows = [row for chunk in chunks for row in gather(chunk, contexts, case["dcp"], case["interleave"])]
    assert sorted(rows) == [(r, p) for r, context in enumerate(contexts) for p in range(context)]


@pytest.mark.parametrize("prefills", range(1, 10))
def test_no_assertion_fires_for_any_number_of_prefills(prefills):
    """Workspace 65536, page 64, DCP 4, interleave 64: the trap for a chunk size of workspace // prefills rounded to pages."""
    contexts = [19_000 + 37 * i for i in range(prefills)]
    chunks = plan(contexts, 65536, 4, 64)
    covered = [0] * prefills
    for chunk in chunks:
        for r, length in zip(range(prefills)[chunk.request_slice], chunk.seq_lens.tolist()):
            covered[r] += length
        assert chunk.num_local_context_tokens <= 65536 // 4
    assert covered == contexts


@pytest.fixture
def interpretable_merge(monkeypatch):
    """The launcher counts the kernel's constexpr arguments by an attribute that Triton's interpreter does not have."""
    from vllm.triton_utils import tl
    from vllm.v1.attention.ops import dcp

    kernel = dcp._CORRECT_ATTN_CP_OUT_KERNEL.kernel
    if not hasattr(kernel, "constexprs"):
        annotations = [parameter.annotation for parameter in inspect.signature(kernel.fn).parameters.values()]
        monkeypatch.setattr(kernel, "constexprs", [i for i, a in enumerate(annotations) if a is tl.constexpr or a == "tl.constexpr"], raising=False)


def merge(outs, lses):
    from vllm.v1.attention.ops.dcp import CPTritonContext, correct_attn_out

    return sum(correct_attn_out(out.clone(), lses, rank, CPTritonContext())[0] for rank, out in enumerate(outs))


@pytest.mark.cases("lse_merge")
def test_lse_merge_cases(case, interpretable_merge):
    outs = torch.tensor([float(x) for x in case["outs"]]).view(-1, 1, 1, 1).expand(-1, 1, 1, 16)
    lses = torch.tensor([float(x) for x in case["lses"]]).view(-1, 1, 1)
    torch.testing.assert_close(merge(outs, lses), torch.full((1, 1, 16), case["expected"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("empty_lse", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("empty_out", [0.0, math.nan])
def test_merge_ignores_an_empty_shard(empty_lse, empty_out, interpretable_merge):
    outs = torch.tensor([2.0, empty_out, 3.0, empty_out]).view(4, 1, 1, 1).repeat(1, 1, 1, 16)
    lses = torch.tensor([0.5, empty_lse, -1.0, empty_lse]).view(4, 1, 1)
    weight = math.exp(0.5) / (math.exp(0.5) + math.exp(-1.0))
    torch.testing.assert_close(merge(outs, lses), torch.full((1, 1, 16), 2 * weight + 3 * (1 - weight)), rtol=1e-6, atol=0)
