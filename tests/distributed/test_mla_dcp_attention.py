# SPDX-License-Identifier: Apache-2.0
"""v0.11.0's whole MLA forward on real DCP groups, decodes and prefills in one batch, equals unsharded attention in float64."""
import numpy as np
import pytest

from tests import oracle
from tests.distributed.ranks import run_ranks, vllm_world
from tests.runtime.v0_11_0 import mla

pytestmark = [pytest.mark.base("v0.11.0"), pytest.mark.forked, pytest.mark.timeout(180)]

# (query lengths, context lengths): requests shorter than one interleave run leave shards empty; a length that the DCP size divides;
# prefills without context, inside one chunk, and over several chunks.
BATCHES = [
    ([1, 1, 1, 1], [0, 3, 127, 900]),
    ([1, 1, 40, 7, 2], [1, 255, 0, 300, 70]),
    ([9, 130], [1, 513]),
]


def forward(rank, world, interleave):
    """All batches on this rank, against attention over the unsharded rows. Returns how many decodes found an empty shard."""
    import torch

    from tests.distributed import mla_ranks

    config = mla.stand_in_config(world, interleave, mla_ranks.BLOCK_SIZE)
    mla_ranks.use_references(config)
    head = mla.NOPE + mla.ROPE
    empty_shards = 0
    weight = torch.from_numpy(np.random.default_rng(100 + rank).standard_normal((mla.LORA, mla_ranks.HEADS * (mla.NOPE + mla.V_DIM)),
                                                                                 dtype=np.float32)) / mla.LORA**0.5
    impl = mla_ranks.make_impl(weight)
    for seed, (query, context) in enumerate(BATCHES):
        batch = mla_ranks.Batch(np.random.default_rng(seed), query, context, interleave)
        builder = mla.make_builder(config, workspace=len(query) * max(interleave, 16) * world)
        metadata = batch.metadata(builder)
        q = torch.from_numpy(np.random.default_rng(200 + rank).standard_normal((sum(query), mla_ranks.HEADS, head), dtype=np.float32)) * 3
        output = torch.full((sum(query), mla_ranks.HEADS * mla.V_DIM), torch.nan)
        layer = type("Layer", (), {"_k_scale": None, "_q_scale": None})
        impl.forward(layer, q, batch.new_rows[:, :mla.LORA].clone(), batch.new_rows[:, mla.LORA:].unsqueeze(1), batch.cache, metadata, output)

        start = 0
        for rows, new, old in zip(batch.rows, query, context):
            empty_shards += new == 1 and oracle.local_lens(old + 1, world, interleave)[rank] == 0
            latent, k_pe = rows.double().split([mla.LORA, mla.ROPE], dim=-1)
            k_nope, v = (latent @ weight.double()).view(-1, mla_ranks.HEADS, mla.NOPE + mla.V_DIM).split([mla.NOPE, mla.V_DIM], dim=-1)
            k = torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, mla_ranks.HEADS, -1)], dim=-1)
            scores = torch.einsum("tnd,snd->nts", q[start:start + new].double(), k) * head**-0.5
            hidden = torch.arange(old + new) > torch.arange(old, old + new)[:, None]
            expected = torch.einsum("nts,snv->tnv", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)
            torch.testing.assert_close(output[start:start + new].double(), expected, rtol=1e-3, atol=1e-4,
                                       msg=lambda m: f"interleave {interleave}, batch {seed}, {new} tokens after {old}: {m}")
            start += new
    return empty_shards


def forward_all(rank, world):
    from vllm.distributed import parallel_state

    with vllm_world(rank, world):
        parallel_state.initialize_model_parallel(world, 1, world)
        return [forward(rank, world, interleave) for interleave in (1, 16, 64)]


@pytest.mark.parametrize("world", [2, 4])
def test_dcp_output_equals_unsharded_attention(world):
    empty_shards = run_ranks(forward_all, world, timeout=150)
    assert empty_shards[0] == [0, 0, 0] and all(empty_shards[-1])
