# SPDX-License-Identifier: Apache-2.0
"""The gather path on GPUs: W ranks as processes (tests/gpu/ranks.py), real cache, builder, impl, layers and FlashMLA kernels.

Compared: gather path, stock DCP path, DCP 1 and dense float64 attention over the selected records. All start from the same
records, which `concat_and_cache_mla` wrote. Workspaces and scratch are full of NaN before each run, and so are the pages of
the cache that no request owns.

TOLERANCE, relative to the largest output value: the gathered records are rounded to bfloat16 once (2**-9) and the kernels
round probabilities to bfloat16; 2.0e-3 was seen for the kernel alone. The stock path also rounds partial outputs.
DCP 1 runs the same fp8 kernel as the stock path and serves as a second witness, under the same bound.
"""
import pytest
import torch

from tests.gpu import ranks
from tests.gpu._ckv_ranks import Batch, Rank, broken, error

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(900)]

TOLERANCE = 1e-2
STOCK_TOLERANCE = 2e-2
TOPK = 512
HEADS = 16
INTERLEAVES = (1, 16, 64)
LENGTHS = (1, 10, 63, 64, 65, 255, 256, 257, 2047, 2048, 2049, 20000)


def first_chunk(length):
    """The last at most 40 tokens of a context of `length`: of short ones the whole prompt."""
    query = min(length, 40)
    return length - query, query


# name -> (requests, decodes). MIN is 0 here. Upstream takes a leading request of one token for a decode: context 1 is behind
# another prompt.
CASES = {f"context-{n}": ([first_chunk(n)] if n > 1 else [(0, 2), (0, 1)], 0) for n in LENGTHS} | {
    "two": ([first_chunk(65), first_chunk(2049)], 0),
    "three": ([first_chunk(10), first_chunk(257), first_chunk(64)], 0),
    "five": ([first_chunk(n) for n in (2048, 10, 255, 20000, 63)], 0),
    "first-of-two-chunks": ([(0, 200)], 0),
    "second-of-two-chunks": ([(200, 200)], 0),
    "fourth-chunk": ([(600, 200)], 0),
    "mixed": ([(300, 1), (2047, 1), (0, 70), (257, 30)], 2),
    "mixed-empty-shards": ([(0, 1), (3, 1), (0, 20), (9, 20)], 2),
}


def _ranks(rank, world):
    """name, interleave, layer -> largest relative errors (gather, stock)."""
    results = {}
    for interleave in INTERLEAVES:
        config = dict(interleave=interleave, heads=HEADS, topk=TOPK, max_tokens=256, max_model_len=32768, max_num_seqs=8)
        for name, (requests, num_decodes) in CASES.items():
            batch = Batch(requests, num_decodes=num_decodes, heads=HEADS, topk=TOPK, seed=len(results), device=ranks.device(rank), holes="mixed" in name)
            outputs = {}
            for gather in (0, 1):
                # The workspaces are per process: build again for each flag.
                me = Rank(rank, world, ranks.device(rank), **config).build(CKV_GATHER=gather, CKV_GATHER_MIN_TOKENS=0, CKV_GATHER_MAX_TOKENS=65536)
                # Interleave 1 has a decode threshold of 128 rows upstream: these short prefills must count as prefills.
                me.builder.reorder_batch_threshold = 1
                me.load(batch)
                for layer in ("generic", "fused"):
                    metadata = me.metadata(batch)
                    assert (metadata.ckv_gather is not None) == bool(gather), name
                    outputs[gather, layer] = me.run(batch, layer, metadata)
            reference = me.reference(batch)
            for layer in ("generic", "fused"):
                results[name, interleave, layer] = error(outputs[1, layer], reference), error(outputs[0, layer], reference)
            torch.cuda.empty_cache()
    return results


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("name", list(CASES))
def test_gather_and_stock_against_float64(world, interleave, name):
    for rank, found in enumerate(ranks.run_dcp_ranks_once(_ranks, world, timeout=800)):
        for layer in ("generic", "fused"):
            gather, stock = found[name, interleave, layer]
            assert gather < TOLERANCE and stock < STOCK_TOLERANCE, f"rank {rank}, {layer}: gather {gather:.2e}, stock {stock:.2e}"


def _single(rank, world):
    results = {}
    for name, (requests, num_decodes) in CASES.items():
        me = Rank(rank, world, ranks.device(rank), heads=HEADS, topk=TOPK, max_tokens=256, max_model_len=32768, max_num_seqs=8).build()
        me.builder.reorder_batch_threshold = 1
        batch = Batch(requests, num_decodes=num_decodes, heads=HEADS, topk=TOPK, seed=1, device=ranks.device(rank))
        me.load(batch)
        results[name] = error(me.run(batch), me.reference(batch))
    return results


def test_dcp_1_against_float64():
    (found,) = ranks.run_dcp_ranks(_single, 1)
    assert max(found.values()) < STOCK_TOLERANCE, found


# ------------------------------------------------------------------------------------------------ both kernels


def _kernels(rank, world, heads):
    import vllm.v1.attention.backends.mla.flashmla_ckv_gather as backend

    me = Rank(rank, world, ranks.device(rank), interleave=16, heads=heads, topk=TOPK, max_tokens=256, max_model_len=8192).build(CKV_GATHER="always")
    me.builder.reorder_batch_threshold = 1
    batch = Batch([(700, 50), (0, 90)], heads=heads, topk=TOPK, device=ranks.device(rank), holes=True)
    me.load(batch)
    found = {}
    for kernel in ("fp8", "bf16"):
        backend.fp8_is_faster = lambda *lengths, fp8=kernel == "fp8": fp8
        found[kernel] = error(me.run(batch), me.reference(batch))
    # A row without ids: no kernel may give NaN, in whatever row it is.
    me.topk_buffer[3] = -1
    found["empty-row-finite"] = bool(torch.isfinite(me.run(batch)).all())
    return found


@pytest.mark.parametrize("heads", [16, 128])
def test_both_kernels(heads):
    for found in ranks.run_dcp_ranks(_kernels, 2, heads):
        assert found["bf16"] < TOLERANCE and found["fp8"] < TOLERANCE, found
        assert found["empty-row-finite"], found


# ------------------------------------------------------------------------------------------------ break it on purpose


def _break(rank, world):
    me = Rank(rank, world, ranks.device(rank), interleave=16, heads=HEADS, topk=TOPK, max_tokens=256, max_model_len=8192).build(CKV_GATHER="always")
    me.builder.reorder_batch_threshold = 1
    earlier, batch = (Batch([(1000, 40), (300, 60)], heads=HEADS, topk=TOPK, seed=seed, device=ranks.device(rank)) for seed in (1, 2))
    found = {}
    for how in ("nothing", "local-clamp", "wrong-start", "stale-workspace"):
        me.load(earlier)
        me.run(earlier)
        me.load(batch)
        with broken(how):
            found[how] = error(me.run(batch, poison=False), me.reference(batch))
    return found


def test_broken_on_purpose_is_seen():
    for found in ranks.run_dcp_ranks(_break, 4):
        assert found.pop("nothing") < TOLERANCE
        assert all(value > 5 * TOLERANCE for value in found.values()), found
