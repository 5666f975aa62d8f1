# SPDX-License-Identifier: Apache-2.0
"""The tile scheduler's metadata against a plain model of what FlashMLA's kernel does with it: every block of every row once.

Runs in Triton's interpreter, and on a GPU with VLLM_STACK_TEST_DEVICE=cuda. The kernel itself: tests/gpu/test_topk_compaction_gpu.py.
"""
import os
import pathlib
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.ops.topk_compaction import num_sm_parts, write_sched_meta

pytestmark = [pytest.mark.base("v0.33.0")]

DEVICE = os.environ.get("VLLM_STACK_TEST_DEVICE", "cpu")
FLASHMLA_COMMIT = "e2afa5fd8c220fbd05fe03fc24c9d5e64c24641b"


def walked(meta, num_splits, requests, topk):
    """What the kernel walks and the combination reads, by request: [(first block, end, split, has the whole row)].

    From csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh and smxx/decode/combine, in plain Python. AssertionError for what they would read
    outside of their memory.
    """
    work = {request: [] for request in range(requests)}
    for begin_req, end_req, begin, end, split, first_splitted, last_splitted, _ in meta.tolist():
        if begin_req >= requests:
            continue
        for request in range(begin_req, end_req + 1):
            start = begin if request == begin_req else 0
            stop = end if request == end_req else topk // 64
            whole = not first_splitted if request == begin_req else not last_splitted if request == end_req else True
            assert 0 <= start < stop <= topk // 64, "a part without blocks, or beyond the row"
            work[request].append((start, stop, split if request == begin_req else 0, whole))
    splits = num_splits.tolist()
    assert splits[0] == 0 and len(splits) == requests + 1
    for request, parts in work.items():
        count = splits[request + 1] - splits[request]
        assert count == len(parts) <= len(meta), "the combination reads what nobody wrote, or misses a part"
        assert sorted(split for _, _, split, _ in parts) == list(range(count))
        # One part writes the output itself, and the combination lets it be; several write partial results.
        assert all(whole == (count == 1) for *_, whole in parts)
    return work


def check(counts, topk, num_parts):
    meta, num_splits = write_sched_meta(torch.tensor(counts, dtype=torch.int32, device=DEVICE), topk, num_parts)
    assert meta.shape == (num_parts, 8) and num_splits.shape == (2,) and meta.dtype == num_splits.dtype == torch.int32
    assert meta.is_contiguous() and num_splits.is_contiguous()
    blocks = sorted(block for start, stop, *_ in walked(meta, num_splits, 1, topk)[0] for block in range(start, stop))
    wanted = max(-(-max(counts) // 64), 1)
    assert blocks == list(range(wanted)), "every block up to the longest row, once"
    return meta, num_splits


@settings(max_examples=150 if DEVICE == "cpu" else 1000, deadline=None)
@given(data=st.data(), topk=st.sampled_from([512, 2048]), num_parts=st.sampled_from([1, 2, 3, 8, 16, 33, 66, 132]))
def test_every_block_once(data, topk, num_parts):
    rows = data.draw(st.sampled_from([1, 2, 3, 64, 1023, 1024, 1025, 3000]))
    few = data.draw(st.lists(st.integers(0, topk), min_size=1, max_size=5))
    place = data.draw(st.integers(0, rows - 1))
    counts = [0] * rows
    for i, count in enumerate(few):
        counts[(place + i) % rows] = count
    check(counts, topk, num_parts)


@pytest.mark.parametrize("count, blocks", [(0, 1), (1, 1), (63, 1), (64, 1), (65, 2), (256, 4), (2047, 32), (2048, 32)])
def test_edges(count, blocks):
    meta, num_splits = check([0, count, 0], 2048, 8)
    assert meta[:, 3].max() == blocks


def test_stock_metadata_of_the_kernel_is_the_full_row():
    """What FlashMLA writes for 64 rows of 128 heads on 132 multiprocessors, as seen on an H200."""
    meta, num_splits = check([2048], 2048, num_sm_parts(132, 64, 128))
    assert meta.tolist() == [[0, 0, 0, 32, 0, 0, 0, 0]] and num_splits.tolist() == [0, 1]


@pytest.mark.parametrize("rows, heads, parts", [(1, 128, 66), (1, 64, 132), (8, 128, 8), (64, 128, 1), (64, 64, 2), (66, 64, 2), (67, 64, 1), (8192, 64, 1)])
def test_parts(rows, heads, parts):
    assert num_sm_parts(132, rows, heads) == parts


@pytest.mark.parametrize("counts, topk", [([], 2048), ([3], 100)])
def test_refusals(counts, topk):
    with pytest.raises(ValueError, match="multiple of 64"):
        write_sched_meta(torch.tensor(counts, dtype=torch.int32, device=DEVICE), topk, 1)


def test_the_model_of_the_kernel_can_fail():
    """Parts that overlap, leave a gap, or are counted wrong."""
    good, splits = check([600], 2048, 3)
    for row, column, value in ((1, 2, 4), (1, 2, 6), (0, 3, 4), (1, 4, 0), (0, 5, 0), (1, 0, 1)):
        bad = good.clone()
        bad[row, column] = value
        with pytest.raises(AssertionError):
            blocks = sorted(block for start, stop, *_ in walked(bad, splits, 1, 2048)[0] for block in range(start, stop))
            assert blocks == list(range(10))
    with pytest.raises(AssertionError):
        walked(good, torch.tensor([0, 3]), 1, 2048)


def test_the_commit_whose_struct_this_is():
    """A release with another FlashMLA fails here, and in `drift`: look at csrc/params.h and at the kernel before changing this."""
    tree = os.environ.get("VLLM_STACK_PATCHED_TREE")
    if tree is None:
        pytest.skip("no source tree here")
    text = (pathlib.Path(tree) / "cmake/external_projects/flashmla.cmake").read_text()
    assert re.findall(r"GIT_TAG\s+(\w+)", text) == [FLASHMLA_COMMIT]
