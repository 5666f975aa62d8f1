# SPDX-License-Identifier: Apache-2.0
"""Ranks compare flags, config and libraries before any group exists: real worlds over gloo, of which one rank differs."""
import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed import dcp_agreement, parallel_state
from vllm.distributed.dcp_agreement import differences, require_same

from tests.distributed.ranks import run_ranks, vllm_world

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(180)]

WORLD = 4
ODD = 2  # the rank that differs
GATHER = {"VLLM_DCP_CKV_GATHER": "1"}


@settings(max_examples=300, deadline=None)
@given(values=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x", None])), min_size=1, max_size=9), first=st.integers(0, 5))
def test_differences_against_brute_force(values, first):
    """A name is reported exactly if two ranks differ in it; each rank once, with its value."""
    ranks = range(first, first + len(values))
    facts = [{"one": one} | ({} if two is None else {"two": two}) for one, two in values]
    lines = {line.split(": ")[0]: line.split(": ")[1] for line in differences(facts, ranks)}
    for name, of in (("one", [one for one, _ in values]), ("two", ["not there" if two is None else two for _, two in values])):
        assert (name in lines) == (len(set(of)) > 1)
        if name not in lines:
            continue
        said = {}
        for part in lines[name].replace("not there", "not_there").split(" on ranks ")[1:]:
            for item in part.split(", "):
                item = item.split(" ")[0]
                if item[0].isdigit():
                    low, _, high = item.partition("-")
                    said.update(dict.fromkeys(range(int(low), int(high or low) + 1)))
        assert sorted(said) == list(ranks)


def _try(rank, world, odd, config_change=None, patch=None):
    """The error that this rank gets, how long that took, and whether a group was left."""
    if rank == ODD:
        os.environ.update(odd)
    started = time.monotonic()
    with vllm_world(rank, world) as config:
        if rank == ODD and config_change:
            name, field, value = config_change
            setattr(getattr(config, name), field, value)
        if rank == ODD and patch:
            setattr(torch, *patch)
        live = len(torch.distributed.distributed_c10d._world.pg_map)
        try:
            parallel_state.initialize_model_parallel(world, 1, 1, 2)
        except ValueError as error:
            assert parallel_state._TP is None and len(torch.distributed.distributed_c10d._world.pg_map) == live
            return str(error), time.monotonic() - started
        return None, time.monotonic() - started


@pytest.mark.parametrize(
    "common, odd, change, words",
    [
        (GATHER, {"VLLM_DCP_CKV_GATHER_MIN_TOKENS": "1024"}, None, "VLLM_DCP_CKV_GATHER_MIN_TOKENS: 16 on ranks 0-1, 3, 1024 on ranks 2"),
        (GATHER, {"VLLM_DCP_CKV_PREFETCH": "0"}, None, "VLLM_DCP_CKV_PREFETCH: True on ranks 0-1, 3, False on ranks 2"),
        (GATHER, {"VLLM_DCP_LINK_GBPS": "25"}, None, "VLLM_DCP_LINK_GBPS: 220 on ranks 0-1, 3, 25 on ranks 2"),
        ({}, GATHER, None, "VLLM_DCP_CKV_GATHER: False on ranks 0-1, 3, True on ranks 2"),
        (GATHER, {"VLLM_DCP_CKV_GATHER": "0"}, None, "VLLM_DCP_CKV_GATHER: True on ranks 0-1, 3, False on ranks 2"),
        ({"VLLM_DCP_QUERY_SPLIT": "1"}, {"VLLM_DISABLE_PYNCCL": "1"}, None, "VLLM_DISABLE_PYNCCL: False on ranks 0-1, 3, True on ranks 2"),
        ({"VLLM_B12X_MLA_CKV_GATHER": "1"}, {"VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS": "9"}, None, "VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS: None on ranks 0-1, 3, 9 on ranks 2"),
        (GATHER, {"VLLM_DCP_CKV_GATHER": "yes"}, None, "'yes' for VLLM_DCP_CKV_GATHER"),  # a bad value on one rank does not leave the others waiting
        (GATHER, {}, ("parallel_config", "cp_kv_cache_interleave_size", 64), "cp_kv_cache_interleave_size: 1 on ranks 0-1, 3, 64 on ranks 2"),
        (GATHER, {}, ("scheduler_config", "max_num_seqs", 7), "max_num_seqs: "),
        (GATHER, {}, ("cache_config", "cache_dtype", "fp8_ds_mla"), "kv_cache_dtype: auto on ranks 0-1, 3, fp8_ds_mla on ranks 2"),
    ],
    ids=["min", "prefetch", "link", "gather-on-one", "gather-off-on-one", "pynccl", "b12x", "bad-value", "interleave", "seqs", "format"],
)
def test_a_difference_raises_on_every_rank(common, odd, change, words):
    results = run_ranks(_try, WORLD, odd, change, env=common, timeout=60)
    for error, seconds in results:
        assert error is not None and words in error and seconds < 20, (error, seconds)
    assert len({error for error, _ in results}) == 1


def test_another_torch_raises():
    for error, _ in run_ranks(_try, WORLD, {}, None, ("__version__", "2.12.0"), env=GATHER):
        assert f"torch: {torch.__version__} on ranks 0-1, 3, 2.12.0 on ranks 2" in error


def test_nobody_minds_where_everything_is_off():
    """Upstream allows it: with the flags off nothing depends on it."""
    odd = {"VLLM_DCP_CKV_GATHER_MIN_TOKENS": "1024", "VLLM_DCP_CKV_PREFETCH": "0"}
    assert [error for error, _ in run_ranks(_try, WORLD, odd, ("scheduler_config", "max_num_seqs", 7))] == [None] * WORLD


def test_equal_ranks_start():
    assert [error for error, _ in run_ranks(_try, WORLD, {}, env=GATHER | {"VLLM_DCP_QUERY_SPLIT": "1"})] == [None] * WORLD


def _same_bad_value(rank, world):
    with vllm_world(rank, world):
        with pytest.raises(ValueError, match="'yes'") as error:
            parallel_state.initialize_model_parallel(world, 1, 1, 2)
        return str(error.value)


def test_the_same_bad_value_is_named_on_all():
    for error in run_ranks(_same_bad_value, WORLD, env={"VLLM_DCP_QUERY_SPLIT": "yes"}):
        assert "VLLM_DCP_QUERY_SPLIT" in error and "Ranks differ" not in error


def _nccl_versions(rank, world):
    """NCCL on two sides of 2.28, as torch reports it."""
    dcp_agreement.current_platform = type("Platform", (), dict(device_type="cuda", is_cuda=lambda: True, get_device_capability=lambda: (9, 0)))
    torch.cuda.nccl.version = lambda: (2, 27, 7) if rank == ODD else (2, 28, 9)
    return _try(rank, world, {})


def test_other_nccl_raises():
    for error, _ in run_ranks(_nccl_versions, WORLD, env=GATHER):
        assert "NCCL: 2.28.9 on ranks 0-1, 3, 2.27.7 on ranks 2" in error


def _resolved(rank, world):
    with vllm_world(rank, world):
        parallel_state.initialize_model_parallel(world, 1, 1, 2)
        group = parallel_state.get_dcp_group()
        require_same({"attention backends": ["FLASHMLA_SPARSE"]}, group)
        try:
            require_same({"attention backends": ["FLASHMLA_SPARSE" if rank != ODD else "FLASHINFER_MLA_SPARSE"]}, group)
        except ValueError as error:
            return str(error)


def test_what_layers_resolved_to_is_compared_in_the_dcp_group():
    first, second, third, fourth = run_ranks(_resolved, WORLD, env=GATHER)
    assert first is second is None and third == fourth and "attention backends" in third and "on ranks 2" in third and "on ranks 3" in third
