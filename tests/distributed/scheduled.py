# SPDX-License-Identifier: Apache-2.0
"""Steps as vLLM makes them: its Scheduler with prefix caching, either model runner's batch, the real builder, planner and prefetch.

Every rank runs this alike and holds its own shard of each layer's cache. A record is a function of the layer and of all tokens up
to its own, as KV is, so whoever wrote a shared block, its bytes are the same, and a row that was read too early holds other bytes:
those of the request that had the block before, or of none. The oracle deals tokens out one by one and knows no block.

Not real: the model (a step writes its rows to each layer's cache, layer by layer), sampling, and the device kernels of the runners'
inputs, which numpy stands in for.
"""
import dataclasses
import json
import pathlib
import random
import tempfile
from types import SimpleNamespace as NS
from unittest import mock

import numpy as np
import torch

import tests.distributed.preload_v0_33_0  # noqa: F401
from tests.gpu._ckv_prefetch import PAGE, Layer
from tests.gpu._ckv_ranks import rows_of
from tests.oracle import deal

RECORD = 16  # bytes: two words; a real record only costs more
MASK = (1 << 64) - 1


class Hashes:
    """One number for each prefix of a list of tokens that grows; the last ones may change."""

    def __init__(self):
        self.tokens, self.values = [], []

    def of(self, tokens):
        """uint64 [len(tokens)]."""
        same = len(self.tokens) if tokens[: len(self.tokens)] == self.tokens else next(i for i, (a, b) in enumerate(zip([*tokens, None], self.tokens)) if a != b)
        del self.values[same:]
        state = self.values[-1] if same else 0x9E3779B97F4A7C15
        for token in tokens[same:]:
            state = ((state ^ (token + 1)) * 0xD6E8FEB86659FD93) & MASK
            state ^= state >> 32
            self.values.append(state)
        self.tokens = list(tokens)
        return np.array(self.values, dtype=np.uint64)


def records(layer, hashes):
    """uint8 [n, RECORD]: what `layer` stores for the last token of each prefix."""
    with np.errstate(over="ignore"):
        word = (hashes ^ np.uint64(layer * 0x9E3779B1 + 1)) * np.uint64(0xBF58476D1CE4E5B9)
        return np.stack([word, word ^ hashes], axis=1).view(np.uint8)


def torch_kernels():
    """Plain torch for the two Triton kernels on the way, in this process for good; each has tests of its own in the interpreter."""
    from vllm.v1.attention.ops import ckv_prefetch_torch, metadata

    def compute_token_to_req_indices(query_start_loc, buffer, num_mapped_tokens, num_output_tokens):
        queries = query_start_loc[1:] - query_start_loc[:-1]
        buffer[:num_output_tokens] = 0
        mapped = torch.repeat_interleave(torch.arange(len(queries), dtype=torch.int32), queries)
        buffer[: len(mapped)] = mapped
        return buffer[:num_output_tokens]

    def copy_ckv_segments(cache, block_table, segments, out):
        page = cache.shape[1]
        for request, position, row, count in segments.table.tolist():
            at = torch.arange(position, position + count)
            out[row : row + count] = cache[block_table[request, at // page].long(), at % page]

    metadata.compute_token_to_req_indices = compute_token_to_req_indices
    ckv_prefetch_torch.copy_ckv_segments = copy_ckv_segments


# ------------------------------------------------------------------------------------------------ scheduler


def engine_config(runner, world, *, num_blocks, max_num_seqs, max_tokens, drafts, max_model_len, asynchronous):
    """A real VllmConfig of a tiny model. DCP is set afterwards: nothing here needs the groups."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig

    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, vocab_size=1 << 16, intermediate_size=64,
                                                        num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1, max_position_embeddings=max_model_len)))  # fmt: skip
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len)
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens, max_model_len=max_model_len, enable_chunked_prefill=True,
                                async_scheduling=asynchronous, is_encoder_decoder=False, watermark=0.0)  # fmt: skip
    cache = CacheConfig(block_size=PAGE, enable_prefix_caching=True)
    speculative = SpeculativeConfig(model="ngram", num_speculative_tokens=drafts, prompt_lookup_max=drafts, prompt_lookup_min=1) if drafts else None
    with mock.patch.dict("os.environ", {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0"}):
        config = VllmConfig(model_config=model, scheduler_config=scheduler, cache_config=cache, parallel_config=ParallelConfig(),
                            speculative_config=speculative, device_config=DeviceConfig(device="cpu"))  # fmt: skip
    config.parallel_config.decode_context_parallel_size = world
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.block_size, config.cache_config.enable_prefix_caching = PAGE, True
    config.cache_config.num_gpu_blocks = num_blocks
    return config


def make_scheduler(config, world, num_blocks):
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    register_all_kvcache_specs(config)
    spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=RECORD, dtype=torch.uint8)
    kv_cache_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    cls = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return cls(config, kv_cache_config, StructuredOutputManager(config), block_size=PAGE * world, hash_block_size=PAGE * world), kv_cache_config


def make_request(name, tokens, world, max_tokens):
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    params.update_from_generation_config({}, 1 << 20)
    return Request(name, list(tokens), params, None, block_hasher=get_request_block_hasher(PAGE * world, sha256))


# ------------------------------------------------------------------------------------------------ model runners


class V2:
    """Model runner V2 from the scheduler's output to the metadata, on numpy instead of its input kernels."""

    def __init__(self, config, kv_cache_config, world, rank, interleave, builder, width, drafts):
        from vllm.v1.worker.gpu import block_table as block_table_module
        from vllm.v1.worker.gpu import buffer_utils, model_runner
        from vllm.v1.worker.gpu.block_table import BlockTables
        from vllm.v1.worker.gpu.input_batch import InputBuffers
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState
        from vllm.v1.worker.gpu.states import RequestState

        buffer_utils.is_uva_available = lambda: False
        max_reqs, max_tokens = config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
        cpu = torch.device("cpu")
        self.runner = runner = object.__new__(model_runner.GPUModelRunner)
        runner.req_states = RequestState(max_reqs, config.model_config.max_model_len, max_tokens, drafts, 1 << 16, cpu)
        for staged in (runner.req_states.total_len, runner.req_states.all_token_ids, runner.req_states.num_computed_tokens):
            staged.apply_write = staged.clear_staged_writes
        state = object.__new__(DefaultModelState)
        for name, value in dict(rope_state=None, prompt_embeds_state=None, supports_mm_inputs=False, encoder_cache=None, model_config=config.model_config).items():
            setattr(state, name, value)
        tables = BlockTables([PAGE], max_reqs, max_tokens, [width], cpu, world, rank, interleave)
        values = dict(
            pooling_runner=None, pp_handler=None, encoder_cache=None, prompt_logprobs_worker=None, lora_state=mock.MagicMock(), adaptive_verification=None,
            model_state=state, block_tables=tables, is_last_pp_rank=False, sampler=None, kv_block_zeroer=None, use_pp=False, pcp_manager=None, fast_prefill=None,
            decode_query_len=1 + drafts, device=cpu, max_num_reqs=max_reqs, model_config=NS(rswa_window=None), input_buffers=InputBuffers(max_reqs, max_tokens, cpu),
            kv_cache_config=kv_cache_config,
        )  # fmt: skip
        for name, value in values.items():
            setattr(runner, name, value)
        self.groups = [[NS(metadata_builders=[builder], kv_cache_spec=kv_cache_config.kv_cache_groups[0].kv_cache_spec, layer_names=["layer"],
                           get_metadata_builder=lambda ubatch: builder, build_metadata=lambda common, ubatch, **more: builder.build(0, common))]]  # fmt: skip
        self.tables = tables
        self._no_kernels(model_runner, block_table_module, tables)

    def _no_kernels(self, model_runner, block_table_module, tables):
        """numpy for the kernels between here and the metadata; what the model would read is left out."""
        runner = self.runner

        def positions(idx_mapping, query_start_loc, computed, out, seq_lens):
            queries = query_start_loc[1 : len(idx_mapping) + 1] - query_start_loc[: len(idx_mapping)]
            seq_lens.zero_()
            seq_lens[: len(idx_mapping)] = computed[idx_mapping] + queries

        model_runner.prepare_prefill_inputs = lambda *args: None
        model_runner.prepare_pos_seq_lens = positions
        model_runner.combine_sampled_and_draft_tokens = lambda *args: torch.zeros(1, dtype=torch.int32)
        model_runner.expand_idx_mapping = lambda idx_mapping, total, *args: (torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int32))
        # The device's tables: written when staged, in the order of staging.
        table = tables.block_tables[0]

        def apply_write():
            first = 0
            for row, start, last in zip(table._staged_write_indices, table._staged_write_starts, table._staged_write_cu_lens):
                table.gpu[row, start : start + last - first] = torch.tensor(table._staged_write_contents[first:last], dtype=torch.int32)
                first = last
            table.clear_staged_writes()

        table.apply_write = apply_write

        def gather_block_tables(idx_mapping, num_reqs_padded, **more):
            # In place, as the forward-pass tables are: a gather that outlives its step reads another one's.
            out = tables.input_block_tables[0]
            out.zero_()
            counts = torch.from_numpy(tables.num_blocks.np[0])[idx_mapping]
            rows = table.gpu[idx_mapping]
            out[: len(idx_mapping)] = torch.where(torch.arange(rows.shape[1]) < counts[:, None], rows, 0)
            return (out[:num_reqs_padded],)

        tables.gather_block_tables = gather_block_tables
        tables.compute_slot_mappings = lambda *args, num_tokens_padded, **more: torch.zeros((1, num_tokens_padded), dtype=torch.int64)
        runner.block_tables = tables

    def share(self):
        from vllm.v1.attention.ops.step_writes import share_host_block_tables

        share_host_block_tables(self.groups, self.tables.host_tables)

    def idle(self, output):
        """A step without tokens still tells which requests are gone."""
        self.runner.finish_requests(output)

    def metadata(self, output, done):
        """(metadata, request names in batch order). done: tokens that each scheduled request has in the cache, in truth."""
        runner = self.runner
        runner.finish_requests(output)
        runner.free_states(output)
        runner.add_requests(output)
        runner.update_requests(output)
        runner.block_tables.apply_staged_writes()
        for name in output.num_scheduled_tokens:
            runner.req_states.num_computed_tokens.gpu[runner.req_states.req_id_to_index[name]] = done[name]
        state, _ = runner.gather_batch_req_state(output, False)
        batch = runner.prepare_inputs(output, state, NS(num_tokens=0, num_reqs=None), 0)
        from vllm.config.compilation import CUDAGraphMode

        block_tables, slots = runner.prepare_attn(batch)
        metadata = runner.model_state.prepare_attn(batch, CUDAGraphMode.NONE, block_tables, slots, self.groups, runner.kv_cache_config)
        return metadata["layer"], list(batch.req_ids)


class V1:
    """Model runner V1: its real states, persistent batch, order and metadata."""

    def __init__(self, config, kv_cache_config, world, rank, interleave, builder, width, drafts):
        from vllm.v1.utils import CpuGpuBuffer
        from vllm.v1.worker.gpu_input_batch import InputBatch
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        max_reqs, max_tokens = config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
        max_len, cpu = config.model_config.max_model_len, torch.device("cpu")
        self.runner = runner = object.__new__(GPUModelRunner)
        batch = InputBatch(max_reqs, max_len, max_tokens, cpu, 1 << 16, [PAGE], [width], num_spec_tokens=drafts, cp_kv_cache_interleave_size=interleave)
        groups = [[NS(metadata_builders=[builder], layer_names=["layer"], get_metadata_builder=lambda ubatch: builder,
                      build_metadata=lambda common, ubatch, **more: builder.build(0, common))]]  # fmt: skip

        def buffer(n):
            return CpuGpuBuffer(n, dtype=torch.int32, device=cpu, pin_memory=False)

        values = dict(
            requests={}, num_prompt_logprobs={}, late_interaction_runner=mock.MagicMock(), input_batch=batch, kv_cache_config=kv_cache_config,
            speculative_config=config.speculative_config, is_pooling_model=False, uses_mrope=False, uses_xdrope_dim=0, use_async_spec_decode=False,
            use_async_scheduling=False, reorder_batch_threshold=builder.reorder_batch_threshold, vllm_config=config, attn_groups=groups, max_model_len=max_len,
            optimistic_seq_lens_cpu=torch.zeros(max_reqs, dtype=torch.int32), query_start_loc=buffer(max_reqs + 1), seq_lens=torch.zeros(max_reqs, dtype=torch.int32),
            positions=torch.zeros(max_tokens, dtype=torch.int64), model_config=NS(rswa_window=None), cache_config=NS(use_replayssm=False, kv_sharing_fast_prefill=False),
            is_mm_prefix_lm=False, dcp_world_size=world, dcp_rank=rank, dcp_local_seq_lens=buffer(max_reqs), drafter=None, device=cpu,
            parallel_config=NS(cp_kv_cache_interleave_size=interleave), enable_prompt_embeds=False, kv_caches=[],
        )  # fmt: skip
        for name, value in values.items():
            setattr(runner, name, value)
        runner._on_request_state_removed = runner._process_encoder_cache_scheduler_output = lambda *args: None
        runner._get_encoder_seq_lens = lambda *args, **more: (None, None)

    def share(self):
        from vllm.v1.attention.ops.step_writes import share_host_block_tables

        share_host_block_tables(self.runner.attn_groups, self.runner.input_batch.block_table.block_tables)

    def idle(self, output):
        with mock.patch("vllm.v1.worker.gpu_model_runner.get_pp_group", lambda: NS(is_last_rank=True)):
            self.runner._update_states(output)

    def metadata(self, output, done):
        self.idle(output)
        runner, batch = self.runner, self.runner.input_batch
        names = list(batch.req_ids)
        scheduled = np.array([output.num_scheduled_tokens[name] for name in names], dtype=np.int32)
        num_reqs, num_tokens = len(names), int(scheduled.sum())
        # What `_prepare_inputs` does for the metadata.
        batch.block_table.commit_block_table(num_reqs)
        runner.query_start_loc.np[0] = 0
        runner.query_start_loc.np[1 : num_reqs + 1] = np.cumsum(scheduled)
        runner.query_start_loc.np[num_reqs + 1 :] = num_tokens
        runner.query_start_loc.copy_to_gpu()
        runner.optimistic_seq_lens_cpu[:num_reqs] = torch.from_numpy(batch.num_computed_tokens_cpu[:num_reqs] + scheduled)
        runner.optimistic_seq_lens_cpu[num_reqs:] = 0
        runner.seq_lens[:num_reqs] = torch.tensor([done[name] for name in names]) + torch.from_numpy(scheduled)
        metadata, _ = runner._build_attention_metadata(num_tokens, num_reqs, int(scheduled.max()), slot_mappings={0: torch.zeros(num_tokens, dtype=torch.int64)})
        return metadata["layer"], names


# ------------------------------------------------------------------------------------------------ a rank


@dataclasses.dataclass
class Seen:
    """What a run was about: steps in all, steps that gathered, gathers of the next layer, steps in which another request of the same
    step wrote gathered context, wrong (step, layer), and what must be alike on all ranks."""

    steps: int = 0
    gathered: int = 0
    ahead: int = 0
    late: int = 0
    verifying: int = 0
    preempted: int = 0
    wrong: list = dataclasses.field(default_factory=list)
    alike: list = dataclasses.field(default_factory=list)


class Engine:
    """One rank. `cost`: whether the planner may choose the exchange; without it every batch within the bounds gathers."""

    def __init__(self, rank, world, *, interleave, runner="v2", drafts=0, layers=3, num_blocks=64, max_num_seqs=8, max_tokens=2048, max_model_len=4096, asynchronous=False):
        from vllm.v1.attention.ops import ckv_gather, ckv_prefetch_plan
        from vllm.v1.worker import workspace

        from tests.gpu._ckv_ranks import Rank

        ckv_prefetch_plan.CKV_PREFETCH_MIN_HISTORY = 1
        self.rank, self.world, self.interleave, self.drafts, self.asynchronous = rank, world, interleave, drafts, asynchronous
        self.runner_cls, self.num_blocks, self.num_layers, self.max_model_len = {"v1": V1, "v2": V2}[runner], num_blocks, layers, max_model_len
        self.config = engine_config(runner, world, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_tokens=max_tokens, drafts=drafts, max_model_len=max_model_len,
                                    asynchronous=asynchronous)  # fmt: skip
        speculative = NS(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
        me = Rank(rank, world, "cpu", interleave=interleave, heads=16, max_tokens=max_tokens, max_model_len=max_model_len, max_num_seqs=max_num_seqs, speculative_config=speculative)
        me.build(CKV_GATHER="always", CKV_GATHER_MIN_TOKENS=0, CKV_PREFETCH=1)
        self.builder = me.builder
        planner = self.builder.ckv_gather
        find = planner._written

        def noted(common, query_lens, seq_lens, first, history):
            ranges = find(common, query_lens, seq_lens, first, history)
            self.written = [(first + request, begin, end) for request, begin, end in ranges.tolist()]
            return ranges

        planner._written = noted
        # Small records, in buffers of their own.
        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(torch.device("cpu"))
        self.workspace = ckv_gather.reserve_ckv_gather_workspace(dataclasses.replace(self.builder.ckv_gather.config, record_bytes=RECORD))
        self.workspace.prefetch.early = True
        self.seen = Seen()
        self.begin()

    def begin(self, seed=0):
        """A new engine: no requests, empty caches. `seen` goes on."""
        flags = {"VLLM_DCP_CKV_GATHER": "1", "VLLM_DCP_CKV_PREFETCH": "1", "VLLM_USE_V2_MODEL_RUNNER": "1" if self.runner_cls is V2 else "0"}
        with mock.patch.dict("os.environ", flags):
            self.scheduler, kv_cache_config = make_scheduler(self.config, self.world, self.num_blocks)
            width = -(-self.max_model_len // (PAGE * self.world)) + 1
            self.runner = self.runner_cls(self.config, kv_cache_config, self.world, self.rank, self.interleave, self.builder, width, self.drafts)
        self.scheduler.num_lookahead_tokens = self.drafts
        self.runner.share()
        self.layers = [Layer(i, self.workspace) for i in range(self.num_layers)]
        for layer in self.layers:
            layer.kv_cache = torch.full((self.num_blocks, PAGE, RECORD), 255, dtype=torch.uint8)
        self.workspace.prefetch.reset()
        for buffer in self.workspace.prefetch.buffers:
            buffer.fill_(255)
        self.random = random.Random(seed)
        self.tokens, self.done, self.blocks, self.prompts, self.hashes = {}, {}, {}, {}, {}
        self.pending = []

    def add(self, name, tokens, max_tokens=8):
        self.tokens[name], self.done[name], self.prompts[name], self.hashes[name] = list(tokens), 0, len(tokens), Hashes()
        self.scheduler.add_request(make_request(name, tokens, self.world, max_tokens))

    def abort(self, name):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def busy(self):
        return bool(self.pending) or self.scheduler.has_unfinished_requests()

    def step(self):
        """Schedule, run, and take the results in: those of this step or, with asynchronous scheduling, of the one before."""
        output = self.scheduler.schedule()
        if output.total_num_scheduled_tokens:
            self.pending.append((output, *self.run(output)))
        else:
            self.seen.preempted += len(output.preempted_req_ids or ())
            self.runner.idle(output)
        while len(self.pending) > (1 if self.asynchronous and output.total_num_scheduled_tokens else 0):
            self.finish(*self.pending.pop(0))

    def finish(self, output, names, sampled, drafts):
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        result = ModelRunnerOutput(req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled, logprobs=None,
                                   prompt_logprobs_dict={}, pooler_output=[])  # fmt: skip
        self.scheduler.update_from_output(output, result)
        for i, name in enumerate(names):  # model runner V1 takes tokens in by itself
            if isinstance(self.runner, V1) and sampled[i] and name in self.runner.runner.requests:
                batch, row = self.runner.runner.input_batch, self.runner.runner.input_batch.req_id_to_index[name]
                start = batch.num_tokens_no_spec[row]
                batch.token_ids_cpu[row, start : start + len(sampled[i])] = sampled[i]
                batch.num_tokens_no_spec[row] += len(sampled[i])
                self.runner.runner.requests[name].output_token_ids.extend(sampled[i])
        if drafts:
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    # ---- one forward pass

    def run(self, output):
        """(request names, tokens sampled for each, drafts for the next step)."""
        seen, number = self.seen, self.seen.steps
        seen.steps += 1
        seen.preempted += len(output.preempted_req_ids or ())
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self.done[new.req_id] = new.num_computed_tokens
            if new.prefill_token_ids is not None:  # a token that was under way when its request was preempted is sampled anew
                assert self.tokens[new.req_id][: len(new.prefill_token_ids)] == new.prefill_token_ids
                self.tokens[new.req_id] = list(new.prefill_token_ids)
            self.blocks[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if name in cached.resumed_req_ids:
                self.blocks[name], self.done[name] = list(blocks[0]), computed
            elif blocks is not None:
                self.blocks[name] += blocks[0]
        self.written = []
        metadata, names = self.runner.metadata(output, self.done)
        seen.late += bool(self.written)
        self.last_batch, self.last_scheduled, self.last_start = names, dict(scheduled), {name: self.done[name] for name in names}
        plan = metadata.ckv_gather
        # What each request's cache holds when its layer has run: its tokens, and the drafts being verified.
        drafts = output.scheduled_spec_decode_tokens
        hashes, writes = {}, []
        for name in names:
            start, end = self.done[name], self.done[name] + scheduled[name]
            rows = self.tokens[name][: end - len(drafts.get(name, ()))] + list(drafts.get(name, ()))
            assert len(rows) == end, (name, start, end, len(self.tokens[name]), drafts.get(name))
            hashes[name] = self.hashes[name].of(rows)
            mine = rows_of(end, self.rank, self.world, self.interleave)
            local = np.flatnonzero(mine >= start)
            slots = np.array(self.blocks[name], dtype=np.int64)[local // PAGE] * PAGE + local % PAGE
            writes.append((slots, hashes[name][mine[local]]))
        slots, wrote = (np.concatenate(parts) for parts in zip(*writes))
        expected_names = [] if plan is None else names[len(names) - plan.num_reqs :]
        self.check_choice(plan, names, scheduled, expected_names)
        if plan is not None:
            seen.gathered += 1
            tables = plan.prefetch.tables
            seen.ahead += tables is not None
            shape = None if tables is None else (tables.late_rows, tables.scatter.table.tolist())
            seen.alike.append((number, plan.rows.start, plan.rows.stop, plan.num_reqs, plan.padded_total, plan.rank_req_starts.tolist(), shape))
        else:
            seen.alike.append((number, None))
        self.run_layers(number, plan, slots, wrote, expected_names, hashes)
        return self.sample(names, scheduled, drafts)

    def check_choice(self, plan, names, scheduled, gathered):
        """Exactly the requests behind the last one that decodes gather, and none that verifies."""
        prefills = [self.done[name] < self.prefill_len(name) or scheduled[name] > 1 + self.drafts for name in names]
        last = max((i for i, prefill in enumerate(prefills) if not prefill), default=-1)
        assert gathered == names[last + 1 :], (names, prefills, gathered)
        self.seen.verifying += plan is not None and last >= 0 and scheduled[names[last]] > 1
        # A chunk that does not gather is no longer than a verification.
        for name, prefill in zip(names[: last + 1], prefills):
            assert not prefill or scheduled[name] <= max(1 + self.drafts, 1), (names, prefills, scheduled)

    def prefill_len(self, name):
        """Tokens that are to be computed before `name` decodes. V2 counts what a resumed request has generated, V1 its prompt alone."""
        return self.resumed.get(name, self.prompts[name]) if isinstance(self.runner, V2) else self.prompts[name]

    @property
    def resumed(self):
        states = self.runner.runner.req_states
        return {name: int(states.prefill_len.np[row]) for name, row in states.req_id_to_index.items()}

    def run_layers(self, number, plan, slots, wrote, gathered_names, hashes):
        from vllm.distributed.parallel_state import get_dcp_group
        from vllm.v1.attention.ops import ckv_gather
        from vllm.v1.attention.ops.ckv_prefetch import ckv_step

        with ckv_step():
            for layer in self.layers:
                layer.kv_cache.view(-1, RECORD)[torch.from_numpy(slots)] = torch.from_numpy(records(layer.index, wrote))
                if plan is None:
                    continue
                if layer.index % 2:
                    ckv_gather.start_ckv_gather(layer, layer.kv_cache, NS(ckv_gather=plan))
                with self.workspace.prefetch.attending(layer):
                    gathered = ckv_gather.gather_ckv(layer.kv_cache, plan, self.workspace, get_dcp_group())
                    if not np.array_equal(gathered.numpy(), self.expected(layer.index, plan, gathered_names, hashes)):
                        self.seen.wrong.append((number, layer.index))

    def expected(self, layer, plan, names, hashes):
        """The gathered buffer, dealt out token by token."""
        shares = []
        for rank in range(self.world):
            rows = [hashes[name][np.array(deal(len(hashes[name]), self.world, self.interleave)[rank], dtype=np.int64)] for name in names]
            share = records(layer, np.concatenate(rows))
            shares += [share, np.zeros((plan.padded_total - len(share), RECORD), np.uint8)]
        return np.concatenate(shares)

    def sample(self, names, scheduled, drafts):
        """Accept some drafts, sample a token where a request has caught up, and propose drafts."""
        sampled, proposed = [], {}
        for name in names:
            given = list(drafts.get(name, ()))
            end = self.done[name] + scheduled[name]
            if end - len(given) < len(self.tokens[name]):
                self.done[name] = end
                sampled.append([])
                continue
            accepted = self.random.randint(0, len(given))
            new = given[:accepted] + [self.random.randrange(1, 1000)]
            self.tokens[name] += new
            self.done[name] = end - len(given) + accepted
            sampled.append(new)
            if self.drafts:
                proposed[name] = [self.random.randrange(1, 1000) for _ in range(self.random.choice((self.drafts, self.drafts, self.random.randint(0, self.drafts))))]
        return names, sampled, proposed
