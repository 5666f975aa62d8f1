# SPDX-License-Identifier: Apache-2.0
"""Slot mapping of both model runners with DCP: vLLM's own Triton kernels in the interpreter against dealt-out tokens."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables

from tests.interpreter import accept_mixed_masks
from tests.oracle import slot

pytestmark = [pytest.mark.base("v0.33.0")]

CPU = torch.device("cpu")
PAD = -1


def v1_slots(requests, world, rank, interleave, block_size, padded):
    """The V1 runner's BlockTable. `requests`: (block ids, positions) each; returns `padded` slots."""
    starts = np.cumsum([0] + [len(positions) for _, positions in requests])
    table = BlockTable(block_size, len(requests), 64, padded, False, CPU, interleave)
    table.dcp_world_size, table.dcp_rank = world, rank  # the ctor has them from the DCP group, absent here
    for row, (block_ids, _) in enumerate(requests):
        table.add_row(block_ids, row)
    table.commit_block_table(len(requests))
    table.slot_mapping.gpu.fill_(-7)  # what the kernel does not write stays visible
    positions = torch.tensor([p for _, ps in requests for p in ps], dtype=torch.int64)
    table.compute_slot_mapping(len(requests), torch.tensor(starts, dtype=torch.int32), positions)
    return table.slot_mapping.gpu.tolist()


def v2_slots(requests, world, rank, interleave, block_size, padded):
    """The V2 runner's BlockTables with one KV cache group."""
    starts = np.cumsum([0] + [len(positions) for _, positions in requests])
    tables = BlockTables([block_size], len(requests), padded, [64], CPU, world, rank, interleave)
    for row, (block_ids, _) in enumerate(requests):
        tables.append_block_ids(row, (block_ids,), overwrite=True)
    tables.apply_staged_writes()
    tables.slot_mappings.fill_(-7)
    positions = torch.tensor([p for _, ps in requests for p in ps], dtype=torch.int64)
    order = torch.arange(len(requests), dtype=torch.int32)
    return tables.compute_slot_mappings(order, torch.tensor(starts, dtype=torch.int32), positions, padded)[0].tolist()


@pytest.fixture(scope="module", autouse=True)
def real_kernels():
    """No GPU: pinned memory is not to be had, so V2's buffers take vLLM's fallback for that."""
    assert HAS_TRITON, "vLLM switched Triton off: it needs CUDA_VISIBLE_DEVICES='' and a vllm version without 'cpu'"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_utils, "is_uva_available", lambda: False)
        accept_mixed_masks(patch.setattr)
        yield


RUNNERS = pytest.mark.parametrize("slots", [v1_slots, v2_slots], ids=["v1", "v2"])


@RUNNERS
@pytest.mark.cases("slot_mapping")
def test_public_cases(slots, case):
    """Both runners map to manager blocks; the kernel blocks of one manager block are consecutive, so slots are the same."""
    positions = case["positions"]
    for rank, expected in enumerate(case["expected_by_rank"]):
        got = slots([(case["block_table"], positions)], case["dcp"], rank, case["interleave"], case["block_size"], len(positions) + 3)
        assert got == expected + [PAD] * 3, f"rank {rank}"


@RUNNERS
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_against_dealt_out_tokens(slots, data):
    """Ragged batches of arbitrary positions: each token has one owner, at the place that dealing the tokens out gives."""
    world = data.draw(st.sampled_from([1, 2, 3, 4, 8]), label="dcp")
    interleave = data.draw(st.sampled_from([1, 2, 3, 4, 8, 16]), label="interleave")
    block_size = interleave * data.draw(st.integers(1, 4), label="runs per block")
    lengths = data.draw(st.lists(st.integers(1, min(300, block_size * world * 8)), min_size=1, max_size=4), label="lengths")
    requests = []
    for length in lengths:
        blocks = -(-length // (block_size * world))
        block_ids = data.draw(st.lists(st.integers(1, 500), min_size=blocks, max_size=blocks, unique=True))
        first = data.draw(st.integers(0, length - 1))
        requests.append((block_ids, list(range(first, min(length, first + 40)))))
    count = sum(len(positions) for _, positions in requests)
    owners = [0] * count
    for rank in range(world):
        got = slots(requests, world, rank, interleave, block_size, count + 2)
        expected = [slot(p, rank, world, interleave, block_size, ids) for ids, positions in requests for p in positions]
        assert got == expected + [PAD] * 2, f"rank {rank}"
        owners = [owner + (value != PAD) for owner, value in zip(owners, got)]
    assert owners == [1] * count
