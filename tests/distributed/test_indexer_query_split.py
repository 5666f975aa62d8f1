# SPDX-License-Identifier: Apache-2.0
"""Prefill rows of the sparse indexer split over the query split group: equal to unsplit, the same collectives on all ranks.

The op, the metadata builder and the groups are vLLM's, over gloo. Compiled functions are replaced by tests/distributed/
indexer_reference.py. The GPU variant is tests/gpu/test_indexer_query_split_gpu.py.
"""
import os
import random
import sys
import time
import types
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.model_executor.layers import sparse_attn_indexer as indexer
from vllm.v1.attention.backends.mla.indexer import balanced_prefill_row_shard
from vllm.v1.attention.ops import query_split
from vllm.v1.worker.workspace import init_workspace_manager

import tests.distributed.preload_v0_33_0  # noqa: F401
from tests.distributed import indexer_reference
from tests.distributed.indexer_batch import (
    FLAG,
    Shape,
    build,
    common_metadata,
    make_batch,
    make_builder,
    make_config,
    oracle_ids,
    reference_cache,
    run_indexer,
)  # fmt: skip
from tests.distributed.ranks import run_ranks, vllm_world

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(900)]

SHAPE = Shape()
TOPOLOGIES = [(4, 2), (8, 2), (8, 4), (8, 8)]
NAMES = [f"TP{tp}/DCP{dcp}" for tp, dcp in TOPOLOGIES]


@pytest.fixture(autouse=True)
def clean_flag(monkeypatch):
    monkeypatch.delenv(FLAG, raising=False)


class Recorder:
    """Remembers this rank's group collectives in order, and how many rows it scored; may delay both."""

    def __init__(self, delay: float = 0.0, seed: int = 0):
        self.calls: list[tuple] = []
        self.rows = 0
        self.delay, self.rng = delay, random.Random(seed)
        all_gather, logits = parallel_state.GroupCoordinator.all_gather, indexer.fp8_fp4_mqa_logits

        def recorded_all_gather(group, tensor, dim=-1):
            self.wait()
            self.calls.append((group.unique_name.split(":")[0], tuple(group.ranks), tuple(tensor.shape), str(tensor.dtype), dim))
            return all_gather(group, tensor, dim)

        def recorded_logits(q, *args):
            self.wait()
            self.rows += len(q[0])
            return logits(q, *args)

        parallel_state.GroupCoordinator.all_gather = recorded_all_gather
        indexer.fp8_fp4_mqa_logits = recorded_logits

    def wait(self):
        if self.delay:
            time.sleep(self.rng.random() * self.delay)


def _world(config, tp, dcp):
    config.parallel_config.data_parallel_size = 1
    parallel_state.initialize_model_parallel(tp, 1, 1, dcp)
    init_workspace_manager(torch.device("cpu"))
    indexer_reference.install()


def _compare(rank, tp, dcp, seeds, delay=0.0):
    """Run each seed's batch split and unsplit. Returns what happened, and every collective of the split runs."""
    with vllm_world(rank, tp) as config:
        _world(config, tp, dcp)
        recorder = Recorder(delay, seed=rank)
        dcp_rank = parallel_state.get_dcp_group().rank_in_group
        seen = dict.fromkeys(("split", "few_rows", "uneven", "decodes", "many_requests", "many_chunks", "later_chunk", "empty_shard", "no_rows"), 0)
        shares, calls = [], []
        for seed in seeds:
            batch = make_batch(seed, SHAPE, ties=seed % 2 == 0, interleaves=[1, 2, 4])
            common = common_metadata(batch, SHAPE, dcp_rank, dcp)
            cache = reference_cache(batch, SHAPE, common, dcp_rank, dcp)
            config = make_config(SHAPE, tp, dcp, batch.interleave)
            results = []
            for split in (False, True):
                metadata = build(make_builder(config, SHAPE, split), batch, common)
                recorder.calls, recorder.rows = [], 0
                results.append(run_indexer(metadata, batch, SHAPE, cache, dcp_rank, dcp, skip_clear=seed % 3 == 0))
                shares.append(recorder.rows)
            calls.append(recorder.calls)
            assert torch.equal(*results), f"seed {seed}: split differs from unsplit: {batch.requests}"
            if seed % tp == rank:  # it is slow, and the ranks' ids are compared with each other below
                assert torch.equal(results[0], oracle_ids(batch, SHAPE.topk)), f"seed {seed}: unsplit is wrong: {batch.requests}"
            calls[-1].append(zlib.crc32(results[1].numpy().tobytes()))
            prefill = metadata.prefill
            sizes = prefill.row_shard_sizes
            seen["decodes"] += batch.decodes > 0
            seen["many_requests"] += len(batch.requests) - batch.decodes > 1
            seen["many_chunks"] += len(prefill.chunks) > 1
            seen["later_chunk"] += any(length > n > 1 for length, n in batch.requests)
            seen["empty_shard"] += any(chunk.local_total_seq_lens == 0 for chunk in prefill.chunks)
            if sizes is None:
                seen["few_rows"] += 1
                continue
            assert sum(sizes) == metadata.num_prefill_tokens and min(sizes) >= 1
            seen["split"] += 1
            seen["uneven"] += len(set(sizes)) > 1
            shard = indexer.PrefillRowShard.from_metadata(prefill, metadata.num_decode_tokens)
            seen["no_rows"] += any(shard.narrow(chunk) is None for chunk in prefill.chunks)
        return seen, shares, calls


@pytest.mark.parametrize("tp, dcp", TOPOLOGIES, ids=NAMES)
def test_split_equals_unsplit(tp, dcp):
    """Random batches: bit-equal ids, half of them full of ties, against a brute-force oracle too."""
    seeds = [10_000 * tp + 1000 * dcp + i for i in range(20 if tp == dcp else 60 if tp == 8 else 150)]
    results = run_ranks(_compare, tp, dcp, seeds, env={FLAG: "1"}, timeout=800)
    seen = {key: sum(result[0][key] for result in results) for key in results[0][0]}
    assert seen["decodes"] and seen["many_requests"] and seen["many_chunks"] and seen["later_chunk"] and seen["empty_shard"], seen
    assert results[0][0]["split"] + results[0][0]["few_rows"] == len(seeds)
    if tp == dcp:
        assert not seen["split"] and all(name == "dcp" for *_, calls in results for batch in calls for name, *_ in batch[:-1])
        return
    assert seen["split"] >= 0.66 * len(seeds) * tp and seen["uneven"] and seen["no_rows"], seen
    assert seen["few_rows"] or tp // dcp == 2, seen  # fewer rows than ranks: two rows are a prefill already
    _check_collectives(results, tp, dcp)
    # Rows really are divided: a rank's keys are scored about tp / dcp times less often.
    unsplit, split = (sum(sum(shares[i::2]) for _, shares, _ in results) for i in (0, 1))
    assert unsplit / split > 0.8 * tp / dcp, (unsplit, split)


def _check_collectives(results, tp, dcp):
    """Ranks of a group issued the same collectives of it, in the same order, also relative to those of other groups."""
    sequences = [calls for *_, calls in results]
    exchanges = 0
    for batch, per_rank in enumerate(zip(*sequences, strict=True)):
        assert len({calls[-1] for calls in per_rank}) == 1, f"batch {batch}: ranks hold different ids"
        for group in {call[:2] for calls in per_rank for call in calls[:-1]}:
            seen = [[call for call in per_rank[r][:-1] if call[:2] == group] for r in group[1]]
            assert all(calls == seen[0] for calls in seen), f"batch {batch}: ranks {group[1]} differ in {group[0]}: {seen}"
        for start in range(0, tp, dcp):  # every DCP group: same sequence over all groups, names for ranks
            mixed = [[(name, *rest) for name, _, *rest in calls[:-1]] for calls in per_rank[start : start + dcp]]
            assert all(calls == mixed[0] for calls in mixed), f"batch {batch}: DCP peers {mixed}"
        for calls in per_rank:
            split = [call for call in calls[:-1] if call[0] == "query_split"]
            assert len(split) <= 1 and all(call[3] == "torch.int32" for call in split), "only final ids, once"
            exchanges += len(split)
    assert exchanges


@pytest.mark.parametrize("tp, dcp", [(4, 2), (8, 4)], ids=["TP4/DCP2", "TP8/DCP4"])
def test_no_deadlock_with_delays(tp, dcp):
    """Every rank sleeps at random before each collective and each scoring; all finish, with equal sequences."""
    seeds = list(range(77000, 77015))
    results = run_ranks(_compare, tp, dcp, seeds, 0.02, env={FLAG: "1"}, timeout=400)
    _check_collectives(results, tp, dcp)


# ------------------------------------------------------------------------------------------------ decisions


def _decide(rank, world, dcp, requests, speculative):
    with vllm_world(rank, world) as config:
        _world(config, world, dcp)
        config = make_config(SHAPE, world, dcp, 1)
        builder = make_builder(config, SHAPE, True)
        if speculative:
            builder.decode_threshold, builder.use_flattening = 1 + speculative, False
        batch = make_batch(1, SHAPE, True, [1], requests)
        metadata = build(builder, batch, common_metadata(batch, SHAPE, parallel_state.get_dcp_group().rank_in_group, dcp))
        return (metadata.num_prefills, metadata.prefill and metadata.prefill.row_shard_sizes)


@pytest.mark.parametrize(
    "requests, speculative, prefills, splits",
    [
        ([(40, 40)], 0, 1, True),
        ([(7, 1), (40, 2)], 0, 1, True),  # as many rows as ranks
        ([(40, 2), (9, 3)], 0, 2, True),
        ([(40, 1), (9, 1)], 0, 0, False),  # decodes only
        ([(40, 2), (9, 1), (30, 2)], 1, 2, False),  # verify rows that are not uniform: no prefill among them
        ([(40, 2), (9, 1), (30, 9)], 1, 2, True),
    ],
)
def test_which_batches_split(requests, speculative, prefills, splits):
    for found in run_ranks(_decide, 4, 2, requests, speculative, env={FLAG: "1"}, timeout=200):
        assert found[0] == prefills and bool(found[1]) == splits, found


def test_builder_balances_rows_with_their_constant_cost():
    """A fresh prompt of 200 tokens, where merging outweighs scoring: halves, not the 141 to 59 of keys alone."""
    for _, sizes in run_ranks(_decide, 4, 2, [(200, 200)], 0, env={FLAG: "1"}, timeout=200):
        assert sizes[0] in (100, 101, 102) and sum(sizes) == 200


def _aligned(rank, world, dcp, requests, rows_of_a_chunk):
    with vllm_world(rank, world) as config:
        _world(config, world, dcp)
        batch = make_batch(1, SHAPE, True, [1], requests)
        batch.logits_elems = rows_of_a_chunk * max(length for length, _ in requests)
        common = common_metadata(batch, SHAPE, parallel_state.get_dcp_group().rank_in_group, dcp)
        metadata = build(make_builder(make_config(SHAPE, world, dcp, 1), SHAPE, True), batch, common)
        return metadata.prefill.row_shard_sizes, [chunk.token_end for chunk in metadata.prefill.chunks]


def test_builder_aligns_slices_to_chunks():
    """A decode row, then 240 rows: halves by their work, 124 with two whole chunks of 62."""
    for sizes, ends in run_ranks(_aligned, 4, 2, [(9, 1), (240, 240)], 62, env={FLAG: "1"}, timeout=200):
        assert ends == [63, 125, 187, 241]
        assert sizes == [124, 116]
    for sizes, _ in run_ranks(_aligned, 4, 2, [(9, 1), (240, 240)], 50, env={FLAG: "1"}, timeout=200):  # 100 and 150 are too far
        assert sizes[0] in (120, 121)


def _flag_off(rank, world, dcp, missing):
    with vllm_world(rank, world) as config:
        _world(config, world, dcp)
        recorder = Recorder()
        dcp_rank = parallel_state.get_dcp_group().rank_in_group
        config = make_config(SHAPE, world, dcp, 1)
        if missing:  # the flag is set after the groups were made
            with pytest.raises(RuntimeError, match="query split group is not initialized"):
                make_builder(config, SHAPE, True)
            return None
        batch = make_batch(5, SHAPE, True, [1], [(9, 1), (60, 50)])
        common = common_metadata(batch, SHAPE, dcp_rank, dcp)
        builder = make_builder(config, SHAPE, False)
        metadata = build(builder, batch, common)
        run_indexer(metadata, batch, SHAPE, reference_cache(batch, SHAPE, common, dcp_rank, dcp), dcp_rank, dcp)
        return builder.query_split_size, metadata.prefill.row_shard_sizes, metadata.prefill.query_split, [name for name, *_ in recorder.calls]


def test_flag_off():
    """No group, no sizes, no exchange: the collectives are the candidate merges alone."""
    for size, sizes, split, names in run_ranks(_flag_off, 4, 2, False, env={FLAG: "0"}, timeout=200):
        assert (size, sizes, split, set(names)) == (1, None, False, {"dcp"})


def test_missing_group_raises():
    run_ranks(_flag_off, 4, 2, True, env={FLAG: "0"}, timeout=200)


def _config(mode=CUDAGraphMode.PIECEWISE, dcp=2):
    return types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(cudagraph_mode=mode), parallel_config=types.SimpleNamespace(decode_context_parallel_size=dcp)
    )


@pytest.fixture
def group_of_four(monkeypatch):
    monkeypatch.setenv(FLAG, "1")
    group = types.SimpleNamespace(world_size=4, device_communicator=types.SimpleNamespace(pynccl_comm=types.SimpleNamespace(disabled=False)))
    monkeypatch.setattr(query_split, "get_query_split_group", lambda: group)
    lines = []
    monkeypatch.setattr(query_split.logger, "warning_once", lambda text, *args: lines.append(text % args))
    return lines


def test_size_of_the_group(group_of_four, monkeypatch):
    # Whatever graphs are asked for: builders are made before upstream has resolved it.
    for mode in (CUDAGraphMode.NONE, None, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL):
        assert query_split.query_split_size(_config(mode)) == 4
    assert query_split.query_split_size(_config(dcp=1)) == 1  # upstream's TP row sharding has that case
    monkeypatch.setenv(FLAG, "0")
    assert query_split.query_split_size(types.SimpleNamespace()) == 1  # off: not a look at the config
    monkeypatch.setenv(FLAG, "1")
    monkeypatch.setattr(query_split, "get_query_split_group", lambda: types.SimpleNamespace(world_size=1))
    assert query_split.query_split_size(_config(CUDAGraphMode.FULL)) == 1  # TP == DCP: nothing to split, so nothing to warn of
    assert not group_of_four


def test_one_line_where_it_cannot_work(group_of_four, monkeypatch):
    for flag in ("VLLM_BATCH_INVARIANT", "VLLM_USE_NCCL_SYMM_MEM"):
        with monkeypatch.context() as m:
            m.setenv(flag, "1")
            assert query_split.query_split_size(_config()) == 1
    with monkeypatch.context() as m:
        m.setattr(query_split.current_platform, "is_rocm", lambda: True)
        assert query_split.query_split_size(_config()) == 1
    assert len(group_of_four) == 3 and all(FLAG in line for line in group_of_four)
    for line, word in zip(group_of_four, ("VLLM_BATCH_INVARIANT", "VLLM_USE_NCCL_SYMM_MEM", "ROCm"), strict=True):
        assert word in line


def test_full_graphs_of_prefill_rows_are_not_split(group_of_four):
    for mode in (CUDAGraphMode.NONE, None, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
        assert not query_split.captures_prefill_rows(_config(mode))
    assert not group_of_four
    assert query_split.captures_prefill_rows(_config(CUDAGraphMode.FULL))
    (line,) = group_of_four
    assert FLAG in line and "cudagraph_mode=FULL" in line


def _resolved_later(rank, world, dcp):
    """Row counts of a batch of the same builder, asked for full graphs and then resolved to others, as upstream's runner does it."""
    with vllm_world(rank, world) as config:
        _world(config, world, dcp)
        config = make_config(SHAPE, world, dcp, 1)
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
        builder = make_builder(config, SHAPE, True)
        batch = make_batch(1, SHAPE, True, [1], [(90, 90)])
        common = common_metadata(batch, SHAPE, parallel_state.get_dcp_group().rank_in_group, dcp)
        sizes = []
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE):
            config.compilation_config.cudagraph_mode = mode
            sizes.append(build(builder, batch, common).prefill.row_shard_sizes)
        return sizes


def test_the_graph_mode_is_asked_for_each_batch():
    for full, piecewise in run_ranks(_resolved_later, 4, 2, env={FLAG: "1"}, timeout=200):
        assert full is None and len(piecewise) == 2 and sum(piecewise) == 90


@pytest.mark.parametrize("comm", [None, types.SimpleNamespace(disabled=True)])
def test_pynccl_that_is_off_by_itself_is_an_error_at_start(group_of_four, monkeypatch, comm):
    communicator = query_split.get_query_split_group().device_communicator
    communicator.pynccl_comm = comm
    monkeypatch.setattr(query_split.current_platform, "is_cuda", lambda: True)
    with pytest.raises(RuntimeError, match="VLLM_NCCL_SO_PATH"):
        query_split.query_split_size(_config())
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    assert query_split.query_split_size(_config()) == 4
    monkeypatch.delenv("VLLM_DISABLE_PYNCCL")
    communicator.pynccl_comm = types.SimpleNamespace(disabled=False)
    assert query_split.query_split_size(_config()) == 4


def test_pcp_and_elastic_ep_are_errors_at_start(monkeypatch):
    from vllm.distributed.dcp_groups import check_dcp_side_groups

    monkeypatch.setenv(FLAG, "1")
    monkeypatch.setattr(parallel_state, "_WORLD", types.SimpleNamespace(world_size=1))
    config = types.SimpleNamespace(model_config=None, parallel_config=types.SimpleNamespace(enable_elastic_ep=False))
    with pytest.raises(ValueError, match="prefill context parallel"):
        check_dcp_side_groups(config, 4, 2, 2)
    config.parallel_config.enable_elastic_ep = True
    with pytest.raises(ValueError, match="elastic EP"):
        check_dcp_side_groups(config, 4, 1, 2)


# ------------------------------------------------------------------------------------------------ balance and exchange


def test_slices_have_equal_work():
    """Work is keys plus the constant part of a row; the last chunk of a long prompt splits almost evenly."""
    def sizes(length, rows, q):
        return balanced_prefill_row_shard(torch.tensor([length + query_split.ROW_COST_KEYS]), torch.tensor([rows]), 1, q, q)

    for length, rows, q in [(8192, 8192, 4), (65536, 8192, 4), (131072, 8192, 2), (8192, 8192, 2), (5000, 4097, 4)]:
        bounds = np.cumsum([0, *sizes(length, rows, q)])
        work = np.arange(length - rows + 1, length + 1) + query_split.ROW_COST_KEYS
        shares = [work[a:b].sum() / work.sum() for a, b in zip(bounds, bounds[1:], strict=False)]
        assert max(abs(share - 1 / q) for share in shares) < 1e-3, shares
    assert max(sizes(65536, 8192, 4)) < 1.1 * 2048


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=2, max_size=8), st.lists(st.integers(1, 5000), min_size=1, max_size=12))
def test_alignment_moves_bounds_a_little(sizes, chunk_rows):
    ends = np.cumsum(chunk_rows).tolist()
    aligned = query_split.align_row_shards(sizes, ends)
    limit = min(128, sum(sizes) // len(sizes) // 16)
    assert len(aligned) == len(sizes) and sum(aligned) == sum(sizes) and min(aligned) >= 1
    before, after = np.cumsum(sizes)[:-1].tolist(), np.cumsum(aligned)[:-1].tolist()
    for bound, moved in zip(before, after, strict=True):
        assert moved == bound or (moved in ends and abs(moved - bound) <= limit)
    # Slices that are wide enough for both of their bounds to move take every chunk bound that is near.
    if min(sizes) > 2 * limit:
        for bound, moved in zip(before, after, strict=True):
            near = min(abs(end - bound) for end in ends)
            assert abs(moved - bound) == (near if near <= limit else 0)


def test_alignment_of_the_benchmark():
    """64k of context, four slices in chunks of 2,048 rows: no slice has a remnant of another chunk."""
    assert query_split.align_row_shards([2141, 2075, 2015, 1961], [2048, 4096, 6144, 8192]) == [2048] * 4
    assert query_split.align_row_shards(None, [5]) is None
    assert query_split.align_row_shards([3, 4], []) == [3, 4]


def _exchange(rank, world, cases):
    with vllm_world(rank, world) as config:
        config.parallel_config.data_parallel_size = 1
        parallel_state.initialize_model_parallel(world, 1, 1, 2)
        group = parallel_state.get_query_split_group()
        for sizes, width in cases:
            whole = torch.arange(sum(sizes) * width, dtype=torch.int32).view(-1, width)
            start = sum(sizes[: group.rank_in_group])
            local = whole[start : start + sizes[group.rank_in_group]].contiguous()
            gathered = query_split.all_gather_rows(group, local, sizes)
            assert gathered.dtype == torch.int32 and torch.equal(gathered, whole)
        for sizes in ([1], [2] * (len(group.ranks) + 1), [5] * len(group.ranks)):
            with pytest.raises(ValueError, match="does not fit"):
                query_split.all_gather_rows(group, torch.zeros((3, 2), dtype=torch.int32), sizes)


def test_exchange_of_uneven_rows():
    run_ranks(_exchange, 8, [([1, 2, 3, 4], 8), ([7, 1, 1, 1], 3), ([5, 5, 5, 5], 1), ([1, 1, 1, 900], 16)], env={FLAG: "1"}, timeout=200)


def test_exchange_uses_all_gatherv_on_cuda(monkeypatch):
    calls = []
    group = types.SimpleNamespace(world_size=2, rank_in_group=0, all_gatherv=lambda local, dim, sizes: calls.append((dim, sizes)) or "gathered")
    monkeypatch.setattr(query_split.current_platform, "is_cuda", lambda: True)
    assert query_split.all_gather_rows(group, torch.zeros((3, 2)), [3, 1]) == "gathered" and calls == [(0, [3, 1])]
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    assert not query_split._has_all_gatherv()


@pytest.mark.parametrize("gatherv, copies", [(True, 2), (False, 7)])
def test_profiling_reserves_the_exchange(group_of_four, monkeypatch, gatherv, copies):
    """The dummy run of both ops allocates it: the reservation sits in the function that they share."""
    sizes, empty = [], torch.empty
    monkeypatch.setattr(query_split, "_has_all_gatherv", lambda: gatherv)
    monkeypatch.setattr(indexer, "get_current_vllm_config_or_none", lambda: types.SimpleNamespace(
        **vars(_config()) | {"parallel_config": types.SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=1)}
    ))  # fmt: skip
    monkeypatch.setattr(indexer, "get_tp_group", lambda: types.SimpleNamespace(world_size=8))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: sizes.append(args[0]) or empty(*args, **kwargs))
    buffer = torch.zeros((100, 8), dtype=torch.int32)
    indexer._reserve_row_shard_exchange_transient(buffer, buffer.device)
    assert sizes == [copies * 100 * 8 * 4]
    sizes.clear()
    monkeypatch.setenv(FLAG, "0")
    indexer._reserve_row_shard_exchange_transient(buffer, buffer.device)
    assert not sizes


# ------------------------------------------------------------------------------------------------ the other call sites


def test_fused_layer_calls_the_same_op():
    """models/deepseek_v32/attention.py: the op of this test, with `skip_topk_buffer_clear`, which `_compare` uses too."""
    from vllm.models.deepseek_v32 import attention

    assert attention.sparse_attn_indexer is indexer.sparse_attn_indexer


def _import_glm():
    """The GLM-5-next op without its package's __init__, which imports image processors."""
    import vllm.models as models

    for name in ("glm5next", "glm5next.common", "glm5next.nvidia"):
        package = types.ModuleType(f"vllm.models.{name}")
        package.__path__ = [os.path.join(models.__path__[0], *name.split("."))]
        sys.modules[package.__name__] = package
    from vllm.models.glm5next.nvidia import sparse_indexer

    return sparse_indexer


def _glm(rank, world, dcp, seeds):
    glm = _import_glm()
    pool = 4
    with vllm_world(rank, world) as config:
        _world(config, world, dcp)
        glm.fp8_fp4_mqa_logits = indexer_reference.mqa_logits
        glm.ops = indexer.ops
        torch.ops._C.top_k_per_row_prefill = indexer_reference.topk_prefill
        recorder = Recorder()
        dcp_rank = parallel_state.get_dcp_group().rank_in_group
        split_batches = 0
        for seed in seeds:
            rng = random.Random(seed)
            # Pools are what is cached: keys are made per pool, and positions are tokens.
            requests = [(rng.randint(n, 120), n) for n in rng.choices([5, 8, 30, 45], k=rng.choice([1, 2]))]
            if max(length for length, _ in requests) <= SHAPE.topk:
                continue
            batch = make_batch(seed, SHAPE, True, [4, 8], requests)
            common = common_metadata(batch, SHAPE, dcp_rank, dcp)
            pooled = make_batch(seed, SHAPE, True, [batch.interleave // pool], [(max(1, length // pool), n) for length, n in requests])
            pooled.interleave = batch.interleave // pool
            cache = reference_cache(pooled, SHAPE, common, dcp_rank, dcp)
            config = make_config(SHAPE, world, dcp, batch.interleave)
            positions = torch.cat([torch.arange(length - n, length) for length, n in requests])
            results = []
            for split in (False, True):
                metadata = build(make_builder(config, SHAPE, split, compress_ratio=pool), batch, common)
                recorder.calls = []
                context = types.SimpleNamespace(attn_metadata={"k": metadata}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
                glm.get_forward_context = lambda context=context: context
                buffer = torch.full((batch.tokens, SHAPE.topk + pool - 1), -7, dtype=torch.int32)
                glm.sparse_attn_indexer_kpool(
                    torch.empty(batch.tokens, 1), "k", cache, batch.q, None, torch.empty(batch.tokens, SHAPE.dim), batch.weights, 128, None, SHAPE.topk,
                    SHAPE.dim, SHAPE.max_len, 1 << 14, buffer, True, index_kpool=pool, positions=positions, dcp_rank=dcp_rank, dcp_world_size=dcp,
                    cp_kv_cache_interleave_size=batch.interleave,
                )  # fmt: skip
                results.append(buffer)
            assert torch.equal(*results), f"seed {seed}: {requests}"
            assert (results[0] >= 0).any()
            exchanged = [shape for name, _, shape, *_ in recorder.calls if name == "query_split"]
            assert [shape[1] for shape in exchanged] == [SHAPE.topk + pool - 1] * len(exchanged), "the pool's tail is exchanged too"
            split_batches += len(exchanged)
        return split_batches


def test_glm_op():
    """models/glm5next/nvidia/sparse_indexer.py: pools of 4 tokens, a tail behind the top-k."""
    assert min(run_ranks(_glm, 4, 2, list(range(20)), env={FLAG: "1"}, timeout=300)) > 10


# ------------------------------------------------------------------------------------------------ the reference itself


def test_reference_merge_tie_rule():
    """Higher score first, then the lower id; -1 is never chosen, a real candidate at -inf is."""
    inf = float("inf")
    gathered = torch.tensor([[[1.0, 7], [1.0, 3], [2.0, 9], [-inf, -1], [-inf, 4], [-0.0, 6], [0.0, 8], [-5.0, 1]]])
    assert indexer_reference.stable_topk(gathered, 8).tolist() == [[9, 3, 7, 8, 6, 1, 4, -1]]
    assert indexer_reference.stable_topk(gathered, 2).tolist() == [[9, 3]]


def test_reference_packing_and_merge():
    """Two shards of distinct scores give the plain top-k; peers that merge different rows do not."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.permutation(64).astype(np.float32).reshape(2, 32))
    shards = [rows[:, 0::2], rows[:, 1::2]]
    packed = []
    for rank, logits in enumerate(shards):
        local = torch.argsort(logits, descending=True)[:, :4].int()
        packed.append(torch.empty((2, 4, 2)))
        indexer_reference.pack_candidates(logits, local, packed[-1], rank, 2, 1, None)
    right = indexer_reference.stable_topk(torch.cat(packed, 1), 4)
    assert right.tolist() == torch.argsort(rows, descending=True)[:, :4].tolist()
    assert indexer_reference.stable_topk(torch.cat([packed[0], packed[1].flip(0)], 1), 4).tolist() != right.tolist()
