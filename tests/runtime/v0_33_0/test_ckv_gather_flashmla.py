# SPDX-License-Identifier: Apache-2.0
"""FlashMLA sparse under DCP: which head counts build, what the planner decides, and that flags off change nothing."""
import pathlib
import subprocess

import numpy as np
import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import flashmla_sparse
from vllm.v1.attention.ops import ckv_gather
from vllm.v1.attention.ops.ckv_plan import gathered_requests
from vllm.v1.attention.ops.dcp_cost import FLASHMLA_SM90, fp8_is_faster
from vllm.v1.worker import workspace

from tests.gpu._ckv_ranks import FLAGS, Batch, Rank, current_config, make_config, rows_of, use_torch_ops
from tests.oracle import deal

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(120)]


class Group:
    """A DCP group seen from one rank, without peers."""

    device_communicator = None
    device_group = None
    use_custom_op_call = False

    def __init__(self, rank, world):
        self.rank_in_group, self.world_size = rank, world


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for flag in FLAGS:
        monkeypatch.delenv(flag, raising=False)
    use_torch_ops()


def make_rank(monkeypatch, rank, world, flag_values=None, **config):
    """Real builder and impl of one rank; `config` as of `make_config`."""
    monkeypatch.setattr(parallel_state, "_DCP", Group(rank, world) if world > 1 else None)
    if world == 1:
        monkeypatch.setattr("vllm.model_executor.layers.attention.sparse_mla_attention.get_dcp_group", lambda: Group(0, 1))
    monkeypatch.setattr("vllm.v1.attention.ops.dcp.MLADCPManager.__init__", lambda self, **kwargs: None)
    monkeypatch.setattr("vllm.model_executor.layers.attention.sparse_mla_attention.get_tensor_model_parallel_world_size", lambda: world)
    return Rank(rank, world, "cpu", **config).build(**(flag_values or {}))


# ------------------------------------------------------------------------------------------------ flashmla-dcp-heads


@pytest.mark.parametrize(
    "heads, tp, dcp",
    [
        (128, 4, 2),  # DeepSeek-V3.2, 32 local heads: refused upstream
        (128, 4, 4),  # 32 local, 128 gathered: refused upstream
        (128, 8, 8),  # 16 local, 128 gathered: refused upstream
        (128, 8, 4),  # worked
        (64, 8, 8),  # GLM, worked
        (64, 2, 2),  # 32 local: refused upstream
        (128, 2, 2),  # 64 local: refused upstream
        (96, 4, 4),  # 24 local heads pad to 64, 96 gathered ones to 128: refused upstream
    ],
)
@pytest.mark.parametrize("gather", [0, 1])
def test_head_counts_that_build(monkeypatch, heads, tp, dcp, gather):
    rank = make_rank(monkeypatch, 0, dcp, dict(CKV_GATHER=gather), heads=heads, tp=tp)
    assert rank.builder.fp8_use_mixed_batch
    # The kernel pads to the gathered count.
    gathered = heads // tp * dcp
    seen = []
    monkeypatch.setattr(flashmla_sparse, "flash_mla_with_kvcache", lambda q, **kwargs: (seen.append(q.shape[2]), (q[..., :512], q[..., 0].transpose(1, 2)))[1])
    cache = torch.zeros((1, 64, 656), dtype=torch.uint8)
    out, lse = rank.impl._fp8_flash_mla_kernel(torch.zeros(1, 3, gathered, 576, dtype=torch.bfloat16), cache, torch.zeros(1, 3, 128, dtype=torch.int32), rank.builder._build_fp8_mixed_decode_prefill())
    assert seen == [64 if gathered <= 64 else 128]
    assert out.shape == (1, 3, gathered, 512) and lse.shape == (1, gathered, 3)


def test_more_gathered_heads_than_the_kernel_runs(monkeypatch):
    with pytest.raises(NotImplementedError, match="at most 128 heads; got 256"):
        make_rank(monkeypatch, 0, 4, heads=256)


def test_hisparse_stays_refused(monkeypatch):
    monkeypatch.setattr(parallel_state, "_DCP", Group(0, 2))
    rank = make_rank(monkeypatch, 0, 2)
    rank.config.attention_config.hisparse_config = object()
    spec = type("Spec", (), {"block_size": 64, "kv_quant_mode": None})
    with current_config(rank.config), pytest.raises(NotImplementedError, match="not with HiSparse"):
        flashmla_sparse.FlashMLASparseMetadataBuilder(spec, ["layer"], rank.config, torch.device("cpu"))


@pytest.mark.parametrize("heads, mixed", [(16, True), (31, True), (32, False), (128, False)])
def test_without_dcp_the_head_count_still_decides(monkeypatch, heads, mixed):
    rank = make_rank(monkeypatch, 0, 1, heads=heads)
    assert rank.builder.fp8_use_mixed_batch is mixed


# ------------------------------------------------------------------------------------------------ planner


def planned(rank, batch, **more):
    common = batch.common(rank)
    for name, value in more.items():
        setattr(common, name, value)
    return rank.builder.build(0, common)


@pytest.mark.parametrize("interleave", [1, 16])
def test_plan_of_a_mixed_batch(monkeypatch, interleave):
    batch = Batch([(40, 1), (129, 1), (0, 12), (64, 10)], num_decodes=2, heads=16)
    rank = make_rank(monkeypatch, 1, 4, dict(CKV_GATHER="always"), interleave=interleave)
    rank.builder.reorder_batch_threshold = 1
    rank.load(batch)
    plan = planned(rank, batch).ckv_gather
    assert plan.rows == slice(2, 24) and plan.num_exchange_tokens == 2 and plan.num_reqs == 2
    assert plan.req_ids.tolist() == [0] * 12 + [1] * 10
    # Global bounds, for every row.
    assert plan.causal_lens.tolist() == list(range(1, 13)) + list(range(65, 75)) == batch.causal[2:]
    dealt = [[len(shard) for shard in deal(length, 4, interleave)] for length in (12, 74)]
    assert plan.rank_req_starts.tolist() == [[0, dealt[0][r]] for r in range(4)]
    assert plan.local_cu_seq_lens.tolist() == [0, dealt[0][1], dealt[0][1] + dealt[1][1]]
    assert plan.local_rows == sum(lens[1] for lens in dealt) == len(rows_of(12, 1, 4, interleave)) + len(rows_of(74, 1, 4, interleave))
    assert plan.padded_total == 64
    assert plan.block_table.equal(rank.block_table[2:])
    assert plan.page_table[0, :4].tolist() == [0, 1, 2, 3] and plan.page_starts.tolist() == [0]
    assert all(t.dtype == torch.int32 for t in (plan.req_ids, plan.causal_lens, plan.rank_req_starts, plan.local_cu_seq_lens, plan.page_table, plan.page_starts))


@pytest.fixture
def rank(monkeypatch):
    rank = make_rank(monkeypatch, 0, 2, dict(CKV_GATHER="always", CKV_GATHER_MAX_TOKENS=300), max_num_seqs=8)
    rank.builder.reorder_batch_threshold = 1
    return rank


def load(rank, requests, **kwargs):
    batch = Batch(requests, heads=16, **kwargs)
    rank.load(batch)
    return batch


@pytest.mark.parametrize(
    "requests, num_decodes, gathers",
    [
        ([(0, 15)], 0, False),
        ([(0, 16)], 0, False),
        ([(0, 17)], 0, True),
        ([(0, 16), (0, 16)], 0, True),
        ([(9, 1), (8, 1)], 2, False),
        ([(9, 1), (8, 1), (0, 16)], 2, False),  # decode rows do not count
        ([(9, 1), (8, 1), (0, 17)], 2, True),
        ([(283, 17)], 0, True),
        ([(284, 17)], 0, False),  # above MAX
        ([(283, 1), (283, 17)], 1, True),  # the context of decodes does not count
    ],
)
def test_builder_decides(rank, requests, num_decodes, gathers):
    batch = load(rank, requests, num_decodes=num_decodes)
    assert (planned(rank, batch).ckv_gather is not None) is gathers


def verifying_rank(monkeypatch, interleave, drafts):
    speculative = type("S", (), {"num_speculative_tokens": drafts, "parallel_drafting": False}) if drafts else None
    return make_rank(monkeypatch, 0, 2, dict(CKV_GATHER="always"), interleave=interleave, max_model_len=1 << 17, max_tokens=8192, speculative_config=speculative)


@pytest.mark.cases("verify_rows")
def test_only_what_prefills_gathers(monkeypatch, case):
    """Through the real builder, whatever its split calls a decode."""
    rank = verifying_rank(monkeypatch, case["interleave"], case["drafts"])
    rows = case["rows"]
    queries, lens = (torch.tensor(x, dtype=torch.int32) for x in zip(*[(row["query"], row["context"] + row["query"]) for row in rows]))
    plan = rank.builder.build(0, lengths_only(queries, lens, [row["prefilling"] for row in rows])).ckv_gather
    expected = case["expected_gathered_requests"]
    if sum(rows[r]["query"] for r in expected) <= 16:  # MIN
        assert plan is None
        return
    first, last = expected[0], expected[-1]
    assert expected == list(range(first, last + 1)) and last == len(rows) - 1
    start = int(queries[:first].sum())
    assert (plan.num_reqs, plan.num_exchange_tokens, plan.rows) == (len(expected), start, slice(start, int(queries.sum())))
    assert plan.req_ids.unique().tolist() == list(range(len(expected)))
    gathered = sum(rows[r]["context"] + rows[r]["query"] for r in expected)
    assert gathered <= plan.gathered_rows <= gathered + 2 * (64 + 64 * len(expected)), "the contexts of verifying requests are not gathered"


def lengths_only(queries, lens, prefilling):
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), queries.cumsum(0, dtype=torch.int32)])
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(lens), num_actual_tokens=int(starts[-1]), max_query_len=int(queries.max()),
        max_seq_len=int(lens.max()), block_table_tensor=torch.zeros((len(lens), 4), dtype=torch.int32), slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=torch.tensor(prefilling), seq_lens_cpu_upper_bound=lens,
    )  # fmt: skip


@pytest.mark.parametrize(
    "queries, prefilling, decode_query_len, expected",
    [
        ([4, 4, 30, 20], [0, 0, 1, 1], 4, (2, 4)),
        ([4, 30, 4, 20], [0, 1, 0, 1], 4, (3, 4)),  # a chunk among the verifications keeps their path
        ([30, 4], [1, 0], 4, (2, 2)),
        ([30, 20], [0, 0], 4, (0, 2)),  # no verification is as long: recomputed tokens
        ([1, 30, 0, 0], [0, 1, 0, 0], 1, (1, 2)),  # padding
        ([1, 30, 0, 0], [0, 1], 1, (1, 2)),  # padded beyond `is_prefilling`
        ([1, 1], [0, 0], 1, (2, 2)),
        ([0, 0], [0, 0], 1, (0, 0)),
        ([1, 1, 30], [0, 1, 1], 1, (1, 3)),  # the last token of a prompt is a chunk, too
    ],
)
def test_gathered_requests(queries, prefilling, decode_query_len, expected):
    first, last = gathered_requests(np.array(queries), np.array(prefilling, dtype=bool), decode_query_len)
    assert (first, last) == expected or first == last and expected[0] == expected[1]


def test_recomputed_requests_gather(rank):
    """After a preemption, generated tokens are computed again in long queries, and `is_prefilling` is false."""
    batch = load(rank, [(50, 30)], prefilling=[False])
    assert planned(rank, batch).ckv_gather is not None


def test_capture_does_not_gather(rank):
    batch = load(rank, [(0, 20)])
    assert rank.builder.build_for_cudagraph_capture(batch.common(rank)).ckv_gather is None
    assert planned(rank, batch).ckv_gather is not None


def test_dense_mha_does_not_gather(rank):
    """Upstream takes short prefills through dense MHA; the layer asserts that both cannot be."""
    batch = load(rank, [(0, 20)])
    common = batch.common(rank)
    metadata = rank.builder.build(0, common)
    metadata.prefill = type("Prefill", (), {"use_dense_mha": True})
    assert rank.builder.ckv_gather.plan(common, metadata) is None


def test_no_host_lengths_is_an_error(rank):
    batch = load(rank, [(0, 20)])
    with pytest.raises(RuntimeError, match="seq_lens_cpu_upper_bound"):
        planned(rank, batch, seq_lens_cpu_upper_bound=None)


def test_device_lengths_bound_the_rows(rank):
    """Asynchronous scheduling: host lengths are upper bounds. The layout uses them on all ranks, the rows the true ones."""
    batch = load(rank, [(50, 20)])
    metadata = planned(rank, batch, seq_lens_cpu_upper_bound=torch.tensor([75], dtype=torch.int32))
    assert metadata.ckv_gather.causal_lens.tolist() == list(range(51, 71))
    assert metadata.ckv_gather.local_cu_seq_lens.tolist() == [0, 38]


def test_padding_requests_and_rows(rank):
    """Rows behind the last query belong to request 0, padding requests have no query and stale lengths."""
    batch = load(rank, [(30, 1), (0, 20), (0, 0)], num_decodes=1)
    rank.block_table = torch.cat([rank.block_table, rank.block_table[:1]])[:3]
    lens = torch.tensor([31, 20, 999], dtype=torch.int32)
    metadata = planned(rank, batch, num_actual_tokens=24, seq_lens_cpu_upper_bound=lens, seq_lens=lens)
    plan = metadata.ckv_gather
    assert plan.rows == slice(1, 24)
    assert plan.local_cu_seq_lens.tolist() == [0, 10] and plan.padded_total == 64
    assert plan.req_ids.tolist() == [0] * 20 + [-1] * 3
    assert plan.causal_lens.tolist()[:20] == list(range(1, 21)) and max(plan.causal_lens.tolist()) <= 20


def test_cache_of_another_record_size(rank):
    batch = load(rank, [(0, 20)])
    plan = planned(rank, batch).ckv_gather
    with pytest.raises(ValueError, match="352 bytes.*656"):
        ckv_gather.gather_ckv(torch.zeros((2, 64, 352), dtype=torch.uint8), plan, rank.impl.ckv_workspace, Group(0, 2))


def test_local_records_are_raw_and_the_padding_zero(rank, monkeypatch):
    """What leaves a rank: the bytes of its cache, in request order, and zeros; poisoned before."""
    batch = load(rank, [(0, 20), (5, 30)])
    plan = planned(rank, batch).ckv_gather
    rank.poison()
    sent = []
    monkeypatch.setattr(ckv_gather, "all_gather_bytes", lambda gathered, local, group: sent.append(local.clone()))
    ckv_gather.gather_ckv(rank.cache, plan, rank.impl.ckv_workspace, Group(0, 2))
    rows = sent[0].view(plan.padded_total, 656)
    expected = torch.cat([rank.records[r][torch.from_numpy(rows_of(n, 0, 2, 1))] for r, n in enumerate((20, 35))])
    assert rows[: plan.local_rows].equal(expected) and len(expected) == plan.local_rows
    assert not rows[plan.local_rows :].any()


# ------------------------------------------------------------------------------------------------ off


def arena_specs(rank):
    return rank.impl.workspace_specs


def test_flags_off_reserves_and_plans_nothing(monkeypatch):
    rank = make_rank(monkeypatch, 0, 2)
    assert rank.impl.ckv_gather is None and rank.builder.ckv_gather is None
    assert not hasattr(rank.impl, "ckv_workspace")
    # Upstream's five scratch areas and no other.
    assert [dtype for _, dtype in arena_specs(rank)] == [torch.bfloat16] * 5
    assert arena_specs(rank)[1][0] == (4096 * 5, 576)
    assert not any(workspace.current_workspace_manager()._persistent_resources)
    batch = load(rank, [(0, 20)])
    assert planned(rank, batch).ckv_gather is None
    assert rank.builder.build_for_cudagraph_capture(batch.common(rank)).ckv_gather is None


def test_flags_on_keeps_upstreams_scratch_in_place(monkeypatch):
    """Upstream unpacks the specs from both ends: ours lie between."""
    off, on = (make_rank(monkeypatch, 0, 2, dict(CKV_GATHER=flag)) for flag in (0, 1))
    before, after = arena_specs(off), arena_specs(on)
    assert after[0] == before[0] and after[-3:] == before[-3:]
    rows = max(before[1][0][0], on.impl.ckv_gather.gathered_rows)
    assert after[1:-3] == [((rows, 576), torch.bfloat16), ((512, 128), torch.int32), ((512,), torch.int32)]


@pytest.mark.parametrize("path", ["vllm/model_executor/layers/attention/mla_attention.py", "vllm/models/deepseek_v32/attention.py"])
def test_hooks_only_add_lines(path):
    """Off, the layers run upstream's lines: the topic's change to them is additions alone, behind a plan that is not there."""
    patch = pathlib.Path(__file__).parents[3] / "patches" / "v0.33.0" / "ckv-gather.patch"
    shown = subprocess.run(["git", "apply", "--numstat", f"--include={path}", str(patch)], capture_output=True, text=True, check=True).stdout
    added, removed, _ = shown.split()
    assert int(removed) == 0 and 0 < int(added) < 20


def test_kernel_choice():
    assert not fp8_is_faster(FLASHMLA_SM90, 8192, 16, 524288)  # a full chunk
    assert fp8_is_faster(FLASHMLA_SM90, 17, 16, 524288)  # few rows: the upconvert would dominate


def test_make_config_is_complete():
    """The stand-in configuration names what upstream reads; a new attribute there shows here first."""
    assert make_config(2).parallel_config.use_ubatching is False
    assert np.array_equal(rows_of(5, 1, 2, 2), [2, 3])


# ------------------------------------------------------------------------------------------------ top-k compaction


def test_compaction_changes_the_walk_alone(monkeypatch):
    """The layer's call with valid ids in front and their counts: the same rows, empty ones too, and metadata for exactly these counts."""
    rank = make_rank(monkeypatch, 1, 2, heads=16, topk=128)
    batch = load(rank, [(300, 1), (0, 1), (77, 3)], num_decodes=1)
    metadata = rank.builder.build(0, batch.common(rank))
    q = torch.randn(batch.num_tokens, 16, 576).to(torch.bfloat16)
    rank.impl.need_to_return_lse_for_decode = True
    asked = []

    def narrowed(kernel_metadata, queries, kv, topk, counts):
        asked.append((tuple(queries.shape), kv.shape[1], topk, counts.tolist()))
        return kernel_metadata

    monkeypatch.setattr(rank.impl, "narrowed_metadata", narrowed, raising=False)
    results = {}
    for compact in (False, True):
        rank.impl.compact_topk = compact
        results[compact] = rank.impl._forward_fp8_kv_mixed_batch(q, rank.cache, batch.ids, metadata)
    (out, lse), (narrow, narrow_lse) = results[False], results[True]
    assert torch.allclose(out.float(), narrow.float(), atol=1e-2) and torch.allclose(lse, narrow_lse, atol=1e-5)
    held = [sum(int(i) >= 0 and int(i) % 2 == 1 for i in row) for row in batch.ids]  # interleave 1: rank 1 has odd positions
    assert asked == [((batch.num_tokens, 16, 576), 64, 128, held)]
    empty = torch.tensor(held) == 0
    assert empty.any() and not narrow[empty].any() and lse[empty].isneginf().all() and narrow_lse[empty].isneginf().all()


def test_compaction_needs_its_kernel(monkeypatch):
    """The flag alone is not enough: an SM90 GPU, its cache format, DCP without PCP."""
    from types import SimpleNamespace as NS

    from vllm.v1.attention.backends.mla import flashmla_topk_compaction as module

    def may(flag="1", dcp=2, pcp=1, cache="fp8_ds_mla", sm90=True):
        monkeypatch.setenv("VLLM_DCP_COMPACT_TOPK", flag)
        monkeypatch.setattr(module, "current_platform", NS(is_device_capability_family=lambda family: family == 90 and sm90))
        return module.may_compact_topk(NS(decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp), cache)

    assert may()
    assert not any((may(flag="0"), may(dcp=1), may(pcp=2), may(cache="nvfp4_ds_mla"), may(sm90=False)))
