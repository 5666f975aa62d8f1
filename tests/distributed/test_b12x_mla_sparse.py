# SPDX-License-Identifier: Apache-2.0
"""B12X_MLA_SPARSE on 1 to 8 gloo ranks on the CPU: real builder, impl, layers, Triton kernels, merge and CKV gather.

The kernels of `b12x` need SM12x: the package's own pure-torch reference stands in (tests/gpu/_b12x_ranks.py). The oracle is
dense float64 attention over the selected records. TOLERANCE: outputs are bfloat16 (relative 2**-9), partial ones too.
"""

import math

import pytest

import tests.distributed.preload_v0_33_0  # noqa: F401
from tests.distributed.ranks import in_dcp_world, run_ranks
from tests.gpu._b12x_ranks import B12xRank, use_stand_in
from tests.gpu._ckv_ranks import Batch, error

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(600)]

TOLERANCE = 1e-2
HEADS = 16
# name -> requests (context, query), decodes among them
BATCHES = {
    "decode": ([(40, 1), (129, 1), (700, 1)], 3),
    "decode-empty-shards": ([(0, 1), (1, 1), (3, 1), (9, 1)], 4),
    "extend": ([(0, 17), (63, 3), (255, 2)], 0),
    "second-chunk": ([(250, 20)], 0),
    "mixed": ([(40, 1), (0, 1), (0, 12), (64, 10)], 2),
}
CONFIG = dict(heads=HEADS, max_tokens=64, max_model_len=1024)


def _in_world(rank, world, fn, *args):
    return in_dcp_world(rank, world, lambda rank, world: fn(rank, world, use_stand_in(), *args))


def _batch(name, heads=HEADS, holes=False):
    requests, num_decodes = BATCHES[name]
    return Batch(requests, num_decodes=num_decodes, topk=512, heads=heads, seed=len(name), holes=holes)


def _compare(rank, world, stand_in, interleave, layer, dtype, heads, names):
    import vllm.v1.attention.ops.ckv_gather as core

    found, calls = {}, []
    gather = core.all_gather_bytes
    core.all_gather_bytes = lambda *a: (calls.append(1), gather(*a))
    me = B12xRank(rank, world, "cpu", stand_in, interleave=interleave, cache_dtype=dtype, **{**CONFIG, "heads": heads})
    for flag in (0, 1) if world > 1 else (0,):
        me.build(VLLM_DCP_CKV_GATHER=flag)
        me.impl.kernels.warm_up()
        prepared = len(stand_in.prepared)
        for name in names:
            # Without DCP upstream takes the ids of a row to be without holes.
            batch = _batch(name, heads, holes=world > 1 and name == "extend")
            me.load(batch)
            calls.clear()
            stand_in.runs.clear()
            metadata = me.metadata(batch)
            prefill = metadata.num_prefills > 0
            assert metadata.num_decodes == BATCHES[name][1]
            out = me.run(batch, layer, metadata)
            assert len(calls) == (flag and prefill)
            modes = [mode for mode, _, _ in stand_in.runs]
            assert modes == ((["extend", "decode"] if metadata.num_decodes else ["extend"]) if flag and prefill else ["extend" if prefill else "decode"])
            if flag and prefill:
                assert stand_in.runs[0][1:] == (sum(batch.query_lens[metadata.num_decodes :]), -(-heads // world // 8) * 8)
            found[name, flag] = error(out, me.reference(batch))
        # Warmed up, serving compiles nothing.
        assert len(stand_in.prepared) == prepared
    return found


ALL = list(BATCHES)


@pytest.mark.parametrize(
    "world, interleave, layer, dtype, heads, names",
    [
        (1, 1, "generic", "fp8_ds_mla", 16, ALL),
        (1, 1, "fused", "nvfp4_ds_mla", 20, ["decode", "mixed"]),
        (2, 1, "fused", "fp8_ds_mla", 16, ALL),
        (2, 64, "generic", "nvfp4_ds_mla", 16, ALL),
        # 20 gathered heads pad to 24, 10 local ones to 16.
        (2, 16, "generic", "fp8_ds_mla", 20, ["decode", "mixed"]),
        (4, 16, "generic", "fp8_ds_mla", 16, ["decode-empty-shards", "second-chunk", "mixed"]),
        (8, 1, "fused", "nvfp4_ds_mla", 16, ["decode-empty-shards", "mixed"]),
    ],
)
def test_against_float64(world, interleave, layer, dtype, heads, names):
    for found in run_ranks(_in_world, world, _compare, interleave, layer, dtype, heads, names, timeout=550):
        assert all(value < TOLERANCE for value in found.values()), found


# ------------------------------------------------------------------------------------------------ break it on purpose


def _break(rank, world, stand_in):
    import vllm.v1.attention.backends.mla.b12x_mla_sparse as backend
    import vllm.v1.attention.ops.ckv_gather as core

    me = B12xRank(rank, world, "cpu", stand_in, interleave=16, **CONFIG)
    found = {}
    remap, gather = backend.map_global_topk_to_gathered_ckv, core.all_gather_bytes

    def wrong_start(ids, req_ids, causal, starts, *rest, **out):
        starts = starts.clone()
        starts[-1, -1] += 1
        return remap(ids, req_ids, causal, starts, *rest, **out)

    for flag, name in ((0, "mixed"), (0, "decode"), (1, "mixed")):
        batch = _batch(name)
        me.build(VLLM_DCP_CKV_GATHER=flag)
        me.load(batch)
        found[f"nothing-{name}-{flag}"] = error(me.run(batch), me.reference(batch))
        kernels = type(me.impl.kernels)
        if flag == 0:
            # A logarithm in the wrong base weighs the shards wrongly.
            run, factor = kernels._run, 1 / math.log(2)
            kernels._run = lambda *a, run=run, factor=factor: (lambda out, lse: (out, lse * factor))(*run(*a))
            found[f"lse-base-{name}"] = error(me.run(batch), me.reference(batch))
            kernels._run = run
        else:
            backend.map_global_topk_to_gathered_ckv = wrong_start
            found["wrong-start"] = error(me.run(batch), me.reference(batch))
            backend.map_global_topk_to_gathered_ckv = remap
            core.all_gather_bytes = lambda *a: None
            found["stale-workspace"] = error(me.run(batch), me.reference(batch))
            core.all_gather_bytes = gather
    return found


def test_broken_on_purpose_is_seen():
    for found in run_ranks(_in_world, 2, _break, timeout=550):
        for how, value in found.items():
            assert value < TOLERANCE if how.startswith("nothing") else value > 3 * TOLERANCE, found


# ------------------------------------------------------------------------------------------------ plans


def _plans(rank, world, stand_in):
    import vllm.v1.attention.backends.mla.b12x_mla_sparse as backend

    said = []
    backend.logger.info_once = lambda text, *a, **k: said.append(text % a)
    me = B12xRank(rank, world, "cpu", stand_in, **CONFIG, max_num_seqs=8)
    me.build(VLLM_DCP_CKV_GATHER=0, VLLM_B12X_MLA_CKV_GATHER="always", VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS=12, VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS=300)
    assert (me.impl.ckv_gather.min_tokens, me.impl.ckv_gather.max_tokens) == (12, 300) == (me.builder.ckv_gather.config.min_tokens, me.builder.ckv_gather.config.max_tokens)
    assert not said
    kernels = me.impl.kernels
    assert [(p.name, p.rows, p.heads, p.return_lse) for p in kernels.plans] == [
        ("decode.1", 1, 16, True),
        ("decode.2", 2, 16, True),
        ("decode.4", 4, 16, True),
        ("decode.8", 8, 16, True),
        ("extend", 64, 16, True),
        ("gathered", 64, 8, False),
    ]
    caps = kernels.gathered.plan.caps
    assert caps.max_kv_rows == me.impl.ckv_gather.gathered_rows == caps.max_page_table_width * 64
    assert [kernels.select(n, True).name for n in (1, 3, 8, 9)] == ["decode.1", "decode.4", "decode.8", "extend"]
    assert kernels.select(3, False).name == "extend"

    # The registry of upstream's warm-up finds the plans, and each decode plan is first run full.
    from vllm.model_executor.warmup import cutedsl_warmup

    (unit,) = [u for u in cutedsl_warmup._iter_cutedsl_warmup_compile_units() if u.key[1] == kernels.geometry]
    unit.compile()
    assert all(p.ready for p in kernels.plans) and len(stand_in.prepared) == 6
    assert [p.plan.first_rows for p in kernels.decode] == [1, 2, 4, 8]
    assert len({request.name for request in stand_in.prepared}) == 6

    # Layers share the plans.
    assert B12xRank(rank, world, "cpu", stand_in, **CONFIG).build(VLLM_B12X_MLA_CKV_GATHER="always", VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS=300).impl.kernels is kernels

    # A capture never gathers; the rest of the time these rows do.
    batch = _batch("second-chunk")
    me.load(batch)
    assert me.metadata(batch).ckv_gather is not None
    assert me.builder.build_for_cudagraph_capture(batch.common(me)).ckv_gather is None

    # Chosen by nobody: one line in the log.
    B12xRank(rank, world, "cpu", stand_in, **CONFIG, attention_config__backend=None).build()
    assert len([text for text in said if "B12X_MLA_SPARSE" in text]) == 1, said

    # The exchange path needs the LSE of all rows, DCP 1 of none.
    return kernels.scratch_bytes


def test_plans_flags_and_warm_up():
    run_ranks(_in_world, 2, _plans)


def _no_late_compile(rank, world, stand_in):
    me = B12xRank(rank, world, "cpu", stand_in, **CONFIG).build()
    batch = _batch("decode")
    me.load(batch)
    assert error(me.run(batch), me.reference(batch)) < TOLERANCE  # not warmed up: compiled on the way, and full
    plan = me.impl.kernels.select(3, True)
    assert plan.ready and plan.plan.first_rows == plan.rows == 4
    assert me.impl.need_to_return_lse_for_decode is False and not plan.return_lse


def test_a_plan_that_was_not_warmed_up_is_first_run_full():
    run_ranks(_in_world, 1, _no_late_compile)
