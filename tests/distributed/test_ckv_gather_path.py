# SPDX-License-Identifier: Apache-2.0
"""The whole gather path on 2 to 8 gloo ranks on the CPU: real builder, impl, layers, Triton kernels and collectives.

Only compiled operations are torch references (`use_torch_ops`). The reference is dense float64 attention over the selected
records. TOLERANCE: outputs and the upconverted records are bfloat16 (relative 2**-9 each), nothing else differs.
"""
import pytest

import tests.distributed.preload_v0_33_0  # noqa: F401
from tests.distributed.ranks import in_dcp_world, run_ranks
from tests.gpu._ckv_ranks import Batch, Rank, broken, error

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(300)]

TOLERANCE = 1e-2
HEADS = 16
# (context, query) of each request, and how many of them decode. Decodes of several tokens verify drafts: the builder calls them prefills.
BATCHES = {
    "one-short": ([(0, 17)], 0),
    "two-of-16": ([(0, 16), (0, 16)], 0),
    "second-chunk": ([(250, 20)], 0),
    "five-unequal": ([(0, 2), (9, 9), (63, 3), (255, 2), (120, 8)], 0),
    "mixed": ([(40, 1), (129, 1), (0, 12), (64, 10)], 2),
    "mixed-empty-shard": ([(0, 1), (3, 1), (5, 20)], 2),
    "verifying": ([(40, 1), (129, 4), (3, 3), (0, 12), (64, 10)], 3),
}


def _compare(rank, world, interleave, names, layer):
    from vllm.v1.attention.ops import ckv_gather

    results = {}
    calls = []
    gather = ckv_gather.all_gather_bytes
    ckv_gather.all_gather_bytes = lambda *a: (calls.append(1), gather(*a))
    speculative = type("S", (), {"num_speculative_tokens": 3, "parallel_drafting": False})
    rank_ = Rank(rank, world, "cpu", interleave=interleave, heads=HEADS, max_tokens=64, max_model_len=512, speculative_config=speculative)
    for name in names:
        requests, num_decodes = BATCHES[name]
        prefilling = [i >= num_decodes for i in range(len(requests))]
        batch = Batch(requests, num_decodes=num_decodes, heads=HEADS, seed=len(name), holes="unequal" in name, prefilling=prefilling)
        outputs = {}
        for gather_flag in (0, 1):
            rank_.build(CKV_GATHER="always" if gather_flag else 0, CKV_GATHER_MIN_TOKENS=16)
            # The harness gives interleave 1 a decode threshold of 128 rows, as upstream does: these short prefills
            # must count as prefills.
            rank_.builder.reorder_batch_threshold = 1
            rank_.load(batch)
            calls.clear()
            merged = []
            manager = rank_.layer.dcp_manager
            combine = manager.combine
            # The fused layer gives the merge no lengths.
            manager.combine = lambda out, lse, combine=combine, merged=merged, **kw: (merged.append((len(out), kw["seq_lens"])), combine(out, lse, **kw))[1]
            metadata = rank_.metadata(batch)
            assert metadata.num_decodes == sum(query == 1 for _, query in requests)
            outputs[gather_flag] = rank_.run(batch, layer, metadata)
            assert len(calls) == gather_flag
            # With the gather, rows that decode alone are merged, and only where there are some.
            requests_merged = num_decodes if gather_flag else len(requests)
            assert [n for n, _ in merged] == [sum(batch.query_lens[:requests_merged])] * (requests_merged > 0)
            assert all(lens is None or len(lens) == len(requests) for _, lens in merged)
        reference = rank_.reference(batch)
        results[name] = error(outputs[1], reference), error(outputs[0], reference)
    return results


@pytest.mark.parametrize(
    "world, interleave, layer, names",
    [
        (2, 1, "generic", list(BATCHES)),
        (2, 64, "fused", list(BATCHES)),
        (4, 16, "generic", ["second-chunk", "five-unequal", "mixed-empty-shard"]),
        (4, 1, "fused", ["mixed", "verifying"]),
        (8, 1, "generic", ["mixed"]),
    ],
)
def test_gather_and_stock_agree_with_float64(world, interleave, layer, names):
    for results in run_ranks(in_dcp_world, world, _compare, interleave, names, layer, timeout=250):
        assert all(gather < TOLERANCE and stock < TOLERANCE for gather, stock in results.values()), results


def _break(rank, world, how):
    rank_ = Rank(rank, world, "cpu", interleave=16, heads=HEADS, max_tokens=64, max_model_len=512)
    rank_.build(CKV_GATHER="always")
    earlier, batch = (Batch([(100, 10), (30, 12)], heads=HEADS, seed=seed) for seed in (1, 2))
    rank_.load(earlier)
    rank_.builder.reorder_batch_threshold = 1
    rank_.run(earlier)
    rank_.load(batch)
    with broken(how):
        return error(rank_.run(batch, poison=False), rank_.reference(batch))


@pytest.mark.parametrize("how", ["nothing", "local-clamp", "wrong-start", "stale-workspace"])
def test_broken_on_purpose_is_seen(how):
    errors = run_ranks(in_dcp_world, 2, _break, how)
    if how == "nothing":
        assert max(errors) < TOLERANCE, errors
    else:
        assert min(errors) > 5 * TOLERANCE, errors


def _fp8_kernel(rank, world):
    """The other kernel of the gathered rows, which reads records as they are and takes no topk_length."""
    import vllm.v1.attention.backends.mla.flashmla_ckv_gather as backend

    backend.fp8_is_faster = lambda *lengths: True
    rank_ = Rank(rank, world, "cpu", heads=HEADS, max_tokens=64, max_model_len=512).build(CKV_GATHER="always")
    rank_.builder.reorder_batch_threshold = 1
    batch = Batch([(100, 10), (30, 12)], heads=HEADS, holes=True)
    rank_.load(batch)
    return error(rank_.run(batch), rank_.reference(batch))


def test_fp8_kernel_over_gathered_records():
    assert max(run_ranks(in_dcp_world, 2, _fp8_kernel)) < TOLERANCE
