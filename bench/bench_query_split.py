# SPDX-License-Identifier: Apache-2.0
"""Indexer time of one rank, prefill rows unsplit and split over the query split group. One GPU, one process.

    PYTHONPATH=<patched tree> python bench/bench_query_split.py [--topologies 8/2 8/4] [--contexts 8192 65536 131072]

Runs vLLM's `sparse_attn_indexer` on the metadata of its own builder for one 8,192-token chunk at the end of each context, as
each rank of DCP group position 0 in turn: the work of the slowest one counts. The collectives are stubs that copy what a rank
itself contributes, so their transfer time is not in the times; their bytes are in the table.

Columns: "score" is DeepGEMM scoring and the local top-k, "all" the whole op, in ms; "saved" is the part of the ideal q-fold
saving that is reached, (unsplit - split) / (unsplit - unsplit / q), for scoring + top-k and for the op. "exchange" is what a
rank receives of other ranks' final ids per layer, "merge" what it receives of DCP candidates, before and after, in MiB.
Writes bench/out/query_split.json.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from bench.common import INDEX_HEADS, OUT, IndexerChunk, StubDcpGroup
from tests.distributed.indexer_batch import FLAG

TOPK = 2048
PARTS = ("gather", "score", "topk", "merge", "exchange")
MIB = 2**20


class Timer:
    """CUDA events around the parts of the op."""

    def __init__(self):
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers import sparse_attn_indexer as indexer

        self.spans: dict[str, list] = {}
        own_ops = types.SimpleNamespace(**{name: getattr(ops, name) for name in ("cp_gather_indexer_k_quant_cache", "top_k_per_row_prefill")})
        indexer.ops = own_ops
        self.wrap(own_ops, "cp_gather_indexer_k_quant_cache", "gather")
        self.wrap(indexer, "fp8_fp4_mqa_logits", "score")
        self.wrap(own_ops, "top_k_per_row_prefill", "topk")
        self.wrap(indexer, "_merge_dcp_topk_global", "merge")
        self.wrap(indexer.PrefillRowShard, "exchange_topk", "exchange")

    def wrap(self, owner, name, part):
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = function(*args, **kwargs)
            end.record()
            self.spans.setdefault(part, []).append((start, end))
            return result

        setattr(owner, name, timed)

    def run(self, functions, repeats: int) -> list[dict[str, float]]:
        """Median ms of each call and of its parts; the calls take turns, so that clocks drift for all alike."""
        samples: list[dict[str, list[float]]] = [{} for _ in functions]
        for i in range(repeats + 3):
            for function, seen in zip(functions, samples, strict=True):
                self.spans = {}
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(3_000_000)  # the host gets ahead, as in an engine: launch time does not count
                start.record()
                function()
                end.record()
                end.synchronize()
                if i < 3:
                    continue
                seen.setdefault("all", []).append(start.elapsed_time(end))
                for part in PARTS:
                    seen.setdefault(part, []).append(sum(a.elapsed_time(b) for a, b in self.spans.get(part, [])))
        return [{part: statistics.median(values) for part, values in seen.items()} for seen in samples]


class StubSplitGroup:
    device_communicator = types.SimpleNamespace(pynccl_comm=types.SimpleNamespace(disabled=False))

    def __init__(self, world: int, rank: int):
        self.world_size, self.rank_in_group = world, rank

    def all_gatherv(self, local, dim, sizes):
        gathered = local.new_empty((sum(sizes), *local.shape[1:]))
        start = sum(sizes[: self.rank_in_group])
        gathered[start : start + len(local)] = local
        return gathered


def measure(timer, tp, dcp, context, tokens, interleave, repeats, row_cost):
    from vllm.model_executor.layers import sparse_attn_indexer as indexer
    from vllm.v1.attention.backends.mla import indexer as backend
    from vllm.v1.attention.ops import query_split

    q = tp // dcp
    tokens = min(tokens, context)
    group = StubDcpGroup(dcp, tokens, TOPK)
    backend.get_dcp_group = indexer.get_dcp_group = lambda: group
    if row_cost is not None:
        backend.ROW_COST_KEYS = row_cost
    chunk = IndexerChunk(tp, dcp, 0, context, tokens, interleave, TOPK, torch.device("cuda", 0))

    def prepare(split: bool, rank: int):
        """The call, the rows of each rank, and the number of chunks."""
        split_group = StubSplitGroup(q, rank)
        query_split.get_query_split_group = indexer.get_query_split_group = lambda: split_group
        run, prefill = chunk.call(split)

        def call():
            indexer.get_query_split_group = lambda: split_group
            run()

        return call, prefill.row_shard_sizes, len(prefill.chunks)

    prepared = [prepare(False, 0)] + [prepare(True, rank) for rank in range(q)]
    chunks, sizes = prepared[0][2], prepared[1][1]
    unsplit, *split = timer.run([call for call, _, _ in prepared], repeats)
    ranks = [{**t, "score+topk": t["score"] + t["topk"], "rows": rows} for t, rows in zip(split, sizes, strict=True)]
    unsplit["score+topk"] = unsplit["score"] + unsplit["topk"]
    worst = {part: max(rank[part] for rank in ranks) for part in ("score+topk", "all", "merge")}

    def saved(part):
        return (unsplit[part] - worst[part]) / (unsplit[part] * (1 - 1 / q))

    exchange = [(tokens - rows) * TOPK * 4 for rows in sizes]
    return {
        "tp": tp, "dcp": dcp, "q": q, "context": context, "tokens": tokens, "interleave": interleave, "chunks": chunks, "sizes": sizes,
        "unsplit_ms": unsplit, "split_ms": ranks, "worst_split_ms": worst, "saved_score_topk": saved("score+topk"), "saved_all": saved("all"),
        "exchange_bytes_received": exchange, "merge_bytes_received_unsplit": tokens * (dcp - 1) * TOPK * 8,
        "merge_bytes_received_split": [rows * (dcp - 1) * TOPK * 8 for rows in sizes],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", nargs="+", default=["8/2", "8/4"], help="TP/DCP")
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 65536, 131072])
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the chunk")
    parser.add_argument("--interleave", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--row-cost", type=int, default=None, help="another ROW_COST_KEYS, to tune the balance")
    args = parser.parse_args()
    os.environ[FLAG] = "1"
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.cuda.set_device(0)
    init_workspace_manager(torch.device("cuda:0"))
    timer = Timer()
    rows = []
    print(f"{torch.cuda.get_device_name()}, {args.tokens}-token chunk, {INDEX_HEADS} heads, top-{TOPK}, interleave {args.interleave}")
    print("topology   context  q  rows of slowest   score unsplit  split  saved   all unsplit  split  saved   exchange  merge before  after")
    for topology in args.topologies:
        tp, dcp = map(int, topology.split("/"))
        for context in args.contexts:
            row = measure(timer, tp, dcp, context, args.tokens, args.interleave, args.repeats, args.row_cost)
            rows.append(row)
            unsplit, worst = row["unsplit_ms"], row["worst_split_ms"]
            slowest = max(row["split_ms"], key=lambda t: t["all"])
            print(f"TP{tp}/DCP{dcp} {context:10d}  {row['q']}  {slowest['rows']:15d}   {unsplit['score+topk']:13.3f} {worst['score+topk']:6.3f} "
                  f"{row['saved_score_topk']:6.3f}   {unsplit['all']:11.3f} {worst['all']:6.3f} {row['saved_all']:6.3f}   "
                  f"{max(row['exchange_bytes_received']) / MIB:8.1f}  {row['merge_bytes_received_unsplit'] / MIB:12.1f} "
                  f"{max(row['merge_bytes_received_split']) / MIB:6.1f}", flush=True)  # fmt: skip
            # What a row costs besides its keys, in global keys: compare with ROW_COST_KEYS.
            per_key = unsplit["score+topk"] / sum(range(context - row["tokens"] + 1, context + 1))
            row["measured_row_cost_keys"] = unsplit["merge"] / row["tokens"] / per_key
            print(f"{'':20s} a row's merge costs as much as scoring {row['measured_row_cost_keys']:.0f} keys of the context (transfer not counted)")
            torch.cuda.empty_cache()
    out = OUT / "query_split.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"schema": 1, "benchmark": "query_split", "device": torch.cuda.get_device_name(), "row_cost": args.row_cost, "rows": rows}, indent=1))
    print(f"wrote {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
