# SPDX-License-Identifier: Apache-2.0
"""Topic cp-interleave on v0.11.0: argument, config, refusals, and the slot mapping against a dealt-out cache."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.v0_11_0 import dealt, unpatched

pytestmark = [pytest.mark.base("v0.11.0")]


def block_tables(block_size, max_model_len, max_num_reqs=8, max_tokens=4096, **kwargs):
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    return MultiGroupBlockTable(max_num_reqs=max_num_reqs, max_model_len=max_model_len, max_num_batched_tokens=max_tokens, pin_memory=False,
                                device=torch.device("cpu"), block_sizes=[block_size], **kwargs)


# --- argument and config ---


def test_default_is_token_interleave():
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    assert ParallelConfig().cp_kv_cache_interleave_size == 1
    assert EngineArgs().cp_kv_cache_interleave_size == 1


@pytest.mark.parametrize("argv, expected", [([], 1), (["--cp-kv-cache-interleave-size", "64"], 64), (["--cp_kv_cache_interleave_size=16"], 16)])
def test_command_line_flag(argv, expected):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils import FlexibleArgumentParser

    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(argv)
    assert EngineArgs.from_cli_args(args).cp_kv_cache_interleave_size == expected


def test_flag_reaches_the_parallel_config(neutral_platform, tmp_path, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 128,'
                                          ' "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,'
                                          ' "num_hidden_layers": 1, "max_position_embeddings": 128, "torch_dtype": "bfloat16"}')
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, tensor_parallel_size=2, decode_context_parallel_size=2, block_size=64,
                      cp_kv_cache_interleave_size=32, distributed_executor_backend="mp")
    assert args.create_engine_config().parallel_config.cp_kv_cache_interleave_size == 32
    args.cp_kv_cache_interleave_size = 48
    with pytest.raises(ValueError, match=r"48.*64"):
        args.create_engine_config()


@pytest.mark.cases("interleave_validation")
def test_interleave_must_divide_the_block(case, make_config):
    block_size, interleave = case["block_size"], case["interleave"]
    if case["valid"]:
        assert make_config(block_size, interleave).parallel_config.cp_kv_cache_interleave_size == interleave
        return
    with pytest.raises(ValueError, match=rf"\({interleave}\)"):
        make_config(block_size, interleave)
    config = make_config(block_size, 1)
    config.parallel_config.cp_kv_cache_interleave_size = interleave  # past the check of the config object
    with pytest.raises(ValueError, match=rf"\({interleave}\).*\({block_size}\)"):
        config.verify_cp_kv_cache_interleave()


@pytest.mark.parametrize("interleave", [0, -1, -64])
def test_less_than_one_is_refused_by_the_parallel_config(interleave):
    from vllm.config import ParallelConfig

    with pytest.raises(ValueError, match=rf"cp_kv_cache_interleave_size \({interleave}\) must be at least 1"):
        ParallelConfig(cp_kv_cache_interleave_size=interleave)


def test_the_platform_chooses_the_block_size_first(make_config, monkeypatch):
    from vllm.platforms import current_platform

    def use_64(cls, vllm_config):
        vllm_config.cache_config.block_size = 64

    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(use_64))
    assert make_config(16, 64).cache_config.block_size == 64
    with pytest.raises(ValueError, match=r"\(128\).*\(64\)"):
        make_config(128, 128)


def test_without_dcp_the_size_is_accepted_and_warned_about(make_config, monkeypatch):
    import vllm.config

    warnings = []
    monkeypatch.setattr(vllm.config.logger, "warning", lambda message, *args: warnings.append(message % args))
    make_config(16, 48, dcp=1)
    assert any("cp_kv_cache_interleave_size=48 has no effect" in w for w in warnings)
    warnings.clear()
    make_config(16, 1, dcp=1)
    make_config(16, 16, dcp=2)
    assert not any("cp_kv_cache" in w for w in warnings)


def test_speculative_decoding_is_refused(make_config):
    from vllm.config import SpeculativeConfig

    def ngram():
        return SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)

    assert make_config(16, 1, speculative_config=ngram()).speculative_config is not None
    with pytest.raises(ValueError, match=r"\(16\).*speculative decoding.*'ngram'"):
        make_config(16, 16, speculative_config=ngram())


# --- backends that cannot read the layout ---


def fake_runner(runner_module, interleave, dcp, *backends):
    """Just enough of a runner for initialize_kv_cache to reach its checks of the attention groups."""
    groups = [[SimpleNamespace(backend=b, layer_names=[]) for b in backends]]
    nothing = lambda *args: None
    runner = SimpleNamespace(attn_groups=groups, dcp_world_size=dcp, speculative_config=None, vllm_config=SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={})), parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave))
    for name in ("may_reinitialize_input_batch", "may_add_encoder_only_layers_to_kv_cache_config", "maybe_add_kv_sharing_layers_to_kv_cache_groups",
                 "initialize_attn_backend", "initialize_kv_cache_tensors"):
        setattr(runner, name, nothing)
    runner._attn_group_iterator = lambda: runner_module.GPUModelRunner._attn_group_iterator(runner)
    return runner


def test_a_backend_that_cannot_do_it_is_refused_by_name(gpu_model_runner):
    from vllm.attention.backends.abstract import AttentionBackend

    class Plain(AttentionBackend):

        @staticmethod
        def get_name():
            return "PLAIN_BACKEND"

    class Able(Plain):
        supports_cp_kv_cache_interleave = True

    initialize = gpu_model_runner.GPUModelRunner.initialize_kv_cache
    initialize(fake_runner(gpu_model_runner, 1, 2, Plain), SimpleNamespace())
    initialize(fake_runner(gpu_model_runner, 64, 1, Plain), SimpleNamespace())
    initialize(fake_runner(gpu_model_runner, 64, 2, Able), SimpleNamespace())
    with pytest.raises(NotImplementedError, match=r"\(64\).*PLAIN_BACKEND"):
        initialize(fake_runner(gpu_model_runner, 64, 2, Plain), SimpleNamespace())
    with pytest.raises(NotImplementedError, match="PLAIN_BACKEND"):  # not only the first group is looked at
        initialize(fake_runner(gpu_model_runner, 64, 2, Able, Plain), SimpleNamespace())


def test_mla_is_allowed_only_once_its_context_chunks_know_the_layout():
    """Holds after every topic: until interleave-mla-context, the MLA backends refuse instead of reading wrong rows."""
    from vllm.v1.attention.backends.mla.common import MLACommonBackend, MLACommonPrefillMetadata

    knows = "padded_local_chunk_seq_lens" in MLACommonPrefillMetadata.ChunkedContextMetadata.__dataclass_fields__
    assert MLACommonBackend.supports_cp_kv_cache_interleave == knows


# --- what the runner passes on ---


def test_input_batch_hands_the_interleave_to_its_block_tables(set_dcp):
    from vllm.v1.worker.gpu_input_batch import InputBatch

    set_dcp(2, 1)
    batch = InputBatch(max_num_reqs=2, max_model_len=256, max_num_batched_tokens=64, device=torch.device("cpu"), pin_memory=False, vocab_size=8,
                       block_sizes=[16, 32], cp_kv_cache_interleave_size=8)
    assert [table.cp_kv_cache_interleave_size for table in batch.block_table.block_tables] == [8, 8]


def test_a_reinitialized_input_batch_keeps_the_interleave(gpu_model_runner, set_dcp):
    set_dcp(2, 0)
    runner = SimpleNamespace(cache_config=SimpleNamespace(block_size=16, cpu_offload_gb=0), max_num_reqs=2, max_model_len=64, max_encoder_len=0,
                             max_num_tokens=32, device=torch.device("cpu"), pin_memory=False, model_config=SimpleNamespace(get_vocab_size=lambda: 8),
                             vllm_config=SimpleNamespace(speculative_config=None), input_batch=SimpleNamespace(logitsprocs=None),
                             is_pooling_model=False, parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=32))
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))
    gpu_model_runner.GPUModelRunner.may_reinitialize_input_batch(runner, SimpleNamespace(kv_cache_groups=[group]))
    assert runner.input_batch.block_table[0].cp_kv_cache_interleave_size == 32


# --- slot mapping ---


@pytest.mark.cases("slot_mapping")
def test_slot_mapping_cases(case, set_dcp):
    positions = np.array(case["positions"], dtype=np.int64)
    for rank, expected in enumerate(case["expected_by_rank"]):
        set_dcp(case["dcp"], rank)
        tables = block_tables(case["block_size"], 4096, cp_kv_cache_interleave_size=case["interleave"])
        tables.add_row(([99], ), 0)  # another request, so that the row matters
        tables.add_row((case["block_table"], ), 1)
        tables.compute_slot_mapping(np.ones_like(positions), positions)
        assert tables[0].slot_mapping.np[:len(positions)].tolist() == expected


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_slot_mapping_matches_a_dealt_out_cache(data, set_dcp):
    """300 batches of 64 tokens: 19,200 (world, rank, interleave, block size, request, position) cases."""
    world = data.draw(st.integers(1, 16), "world")
    rank = data.draw(st.integers(0, world - 1), "rank")
    block_size = data.draw(st.sampled_from(dealt.BLOCK_SIZES), "block_size")
    interleave = data.draw(st.sampled_from(dealt.divisors(block_size)), "interleave")
    longest = data.draw(st.integers(1, dealt.MAX_LEN), "longest")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))

    set_dcp(world, rank)
    tables = block_tables(block_size, longest, max_num_reqs=3, max_tokens=64, cp_kv_cache_interleave_size=interleave)
    blocks_per_row = tables[0].max_num_blocks_per_req
    rows = rng.permutation(3 * blocks_per_row).reshape(3, blocks_per_row)  # distinct blocks
    for i, row in enumerate(rows):
        tables.add_row((row.tolist(), ), i)
    requests, positions = rng.integers(0, 3, 64), rng.integers(0, longest, 64)
    tables.compute_slot_mapping(requests, positions)

    owner, index = dealt.owner_and_index(world, interleave)
    for request, position, slot in zip(requests, positions, tables[0].slot_mapping.np):
        if owner[position] != rank:
            assert slot == -1
        else:
            block, offset = divmod(index[position], block_size)
            assert slot == rows[request, block] * block_size + offset


def test_interleave_1_maps_slots_as_upstream_documents(monkeypatch):
    """Token i lives on rank i % world, at place i // world of its shard: the words of v0.11.0's own comment, 1,000 batches."""
    got = unpatched.slot_mappings(unpatched.set_group_in(unpatched.GROUP_USERS["slot_mappings"], monkeypatch.setattr))["slot_mapping"]
    for seed, row in enumerate(got):
        rng = np.random.default_rng(seed)
        world = int(rng.integers(1, 17))
        rank, longest, block_size = int(rng.integers(0, world)), int(rng.integers(1, 5000)), int(rng.choice([1, 16, 48, 64, 128]))
        blocks = max(-(-longest // (block_size * world)), 1)
        table = rng.permutation(4 * blocks).reshape(4, blocks)
        requests, positions = rng.integers(0, 4, 64), rng.integers(0, longest, 64)
        expected = [table[r, p // world // block_size] * block_size + p // world % block_size if p % world == rank else -1
                    for r, p in zip(requests, positions)]
        assert row.tolist() == expected


def test_interleave_1_maps_slots_as_the_unpatched_tree(monkeypatch, tmp_path):
    expected = unpatched.run_unpatched("slot_mappings", tmp_path / "upstream.npz")
    if expected is None:
        pytest.skip("VLLM_STACK_UNPATCHED_TREE names no unpatched v0.11.0 tree")
    got = unpatched.slot_mappings(unpatched.set_group_in(unpatched.GROUP_USERS["slot_mappings"], monkeypatch.setattr))
    assert expected["slot_mapping"].shape == (1000, 64) and got["slot_mapping"].tobytes() == expected["slot_mapping"].tobytes()


def test_no_slot_is_written_twice(set_dcp):
    """Over all ranks, each token of a request has one home, and on one rank no two tokens share a slot."""
    length, block_size, world = 1000, 16, 4
    for interleave in dealt.divisors(block_size):
        homes = np.zeros(length, dtype=int)
        for rank in range(world):
            set_dcp(world, rank)
            tables = block_tables(block_size, length, cp_kv_cache_interleave_size=interleave)
            tables.add_row((list(range(tables[0].max_num_blocks_per_req)), ), 0)
            tables.compute_slot_mapping(np.zeros(length, dtype=np.int64), np.arange(length))
            slots = tables[0].slot_mapping.np[:length]
            mine = slots[slots >= 0]
            assert len(set(mine.tolist())) == len(mine)
            homes += slots >= 0
        assert (homes == 1).all()


# --- the cache manager keeps counting whole manager blocks ---


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_a_full_manager_block_is_full_on_every_rank(interleave, set_dcp):
    """Prefix caching and KV transfer hash block_size * dcp tokens at a time: those tokens fill exactly one block of each rank."""
    block_size, world = 16, 4
    for rank in range(world):
        set_dcp(world, rank)
        tables = block_tables(block_size, 4 * block_size * world, cp_kv_cache_interleave_size=interleave)
        tables.add_row(([5, 2, 7, 3], ), 0)
        for number, block in enumerate([5, 2, 7, 3]):
            positions = np.arange(number * block_size * world, (number + 1) * block_size * world)
            tables.compute_slot_mapping(np.zeros_like(positions), positions)
            slots = tables[0].slot_mapping.np[:len(positions)]
            assert slots[slots >= 0].tolist() == list(range(block * block_size, (block + 1) * block_size))


@pytest.mark.parametrize("interleave", [1, 16])
def test_prefix_hits_are_whole_manager_blocks(interleave, make_config):
    from vllm.sampling_params import SamplingParams
    from vllm.utils import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    world, block_size = 4, 16
    config = make_config(block_size, interleave, dcp=world)
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    init_none_hash(sha256)
    manager = KVCacheManager(KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
                             max_model_len=1024, enable_caching=True, dcp_world_size=config.parallel_config.decode_context_parallel_size)
    hasher = get_request_block_hasher(block_size * world, sha256)

    def request(name, length):
        return Request(request_id=name, prompt_token_ids=list(range(length)), sampling_params=SamplingParams(max_tokens=1), pooling_params=None,
                       eos_token_id=None, block_hasher=hasher)

    first = request("a", 150)  # 2 virtual blocks of 64 tokens and 22 tokens
    assert len(first.block_hashes) == 2
    blocks = manager.allocate_slots(first, 150)
    assert [len(ids) for ids in blocks.get_block_ids()] == [3]
    first.num_computed_tokens = 150
    _, hit = manager.get_computed_blocks(request("b", 200))
    assert hit == 128
