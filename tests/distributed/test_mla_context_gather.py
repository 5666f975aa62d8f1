# SPDX-License-Identifier: Apache-2.0
"""v0.11.0's chunked-context gather over real DCP groups returns exactly the rows of the unsharded cache."""
import itertools

import numpy as np
import pytest

from tests import oracle
from tests.distributed.ranks import run_ranks, vllm_world
from tests.runtime.v0_11_0 import mla

pytestmark = [pytest.mark.base("v0.11.0"), pytest.mark.forked, pytest.mark.timeout(180)]

INTERLEAVES = [1, 8, 64]
BATCHES = 6


def gather_context(rank, world):
    """Run the real gather and unpad code over this rank's shard; compare every chunk with what the oracle deals out."""
    import torch
    from vllm.distributed import parallel_state

    from tests.distributed import mla_ranks

    chunks_seen = 0
    with vllm_world(rank, world):
        parallel_state.initialize_model_parallel(world, 1, world)
        for interleave, seed in itertools.product(INTERLEAVES, range(BATCHES)):
            config = mla.stand_in_config(world, interleave, mla_ranks.BLOCK_SIZE)
            mla_ranks.use_references(config)
            rng = np.random.default_rng(seed)  # the same batch on all ranks
            decodes, prefills = int(rng.integers(0, 3)), int(rng.integers(1, 5))
            query = [1] * decodes + rng.integers(2, 9, prefills).tolist()
            context = rng.integers(0, 700, decodes + prefills).tolist()
            context[-1] += 1
            if prefills > 1:
                context[decodes] = 0
            batch = mla_ranks.Batch(rng, query, context, interleave)
            # from whole rounds per chunk down to parts of one run
            rows_per_rank = int(rng.integers(1, 5)) * interleave * prefills if seed % 3 else int(rng.integers(prefills, interleave * prefills + 1))
            builder = mla.make_builder(config, cuda=bool(seed % 2), workspace=rows_per_rank * world)
            metadata = batch.metadata(builder)
            chunks = metadata.prefill.chunked_context

            gathered = []

            def record(prefill, chunk_idx, q, k, v):
                gathered.append(torch.cat([v[:, 0], k[:, 0, -mla.ROPE:]], dim=-1))
                return q.new_zeros(q.shape[0], mla_ranks.HEADS, mla.V_DIM), q.new_zeros(mla_ranks.HEADS, q.shape[0])

            # kv_b_proj passes the first V_DIM latent numbers through as v: enough to tell rows apart
            weight = torch.zeros(mla.LORA, mla_ranks.HEADS, mla.NOPE + mla.V_DIM)
            weight[:mla.V_DIM, :, mla.NOPE:] = torch.eye(mla.V_DIM)[:, None]
            impl = mla_ranks.make_impl(weight.view(mla.LORA, -1))
            impl._run_prefill_context_chunk = record
            q = torch.zeros(sum(query[decodes:]), mla_ranks.HEADS, mla.NOPE + mla.ROPE)
            impl._context_parallel_compute_prefill_context(q, batch.cache, metadata, None, world)

            assert len(gathered) == len(chunks.seq_tot)
            done = [0] * prefills
            for i, rows in enumerate(gathered):
                expected = []
                for r in range(prefills):
                    length = chunks.cu_seq_lens_lst[i][r + 1] - chunks.cu_seq_lens_lst[i][r]
                    for shard in oracle.deal(done[r] + length, world, interleave):
                        expected += [batch.rows[decodes + r][p] for p in shard if p >= done[r]]
                    done[r] += length
                expected = torch.stack(expected)
                expected = torch.cat([expected[:, :mla.V_DIM], expected[:, mla.LORA:]], dim=-1)
                assert torch.equal(rows, expected), (interleave, seed, i)
            assert done == context[decodes:]  # no row lost or read twice
            chunks_seen += len(gathered)
    return chunks_seen


@pytest.mark.parametrize("world", [2, 4])
def test_gathered_context_is_the_unsharded_context(world):
    chunks = run_ranks(gather_context, world, timeout=150)
    assert len(set(chunks)) == 1 and chunks[0] > 2 * BATCHES * len(INTERLEAVES)
