# SPDX-License-Identifier: Apache-2.0
"""Prefetched CKV buffers on 2 to 8 gloo ranks on the CPU: byte for byte what lies in the paged caches, in every layer and step.

Real: groups, collectives, planner, prefetch, Triton kernel. There are no streams on a CPU; the order of streams is the matter
of tests/runtime/v0_33_0/test_ckv_prefetch_state.py and tests/gpu/test_ckv_prefetch_gpu.py.
"""
import numpy as np
import pytest
import torch

import tests.distributed.preload_v0_33_0  # noqa: F401
from tests.distributed.ranks import in_dcp_world, run_ranks
from tests.gpu._ckv_prefetch import ENV, SCENARIO, Model, Solo, check, compare, random_scenario
from tests.gpu._ckv_ranks import Batch, Rank

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(400)]


def ranks(world, fn, *args):
    return run_ranks(in_dcp_world, world, fn, *args, env=ENV, timeout=350)


def _compare(rank, world, interleaves, layers):
    return compare(rank, world, "cpu", interleaves, layers)


@pytest.mark.parametrize("world, interleaves, layers", [(2, (1, 64), 5), (4, (16,), 3), (8, (1,), 2), (2, (16,), 1)])
def test_gathered_bytes_are_the_caches_bytes(world, interleaves, layers):
    """3 and more steps, odd and even layer counts, chunks of several requests. The gathers on each communicator are counted:
    a prefetch that never starts would pass the comparison."""
    check(ranks(world, _compare, interleaves, layers), SCENARIO, interleaves, layers)


def _random_steps(rank, world, scenario):
    return compare(rank, world, "cpu", (16,), 3, True, scenario, ahead=5, host_delays=True, max_len=512)


def test_random_steps():
    """The scenario of tests/gpu/test_ckv_prefetch_gpu.py over NCCL, shorter."""
    scenario = random_scenario(2, 40)
    check(ranks(2, _random_steps, scenario), scenario, (16,), 3)


def _odd_paths(rank, world):
    """Layers skipped, run twice, joining late; caches bound anew in the middle."""
    model = Model(rank, world, "cpu", interleave=16, layers=3, prefetch=True)
    bad = []
    for number, (batch, only) in enumerate(
        [([(0, 70), (1, 40)], [0, 1]), ([(0, 40)], None), ([(0, 40)], [0, 2]), ([(0, 40)], [0]), ([(1, 40)], None), ([(0, 9)], [1, 1, 2, 2]), ([(1, 30), (0, 5)], None)]
    ):
        step = model.start(number, batch)
        if only is not None:
            # The other layers' caches must hold the chunk too, for later steps.
            for layer in model.layers:
                if layer.index not in only:
                    slots, data = step.writes[layer.index]
                    layer.kv_cache.view(-1, data.shape[1])[slots] = data
        bad += [(number, layer) for layer in model.wrong_layers(step, model.run(step, only))]
    model.bind()
    for number, batch in enumerate([[(0, 70)], [(0, 30), (1, 40)], [(0, 30), (1, 40)]], start=10):
        step = model.start(number, batch)
        bad += [(number, layer) for layer in model.wrong_layers(step, model.run(step))]
    model.workspace.prefetch.close()
    return bad


def test_layers_that_skip_repeat_and_join():
    assert ranks(2, _odd_paths) == [[], []]


def _solo(rank, world):
    """The one-process model of tests/gpu/test_ckv_prefetch_gpu.py, so that it is tried without a GPU too."""
    bad = []
    for prefetch in (False, True):
        model = Solo(4, "cpu", interleave=16, layers=3, prefetch=prefetch)
        for number, planned in enumerate(SCENARIO):
            step = model.start(number, *planned)
            bad += [(number, layer) for layer in model.wrong_layers(step, model.run(step))]
    return bad


def test_one_process_model():
    assert ranks(1, _solo) == [[]]


def _mutant(rank, world, how):
    """Wrong ways: "no-append", "first-history" (every chunk behind as many rows as the first request's history: positions that
    do not start anew with each request), "stale" (all rows prefetched, before the layer wrote its chunk), "shared-buffer"."""
    from vllm.v1.attention.ops import ckv_prefetch_plan
    from vllm.v1.attention.ops import ckv_prefetch_torch as binding
    from vllm.v1.attention.ops.ckv_layout import shard_lens

    segments = ckv_prefetch_plan.ckv_late_segments
    if how == "no-append":
        binding.CKVPrefetcher._append_late_rows = lambda self, *args: None
    elif how == "first-history":

        def first_history(layout, early, late, me):
            parts, late_rows = segments(layout, early, late, me)
            bounds = shard_lens(late[:, 1:], layout.dcp_world_size, layout.interleave)
            targets = np.arange(layout.dcp_world_size)[:, None] * layout.padded_total + layout.rank_req_starts[:, late[:, 0]] + bounds[:, :1, 0]
            parts[2][:, 2] = targets[bounds[..., 1] > bounds[..., 0]]
            return parts, late_rows

        ckv_prefetch_plan.ckv_late_segments = first_history
    elif how == "stale":

        def all_history(layout, early, late, me):
            parts, late_rows = segments(layout, early, late, me)
            parts[0] = segments(layout, np.concatenate([early, late]), late, me)[0][0]
            parts[2] = parts[2][:0]
            return parts, late_rows

        ckv_prefetch_plan.ckv_late_segments = all_history
    elif how == "shared-buffer":
        init = binding.CKVPrefetcher.__init__

        def same(self, buffers, *args):
            init(self, [buffers[0]] * 2, *args)

        binding.CKVPrefetcher.__init__ = same
    return [compare(rank, world, "cpu", (1,), 3, scenario=scenario)[0][1, True] for scenario in (SCENARIO, random_scenario(0, 12))]


@pytest.mark.parametrize("how", ["no-append", "first-history", "stale", "shared-buffer"])
def test_broken_on_purpose_is_seen(how):
    assert all(wrong for found in ranks(2, _mutant, how) for wrong in found)


def _attention(rank, world, layer_kind, early):
    """Three layers, three steps, outputs with prefetch on and off; how many gathers were prefetched."""
    from tests.gpu._ckv_prefetch import attention_outputs

    outputs = {prefetch: attention_outputs(Rank, Batch, rank, world, "cpu", prefetch, layer_kind, early) for prefetch in (0, 1)}
    same = [torch.equal(a, b) for a, b in zip(outputs[0][0], outputs[1][0], strict=True)]
    return same, outputs[0][1], outputs[1][1], max(outputs[1][2]), outputs[1][3]


@pytest.mark.parametrize("layer_kind, early", [("generic", True), ("fused", True), ("fused", False)])
def test_attention_is_bit_identical(layer_kind, early):
    """Only the fused layer has work between its KV write and its attention, and begins to gather before it."""
    for same, without, prefetched, worst, begun in ranks(2, _attention, layer_kind, early):
        assert same == [True] * 9
        assert (without, prefetched) == (0, 4)
        assert worst < 1e-2
        assert begun == (9 if layer_kind == "fused" and early else 0)
