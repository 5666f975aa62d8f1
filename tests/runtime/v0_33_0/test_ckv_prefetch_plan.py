# SPDX-License-Identifier: Apache-2.0
"""What the CKV prefetch copies where, when it looks ahead, when it is off, and what it reserves."""
import ast
import importlib.util
import inspect
import logging
import pathlib
from types import SimpleNamespace as NS

import numpy as np
import pytest
import torch
import vllm.envs as envs
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import logger as vllm_logger
from vllm.config import KVTransferConfig
from vllm.distributed.copy_engines import GatherMemory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.attention.ops import ckv_config, ckv_gather, ckv_prefetch, ckv_prefetch_plan
from vllm.v1.attention.ops.ckv_config import CONNECTORS_NOT_LAYERWISE, CKVGatherConfig, ckv_prefetch_enabled, ckv_prefetch_refusal
from vllm.v1.attention.ops.ckv_copy import CKVSegments, copy_ckv_segments
from vllm.v1.attention.ops.ckv_gather import reserve_ckv_gather_workspace
from vllm.v1.attention.ops.ckv_layout import ckv_layout
from vllm.v1.attention.ops.ckv_plan import CKVGatherPlanner
from vllm.v1.attention.ops.ckv_prefetch_plan import ckv_late_segments, split_history
from vllm.v1.attention.ops.step_writes import HostBlockTable
from vllm.v1.worker import utils, workspace

from tests.gpu._ckv_ranks import make_config
from tests.oracle import deal

# Forked: threads that torch starts here must not be missing in tests that fork later.
pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(120)]


# ------------------------------------------------------------------------------------------------ segments


def follow_segments(contexts, queries, written, world, interleave, align=4):
    """Do on lists what the prefetch does on memory. A record is (request, position). `written`: (request, first, end) of contexts.

    Returns the gathered buffer of rank 0 after history and late rows, the late records, and what the buffer must be.
    """
    lens = [c + q for c, q in zip(contexts, queries)]
    late = {(r, t) for r, (c, n) in enumerate(zip(contexts, lens)) for t in range(c, n)} | {(r, t) for r, first, end in written for t in range(first, end)}
    layout = ckv_layout(np.array(lens), world, interleave, align)
    ranges = split_history(np.array(contexts), np.array(lens), np.array(written, dtype=np.int64).reshape(-1, 3))
    caches = [[[(r, t) for t in deal(n, world, interleave)[rank]] for r, n in enumerate(lens)] for rank in range(world)]
    padded = layout.padded_total
    gathered = [None] * (world * padded)
    packed = []
    for rank in range(world):
        (ahead, pack, scatter), rows = ckv_late_segments(layout, *ranges, rank)
        for table in (ahead, pack, scatter):
            assert table.dtype == np.int32 and table.shape[1] == 4 and (table[:, 3] > 0).all()
        for request, position, row, count in ahead:
            for i in range(count):
                record = caches[rank][request][position + i]
                assert record not in late, "a row of this step is no history"
                gathered[rank * padded + row + i] = record
        mine = ["stale"] * rows
        for request, position, row, count in pack:
            for i in range(count):
                assert mine[row + i] == "stale"
                mine[row + i] = caches[rank][request][position + i]
        packed += mine
    scattered = []
    for request, position, row, count in scatter:
        assert request == 0
        for i in range(count):
            assert gathered[row + i] is None, "late rows overwrite history"
            gathered[row + i] = packed[position + i]
            scattered.append(packed[position + i])
    assert set(scattered) == late and len(scattered) == len(late)
    expected = []
    for rank in range(world):
        share = [record for request in caches[rank] for record in request]
        expected += share + [None] * (padded - len(share))
    return gathered, scattered, expected


requests = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(requests, st.integers(1, 8), st.sampled_from([1, 2, 3, 16, 64]), st.data())
def test_history_and_late_rows_make_the_batch(requests, world, interleave, data):
    """Ranges that this step writes anywhere in the contexts: in the middle of a unit, up to the chunk, several in one context."""
    contexts, queries = zip(*requests)
    written = []
    for request, context in enumerate(contexts):
        bounds = sorted(data.draw(st.sets(st.integers(0, context), max_size=6)))
        written += [(request, first, end) for first, end in zip(bounds[::2], bounds[1::2])]
    gathered, _, expected = follow_segments(contexts, queries, written, world, interleave)
    assert gathered == expected


@pytest.mark.cases("chunk_positions")
@pytest.mark.parametrize("world, interleave", [(1, 1), (2, 1), (2, 4), (4, 16)])
def test_positions_of_case(case, world, interleave):
    starts, lens = case["query_start_loc"], case["seq_lens"]
    queries = [b - a for a, b in zip(starts, starts[1:])]
    contexts = [n - q for n, q in zip(lens, queries)]
    gathered, scattered, expected = follow_segments(contexts, queries, [], world, interleave)
    assert gathered == expected
    # The case lists positions in batch order: request by request.
    assert [position for _, position in sorted(scattered)] == case["expected_positions"]


def test_ranges():
    early, late = split_history(np.array([10, 0, 7]), np.array([12, 3, 7]), np.array([(0, 2, 5), (0, 8, 10), (2, 0, 7)]))
    assert early.tolist() == [[0, 0, 2], [0, 5, 8]]
    assert late.tolist() == [[0, 2, 5], [0, 8, 10], [0, 10, 12], [1, 0, 3], [2, 0, 7]]


# ------------------------------------------------------------------------------------------------ copy


@pytest.mark.parametrize("record, page", [(656, 64), (352, 64), (656, 16), (12, 4), (13, 4)])
def test_copy(record, page):
    """Records of 8-byte words, 4-byte words and single bytes; a cache whose blocks lie apart; offsets inside pages."""
    rng = np.random.default_rng(record)
    blocks = torch.from_numpy(rng.integers(0, 256, (9, 2 * page, record), dtype=np.uint8))[:, page:]
    table = torch.from_numpy(rng.permutation(9)[:8].reshape(2, 4).astype(np.int32))
    runs = [(0, 3, 5, 2 * page), (1, page - 1, 40 + 2 * page, 2), (1, 0, 0, 5), (0, 4 * page - 1, 5 + 2 * page, 1), (0, 0, 9, 0)]
    out = torch.zeros((60 + 2 * page, record), dtype=torch.uint8)
    copy_ckv_segments(blocks, table, CKVSegments(torch.tensor(runs, dtype=torch.int32), 2 * page), out)
    expected = torch.zeros_like(out)
    for request, position, row, count in runs:
        for i in range(count):
            at = position + i
            expected[row + i] = blocks[table[request, at // page], at % page]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("count", [511, 512, 513, 1200])
def test_copy_of_long_runs(count):
    """More rows than the programs of a run copy at once, beside a short run."""
    rng = np.random.default_rng(count)
    blocks = torch.from_numpy(rng.integers(0, 256, (40, 32, 16), dtype=np.uint8))
    table = torch.from_numpy(rng.permutation(40).reshape(1, 40).astype(np.int32))
    out = torch.zeros((1300, 16), dtype=torch.uint8)
    copy_ckv_segments(blocks, table, CKVSegments(torch.tensor([(0, 7, 50, count), (0, 0, 1, 3)], dtype=torch.int32), count), out)
    rows = blocks[table[0].long()].view(-1, 16)
    expected = torch.zeros_like(out)
    expected[50 : 50 + count], expected[1:4] = rows[7 : 7 + count], rows[:3]
    assert torch.equal(out, expected)


def test_copy_of_nothing():
    out = torch.full((4, 16), 7, dtype=torch.uint8)
    cache, table = torch.zeros((1, 4, 16), dtype=torch.uint8), torch.zeros((1, 1), dtype=torch.int32)
    for runs in (torch.zeros((0, 4), dtype=torch.int32), torch.zeros((1, 4), dtype=torch.int32)):
        copy_ckv_segments(cache, table, CKVSegments(runs, 0), out)
    assert (out == 7).all()


def test_copy_refuses():
    cache, table, out = torch.zeros((2, 4, 16), dtype=torch.uint8), torch.zeros((1, 2), dtype=torch.int32), torch.zeros((4, 16), dtype=torch.uint8)
    segments = CKVSegments(torch.zeros((1, 4), dtype=torch.int32), 1)
    with pytest.raises(TypeError, match="uint8"):
        copy_ckv_segments(cache.float(), table, segments, out)
    with pytest.raises(TypeError, match="int32"):
        copy_ckv_segments(cache, table.long(), segments, out)
    for bad in (out[:, :8], torch.zeros((4, 32), dtype=torch.uint8)[:, ::2]):
        with pytest.raises(ValueError, match="contiguous rows of 16 bytes"):
            copy_ckv_segments(cache, table, segments, bad)
    with pytest.raises(ValueError, match="records of a block"):
        copy_ckv_segments(torch.zeros((2, 8, 16), dtype=torch.uint8)[:, ::2], table, segments, out)


# ------------------------------------------------------------------------------------------------ when it looks ahead


def config(prefetch=True, **changes):
    values = dict(dcp_world_size=2, dcp_rank=0, interleave=1, min_tokens=0, max_tokens=100_000, max_num_seqs=4, max_num_batched_tokens=8192,
                  record_bytes=656, decode_query_len=1, local_heads=16, link_gbps=220, always=True, prefetch=prefetch)  # fmt: skip
    return CKVGatherConfig(**(values | changes))


def plan(rows, prefilling=None, tables=True, shared=None, **changes):
    """The prefetch of a batch. rows: (context, query) of each request. tables: the planner has host block tables, with blocks of its own
    for each request, but the first `shared[1]` blocks of request `shared[0]`, which are request 0's."""
    queries = torch.tensor([q for _, q in rows], dtype=torch.int32)
    lens = torch.tensor([c + q for c, q in rows], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), queries.cumsum(0, dtype=torch.int32)])
    common = NS(query_start_loc_cpu=starts, query_start_loc=starts, seq_lens_cpu_upper_bound=lens, seq_lens=lens, num_actual_tokens=int(starts[-1]), req_idx=None,
                is_prefilling=None if prefilling is None else torch.tensor(prefilling), block_table_tensor=torch.zeros((len(rows), 4), dtype=torch.int32))  # fmt: skip
    metadata = NS(prefill=None, req_id_per_token=torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), queries))
    planner = CKVGatherPlanner(config(**changes), torch.device("cpu"))
    if tables:
        ids = np.arange(1, 1 + len(rows) * 100, dtype=np.int32).reshape(-1, 100)
        if shared is not None:
            ids[shared[0], : shared[1]] = ids[0, : shared[1]]
        planner.host_blocks = HostBlockTable(ids, np.full(len(rows), 100), 64)
    planned = planner.plan(common, metadata)
    assert planned is not None
    return planned.prefetch


MANY = ckv_prefetch_plan.CKV_PREFETCH_MIN_HISTORY


@pytest.mark.parametrize(
    "rows, kwargs, ahead",
    [
        ([(0, 8192)], {}, False),
        ([(MANY - 1, 100)], {}, False),
        ([(MANY, 100)], {}, True),
        ([(MANY // 2, 100), (MANY // 2, 5)], {}, True),
        ([(0, 100), (MANY, 5)], {}, True),
        # Nobody says what this step writes.
        ([(MANY, 100)], dict(tables=False), False),
        # The history of decodes, which keep the exchange path, does not count.
        ([(MANY, 1), (0, 100)], {}, False),
        # Drafts being verified make host lengths upper bounds; what prefills has exact ones.
        ([(MANY, 100)], dict(decode_query_len=4), True),
        ([(50, 4), (MANY, 100)], dict(decode_query_len=4, prefilling=[False, True]), True),
        ([(MANY, 4), (50, 100)], dict(decode_query_len=4, prefilling=[False, True]), False),
        ([(MANY, 100), (0, 0)], dict(decode_query_len=4, prefilling=[True, False]), True),
        # Request 1 has found blocks of 128 tokens that request 0 fills in this step: they are no history.
        ([(0, MANY), (MANY, 100)], dict(shared=(1, MANY // 128)), False),
        ([(128, MANY), (MANY + 128, 100)], dict(shared=(1, MANY // 128)), False),
        ([(0, MANY), (MANY + 128, 100)], dict(shared=(1, 1)), True),
        # A decoding request completes the block: one row is late, and 2,048 others are not.
        ([(MANY, 1), (MANY + 1, 100)], dict(shared=(1, MANY // 128 + 1)), True),
        ([(MANY - 1, 1), (MANY, 100)], dict(shared=(1, MANY // 128)), False),
    ],
)
def test_lookahead(rows, kwargs, ahead):
    assert (plan(rows, **kwargs).tables is not None) == ahead


def test_no_history_never_looks_ahead(monkeypatch):
    monkeypatch.setattr(ckv_prefetch_plan, "CKV_PREFETCH_MIN_HISTORY", 0)
    assert plan([(0, 100), (0, 5)]).tables is None
    assert plan([(1, 100)]).tables is not None


def test_off_plans_nothing():
    assert plan([(MANY, 100)], prefetch=False) is None


def test_steps_never_repeat():
    assert len({plan([(c, 100)]).step for c in (0, 0, MANY, MANY)}) == 4


# ------------------------------------------------------------------------------------------------ when it is off


@pytest.fixture
def on(monkeypatch):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    monkeypatch.delenv("VLLM_DCP_CKV_PREFETCH", raising=False)


def transfer(name, **extra):
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **extra)


def multi(*names):
    return transfer("MultiConnector", kv_connector_extra_config={"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in names]})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        (dict(parallel_config__prefill_context_parallel_size=2), "prefill context parallelism"),
        (dict(parallel_config__use_ubatching=True), "dual batch overlap"),
        (dict(model_config__get_num_layers=lambda parallel_config: 1), "single layer"),
        (dict(kv_transfer_config=transfer("NixlConnector")), None),
        (dict(kv_transfer_config=transfer("LMCacheConnectorV1")), "LMCacheConnectorV1 may load KV layer by layer"),
        (dict(kv_transfer_config=transfer("SomebodysConnector")), "SomebodysConnector may load"),
        (dict(kv_transfer_config=transfer("NixlConnector", kv_connector_module_path="somebodys.module")), "NixlConnector may load"),
        (dict(kv_transfer_config=multi("NixlConnector", "OffloadingConnector")), None),
        (dict(kv_transfer_config=multi("NixlConnector", "LMCacheConnectorV1")), "LMCacheConnectorV1 may load"),
    ],
)
def test_refusals(on, changes, words):
    refusal = ckv_prefetch_refusal(make_config(2, **changes))
    assert refusal is None if words is None else words in refusal


def test_flags(on, monkeypatch):
    monkeypatch.setenv("VLLM_DCP_CKV_PREFETCH", "0")
    assert ckv_prefetch_refusal(make_config(2)) == "VLLM_DCP_CKV_PREFETCH=0"
    monkeypatch.setenv("VLLM_DCP_CKV_PREFETCH", "1")
    assert ckv_prefetch_refusal(make_config(2)) is None
    # The b12x backend's own flag makes no group.
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "0")
    assert "process group" in ckv_prefetch_refusal(make_config(2))


@pytest.mark.parametrize("value", ["2", "-1", "true", "", "yes"])
def test_only_0_and_1(monkeypatch, value):
    monkeypatch.setenv("VLLM_DCP_CKV_PREFETCH", value)
    with pytest.raises(ValueError, match="VLLM_DCP_CKV_PREFETCH"):
        _ = envs.VLLM_DCP_CKV_PREFETCH


@pytest.mark.parametrize(
    "environment, gather, changes, line",
    [
        ({}, True, {}, "DCP CKV prefetch is on."),
        ({"VLLM_DCP_CKV_PREFETCH": "0"}, True, {}, "DCP CKV prefetch is off: VLLM_DCP_CKV_PREFETCH=0."),
        ({}, True, dict(parallel_config__use_ubatching=True), "DCP CKV prefetch is off: dual batch overlap."),
        ({"VLLM_DCP_CKV_PREFETCH": "1"}, False, {}, None),  # see test_dcp_features.py
        ({"VLLM_DCP_CKV_PREFETCH": "0"}, False, {}, None),
        ({}, False, {}, None),
    ],
)
def test_one_line_at_start(on, monkeypatch, caplog, environment, gather, changes, line):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    vllm_logger._print_info_once.cache_clear()
    vllm_logger._print_warning_once.cache_clear()
    logger = logging.getLogger(ckv_config.__name__)
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        for _ in range(3):  # builder and every layer ask
            ckv_prefetch_enabled(make_config(2, **changes), gather)
    lines = [record.getMessage() for record in caplog.records if "PREFETCH" in record.getMessage().upper()]
    assert len(lines) == (line is not None)
    assert line is None or line in lines[0]


def methods(name):
    """Every `wait_for_layer_load` in the file of a registered connector. Read, not imported: some need other libraries."""
    place = inspect.getclosurevars(KVConnectorFactory._registry[name]).nonlocals
    spec = importlib.util.find_spec(place["module_path"])
    path = pathlib.Path(spec.origin)
    if path.name == "__init__.py":
        path = path.with_name("connector.py")
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "wait_for_layer_load"]


def does_nothing(method):
    return all(
        isinstance(statement, ast.Pass)
        or isinstance(statement, ast.Return) and statement.value is None
        or isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        for statement in method.body
    )


@pytest.mark.parametrize("name", sorted(CONNECTORS_NOT_LAYERWISE))
def test_listed_connectors_do_nothing_per_layer(name):
    (method,) = methods(name)
    assert does_nothing(method)


def test_the_check_of_connectors_can_fail():
    (method,) = methods("LMCacheConnectorV1")
    assert not does_nothing(method)


# ------------------------------------------------------------------------------------------------ memory and hooks


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(ckv_gather, "get_ckv_prefetch_group", lambda: NS(world_size=2, torch_distributed_backend="none", unique_name="fake"))
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"), num_ubatches=2, num_lanes=2)
    yield
    workspace.reset_workspace_manager()


def test_two_buffers_are_reserved_at_once(manager):
    one, two = config(prefetch=False, max_tokens=1000), config(max_tokens=1000)
    rows = one.rows_per_rank
    assert (one.workspace_bytes, two.workspace_bytes) == (2 * rows * 656, 2 * 2 * rows * 656)
    reserved = reserve_ckv_gather_workspace(two)
    assert reserved.gathered.untyped_storage().nbytes() == two.workspace_bytes
    buffers = reserved.prefetch.buffers
    assert [len(buffer) for buffer in buffers] == [2 * rows, 2 * rows]
    assert [buffer.storage_offset() for buffer in buffers] == [0, 2 * rows * 656]
    assert reserve_ckv_gather_workspace(two) is reserved
    workspace.lock_workspace()
    assert reserve_ckv_gather_workspace(two) is reserved
    # A draft of one layer in its target's lane shares the workspace, whatever it would want itself.
    assert reserve_ckv_gather_workspace(one) is reserved


def test_a_plan_without_prefetch_in_a_prefetching_lane(manager):
    prefetch = reserve_ckv_gather_workspace(config(max_tokens=1000)).prefetch
    layers = [NS(layer_name=f"model.layers.{i}.attn") for i in range(2)]
    layers = [type("Layer", (), vars(layer))() for layer in layers]
    calls = []

    def log(name, method):
        def logged(*args, **kwargs):
            calls.append(name)
            return method(*args, **kwargs)

        return logged

    for name in ("consume", "filled", "complete", "release"):
        setattr(prefetch.state, name, log(name, getattr(prefetch.state, name)))
    for _ in range(3):
        step = NS(prefetch=None, gathered_rows=0)
        for layer in layers:
            with prefetch.attending(layer):
                prefetch.begin(torch.zeros(0), step, NS(), lambda *args: calls.append("now"), None)
                prefetch.complete()
    assert calls == ["consume", "now", "filled", "complete", "release", "complete"] * 6  # release completes whatever is left


def test_lanes_share_nothing(manager):
    target = reserve_ckv_gather_workspace(config(max_tokens=1000))
    with workspace.use_workspace_lane(1):
        draft = reserve_ckv_gather_workspace(config(max_tokens=1000))
    assert draft.prefetch is not target.prefetch and draft.prefetch.state is not target.prefetch.state
    assert {b.data_ptr() for b in draft.prefetch.buffers}.isdisjoint(b.data_ptr() for b in target.prefetch.buffers)


def test_binding_and_freeing_caches_resets():
    resets = []
    layer = NS(impl=NS(ckv_workspace=NS(prefetch=NS(reset=lambda: resets.append(1)))), kv_cache=torch.zeros(1), bind_kv_cache=lambda cache: resets.append("bound"))
    other = NS(impl=NS(), kv_cache=torch.zeros(1), bind_kv_cache=lambda cache: None)
    off = NS(impl=NS(ckv_workspace=NS(prefetch=None)), kv_cache=torch.zeros(1), bind_kv_cache=lambda cache: None)
    layers = {f"layers.{i}.attn": layer for i, layer in enumerate([layer, other, off])}
    utils.bind_kv_cache_to_layers(dict.fromkeys(layers, torch.zeros(2)), layers)
    assert resets == [1, "bound"]
    utils.clear_layer_kv_caches(layers.values())
    assert resets == [1, "bound", 1]


def test_gather_belongs_to_a_layer(manager):
    reserved = reserve_ckv_gather_workspace(config(max_tokens=1000))
    with pytest.raises(RuntimeError, match="outside of any layer"):
        ckv_gather.gather_ckv(torch.zeros((1, 64, 656), dtype=torch.uint8), None, reserved, None)
    with pytest.raises(RuntimeError, match="without a gather"):
        ckv_gather.await_ckv(reserved)


@pytest.mark.parametrize("copy_engines", [False, True])
def test_layers_begin_early_where_gathers_take_no_sms(manager, monkeypatch, copy_engines):
    memory = GatherMemory(torch.empty((4 * config(max_tokens=1000).rows_per_rank, 656), dtype=torch.uint8), None, copy_engines, False)
    monkeypatch.setattr(ckv_gather, "empty_for_gathers", lambda *args: memory)
    monkeypatch.setattr(ckv_gather, "get_dcp_group", lambda: None)
    reserved = reserve_ckv_gather_workspace(config(max_tokens=1000))
    begun = []
    monkeypatch.setattr(reserved.prefetch, "begin", lambda *args: begun.append(reserved.prefetch._layer))
    layer = NS(impl=NS(ckv_workspace=reserved))
    cache = torch.zeros((1, 64, 656), dtype=torch.uint8)
    for metadata in (None, NS(), NS(ckv_gather=None)):
        ckv_gather.start_ckv_gather(layer, cache, metadata)
    assert begun == []
    ckv_gather.start_ckv_gather(layer, cache, NS(ckv_gather=NS(gathered_rows=0)))
    assert begun == [layer] * copy_engines


def test_a_layer_that_fails_before_it_attends(manager):
    """Its gather began, its indexer raised: whoever is next begins anew, the same layer too."""
    prefetch = reserve_ckv_gather_workspace(config(max_tokens=1000)).prefetch
    first, second = (type("Layer", (), {"layer_name": f"model.layers.{i}.attn"})() for i in range(2))
    calls = []

    def begin(step):
        plan = NS(prefetch=NS(step=step, tables=None), gathered_rows=0)
        prefetch.begin(torch.zeros(0), plan, NS(), lambda *args: calls.append(step), None)

    prefetch.enter(first)
    begin(1)
    assert prefetch.begun
    prefetch.enter(first)
    assert not prefetch.begun
    begin(2)
    with pytest.raises(RuntimeError, match="before release"):
        begin(2)
    with prefetch.attending(second):
        assert not prefetch.begun
        begin(3)
        prefetch.complete()
    assert calls == [1, 2, 3]
    prefetch.enter(first)
    begin(4)
    with prefetch.attending(first):
        assert prefetch.begun
    assert not prefetch.begun
    assert {prefetch.state.state_of(i) for i in (0, 1)} == {ckv_prefetch.BufferState.FREE}


def test_a_layer_is_not_kept_alive(manager):
    import weakref

    class Layer:
        layer_name, kv_cache = "model.layers.0.attn", torch.zeros((1, 64, 656), dtype=torch.uint8)

    prefetch = reserve_ckv_gather_workspace(config(max_tokens=1000)).prefetch
    layer = Layer()
    alive = weakref.ref(layer)
    step = NS(prefetch=NS(step=0, tables=None), gathered_rows=0)
    with prefetch.attending(layer):
        prefetch.begin(layer.kv_cache, step, NS(), lambda *args: None, None)
    del layer
    assert alive() is None
    prefetch.close()
