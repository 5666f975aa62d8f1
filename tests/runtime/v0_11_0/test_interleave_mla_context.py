# SPDX-License-Identifier: Apache-2.0
"""Topic interleave-mla-context on v0.11.0: the plan of the MLA context chunks and the step that drops the padding."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.runtime.v0_11_0 import dealt, mla, unpatched

pytestmark = [pytest.mark.base("v0.11.0"), pytest.mark.usefixtures("unpinned")]

COMMON = "vllm.v1.attention.backends.mla.common"


def plan(builder, context_lens):
    """The chunked-context metadata of prefills with these contexts."""
    return builder.build(0, mla.common_metadata([2] * len(context_lens), context_lens)).prefill.chunked_context


def check_plan(chunks, context_lens, world, rank, interleave, workspace):
    """Every context row of every rank is read exactly once, all of a rank's rows of a chunk lie from `starts` on, and all fits."""
    owner, index = dealt.owner_and_index(world, interleave)
    done = np.zeros(len(context_lens), dtype=int)  # global: chunks are consecutive
    cumulated = np.asarray(chunks.cu_seq_lens)
    for i, toks in enumerate(chunks.seq_tot):
        padded, real = chunks.padded_local_chunk_seq_lens[i], chunks.local_chunk_seq_lens_allranks[i]
        for request, context in enumerate(context_lens):
            length = int(cumulated[i, request + 1] - cumulated[i, request])
            here = slice(done[request], done[request] + length)
            assert real[request] == np.bincount(owner[here], minlength=world).tolist()
            mine = index[here][owner[here] == rank]
            assert not len(mine) or mine[0] == chunks.starts[i, request]
            assert max(real[request]) == padded[request]
            # what the padding reads lies in blocks that the request has: rank 0 is never shorter than the others
            last = dealt.counts(world, interleave)[context][0]
            assert not padded[request] or chunks.starts[i, request] + padded[request] <= -(-last // interleave) * interleave
            done[request] += length
        assert toks == sum(padded) and toks <= workspace // world
        assert chunks.padded_local_cu_seq_lens[i].tolist() == [0, *np.cumsum(padded)]
        assert chunks.max_seq_lens[i] == max(sum(lens) for lens in real)
        assert chunks.cu_seq_lens_lst[i] == cumulated[i].tolist()
    assert done.tolist() == list(context_lens)
    for tensor in (chunks.cu_seq_lens, chunks.starts, chunks.padded_local_cu_seq_lens):  # what the kernels take
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


@pytest.mark.cases("mla_context_chunks")
def test_chunk_cases(case, set_dcp):
    world, contexts = case["dcp"], case["context_lens"]
    for rank in range(world):
        set_dcp(world, rank, COMMON)
        workspace = case["chunk"] * len(contexts)
        builder = mla.make_builder(mla.stand_in_config(world, case["interleave"]), cuda=False, workspace=workspace)
        chunks = plan(builder, contexts)
        assert chunks.local_chunk_seq_lens_allranks == case["real_lens_per_chunk_request_rank"]
        check_plan(chunks, contexts, world, rank, case["interleave"], workspace)


@pytest.mark.parametrize("prefills", range(1, 10))
def test_chunks_are_whole_pages_and_rounds_for_any_number_of_prefills(prefills, set_dcp):
    """The trap: 65536 // 3 rounded to pages of 64 is 21824, no multiple of 4 * 64."""
    contexts = [19_000 + 37 * i for i in range(prefills)]
    for rank in range(4):
        set_dcp(4, rank, COMMON)
        builder = mla.make_builder(mla.stand_in_config(4, 64, max_num_seqs=256))
        assert builder.chunked_prefill_workspace_size == 65536
        chunk = builder._get_dcp_context_chunk(prefills)
        assert chunk % 64 == 0 and chunk % (4 * 64) == 0 and 65536 // prefills - chunk < 256
        check_plan(plan(builder, contexts), contexts, 4, rank, 64, 65536)


@pytest.mark.parametrize("world, interleave, block_size", [(4, 64, 64), (8, 48, 48), (3, 2, 16), (8, 1, 1), (16, 128, 128)])
@pytest.mark.parametrize("cuda", [True, False])
def test_no_assertion_fires_with_more_prefills_than_chunks_fit(world, interleave, block_size, cuda, set_dcp):
    set_dcp(world, world - 1, COMMON)
    builder = mla.make_builder(mla.stand_in_config(world, interleave, block_size, max_num_seqs=700, max_model_len=1001), cuda=cuda)
    workspace = builder.chunked_prefill_workspace_size
    assert workspace % world == 0 and builder.chunked_prefill_workspace.shape[0] == workspace // world * (world + 1)
    for prefills in (1, 2, 127, 500, 700):
        contexts = [1 + (31 * i) % 400 for i in range(prefills)]
        check_plan(plan(builder, contexts), contexts, world, world - 1, interleave, workspace)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_plan_matches_dealt_out_tokens(data, set_dcp):
    """200 batches of up to 8 prefills with contexts of up to 20,000 tokens, in as many chunks as the workspace makes of them."""
    world = data.draw(st.integers(2, 16), "world")
    rank = data.draw(st.integers(0, world - 1), "rank")
    block_size = data.draw(st.sampled_from(dealt.BLOCK_SIZES), "block_size")
    interleave = data.draw(st.sampled_from(dealt.divisors(block_size)), "interleave")
    contexts = data.draw(st.lists(st.one_of(st.just(0), st.integers(0, 500), st.integers(0, dealt.MAX_LEN - 1)), min_size=1, max_size=8), "contexts")
    contexts[0] += not any(contexts)
    workspace = data.draw(st.integers(len(contexts), 6000), "rows per rank") * world
    set_dcp(world, rank, COMMON)
    builder = mla.make_builder(mla.stand_in_config(world, interleave, block_size, max_model_len=64), cuda=data.draw(st.booleans(), "cuda"))
    builder.chunked_prefill_workspace_size = workspace
    if max(contexts) / builder._get_dcp_context_chunk(sum(c > 0 for c in contexts)) > 500:  # too slow to plan in a test
        contexts = [min(c, 300) for c in contexts]
    check_plan(plan(builder, contexts), contexts, world, rank, interleave, workspace)


def test_context_counts_not_the_new_tokens(set_dcp):
    """A prefill that continues at token 100 gathers 100 tokens, whatever it adds; one without context gathers nothing."""
    set_dcp(2, 1, COMMON)
    builder = mla.make_builder(mla.stand_in_config(2, 64))
    common = mla.common_metadata([1, 50, 700], [500, 100, 0])
    chunks = builder.build(0, common).prefill.chunked_context
    assert chunks.local_chunk_seq_lens_allranks == [[oracle.local_lens(100, 2, 64), [0, 0]]] == [[[64, 36], [0, 0]]]
    assert chunks.padded_local_chunk_seq_lens == [[64, 0]]
    assert builder.build(0, mla.common_metadata([50, 700], [0, 0])).prefill.chunked_context is None


def test_without_dcp_the_plan_is_the_stock_one(set_dcp):
    set_dcp(1, 0, COMMON)
    chunks = plan(mla.make_builder(mla.stand_in_config(1, 1), workspace=64 * 6), [100, 300])
    assert chunks.padded_local_chunk_seq_lens is None and chunks.local_chunk_seq_lens_allranks is None
    assert chunks.starts.tolist() == [[0, 0], [192, 192]] and chunks.seq_tot == [292, 108]


def test_the_worked_example_of_the_unpad_step():
    from vllm.v1.attention.backends.mla.common import reorg_kvcache

    names = ["a0", "a1", "a4", "b0", "b1", "a2", "a3", "x", "b2", "x"]
    gathered = torch.arange(10).view(-1, 1, 1)
    rows, mirrored = reorg_kvcache(gathered, -gathered, [3, 2], [[3, 2], [2, 1]], 8, 5, 5)
    assert " ".join(names[i] for i in rows.flatten().tolist()) == "a0 a1 a4 a2 a3 b0 b1 b2"
    assert torch.equal(rows, -mirrored)
    assert [oracle.local_lens(length, 2, 2) for length in (5, 3)] == [[3, 2], [2, 1]]


@pytest.mark.parametrize("interleave", [1, 64])
def test_impl_and_builder_know_the_layout_from_init(interleave, set_dcp, monkeypatch):
    """Rank from the group, interleave from the config; in no place a number of its own."""
    from vllm.v1.attention.backends.mla import common
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl

    config = mla.stand_in_config(4, interleave)
    set_dcp(4, 2, COMMON, "vllm.distributed.parallel_state")
    monkeypatch.setattr(common, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(common, "flash_attn_varlen_func", lambda: None, raising=False)
    impl = TritonMLAImpl(2, 576, 1.0, 1, None, None, "auto", None, "decoder", None, q_lora_rank=None, kv_lora_rank=mla.LORA,
                         qk_nope_head_dim=mla.NOPE, qk_rope_head_dim=mla.ROPE, qk_head_dim=mla.NOPE + mla.ROPE, v_head_dim=mla.V_DIM,
                         kv_b_proj=SimpleNamespace())
    builder = mla.make_builder(config)
    for known in (impl, builder):
        assert known.dcp_rank == 2 and known.cp_kv_cache_interleave_size == interleave
    assert TritonMLABackend.supports_cp_kv_cache_interleave


def test_interleave_1_plans_and_unpads_as_the_unpatched_tree(monkeypatch, tmp_path):
    expected = unpatched.run_unpatched("context_chunks", tmp_path / "upstream.npz")
    if expected is None:
        pytest.skip("VLLM_STACK_UNPATCHED_TREE names no unpatched v0.11.0 tree")
    got = unpatched.context_chunks(unpatched.set_group_in(unpatched.GROUP_USERS["context_chunks"], monkeypatch.setattr), interleave=1)
    assert len(expected["worlds"]) == 1000 and got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype == expected[name].dtype and got[name].tobytes() == expected[name].tobytes(), name
