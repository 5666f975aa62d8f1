#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stock DCP prefill, query split, CKV gather and CKV prefetch over NCCL: one process for each GPU, real collectives.

    PYTHONPATH=PATCHED_TREE python bench/bench_several_gpus.py
    PYTHONPATH=PATCHED_TREE python bench/bench_several_gpus.py --worlds 2/2 --contexts 65536 --skip-engine     something quick

Needs at least 2 GPUs of one host. All ranks work at once on one chunk at the end of a context. Five sections, a table each:

    link      what a layer sends: the records of a gather as bytes; stock's query all-gather and its merge (LSE all-gather,
              correction, reduce-scatter) as the operations that upstream calls, copies included. MB and GB/s are those that a
              rank receives; beside them the ms that bench_ckv_gather models for links of 25, 50 and 400 GB/s
    beside    ms of a matmul alone, and with a gather of records on another stream beside it: by NCCL's kernels, as on the DCP
              communicator, and by copy engines, as the prefetch has it
    layer     ms of an MLA attention layer with DeepSeek-V3.2's indexer and heads, FlashMLA sparse over a paged shard: stock (query
              all-gather, local shard, LSE merge), the synchronous gather, gather + prefetch, and compute: the gather's layer
              without its gather. Each ends in an all-reduce of hidden states, as layers do under TP: so in all variants ranks wait
              for each other and the link is in use. `--layers` layers in a row, mean of all of them; "inner" is the mean
              without the first, which nothing precedes that could hide its gather, and the last, which looks ahead at nothing. A
              rest before each run keeps the GPU off its power limit, where a gather that waits lets the clocks recover and one
              that is hidden does not; the engine has no such rests
    indexer   ms of the sparse indexer with and without query split, where TP > DCP
    step      seconds of the prefill of one prompt in vLLM's engine with a tiny model (tests/gpu/tiny_deepseek.py, its maximum
              length raised to the longest context), chunks of `--tokens`

    hidden = 1 - (prefetch - compute) / (synchronous - compute)

In all but the last section the variants take turns in every repeat, in changing order, a repeat counts as long as its slowest
rank, ranks start together, and medians over repeats are shown; differences are those of a repeat. An engine reads the flags when
it starts, so in the last one the variants run one after the other. Ids and records are random; all ranks select the same ids.

Not in the layer: projections, RoPE, the KV write, experts; the generic layer has no indexer either. Not used: CUDA graphs, NVLink
multicast and what upstream builds on it (direct symmetric-memory paths, custom all-reduce).

Prints each table as soon as its world is measured and writes the JSON as often, so that a run that is cut short keeps what it
has. Exit code 1: a part failed; 2: not enough GPUs.
"""
import argparse
import contextlib
import copy
import json
import pathlib
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist

from bench.common import LATENT, LINKS, MAX_MODEL_LEN, OUT, PAGE, RECORD, ROPE, IndexerChunk, chunk_metadata, host_table, make_records, rest, spread_ids, table, turns

WORLDS = ("2/2", "4/4", "8/8", "8/2", "8/4")
HEADS, TOPK = 128, 2048
V_DIM, NOPE, HIDDEN = 128, 128, 7168
MATMULS, MATMUL_SIZE = 10, 8192
WARMUP = 3  # compiles, and lets the prefetch discover the layers
FLUSH_BYTES = 2**28  # several times the L2 cache
VARIANTS = ("compute", "stock", "synchronous", "prefetch")
SECTIONS = ("link", "beside", "layer", "indexer", "step")


# ---- what was measured


def slowest(ranks: list[list[float]]) -> list[float]:
    """The time of each repeat: that of its slowest rank."""
    return [max(times) for times in zip(*ranks, strict=True)]


def layer_row(ranks: list[dict[str, list[list[float]]]], layers: int, looks_ahead: bool) -> dict:
    """Medians of a layer. `ranks`: of each rank, for each variant and repeat, ms up to the ends of the first, the last but one and the last layer.

    The first and the last layer are only in the JSON.
    """
    row: dict = {"hidden": None, "hidden_inner": None, "times": {}}
    parts: dict[str, dict[str, list[float]]] = {"hidden": {}, "hidden_inner": {}}
    for name in ranks[0]:
        whole = parts["hidden"][name] = slowest([[end for *_, end in rank[name]] for rank in ranks])
        inner = parts["hidden_inner"][name] = slowest([[last - first for first, last, _ in rank[name]] for rank in ranks])
        row[f"{name}_ms"] = statistics.median(whole) / layers
        row[f"{name}_first_ms"] = statistics.median(slowest([[first for first, *_ in rank[name]] for rank in ranks]))
        row[f"{name}_last_ms"] = statistics.median(slowest([[end - last for _, last, end in rank[name]] for rank in ranks]))
        row[f"{name}_inner_ms"] = statistics.median(inner) / (layers - 2)
        row["times"][name] = [t / layers for t in whole]
    for key, times in parts.items():
        # Of each repeat, since clocks drift over repeats.
        gather, visible = (statistics.median(a - b for a, b in zip(times[name], times["compute"], strict=True)) for name in ("synchronous", "prefetch"))
        if looks_ahead and gather > 0:
            row[key] = 1 - visible / gather
    return row


def indexer_row(ranks: list[dict[str, list[list[float]]]], ways: int) -> dict:
    """Medians of the indexer, and the part of the ideal saving that the split reaches. `ranks`: as of `layer_row`, one time a repeat."""
    unsplit, split = (statistics.median(slowest([[times[-1] for times in rank[name]] for rank in ranks])) for name in ("unsplit", "split"))
    return {"ways": ways, "unsplit_ms": unsplit, "split_ms": split, "saved": (unsplit - split) / (unsplit * (1 - 1 / ways))}


def link_row(ranks: list[list[list[float]]], received: int) -> dict:
    ms = statistics.median(slowest([[times[-1] for times in rank] for rank in ranks]))
    return {"bytes": received, "ms": ms, "gb_per_s": received / ms / 1e6}


def beside_row(ranks: list[dict[str, list[list[float]]]], received: int) -> dict:
    """Medians of a matmul. `ranks`: as of `layer_row`, one time a repeat, of MATMULS of them."""
    return {"bytes": received} | {f"{name}_ms": statistics.median(slowest([[times[-1] for times in rank[name]] for rank in ranks])) / MATMULS for name in ranks[0]}


def step_row(ranks: list[list[float]], context: int, chunk: int) -> dict:
    seconds = slowest(ranks)
    steps = -(-context // chunk)
    return {"context": context, "chunk": chunk, "steps": steps, "seconds": statistics.median(seconds), "step_ms": 1e3 * statistics.median(seconds) / steps, "times": seconds}


# ---- tables and JSON


def _number(value, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _world(row) -> str:
    return f"TP{row['tp']}/DCP{row['dcp']}"


def _context(row) -> str:
    return "-" if row["context"] is None else f"{row['context'] / 1024:g}k"


COLUMNS = {
    "link": {"world": _world, "what": lambda r: r["what"], "context": _context, "MB": lambda r: f"{r['bytes'] / 1e6:.0f}", "ms": lambda r: _number(r["ms"], 3),
             "GB/s": lambda r: _number(r["gb_per_s"], 1)}
            | {f"ms at {link} GB/s": lambda r, link=link: _number(r["bytes"] / link / 1e6, 3) for link in LINKS},
    "beside": {"world": _world, "context": _context, "MB": lambda r: f"{r['bytes'] / 1e6:.0f}"}
              | {f"{what} ms": lambda r, name=name: _number(r[f"{name}_ms"], 3) for name, what in (("alone", "matmul"), ("kernels", "beside NCCL's kernels"), ("copies", "beside copy engines"))},
    "layer": {"world": _world, "context": _context}
             | {f"{name} ms": lambda r, name=name: _number(r[f"{name}_ms"], 3) for name in VARIANTS}
             | {"hidden": lambda r: _number(r["hidden"], 3)}
             | {f"{name}, inner": lambda r, name=name: _number(r[f"{name}_inner_ms"], 3) for name in VARIANTS[2:]}
             | {"hidden, inner": lambda r: _number(r["hidden_inner"], 3)},
    "indexer": {"world": _world, "context": _context, "unsplit ms": lambda r: _number(r["unsplit_ms"], 3), "split ms": lambda r: _number(r["split_ms"], 3),
                "of the ideal saving": lambda r: _number(r["saved"], 3)},
    "step": {"world": _world, "context": _context, "variant": lambda r: r["variant"], "s": lambda r: _number(r["seconds"], 3), "steps": lambda r: str(r["steps"]),
             "ms per step": lambda r: _number(r["step_ms"], 1), "of stock": lambda r: _number(r["of_stock"], 3)},
}  # fmt: skip


def print_table(section: str, rows: list[dict]) -> None:
    if not rows:
        return
    columns = COLUMNS[section]
    print(f"\n{section}\n" + table([list(columns), *([cell(row) for cell in columns.values()] for row in rows)]), flush=True)


class Results:
    """The JSON, written anew with every addition. One process writes at a time: the parent, or rank 0 while the parent waits."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)

    def create(self, **head) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write({"schema": 1, "benchmark": "several_gpus", **head, **{section: [] for section in SECTIONS}, "failed": []})

    def read(self) -> dict:
        return json.loads(self.path.read_text())

    def add(self, section: str, *rows) -> None:
        data = self.read()
        data[section] += rows
        self._write(data)

    def set(self, **head) -> None:
        self._write(self.read() | head)

    def _write(self, data: dict) -> None:
        scratch = self.path.with_name(f".{self.path.name}")
        scratch.write_text(json.dumps(data, indent=1) + "\n")
        scratch.replace(self.path)


# ---- one rank of a world


class World:
    """This process's rank of a TP/DCP world, whose groups exist."""

    def __init__(self, rank: int, tp: int, dcp: int, settings: argparse.Namespace):
        from tests.gpu.ranks import device
        from vllm.distributed import parallel_state

        self.rank, self.tp, self.dcp, self.settings = rank, tp, dcp, settings
        self.device = device(rank)
        self.group = parallel_state.get_dcp_group()
        self.everybody = parallel_state.get_tp_group()
        self.world = parallel_state.get_world_group()
        self.heads = HEADS // tp
        self.scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self.flag = torch.zeros(1, device=self.device)
        self.results = Results(settings.out)

    @property
    def name(self) -> dict[str, int]:
        return {"tp": self.tp, "dcp": self.dcp}

    def generator(self, seed: int):
        return torch.Generator(self.device).manual_seed(seed)

    def take_turns(self, steps: dict, pause: float = 0.01) -> dict[str, list[list[float]]]:
        """For each step and repeat: ms on this rank's GPU from the start to each mark, and to the end.

        `steps`: functions that prepare a run and return it; a run is called with a function that sets a mark.
        `pause`: seconds of rest before each run.
        """

        def now():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        times = {name: [] for name in steps}
        for number in range(WARMUP + self.settings.repeats):
            for name in turns(steps, number):
                run = steps[name]()
                torch.cuda.synchronize()
                self.world.barrier()
                self.scratch.zero_()
                rest(pause)
                # The host's barrier lets ranks go some 100 us apart; nobody passes this one before all GPUs are there.
                self.everybody.all_reduce(self.flag)
                events = [now()]
                run(lambda events=events: events.append(now()))
                events.append(now())
                events[-1].synchronize()
                if number >= WARMUP:
                    times[name].append([events[0].elapsed_time(later) for later in events[1:]])
        return times

    def all_ranks(self, mine):
        """Every rank's `mine`, in rank order."""
        parts = [None] * self.tp
        dist.all_gather_object(parts, mine, group=self.world.cpu_group)
        return parts

    def report(self, section: str, *rows: dict) -> None:
        if self.rank == 0:
            self.results.add(section, *(self.name | row for row in rows))

    def show(self, section: str) -> None:
        """Print this world's table."""
        if self.rank == 0:
            print_table(section, [row for row in self.results.read()[section] if self.name.items() <= row.items()])

    def machine(self) -> None:
        if self.rank == 0:
            self.results.set(device=torch.cuda.get_device_name(self.device), nccl=self.group.device_communicator.pynccl_comm.nccl.ncclGetVersion())

    # ---- sections

    def link(self) -> None:
        from vllm.v1.attention.ops.ckv_gather import all_gather_bytes
        from vllm.v1.attention.ops.ckv_layout import ckv_layout

        tokens, others = self.settings.tokens, self.dcp - 1
        manager = self.attention(CKV_GATHER=0).layer.dcp_manager
        query = torch.randn((tokens, self.heads, LATENT + ROPE), device=self.device).to(torch.bfloat16)
        out = torch.randn((tokens, self.heads * self.dcp, LATENT), device=self.device).to(torch.bfloat16)
        lse = torch.randn((tokens, self.heads * self.dcp), device=self.device)
        received, steps = {}, {}
        for context in self.settings.contexts:
            size = ckv_layout([context], self.dcp, self.settings.interleave).padded_total * RECORD
            local = torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.device)
            gathered = local.new_empty(self.dcp * size)
            received["CKV gather", context] = others * size
            steps["CKV gather", context] = lambda gathered=gathered, local=local: lambda mark: all_gather_bytes(gathered, local, self.group)
        received["query gather", None] = others * query.numel() * query.element_size()
        steps["query gather", None] = lambda: lambda mark: manager.query_gather(query)
        received["LSE merge", None] = others * tokens * self.heads * (self.dcp * 4 + LATENT * 2)
        # As the fused layer calls it: the backend marks empty shards itself.
        steps["LSE merge", None] = lambda: lambda mark: manager.combine(out, lse, seq_lens=None, query_start_loc=None)
        ranks = self.all_ranks(self.take_turns(steps))
        self.report("link", *({"what": key[0], "context": key[1]} | link_row([rank[key] for rank in ranks], received[key]) for key in steps))
        self.show("link")

    def attention(self, **flags):
        """A rank with its own workspaces, under the given VLLM_DCP_ flags."""
        from tests.gpu._ckv_ranks import Rank

        rank = Rank(
            self.group.rank_in_group, self.dcp, self.device, tp=self.tp, heads=HEADS, topk=TOPK, max_tokens=self.settings.tokens, max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8, interleave=self.settings.interleave,
        )  # fmt: skip
        return rank.build(**flags)

    def layers(self) -> None:
        from vllm.v1.attention.ops.ckv_gather import CKVGatherWorkspace
        from vllm.v1.worker import workspace

        stock, stock_manager = self.attention(CKV_GATHER=0), workspace.current_workspace_manager()
        # Keeps its workspaces: building the next one only replaces vLLM's pointer to them.
        rank, manager = self.attention(CKV_GATHER="always", CKV_PREFETCH=1), workspace.current_workspace_manager()
        ahead = rank.impl.ckv_workspace
        if self.settings.late:
            ahead.prefetch.early = False
        # All in the same memory: layers took 1% to 2% longer or shorter in other memory of the same layout.
        now = CKVGatherWorkspace(ahead.prefetch.buffers[0])
        variants = {"stock": (stock, stock_manager, None), "synchronous": (rank, manager, now), "prefetch": (rank, manager, ahead)}
        for context in self.settings.contexts:
            self.layers_at(context, variants)
        self.show("layer")

    def layers_at(self, context: int, variants: dict) -> None:
        from vllm.v1.attention.backends.mla import flashmla_ckv_gather as backend
        from vllm.v1.attention.ops.ckv_prefetch import ckv_step
        from vllm.v1.worker import workspace

        settings = self.settings
        *_, ahead = variants["prefetch"]
        ahead.prefetch.reset()  # new layers with the names of the last context's
        tokens = min(settings.tokens, context)
        ids = spread_ids(tokens, context, TOPK, self.generator(0))
        torch.manual_seed(1 + self.rank)
        pages = -(-context // (self.dcp * settings.interleave)) * settings.interleave // PAGE + 1
        block_table = torch.randperm(pages, device=self.device).to(torch.int32)[None]
        caches = [make_records(pages * PAGE, self.device).view(pages, PAGE, RECORD) for _ in range(settings.layers)]
        batch = argparse.Namespace(q=torch.randn((tokens, self.heads, NOPE + ROPE), device=self.device).to(torch.bfloat16), num_tokens=tokens)
        w_uk = (torch.randn((self.heads, NOPE, LATENT), device=self.device) * NOPE**-0.5).to(torch.bfloat16)
        w_uv = (torch.randn((self.heads, LATENT, V_DIM), device=self.device) * LATENT**-0.5).to(torch.bfloat16)
        hidden_states = torch.randn((tokens, HIDDEN), device=self.device).to(torch.bfloat16)
        common = chunk_metadata(context, tokens, block_table)
        indexer_op = None
        if settings.layer == "fused" and not settings.skip_indexer:
            indexer = IndexerChunk(self.tp, self.dcp, self.group.rank_in_group, context, tokens, settings.interleave, TOPK, self.device)
            indexer_op, _ = indexer.call(split=False)
        looks_ahead = False

        def step(name, without_gather=False):
            nonlocal looks_ahead
            rank, manager, gather_workspace = variants[name]
            rank.heads = slice(None)  # the batch holds the heads of this rank only
            rank.topk_buffer[:tokens], rank.indexer_op = ids, indexer_op
            template, stack = rank.layer, []
            for i, cache in enumerate(caches):
                layer = copy.copy(template)
                layer.layer_name, layer.kv_cache, layer.W_UK_T, layer.W_UV = f"model.layers.{i}.self_attn.attn", cache, w_uk, w_uv
                stack.append(layer)
            if name != "stock":
                rank.builder.ckv_gather.host_blocks = host_table(block_table)
            plan = rank.builder.build(0, common).ckv_gather
            assert (plan is None) == (name == "stock")
            if name == "prefetch":
                looks_ahead = plan.prefetch.tables is not None

            def prepare():
                metadata = rank.builder.build(0, common)
                return lambda mark: run(metadata, mark)

            def run(metadata, mark):
                with ckv_step():
                    run_layers(metadata, mark)

            def run_layers(metadata, mark):
                workspace._manager, rank.impl.ckv_workspace = manager, gather_workspace
                with gather_left_out(backend) if without_gather else contextlib.nullcontext():
                    for i, layer in enumerate(stack):
                        rank.layer, rank.cache = layer, layer.kv_cache
                        rank.run(batch, settings.layer, metadata, poison=False)
                        self.everybody.all_reduce(hidden_states)
                        if i in (0, len(stack) - 2):
                            mark()
                rank.layer = template

            return prepare

        # The layer without its gather reads what the synchronous one left in the buffer.
        steps = {"stock": step("stock"), "synchronous": step("synchronous"), "compute": step("synchronous", without_gather=True), "prefetch": step("prefetch")}
        ranks = self.all_ranks(self.take_turns(steps, settings.rest))
        self.report("layer", {"context": context, "tokens": tokens, "layers": settings.layers, "looks_ahead": looks_ahead} | layer_row(ranks, settings.layers, looks_ahead))

    def indexer(self) -> None:
        from vllm.v1.worker import workspace

        if self.tp == self.dcp:
            return
        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(self.device)
        for context in self.settings.contexts:
            tokens = min(self.settings.tokens, context)
            chunk = IndexerChunk(self.tp, self.dcp, self.group.rank_in_group, context, tokens, self.settings.interleave, TOPK, self.device)
            steps, sizes = {}, None
            for name in ("unsplit", "split"):
                run, prefill = chunk.call(name == "split")
                steps[name] = lambda run=run: lambda mark: run()
                sizes = prefill.row_shard_sizes
            ranks = self.all_ranks(self.take_turns(steps))
            self.report("indexer", {"context": context, "tokens": tokens, "sizes": sizes} | indexer_row(ranks, self.tp // self.dcp))
        self.show("indexer")


    def beside(self) -> None:
        from vllm.distributed.copy_engines import empty_for_gathers
        from vllm.distributed.parallel_state import get_ckv_prefetch_group
        from vllm.v1.attention.ops.ckv_gather import all_gather_bytes
        from vllm.v1.attention.ops.ckv_layout import ckv_layout

        prefetch, side = get_ckv_prefetch_group(), torch.cuda.Stream(self.device, priority=-1)
        a, b = (torch.randn((MATMUL_SIZE, MATMUL_SIZE), device=self.device).to(torch.bfloat16) for _ in range(2))
        product = torch.empty_like(a)
        shares = [ckv_layout([context], self.dcp, self.settings.interleave).padded_total * RECORD for context in self.settings.contexts]
        memory, _pool, _ = empty_for_gathers((self.dcp * max(shares),), self.device, prefetch)

        def matmuls(share, group=None):
            def run(mark):
                gathered, main = memory[: self.dcp * share], torch.cuda.current_stream()
                for _ in range(MATMULS):
                    if group is not None:
                        side.wait_stream(main)
                        with torch.cuda.stream(side):
                            all_gather_bytes(gathered, gathered[self.group.rank_in_group * share :][:share], group)
                    torch.mm(a, b, out=product)
                    if group is not None:
                        main.wait_stream(side)

            return lambda: run

        for context, share in zip(self.settings.contexts, shares, strict=True):
            steps = {"alone": matmuls(share), "kernels": matmuls(share, self.group), "copies": matmuls(share, prefetch)}
            ranks = self.all_ranks(self.take_turns(steps))
            self.report("beside", {"context": context} | beside_row(ranks, (self.dcp - 1) * share))
        self.show("beside")


@contextlib.contextmanager
def gather_left_out(backend):
    """FlashMLA's gathered attention without the gather: neither the local copy nor the collective."""
    before = backend.gather_ckv
    backend.gather_ckv = lambda cache, plan, workspace, group, wait: workspace.gathered[: plan.gathered_rows]
    try:
        yield
    finally:
        backend.gather_ckv = before


def measure_world(rank: int, tp: int, dcp: int, settings: argparse.Namespace) -> None:
    """What each rank runs."""
    from tests.gpu.ranks import vllm_world

    with vllm_world(rank, tp, tp=tp, dcp=dcp):
        world = World(rank, tp, dcp, settings)
        world.machine()
        world.link()
        world.layers()
        world.indexer()
        world.beside()


def prefill_seconds(rank: int, tp: int, job: dict) -> list[list[float]]:
    """For each context of `job`, the seconds of each repeat of its prefill. What each rank runs for one engine."""
    from tests.gpu import engine_ranks
    from vllm import SamplingParams
    from vllm.distributed.parallel_state import get_world_group

    llm = engine_ranks.make_engine(tp, job)
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    found = []
    for context in job["contexts"]:
        prompt = engine_ranks.prompts([context])
        times = []
        for _ in range(1 + job["repeats"]):
            get_world_group().barrier()
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt[0]}], params, use_tqdm=False)
            times.append(time.perf_counter() - start)
        found.append(times[1:])  # the first one compiles
    return found


# ---- the parent


def measure_steps(results: Results, settings: argparse.Namespace, worlds: list[tuple[int, int]]) -> None:
    """Engines of every world and variant, one after the other. "split" and "all" only where there are rows to split."""
    from tests.gpu import tiny_deepseek
    from tests.gpu.engine_ranks import FLAGS

    with tempfile.TemporaryDirectory(prefix="bench-several-gpus-") as room:
        model = tiny_deepseek.write(pathlib.Path(room) / "model", layers=settings.engine_layers)
        longest = max(settings.contexts) + 64  # one page more: the token that is generated
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
        for tp, dcp in worlds:
            stock: dict[int, float] = {}
            for flags in FLAGS if tp > dcp else ("off", "gather", "prefetch"):
                variant = "stock" if flags == "off" else flags
                job = {"model": str(model), "dcp": dcp, "interleave": settings.interleave, "contexts": settings.contexts, "repeats": settings.engine_repeats,
                       "engine": {"max_model_len": longest, "max_num_batched_tokens": settings.tokens, "max_num_seqs": 2, "kv_cache_memory_bytes": 2 << 30}}  # fmt: skip
                ranks = attempt(results, f"engine TP{tp}/DCP{dcp} {variant}", settings, prefill_seconds, tp, job, env=FLAGS[flags])
                for i, context in enumerate(settings.contexts if ranks else []):
                    row = step_row([rank[i] for rank in ranks], context, settings.tokens)
                    if variant == "stock":
                        stock[context] = row["seconds"]
                    of_stock = row["seconds"] / stock[context] if context in stock else None
                    results.add("step", {"tp": tp, "dcp": dcp, "variant": variant, "layers": settings.engine_layers, "of_stock": of_stock} | row)
            print_table("step", [row for row in results.read()["step"] if (row["tp"], row["dcp"]) == (tp, dcp)])


def attempt(results: Results, what: str, settings: argparse.Namespace, fn, world: int, *args, env: dict[str, str]):
    """`run_ranks`, or None where it failed: the parts after it still run."""
    from tests.gpu.ranks import run_ranks

    try:
        return run_ranks(fn, world, *args, env=env, timeout=settings.timeout)
    except AssertionError as error:  # how run_ranks says that a rank failed
        print(f"{what} failed: {error}", file=sys.stderr, flush=True)
        results.add("failed", {"what": what, "why": str(error).strip().splitlines()[-1]})
        return None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=None, metavar="TP/DCP", help=f"default: those of {' '.join(WORLDS)} that the machine has GPUs for")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 65536, 131072], help="tokens, the chunk among them (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the chunk (default: %(default)s)")
    parser.add_argument("--interleave", type=int, default=1, help="consecutive tokens of a rank (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="of all sections but the last (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="layers in a row, at least 3 (default: %(default)s)")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds of rest before them (default: %(default)s)")
    parser.add_argument("--layer", choices=("fused", "generic"), default="fused", help="DeepSeek-V3.2's own attention or MLAAttention.forward_impl (default: %(default)s)")
    parser.add_argument("--skip-indexer", action="store_true", help="attention layers without an indexer, like those that reuse another layer's ids")
    parser.add_argument("--late", action="store_true", help="start the prefetch at attention, as without copy engines, instead of before the indexer")
    parser.add_argument("--engine-layers", type=int, default=4, help="layers of the tiny model (default: %(default)s)")
    parser.add_argument("--engine-repeats", type=int, default=5, help="prefills of each context and variant (default: %(default)s)")
    parser.add_argument("--skip-engine", action="store_true", help="leave the section step out")
    parser.add_argument("--skip-layers", action="store_true", help="only the section step")
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds for the layers of a world, and for an engine (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=OUT / "several_gpus.json", help="default: bench/out/several_gpus.json")
    args = parser.parse_args(argv)
    if args.worlds is not None:
        try:
            pairs = [tuple(map(int, world.split("/"))) for world in args.worlds]
        except ValueError:
            pairs = [()]
        if any(len(pair) != 2 or pair[1] < 2 or pair[0] % pair[1] or HEADS % pair[0] for pair in pairs):
            parser.error(f"--worlds: {' '.join(args.worlds)}: give TP/DCP with DCP at least 2, TP a multiple of it and a divisor of {HEADS}, for example 8/2")
        args.worlds = pairs
    if args.layers < 3:
        parser.error("--layers: at least 3, a first, a last and one between them")
    if min(args.repeats, args.engine_repeats, args.engine_layers, args.interleave) < 1:
        parser.error("repeats, layers and interleave must be at least 1")
    if min(args.tokens, *args.contexts) < 512:
        parser.error("--tokens, --contexts: at least 512, backends take shorter chunks for decodes")
    if max(args.contexts) > MAX_MODEL_LEN:
        parser.error(f"--contexts: DeepSeek-V3.2 ends at {MAX_MODEL_LEN} tokens")
    return args


def choose_worlds(wanted: list[tuple[int, int]] | None, gpus: int) -> list[tuple[int, int]]:
    """The worlds to run. Ends the program where the machine has too few GPUs."""
    pairs = [tuple(map(int, world.split("/"))) for world in WORLDS] if wanted is None else wanted
    if gpus < 2:
        refuse(f"needs at least 2 GPUs, found {gpus}")
    if wanted is None:
        return [pair for pair in pairs if pair[0] <= gpus]
    most = max(tp for tp, _ in pairs)
    if most > gpus:
        refuse(f"TP{most} needs {most} GPUs, found {gpus}")
    return pairs


def refuse(why: str) -> None:
    print(f"bench_several_gpus: {why}", file=sys.stderr)
    sys.exit(2)


def main() -> int:
    args = parse()
    gpus = torch.cuda.device_count()
    worlds = choose_worlds(args.worlds, gpus)
    from tests.gpu.engine_ranks import FLAGS
    from tests.gpu.ranks import over_nccl

    if not all(over_nccl(tp) for tp, _ in worlds):
        refuse("VLLM_STACK_TEST_RANKS=gloo puts all ranks on one GPU: unset it")
    results = Results(args.out)
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "worlds")} | {"worlds": worlds}
    results.create(device=None, gpus=gpus, nccl=".".join(map(str, torch.cuda.nccl.version())), torch=torch.__version__, settings=settings)
    for tp, dcp in [] if args.skip_layers else worlds:
        # All flags: they decide which groups exist. What a variant uses of them is chosen when it is built.
        attempt(results, f"TP{tp}/DCP{dcp}", args, measure_world, tp, dcp, args, env=FLAGS["all"])
    if not args.skip_engine:
        measure_steps(results, args, worlds)
    data = results.read()
    if len(worlds) > 1:
        for section in SECTIONS:
            print_table(section, data[section])
    if data["device"] is None:  # no world was measured
        data["device"] = torch.cuda.get_device_name()
        results.set(device=data["device"])
    print(f"\n{data['device']}, {gpus} GPUs, NCCL {data['nccl']}; chunk of {args.tokens} tokens, interleave {args.interleave}, top-k {TOPK}, {HEADS} heads over TP, {args.repeats} repeats")
    for failure in data["failed"]:
        print(f"failed: {failure['what']}: {failure['why']}")
    return 1 if data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
