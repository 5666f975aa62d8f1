# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's fp8 sparse kernel with narrowed metadata against itself without, and against float64: random and hostile counts, 10,000 rows.

Reference of a row: softmax over its valid ids in float64, by `tests.gpu._ckv_ranks.dequantize`.
"""
import dataclasses
import inspect

import pytest
import torch

from ._ckv_ranks import dequantize

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.gpu, pytest.mark.timeout(300)]

TOPK, PAGE, PAGES = 2048, 64, 64
SCALE = 576**-0.5


@pytest.fixture(scope="module")
def cache():
    """uint8 [pages, 64, 1, 656] of random records, and their values float64 [tokens, 576]."""
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = PAGES * PAGE
    records = torch.zeros((tokens, 656), dtype=torch.uint8, device="cuda")
    records[:, :512] = torch.randn((tokens, 512), device="cuda", generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    # Outputs stay below 0.5, where two neighbours of bfloat16 are 2e-3 apart: they may round differently.
    records[:, 512:528] = (torch.rand((tokens, 4), device="cuda", generator=generator) * 0.05 + 0.05).view(torch.uint8)
    records[:, 528:] = torch.randn((tokens, 64), device="cuda", generator=generator).to(torch.bfloat16).view(torch.uint8)
    return records.view(PAGES, PAGE, 1, 656), dequantize(records).double()


def _counts(kind, rows, generator):
    """int32 [rows], ids that this rank holds of each row."""
    if kind == "even-w8":
        return torch.binomial(torch.full((rows,), 2048.0, device="cuda"), torch.full((rows,), 1 / 8, device="cuda"), generator=generator).int()
    if kind == "even-w2":
        return torch.binomial(torch.full((rows,), 2048.0, device="cuda"), torch.full((rows,), 1 / 2, device="cuda"), generator=generator).int()
    if kind == "any":
        return torch.randint(0, TOPK + 1, (rows,), device="cuda", generator=generator, dtype=torch.int32)
    counts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    if kind == "one-full":
        counts[rows // 2] = TOPK
    elif kind == "all-full":
        counts[:] = TOPK
    elif kind == "edges":
        edges = torch.tensor([0, 1, 63, 64, 65, 127, 128, 129], dtype=torch.int32, device="cuda")
        counts[:] = edges[torch.arange(rows, device="cuda") % 8]
    return counts


KINDS = ["even-w8", "even-w2", "any", "none", "one-full", "all-full", "edges"]


def _run(q, cache, ids, meta):
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache

    out, lse = flash_mla_with_kvcache(q=q, k_cache=cache, block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=meta, is_fp8_kvcache=True, indices=ids[None], softmax_scale=SCALE)
    return out[0], lse[0].T


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_narrowed_is_full(cache, kind, heads):
    from vllm.v1.attention.ops.flashmla import get_mla_metadata
    from vllm.v1.attention.ops.topk_compaction import narrowed_sched_meta

    records, values = cache
    generator = torch.Generator("cuda").manual_seed(KINDS.index(kind))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    seen = worst_out = worst_lse = worst_reference = 0.0
    for rows in (1, 2, 3, 7, 16, 33, 64, 66, 67, 132, 133, 200):
        counts = _counts(kind, rows, generator)
        q = torch.randn((1, rows, heads, 576), device="cuda", generator=generator).to(torch.bfloat16)
        ids = torch.randint(0, len(values), (rows, TOPK), device="cuda", generator=generator, dtype=torch.int32)
        ids[torch.arange(TOPK, device="cuda") >= counts[:, None]] = -1
        full = _run(q, records, ids, get_mla_metadata()[0])
        narrow = _run(q, records, ids, narrowed_sched_meta(counts, TOPK, heads, PAGE, sms))
        real = counts > 0  # the layer overwrites the others with zeros and -inf
        seen += rows
        if not real.any():
            continue
        worst_out = max(worst_out, (full[0].float() - narrow[0].float())[real].abs().max().item())
        worst_lse = max(worst_lse, (full[1] - narrow[1])[real].abs().max().item())
        for row in torch.nonzero(real).flatten()[:2].tolist():  # float64, of a few
            keys = values[ids[row, : counts[row]].long()]
            scores = q[0, row].double() @ keys.T * SCALE
            want = scores.softmax(-1) @ keys[:, :512]
            worst_reference = max(worst_reference, (narrow[0][row].double() - want).abs().max().item())
    print(f"{kind}, {heads} heads, {seen:.0f} rows: output {worst_out:.2e}, LSE {worst_lse:.2e}, against float64 {worst_reference:.2e}")
    assert worst_out <= 2e-3 and worst_lse <= 1e-5 and worst_reference <= 5e-3


@pytest.mark.parametrize("heads", [64, 128])
def test_ten_thousand_rows(cache, heads):
    """Prefill rows that keep the exchange: more rows than multiprocessors."""
    from vllm.v1.attention.ops.flashmla import get_mla_metadata
    from vllm.v1.attention.ops.topk_compaction import narrowed_sched_meta

    records, values = cache
    generator = torch.Generator("cuda").manual_seed(9)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rows = 5000
    for kind in ("even-w8", "any"):
        counts = _counts(kind, rows, generator)
        q = torch.randn((1, rows, heads, 576), device="cuda", generator=generator).to(torch.bfloat16)
        ids = torch.randint(0, len(values), (rows, TOPK), device="cuda", generator=generator, dtype=torch.int32)
        ids[torch.arange(TOPK, device="cuda") >= counts[:, None]] = -1
        full, narrow = _run(q, records, ids, get_mla_metadata()[0]), _run(q, records, ids, narrowed_sched_meta(counts, TOPK, heads, PAGE, sms))
        real = counts > 0
        assert (full[0].float() - narrow[0].float())[real].abs().max() <= 2e-3 and (full[1] - narrow[1])[real].abs().max() <= 1e-5


def test_a_graph_follows_the_counts(cache):
    """One captured graph, replayed with other counts and ids: rewritten in stream order, without a host."""
    from vllm.v1.attention.ops.flashmla import get_mla_metadata
    from vllm.v1.attention.ops.topk_compaction import narrowed_sched_meta

    records, values = cache
    generator = torch.Generator("cuda").manual_seed(5)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rows, heads = 8, 128
    counts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    ids = torch.full((rows, TOPK), -1, dtype=torch.int32, device="cuda")
    q = torch.randn((1, rows, heads, 576), device="cuda", generator=generator).to(torch.bfloat16)

    def layer():
        return _run(q, records, ids, narrowed_sched_meta(counts, TOPK, heads, PAGE, sms))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = layer()
    for kind in KINDS:
        counts.copy_(_counts(kind, rows, generator))
        ids.copy_(torch.randint(0, len(values), (rows, TOPK), device="cuda", generator=generator, dtype=torch.int32))
        ids[torch.arange(TOPK, device="cuda") >= counts[:, None]] = -1
        graph.replay()
        full = _run(q, records, ids, get_mla_metadata()[0])
        real = counts > 0
        if real.any():
            assert (full[0].float() - out.float())[real].abs().max() <= 2e-3 and (full[1] - lse)[real].abs().max() <= 1e-5, kind


@pytest.mark.parametrize("heads", [64, 128])
def test_the_self_check(monkeypatch, heads):
    """Nothing to say about the real kernel; and it speaks up where the metadata is that of another struct."""
    from vllm.v1.attention.backends.mla import flashmla_topk_compaction as module

    assert module.check_narrowing(heads, TOPK, SCALE) is None
    good = module.narrowed_sched_meta

    def a_block_short(*args):
        meta = good(*args)
        end = meta.tile_scheduler_metadata[:, 3]
        end.copy_((end - 1).clamp(min=1))
        return meta

    monkeypatch.setattr(module, "narrowed_sched_meta", a_block_short)
    assert "differ by" in module.check_narrowing(heads, TOPK, SCALE)


def test_the_interface_that_ships():
    """The private class whose fields this fills in."""
    from vllm.third_party.flashmla import flash_mla_interface as interface

    fields = [f.name for f in dataclasses.fields(interface.FlashMLASchedMeta)]
    assert fields == ["have_initialized", "config", "tile_scheduler_metadata", "num_splits"]
    assert [f.name for f in dataclasses.fields(interface.FlashMLASchedMeta.Config)] == [
        "b", "s_q", "h_q", "page_block_size", "h_k", "causal", "is_fp8_kvcache", "topk", "extra_page_block_size", "extra_topk", "enable_batch_invariant"]  # fmt: skip
    assert "sched_meta.tile_scheduler_metadata, sched_meta.num_splits" in inspect.getsource(interface.flash_mla_with_kvcache)
