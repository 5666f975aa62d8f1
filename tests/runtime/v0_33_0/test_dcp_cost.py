# SPDX-License-Identifier: Apache-2.0
"""The model that chooses between the CKV gather and the exchange: bytes counted one by one, and what follows for a batch."""
import dataclasses
from types import SimpleNamespace as NS

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.ops import dcp_cost
from vllm.v1.attention.ops.ckv_config import CKVGatherConfig
from vllm.v1.attention.ops.ckv_plan import CKVGatherPlanner, gather_costs_more
from vllm.v1.attention.ops.dcp_cost import FLASHMLA_SM90, exchange_bytes, exchange_seconds, gather_bytes, gather_seconds

pytestmark = [pytest.mark.base("v0.33.0")]

CONFIG = CKVGatherConfig(dcp_world_size=8, dcp_rank=0, interleave=1, min_tokens=16, max_tokens=524288, max_num_seqs=8, max_num_batched_tokens=8192, record_bytes=656,
                         decode_query_len=1, local_heads=16, link_gbps=220)  # fmt: skip


@pytest.mark.parametrize("world, heads, rows", [(2, 64, 3), (8, 16, 5)])
def test_bytes_counted_one_by_one(world, heads, rows):
    received = 0
    for _other in range(1, world):
        for _ in range(rows):
            received += heads * 576 * 2  # the other rank's query heads
            received += heads * 512 * 2  # its partial outputs of this rank's heads, to be added
            received += heads * world * 4  # its LSEs of all heads
    assert exchange_bytes(rows, heads, world) == received
    assert gather_bytes(64 * world, 656, world) == (world - 1) * 64 * 656


@pytest.mark.parametrize("context, rows", [(65536, 154), (131072, 309), (500_000, 1178)])
def test_bytes_break_even(context, rows):
    """DCP8, 128 heads, by bytes alone. The rows are those of queries and outputs; LSEs take 1.5% more."""
    link = CONFIG.link_gbps * 1e9
    gather = gather_seconds(None, 0, context // 512 * 512, 0, 16, 8, 656, link)
    assert exchange_seconds(None, round(rows * 0.97), 16, 8, link) < gather < exchange_seconds(None, round(rows * 1.01), 16, 8, link)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8192), st.integers(64, 1 << 19), st.sampled_from([(2, 64), (2, 16), (4, 32), (8, 16), (8, 8)]), st.sampled_from([25, 50, 220, 400]), st.booleans())
def test_more_costs_more(rows, context, shape, gbps, timed):
    world, heads = shape
    times, link = (FLASHMLA_SM90 if timed else None), gbps * 1e9
    gathered = -(-context // (64 * world)) * 64 * world

    def gather(rows, gathered, ahead, link):
        return gather_seconds(times, rows, gathered, ahead, heads, world, 656, link)

    base = gather(rows, gathered, 0, link)
    assert base <= gather(rows + 1, gathered, 0, link) and base < gather(rows, gathered + 64 * world, 0, link)
    assert base > gather(rows, gathered, 0, 2 * link)
    ahead, bytes_ahead = gather(rows, gathered, gathered, link), gather_bytes(gathered, 656, world)
    if timed:  # what is hidden costs nothing, what is not has its own pack
        packed = times.pack_ahead * gathered / world + bytes_ahead / link
        kernels = gather(rows, gathered, 0, link) - bytes_ahead / link - times.pack * gathered / world
        assert ahead == pytest.approx(max(packed, kernels))
    else:
        assert ahead == 0
    assert exchange_seconds(times, rows, heads, world, link) < exchange_seconds(times, rows + 132, heads, world, link)


def test_kernels_take_waves():
    """A block for each row and 64 heads; 132 at once. The fp8 kernel splits what is less than a wave."""
    wave = dcp_cost.bf16_seconds(FLASHMLA_SM90, 1, 16, 0)
    assert wave == dcp_cost.bf16_seconds(FLASHMLA_SM90, 132, 16, 0) == dcp_cost.bf16_seconds(FLASHMLA_SM90, 66, 128, 0)
    assert dcp_cost.bf16_seconds(FLASHMLA_SM90, 133, 16, 0) == 2 * wave
    few, one, two = (dcp_cost.fp8_seconds(FLASHMLA_SM90, rows, 128) for rows in (8, 66, 67))
    assert few < one < two


@pytest.mark.parametrize(
    "rows, context, ahead, gathers",
    [
        (8192, 65536, 0, True),
        (2048, 131072, 0, True),
        (17, 65536, 0, False),  # above MIN, but a poor bargain: 38 MB for 17 rows
        (17, 524288, 0, False),
        (17, 1024, 0, True),  # a short prompt
    ],
)
def test_choice(rows, context, ahead, gathers):
    assert gather_costs_more(CONFIG, FLASHMLA_SM90, rows, context, ahead) != gathers


def test_slow_links_count_bytes():
    """A batch that gathers over NVLink exchanges over PCIe where the exchange sends less, and the other way round."""
    slow = dataclasses.replace(CONFIG, link_gbps=10)
    assert gather_costs_more(slow, FLASHMLA_SM90, 120, 65536, 0)
    assert not gather_costs_more(slow, FLASHMLA_SM90, 200, 65536, 0)


def plan(config, rows, context, times=FLASHMLA_SM90):
    lens, starts = torch.tensor([context], dtype=torch.int32), torch.tensor([0, rows], dtype=torch.int32)
    common = NS(query_start_loc_cpu=starts, query_start_loc=starts, seq_lens_cpu_upper_bound=lens, seq_lens=lens, is_prefilling=torch.tensor([True]), num_actual_tokens=rows,
                block_table_tensor=torch.zeros((1, 4), dtype=torch.int32), req_idx=None)  # fmt: skip
    metadata = NS(prefill=None, req_id_per_token=torch.zeros(rows, dtype=torch.int32))
    return CKVGatherPlanner(config, torch.device("cpu"), times).plan(common, metadata)


def test_the_planner_chooses():
    assert plan(CONFIG, 17, 65536) is None
    assert plan(CONFIG, 4096, 65536) is not None
    assert plan(dataclasses.replace(CONFIG, always=True), 17, 65536) is not None
    # The bounds hold whatever is cheaper.
    assert plan(dataclasses.replace(CONFIG, always=True), 16, 65536) is None
    assert plan(dataclasses.replace(CONFIG, max_tokens=65535), 4096, 65536) is None
