# SPDX-License-Identifier: Apache-2.0
"""Topic dcp-local-seq-lens on v0.11.0: the util, the runner's buffer, and what the MLA builder and the merge make of it."""
import math
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.runtime.v0_11_0 import dealt, mla, unpatched

pytestmark = [pytest.mark.base("v0.11.0")]

COMMON = "vllm.v1.attention.backends.mla.common"


def local_lens(*args, **kwargs):
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    return get_dcp_local_seq_lens(*args, **kwargs)


# --- the util ---


@pytest.mark.cases("local_seq_lens")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_local_seq_lens_cases(case, dtype):
    seq_lens = torch.tensor(case["seq_lens"], dtype=dtype)
    everyone = local_lens(seq_lens, case["dcp"], None, case["interleave"])
    assert everyone.dtype == torch.int32 and everyone.tolist() == case["expected"]
    for rank in range(case["dcp"]):
        mine = local_lens(seq_lens, case["dcp"], rank, case["interleave"])
        assert mine.dtype == torch.int32 and mine.tolist() == [row[rank] for row in case["expected"]]
    assert seq_lens.tolist() == case["seq_lens"]


@pytest.mark.cases("causal_bounds")
def test_causal_bounds_cases(case):
    bounds = torch.arange(case["query"]) + case["context"] + 1
    for rank, expected in enumerate(case["expected_by_rank"]):
        assert local_lens(bounds, case["dcp"], rank, case["interleave"]).tolist() == expected


def test_defaults_change_nothing():
    seq_lens = torch.tensor([0, 1, 77], dtype=torch.int32)
    assert local_lens(seq_lens).tolist() == [[0], [1], [77]]
    assert local_lens(seq_lens, dcp_rank=0).tolist() == [0, 1, 77]
    assert local_lens(seq_lens[:0], 4).shape == (0, 4)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(world=st.integers(1, 16), block_size=st.sampled_from(dealt.BLOCK_SIZES), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_local_seq_lens_match_dealt_out_tokens(world, block_size, seed, data):
    """300 batches of 64 lengths up to 20,000: 19,200 (world, interleave, length) cases, each on all ranks."""
    interleave = data.draw(st.sampled_from(dealt.divisors(block_size)), "interleave")
    lengths = np.random.default_rng(seed).integers(0, dealt.MAX_LEN + 1, 64)
    got = local_lens(torch.from_numpy(lengths), world, None, interleave)
    assert np.array_equal(got.numpy(), dealt.counts(world, interleave)[lengths])
    rank = data.draw(st.integers(0, world - 1), "rank")
    assert torch.equal(local_lens(torch.from_numpy(lengths), world, rank, interleave), got[:, rank])


# --- the runner's buffer ---


def fake_runner(world, rank, interleave, max_num_reqs=8):
    from vllm.v1.utils import CpuGpuBuffer

    def buffer():
        return CpuGpuBuffer(max_num_reqs, dtype=torch.int32, device=torch.device("cpu"), pin_memory=False)

    runner = SimpleNamespace(dcp_world_size=world, dcp_rank=rank, seq_lens=buffer(), dcp_local_seq_lens=buffer(),
                             parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave))
    runner.dcp_local_seq_lens.gpu = runner.dcp_local_seq_lens.gpu.clone()  # on a CPU, .to(device) is no copy
    return runner


@pytest.mark.parametrize("interleave", [1, 8, 64])
def test_runner_refills_one_buffer_and_clears_it_past_the_batch(gpu_model_runner, interleave):
    prepare = gpu_model_runner.GPUModelRunner._prepare_dcp_local_seq_lens
    runner = fake_runner(4, 2, interleave)
    pointers = set()
    for batch in ([1000, 70, 3, 129, 5000, 1, 64, 257], [129], [1, 999, 300]):
        runner.seq_lens.np[:len(batch)] = batch
        runner.seq_lens.np[len(batch):] = 0
        got = prepare(runner, len(batch))
        assert got.tolist() == [oracle.local_lens(length, 4, interleave)[2] for length in batch]
        assert runner.dcp_local_seq_lens.gpu[len(batch):].count_nonzero() == 0  # what a graph of 8 requests reads
        assert runner.seq_lens.np[:len(batch)].tolist() == batch
        pointers.add(got.data_ptr())
    assert len(pointers) == 1


def test_runner_without_dcp_has_no_local_lengths(gpu_model_runner):
    assert gpu_model_runner.GPUModelRunner._prepare_dcp_local_seq_lens(SimpleNamespace(dcp_world_size=1), 3) is None


# --- the metadata that carries them ---


def test_ubatches_carry_their_slice():
    from vllm.v1.attention.backends.utils import split_attn_metadata
    from vllm.v1.worker.ubatch_utils import UBatchSlice

    local = torch.arange(10, 14, dtype=torch.int32)
    common = mla.common_metadata([1, 1, 1, 1], [5, 6, 7, 8], dcp_local_seq_lens=local)
    first, second = split_attn_metadata([UBatchSlice(slice(0, 2), slice(0, 2)), UBatchSlice(slice(2, 4), slice(2, 4))], common)
    assert first.dcp_local_seq_lens.tolist() == [10, 11] and second.dcp_local_seq_lens.tolist() == [12, 13]
    assert first.dcp_local_seq_lens.data_ptr() == local.data_ptr()  # a view: captured graphs keep reading the buffer
    common.dcp_local_seq_lens = None
    assert [m.dcp_local_seq_lens for m in split_attn_metadata([UBatchSlice(slice(0, 4), slice(0, 4))], common)] == [None]


def test_a_split_request_gets_a_local_length_of_its_own(set_dcp):
    """The first half of a prefill may be one token long, and so a decode: it must not use the length of the whole."""
    from vllm.v1.attention.backends.utils import split_attn_metadata
    from vllm.v1.worker.ubatch_utils import UBatchSlice

    set_dcp(2, 0, COMMON)
    common = mla.common_metadata([1, 40], [9, 100], dcp_local_seq_lens=torch.tensor([8, 72], dtype=torch.int32))
    first, second = split_attn_metadata([UBatchSlice(slice(0, 2), slice(0, 2)), UBatchSlice(slice(1, 2), slice(2, 41))], common)
    assert first.seq_lens.tolist() == [10, 101]
    builder = mla.make_builder(mla.stand_in_config(2, 8))
    decode = builder.build(0, first).decode
    assert decode.seq_lens.tolist() == [oracle.local_lens(length, 2, 8)[0] for length in (10, 101)]
    assert second.dcp_local_seq_lens.tolist() == [72]


def test_decode_reads_the_runners_buffer(set_dcp, unpinned):
    set_dcp(4, 1, COMMON)
    local = torch.tensor([7, 8, 9], dtype=torch.int32)  # not a formula's values: they must be taken as they are
    common = mla.common_metadata([1, 1, 5], [100, 200, 300], dcp_local_seq_lens=local)
    metadata = mla.make_builder(mla.stand_in_config(4, 1)).build(0, common)
    assert metadata.decode.seq_lens.tolist() == [7, 8] and metadata.decode.seq_lens.data_ptr() == local.data_ptr()
    assert common.seq_lens.tolist() == [101, 201, 305]  # global lengths stay global


@pytest.mark.parametrize("interleave", [1, 8, 64])
def test_decode_without_the_runners_buffer_derives_it(interleave, set_dcp):
    set_dcp(4, 3, COMMON)
    common = mla.common_metadata([1, 1, 1], [0, 255, 1000])
    for _ in range(2):  # a second build of the same metadata must not localize twice
        metadata = mla.make_builder(mla.stand_in_config(4, interleave)).build(0, common)
        assert metadata.decode.seq_lens.tolist() == [oracle.local_lens(length, 4, interleave)[3] for length in (1, 256, 1001)]


@pytest.mark.parametrize("backend", ["cutlass_mla", "flashattn_mla", "flashmla", "triton_mla"])
def test_no_dcp_backend_has_lengths_of_its_own(backend):
    """The backends that do DCP decode with the lengths that the common builder hands them. Read, not imported: some need CUDA."""
    import vllm

    source = (pathlib.Path(vllm.__file__).parent / f"v1/attention/backends/mla/{backend}.py").read_text()
    assert "can_return_lse_for_decode: bool = True" in source
    assert "def build(" not in source and "dcp_world_size" not in source and "dcp_rank" not in source


def test_without_dcp_decode_reads_seq_lens_itself(set_dcp):
    set_dcp(1, 0, COMMON)
    common = mla.common_metadata([1, 1], [10, 20])
    assert mla.make_builder(mla.stand_in_config(1, 1)).build(0, common).decode.seq_lens.data_ptr() == common.seq_lens.data_ptr()


def test_interleave_1_decodes_as_the_unpatched_tree(monkeypatch, tmp_path):
    expected = unpatched.run_unpatched("decode_seq_lens", tmp_path / "upstream.npz")
    if expected is None:
        pytest.skip("VLLM_STACK_UNPATCHED_TREE names no unpatched v0.11.0 tree")
    got = unpatched.decode_seq_lens(unpatched.set_group_in(unpatched.GROUP_USERS["decode_seq_lens"], monkeypatch.setattr), interleave=1)
    assert len(expected["sizes"]) == 1000 and got.keys() == expected.keys()
    for name in set(expected) - {"local"}:
        assert np.array_equal(got[name], expected[name])
    # v0.11.0 computes L // world + (rank <= (L - 1) % world): one row too many on every rank when world divides L, a row that holds no
    # token of the request. That is not kept. All other lengths are the same.
    one_too_many = (expected["worlds"] > 1) & (expected["lengths"] % expected["worlds"] == 0)
    assert 100 < one_too_many.sum() < len(one_too_many) / 2
    assert got["local"].dtype == expected["local"].dtype and np.array_equal(got["local"], expected["local"] - one_too_many)
    assert got["local"].tolist() == [dealt.counts(world, 1)[length, rank] for world, rank, length in zip(got["worlds"], got["ranks"], got["lengths"])]


# --- the merge of partial outputs ---


def merge(outs, lses):
    """What cp_lse_ag_out_rs adds up: each rank's output [B, H, D], corrected by all LSEs [ranks, B, H]."""
    from vllm.attention.ops.common import CPTritonContext, correct_attn_out

    return sum(correct_attn_out(out.clone(), lses, rank, CPTritonContext())[0] for rank, out in enumerate(outs))


@pytest.mark.cases("lse_merge")
def test_lse_merge_cases(case):
    outs = torch.tensor([float(x) for x in case["outs"]]).view(-1, 1, 1, 1).expand(-1, 1, 1, 16)
    lses = torch.tensor([float(x) for x in case["lses"]]).view(-1, 1, 1)
    torch.testing.assert_close(merge(outs, lses), torch.full((1, 1, 16), case["expected"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("empty_lse", [-math.inf, math.inf, math.nan])  # what kernels report for an empty shard
@pytest.mark.parametrize("empty_out", [0.0, math.nan])
def test_merge_ignores_empty_shards(empty_lse, empty_out):
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(4, 3, 2, 8, generator=generator)
    lses = torch.randn(4, 3, 2, generator=generator) * 5
    weights = torch.softmax(lses.double(), dim=0)
    empty = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0]], dtype=torch.bool)  # [rank, request]
    weights = weights.masked_fill(empty[..., None], 0)
    weights = weights / weights.sum(0)
    expected = (outs.double() * weights[..., None]).sum(0)
    outs[empty], lses[empty] = empty_out, empty_lse
    torch.testing.assert_close(merge(outs, lses).double(), expected, rtol=1e-5, atol=1e-6)


def test_merge_of_nothing_is_zero():
    for garbage in (0.0, math.nan):
        assert merge(torch.full((2, 1, 1, 16), garbage), torch.full((2, 1, 1), -math.inf)).count_nonzero() == 0
