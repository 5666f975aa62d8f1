# SPDX-License-Identifier: Apache-2.0
"""Stock DCP prefill against the CKV gather: per layer and per rank, FlashMLA sparse, DeepSeek-V3.2 at TP8.

    PYTHONPATH=PATCHED_TREE python bench/bench_ckv_gather.py [--quick]

One GPU plays one rank: real builder, impl and kernels on a real shard; collectives are left out and counted in bytes, then
modelled for links of several speeds (bytes received per rank / bandwidth; no latency, no overlap). Prints one table and
writes bench/out/ckv_gather.json.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Before vllm is imported: the direct paths look for the peers, and there are none.
os.environ.update(VLLM_USE_DIRECT_DCP_A2A="0", VLLM_USE_DIRECT_DCP_Q_GATHER="0", VLLM_USE_DIRECT_DCP_KV_GATHER="0", VLLM_NO_USAGE_STATS="1")

from tests.gpu._ckv_ranks import LATENT, PAGE, ROPE, Rank, quantize  # noqa: E402

import torch  # noqa: E402

from bench.common import LINKS, MAX_MODEL_LEN, OUT, RECORD, chunk_metadata, table  # noqa: E402

TP, HEADS, TOPK, ROWS = 8, 128, 2048, 8192
TARGET = 0.42  # of stock compute, at DCP8


class Group:
    """The DCP group of a rank without peers."""

    device_communicator = device_group = None

    def __init__(self, rank, world):
        self.rank_in_group, self.world_size = rank, world


def milliseconds(function, repeats):
    """Median time on the GPU. A long fill before each start flushes the L2 cache and lets the host get ahead, so that launch time does not count."""
    scratch = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        scratch.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def random_ids(rows, context, generator):
    """int32 [rows, TOPK]: distinct ids below the row's causal bound, -1 behind them."""
    ids = torch.empty((rows, TOPK), dtype=torch.int32, device="cuda")
    for first in range(0, rows, 256):
        bound = torch.arange(context - rows + first, context - rows + first + 256, device="cuda")[:, None] + 1
        keys = torch.rand((256, context), device="cuda", generator=generator)
        keys.masked_fill_(torch.arange(context, device="cuda") >= bound, -1)
        values, chosen = keys.topk(TOPK)
        ids[first : first + 256] = torch.where(values >= 0, chosen, -1)
    return ids


def records(rows, generator):
    normal = torch.randn((rows, LATENT + ROPE), device="cuda", generator=generator).to(torch.bfloat16)
    return quantize(normal[:, :LATENT], normal[:, LATENT:])


def make_rank(world):
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.attention import sparse_mla_attention
    from vllm.v1.attention.ops import ckv_gather, dcp

    parallel_state._DCP = Group(0, world)
    dcp.MLADCPManager.__init__ = lambda self, **kwargs: None
    sparse_mla_attention.get_tensor_model_parallel_world_size = lambda: TP
    ckv_gather.all_gather_bytes = lambda gathered, local, group: None
    rank = Rank(0, world, "cuda", tp=TP, heads=HEADS, topk=TOPK, max_tokens=ROWS, max_model_len=MAX_MODEL_LEN, max_num_seqs=8)
    return rank.build(CKV_GATHER="always")


def measure(rank, context, ids, generator, repeats):
    import vllm.v1.attention.backends.mla.flashmla_ckv_gather as backend
    from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index
    from vllm.v1.attention.ops.ckv_remap import map_global_topk_to_gathered_ckv
    from vllm.v1.attention.ops.dcp import correct_attn_out

    world, heads = rank.world, HEADS // TP
    local = -(-context // world)
    pages = -(-local // PAGE)
    order = torch.randperm(pages, generator=generator, device="cuda")
    cache = records(pages * PAGE, generator).view(pages, PAGE, RECORD)
    common = chunk_metadata(context, ROWS, order.to(torch.int32)[None])
    metadata = rank.builder.build(0, common)
    plan = metadata.ckv_gather
    assert plan is not None and metadata.num_decodes == 0
    rank.topk_buffer.copy_(ids)
    gathered = rank.impl.ckv_workspace.gathered
    fill = records(4096, generator)
    for first in range(0, plan.gathered_rows, 4096):
        gathered[first : first + 4096] = fill[: len(gathered[first : first + 4096])]

    ql_nope = torch.randn((ROWS, heads, LATENT), device="cuda", generator=generator).to(torch.bfloat16)
    q_pe = torch.randn((ROWS, heads, ROPE), device="cuda", generator=generator).to(torch.bfloat16)
    q_gathered = torch.cat((ql_nope, q_pe), -1).repeat(1, world, 1)
    out, lse = rank.impl.forward_mqa(q_gathered, cache, metadata, rank.layer)
    lses = lse[None].repeat(world, 1, 1).contiguous()

    def stock():
        torch.cat((ql_nope, q_pe), -1)
        rank.impl.forward_mqa(q_gathered, cache, metadata, rank.layer)

    def gather(fp8):
        backend.fp8_is_faster = lambda *lengths: fp8
        return lambda: rank.impl.forward_ckv_gather((ql_nope, q_pe), cache, metadata)

    merge = milliseconds(lambda: correct_attn_out(out, lses, 0, None), repeats)
    result = dict(
        dcp=world,
        context=context,
        stock_ms=milliseconds(stock, repeats) + merge,
        stock_merge_ms=merge,
        gather_bf16_ms=milliseconds(gather(False), repeats),
        gather_fp8_ms=milliseconds(gather(True), repeats),
        # Received per rank: gathered queries, all LSEs, partial outputs to add | records of the other ranks.
        stock_bytes=(world - 1) * ROWS * heads * ((LATENT + ROPE) * 2 + world * 4 + LATENT * 2),
        gather_bytes=(world - 1) * plan.padded_total * RECORD,
    )
    slots, counts = torch.empty_like(ids), torch.empty(ROWS, dtype=torch.int32, device="cuda")
    request = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    result |= dict(
        remap_us=1e3
        * milliseconds(
            lambda: map_global_topk_to_gathered_ckv(ids, plan.req_ids, plan.causal_lens, plan.rank_req_starts, plan.padded_total, world, 1, out=slots, counts=counts), repeats
        ),
        upstream_remap_us=1e3
        * milliseconds(
            lambda: triton_convert_req_index_to_global_index(
                request,
                common.block_table_tensor,
                ids,
                NUM_TOPK_TOKENS=TOPK,
                HAS_PREFILL_WORKSPACE=True,
                prefill_workspace_request_ids=request,
                prefill_workspace_starts=zero,
                prefill_workspace_rank_stride=plan.padded_total,
                dcp_size=world,
                dcp_rank=0,
                return_valid_counts=True,
                out=slots,
                valid_counts_out=counts,
            ),
            repeats,
        ),
        copy_us=1e3 * milliseconds(lambda: slots.copy_(ids), repeats),
    )
    best = min(result["gather_bf16_ms"], result["gather_fp8_ms"])
    result["compute_ratio"] = result["gather_bf16_ms"] / result["stock_ms"]
    result["best_kernel"] = "bf16" if best == result["gather_bf16_ms"] else "fp8"
    for link in LINKS:
        result[f"stock_total_{link}_ms"] = result["stock_ms"] + result["stock_bytes"] / link / 1e6
        result[f"gather_total_{link}_ms"] = result["gather_bf16_ms"] + result["gather_bytes"] / link / 1e6
    return result


def rows_of_table(results):
    yield ["DCP", "context", "stock ms", "gather ms", "(fp8 ms)", "ratio", "stock MB", "gather MB", *(f"{link} GB/s" for link in LINKS), "remap us", "upstream", "copy"]
    for r in results:
        yield [
            str(r["dcp"]),
            f"{r['context'] // 1024}k",
            *(f"{r[k]:.2f}" for k in ("stock_ms", "gather_bf16_ms", "gather_fp8_ms", "compute_ratio")),
            *(f"{r[k] / 1e6:.0f}" for k in ("stock_bytes", "gather_bytes")),
            *(f"{r[f'stock_total_{link}_ms']:.1f}>{r[f'gather_total_{link}_ms']:.1f}" for link in LINKS),
            *(f"{r[k]:.0f}" for k in ("remap_us", "upstream_remap_us", "copy_us")),
        ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one context, few repeats")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    contexts, repeats = ((8192, 65536, 131072), 20) if not arguments.quick else ((65536,), 5)
    generator = torch.Generator("cuda").manual_seed(0)
    ids = {context: random_ids(ROWS, context, generator) for context in contexts}
    results = []
    for world in (2, 4, 8):
        rank = make_rank(world)
        for context in contexts:
            results.append(measure(rank, context, ids[context], generator, repeats))
        del rank
        torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, {ROWS} rows, top-k {TOPK}, {HEADS} heads at TP{TP}; X GB/s: modelled total, stock>gather, ms")
    print(table(list(rows_of_table(results))))
    worst = max(r["compute_ratio"] for r in results if r["dcp"] == 8)
    print(f"compute at DCP8: at most {worst:.2f} of stock (target {TARGET})")
    OUT.mkdir(parents=True, exist_ok=True)
    found = dict(schema=1, benchmark="ckv_gather", device=torch.cuda.get_device_name(), rows=ROWS, topk=TOPK, heads=HEADS, tp=TP, results=results)
    (OUT / "ckv_gather.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
