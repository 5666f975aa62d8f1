# SPDX-License-Identifier: Apache-2.0
"""The remap of global top-k ids to the rank-major gathered CKV, and its layout: case files, brute force, refusals.

Runs in Triton's interpreter, and on a GPU with VLLM_STACK_TEST_DEVICE=cuda.
"""
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.ops.ckv_layout import ckv_layout
from vllm.v1.attention.ops.ckv_remap import map_global_topk_to_gathered_ckv

from tests.oracle import deal

pytestmark = [pytest.mark.base("v0.33.0")]

DEVICE = os.environ.get("VLLM_STACK_TEST_DEVICE", "cpu")
EXAMPLES = 300 if DEVICE == "cuda" else 80


def tensor(values):
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def oracle_buffer(seq_lens, world, interleave, padded_total):
    """What lies where: {(request, position): row}, by dealing every request out and filling the buffer in order."""
    where = {}
    fill = [rank * padded_total for rank in range(world)]
    for request, length in enumerate(seq_lens):
        for rank, shard in enumerate(deal(length, world, interleave)):
            for position in shard:
                where[request, position] = fill[rank]
                fill[rank] += 1
    return where


def oracle_row(where, request, causal_len, ids):
    kept = [where[request, t] for t in ids if 0 <= t < causal_len]
    return kept + [-1] * (len(ids) - len(kept)), len(kept)


def remap(ids, requests, causal, layout, world, interleave, **kwargs):
    slots, counts = map_global_topk_to_gathered_ckv(
        tensor(ids), tensor(requests), tensor(causal), tensor(layout.rank_req_starts), layout.padded_total, world, interleave, **kwargs
    )
    return slots.tolist(), counts.tolist()


# ------------------------------------------------------------------------------------------------ case file


@pytest.mark.cases("ckv_remap")
def test_layout_of_case(case):
    layout = ckv_layout(np.array(case["seq_lens"]), case["dcp"], case["interleave"], case["align"])
    assert layout.rank_req_lens.tolist() == case["rank_req_lens"]
    assert layout.rank_req_starts.tolist() == case["rank_req_starts"]
    assert layout.padded_total == case["padded_total"]


@pytest.mark.cases("ckv_remap")
def test_remap_of_case(case):
    layout = ckv_layout(np.array(case["seq_lens"]), case["dcp"], case["interleave"], case["align"])
    rows = case["rows"]
    slots, counts = remap([r["ids"] for r in rows], [r["request"] for r in rows], [r["causal_len"] for r in rows], layout, case["dcp"], case["interleave"])
    topk = len(rows[0]["ids"])
    assert slots == [expected + [-1] * (topk - len(expected)) for expected in case["expected_slots"]]
    assert counts == case["expected_counts"]


# ------------------------------------------------------------------------------------------------ brute force

sizes = st.tuples(st.integers(1, 8), st.sampled_from([1, 2, 3, 16, 64]), st.lists(st.integers(0, 400), min_size=1, max_size=5))


@settings(max_examples=200, deadline=None)
@given(sizes, st.sampled_from([1, 4, 64]))
def test_layout_against_dealing(size, align):
    world, interleave, seq_lens = size
    layout = ckv_layout(np.array(seq_lens), world, interleave, align)
    dealt = [deal(length, world, interleave) for length in seq_lens]
    lens = [[len(request[rank]) for request in dealt] for rank in range(world)]
    assert layout.rank_req_lens.tolist() == lens
    assert layout.rank_req_starts.tolist() == [[sum(row[:i]) for i in range(len(row))] for row in lens]
    largest = max(sum(row) for row in lens)
    assert layout.padded_total % align == 0 and largest <= layout.padded_total < largest + align
    assert layout.rank_req_lens.dtype == layout.rank_req_starts.dtype == np.int32


@settings(max_examples=EXAMPLES, deadline=None)
@given(sizes, st.integers(1, 70), st.integers(1, 6), st.data())
def test_remap_against_dealing(size, topk, num_rows, data):
    world, interleave, seq_lens = size
    layout = ckv_layout(np.array(seq_lens), world, interleave)
    where = oracle_buffer(seq_lens, world, interleave, layout.padded_total)
    ids, requests, causal = [], [], []
    for _ in range(num_rows):
        request = data.draw(st.integers(0, len(seq_lens) - 1))
        length = seq_lens[request]
        requests.append(request)
        causal.append(data.draw(st.integers(-1, length)))
        # Ids beyond the bound, beyond the request, duplicates and -1 anywhere.
        ids.append(data.draw(st.lists(st.one_of(st.integers(-1, length + 3), st.just(-(2**31))), min_size=topk, max_size=topk)))
    slots, counts = remap(ids, requests, causal, layout, world, interleave)
    for row in range(num_rows):
        assert (slots[row], counts[row]) == oracle_row(where, requests[row], causal[row], ids[row])


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(sizes, st.integers(0, 64), st.data())
def test_remap_of_a_prefix(size, kept, data):
    """Valid ids first, -1 behind: the row shape of the indexer, which takes the kernel's branch without compaction."""
    world, interleave, seq_lens = size
    layout = ckv_layout(np.array(seq_lens), world, interleave)
    where = oracle_buffer(seq_lens, world, interleave, layout.padded_total)
    request = data.draw(st.integers(0, len(seq_lens) - 1))
    kept = min(kept, seq_lens[request])
    ids = data.draw(st.permutations(range(seq_lens[request])))[:kept] + [-1] * (64 - kept)
    slots, counts = remap([ids], [request], [seq_lens[request]], layout, world, interleave)
    assert (slots[0], counts[0]) == oracle_row(where, request, seq_lens[request], ids)


@pytest.mark.parametrize("topk", [2048, 2051, 512])
def test_remap_of_long_contexts(topk):
    """Real widths (2051: GLM5Next), one full row, one with holes, one short; slots unique and in the right share."""
    world, interleave, seq_lens = 8, 16, [70_000, 33, 9_000]
    layout = ckv_layout(np.array(seq_lens), world, interleave)
    rng = np.random.default_rng(0)
    full = rng.choice(70_000, topk, replace=False)
    holes = np.where(rng.random(topk) < 0.3, -1, rng.choice(9_000, topk, replace=False))
    short = np.concatenate([np.arange(33), np.full(topk - 33, -1)])
    slots, counts = remap([full, holes, short], [0, 2, 1], [70_000, 8_000, 20], layout, world, interleave)
    where = oracle_buffer(seq_lens, world, interleave, layout.padded_total)
    for row, (ids, request, causal) in enumerate([(full, 0, 70_000), (holes, 2, 8_000), (short, 1, 20)]):
        assert (slots[row], counts[row]) == oracle_row(where, request, causal, ids.tolist())


def test_the_clamp_is_by_the_global_length():
    """10 tokens, interleave 64: rank 0 holds them all, the others none. A local bound of rank 1 would keep nothing."""
    layout = ckv_layout(np.array([10]), 4, 64)
    slots, counts = remap([list(range(10))], [0], [10], layout, 4, 64)
    assert (slots, counts) == ([list(range(10))], [10])


def test_padding_rows_keep_nothing():
    layout = ckv_layout(np.array([5, 6]), 2, 1)
    slots, counts = remap([[0, 1, 2]] * 3, [-1, 2, 1], [3, 3, 3], layout, 2, 1)
    assert counts == [0, 0, 3] and slots[:2] == [[-1] * 3] * 2


def test_no_rows():
    layout = ckv_layout(np.array([5]), 2, 1)
    empty = torch.empty((0, 4), dtype=torch.int32, device=DEVICE)
    slots, counts = map_global_topk_to_gathered_ckv(empty, empty[:, 0], empty[:, 0], tensor(layout.rank_req_starts), layout.padded_total, 2, 1)
    assert slots.shape == (0, 4) and counts.shape == (0,)


def test_strided_input_and_caller_outputs():
    """Rows of a wider buffer, as the indexer's; outputs written in place, every element of them."""
    layout = ckv_layout(np.array([9]), 2, 2)
    buffer = tensor(np.arange(40).reshape(4, 10) % 10)
    out, counts = torch.full((4, 8), 77, dtype=torch.int32, device=DEVICE), torch.full((4,), 77, dtype=torch.int32, device=DEVICE)
    ids = buffer[:, 1:9]
    got = map_global_topk_to_gathered_ckv(ids, tensor([0] * 4), tensor([9, 5, 1, 0]), tensor(layout.rank_req_starts), layout.padded_total, 2, 2, out=out, counts=counts)
    assert got[0] is out and got[1] is counts
    where = oracle_buffer([9], 2, 2, layout.padded_total)
    for row, causal in enumerate([9, 5, 1, 0]):
        assert (out[row].tolist(), counts[row].item()) == oracle_row(where, 0, causal, ids[row].tolist())


def test_twice_the_same():
    layout = ckv_layout(np.array([4000]), 4, 1)
    rng = np.random.default_rng(1)
    ids = np.where(rng.random((4, 512)) < 0.5, -1, rng.integers(0, 4000, (4, 512)))
    first = remap(ids, [0] * 4, [4000] * 4, layout, 4, 1)
    assert all(remap(ids, [0] * 4, [4000] * 4, layout, 4, 1) == first for _ in range(3))


# ------------------------------------------------------------------------------------------------ refusals


def good_arguments():
    return dict(
        topk_ids=tensor([[0, 1], [2, -1]]),
        req_ids=tensor([0, 0]),
        causal_lens=tensor([3, 3]),
        rank_req_starts=tensor([[0], [0]]),
        padded_total=64,
        dcp_world_size=2,
        interleave=1,
    )


@pytest.mark.parametrize("name", ["topk_ids", "req_ids", "causal_lens", "rank_req_starts"])
def test_only_int32(name):
    arguments = good_arguments()
    arguments[name] = arguments[name].long()
    with pytest.raises(TypeError, match=f"{name} must be int32"):
        map_global_topk_to_gathered_ckv(**arguments)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(topk_ids=[0, 1]), "topk_ids must be"),
        (dict(req_ids=[0]), "req_ids must have shape"),
        (dict(causal_lens=[3, 3, 3]), "causal_lens must have shape"),
        (dict(rank_req_starts=[[0], [0], [0]]), r"rank_req_starts must be \[2"),
        (dict(rank_req_starts=[0, 0]), r"rank_req_starts must be \[2"),
        (dict(dcp_world_size=0), "at least 1"),
        (dict(interleave=0), "at least 1"),
        (dict(interleave=-4), "at least 1"),
        (dict(padded_total=2**30), "int32"),
        (dict(padded_total=-1), "int32"),
        (dict(out=[[0, 0]]), "out must have shape"),
        (dict(counts=[0]), "counts must have shape"),
    ],
)
def test_refusals(change, words):
    change = {key: tensor(value) if isinstance(value, list) else value for key, value in change.items()}
    with pytest.raises(ValueError, match=words):
        map_global_topk_to_gathered_ckv(**(good_arguments() | change))


def test_transposed_ids_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        map_global_topk_to_gathered_ckv(**(good_arguments() | dict(topk_ids=tensor([[0, 1], [2, 3]]).T)))


@pytest.mark.parametrize("world, interleave, align", [(0, 1, 1), (2, 0, 1), (2, -1, 1), (2, 1, 0)])
def test_layout_refusals(world, interleave, align):
    with pytest.raises(ValueError, match="at least 1"):
        ckv_layout(np.array([3]), world, interleave, align)


@pytest.mark.parametrize("seq_lens, words", [([-1], "must not be negative.*-1"), ([[3]], "must have one dimension.*3")])
def test_layout_refuses_bad_lengths(seq_lens, words):
    with pytest.raises(ValueError, match=words):
        ckv_layout(np.array(seq_lens), 2, 1)
