# SPDX-License-Identifier: Apache-2.0
"""B12X_MLA_SPARSE on a GPU that is no SM12x: real cache, builder, impl, layers, Triton kernels and CKV gather, W ranks as
processes (tests/gpu/ranks.py). No kernel of `b12x` runs: its pure-torch reference, or for fp8_ds_mla FlashMLA, stands in
(tests/gpu/_b12x_ranks.py). Needs the package b12x 1.5.1 on the path, without an SM12x GPU.

fp8_ds_mla records come from vLLM's `concat_and_cache_mla`; nvfp4_ds_mla records, which only the package's writer makes, from
torch. The oracle is dense float64 attention over the selected records. TOLERANCE, relative to the largest output: outputs
and, on the exchange path, partial outputs are bfloat16; FlashMLA rounds probabilities to bfloat16.
"""

import pytest
import torch

from tests.gpu import ranks
from tests.gpu._b12x_ranks import B12xRank, flashmla_kernel, graph_kernel, reference_kernel, use_stand_in
from tests.gpu._ckv_ranks import Batch, error

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(900)]

TOLERANCE = 2e-2
HEADS = 16
CONFIG = dict(heads=HEADS, max_tokens=128, max_model_len=4096, max_num_seqs=8)
KERNELS = {"reference": reference_kernel, "flashmla": flashmla_kernel}
# kernel, cache format, layer
PATHS = [("reference", "fp8_ds_mla", "generic"), ("reference", "nvfp4_ds_mla", "fused"), ("flashmla", "fp8_ds_mla", "fused")]
CASES = {
    "decode": ([(63, 1), (2047, 1), (300, 1)], 3),
    "decode-empty-shards": ([(0, 1), (1, 1), (3, 1)], 3),
    "extend": ([(0, 40), (2000, 30), (255, 2)], 0),
    "mixed": ([(300, 1), (0, 1), (0, 30), (257, 20)], 2),
}


def _ranks(rank, world):
    """(name, interleave, kernel, format, gather) -> error"""
    found = {}
    for interleave in (1, 64) if world > 1 else (1,):
        for kernel, dtype, layer in PATHS:
            stand_in = use_stand_in(KERNELS[kernel])
            me = B12xRank(rank, world, ranks.device(rank), stand_in, interleave=interleave, cache_dtype=dtype, **CONFIG)
            for gather in (0, 1) if world > 1 else (0,):
                me.build(VLLM_B12X_MLA_CKV_GATHER=gather, VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS=0)
                me.impl.kernels.warm_up()
                for name, (requests, num_decodes) in CASES.items():
                    batch = Batch(requests, num_decodes=num_decodes, heads=HEADS, topk=512, seed=len(found), device=ranks.device(rank), holes=world > 1 and name == "extend")
                    me.load(batch)
                    metadata = me.metadata(batch)
                    assert (metadata.ckv_gather is not None) == bool(gather and metadata.num_prefills)
                    found[name, interleave, kernel, dtype, gather] = error(me.run(batch, layer, metadata), me.reference(batch))
            torch.cuda.empty_cache()
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_against_float64(world, name):
    for rank, found in enumerate(ranks.run_dcp_ranks_once(_ranks, world, timeout=800)):
        mine = {key: value for key, value in found.items() if key[0] == name}
        assert len(mine) == (3 if world == 1 else 12)
        assert all(value < TOLERANCE for value in mine.values()), (rank, mine)


def _graph(rank, world):
    """A captured decode step, replayed for other ids: what is captured reads the shared buffers, and nothing is compiled."""
    stand_in = use_stand_in(graph_kernel)
    me = B12xRank(rank, world, ranks.device(rank), stand_in, **CONFIG).build()
    first, second = (Batch([(600, 1), (64, 1), (900, 1)], num_decodes=3, heads=HEADS, topk=512, seed=seed, device=ranks.device(rank)) for seed in (1, 2))
    me.load(first)
    metadata = me.builder.build_for_cudagraph_capture(first.common(me))
    q = torch.randn(3, HEADS, 576, device=ranks.device(rank), dtype=torch.bfloat16)
    parts = q[..., :512].contiguous(), q[..., 512:].contiguous()

    def step():
        return me.impl.forward_mqa(parts, me.cache, metadata, me.layer)[0]

    # A plan that never ran is refused while capturing.
    capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
    try:
        step()
        refused = None
    except RuntimeError as e:
        refused = str(e)
    finally:
        torch.cuda.is_current_stream_capturing = capturing
    assert refused is not None and "decode.4 was not warmed up" in refused, refused

    me.impl.kernels.warm_up()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    prepared = len(stand_in.prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    assert len(stand_in.prepared) == prepared
    differences = []
    for batch in (first, second):
        me.topk_buffer[:3] = batch.ids
        graph.replay()
        torch.cuda.synchronize()
        replayed = captured.clone()
        differences.append((replayed.float() - step().float()).abs().max().item())
    return differences


def test_cuda_graph_of_a_decode_step():
    (differences,) = ranks.run_dcp_ranks(_graph, 1)
    assert max(differences) == 0, differences
