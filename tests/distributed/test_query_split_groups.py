# SPDX-License-Identifier: Apache-2.0
"""The query split and CKV prefetch groups: rank lists, real gloo groups, refusals, lifecycle, flags."""
import collections
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import envs
from vllm.distributed import parallel_state
from vllm.distributed.copy_engines import _on_all_ranks
from vllm.distributed.parallel_state import get_ckv_prefetch_group, get_query_split_group, query_split_group_ranks
from vllm.v1.attention.ops.ckv_gather import all_gather_bytes

from tests.distributed.ranks import run_ranks, vllm_world

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(120)]

ALL_ON = {"VLLM_DCP_QUERY_SPLIT": "1", "VLLM_DCP_CKV_GATHER": "1"}
FLAGS = ("VLLM_DCP_QUERY_SPLIT", "VLLM_DCP_CKV_GATHER", "VLLM_DCP_CKV_PREFETCH")


@pytest.fixture(autouse=True)
def clean_flags(monkeypatch):
    for flag in FLAGS:
        monkeypatch.delenv(flag, raising=False)


# ------------------------------------------------------------------------------------------------ the pure function


@pytest.mark.cases("query_split_groups")
def test_rank_lists(case):
    tp = case["tp"]
    rows = [list(range(i * tp, (i + 1) * tp)) for i in range(case["tp_replicas"])]
    assert query_split_group_ranks(rows, case["dcp"]) == case["expected"]


@settings(max_examples=200, deadline=None)
@given(dcp=st.integers(1, 8), copies=st.integers(1, 8), rows=st.integers(0, 5), data=st.data())
def test_rank_lists_against_brute_force(dcp, copies, rows, data):
    """Ranks share a group exactly if they are in one TP row and hold the same shard; any rank numbers, any row order."""
    tp = dcp * copies
    ranks = data.draw(st.permutations(range(rows * tp)))
    tp_rows = [list(ranks[i * tp : (i + 1) * tp]) for i in range(rows)]
    # Deal every row out to its DCP ranks by counting, and remember who holds what.
    holders = collections.defaultdict(list)
    for row_index, row in enumerate(tp_rows):
        shard = 0
        for rank in row:
            holders[row_index, shard].append(rank)
            shard = 0 if shard + 1 == dcp else shard + 1
    assert query_split_group_ranks(tp_rows, dcp) == [holders[key] for key in sorted(holders)]


@pytest.mark.parametrize(
    "tp_rows, dcp, words",
    [
        ([[0, 1, 2, 3]], 3, ["TP row 0", "[0, 1, 2, 3]", "4 ranks", "dcp_size=3"]),
        ([[0, 1], [2, 3, 4]], 2, ["TP row 1", "[2, 3, 4]", "3 ranks", "dcp_size=2"]),
        ([[0, 1]], 4, ["TP row 0", "2 ranks", "dcp_size=4"]),
        ([[0, 1], []], 2, ["TP row 1", "0 ranks"]),
        ([[0, 1]], 0, ["dcp_size", "0"]),
        ([[0, 1]], -2, ["dcp_size", "-2"]),
        ([[0, 1, 1, 2]], 2, ["TP row 0", "[0, 1, 1, 2]", "repeats"]),
        ([[0, 1], [2, 0]], 2, ["TP row 1", "[2, 0]", "repeats"]),
    ],
)
def test_rank_lists_refusals(tp_rows, dcp, words):
    with pytest.raises(ValueError) as error:
        query_split_group_ranks(tp_rows, dcp)
    assert all(word in str(error.value) for word in words), str(error.value)


# ------------------------------------------------------------------------------------------------ real groups


def _initialize(config, tp, pp, dp, dcp, pcp=1):
    config.parallel_config.data_parallel_size = dp
    parallel_state.initialize_model_parallel(tp, pp, pcp, dcp)


def _absent(getter):
    with pytest.raises(RuntimeError):
        getter()
    return True


def _gather_bytes(group, mine):
    """As the CKV gather does it. The prefetch group has no other way."""
    assert group.device_communicator is None
    gathered = mine.new_empty((group.world_size * mine.shape[0], *mine.shape[1:]))
    all_gather_bytes(gathered.view(-1).view(torch.uint8), mine.view(-1).view(torch.uint8), group)
    return gathered


def _gather_all(rank, world, tp, pp, dp, dcp):
    """Create, use and destroy both groups two times; return what each all_gather brought."""
    seen = []
    with vllm_world(rank, world) as config:
        live = len(torch.distributed.distributed_c10d._world.pg_map)
        for round_ in range(2):
            _initialize(config, tp, pp, dp, dcp)
            mine = torch.tensor([[100 * round_ + rank, -rank]], dtype=torch.int32)
            query_split, prefetch, dcp_group = get_query_split_group(), get_ckv_prefetch_group(), parallel_state.get_dcp_group()
            seen.append(
                {
                    "query_split": query_split.all_gather(mine, dim=0).tolist(),
                    "prefetch": _gather_bytes(prefetch, mine).tolist(),
                    "dcp": dcp_group.all_gather(mine, dim=0).tolist(),
                    "agreed": [_on_all_ranks(True, prefetch), _on_all_ranks(prefetch.rank_in_group == 0, prefetch)],
                    "rank_in_query_split": query_split.rank_in_group,
                    "prefetch_is_dcp_ranks": prefetch.ranks == dcp_group.ranks and prefetch.rank_in_group == dcp_group.rank_in_group,
                    "own_communicator": prefetch.device_group is not dcp_group.device_group and prefetch.cpu_group is not dcp_group.cpu_group,
                    "visited": {parallel_state._groups[g.unique_name]() is g for g in (query_split, prefetch)},
                }
            )
            for _ in range(2):  # the second time there is nothing left to destroy
                parallel_state.destroy_model_parallel()
                assert _absent(get_query_split_group) and _absent(get_ckv_prefetch_group)
                assert len(torch.distributed.distributed_c10d._world.pg_map) == live
    return seen


@pytest.mark.parametrize(
    "tp, pp, dp, dcp, groups, dcp_groups",
    [
        (8, 1, 1, 2, [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, 2, 1, 2, [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, 1, 2, 2, [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
    ids=["tp8-dcp2", "tp4-dcp2-pp2", "tp4-dcp2-dp2"],
)
def test_groups_gather_and_come_back(tp, pp, dp, dcp, groups, dcp_groups):
    results = run_ranks(_gather_all, 8, tp, pp, dp, dcp, env=ALL_ON)
    group_of = {rank: group for group in groups for rank in group}
    dcp_group_of = {rank: group for group in dcp_groups for rank in group}
    for rank, rounds in enumerate(results):
        for round_, seen in enumerate(rounds):
            assert seen == {
                "query_split": [[100 * round_ + r, -r] for r in group_of[rank]],
                "prefetch": [[100 * round_ + r, -r] for r in dcp_group_of[rank]],
                "dcp": [[100 * round_ + r, -r] for r in dcp_group_of[rank]],
                "agreed": [True, False],
                "rank_in_query_split": group_of[rank].index(rank),
                "prefetch_is_dcp_ranks": True,
                "own_communicator": True,
                "visited": {True},
            }
    # All ranks of a DCP group have the same index in their query split groups, so they narrow to the same rows.
    for dcp_group in dcp_groups:
        assert len({results[r][0]["rank_in_query_split"] for r in dcp_group}) == 1


def _size_one(rank, world):
    with vllm_world(rank, world) as config:
        _initialize(config, world, 1, 1, world)
        group, mine = get_query_split_group(), torch.tensor([rank])
        assert group.all_gather(mine, dim=0) is mine and group.all_reduce(mine) is mine
        return group.ranks, group.world_size, group.device_communicator is None


def test_tp_equal_to_dcp_is_a_no_op():
    assert run_ranks(_size_one, 4, env=ALL_ON) == [([rank], 1, True) for rank in range(4)]


# ------------------------------------------------------------------------------------------------ which groups exist


def _recorded_groups(rank, world, tp, pp, dcp, pcp=1):
    """Names and ranks of every group that initialize_model_parallel creates, in order."""
    created = []
    create = parallel_state.init_model_parallel_group

    def record(group_ranks, *args, **kwargs):
        created.append((kwargs["group_name"], group_ranks))
        return create(group_ranks, *args, **kwargs)

    parallel_state.init_model_parallel_group = record
    with vllm_world(rank, world) as config:
        _initialize(config, tp, pp, 1, dcp, pcp)
        for getter, name in ((get_query_split_group, "query_split"), (get_ckv_prefetch_group, "ckv_prefetch")):
            assert (name in dict(created)) or _absent(getter)
    return created


def _brute_force_groups(tp, pp, dcp, pcp=1):
    """Upstream's groups without DP: ranks with equal coordinates, written out from the layout PP x PCP x TP."""
    coordinates = {}
    for stage in range(pp):
        for context in range(pcp):
            for column in range(tp):
                coordinates[len(coordinates)] = (stage, context, column)

    def group_by(key):
        groups = collections.defaultdict(list)
        for rank, place in coordinates.items():
            groups[key(*place)].append(rank)
        return sorted(groups.values())

    return {
        "tp": group_by(lambda stage, context, column: (stage, context)),
        "dcp": group_by(
            (lambda stage, context, column: (stage, column // dcp)) if pcp == 1 else (lambda stage, context, column: (stage, column))
        ),
        "pcp": group_by(lambda stage, context, column: (stage, column)),
        "pp": group_by(lambda stage, context, column: (context, column)),
        "dp": group_by(lambda *place: place),
        "ep": group_by(lambda stage, context, column: stage),
    }


def _assert_upstream(created, expected):
    assert [name for name, _ in created] == list(expected)  # upstream's order too
    for name, ranks in created:
        assert sorted(ranks) == expected[name], name


@pytest.mark.parametrize("env", [{}, {"VLLM_DCP_CKV_PREFETCH": "1"}, {flag: "0" for flag in FLAGS}], ids=["unset", "prefetch-alone", "zero"])
def test_flags_off_create_upstream_groups_only(env):
    for created in run_ranks(_recorded_groups, 8, 4, 2, 2, env=env):
        _assert_upstream(created, _brute_force_groups(4, 2, 2))


def test_flags_off_leave_pcp_as_it_is():
    for created in run_ranks(_recorded_groups, 4, 2, 1, 2, 2):
        _assert_upstream(created, _brute_force_groups(2, 1, 2, pcp=2))


def test_no_dcp_creates_upstream_groups_only():
    for created in run_ranks(_recorded_groups, 4, 4, 1, 1, env=ALL_ON):
        _assert_upstream(created, _brute_force_groups(4, 1, 1))


@pytest.mark.parametrize(
    "env, extra",
    [
        ({"VLLM_DCP_QUERY_SPLIT": "1"}, {"query_split": [[0, 2], [1, 3]]}),
        ({"VLLM_DCP_CKV_GATHER": "1"}, {"ckv_prefetch": [[0, 1], [2, 3]]}),
        ({"VLLM_DCP_CKV_GATHER": "1", "VLLM_DCP_CKV_PREFETCH": "0"}, {}),
        (ALL_ON, {"query_split": [[0, 2], [1, 3]], "ckv_prefetch": [[0, 1], [2, 3]]}),
    ],
    ids=["query-split", "prefetch", "gather-without-prefetch", "both"],
)
def test_each_flag_creates_its_group(env, extra):
    expected = {}
    for name, ranks in _brute_force_groups(4, 1, 2).items():
        expected[name] = ranks
        if name == "dcp":  # the new ones follow the DCP group
            expected.update(extra)
    for created in run_ranks(_recorded_groups, 4, 4, 1, 2, env=env):
        _assert_upstream(created, expected)


# ------------------------------------------------------------------------------------------------ refusals and failures


def _refused(rank, world):
    """Each refusal leaves no group behind, and the next, allowed, call works."""
    messages = []
    with vllm_world(rank, world) as config:
        live = len(torch.distributed.distributed_c10d._world.pg_map)
        for tp, pcp, dcp, elastic in ((2, 2, 2, False), (2, 2, 4, False), (4, 1, 2, True), (4, 1, 3, False)):
            config.parallel_config.enable_elastic_ep = elastic
            with pytest.raises(ValueError) as error:
                _initialize(config, tp, 1, 1, dcp, pcp)
            messages.append(str(error.value))
            assert parallel_state._TP is None and len(torch.distributed.distributed_c10d._world.pg_map) == live
        config.parallel_config.enable_elastic_ep = False
        _initialize(config, 4, 1, 1, 2)
    return messages


@pytest.mark.parametrize("flag", ["VLLM_DCP_QUERY_SPLIT", "VLLM_DCP_CKV_GATHER"])
def test_refusals_come_before_any_group(flag):
    for pcp2, pcp4, elastic, uneven in run_ranks(_refused, 4, env={flag: "1"}):
        assert all(flag in message for message in (pcp2, pcp4, elastic, uneven))
        assert "prefill_context_parallel_size=2" in pcp2 and "prefill_context_parallel_size=2" in pcp4
        assert "elastic EP" in elastic
        assert "tensor_parallel_size=4" in uneven and "decode_context_parallel_size=3" in uneven


def _second_fails(rank, world):
    create = parallel_state.init_model_parallel_group
    destroyed = []
    destroy = parallel_state.GroupCoordinator.destroy

    def record(self):
        destroyed.append(self.unique_name.split(":")[0])
        destroy(self)

    def fail(*args, **kwargs):
        if kwargs["group_name"] == "ckv_prefetch":
            raise OSError("no more ports")
        return create(*args, **kwargs)

    parallel_state.GroupCoordinator.destroy = record
    with vllm_world(rank, world) as config:
        live = len(torch.distributed.distributed_c10d._world.pg_map)
        parallel_state.init_model_parallel_group = fail
        with pytest.raises(OSError, match="no more ports"):
            _initialize(config, 4, 1, 1, 2)
        after_failure = list(destroyed)
        assert _absent(get_query_split_group) and _absent(get_ckv_prefetch_group)
        parallel_state.destroy_model_parallel()
        assert len(torch.distributed.distributed_c10d._world.pg_map) == live

        parallel_state.init_model_parallel_group = create
        destroyed.clear()
        _initialize(config, 4, 1, 1, 2)
        parallel_state.destroy_model_parallel()
        return after_failure, [name for name in destroyed if name in ("dcp", "query_split", "ckv_prefetch")]


def test_a_failed_second_group_takes_the_first_along():
    for after_failure, order in run_ranks(_second_fails, 4, env=ALL_ON):
        assert after_failure == ["query_split"]
        assert order == ["ckv_prefetch", "query_split", "dcp"]


def _ensured(rank, world):
    with vllm_world(rank, world):
        parallel_state.ensure_model_parallel_initialized(2, 1, 1, 2)
        first = get_query_split_group(), get_ckv_prefetch_group()
        parallel_state.ensure_model_parallel_initialized(2, 1, 1, 2)
        assert first == (get_query_split_group(), get_ckv_prefetch_group())
        os.environ["VLLM_DCP_QUERY_SPLIT"] = "0"
        with pytest.raises(AssertionError, match="VLLM_DCP_QUERY_SPLIT"):
            parallel_state.ensure_model_parallel_initialized(2, 1, 1, 2)


def test_ensure_keeps_the_groups_and_notices_other_flags():
    run_ranks(_ensured, 2, env=ALL_ON)


@pytest.mark.parametrize(
    "getter, flags",
    [
        (get_query_split_group, ["VLLM_DCP_QUERY_SPLIT=1"]),
        (get_ckv_prefetch_group, ["VLLM_DCP_CKV_GATHER=1", "VLLM_DCP_CKV_PREFETCH=1"]),
    ],
)
def test_an_absent_group_names_its_flags(getter, flags):
    with pytest.raises(RuntimeError) as error:
        getter()
    assert all(flag in str(error.value) for flag in flags)
    assert "decode_context_parallel_size > 1" in str(error.value)


def test_group_names_trigger_no_special_case():
    """vLLM's communicators look for "tp", "pp", "dp" and "ep" in group names."""
    for name in ("query_split", "ckv_prefetch"):
        assert not any(special in name for special in ("tp", "pp", "dp", "ep"))


# ------------------------------------------------------------------------------------------------ flags


def test_flag_defaults():
    assert [getattr(envs, flag) for flag in FLAGS] == [False, False, True]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_are_strict(monkeypatch, flag):
    for value, meaning in (("0", False), ("1", True)):
        monkeypatch.setenv(flag, value)
        assert getattr(envs, flag) is meaning
    for value in ("2", "-1", "", "true", "on", " 1", "01"):
        monkeypatch.setenv(flag, value)
        with pytest.raises(ValueError, match=flag) as error:
            getattr(envs, flag)
        assert repr(value) in str(error.value)


def _bad_flag(rank, world):
    with vllm_world(rank, world) as config:
        with pytest.raises(ValueError, match="VLLM_DCP_QUERY_SPLIT"):
            _initialize(config, 1, 1, 1, 1)
        assert parallel_state._TP is None


def test_a_bad_flag_fails_even_without_dcp():
    run_ranks(_bad_flag, 1, env={"VLLM_DCP_QUERY_SPLIT": "yes"})


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_are_compile_factors(monkeypatch, flag):
    factors = []
    for value in ("0", "1"):
        monkeypatch.setenv(flag, value)
        factors.append(envs.compile_factors())
    assert {key for key in factors[0] if factors[0][key] != factors[1][key]} == {flag}
