# SPDX-License-Identifier: Apache-2.0
"""v0.11.0's real model runner on real DCP groups: the slot mapping and the local lengths that it gives to the attention builders."""
import json
from types import SimpleNamespace

import pytest

from tests import oracle
from tests.distributed.ranks import run_ranks, vllm_world
from tests.runtime.v0_11_0.runner import import_runner

pytestmark = [pytest.mark.base("v0.11.0"), pytest.mark.forked, pytest.mark.timeout(180)]

BLOCK_SIZE = 16  # the only one of the CPU platform
MODEL = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, vocab_size=128, intermediate_size=64, num_attention_heads=4,
             num_key_value_heads=4, num_hidden_layers=1, max_position_embeddings=512, torch_dtype="bfloat16")


def engine_config(folder, world, interleave):
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(json.dumps(MODEL))
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, tensor_parallel_size=world, decode_context_parallel_size=world,
                      block_size=BLOCK_SIZE, max_num_seqs=8, cp_kv_cache_interleave_size=interleave,
                      distributed_executor_backend="mp").create_engine_config()


class Stop(Exception):
    """Ends a dummy run once its metadata is known."""


class RecordingBuilder:

    def __init__(self):
        self.seen = []

    def build(self, common_prefix_len, common_attn_metadata):
        self.seen.append(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        self.seen.append(common_attn_metadata)
        raise Stop


def scheduler_output(new, cached, finished=()):
    """`new`: {id: (tokens, block ids)}, `cached`: {id: (computed, tokens)}."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    requests = [NewRequestData(name, list(range(tokens)), [], SamplingParams(), None, (blocks, ), 0, None) for name, (tokens, blocks) in new.items()]
    scheduled = {name: tokens for name, (tokens, _) in new.items()} | {name: tokens for name, (_, tokens) in cached.items()}
    old = CachedRequestData(list(cached), [False] * len(cached), [], [None] * len(cached), [computed for computed, _ in cached.values()])
    return SchedulerOutput(requests, old, scheduled, sum(scheduled.values()), {}, {}, [0], set(finished), [], {}, None)


def expected_slots(name, positions, rank, world, interleave, blocks):
    return [oracle.slot(p, rank, world, interleave, BLOCK_SIZE, blocks[name]) for p in positions]


def drive_runner(rank, world, config, interleave):
    import torch
    from vllm.config import CUDAGraphMode, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    with vllm_world(rank, world), set_current_vllm_config(config):
        parallel_state.initialize_model_parallel(world, 1, world)
        runner = CPUModelRunner(config, torch.device("cpu"))
        builder = RecordingBuilder()
        runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None, layer_names=["layer"])])
        runner.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda: builder, kv_cache_spec=None, layer_names=["layer"])]]

        blocks = {"a": [9, 4, 7], "b": [2], "c": [1, 3, 5]}
        lengths = {"a": 75, "b": 3, "c": 64}
        steps = [
            (scheduler_output({name: (lengths[name], blocks[name]) for name in "abc"}, {}), {name: (0, lengths[name]) for name in "abc"}),
            (scheduler_output({}, {"a": (75, 1), "c": (64, 1)}, ["b"]), {"a": (75, 1), "c": (64, 1)}),
        ]
        pointers = set()
        for output, batch in steps:
            runner._update_states(output)
            runner._prepare_inputs(output)
            got, names = builder.seen[-1], runner.input_batch.req_ids
            assert set(names) == set(batch)
            want = [oracle.local_lens(sum(batch[name]), world, interleave)[rank] for name in names]
            assert got.dcp_local_seq_lens.tolist() == want, (got.dcp_local_seq_lens, want)
            assert got.seq_lens.tolist() == [sum(batch[name]) for name in names]
            assert runner.dcp_local_seq_lens.gpu[len(names):].count_nonzero() == 0
            slots = [s for name in names
                     for s in expected_slots(name, range(batch[name][0], sum(batch[name])), rank, world, interleave, blocks)]
            assert got.slot_mapping.tolist() == slots
            pointers.add(got.dcp_local_seq_lens.data_ptr())

        try:  # the same buffer is in the metadata that a graph is captured with
            runner._dummy_run(4, cudagraph_runtime_mode=CUDAGraphMode.FULL, uniform_decode=True)
        except Stop:
            pass
        captured = builder.seen[-1].dcp_local_seq_lens
        assert captured.tolist() == [int(rank == 0)] * 4
        pointers.add(captured.data_ptr())
        assert pointers == {runner.dcp_local_seq_lens.gpu.data_ptr()}
        return len(builder.seen)


@pytest.mark.parametrize("world, interleave", [(2, 16), (4, 4)])
def test_runner_gives_builders_its_ranks_share(world, interleave, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", "")  # some need a later vLLM
    config = engine_config(tmp_path, world, interleave)
    import_runner("cpu_model_runner")  # once, before the ranks fork
    assert run_ranks(drive_runner, world, config, interleave, timeout=120) == [3] * world
