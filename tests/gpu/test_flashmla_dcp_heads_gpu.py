# SPDX-License-Identifier: Apache-2.0
"""Stock DCP of FlashMLA sparse on the head counts that upstream refuses, and on one that it takes, against float64.

W ranks as processes (tests/gpu/ranks.py); real cache, builder, impl, layer, kernels and LSE merge.

TOLERANCE: relative to the largest output value. The kernels compute scores and probabilities in bfloat16 tensor-core
products of dequantized records (the reference attends exactly these records), and the merge rounds each rank's partial output
to bfloat16 before it adds up to 8 of them: a few times 2**-8.
"""
import pytest
import torch

from tests.gpu import ranks
from tests.gpu._ckv_ranks import Batch, Rank, error

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

TOLERANCE = 2e-2
REQUESTS = [(300, 1), (4000, 1), (0, 70), (2047, 40)]
DECODES = 2


def _stock(rank, world, heads, interleaves):
    results = {}
    for interleave in interleaves:
        me = Rank(rank, world, ranks.device(rank), interleave=interleave, heads=heads, topk=512, max_tokens=256, max_model_len=8192)
        me.build()
        me.builder.reorder_batch_threshold = 1
        batch = Batch(REQUESTS, num_decodes=DECODES, heads=heads, topk=512, device=ranks.device(rank))
        me.load(batch)
        results[interleave] = error(me.run(batch), me.reference(batch)), me.builder.fp8_use_mixed_batch
    return results


@pytest.mark.parametrize(
    "heads, dcp",
    [
        (128, 4),  # DeepSeek-V3.2 at TP4/DCP4: 32 local, 128 gathered
        (128, 8),  # DeepSeek-V3.2 at TP8/DCP8: 16 local, 128 gathered
        (64, 2),  # what a DCP group of DeepSeek-V3.2 at TP4/DCP2 holds: 32 local, 64 gathered
        (64, 8),  # GLM at TP8/DCP8: 8 local, 64 gathered, which upstream takes
    ],
)
def test_stock_dcp_against_float64(heads, dcp):
    for results in ranks.run_dcp_ranks(_stock, dcp, heads, (1, 64)):
        for interleave, (largest, mixed) in results.items():
            assert mixed and largest < TOLERANCE, (interleave, results)
