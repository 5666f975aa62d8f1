# SPDX-License-Identifier: Apache-2.0
"""Who takes the DCP flags: groups that nobody would use, buffers that fit whatever comes later, a flag that no layer took."""
import contextlib
import dataclasses
import logging
import sys
import types
from types import SimpleNamespace as NS

import pytest
import torch
from vllm import logger as vllm_logger
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.attention.ops import ckv_config, ckv_gather, ckv_plan, dcp_features
from vllm.v1.attention.ops.ckv_config import CKVGatherConfig, waits_in_kernels
from vllm.v1.attention.ops.ckv_gather import later_in_this_lane, reserve_ckv_gather_workspace
from vllm.v1.attention.ops.ckv_layout import ckv_layout
from vllm.v1.attention.ops.ckv_prefetch import ckv_capture, in_ckv_capture
from vllm.v1.attention.ops.dcp_features import finish_dcp_features, wanted_groups
from vllm.v1.worker import workspace
from vllm.v1.worker.worker_base import WorkerBase

from tests.gpu._ckv_ranks import FLAGS, make_config

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for flag in (*FLAGS, "VLLM_DCP_QUERY_SPLIT"):
        monkeypatch.delenv(f"VLLM_DCP_{flag}" if not flag.startswith("VLLM") else flag, raising=False)
    monkeypatch.setattr(ckv_config, "get_dcp_group", lambda: NS(rank_in_group=0))
    vllm_logger._print_info_once.cache_clear()
    vllm_logger._print_warning_once.cache_clear()


@pytest.fixture
def lines(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------------------ which groups


@pytest.fixture
def selected(monkeypatch):
    """What upstream's selection would return, and what it was asked for."""
    chosen = NS(name="FLASHMLA_SPARSE", asked=[])

    def select(*args, **kwargs):
        chosen.asked.append((args, kwargs))
        return type("Backend", (), {"get_name": staticmethod(lambda: chosen.name)})

    monkeypatch.setattr("vllm.v1.attention.selector.get_attn_backend", select)
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    monkeypatch.setenv("VLLM_DCP_QUERY_SPLIT", "1")
    return chosen


def engine(**more):
    return make_config(2, model_config__use_mla=True, **more)


@pytest.mark.parametrize("backend, prefetch", [("FLASHMLA_SPARSE", True), ("B12X_MLA_SPARSE", True), ("FLASHINFER_MLA_SPARSE", False), ("FLASH_ATTN_MLA_SPARSE", False)])
def test_no_communicator_for_a_backend_that_does_not_gather(selected, backend, prefetch):
    selected.name = backend
    assert wanted_groups(engine(), 2) == (True, prefetch)
    ((args, kwargs),) = selected.asked
    assert args == (512 + 64, torch.bfloat16, "fp8_ds_mla") and kwargs == dict(use_mla=True, use_sparse=True, num_heads=8)


def test_no_group_for_a_model_without_an_indexer(selected):
    config = engine()
    del config.model_config.hf_text_config.index_topk
    assert wanted_groups(config, 2) == (False, False) and not selected.asked


def test_no_group_without_dcp(selected):
    assert wanted_groups(engine(), 1) == (False, False)


@pytest.mark.parametrize(
    "change",
    [
        dict(parallel_config__use_ubatching=True),
        dict(model_config__enable_nccl_comm_suspend=True),
        dict(kv_transfer_config=KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")),
    ],
)
def test_no_communicator_where_nothing_looks_ahead(selected, change):
    assert wanted_groups(engine(**change), 2) == (True, False)


def test_pipeline_stages_do_not_decide_on_groups(selected):
    """A stage with one layer does not look ahead, but takes part in making the group."""
    assert wanted_groups(engine(model_config__get_num_layers=lambda parallel: 1), 2) == (True, True)


def test_off_asks_nobody(selected, monkeypatch):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "0")
    monkeypatch.setenv("VLLM_DCP_QUERY_SPLIT", "0")
    assert wanted_groups(NS(model_config=None), 2) == (False, False) and not selected.asked


def test_upstream_still_prefers_flashinfer_on_sm100(monkeypatch):
    """What the warning is about. Should it change, the README's trouble table does, too."""
    for name in ("vllm._C_stable_libtorch", "vllm._C"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from vllm.platforms.cuda import _get_backend_priorities
    from vllm.platforms.interface import DeviceCapability

    order = [b.name for b in _get_backend_priorities(use_mla=True, device_capability=DeviceCapability(10, 0), head_size=576, num_heads=128, kv_cache_dtype="fp8_ds_mla")]
    assert order.index("FLASHINFER_MLA_SPARSE") < order.index("FLASHMLA_SPARSE")


# ------------------------------------------------------------------------------------------------ when the model is built


class Layer:
    def __init__(self, backend, **impl):
        self.backend, self.impl = backend, NS(**impl)

    def get_attn_backend(self):
        return type("Backend", (), {"get_name": staticmethod(lambda: self.backend)})


def built(config, *layers):
    config.compilation_config.static_forward_context = {f"layers.{i}": layer for i, layer in enumerate(layers)} | {"experts": NS()}
    return config


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(dcp_features, "require_same", lambda facts, group: None)
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: None)


INDEXER = Layer("DEEPSEEK_V32_INDEXER")


@pytest.mark.parametrize(
    "env, dcp, layers, warnings",
    [
        ({}, 2, [Layer("FLASHINFER_MLA_SPARSE")], []),
        ({"VLLM_DCP_CKV_GATHER": "1"}, 2, [Layer("FLASHINFER_MLA_SPARSE"), INDEXER],
         ["VLLM_DCP_CKV_GATHER=1 has no effect: the attention backend FLASHINFER_MLA_SPARSE does not know it. Set --attention-backend FLASHMLA_SPARSE, on SM12x B12X_MLA_SPARSE."]),
        ({"VLLM_DCP_CKV_GATHER": "1", "VLLM_DCP_QUERY_SPLIT": "1"}, 2, [Layer("FLASHINFER_MLA_SPARSE"), INDEXER], ["VLLM_DCP_CKV_GATHER=1 has no effect"]),
        ({"VLLM_DCP_CKV_GATHER": "1", "VLLM_DCP_QUERY_SPLIT": "1"}, 2, [Layer("FLASH_ATTN_MLA")],
         ["VLLM_DCP_CKV_GATHER=1 has no effect: the model has no sparse indexer (its attention backends: FLASH_ATTN_MLA)", "VLLM_DCP_QUERY_SPLIT=1 has no effect: the model has no sparse"]),
        ({"VLLM_DCP_CKV_GATHER": "1"}, 1, [Layer("FLASHMLA_SPARSE"), INDEXER], ["VLLM_DCP_CKV_GATHER=1 has no effect: decode_context_parallel_size is 1"]),
        ({"VLLM_DCP_QUERY_SPLIT": "1"}, 1, [Layer("FLASHMLA_SPARSE"), INDEXER], ["VLLM_DCP_QUERY_SPLIT=1 has no effect: decode_context_parallel_size is 1"]),
        ({"VLLM_B12X_MLA_CKV_GATHER": "1"}, 2, [Layer("FLASHMLA_SPARSE"), INDEXER], ["VLLM_B12X_MLA_CKV_GATHER=1 has no effect: the attention backend FLASHMLA_SPARSE"]),
        ({"VLLM_DCP_CKV_PREFETCH": "1"}, 2, [Layer("FLASHMLA_SPARSE")], ["VLLM_DCP_CKV_PREFETCH=1 has no effect: set VLLM_DCP_CKV_GATHER=1, too."]),
        ({"VLLM_DCP_CKV_PREFETCH": "0"}, 2, [Layer("FLASHMLA_SPARSE")], []),
    ],
)  # fmt: skip
def test_one_warning_for_a_flag_that_no_layer_took(alone, monkeypatch, lines, env, dcp, layers, warnings):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        finish_dcp_features(built(make_config(dcp), *layers))
    assert len(lines()) == len(warnings)
    assert all(want in got for want, got in zip(warnings, lines()))


def test_layers_that_gather_allocate_and_nobody_is_warned(alone, monkeypatch, lines):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    calls = []
    gather = NS(shared_by_ranks={})
    layers = [Layer("FLASHMLA_SPARSE", ckv_gather=gather, allocate_ckv_gather=lambda i=i: calls.append(i)) for i in range(2)]
    finish_dcp_features(built(make_config(2), *layers, Layer("FLASHMLA_SPARSE", ckv_gather=None), INDEXER))
    assert calls == [0, 1] and not lines()


@pytest.mark.parametrize("found, compacts", [([None, None], True), ([None, "3 rows of 64 heads differ"], False), (["metadata of another shape", None], False)])
def test_all_ranks_compact_or_none(alone, monkeypatch, lines, found, compacts):
    """Whatever this rank found: another one's kernel may be another."""
    monkeypatch.setenv("VLLM_DCP_COMPACT_TOPK", "1")
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: NS(world_size=2, cpu_group=None))

    def gather(objects, own, group):
        assert own == found[0]
        objects[:] = found

    monkeypatch.setattr(dcp_features.dist, "all_gather_object", gather)
    layers = [Layer("FLASHMLA_SPARSE", compact_topk=True, check_topk_compaction=lambda config: found[0]) for _ in range(2)]
    finish_dcp_features(built(make_config(2), *layers, INDEXER))
    assert [layer.impl.compact_topk for layer in layers] == [compacts] * 2
    assert len(lines()) == (not compacts)
    if not compacts:
        assert next(text for text in found if text) in lines()[0] and "as without the flag" in lines()[0]


def test_compaction_that_no_layer_takes(alone, monkeypatch, lines):
    monkeypatch.setenv("VLLM_DCP_COMPACT_TOPK", "1")
    finish_dcp_features(built(make_config(2), Layer("FLASHMLA_SPARSE", compact_topk=False), INDEXER))
    (line,) = lines()
    assert line.startswith("VLLM_DCP_COMPACT_TOPK=1 has no effect: it is for FLASHMLA_SPARSE with an fp8_ds_mla cache on SM90")


def test_the_worker_finishes_behind_the_pool_of_the_weights(monkeypatch):
    """The real Worker.load_model: sleep mode copies what is allocated inside of the pool to the host."""
    from vllm.v1.worker import gpu_worker

    log = []

    @contextlib.contextmanager
    def pool(tag):
        log.append(f"enter {tag}")
        yield
        log.append(f"leave {tag}")

    worker = NS(
        vllm_config=NS(weight_transfer_config=None),
        model_runner=NS(load_model=lambda load_dummy_weights: log.append("load")),
        _maybe_get_memory_pool_context=pool,
        _scoped_allocator_max_split=lambda max_split_size_mb: contextlib.nullcontext(),
    )
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(gpu_worker, "finish_dcp_features", lambda config: log.append("finish"))
    monkeypatch.setattr(gpu_worker, "set_torch_threads_for_runtime", lambda: None)
    gpu_worker.Worker.load_model(worker)
    assert log == ["enter weights", "load", "leave weights", "finish"]


# ------------------------------------------------------------------------------------------------ the interleave that NIXL brings later

NIXL = dict(kv_connector="NixlConnector", kv_role="kv_both")


def nixl_config(world=8, auto=True, **more):
    config = make_config(world, max_num_seqs=64, max_model_len=65536, **more)
    config.kv_transfer_config = KVTransferConfig(**NIXL)
    config.parallel_config._allow_auto_resolve_cp_interleave_size = auto
    return config


def push_interleave(config, block_size):
    """EngineCore's order of calls: the model was built; now upstream resolves the interleave and workers are told."""
    real = VllmConfig.__new__(VllmConfig)
    for name in ("kv_transfer_config", "parallel_config"):
        object.__setattr__(real, name, getattr(config, name))
    VllmConfig.adjust_dcp_kv_cache_interleave_size(real, [NS(kv_cache_spec=NS(block_size=block_size))])
    worker = NS(vllm_config=NS(cache_config=NS(kv_cache_layout=None), parallel_config=config.parallel_config))
    import vllm.v1.worker.worker_base as module

    module.record_kv_cache_layout = lambda cache_config, layout: None
    WorkerBase.set_kv_cache_layout(worker, "NHD", config.parallel_config.cp_kv_cache_interleave_size)
    return config.parallel_config.cp_kv_cache_interleave_size


def layer_of(config):
    config.compilation_config.static_forward_context["layer"] = NS(impl=NS(ckv_gather=CKVGatherConfig.from_vllm_config(config, "fp8_ds_mla"), ckv_workspace=NS(prefetch=object())))


def planner_of(config):
    return ckv_plan.make_ckv_gather_planner(CKVGatherConfig.from_vllm_config(config, "fp8_ds_mla"), config, ["layer"], torch.device("cpu"))


def test_buffers_are_sized_for_the_interleave_that_comes(monkeypatch):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    config = nixl_config()
    layer_of(config)
    reserved = config.compilation_config.static_forward_context["layer"].impl.ckv_gather
    assert reserved.interleave == 1
    assert push_interleave(config, 64) == 64
    planner = planner_of(config)
    assert planner.config.interleave == 64 and planner.config.rows_per_rank == reserved.rows_per_rank
    # Sixteen requests with 64 tokens more than a multiple of a stripe: all of these are rank 0's.
    lens = [8 * 64 * 63 + 64] * 16
    assert sum(lens) <= planner.config.max_tokens
    assert ckv_layout(torch.tensor(lens).numpy(), 8, 64).padded_total <= reserved.rows_per_rank


def test_buffers_that_are_too_small_are_an_error_with_a_way_out(monkeypatch):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    monkeypatch.setattr(ckv_config, "_later_interleave", lambda config: 0)  # the fault
    config = nixl_config()
    layer_of(config)
    push_interleave(config, 64)
    with pytest.raises(RuntimeError, match="--cp-kv-cache-interleave-size 64"):
        planner_of(config)


def test_an_explicit_interleave_stays(monkeypatch):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    config = nixl_config(auto=False, interleave=16)
    layer_of(config)
    assert config.compilation_config.static_forward_context["layer"].impl.ckv_gather.later_interleave == 0
    assert push_interleave(config, 64) == 16


def test_a_prefetch_that_the_buffers_lack_is_not_planned(monkeypatch):
    monkeypatch.setenv("VLLM_DCP_CKV_GATHER", "1")
    config = make_config(2)
    layer_of(config)
    assert planner_of(config).config.prefetch
    config.compilation_config.static_forward_context["layer"].impl.ckv_workspace = NS(prefetch=None)
    assert not planner_of(config).config.prefetch


# ------------------------------------------------------------------------------------------------ sleep mode


@pytest.fixture
def pools(monkeypatch):
    """A workspace manager whose pool says when it is used."""
    used = []

    @contextlib.contextmanager
    def pool():
        used.append("enter")
        yield
        used.append("leave")

    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"), num_lanes=2, alloc_context=pool)
    group = NS(world_size=2, torch_distributed_backend="gloo", unique_name="fake", cpu_group=None)
    monkeypatch.setattr(ckv_gather, "get_ckv_prefetch_group", lambda: group)
    yield used
    workspace.reset_workspace_manager()


CONFIG = CKVGatherConfig(
    dcp_world_size=2, dcp_rank=0, interleave=1, min_tokens=0, max_tokens=1000, max_num_seqs=2, max_num_batched_tokens=64, record_bytes=656,
    decode_query_len=1, local_heads=16, link_gbps=220, prefetch=True, discard_on_sleep=True,
)  # fmt: skip


@pytest.mark.parametrize("prefetch", [False, True])
def test_buffers_are_scratch_of_the_workspace_pool(pools, prefetch):
    """Which sleep discards without a copy. What has content, the page tables, is not in it."""
    arange, inside = torch.arange, []

    def noted(*args, **kwargs):
        inside.append(pools.count("enter") > pools.count("leave"))
        return arange(*args, **kwargs)

    torch.arange = noted
    try:
        reserved = reserve_ckv_gather_workspace(dataclasses.replace(CONFIG, prefetch=prefetch))
    finally:
        torch.arange = arange
    assert pools == ["enter", "leave"]
    assert inside == [False] * prefetch and (reserved.prefetch is not None) == prefetch


def test_garbage_after_waking_up_is_no_content(pools):
    """What sleep level 2 leaves of the buffers is garbage: nothing of it is read before it is written."""
    reserved = reserve_ckv_gather_workspace(CONFIG)
    pages = reserved.prefetch._pages.clone()
    for buffer in reserved.prefetch.buffers:
        buffer.fill_(255)
    assert torch.equal(reserved.prefetch._pages, pages)
    storages = {buffer.untyped_storage().data_ptr() for buffer in reserved.prefetch.buffers}
    assert reserved.prefetch._pages.untyped_storage().data_ptr() not in storages


def test_a_lane_is_that_of_the_layer(pools):
    with workspace.use_workspace_lane(1):
        later = later_in_this_lane(reserve_ckv_gather_workspace, CONFIG)
    target = reserve_ckv_gather_workspace(CONFIG)
    draft = later()
    with workspace.use_workspace_lane(1):
        assert draft is reserve_ckv_gather_workspace(CONFIG) is not target


# ------------------------------------------------------------------------------------------------ beside kernels that wait


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        (dict(parallel_config__all2all_backend="deepep_high_throughput"), None),  # without expert parallelism nobody uses it
        (dict(parallel_config__all2all_backend="deepep_high_throughput", parallel_config__enable_expert_parallel=True), "all2all_backend=deepep_high_throughput"),
        (dict(parallel_config__enable_expert_parallel=True), None),
        (dict(compilation_config__pass_config__fuse_allreduce_rms=True), "pass_config.fuse_allreduce_rms"),
        (dict(fused=object()), "FlashInfer"),
        (dict(fused=object(), tp=1), None),
    ],
)
def test_kernels_that_compute_and_wait(monkeypatch, change, reason):
    from vllm.model_executor.layers import fused_allreduce_gemma_rms_norm as fused

    change = dict(change)
    monkeypatch.setattr(ckv_config, "current_platform", NS(is_cuda=lambda: True))
    monkeypatch.setattr(fused, "flashinfer_trtllm_fused_allreduce_norm", change.pop("fused", None))
    found = waits_in_kernels(make_config(1 if "tp" in change else 2, **change))
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.parametrize("waits_on_sms, kernels, ahead", [(True, None, True), (False, "DeepEP", True), (True, "DeepEP", False)])
def test_no_look_ahead_by_kernels_beside_kernels(pools, monkeypatch, lines, waits_on_sms, kernels, ahead):
    def empty(shape, device, group, sleeps_in=None):
        return ckv_gather.empty_for_gathers.__globals__["GatherMemory"](torch.empty(shape, dtype=torch.uint8), None, False, waits_on_sms)

    monkeypatch.setattr(ckv_gather, "empty_for_gathers", type("F", (), {"__call__": staticmethod(empty), "__globals__": ckv_gather.empty_for_gathers.__globals__})())
    config = dataclasses.replace(CONFIG, waits_in_kernels=kernels)
    reserved = reserve_ckv_gather_workspace(config)
    assert (reserved.prefetch is not None) == ahead
    assert len(reserved.gathered) == config.gathered_rows
    assert reserved.gathered.untyped_storage().nbytes() == (2 if ahead else 1) * config.gathered_rows * 656
    assert [line for line in lines() if "prefetch is off" in line and "DeepEP" in line] == lines() and len(lines()) == (not ahead)


# ------------------------------------------------------------------------------------------------ captures


def test_any_capture_is_noticed(monkeypatch):
    """Both model runners capture inside upstream's graph_capture, whatever kind of graph."""
    group = NS(graph_capture=lambda context: contextlib.nullcontext())
    for name in ("_TP", "_PP", "_DP"):
        monkeypatch.setattr(parallel_state, name, group)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    assert not in_ckv_capture()
    with contextlib.suppress(RuntimeError), parallel_state.graph_capture("cuda:0"):
        assert in_ckv_capture()
        with ckv_capture():
            assert in_ckv_capture()
        assert in_ckv_capture()
        raise RuntimeError
    assert not in_ckv_capture()


def test_this_machine_is_no_cuda():
    """Else some tests above would look at the wrong thing."""
    assert not current_platform.is_cuda()
