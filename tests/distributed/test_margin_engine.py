# SPDX-License-Identifier: Apache-2.0
"""vLLM's whole engine on CPU ranks over gloo, with the model whose answers hang on single KV rows: what tests/gpu/test_engine.py does
on GPUs with long prompts. Compiled operations are torch (engine_on_cpu.py)."""
from unittest import mock

import pytest
import vllm.entrypoints.llm  # noqa: F401  once, before the ranks fork

from tests.distributed import engine_on_cpu
from tests.distributed.ranks import run_ranks
from tests.gpu import engine_ranks, margin_deepseek, ranks, tiny_deepseek
from tests.gpu._ckv_ranks import broken
from tests.gpu.margin_deepseek import Spec
from tests.gpu.margin_prompts import judge, make_prompt

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(900)]

SPEC = Spec(lines=24, threads=6)
ENGINE = {"max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 4, "block_size": 64, "kv_cache_memory_bytes": 32 << 20}
ENVIRONMENT = ranks.ENVIRONMENT | {ranks.CHOICE: "gloo", "VLLM_DISABLE_PYNCCL": "1", "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}


def _job(model, rounds, dcp=1, interleave=1, engine=None, max_tokens=3):
    return {"model": str(model), "rounds": [[p.tokens for p in batch] for batch in rounds], "dcp": dcp, "interleave": interleave,
            "engine": ENGINE | (engine or {}), "max_tokens": max_tokens}  # fmt: skip


def _run(work, world, job, flags="off"):
    results = run_ranks(work, world, job, env=ENVIRONMENT | engine_ranks.FLAGS[flags], timeout=850)
    assert all(r == results[0] for r in results), "ranks answered differently"
    return results[0]


def _both(rank, world, job):
    engine_on_cpu.install()
    return engine_ranks.generate_both(rank, world, job)


def test_an_engine_changes_its_weights(tmp_path):
    """Random weights first, which know nothing of the other model's questions."""
    margin = margin_deepseek.write(tmp_path / "margin", SPEC)
    random = tiny_deepseek.write(tmp_path / "random", like=margin_deepseek.config(SPEC))
    rounds = [[make_prompt(SPEC, 12, new_tokens=2), make_prompt(SPEC, 40, new_tokens=3)]]
    job = _job(random, rounds, max_tokens=2) | {"margin": _job(margin, rounds)}
    answers, found = _run(_both, 1, job)
    for prompt, answer in zip(rounds[0], answers[0], strict=True):
        assert [token for token, *_ in answer] != [ask.answer for ask in prompt.generated[:2]]
    answers, smallest = judge(rounds, found)
    assert answers == sum(len(p.asks) + len(p.generated) for p in rounds[0]) and 5 <= smallest <= 7


def _flagged(rank, world, job):
    """Answers; how often a layer was gathered ahead of itself, how often selected ids were exchanged, and what /metrics counts."""
    engine_on_cpu.install()
    from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard
    from vllm.v1.attention.ops import ckv_prefetch_plan
    from vllm.v1.attention.ops.ckv_prefetch import CKVPrefetchState

    ckv_prefetch_plan.CKV_PREFETCH_MIN_HISTORY = 1
    with mock.patch.object(CKVPrefetchState, "prepare", autospec=True, side_effect=CKVPrefetchState.prepare) as ahead, \
            mock.patch.object(PrefillRowShard, "exchange_topk", autospec=True, side_effect=PrefillRowShard.exchange_topk) as exchange:  # fmt: skip
        llm = engine_ranks.make_engine(world, job)
        found = engine_ranks.answer_margin(llm, job)
        counted = {(m.labels["path"], m.labels["reason"]): m.value for m in llm.get_metrics() if m.name == "vllm:dcp_prefill_batches"}
        return found, ahead.call_count, exchange.call_count, counted


def test_all_flags(tmp_path):
    """TP 4 and DCP 2: query split, gather and prefetch, which has history to gather, since prompts come in chunks of 32."""
    rounds = [[make_prompt(SPEC, 60, new_tokens=2)]]
    job = _job(margin_deepseek.write(tmp_path, SPEC), rounds, dcp=2, interleave=16, engine={"max_num_batched_tokens": 32, "disable_log_stats": False}, max_tokens=2)
    found, ahead, exchanged, counted = _run(_flagged, 4, job, "all")
    answers, smallest = judge(rounds, found, 2, 16)
    assert answers == sum(len(p.asks) + 2 for p in rounds[0]) and smallest >= 5
    # The first chunk has no history, and every other one looks ahead.
    chunks = -(-len(rounds[0][0].tokens) // 32)
    assert counted == {("gather", "too little history"): 1, ("gather, looking ahead", ""): chunks - 1}
    assert ahead >= 2 and exchanged >= 6, (ahead, exchanged)  # two of three layers, and all three, of some steps


def _drafts(rank, world, job):
    """Answers, and how many tokens each decode step gave a request."""
    engine_on_cpu.install()
    from vllm.v1.core.sched.scheduler import Scheduler

    update, accepted = Scheduler.update_from_output, []

    def recorded(self, scheduled, output):
        accepted.extend(len(tokens) for name, tokens in zip(output.req_ids, output.sampled_token_ids) if scheduled.scheduled_spec_decode_tokens.get(name))
        return update(self, scheduled, output)

    Scheduler.update_from_output = recorded
    return engine_ranks.generate_margin(rank, world, job), accepted


def test_twins_and_drafts(tmp_path):
    """DCP 2 with a prefix cache and the MTP layer: twins in one step find what the first of them is about to write; all drafts are right."""
    spec = Spec(lines=24, threads=6, mtp=1)
    shared = make_prompt(spec, 129)
    rounds = [[make_prompt(spec, 129 + tail, seed, shared.tokens, new_tokens=7) for seed, tail in enumerate((12, 1, 30))]]
    engine = {"enable_prefix_caching": True, "max_num_batched_tokens": 256, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    found, accepted = _run(_drafts, 2, _job(margin_deepseek.write(tmp_path, spec), rounds, dcp=2, engine=engine, max_tokens=7))
    assert [cached for cached, _ in found[0]] == [0, 128, 128]
    answers, smallest = judge(rounds, found, 2, 1)
    assert answers == sum(len([a for a in p.asks if a.position >= cached]) + 7 for p, (cached, _) in zip(rounds[0], found[0])) and smallest >= 5
    assert accepted == [3] * 6  # two steps of three tokens for each, after the first token


def _breaks(rank, world, job, names):
    engine_on_cpu.install()
    llm = engine_ranks.make_engine(world, job)
    found = []
    for how, batch in zip(names, job["rounds"], strict=True):
        with broken(how):
            found += engine_ranks.answer_margin(llm, job | {"rounds": [batch]})
    return found


def test_a_broken_gather_is_seen(tmp_path):
    names = ["nothing", "local-clamp", "nothing", "wrong-start", "stale-workspace"]
    # All rows are selected: rows that have only changed places do not matter. One that is lost does: position 16, rank 1's first, where
    # it reads one too far. So let it be on a chain.
    prompts = (make_prompt(SPEC, 34, seed, new_tokens=2) for seed in range(100))
    rounds = [[prompt] for prompt, _ in zip((p for p in prompts if 16 in {row for _, row in p.chains()}), names)]
    job = _job(margin_deepseek.write(tmp_path, SPEC), rounds, dcp=2, interleave=16, max_tokens=2)
    results = run_ranks(_breaks, 2, job, names, env=ENVIRONMENT | engine_ranks.FLAGS["gather"], timeout=850)
    for how, prompts, *found in zip(names, rounds, *results, strict=True):
        if how == "nothing":
            assert found[0] == found[1]
            judge([prompts], [found[0]], 2, 16)
        else:
            with pytest.raises(AssertionError, match="answers wrong") as seen:
                judge([prompts], [found[0]], 2, 16)
            print(how, seen.value)
