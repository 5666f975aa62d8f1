# SPDX-License-Identifier: Apache-2.0
"""All ranks take the same decision and send the same number of bytes, for random batches in 4- and 8-process runs.

The ranks differ in everything that is theirs: shard lengths (often zero), block tables, cache contents. A rank that decided
from any of it would be alone in, or out of, the collective; the real all-gather at the end of each batch would then hang.
"""
import numpy as np
import pytest
import torch

import tests.distributed.preload_v0_33_0  # noqa: F401
from tests.distributed.ranks import run_ranks, vllm_world
from tests.gpu._ckv_ranks import Batch, Rank, use_torch_ops

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(240)]

BATCHES = 40


class Lengths(Batch):
    """A batch without contents: decisions read lengths only."""

    def __init__(self, requests, num_decodes, prefilling):
        self.requests, self.num_decodes, self.device = requests, num_decodes, "cpu"
        self.query_lens = [q for _, q in requests]
        self.seq_lens = [c + q for c, q in requests]
        self.num_tokens = sum(self.query_lens)
        self.prefilling = torch.tensor(prefilling)


def random_batch(rng):
    num_decodes, num_prefills = int(rng.integers(0, 4)), int(rng.integers(0, 4))
    if num_decodes + num_prefills == 0:
        num_prefills = 1
    decodes = [(int(rng.integers(1, 400)), 1) for _ in range(num_decodes)]
    longest = int(rng.choice([4, 8, 16, 40]))
    prefills = [(int(rng.choice([0, 5, 63, 64, 200])), int(rng.integers(2, longest + 1))) for _ in range(num_prefills)]
    prefilling = [False] * num_decodes + [bool(rng.random() < 0.7) for _ in range(num_prefills)]
    return Lengths(decodes + prefills, num_decodes, prefilling)


def _decide(rank, world, interleave):
    from vllm.distributed import parallel_state
    from vllm.v1.attention.ops import ckv_gather

    torch.set_num_threads(1)
    use_torch_ops()
    with vllm_world(rank, world):
        parallel_state.initialize_model_parallel(world, 1, 1, world)
        speculative = type("S", (), {"num_speculative_tokens": 3, "parallel_drafting": False})
        me = Rank(rank, world, "cpu", interleave=interleave, heads=16, max_tokens=256, max_model_len=1024, speculative_config=speculative)
        me.build(CKV_GATHER="always", CKV_GATHER_MAX_TOKENS=600)
        me.builder.reorder_batch_threshold = 1
        own = np.random.default_rng(1000 + rank)
        shared = np.random.default_rng(interleave)
        decisions = []
        for index in range(BATCHES):
            batch = random_batch(shared)
            me.block_table = torch.tensor(own.permutation(16 * 16)[: 16 * len(batch.requests)].reshape(-1, 16), dtype=torch.int32)
            me.cache = torch.full((256, 64, 656), rank, dtype=torch.uint8)
            plan = me.metadata(batch).ckv_gather
            if plan is None:
                decisions.append(None)
                continue
            gathered = ckv_gather.gather_ckv(me.cache, plan, me.impl.ckv_workspace, parallel_state.get_dcp_group())
            shares = gathered.view(world, plan.padded_total, 656)
            lens = [int(share.any(1).sum()) if r else None for r, share in enumerate(shares)]
            assert all(n is None or bool((shares[r, :n] == r).all()) for r, n in enumerate(lens))
            decisions.append((index, plan.rows.start, plan.rows.stop, plan.padded_total, plan.rank_req_starts.tolist(), plan.causal_lens.tolist(), lens))
        return decisions


@pytest.mark.parametrize("world, interleave", [(4, 1), (4, 64), (8, 1), (8, 64)])
def test_ranks_decide_alike(world, interleave):
    first, *others = run_ranks(_decide, world, interleave, timeout=200)
    assert all(other == first for other in others)
    gathering = sum(decision is not None for decision in first)
    assert 5 < gathering < BATCHES - 5
