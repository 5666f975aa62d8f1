# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one DCP rank, stock against VLLM_DCP_COMPACT_TOPK: FlashMLA sparse on SM90, in CUDA graphs.

    PYTHONPATH=PATCHED_TREE python bench/bench_topk_compaction.py [--quick]

One GPU plays one rank. Timed is what a layer does between the query gather and the merge (the conversion of ids, FlashMLA's two
kernels, empty rows), by upstream's own method of the impl, on random pages and ids that are spread evenly over the ranks; beside it
hostile ones: one row whose 2,048 ids are all here and the others empty, and all ids of all rows here. Stock's metadata is written
once a step, so it is not timed; ours once a layer, so it is. Variants take turns in random order over the same memory. Prints tables
and writes bench/out/topk_compaction.json.
"""
import argparse
import json
import pathlib
import statistics
import sys
from types import SimpleNamespace as NS

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.common import OUT, PAGE, make_records, rest, spread_ids, table, turns  # noqa: E402

TOPK, PAGES, CONTEXT = 2048, 4096, 32768
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WORLDS = (2, 4, 8)
HEADS = (64, 128)
PREFILL = 8192
WORST = 1.03  # of stock, where nothing can be saved


def make_impl(world):
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    impl = FlashMLASparseImpl.__new__(FlashMLASparseImpl)
    impl.dcp_world_size, impl.dcp_rank = world, 0
    impl.need_to_return_lse_for_decode = True
    impl.softmax_scale = 576**-0.5
    return impl


def ids_of(kind, rows, world, generator):
    """int32 [rows, TOPK] global ids of a context; rank 0 holds those that are multiples of `world`."""
    if kind == "even":
        return spread_ids(rows, CONTEXT, TOPK, generator)
    local = (torch.randint(0, CONTEXT // world, (rows, TOPK), device="cuda", generator=generator, dtype=torch.int32)) * world
    if kind == "all here":
        return local
    other = local + 1
    other[rows // 2] = local[rows // 2]
    return other


class Layer:
    """Graphs of both variants over the same memory."""

    def __init__(self, kind, rows, world, heads, cache, generator):
        from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata
        from vllm.v1.attention.ops.flashmla import get_mla_metadata

        requests = min(rows, 512)
        self.impl = make_impl(world)
        local_pages = -(-CONTEXT // (world * PAGE))
        block_table = torch.randint(0, PAGES, (requests, local_pages), device="cuda", generator=generator, dtype=torch.int32)
        kernel = FlashMLASparseMetadata.FP8KernelMetadata(get_mla_metadata()[0], torch.zeros((1, 1), dtype=torch.int32, device="cuda"), torch.full((1,), CONTEXT, dtype=torch.int32, device="cuda"))
        self.metadata = NS(fp8_extra_metadata=kernel, block_table=block_table, req_id_per_token=torch.arange(rows, device="cuda", dtype=torch.int32) % requests,
                           block_size=PAGE, cp_kv_cache_interleave_size=1, num_decode_tokens=rows, num_actual_tokens=rows)  # fmt: skip
        self.q = torch.randn((rows, heads, 576), device="cuda", generator=generator).to(torch.bfloat16)
        self.ids, self.cache = ids_of(kind, rows, world, generator), cache
        self.graphs, self.out = {}, {}
        for name in ("stock", "compact"):
            self.impl.compact_topk = name == "compact"
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.run()
            torch.cuda.synchronize()
            self.graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[name]):
                self.out[name] = self.run()

    def run(self):
        return self.impl._forward_fp8_kv_mixed_batch(self.q, self.cache, self.ids, self.metadata)

    def check(self):
        for graph in self.graphs.values():
            graph.replay()
        (out, lse), (narrow, narrow_lse) = self.out["stock"], self.out["compact"]
        # Ids stand in another order: sums are rounded in another one.
        assert (out.float() - narrow.float()).abs().max() <= 1e-2, (out.float() - narrow.float()).abs().max()
        assert torch.equal(lse.isinf(), narrow_lse.isinf()) and (lse - narrow_lse).nan_to_num(0, 0, 0).abs().max() <= 1e-3

    def microseconds(self, rounds, repeats):
        times = {name: [] for name in self.graphs}
        for number in range(rounds):
            for name in turns(sorted(self.graphs), number):
                graph = self.graphs[name]
                rest(0.002)
                graph.replay()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(repeats):
                    graph.replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) / repeats * 1000)
        return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few batches, few repeats")
    parser.add_argument("--rows", type=int, nargs="+", default=None, help="batch sizes (default: 1 to 512, and 8,192 rows of a prefill)")
    args = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    torch.manual_seed(0)
    cache = make_records(PAGES * PAGE, "cuda").view(PAGES, PAGE, -1)
    batches = args.rows or ((8, 64) if args.quick else BATCHES)
    points = [("even", rows, world, heads) for heads in HEADS for world in WORLDS for rows in batches]
    points += [("even", PREFILL, world, heads) for heads in HEADS for world in WORLDS if args.rows is None]
    points += [(kind, rows, 8, heads) for kind in ("one full row", "all here") for heads in HEADS for rows in batches]
    results = []
    for kind, rows, world, heads in points:
        layer = Layer(kind, rows, world, heads, cache, generator)
        layer.check()
        times = layer.microseconds(5 if args.quick else 11, 4 if rows == PREFILL else 30)
        results.append(dict(kind=kind, rows=rows, world=world, heads=heads) | times)
        print(f"{kind:12} {rows:5} rows, W={world}, {heads} heads: stock {times['stock']:8.1f} us, compact {times['compact']:8.1f} us, {times['compact'] / times['stock']:.2f}", flush=True)
        del layer
    OUT.mkdir(exist_ok=True)
    (OUT / "topk_compaction.json").write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))
    for heads in HEADS:
        found = {(r["kind"], r["rows"], r["world"]): r for r in results if r["heads"] == heads}
        rows = sorted({r["rows"] for r in results})
        head = [f"rows, {heads} heads, us", *(f"W={w}" for w in WORLDS), "one full row, W=8, ratio", "all here"]
        print(table([head] + [[str(n), *(f"{r['stock']:.1f} -> {r['compact']:.1f}" if (r := found.get(("even", n, w))) else "-" for w in WORLDS),
                               *(f"{r['compact'] / r['stock']:.2f}" if (r := found.get((kind, n, 8))) else "-" for kind in ("one full row", "all here"))] for n in rows]))  # fmt: skip
    slower = [r for r in results if r["compact"] > r["stock"] * (1 if r["kind"] == "even" else WORST)]
    print("slower than stock:", [(r["kind"], r["rows"], r["world"], r["heads"], round(r["compact"] / r["stock"], 3)) for r in slower] or "none")


if __name__ == "__main__":
    main()
