# SPDX-License-Identifier: Apache-2.0
"""Split against unsplit prefill rows of the sparse indexer on GPUs: DeepGEMM scores, vLLM's top-k, its CuTe DSL merge.

Ranks are processes (tests/gpu/ranks.py). The real top-k and merge choose a fixed set but write it in any order, and the
top-k takes any of equal scores at its cut. So rows are compared as sets; where sets differ, the scores of both choices must
be bit-equal. Prints a table and writes bench/out/indexer_query_split_gpu.json.

    VLLM_STACK_TEST_DEVICE=gpu python -m pytest --base v0.33.0 -s tests/gpu/test_indexer_query_split_gpu.py
    python tests/gpu/test_indexer_query_split_gpu.py [4/2 8/2 8/4]        the same, or some TP/DCP, without pytest's report
"""
import json
import os
import pathlib
import sys
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import pytest
import torch

from tests.distributed import indexer_reference
from tests.distributed.indexer_batch import (
    FLAG, Batch, Shape, build, common_metadata, local_keys, make_batch, make_builder, make_config, run_indexer,
)  # fmt: skip
from tests.gpu import ranks

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

OUT = ROOT / "bench" / "out" / "indexer_query_split_gpu.json"
CASES = [(4, 2), (8, 2), (8, 4)]
TOPKS = (512, 2048)
BATCHES = 15  # for each top-k


def paged_cache(batch: Batch, shape: Shape, common, rank: int, world: int) -> torch.Tensor:
    """This rank's keys, written by vLLM's own quantising cache kernel. [pages, block_size, dim + 4] uint8."""
    from vllm import _custom_ops as ops

    pages = int(common.block_table_tensor.max()) + 1
    cache = torch.zeros((pages, shape.block_size, shape.dim + 4), dtype=torch.uint8, device=shape.device)
    table = common.block_table_tensor.cpu().long()
    for request in range(len(batch.requests)):
        keys = local_keys(batch, request, rank, world)
        if len(keys):
            index = torch.arange(len(keys))
            slots = table[request, index // shape.block_size] * shape.block_size + index % shape.block_size
            ops.indexer_k_quant_and_cache(keys.to(shape.device, torch.bfloat16), cache, slots.to(shape.device), 128, "ue8m0")
    return cache


class ScoreRecorder:
    """Keeps, per row of the ids buffer, the scores of the ids that the merge chose on this rank, best first."""

    def __init__(self):
        from vllm.model_executor.kernels.attention.dsa import dcp_indexer_cutedsl as merge_module
        from vllm.model_executor.layers import sparse_attn_indexer as indexer

        self.rows: dict[int, torch.Tensor] = {}
        merge, stable_topk = indexer._merge_dcp_topk_global, merge_module.stable_topk_from_gathered_candidates_cutedsl

        def recorded_topk(gathered, topk, out=None):
            self.gathered = gathered
            return stable_topk(gathered, topk, out=out)

        def recorded_merge(logits, topk_indices, *args, **kwargs):
            merge(logits, topk_indices, *args, **kwargs)
            ids, order = self.gathered[..., 1].sort(dim=1)
            chosen = topk_indices.float()
            place = torch.searchsorted(ids, chosen.contiguous()).clamp(max=ids.shape[1] - 1)
            assert torch.equal(ids.gather(1, place), chosen) or (chosen == -1).any()
            scores = self.gathered[..., 0].gather(1, order.gather(1, place)).masked_fill(chosen < 0, -torch.inf)
            first = topk_indices.storage_offset() // topk_indices.stride(0)
            for i, row in enumerate(scores.sort(dim=1, descending=True).values.cpu()):
                self.rows[first + i] = row

        merge_module.stable_topk_from_gathered_candidates_cutedsl = recorded_topk
        indexer._merge_dcp_topk_global = recorded_merge


def _compare(rank, tp, dcp, topks, count):
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import sparse_attn_indexer as indexer
    from vllm.v1.worker.workspace import init_workspace_manager

    shape = Shape(heads=64, dim=128, block_size=64, max_tokens=1024, max_len=8192, device=str(ranks.device(rank)))
    with ranks.vllm_world(rank, tp, dcp=dcp):
        init_workspace_manager(torch.device(shape.device))
        recorder = ScoreRecorder()
        dcp_rank = parallel_state.get_dcp_group().rank_in_group
        totals = {"batches": count * len(topks), "split": 0, "rows": 0, "own_rows": 0, "differ": 0, "noise": 0}
        digests = []
        for i in range(count * len(topks)):
            shape.topk = topks[i // count]
            batch = make_batch(100_000 * tp + 1000 * dcp + i, shape, ties=False, interleaves=[1, 64])
            common = common_metadata(batch, shape, dcp_rank, dcp)
            cache = paged_cache(batch, shape, common, dcp_rank, dcp)
            config = make_config(shape, tp, dcp, batch.interleave)
            ids, scores = [], []
            for split in (False, False, True):  # the second unsplit run shows what differs anyway
                metadata = build(make_builder(config, shape, split), batch, common)
                recorder.rows = {}
                ids.append(run_indexer(metadata, batch, shape, cache, dcp_rank, dcp).cpu())
                scores.append(recorder.rows)
            first, again, split_ids = ids
            decodes = metadata.num_decode_tokens
            digest = zlib.crc32(split_ids[decodes:].numpy().tobytes())
            first, again, split_ids = (x.sort(dim=1).values for x in (first, again, split_ids))
            assert ((split_ids < 0).sum(1) == (first < 0).sum(1)).all(), "number of ids"
            totals["rows"] += batch.tokens
            totals["noise"] += int((first != again).any(1).sum())
            differ = (first != split_ids).any(1)
            shard = indexer.PrefillRowShard.from_metadata(metadata.prefill, decodes)
            totals["split"] += shard is not None
            if shard is not None:
                digests.append(digest)
            own = range(batch.tokens) if shard is None else [*range(decodes), *range(shard.start, shard.stop)]
            totals["own_rows"] += len(own)
            assert sorted(scores[2]) == list(own), "rows that this rank merged"
            for row in own:
                assert torch.equal(scores[0][row], scores[2][row]), f"batch {i} row {row}: other scores"
                if differ[row]:
                    totals["differ"] += 1
                    changed = set(first[row].tolist()) ^ set(split_ids[row].tolist())
                    cut = scores[0][row][-1]
                    assert (scores[0][row] == cut).sum() >= len(changed) // 2, f"batch {i} row {row}: ids differ without a tie"
        return totals, (dcp_rank, tuple(digests))


def _report(name, row):
    OUT.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(OUT.read_text()) if OUT.exists() else {}
    table[name] = row
    OUT.write_text(json.dumps(table, indent=1))
    print(f"{name:30s} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


@pytest.mark.parametrize("tp, dcp", CASES)
def test_split_equals_unsplit(tp, dcp):
    results = ranks.run_ranks(_compare, tp, dcp, TOPKS, BATCHES, env={FLAG: "1"}, timeout=300)
    # The ranks of a query split group exchanged their ids. Those of a DCP group each ran the merge, which orders ids as its atomics come.
    assert len({digests for _, digests in results}) == dcp, "ranks of a query split group hold different ids of prefill rows"
    total = {key: sum(totals[key] for totals, _ in results) for key in ("own_rows", "differ", "noise")}
    first = results[0][0]
    assert first["split"] > first["batches"] // 2
    # Only exact ties at the cut may differ; they are rare with random scores.
    assert total["differ"] <= max(8, total["own_rows"] // 100), total
    _report(f"TP{tp}/DCP{dcp} over {'nccl' if ranks.over_nccl(tp) else 'gloo'}", {
        "batches": first["batches"], "split": first["split"], "rows": first["rows"], "compared": total["own_rows"], "ties": total["differ"],
        "ties_in_unsplit_repeat": total["noise"],
    })  # fmt: skip


def candidates(rows: int, world: int, topk: int, ties: bool) -> torch.Tensor:
    """[rows, world * topk, 2] (score, id) pairs; ids unique, some -1 with -inf, some real ones at -inf."""
    total = world * topk
    scores = torch.randint(-20, 20, (rows, total)).float() if ties else torch.randn(rows, total)
    scores[torch.rand(rows, total) < 0.01] = -torch.inf
    ids = torch.argsort(torch.rand(rows, 2 * total), dim=1)[:, :total].float()
    gone = torch.rand(rows, total) < torch.rand(rows, 1)
    scores[gone], ids[gone] = -torch.inf, -1
    return torch.stack([scores, ids], dim=-1).cuda()


@pytest.mark.parametrize("topk", [512, 2048])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_reference_merge_is_the_real_one(world, topk):
    """The CPU tests' merge and packing against upstream's CuTe DSL selector and Triton packing, ties included."""
    from vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl import (
        pack_dcp_topk_candidates_cutedsl,
        stable_topk_from_gathered_candidates_cutedsl,
    )

    torch.manual_seed(world * topk)
    for ties in (False, True):
        gathered = candidates(64, world, topk, ties)
        real = stable_topk_from_gathered_candidates_cutedsl(gathered, topk).cpu().sort(dim=1).values
        assert torch.equal(real, indexer_reference.stable_topk(gathered.cpu(), topk).sort(dim=1).values)
    logits = torch.randn(50, 3000, device="cuda")
    local = torch.argsort(torch.rand(50, 3000), dim=1)[:, :topk].int().cuda()
    local[:, ::7] = -1
    for rank, interleave in ((0, 1), (world - 1, 64)):
        packed = [torch.empty((50, topk, 2), device="cuda") for _ in range(2)]
        pack_dcp_topk_candidates_cutedsl(logits, local, packed[0], rank, world, interleave, None)
        indexer_reference.pack_candidates(logits, local, packed[1], rank, world, interleave, None)
        assert torch.equal(*packed)
    _report(f"merge W{world} top-{topk}", {"reference": "equal"})


if __name__ == "__main__":
    os.environ.setdefault("VLLM_STACK_TEST_DEVICE", "gpu")
    chosen = [tuple(map(int, case.split("/"))) for case in sys.argv[1:]]
    for width in TOPKS:
        for size in (2, 4, 8):
            test_reference_merge_is_the_real_one(size, width)
    for case in chosen or CASES:
        test_split_equals_unsplit(*case)
