# SPDX-License-Identifier: Apache-2.0
"""A model of a few layers on one rank whose caches hold known bytes, for comparing gathered buffers byte for byte.

Serves the CPU (gloo ranks, everything inline) and GPUs (real streams, random sleeps on both). Real: planner, workspace,
gather, prefetch, process groups. Not real: attention, which copies the gathered buffer instead.
"""
import contextlib
import random
import time
from types import SimpleNamespace as NS
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from tests.oracle import deal

PAGE = 64
RECORD = 656
ENV = {"VLLM_DCP_CKV_GATHER": "1", "VLLM_DCP_CKV_PREFETCH": "1"}


def records(layer, request, positions, steps):
    """uint8 [n, 656]: the record of each position of a request, as written in the given step."""
    seed = np.uint64(layer * 1_000_003 + request * 10_007 + 1) + np.asarray(positions, np.uint64) * np.uint64(104_729) + np.asarray(steps, np.uint64) * np.uint64(7_919)
    with np.errstate(over="ignore"):
        mixed = (seed[:, None] + np.arange(RECORD, dtype=np.uint64) * np.uint64(31)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(56)).astype(np.uint8)


def host_table(block_table):
    """The HostBlockTable of a block table int32 [rows, blocks]."""
    from vllm.v1.attention.ops.step_writes import HostBlockTable

    return HostBlockTable(block_table, np.full(len(block_table), block_table.shape[1]), PAGE)


class Step(NamedTuple):
    """One step of a scenario: [(request, query tokens)] behind one-token decodes; requests that ended before it may come anew."""

    batch: list[tuple[int, int]]
    decodes: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()


class Layer:
    def __init__(self, index, workspace):
        self.layer_name = f"model.layers.{index}.self_attn.attn"
        self.index, self.kv_cache, self.impl = index, None, NS(ckv_workspace=workspace)


class Model:
    """`layers` layers of one lane; requests by number.

    A request's pages are random, other pages hold 255. `delays`: sleep at random, unlike other ranks, on a GPU's streams;
    `host_delays`: on the host too.
    """

    def __init__(self, rank, world, device, *, interleave, layers, prefetch, requests=8, max_len=2048, max_tokens=512, delays=False, host_delays=False, min_history=1):
        from vllm.v1.attention.ops import ckv_config, ckv_gather, ckv_plan, ckv_prefetch_plan
        from vllm.v1.worker import workspace

        ckv_prefetch_plan.CKV_PREFETCH_MIN_HISTORY = min_history
        self.rank, self.world, self.device, self.interleave = rank, world, torch.device(device), interleave
        self.random = random.Random(rank) if delays else None
        self.host_delays = host_delays
        self.config = ckv_config.CKVGatherConfig(
            dcp_world_size=world, dcp_rank=rank, interleave=interleave, min_tokens=0, max_tokens=requests * max_len, max_num_seqs=requests,
            max_num_batched_tokens=max_tokens, record_bytes=RECORD, decode_query_len=1, local_heads=16, link_gbps=220, always=True, prefetch=prefetch,
        )  # fmt: skip
        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(self.device)
        self.workspace = ckv_gather.reserve_ckv_gather_workspace(self.config)
        if prefetch:
            self.workspace.prefetch.early = True  # on a CPU too
        for buffer in self.workspace.prefetch.buffers if prefetch else [self.workspace.gathered]:
            buffer.fill_(255)
        workspace.lock_workspace()
        self.planner = ckv_plan.CKVGatherPlanner(self.config, self.device)
        self.pages_each = max_len // world // PAGE + 2
        table = np.random.default_rng(rank).permutation(requests * self.pages_each).reshape(requests, self.pages_each)
        self.block_table = table.astype(np.int32)
        self.planner.host_blocks = host_table(self.block_table)
        self.layers = [Layer(i, self.workspace) for i in range(layers)]
        self.bind()

    def bind(self):
        """New caches and no tokens in them."""
        from vllm.v1.attention.ops.ckv_prefetch import reset_ckv_prefetch

        for layer in self.layers:
            reset_ckv_prefetch(layer)
            layer.kv_cache = torch.full((self.block_table.size, PAGE, RECORD), 255, dtype=torch.uint8, device=self.device)
        self.lengths = {}
        self.step_of = {}

    def group(self):
        from vllm.distributed.parallel_state import get_dcp_group

        return get_dcp_group()

    def exchange(self):
        self.group().all_reduce(torch.ones(1, device=self.device))

    def sleep(self):
        if self.random is None:
            return
        if self.device.type == "cuda" and self.random.random() < 0.5:
            torch.cuda._sleep(self.random.randrange(10_000, 3_000_000))
        if self.host_delays and self.random.random() < 0.2:
            time.sleep(self.random.random() * 0.003)

    def shard(self, request, rank):
        return deal(self.lengths[request], self.world, self.interleave)[rank]

    def start(self, step, batch, decodes=(), ended=()):
        """Schedule a `Step`: the plan, lengths advanced. Its writes and its expected buffers are fixed from now on."""
        for request in ended:
            del self.lengths[request], self.step_of[request]
        rows = [(request, 1) for request in decodes] + list(batch)
        for request, query in rows:
            done = self.lengths.get(request, 0)
            self.lengths[request] = done + query
            self.step_of.setdefault(request, []).extend([step] * query)
        queries = torch.tensor([query for _, query in rows], dtype=torch.int32)
        lens = torch.tensor([self.lengths[request] for request, _ in rows], dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), queries.cumsum(0, dtype=torch.int32)])
        common = NS(
            query_start_loc_cpu=starts,
            query_start_loc=starts.to(self.device),
            seq_lens_cpu_upper_bound=lens,
            seq_lens=lens.to(self.device),
            is_prefilling=torch.tensor([request not in decodes for request, _ in rows]),
            num_actual_tokens=int(starts[-1]),
            block_table_tensor=torch.tensor(self.block_table[[request for request, _ in rows]], device=self.device),
            req_idx=np.array([request for request, _ in rows]),
        )
        metadata = NS(
            prefill=None,
            req_id_per_token=torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), queries).to(self.device),
        )
        plan = self.planner.plan(common, metadata)
        assert plan is not None
        # What each layer writes in this step: cache rows and records.
        writes = []
        for layer in self.layers:
            slots, data = [np.empty(0, np.int64)], [np.empty((0, RECORD), np.uint8)]
            for request, query in rows:
                shard = np.array(self.shard(request, self.rank), dtype=np.int64)
                index = np.flatnonzero(shard >= self.lengths[request] - query)
                slots.append(self.block_table[request][index // PAGE].astype(np.int64) * PAGE + index % PAGE)
                data.append(records(layer.index, request, shard[index], np.array(self.step_of[request])[shard[index]]))
            writes.append((torch.from_numpy(np.concatenate(slots)).to(self.device), torch.from_numpy(np.concatenate(data)).to(self.device)))
        return NS(plan=plan, writes=writes, requests=[request for request, _ in batch])

    def run(self, step, only=None):
        """Every layer writes its chunk, gathers and reads the gathered buffer; {layer: the copy it read}.

        Every other layer starts its gather early. Each has a collective on the DCP group then, as an indexer does.
        """
        from vllm.v1.attention.ops.ckv_prefetch import ckv_step

        with ckv_step():
            return self.run_layers(step, only)

    def run_layers(self, step, only):
        from vllm.v1.attention.ops import ckv_gather

        copies = {}
        for layer in self.layers if only is None else [self.layers[i] for i in only]:
            slots, data = step.writes[layer.index]
            self.sleep()
            layer.kv_cache.view(-1, RECORD)[slots] = data
            if layer.index % 2:
                ckv_gather.start_ckv_gather(layer, layer.kv_cache, NS(ckv_gather=step.plan))
            self.sleep()
            self.exchange()
            prefetch = self.workspace.prefetch
            with contextlib.nullcontext() if prefetch is None else prefetch.attending(layer):
                gathered = ckv_gather.gather_ckv(layer.kv_cache, step.plan, self.workspace, self.group())
                self.sleep()
                assert gathered.data_ptr() == self.workspace.gathered.data_ptr() == self.workspace.pages().data_ptr()
                copies[layer.index] = gathered.clone()
        return copies

    def expected(self, layer, step):
        """The gathered buffer of a layer, dealt out token by token."""
        shares = []
        for rank in range(self.world):
            rows = [np.empty((0, RECORD), np.uint8)]
            for request in step.requests:
                positions = np.array(self.shard(request, rank), dtype=np.int64)
                rows.append(records(layer, request, positions, np.array(self.step_of[request])[positions]))
            share = np.concatenate(rows)
            padding = np.zeros((step.plan.padded_total - len(share), RECORD), np.uint8)
            shares.append(np.concatenate([share, padding]))
        return np.concatenate(shares)

    def wrong_layers(self, step, copies):
        return [layer for layer, copy in copies.items() if not np.array_equal(copy.cpu().numpy(), self.expected(layer, step))]


class Solo(Model):
    """Rank 0 without other ranks: what they would send is known and copied on the device, in the stream's order.

    Collectives over gloo block the host, which hides races between the streams. These do not.
    """

    def __init__(self, world, device, **kwargs):
        from vllm.v1.attention.ops import ckv_gather

        self.dcp, self.side = (NS(world_size=world, torch_distributed_backend="a copy", unique_name=name) for name in ("dcp", "side"))
        with mock.patch.object(ckv_gather, "get_ckv_prefetch_group", lambda: self.side):
            super().__init__(0, world, device, **kwargs)

    def group(self):
        return self.dcp

    def exchange(self):
        pass

    def start(self, number, batch, decodes=(), ended=()):
        step = super().start(number, batch, decodes, ended)
        chunk = {request: self.lengths[request] - query for request, query in batch}
        step.sent = {}
        for layer in self.layers:
            whole = self.expected(layer.index, step).reshape(self.world, -1, RECORD)
            ahead, packed = whole.copy(), []
            for rank in range(self.world):
                row, rows = 0, []
                for request in step.requests:
                    positions = np.array(self.shard(request, rank), dtype=np.int64)
                    rows.append(row + np.flatnonzero(positions >= chunk[request]))
                    row += len(positions)
                rows = np.concatenate(rows)
                packed.append(whole[rank][rows])
                ahead[rank][rows] = 77
            longest = max(map(len, packed))
            packed = np.stack([np.concatenate([p, np.full((longest - len(p), RECORD), 66, np.uint8)]) for p in packed])
            step.sent[layer.index] = {kind: torch.from_numpy(x).to(self.device) for kind, x in (("whole", whole), ("ahead", ahead), ("chunk", packed))}
        return step

    def run_layers(self, step, only):
        from vllm.v1.attention.ops import ckv_gather
        from vllm.v1.attention.ops.ckv_prefetch import NUM_BUFFERS, BufferState

        def all_gather(gathered, local, group):
            prefetch = self.workspace.prefetch
            assert group is (self.dcp if prefetch is None else self.side)
            if prefetch is not None and BufferState.FILLING in map(prefetch.state.state_of, range(NUM_BUFFERS)):
                layer, kind = prefetch.state.next_layer().index, "ahead"
            else:
                layer, kind = self.running, "chunk" if prefetch is not None and prefetch._lease.prefetched else "whole"
            self.sleep()
            shares = gathered.view(self.world, -1)
            shares[0].copy_(local)
            shares[1:].copy_(step.sent[layer][kind][1:].view(self.world - 1, -1))
            self.sleep()

        copies = {}
        with mock.patch.multiple(ckv_gather, all_gather_bytes=all_gather, get_dcp_group=self.group):
            for index in range(len(self.layers)) if only is None else only:
                self.running = index
                copies |= super().run_layers(step, [index])
        return copies


# Chunks of several requests, second and later chunks, requests that join midway, one that finishes while another decodes, a batch
# without history, history of one request only.
SCENARIO = [
    Step([(0, 70), (1, 33)]),
    Step([(0, 50), (2, 40)], (1,)),
    Step([(0, 64), (2, 7), (3, 129)], (1,)),
    Step([(4, 90), (5, 1)]),
    Step([(5, 20), (3, 1), (4, 65), (0, 3)], (2,)),
    Step([(6, 128)]),
    Step([(6, 128)], (0, 1, 2)),
]


def random_scenario(seed, steps, *, requests=8, max_len=512, max_chunk=90):
    """Steps of one to three chunks behind some decodes; a request that is full, or at random, ends and may come anew."""
    rng = random.Random(seed)
    lengths, scenario = {}, []
    for _ in range(steps):
        ended = tuple(r for r in sorted(lengths) if lengths[r] > max_len - max_chunk or rng.random() < 0.03)
        for request in ended:
            del lengths[request]
        order = rng.sample(range(requests), requests)
        batch = [(request, rng.randint(1, max_chunk)) for request in order[: rng.randint(1, 3)]]
        decodes = tuple(request for request in order[3:] if request in lengths and rng.random() < 0.4)
        for request, query in [*batch, *((d, 1) for d in decodes)]:
            lengths[request] = lengths.get(request, 0) + query
        scenario.append(Step(batch, decodes, ended))
    return scenario


@contextlib.contextmanager
def sleepy(model):
    """Sleeps on whatever stream copies records, the side stream for one."""
    from vllm.v1.attention.ops import ckv_gather, ckv_prefetch_torch

    copy, gather = ckv_prefetch_torch.copy_ckv_segments, ckv_gather.all_gather_bytes

    def slow_copy(*args):
        model.sleep()
        copy(*args)

    def slow_gather(*args):
        model.sleep()
        gather(*args)

    ckv_prefetch_torch.copy_ckv_segments, ckv_gather.all_gather_bytes = slow_copy, slow_gather
    try:
        yield
    finally:
        ckv_prefetch_torch.copy_ckv_segments, ckv_gather.all_gather_bytes = copy, gather


def compare(rank, world, device, interleaves, layers, delays=False, scenario=SCENARIO, ahead=1, **model_arguments):
    """The scenario with and without prefetch: {(interleave, prefetch): wrong (step, layer)}, and gathers on each group.

    So many steps as `ahead` says are enqueued before the host looks at the bytes of any.
    """
    from vllm.distributed.parallel_state import get_ckv_prefetch_group
    from vllm.v1.attention.ops import ckv_gather

    wrong, gathers = {}, {}
    for interleave in interleaves:
        seen = {}
        for prefetch in (False, True):
            model = Model(rank, world, device, interleave=interleave, layers=layers, prefetch=prefetch, delays=delays, **model_arguments)
            bad, count = [], [0, 0]
            gather = ckv_gather.all_gather_bytes

            def counted(gathered, local, group, gather=gather, count=count):
                count[group is get_ckv_prefetch_group()] += 1
                # In place. Elsewhere, a copy by the backend would hide a wrong place.
                assert local.data_ptr() == gathered.data_ptr() + rank * local.numel()
                gather(gathered, local, group)

            ckv_gather.all_gather_bytes = counted
            try:
                with sleepy(model):
                    for first in range(0, len(scenario), ahead):
                        started = []
                        for number, step in enumerate(scenario[first : first + ahead], first):
                            plan = model.start(number, *step)
                            started.append((number, plan, [model.expected(layer.index, plan) for layer in model.layers]))
                        ran = [(number, expected, model.run(plan)) for number, plan, expected in started]
                        for number, expected, copies in ran:
                            for layer, copy in copies.items():
                                if not np.array_equal(copy.cpu().numpy(), expected[layer]):
                                    bad.append((number, layer))
                                if prefetch and not torch.equal(copy, seen[number, layer]):
                                    bad.append((number, layer, "differs from the synchronous gather"))
                                seen[number, layer] = copy
            finally:
                ckv_gather.all_gather_bytes = gather
            wrong[interleave, prefetch], gathers[interleave, prefetch] = bad, count
    return wrong, gathers


def lookaheads(scenario, layers):
    """Gathers that the scenario prefetches: every layer but the first of each step with history, after the first step."""
    lengths, total = {}, 0
    for number, (batch, decodes, ended) in enumerate(scenario):
        for request in ended:
            del lengths[request]
        history = sum(lengths.get(request, 0) for request, _ in batch)
        total += (layers - 1) * (number > 0 and history > 0)
        for request, query in [*batch, *((d, 1) for d in decodes)]:
            lengths[request] = lengths.get(request, 0) + query
    return total


def check(results, scenario, interleaves, layers):
    """Of every rank's `compare`: right bytes; with the prefetch all gathers on its communicator, one for each layer, of everything or
    of the chunk, and one for each history that was looked ahead at."""
    for wrong, gathers in results:
        for interleave in interleaves:
            assert wrong[interleave, False] == wrong[interleave, True] == []
            assert gathers[interleave, False] == [len(scenario) * layers, 0]
            assert gathers[interleave, True] == [0, len(scenario) * layers + lookaheads(scenario, layers)]


def attention_outputs(Rank, Batch, rank, world, device, prefetch, layer_kind, early, *, layers=3, heads=16, topk=128, **config):
    """Outputs of every layer in three steps (chunks of two requests), prefetched gathers, errors against float64, and gathers that
    had begun when an indexer selected tokens. It has a collective of its own on the DCP group. `early`: they may begin there.

    The rows of the current chunk hold other bytes until their layer runs, so a prefetch that reads them is seen.
    """
    import copy

    from tests.gpu._ckv_ranks import error, rows_of
    from vllm.distributed.parallel_state import get_dcp_group
    from vllm.v1.attention.ops import ckv_prefetch_plan
    from vllm.v1.attention.ops.ckv_prefetch import ckv_step

    ckv_prefetch_plan.CKV_PREFETCH_MIN_HISTORY = 1
    settings = dict(interleave=16, heads=heads, topk=topk, max_tokens=64, max_model_len=512) | config
    me = Rank(rank, world, device, **settings).build(CKV_GATHER="always", CKV_GATHER_MIN_TOKENS=0, CKV_PREFETCH=prefetch)
    me.builder.reorder_batch_threshold = 1
    template, outputs, errors, prefetched, begun = me.layer, [], [], 0, 0

    def indexer_op():
        nonlocal begun
        begun += bool(prefetch) and me.impl.ckv_workspace.prefetch.begun
        assert get_dcp_group().all_reduce(torch.ones(1, device=device)).item() == world

    me.indexer_op = indexer_op
    if prefetch:
        me.impl.ckv_workspace.prefetch.early = early
        consume = me.impl.ckv_workspace.prefetch.state.consume

        def counted(key):
            nonlocal prefetched
            lease = consume(key)
            prefetched += lease.prefetched
            return lease

        me.impl.ckv_workspace.prefetch.state.consume = counted
    stack = [copy.copy(template) for _ in range(layers)]
    for i, layer in enumerate(stack):
        layer.layer_name = f"model.layers.{i}.self_attn.attn"
    for number, requests in enumerate([[(0, 20), (0, 30)], [(20, 17), (30, 11)], [(37, 40), (41, 5)]]):
        loaded = []
        for i, layer in enumerate(stack):
            # The same seed for the pages: all layers share the block table.
            batch = Batch(requests, heads=heads, topk=topk, seed=100 * number + i, device=device)
            me.layer = layer
            me.load(batch, seed=number)
            table = me.block_table.cpu().numpy()
            slots = []
            for r, (context, _) in enumerate(requests):
                positions = rows_of(batch.seq_lens[r], rank, world, me.interleave)
                index = np.flatnonzero(positions >= context)
                slots.append(table[r][index // PAGE].astype(np.int64) * PAGE + index % PAGE)
            slots = torch.tensor(np.concatenate(slots), device=device)
            rows = me.cache.view(-1, RECORD)[slots].clone()
            me.cache.view(-1, RECORD)[slots] = 99
            layer.kv_cache = me.cache
            loaded.append((batch, slots, rows, me.records))
        metadata = None
        me.builder.ckv_gather.host_blocks = host_table(me.block_table.cpu().numpy())
        with ckv_step():
            for layer, (batch, slots, rows, whole) in zip(stack, loaded):
                me.layer, me.cache, me.records = layer, layer.kv_cache, whole
                me.topk_buffer[: batch.num_tokens] = batch.ids
                metadata = metadata or me.metadata(batch)
                me.cache.view(-1, RECORD)[slots] = rows
                outputs.append(me.run(batch, layer_kind, metadata, poison=False))
                errors.append(error(outputs[-1], me.reference(batch)))
    return outputs, prefetched, errors, begun
