#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much of the CKV gather hides behind the layer before and the layer's own indexer, on one GPU.

    python bench/bench_ckv_prefetch.py                       the table below; JSON in bench/out/ckv_prefetch.json
    python bench/bench_ckv_prefetch.py --rounds 1 --contexts 8 16    something quick

One process is rank 0 of W. Real: planner, workspace, prefetch, copy and remap kernels, vLLM's sparse indexer with DeepSeek-V3.2's
shapes, upconvert, FlashMLA bf16 sparse attention (16 heads padded to 64, top-k 2048). Not real: the link. What the other ranks
would send is copied instead, the same bytes, by one of these means:

    host    from pinned host memory, by a copy engine: about what a PCIe link gives
    peer    from a second GPU's memory, by a copy engine: what the prefetch uses where GPUs have direct access to each other.
            Left out with one GPU
    sm      a kernel of few thread blocks copies on the device: takes SMs from the layer, as NCCL does where it cannot use
            copy engines (vllm/distributed/copy_engines.py), with as many thread blocks as its communicator may have there. The
            gather then begins behind the indexer, not before
    none    nothing is copied: all that is left are the launches, so there is nothing to hide

A layer is its KV write, the gather, the indexer and attention, in the order of vllm/models/deepseek_v32/attention.py: neither
projections nor experts, which would give the gather more to hide behind. The indexer's own exchange takes no time, and attention
reads ids of its own. `--skip-indexer` leaves it out, as layers do that reuse the ids of another one.

    hidden = 1 - (prefetch - compute) / (synchronous - compute)         times of a whole step

so the first layer of the step, which nothing precedes, and the current chunk count as not hidden unless they are. `--layers`
layers run in a row; the time of a step of `--model-layers` is that of the first, that of the last, which looks ahead at nothing,
and so many times the mean of those between. A rest before each run keeps the GPU off its power limit: there the time goes by
energy, so that a gather that waits costs less (the clocks recover meanwhile) and one that is hidden gains less.
`--layers 61 --rest 0.01` shows that. Beside it

    waits = the time that the main stream spends in the gather or waiting for it, of prefetch and synchronous, above what the same
            events measure around nothing in the layer without a gather

which leaves out what a hidden gather costs the compute: memory bandwidth, and SMs for packing and scattering records.

Contexts include the chunk: a context as long as the chunk has no history, and the prefetch has nothing to do.
"""
import argparse
import contextlib
import itertools
import json
import os
import pathlib
import statistics
import sys
from types import SimpleNamespace as NS

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.update(VLLM_DCP_CKV_GATHER="1", VLLM_DCP_CKV_PREFETCH="1")

import torch  # noqa: E402

from vllm import _custom_ops as ops  # noqa: E402
from vllm.triton_utils import tl, triton  # noqa: E402
from vllm.v1.attention.ops import ckv_config, ckv_gather, ckv_layout, ckv_plan, ckv_prefetch, ckv_remap  # noqa: E402
from vllm.v1.worker import workspace  # noqa: E402

from bench.common import LATENT, OUT, PAGE, RECORD, ROPE, IndexerChunk, StubDcpGroup, host_table, make_records, rest, turns  # noqa: E402

HEADS, PADDED_HEADS = 16, 64
SCALE = (LATENT + ROPE) ** -0.5
MODES = "compute", "synchronous", "prefetch"
WARMUP = 3  # compiles; the first step with prefetch only discovers the layers


@triton.jit
def _link_kernel(src, dst, n, BLOCK: tl.constexpr):
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, n, step):
        index = start + tl.arange(0, BLOCK)
        tl.store(dst + index, tl.load(src + index, mask=index < n), mask=index < n)


class Link:
    """Stands in for the all-gather of rank 0: its own share is copied, the others' come over `kind`."""

    def __init__(self, kind, world, rows, device, programs):
        self.kind, self.world, self.programs = kind, world, programs
        self.peer_stream = torch.cuda.Stream("cuda:1") if kind == "peer" else None  # None changes nothing
        source = make_records((world - 1) * rows, device).view(-1)
        self.source = source.cpu().pin_memory() if kind == "host" else source.to("cuda:1") if kind == "peer" else source

    def keep_awake(self, seconds):
        """Let the GPU at the other end be as awake as one that computes: behind longer pauses the same copy took 50 us more."""
        if self.kind == "peer":
            torch.cuda.synchronize("cuda:1")
            with torch.cuda.device("cuda:1"):
                rest(seconds)

    def __call__(self, gathered, local, group):
        shares = gathered.view(self.world, -1)
        if shares.data_ptr() != local.data_ptr():
            shares[0].copy_(local)
        others = shares[1:].reshape(-1)
        if self.kind in ("host", "peer"):
            # PyTorch copies on a stream of the source; a default stream would wait for both devices.
            with torch.cuda.stream(self.peer_stream):
                others.copy_(self.source[: others.numel()], non_blocking=True)
        elif self.kind == "sm":
            words = others.numel() // 8
            _link_kernel[(self.programs,)](self.source[: others.numel()].view(torch.int64), others.view(torch.int64), words, BLOCK=4096, num_warps=8)


class Layer:
    """What the gather knows of an attention layer."""

    def __init__(self, name, impl, kv_cache):
        self.layer_name, self.impl, self.kv_cache = name, impl, kv_cache


class Step:
    """A chunk of one request behind its context, in `layers` layers of one rank. `indexer`: does a layer's, or None.

    All modes run in the same memory: layers took 1% to 2% longer or shorter in other memory of the same layout.
    """

    def __init__(self, args, context, chunk, link, indexer):
        from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

        self.kernel, self.indexer = flash_mla_sparse_fwd, indexer
        self.args, self.context, self.chunk = args, context, chunk
        self.device = device = torch.device("cuda")
        world = args.world
        self.config = ckv_config.CKVGatherConfig(
            dcp_world_size=world, dcp_rank=0, interleave=args.interleave, min_tokens=0, max_tokens=context, max_num_seqs=1, max_num_batched_tokens=chunk,
            record_bytes=RECORD, decode_query_len=1, local_heads=16, link_gbps=150, always=True, num_layers=args.layers, prefetch=True,
        )  # fmt: skip
        self.group = NS(world_size=world)
        ckv_gather.get_dcp_group = lambda: self.group
        ckv_gather.get_ckv_prefetch_group = lambda: NS(world_size=world, torch_distributed_backend="a copy", unique_name="the stand-in")
        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(device)
        ahead = ckv_gather.reserve_ckv_gather_workspace(self.config)
        ahead.prefetch.early = link != "sm"
        for buffer in ahead.prefetch.buffers:
            buffer.copy_(make_records(len(buffer), device))
        now = ckv_gather.CKVGatherWorkspace(ahead.prefetch.buffers[0])
        self.workspaces = {"compute": now, "synchronous": now, "prefetch": ahead}
        self.planner = ckv_plan.CKVGatherPlanner(self.config, device)
        self.link = Link(link, world, self.config.rows_per_rank, device, args.link_programs)
        blocks = self.config.rows_per_rank // PAGE + 1
        self.block_table = torch.randperm(blocks, device=device).to(torch.int32)[None]
        self.planner.host_blocks = host_table(self.block_table)

        self.impl = NS(ckv_workspace=None)
        caches = (make_records(blocks * PAGE, device).view(blocks, PAGE, RECORD) for _ in range(args.layers))
        self.layers = [Layer(f"model.layers.{i}.self_attn.attn", self.impl, cache) for i, cache in enumerate(caches)]
        mine = ckv_layout.ckv_layout([context - chunk, context], world, args.interleave).rank_req_lens[0]
        rows = torch.arange(int(mine[0]), int(mine[1]), device=device)
        self.slots = self.block_table[0][rows // PAGE].long() * PAGE + rows % PAGE
        self.new_rows = make_records(len(rows), device)
        causal = torch.arange(context - chunk + 1, context + 1, device=device)[:, None]
        column = torch.arange(args.topk, device=device)[None]
        ids = torch.where(causal > args.topk, (torch.rand((chunk, args.topk), device=device) * causal).long(), column)
        self.topk_ids = torch.where(ids < causal, ids, -1).to(torch.int32)
        self.ql_nope = torch.randn((chunk, HEADS, LATENT), dtype=torch.bfloat16, device=device)
        self.q_pe = torch.randn((chunk, HEADS, ROPE), dtype=torch.bfloat16, device=device)
        self.q = torch.zeros((chunk, PADDED_HEADS, LATENT + ROPE), dtype=torch.bfloat16, device=device)
        self.out = torch.empty((chunk, PADDED_HEADS, LATENT), dtype=torch.bfloat16, device=device)
        self.slots_out = torch.empty_like(self.topk_ids)
        self.counts = torch.empty(chunk, dtype=torch.int32, device=device)
        self.bf16_rows = torch.empty((self.config.gathered_rows, LATENT + ROPE), dtype=torch.bfloat16, device=device)

    def plan(self):
        starts = torch.tensor([0, self.chunk], dtype=torch.int32)
        lens = torch.tensor([self.context], dtype=torch.int32)
        common = NS(query_start_loc_cpu=starts, query_start_loc=starts.to(self.device), seq_lens_cpu_upper_bound=lens, seq_lens=lens.to(self.device),
                    is_prefilling=torch.tensor([True]), num_actual_tokens=self.chunk, block_table_tensor=self.block_table, req_idx=None)  # fmt: skip
        metadata = NS(prefill=None, req_id_per_token=torch.zeros(self.chunk, dtype=torch.int32, device=self.device))
        return self.planner.plan(common, metadata)

    def run(self, mode):
        """Milliseconds per layer of one step in one of MODES: on the main stream, and of these in the gather."""
        plan = self.plan()
        gather, workspace = mode != "compute", self.workspaces[mode]
        self.impl.ckv_workspace = workspace
        torch.cuda.synchronize()
        marks = []

        def mark():
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

        self.link.keep_awake(self.args.rest + 0.01 * self.args.layers)
        rest(self.args.rest)  # also so that the host is ahead from the first layer on, as in an engine
        with ckv_prefetch.ckv_step():
            self.run_layers(plan, workspace, gather, mark)
        mark()
        marks[-1].synchronize()
        whole = [a.elapsed_time(b) for a, b in itertools.pairwise(marks[::7])]
        # Of each layer's marks: the start of the gather, what is left of it at attention, and the wait for it.
        gathers = [sum(marks[i + j].elapsed_time(marks[i + j + 1]) for j in (1, 3, 5)) for i in range(0, len(marks) - 1, 7)]
        return self.of_model(whole), self.of_model(gathers)

    def run_layers(self, plan, workspace, gather, mark):
        """All layers, with seven marks each."""
        prefetch = workspace.prefetch
        for layer in self.layers:
            mark()
            layer.kv_cache.view(-1, RECORD)[self.slots] = self.new_rows
            mark()
            if gather:
                ckv_gather.start_ckv_gather(layer, layer.kv_cache, NS(ckv_gather=plan))
            mark()
            if self.indexer is not None:
                self.indexer()
            with contextlib.nullcontext() if prefetch is None else prefetch.attending(layer):
                mark()
                if gather:
                    gathered = ckv_gather.gather_ckv(layer.kv_cache, plan, workspace, self.group, wait=False)
                else:
                    gathered = workspace.gathered[: plan.gathered_rows]
                mark()
                slots, counts = ckv_remap.map_global_topk_to_gathered_ckv(
                    self.topk_ids, plan.req_ids, plan.causal_lens, plan.rank_req_starts, plan.padded_total, plan.dcp_world_size, plan.interleave,
                    out=self.slots_out, counts=self.counts,
                )  # fmt: skip
                ops.concat_mla_q(self.ql_nope, self.q_pe, self.q)
                mark()
                if gather:
                    ckv_gather.await_ckv(workspace)
                mark()
                ops.cp_gather_and_upconvert_fp8_kv_cache(workspace.pages(), self.bf16_rows[: len(gathered)], plan.page_table, plan.page_starts, 1)
                self.kernel(self.q, self.bf16_rows.view(-1, 1, LATENT + ROPE), slots[:, None], SCALE, topk_length=counts, out=self.out)

    def of_model(self, times):
        """The mean over the layers of a model, whose inner layers take the mean of those in `times`."""
        first, *inner, last = times
        return (first + (self.args.model_layers - 2) * statistics.mean(inner) + last) / self.args.model_layers


def make_indexer(args, context, chunk):
    """A function that runs the indexer of rank 0."""
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.v1.attention.backends.mla import indexer as backend

    group = StubDcpGroup(args.world, chunk, args.topk)
    backend.get_dcp_group = sparse_attn_indexer.get_dcp_group = lambda: group
    run, _ = IndexerChunk(args.world, args.world, 0, context, chunk, args.interleave, args.topk, torch.device("cuda")).call(split=False)
    return run


def measure(args, context, chunk, kind):
    """Medians over rounds, in which the modes take turns."""
    indexer = None if args.skip_indexer else make_indexer(args, context, chunk)
    step = Step(args, context, chunk, kind, indexer)
    ckv_gather.all_gather_bytes = step.link
    times, waits = ({mode: [] for mode in MODES} for _ in range(2))
    for round_ in range(args.rounds + WARMUP):
        for mode in turns(MODES, round_):
            elapsed, waited = step.run(mode)
            if round_ >= WARMUP:
                times[mode].append(elapsed)
                waits[mode].append(waited)
    compute, sync, ahead = (statistics.median(times[mode]) for mode in MODES)
    plan = step.plan()
    # Of each round, since clocks drift over rounds.
    gather, visible = (statistics.median(a - b for a, b in zip(times[mode], times["compute"], strict=True)) for mode in ("synchronous", "prefetch"))
    sent = (args.world - 1) * plan.padded_total * RECORD
    return dict(
        context=context, chunk=chunk, link=kind, compute_ms=compute, synchronous_ms=sync, prefetch_ms=ahead, gather_ms=gather,
        link_gb_per_s=sent / gather / 1e6 if kind != "none" and gather > 0 else None,
        visible_ms=visible, waits_ms={mode: statistics.median(waits[mode]) - statistics.median(waits["compute"]) for mode in MODES},
        hidden=1 - visible / gather if gather > 0 and kind != "none" and plan.prefetch.tables is not None else None,
        slowdown=ahead / sync - 1, looks_ahead=plan.prefetch.tables is not None, times=times,
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8, 64, 128], help="thousands (1024) of tokens, the chunk among them")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--links", nargs="+", default=["host", "peer", "sm", "none"], choices=["host", "peer", "sm", "none"])
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--interleave", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6, help="layers that run in a row, at least 3")
    parser.add_argument("--model-layers", type=int, default=61, help="layers of the step whose time is given")
    parser.add_argument("--rest", type=float, default=0.15, help="seconds of rest before them")
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--skip-indexer", action="store_true", help="layers without an indexer")
    parser.add_argument("--link-programs", type=int, default=16, help="thread blocks of the sm link")
    parser.add_argument("--out", type=pathlib.Path, default=OUT / "ckv_prefetch.json")
    args = parser.parse_args()
    if not 3 <= args.layers <= args.model_layers:
        parser.error(f"--layers: from 3, a first, a last and one between them, to --model-layers={args.model_layers}")
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a GPU.")
    name = torch.cuda.get_device_name()
    print(f"{name}: DCP {args.world}, interleave {args.interleave}, {args.model_layers} layers, top-k {args.topk}, {HEADS} heads; ms per layer")
    print(f"{'context':>8} {'chunk':>6} {'link':>5} {'GB/s':>6} {'compute':>8} {'gather':>7} {'sync':>8} {'prefetch':>8} {'hidden':>7} {'waits':>13} {'slowdown':>9}")
    results, missed = [], []
    for context in args.contexts:
        for chunk in args.chunks:
            for kind in args.links:
                if chunk > context * 1024 or (kind == "peer" and torch.cuda.device_count() < 2):
                    continue
                r = measure(args, context * 1024, chunk, kind)
                torch.cuda.empty_cache()
                results.append(r)
                hidden = "-" if r["hidden"] is None else f"{r['hidden']:.3f}"
                waits = f"{r['waits_ms']['prefetch']:.3f}/{r['waits_ms']['synchronous']:.3f}"
                speed = "-" if r["link_gb_per_s"] is None else f"{r['link_gb_per_s']:.0f}"
                print(
                    f"{context:>7}k {chunk:>6} {kind:>5} {speed:>6} {r['compute_ms']:>8.3f} {r['gather_ms']:>7.3f} {r['synchronous_ms']:>8.3f} "
                    f"{r['prefetch_ms']:>8.3f} {hidden:>7} {waits:>13} {r['slowdown']:>+9.2%}",
                    flush=True,
                )
                if context == 64 and r["hidden"] is not None and r["gather_ms"] < r["compute_ms"] and r["hidden"] < 0.95:
                    missed.append(f"{context}k, chunk {chunk}, {kind}: {r['hidden']:.3f} hidden, less than 0.95")
                if (kind == "none" or not r["looks_ahead"]) and r["slowdown"] > 0.01:
                    missed.append(f"{context}k, chunk {chunk}, {kind}: {r['slowdown']:.2%} slower with nothing to hide")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    args.out.write_text(json.dumps(dict(schema=1, benchmark="ckv_prefetch", device=name, torch=torch.__version__, settings=settings, results=results, missed=missed), indent=1))
    print("targets met" if not missed else "targets missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
