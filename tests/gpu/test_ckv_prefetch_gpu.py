# SPDX-License-Identifier: Apache-2.0
"""The CKV prefetch with real streams: every gathered buffer byte for byte, attention bit for bit.

Ranks as processes (tests/gpu/ranks.py) exchange for real. Over NCCL their streams run freely; on one GPU gloo blocks the host
and so orders them. There one process that knows what the other ranks would send copies it on the device, with random sleeps on
both streams, and machines that lack a wait are seen.
"""
import multiprocessing

import pytest
import torch

from tests.gpu import ranks
from tests.gpu._ckv_prefetch import ENV, SCENARIO, Solo, attention_outputs, check, compare, random_scenario
from tests.gpu._ckv_ranks import Batch, Rank

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(900)]

LAYERS = 5


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Inherited by spawned ranks: the prefetch group is made with the others."""
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)


def _compare(rank, world, interleaves, layers):
    return compare(rank, world, ranks.device(rank), interleaves, layers, True)


@pytest.mark.parametrize("world, interleaves, layers", [(2, (1, 64), LAYERS), (4, (16,), LAYERS), (8, (1,), 3)])
def test_gathered_bytes_are_the_caches_bytes(world, interleaves, layers):
    check(ranks.run_dcp_ranks(_compare, world, interleaves, layers, timeout=600), SCENARIO, interleaves, layers)


def _random_steps(rank, world, interleaves, layers, scenario):
    return compare(rank, world, ranks.device(rank), interleaves, layers, True, scenario, ahead=5, host_delays=True, max_len=512)


@pytest.mark.parametrize("world, interleaves, layers", [(2, (1, 64), 3), (4, (16,), 4), (8, (64,), 3)])
def test_200_random_steps_over_nccl(world, interleaves, layers):
    """Two communicators on two streams, and ranks that sleep unlike each other on both and on the host: no hang, no wrong byte."""
    ranks.require_nccl(world)
    scenario = random_scenario(world, 200)
    check(ranks.run_dcp_ranks(_random_steps, world, interleaves, layers, scenario, timeout=600), scenario, interleaves, layers)


# ------------------------------------------------------------------------------------------------ streams that run freely


def solo(seed, *, prefetch=True, layers=LAYERS, sleep=None, steps=SCENARIO, interleave=16):
    """Wrong (step, layer) of rank 0 of 4. All steps are enqueued before anything is compared, so the host never waits."""
    model = Solo(4, "cuda", interleave=interleave, layers=layers, prefetch=prefetch, delays=True)
    model.random.seed(seed)
    if sleep is not None:
        model.sleep = lambda: sleep(model)
    done = []
    for number, planned in enumerate(steps):
        step = model.start(number, *planned)
        expected = {layer.index: torch.from_numpy(model.expected(layer.index, step)) for layer in model.layers}
        done.append((number, expected, model.run(step)))
    return [(number, layer) for number, expected, copies in done for layer, copy in copies.items() if not torch.equal(copy.cpu(), expected[layer])]


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("layers", [3, LAYERS])
def test_random_sleeps_on_both_streams(layers, prefetch):
    for seed in range(6):
        assert solo(seed, prefetch=prefetch, layers=layers) == []


def main_is_slow(model):
    """The host and the side stream run far ahead of the main stream."""
    if model.workspace.prefetch is not None and torch.cuda.current_stream() != model.workspace.prefetch.streams.side():
        torch.cuda._sleep(4_000_000)


def side_is_slow(model):
    if model.workspace.prefetch is not None and torch.cuda.current_stream() == model.workspace.prefetch.streams.side():
        torch.cuda._sleep(8_000_000)


@pytest.mark.parametrize("sleep", [main_is_slow, side_is_slow])
def test_one_slow_stream(sleep):
    assert solo(0, sleep=sleep) == []


def _without_waits(missing, sleep):
    """Whether `solo` notices that a transition of the state machine waits for nothing: wrong bytes, or a kernel that trips over them."""
    from vllm.v1.attention.ops.ckv_prefetch import CKVPrefetchState

    method = getattr(CKVPrefetchState, missing)

    def without_waits(self, *args):
        wait, self._streams.wait = self._streams.wait, lambda stream, event: None
        try:
            return method(self, *args)
        finally:
            self._streams.wait = wait

    setattr(CKVPrefetchState, missing, without_waits)
    try:
        return solo(0, sleep={"main": main_is_slow, "side": side_is_slow}[sleep]) != []
    except torch.AcceleratorError:
        return True


@pytest.mark.parametrize("missing, sleep", [("consume", "main"), ("complete", "side")])
def test_a_missing_wait_is_seen(missing, sleep):
    """In a process of its own, whose CUDA context may not survive."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(_without_waits, (missing, sleep)).get(timeout=200)


def test_reset_waits_for_the_side_stream():
    """A gather in flight has ended when caches are bound anew."""
    model = Solo(4, "cuda", interleave=16, layers=2, prefetch=True)
    for number, batch in enumerate([[(0, 70)], [(0, 70)]]):
        model.run(model.start(number, batch))
    model.sleep = lambda: side_is_slow(model)
    model.run(model.start(2, [(0, 70)]), only=[0])
    side = model.workspace.prefetch.streams.side()
    assert not side.query()
    model.bind()
    assert side.query()


# ------------------------------------------------------------------------------------------------ attention


def _attention(rank, world, layer_kind, early):
    outputs = {}
    for prefetch in (0, 1):
        outputs[prefetch] = attention_outputs(Rank, Batch, rank, world, ranks.device(rank), prefetch, layer_kind, early, topk=512, max_tokens=256, max_model_len=4096)
        torch.cuda.synchronize()
    same = [torch.equal(a, b) for a, b in zip(outputs[0][0], outputs[1][0], strict=True)]
    return same, outputs[0][1], outputs[1][1], max(outputs[1][2]), outputs[1][3]


@pytest.mark.parametrize("layer_kind, early", [("generic", True), ("fused", True), ("fused", False)])
def test_attention_is_bit_identical(layer_kind, early):
    for same, without, prefetched, worst, begun in ranks.run_dcp_ranks(_attention, 2, layer_kind, early):
        assert same == [True] * 9
        assert (without, prefetched) == (0, 4)
        assert worst < 1e-2
        assert begun == (9 if layer_kind == "fused" and early else 0)
