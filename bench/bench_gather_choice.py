# SPDX-License-Identifier: Apache-2.0
"""Does the cost model choose the faster path of a prefill batch, the CKV gather or the exchange? For few rows and long contexts.

    PYTHONPATH=PATCHED_TREE python bench/bench_gather_choice.py            one GPU; with two, the layers over NCCL as well
    PYTHONPATH=PATCHED_TREE python bench/bench_gather_choice.py --quick    fewer points and repeats

DeepSeek-V3.2's heads, top-k 2048, one request that prefills the last rows of a context. Two parts:

    modelled   one GPU plays rank 0 of TP8, DCP 2, 4 and 8: real builder, impl and kernels on a real shard. Bytes are counted and
               divided by the speed of a link; each collective costs LATENCY more, and the exchange COPIES, which is what it took
               over NCCL on two H200 beside its bytes and kernels: this part tests the kernels and the form of the model, not these
    nccl       TP2/DCP2 on two GPUs: whole attention layers (generic, no indexer), all collectives real, four layers in a row, the
               mean of all but the first: exchange, synchronous gather, gather with prefetch. Paths take turns in random order

For each link: the worst "chosen / best" and where, and the rows from which the gather is faster, measured and by the model
(vllm/v1/attention/ops/dcp_cost.py). AIM: no choice costs more than 1.10 of the better path. Writes bench/out/gather_choice.json.
"""
import argparse
import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch  # noqa: E402

from bench.common import LATENT, OUT, PAGE, RECORD, ROPE, chunk_metadata, host_table, make_records, rest, spread_ids, table, turns  # noqa: E402

HEADS, TOPK, NOPE, V_DIM = 128, 2048, 128, 128
ROWS = (17, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
CONTEXTS = tuple(k * 1024 for k in (8, 32, 64, 128, 256, 512))
LINKS = (25, 50, 220, 400)  # GB/s
LATENCY = 20e-3  # ms of a collective of next to nothing, beside the bytes
COPIES = 40e-3, 3.4e-6  # ms, and ms for a row of one gathered head
AIM = 1.10
LAYERS, WARMUP = 4, 3
FLUSH_BYTES = 2**28  # several times the L2 cache


class Stub:
    """The DCP group of a rank without peers."""

    device_communicator = device_group = None

    def __init__(self, rank, world):
        self.rank_in_group, self.world_size = rank, world


def choice(config, times, rows, gathered_rows, ahead_rows, link):
    """"gather" or "exchange", as the planner decides it."""
    from vllm.v1.attention.ops.ckv_plan import gather_costs_more

    return "exchange" if gather_costs_more(dataclasses.replace(config, link_gbps=link), times, rows, gathered_rows, ahead_rows) else "gather"


def milliseconds(function, repeats):
    """Median time on the GPU, with a flushed L2 cache and a host that is ahead: a rest of 2 ms lets it enqueue everything."""
    scratch, times = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda"), []
    for number in range(WARMUP + repeats):
        scratch.zero_()
        rest(0.002)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        if number >= WARMUP:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


# ---- one GPU


def lone_rank(world, tp):
    from tests.gpu._ckv_ranks import Rank
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.attention import sparse_mla_attention
    from vllm.v1.attention.ops import ckv_gather, dcp

    parallel_state._DCP = Stub(0, world)
    dcp.MLADCPManager.__init__ = lambda self, **kwargs: None
    sparse_mla_attention.get_tensor_model_parallel_world_size = lambda: tp
    ckv_gather.all_gather_bytes = lambda gathered, local, group: None
    return Rank(0, world, "cuda", tp=tp, heads=HEADS, topk=TOPK, max_tokens=max(ROWS), max_model_len=max(CONTEXTS), max_num_seqs=1).build(CKV_GATHER="always", CKV_GATHER_MIN_TOKENS=0)


def modelled_point(rank, tp, context, rows, repeats, generator):
    """Kernel times of both paths and the bytes that each receives."""
    from vllm.v1.attention.backends.mla import flashmla_ckv_gather as backend
    from vllm.v1.attention.ops.dcp import correct_attn_out
    from vllm.v1.attention.ops.dcp_cost import exchange_bytes, gather_bytes

    world, heads = rank.world, HEADS // tp
    pages = -(-context // world // PAGE) + 1
    block_table = torch.randperm(pages, device="cuda").to(torch.int32)[None]
    cache = make_records(pages * PAGE, "cuda").view(pages, PAGE, RECORD)
    metadata = rank.builder.build(0, chunk_metadata(context, rows, block_table))
    plan = metadata.ckv_gather
    rank.topk_buffer[:rows] = spread_ids(rows, context, TOPK, generator)
    gathered = rank.impl.ckv_workspace.gathered
    fill = make_records(4096, "cuda")
    for first in range(0, plan.gathered_rows, 4096):
        gathered[first : first + 4096] = fill[: len(gathered[first : first + 4096])]
    ql_nope, q_pe = (torch.randn((rows, heads, n), device="cuda").to(torch.bfloat16) for n in (LATENT, ROPE))
    queries = torch.cat((ql_nope, q_pe), -1).repeat(1, world, 1)
    out, lse = rank.impl.forward_mqa(queries, cache, metadata, rank.layer)
    lses = lse[None].repeat(world, 1, 1).contiguous()

    def exchange():
        torch.cat((ql_nope, q_pe), -1)
        out, _ = rank.impl.forward_mqa(queries, cache, metadata, rank.layer)
        correct_attn_out(out, lses, 0, None)

    def gather(fp8):
        def run():
            backend.fp8_is_faster = lambda *lengths: fp8
            rank.impl.forward_ckv_gather((ql_nope, q_pe), cache, metadata)

        return run

    chosen_kernel = rank.fp8_is_faster(rank.times, rows, heads, plan.gathered_rows)
    ms = {name: milliseconds(run, repeats) for name, run in (("exchange", exchange), ("bf16", gather(False)), ("fp8", gather(True)))}
    return {
        "context": context, "rows": rows, "gathered_rows": plan.gathered_rows, "exchange_ms": ms["exchange"], "bf16_ms": ms["bf16"], "fp8_ms": ms["fp8"],
        "kernel": "fp8" if chosen_kernel else "bf16", "gather_ms": ms["fp8" if chosen_kernel else "bf16"],
        "exchange_bytes": exchange_bytes(rows, heads, world), "gather_bytes": gather_bytes(plan.gathered_rows, RECORD, world),
    }  # fmt: skip


def modelled(tp, world, contexts, rows, repeats):
    from vllm.v1.attention.backends.mla import flashmla_ckv_gather as backend
    from vllm.v1.attention.ops.dcp_cost import FLASHMLA_SM90, fp8_is_faster

    rank = lone_rank(world, tp)
    rank.times, rank.fp8_is_faster = FLASHMLA_SM90, fp8_is_faster
    generator = torch.Generator("cuda").manual_seed(0)
    points = []
    try:
        for context in contexts:
            points += [modelled_point(rank, tp, context, n, repeats, generator) for n in rows if n < context]
    finally:
        backend.fp8_is_faster = fp8_is_faster
    for point in points:
        for link in LINKS:
            total = {
                "exchange": point["exchange_ms"] + point["exchange_bytes"] / link / 1e6 + 3 * LATENCY + COPIES[0] + COPIES[1] * point["rows"] * HEADS // tp * world,
                "gather": point["gather_ms"] + point["gather_bytes"] / link / 1e6 + LATENCY,
            }
            point[f"at_{link}"] = judge(total, choice(rank.builder.ckv_gather.config, rank.times, point["rows"], point["gathered_rows"], 0, link))
    return [{"tp": tp, "dcp": world} | point for point in points]


def judge(total, chosen):
    return {"exchange_ms": total["exchange"], "gather_ms": total["gather"], "chosen": chosen, "of_best": total[chosen] / min(total.values())}


# ---- two GPUs


def nccl_rank(rank, world, contexts, rows, repeats):
    from tests.gpu import ranks

    with ranks.vllm_world(rank, world, dcp=world):
        return NcclWorld(rank, world, ranks.device(rank)).measure(contexts, rows, repeats)


class NcclWorld:
    def __init__(self, rank, world, device):
        from tests.gpu._ckv_ranks import Rank
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.v1.attention.ops.ckv_gather import CKVGatherWorkspace

        self.rank, self.world, self.device, self.heads = rank, world, device, HEADS // world
        self.me = Rank(rank, world, device, tp=world, heads=HEADS, topk=TOPK, max_tokens=max(ROWS), max_model_len=max(CONTEXTS), max_num_seqs=1)
        self.me.build(CKV_GATHER="always", CKV_GATHER_MIN_TOKENS=0, CKV_PREFETCH=1)
        self.me.heads = slice(None)
        self.ahead = self.me.impl.ckv_workspace
        self.now = CKVGatherWorkspace(self.ahead.prefetch.buffers[0])  # the same memory
        self.everybody = get_tp_group().device_communicator.pynccl_comm
        self.flag, self.scratch = torch.zeros(1, device=device), torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def measure(self, contexts, rows, repeats):
        from vllm.v1.attention.ops.dcp_cost import FLASHMLA_SM90

        points = []
        for context in contexts:
            for n in rows:
                if n < context:
                    self.ahead.prefetch.reset()
                    points.append(self.point(context, n, repeats))
        config = self.me.builder.ckv_gather.config
        for point in points:
            for kind, ahead in (("synchronous", 0), ("prefetch", point["ahead_rows"])):
                chosen = choice(config, FLASHMLA_SM90, point["rows"], point["gathered_rows"], ahead, config.link_gbps)
                point[kind] = {"chosen": chosen, "link": config.link_gbps}
        return points

    def point(self, context, rows, repeats):
        generator = torch.Generator(self.device).manual_seed(0)
        ids = spread_ids(rows, context, TOPK, generator)
        torch.manual_seed(1 + self.rank)
        pages = -(-context // self.world // PAGE) + 1
        block_table = torch.randperm(pages, device=self.device).to(torch.int32)[None]
        me = self.me
        me.builder.ckv_gather.host_blocks = host_table(block_table)
        me.topk_buffer[:rows] = ids
        batch = argparse.Namespace(q=torch.randn((rows, self.heads, NOPE + ROPE), device=self.device).to(torch.bfloat16), num_tokens=rows)
        w_uk = (torch.randn((self.heads, NOPE, LATENT), device=self.device) * NOPE**-0.5).to(torch.bfloat16)
        w_uv = (torch.randn((self.heads, LATENT, V_DIM), device=self.device) * LATENT**-0.5).to(torch.bfloat16)
        template, stack = me.layer, []
        cache = make_records(pages * PAGE, self.device).view(pages, PAGE, RECORD)
        for i in range(LAYERS):
            layer = copy.copy(template)
            layer.layer_name, layer.kv_cache, layer.W_UK_T, layer.W_UV = f"model.layers.{i}.self_attn.attn", cache.clone(), w_uk, w_uv
            stack.append(layer)
        common = chunk_metadata(context, rows, block_table)
        plan = me.builder.build(0, common).ckv_gather
        ahead_rows = 0 if plan.prefetch.tables is None else context - rows

        def run(name, events):
            from vllm.v1.attention.ops.ckv_prefetch import ckv_step

            metadata = me.builder.build(0, common)
            me.impl.ckv_workspace = self.now if name == "synchronous" else self.ahead
            if name == "exchange":
                metadata.ckv_gather = None
            with ckv_step() if name == "prefetch" else contextlib.nullcontext():
                for layer in stack:
                    me.layer, me.cache = layer, layer.kv_cache
                    me.run(batch, "generic", metadata, poison=False)
                    events.append(self.mark())
            me.layer = template

        times = {name: [] for name in ("exchange", "synchronous", "prefetch")}
        for number in range(WARMUP + repeats):
            for name in turns(times, number):
                torch.cuda.synchronize()
                self.scratch.zero_()
                rest(0.012)  # the host needs about 1 ms a layer
                self.everybody.all_reduce(self.flag)
                events = []
                run(name, events)
                events[-1].synchronize()
                if number >= WARMUP:
                    times[name].append(events[0].elapsed_time(events[-1]) / (LAYERS - 1))
        return {"context": context, "rows": rows, "gathered_rows": plan.gathered_rows, "ahead_rows": ahead_rows, "times": times}

    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def over_nccl(contexts, rows, repeats):
    from tests.gpu import ranks

    found = ranks.run_ranks(nccl_rank, 2, contexts, rows, repeats, env={"VLLM_DCP_CKV_GATHER": "1", "VLLM_DCP_CKV_PREFETCH": "1", ranks.CHOICE: "nccl"})
    points = []
    for parts in zip(*found, strict=True):
        point = {"tp": 2, "dcp": 2} | {key: parts[0][key] for key in ("context", "rows", "gathered_rows", "ahead_rows")}
        # A repeat counts as long as its slowest rank.
        ms = {name: statistics.median(map(max, zip(*(part["times"][name] for part in parts), strict=True))) for name in parts[0]["times"]}
        for kind in ("synchronous", "prefetch"):
            point[kind] = judge({"exchange": ms["exchange"], "gather": ms[kind]}, parts[0][kind]["chosen"])
        points.append(point)
    return points


# ---- tables


def summary(points, keys):
    """One line for each group and way to judge it: the worst choice, and where the gather begins to pay."""
    yield ["TP/DCP", "link", "worst chosen/best", "at rows, context", "wrong choices", "from rows on: measured > model, by context"]
    for world in sorted({(p["tp"], p["dcp"]) for p in points}):
        mine = [p for p in points if (p["tp"], p["dcp"]) == world]
        for key, label in keys:
            worst = max(mine, key=lambda p: p[key]["of_best"])
            wrong = sum(p[key]["of_best"] > 1 for p in mine)
            starts = []
            for context in sorted({p["context"] for p in mine}):
                column = sorted((p for p in mine if p["context"] == context), key=lambda p: p["rows"])
                first = [next((p["rows"] for p in column if faster(p[key])), None) for faster in (lambda c: c["gather_ms"] <= c["exchange_ms"], lambda c: c["chosen"] == "gather")]
                starts.append(f"{context // 1024}k {first[0] or '-'}>{first[1] or '-'}")
            yield [f"{world[0]}/{world[1]}", label, f"{worst[key]['of_best']:.2f}", f"{worst['rows']}, {worst['context'] // 1024}k", f"{wrong} of {len(mine)}", "  ".join(starts)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three contexts, five row counts, few repeats")
    parser.add_argument("--skip-modelled", action="store_true", help="only the layers over NCCL")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    contexts, rows, repeats = (CONTEXTS, ROWS, 12) if not arguments.quick else (CONTEXTS[::2], ROWS[::2], 4)
    found = dict(schema=1, benchmark="gather_choice", device=torch.cuda.get_device_name(), latency_ms=LATENCY, modelled=[], nccl=[])
    OUT.mkdir(parents=True, exist_ok=True)
    path, missed = OUT / "gather_choice.json", []
    print(f"{found['device']}, top-k {TOPK}, {HEADS} heads; aim: no choice above {AIM:.2f} of the better path")

    def show(part, keys):
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(table(list(summary(found[part], keys))), flush=True)
        missed.extend((part, p["tp"], p["dcp"], p["rows"], p["context"], key) for p in found[part] for key, _ in keys if p[key]["of_best"] > AIM)

    if torch.cuda.device_count() > 1:
        found["nccl"] = over_nccl(contexts, rows, repeats)
        show("nccl", [("synchronous", "NCCL, prefetch off"), ("prefetch", "NCCL, prefetch on")])
    else:
        print("not run, needs at least 2 GPUs: the layers over NCCL")
    if not arguments.skip_modelled:
        for world in (2, 4, 8):
            found["modelled"] += modelled(8, world, contexts, rows, repeats)
            torch.cuda.empty_cache()
        show("modelled", [(f"at_{link}", f"{link} GB/s") for link in LINKS])
        slow = [p for p in found["modelled"] if p["gather_ms"] > AIM * min(p["bf16_ms"], p["fp8_ms"])]
        print(f"the slower kernel for the gathered rows, by more than {AIM:.2f}: {len(slow)} of {len(found['modelled'])} points")
    print(f"targets missed: {len(missed)}" + "".join(f"\n- {m}" for m in missed[:20]))


if __name__ == "__main__":
    main()
