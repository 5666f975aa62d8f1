# SPDX-License-Identifier: Apache-2.0
"""The CKV gather's flags, sizes, workspace and its one predicate."""
import dataclasses
import itertools

import pytest
import torch
from vllm import envs
from vllm.distributed import parallel_state
from vllm.v1.attention.ops import ckv_config, ckv_gather, ckv_plan
from vllm.v1.attention.ops.ckv_config import CKVGatherConfig, CKVGatherFlags, ckv_gather_flags
from vllm.v1.attention.ops.ckv_gather import reserve_ckv_gather_workspace
from vllm.v1.attention.ops.ckv_layout import ckv_layout
from vllm.v1.attention.ops.ckv_plan import ckv_gather_refusal
from vllm.v1.worker import workspace

from tests.gpu._ckv_ranks import make_config

pytestmark = [pytest.mark.base("v0.33.0")]

NAMES = ("CKV_GATHER", "CKV_GATHER_MIN_TOKENS", "CKV_GATHER_MAX_TOKENS")


@pytest.fixture(autouse=True)
def clean_flags(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(f"VLLM_DCP_{name}", raising=False)
        monkeypatch.delenv(f"VLLM_B12X_MLA_{name}", raising=False)


@pytest.fixture
def dcp_rank(monkeypatch):
    monkeypatch.setattr(ckv_config, "get_dcp_group", lambda: type("Group", (), {"rank_in_group": 1}))


CONFIG = CKVGatherConfig(
    dcp_world_size=4,
    dcp_rank=0,
    interleave=1,
    min_tokens=16,
    max_tokens=1000,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    record_bytes=656,
    decode_query_len=1,
    local_heads=16,
    link_gbps=220,
)
GOOD = dict(prefill_tokens=17, context_tokens=1000)


# ------------------------------------------------------------------------------------------------ predicate


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        (dict(prefill_tokens=15), "too few prefill tokens"),  # MIN - 1
        (dict(prefill_tokens=16), "too few prefill tokens"),  # MIN: the bound is exclusive
        (dict(prefill_tokens=32), None),  # two requests of 16 tokens: rows count, not the longest query
        (dict(context_tokens=1001), "context above the maximum"),
        (dict(prefill_tokens=0, context_tokens=0), "no prefill rows"),
        (dict(dense_mha=True), "dense MHA prefill"),
        (dict(capturing=True), "CUDA graph capture"),
        (dict(rows=CONFIG.rows_per_rank), None),
        (dict(rows=CONFIG.rows_per_rank + 64), "context too uneven for the buffer"),
    ],
)
def test_predicate(change, reason):
    assert ckv_gather_refusal(CONFIG, **(GOOD | change)) == reason


@pytest.mark.parametrize("change, reason", [(dict(dbo=True), "dual batch overlap"), (dict(dcp_world_size=1), "no decode context parallelism")])
def test_predicate_of_the_configuration(change, reason):
    assert ckv_gather_refusal(dataclasses.replace(CONFIG, **change), **GOOD) == reason


def test_predicate_truth_table():
    """Every combination: it gathers exactly if no fact speaks against it."""
    for tokens, context, dense, capturing, dbo, world in itertools.product((0, 15, 16, 17), (0, 1000, 1001), *[(False, True)] * 3, (1, 4)):
        config = dataclasses.replace(CONFIG, dbo=dbo, dcp_world_size=world)
        refusal = ckv_gather_refusal(config, prefill_tokens=tokens, context_tokens=context, dense_mha=dense, capturing=capturing)
        gathers = tokens == 17 and context <= 1000 and not (dense or capturing or dbo) and world == 4
        assert (refusal is None) == gathers


# ------------------------------------------------------------------------------------------------ flags


def test_flag_defaults():
    assert (envs.VLLM_DCP_CKV_GATHER, envs.VLLM_DCP_CKV_GATHER_MIN_TOKENS, envs.VLLM_DCP_CKV_GATHER_MAX_TOKENS) == (False, 16, 524288)
    assert ckv_gather_flags() == ckv_gather_flags(b12x=True) == CKVGatherFlags(False, False, 16, 524288)


def test_b12x_names_win_for_b12x_alone(monkeypatch):
    for name, value in zip(NAMES, ("1", "5", "4096"), strict=True):
        monkeypatch.setenv(f"VLLM_B12X_MLA_{name}", value)
    assert ckv_gather_flags() == CKVGatherFlags(False, False, 16, 524288)
    assert ckv_gather_flags(b12x=True) == CKVGatherFlags(True, False, 5, 4096)
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "0")
    assert ckv_gather_flags().enabled and not ckv_gather_flags(b12x=True).enabled


def test_dcp_names_serve_b12x_too(monkeypatch):
    for name, value in zip(NAMES, ("1", "7", "900"), strict=True):
        monkeypatch.setenv(f"VLLM_DCP_{name}", value)
    assert ckv_gather_flags(b12x=True) == CKVGatherFlags(True, False, 7, 900)


@pytest.mark.parametrize("name, value", [("MIN_TOKENS", "-1"), ("MAX_TOKENS", "0"), ("MIN_TOKENS", "many"), ("MAX_TOKENS", "")])
def test_bad_flags(monkeypatch, name, value):
    monkeypatch.setenv(f"VLLM_DCP_CKV_GATHER_{name}", value)
    with pytest.raises(ValueError):
        ckv_gather_flags()


def test_new_flags_are_compile_factors(monkeypatch):
    """They change which collectives run: a cached graph of another value must not be reused."""
    before = envs.compile_factors()
    for prefix, name in itertools.product(("VLLM_DCP_", "VLLM_B12X_MLA_"), NAMES):
        monkeypatch.setenv(prefix + name, "1")
        assert envs.compile_factors() != before
        monkeypatch.delenv(prefix + name)


# ------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize("dcp, flag", [(1, "1"), (2, "0"), (1, "0")])
def test_off(monkeypatch, dcp, flag):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", flag)
    assert CKVGatherConfig.from_vllm_config(make_config(dcp), "fp8_ds_mla") is None


@pytest.mark.parametrize("cache_dtype, record", [("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)])
def test_configuration(monkeypatch, dcp_rank, cache_dtype, record):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    monkeypatch.setenv("VLLM_DCP_CKV_PREFETCH", "0")
    config = CKVGatherConfig.from_vllm_config(make_config(4, interleave=16, max_model_len=1 << 20), cache_dtype)
    assert config == CKVGatherConfig(4, 1, 16, 16, 524288, 8, 512, record, 1, 4, 220, False, False, 61)


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_formats_without_raw_records(monkeypatch, dcp_rank, cache_dtype):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    with pytest.raises(NotImplementedError, match=f"fp8_ds_mla.*{cache_dtype}.*VLLM_DCP_CKV_GATHER=0"):
        CKVGatherConfig.from_vllm_config(make_config(2), cache_dtype)


def test_pcp_is_refused(monkeypatch, dcp_rank):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    with pytest.raises(NotImplementedError, match="prefill context parallelism"):
        CKVGatherConfig.from_vllm_config(make_config(2, parallel_config__prefill_context_parallel_size=2), "fp8_ds_mla")


def test_unreachable_context_is_not_reserved(monkeypatch, dcp_rank):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    config = CKVGatherConfig.from_vllm_config(make_config(2, max_model_len=4096, max_num_seqs=3), "fp8_ds_mla")
    assert config.max_tokens == 3 * 4096


# ------------------------------------------------------------------------------------------------ workspace


@pytest.mark.parametrize("world, interleave, seqs, total", [(1, 1, 8, 1000), (2, 1, 8, 1000), (8, 64, 5, 999), (3, 16, 2, 77)])
def test_capacity_holds_the_worst_batch(world, interleave, seqs, total):
    """Any split of the maximum over few requests fits, worst of all requests just one interleave unit above even."""
    config = dataclasses.replace(CONFIG, dcp_world_size=world, interleave=interleave, max_num_seqs=seqs, max_tokens=total)
    assert config.rows_per_rank % 64 == 0
    worst = [min(interleave, total // seqs)] * seqs
    stripe = world * interleave
    for lens in ([total], worst, [total - (seqs - 1)] + [1] * (seqs - 1), [(total // seqs) // stripe * stripe + min(interleave, total // seqs % stripe)] * seqs):
        layout = ckv_layout(torch.tensor(lens).numpy(), world, interleave)
        assert layout.padded_total <= config.rows_per_rank


def test_capacity_is_bounded_for_many_requests():
    """8 ranks, interleave 64, 1,024 requests: an eighth more than the even share, not twice as much."""
    many = dataclasses.replace(CONFIG, dcp_world_size=8, interleave=64, max_num_seqs=1024, max_tokens=524288)
    assert many.rows_per_rank == 65536 + 8192
    assert dataclasses.replace(many, max_num_seqs=4).rows_per_rank == 65536 + 4 * 64
    # A small maximum still holds some requests that lie wholly on one rank.
    assert dataclasses.replace(many, max_tokens=1024).rows_per_rank == 128 + 16 * 64


@pytest.mark.parametrize("record, world", [(656, 2), (656, 8), (352, 4)])
def test_shares_beyond_32_bits_are_refused_at_start(record, world):
    """Upstream's cp_gather_cache multiplies rows and bytes in int32. The error names a maximum that works."""
    one = dataclasses.replace(CONFIG, dcp_world_size=world, record_bytes=record, max_num_seqs=4096)
    with pytest.raises(ValueError, match="VLLM_DCP_CKV_GATHER_MAX_TOKENS=2147483647") as error:
        dataclasses.replace(one, max_tokens=2**31 - 1)
    most = int(str(error.value).rstrip(".").rsplit(" ", 1)[1])
    works = dataclasses.replace(one, max_tokens=most)
    assert 0.99 * 2**31 < works.rows_per_rank * record < 2**31
    with pytest.raises(ValueError):
        dataclasses.replace(one, max_tokens=int(most * 1.01))


@pytest.fixture
def manager():
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    yield workspace.current_workspace_manager()
    workspace.reset_workspace_manager()


def test_workspace_is_one_allocation_shared_by_layers(manager, monkeypatch):
    lines = []
    monkeypatch.setattr(ckv_gather.logger, "info", lambda message, *args: lines.append(message % args))
    first = reserve_ckv_gather_workspace(CONFIG, scratch_bytes=5)
    assert reserve_ckv_gather_workspace(CONFIG) is first
    assert first.gathered.shape == (4 * CONFIG.rows_per_rank, 656)
    assert first.gathered.untyped_storage().nbytes() == CONFIG.workspace_bytes
    assert first.pages().shape == (4 * CONFIG.rows_per_rank // 64, 64, 656)
    # One line: bytes, their cost in cache tokens, the effective bounds.
    assert len(lines) == 1
    cost = (CONFIG.workspace_bytes + 5) * 4 // 656
    assert all(f"{number} " in lines[0] for number in (CONFIG.workspace_bytes, cost, 1000, 16)), lines


def test_never_allocated_late(manager):
    manager.lock()
    with pytest.raises(AssertionError, match="locked"):
        reserve_ckv_gather_workspace(CONFIG)


def test_groups_are_not_needed_when_off():
    """No DCP group exists here; the off path must not ask for it."""
    assert parallel_state._DCP is None
    assert CKVGatherConfig.from_vllm_config(make_config(2), "fp8_ds_mla") is None
    assert ckv_plan.make_ckv_gather_planner(None, make_config(2), ["layer"], torch.device("cpu")) is None
