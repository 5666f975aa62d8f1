# SPDX-License-Identifier: Apache-2.0
"""Which context rows a batch writes, the host's block tables, the order of a V1 batch, and where a step ends."""
from types import SimpleNamespace as NS

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import DeviceConfig, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.ops import ckv_prefetch, ckv_prefetch_torch
from vllm.v1.attention.ops.ckv_copy import CKVSegments
from vllm.v1.attention.ops.ckv_order import move_verifications_up
from vllm.v1.attention.ops.ckv_prefetch_plan import CKVLateTables, CKVPrefetchPlan, next_step
from vllm.v1.attention.ops.step_writes import HostBlockTable, rows_written_by_batch, share_host_block_tables
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(120)]

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------ what a step writes


def ranges_of(requests, world, block_size, shuffle=None):
    """`rows_written_by_batch` of [(block ids, computed, scheduled)], all of them readers."""
    order = np.arange(len(requests)) if shuffle is None else np.array(shuffle)
    width = max(len(blocks) for blocks, *_ in requests) + 1
    table = np.full((len(requests) + 1, width), 10_000, dtype=np.int32)
    counts = np.zeros(len(requests) + 1, dtype=np.int32)
    for row, (blocks, *_) in zip(order, requests):
        table[row, : len(blocks)], counts[row] = blocks, len(blocks)
    computed = np.array([c for _, c, _ in requests])
    ends = computed + np.array([n for *_, n in requests])
    readers = np.arange(len(requests))
    return rows_written_by_batch(HostBlockTable(table, counts, block_size), order, computed, ends, readers, computed, world).tolist()


@pytest.mark.cases("same_step_prefix")
def test_public_cases(case):
    requests = [(r["blocks"], r["computed"], r["scheduled"]) for r in case["requests"]]
    assert ranges_of(requests, case["dcp"], case["block_size"]) == case["expected_written_in_this_step"]
    shuffle = np.random.default_rng(0).permutation(len(requests))
    assert ranges_of(requests, case["dcp"], case["block_size"], shuffle) == case["expected_written_in_this_step"]


def brute_force(requests, tokens):
    """Place by place: (block, place in it) of every row that is written, looked up for every row of every context."""
    written = {(blocks[p // tokens], p % tokens) for blocks, computed, scheduled in requests for p in range(computed, computed + scheduled)}
    rows = [(r, p) for r, (blocks, computed, _) in enumerate(requests) for p in range(computed) if (blocks[p // tokens], p % tokens) in written]
    ranges = []
    for r, p in rows:
        if ranges and ranges[-1][0] == r and ranges[-1][2] == p:
            ranges[-1][2] = p + 1
        else:
            ranges.append([r, p, p + 1])
    return ranges


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_against_every_single_row(data):
    """Requests that found blocks of others, anywhere: in their own order or from several, whole blocks as vLLM hands them out."""
    world, block_size = data.draw(st.sampled_from([(1, 2), (2, 2), (2, 4), (4, 1)]))
    tokens = world * block_size
    fresh = iter(range(1, 1000))
    requests = []
    for _ in range(data.draw(st.integers(1, 5))):
        found = []
        for blocks, computed, scheduled in requests:
            # The blocks that are full once the step has run, for a request that comes later.
            full = blocks[: (computed + scheduled) // tokens]
            found += full[: data.draw(st.integers(0, len(full)))]
        context = len(found) * tokens
        own = data.draw(st.integers(0, 2 * tokens)) if not found else 0  # computed in earlier steps
        scheduled = data.draw(st.integers(1, 3 * tokens))
        new = -(-(own + scheduled) // tokens)
        requests.append(([*found, *(next(fresh) for _ in range(new))], context + own, scheduled))
    assert ranges_of(requests, world, block_size) == brute_force(requests, tokens)


def test_no_request_reads():
    table = HostBlockTable(np.ones((1, 1), np.int32), np.ones(1, np.int32), 4)
    none = np.zeros(0, dtype=np.int64)
    assert rows_written_by_batch(table, np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64), none, none, 2).tolist() == []


def test_blocks_that_do_not_exist_are_not_read():
    """Lookahead tokens may lie behind the last block: what stands there belongs to nobody."""
    table = HostBlockTable(np.array([[5, 7], [7, 8]], np.int32), np.array([1, 2]), 4)
    rows = rows_written_by_batch(table, np.array([0, 1]), np.array([3, 4]), np.array([6, 5]), np.array([1]), np.array([4]), 1)
    assert rows.tolist() == []


# ------------------------------------------------------------------------------------------------ host tables


@pytest.fixture
def no_uva(monkeypatch):
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


@pytest.mark.parametrize("gather, prefetch, world, exists", [("1", "1", 2, True), ("always", "1", 8, True), ("0", "1", 2, False), ("1", "0", 2, False), ("1", "1", 1, False)])
def test_host_tables_exist_where_something_looks_ahead(no_uva, monkeypatch, gather, prefetch, world, exists):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", gather)
    monkeypatch.setenv("VLLM_DCP_CKV_PREFETCH", prefetch)
    tables = BlockTables([64, 16], 4, 32, [8, 4], CPU, world)
    assert (tables.host_tables is not None) == exists
    if not exists:
        tables.append_block_ids(1, ([3], [4]), overwrite=True)  # as upstream
        return
    assert [table.block_size for table in tables.host_tables] == [64, 16]
    tables.append_block_ids(1, ([3, 9, 4], [7]), overwrite=True)
    tables.append_block_ids(2, ([5], []), overwrite=True)
    tables.append_block_ids(1, ([6], [8, 1]), overwrite=False)
    first, second = tables.host_tables
    assert (first.num_blocks[[1, 2]].tolist(), second.num_blocks[[1, 2]].tolist()) == ([4, 1], [3, 0])
    assert first.ids[1, :4].tolist() == [3, 9, 4, 6] and first.ids[2, :1].tolist() == [5] and second.ids[1, :3].tolist() == [7, 8, 1]
    tables.append_block_ids(1, ([2], [2]), overwrite=True)  # the row's next request
    assert first.num_blocks[1] == second.num_blocks[1] == 1 and first.ids[1, 0] == 2
    with pytest.raises(RuntimeError, match="exceeds row capacity"):
        tables.append_block_ids(1, (list(range(8)), [1]), overwrite=False)
    assert first.num_blocks[1] == 1
    tables.redirect_writes_to_null_block = True
    tables.append_block_ids(3, ([9], [9]), overwrite=True)
    assert first.ids[3, 0] == 0  # what the device has


def test_planners_get_the_table_of_their_group():
    planners = [NS(host_blocks=None) for _ in range(3)]
    groups = [[NS(metadata_builders=[NS(ckv_gather=planners[0]), NS(ckv_gather=planners[1])]), NS(metadata_builders=[NS(ckv_gather=None), NS()])], [NS(metadata_builders=[NS(ckv_gather=planners[2])])]]
    share_host_block_tables(groups, None)
    assert all(planner.host_blocks is None for planner in planners)
    tables = [HostBlockTable(np.zeros((1, 1), np.int32), np.zeros(1, np.int32), size) for size in (64, 16)]
    share_host_block_tables(groups, tables)
    assert [planner.host_blocks.block_size for planner in planners] == [64, 64, 16]


# ------------------------------------------------------------------------------------------------ order of a V1 batch


class Batch:
    """What move_verifications_up uses of an InputBatch. rows: (computed, prompt, scheduled)."""

    def __init__(self, rows):
        self.req_ids = [f"r{i}" for i in range(len(rows))]
        self.num_computed_tokens_cpu, self.num_prompt_tokens = (np.array([row[k] for row in rows] + [99]) for k in (0, 1))
        self.scheduled = NS(num_scheduled_tokens={name: row[2] for name, row in zip(self.req_ids, rows)})

    def swap_states(self, a, b):
        for column in (self.num_computed_tokens_cpu, self.num_prompt_tokens):
            column[[a, b]] = column[[b, a]]
        self.req_ids[a], self.req_ids[b] = self.req_ids[b], self.req_ids[a]


kinds = st.sampled_from([(50, 40, 1), (30, 40, 1), (50, 40, 4), (50, 40, 3), (30, 90, 20), (30, 90, 4), (0, 90, 60)])


@settings(max_examples=200, deadline=None)
@given(st.lists(kinds, min_size=1, max_size=9), st.sampled_from([1, 4]))
def test_verifications_lead_the_long_extends(rows, threshold):
    from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills

    batch = Batch(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DCP_CKV_GATHER", "1")
        reorder_batch_to_split_decodes_and_prefills(batch, batch.scheduled, threshold)
        regions = [region(batch, i, threshold) for i in range(len(rows))]
        move_verifications_up(batch, batch.scheduled, threshold, config(2))
    assert [region(batch, i, threshold) for i in range(len(rows))] == regions == sorted(regions)
    verifies = [batch.num_computed_tokens_cpu[i] >= batch.num_prompt_tokens[i] for i, r in enumerate(regions) if r == 2]
    assert verifies == sorted(verifies, reverse=True)
    assert sorted(batch.req_ids) == sorted(f"r{i}" for i in range(len(rows)))


def region(batch, i, threshold):
    """Upstream's: decode, short extend, long extend, first chunk."""
    computed, prompt, scheduled = batch.num_computed_tokens_cpu[i], batch.num_prompt_tokens[i], batch.scheduled.num_scheduled_tokens[batch.req_ids[i]]
    if computed == 0:
        return 3
    return 2 if scheduled > threshold else int(computed < prompt)


def config(world, drafts=3):
    return NS(speculative_config=NS(num_speculative_tokens=drafts) if drafts else None, parallel_config=NS(decode_context_parallel_size=world))


@pytest.mark.parametrize("flags, settings_, moves", [({}, (2,), False), ({"VLLM_DCP_CKV_GATHER": "1"}, (2,), True), ({"VLLM_B12X_MLA_CKV_GATHER": "1"}, (2,), True),
                                                     ({"VLLM_DCP_CKV_GATHER": "1"}, (1,), False), ({"VLLM_DCP_CKV_GATHER": "1"}, (2, 0), False)])  # fmt: skip
def test_order_is_upstreams_where_nothing_gathers(monkeypatch, flags, settings_, moves):
    for name in ("VLLM_DCP_CKV_GATHER", "VLLM_B12X_MLA_CKV_GATHER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    batch = Batch([(30, 90, 20), (50, 40, 4)])
    move_verifications_up(batch, batch.scheduled, 1, config(*settings_))
    assert batch.req_ids == (["r1", "r0"] if moves else ["r0", "r1"])


# ------------------------------------------------------------------------------------------------ where a step ends


class Lane:
    def __init__(self):
        self.heard = []
        ckv_prefetch.register_lane(self)

    def end_step(self):
        self.heard.append("end")

    def fail(self, error):
        self.heard.append(str(error))


def test_every_forward_pass_ends_the_step():
    """Both model runners, drafters and dummy runs go through `set_forward_context`."""
    lane, vllm_config = Lane(), VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_forward_context({}, vllm_config):
        assert lane.heard == []
        with set_forward_context(None, vllm_config):
            pass
    assert lane.heard == ["end"] * 2
    with pytest.raises(ValueError, match="boom"), set_forward_context({}, vllm_config):
        raise ValueError("boom")
    assert lane.heard[2:] == ["boom"]


RECORD, W, ROWS = 16, 2, 64


def prefetcher():
    buffers = [torch.zeros((W * ROWS, RECORD), dtype=torch.uint8) for _ in range(2)]
    return ckv_prefetch_torch.CKVPrefetcher(buffers, 64, NS(world_size=W), early=True)


class Layer:
    def __init__(self, index):
        self.layer_name, self.kv_cache = f"model.layers.{index}.attn", torch.full((2, 64, RECORD), index, dtype=torch.uint8)


def a_plan():
    """One rank's share of one request of 40 rows, 30 of them history, as the prefetcher reads it."""
    history, late = (CKVSegments(torch.tensor([row], dtype=torch.int32), row[3]) for row in ((0, 0, 0, 15), (0, 15, 0, 5)))
    scatter = CKVSegments(torch.tensor([[0, 0, 15, 5]], dtype=torch.int32), 5)
    return NS(prefetch=CKVPrefetchPlan(next_step(), CKVLateTables(history, late, scatter, 5)), dcp_world_size=W, dcp_rank=0, local_rows=20, gathered_rows=W * ROWS,
              block_table=torch.zeros((1, 1), dtype=torch.int32), own_share=lambda gathered: gathered[:ROWS])  # fmt: skip


def forward(lane, layers, plan, all_gather, gather_now=lambda *args: None):
    workspace = NS(gathered=None)
    with ckv_prefetch.ckv_step():
        for layer in layers:
            with lane.attending(layer):
                lane.begin(layer.kv_cache, plan, workspace, gather_now, all_gather)
                lane.complete()


def works(lane, layers):
    """Two steps, of which the second looks ahead at every layer but the first."""
    gathers = []
    forward(lane, layers, a_plan(), lambda *args: gathers.append("chunk or history"), lambda *args: gathers.append("all"))
    forward(lane, layers, a_plan(), lambda *args: gathers.append("chunk or history"), lambda *args: gathers.append("all"))
    return gathers == ["all"] * len(layers) + ["all"] + ["chunk or history"] * 2 * (len(layers) - 1)


@pytest.mark.parametrize("where", ["first gather", "late rows", "look-ahead", "attention"])
def test_after_an_error_the_lane_works_again(where):
    lane, layers = prefetcher(), [Layer(i) for i in range(3)]
    assert works(lane, layers)
    calls = []

    def fails(*args):
        calls.append(1)
        # In a step that looks ahead: the history of layer 1, then its late rows.
        if len(calls) == {"look-ahead": 1, "late rows": 2}.get(where):
            raise ValueError("in the gather")

    def gather_now(*args):
        if where == "first gather":
            raise ValueError("in the gather")

    if where == "attention":
        with pytest.raises(ValueError, match="in the layer"), ckv_prefetch.ckv_step(), lane.attending(layers[0]):
            lane.begin(layers[0].kv_cache, a_plan(), NS(gathered=None), gather_now, fails)
            raise ValueError("in the layer")
    else:
        with pytest.raises(ValueError, match="in the gather"):
            forward(lane, layers, a_plan(), fails, gather_now)
    assert works(lane, layers)


def test_an_error_that_stays_names_the_first():
    """A device that is gone: no later step says `a step begins before finish`, each names what came first."""
    lane, layers = prefetcher(), [Layer(i) for i in range(2)]

    def gone(event):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(ValueError, match="the first error"):
        forward(lane, layers, a_plan(), None, lambda *args: (_ for _ in ()).throw(ValueError("the first error")))
    lane.streams.synchronize = gone
    for _ in range(2):
        with pytest.raises(RuntimeError, match="earlier step failed with ValueError: the first error") as raised:
            forward(lane, layers, a_plan(), None)
        assert "illegal memory access" in str(raised.value.__cause__)


def test_a_layer_that_does_not_attend_leaves_nothing():
    """Its gather began before its indexer; the step ends without it."""
    lane, layers = prefetcher(), [Layer(i) for i in range(2)]
    with ckv_prefetch.ckv_step():
        lane.enter(layers[0])
        lane.begin(layers[0].kv_cache, a_plan(), NS(gathered=None), lambda *args: None, lambda *args: None)
    assert not lane.begun
    assert [lane.state.state_of(b) for b in (0, 1)] == [ckv_prefetch.BufferState.FREE] * 2
    assert works(lane, layers)
