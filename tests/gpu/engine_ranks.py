# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine on several ranks, a GPU each or all on one: what each rank runs. The ranks are started by ranks.run_ranks."""
import os
import random
import time
from typing import Any

from . import gloo_communicator, ranks

# What gathers does so whatever it costs, so that short prompts take that path, too; "cost" as an operator sets it.
FLAGS = {
    "off": {},
    "split": {"VLLM_DCP_QUERY_SPLIT": "1"},
    "gather": {"VLLM_DCP_CKV_GATHER": "always", "VLLM_DCP_CKV_PREFETCH": "0"},
    "prefetch": {"VLLM_DCP_CKV_GATHER": "always", "VLLM_DCP_CKV_PREFETCH": "1"},
    "all": {"VLLM_DCP_QUERY_SPLIT": "1", "VLLM_DCP_CKV_GATHER": "always", "VLLM_DCP_CKV_PREFETCH": "1"},
    "cost": {"VLLM_DCP_QUERY_SPLIT": "1", "VLLM_DCP_CKV_GATHER": "1"},
}


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random token ids, the same on every rank."""
    rng = random.Random(seed)
    return [[rng.randrange(2, 2048) for _ in range(n)] for n in lengths]


def make_engine(world: int, job: dict[str, Any]):
    """`vllm.LLM` for a rank. `job`: model, dcp, interleave, and further engine arguments in `engine`."""
    if not ranks.over_nccl(world):
        gloo_communicator.install()
    from vllm import LLM

    # A fixed cache size, and a small share: ranks that start together on one card cannot measure free memory.
    arguments = {"max_model_len": 16384, "max_num_batched_tokens": 2048, "max_num_seqs": 16, "kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False, "distributed_executor_backend": "external_launcher",
                 "disable_log_stats": True, "enforce_eager": True, "kv_cache_dtype": "fp8_ds_mla", "tensor_parallel_size": world,
                 "attention_config": {"sparse_mla_force_mqa": True, "backend": "FLASHMLA_SPARSE"}} | job.get("engine", {})  # fmt: skip
    llm = LLM(model=job["model"], skip_tokenizer_init=True, seed=0, decode_context_parallel_size=job.get("dcp", 1), cp_kv_cache_interleave_size=job.get("interleave", 1),
              disable_custom_all_reduce=True, gpu_memory_utilization=0.1, **arguments)  # fmt: skip
    if ranks.over_nccl(world) and arguments["distributed_executor_backend"] == "external_launcher":
        ranks.require_pynccl()
    return llm


def _answer(output) -> list[tuple[int, float, float]]:
    """(token, its log-probability, lead over the second best) of each generated token."""
    answer = []
    for token, table in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        best = sorted((entry.logprob for entry in table.values()), reverse=True)
        answer.append((int(token), float(table[token].logprob), float(best[0] - best[1])))
    return answer


def _best(table) -> tuple[int, float]:
    """(best token, its lead over the second) of one position's log-probabilities."""
    (token, first), (_, second) = sorted(((token, entry.logprob) for token, entry in table.items()), key=lambda item: -item[1])[:2]
    return int(token), float(first - second)


def answer_random(llm, job: dict[str, Any]) -> list[list[list[tuple[int, float, float]]]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=job.get("max_tokens", 6), temperature=0, detokenize=False, logprobs=2, ignore_eos=True)
    return [[_answer(o) for o in llm.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False)] for batch in job["rounds"]]


def answer_margin(llm, job: dict[str, Any]) -> list[list[tuple[int, dict[int, tuple[int, float]]]]]:
    """Of each prompt: tokens found in the prefix cache, and by position, from there on, the best token and its lead."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=job.get("max_tokens", 12), temperature=0, detokenize=False, logprobs=2, ignore_eos=True,
                            prompt_logprobs=2, skip_reading_prefix_cache=False)  # fmt: skip
    rounds = []
    for batch in job["rounds"]:
        rounds.append([])
        for output in llm.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False):
            last = len(output.prompt_token_ids) - 1
            # The table of a position is that of the token behind it. What came from the prefix cache has none, on runner V1 one of
            # zeros.
            computed = last - output.num_cached_tokens
            tables = output.prompt_logprobs[len(output.prompt_logprobs) - computed :]
            found = {output.num_cached_tokens + i: _best(table) for i, table in enumerate(tables)}
            found |= {last + i: _best(table) for i, table in enumerate(output.outputs[0].logprobs)}
            rounds[-1].append((output.num_cached_tokens, found))
    return rounds


def generate(rank: int, world: int, job: dict[str, Any]) -> list[list[list[tuple[int, float, float]]]]:
    """For each round of `job["rounds"]` (lists of prompts, generated together): the answers, in order."""
    return answer_random(make_engine(world, job), job)


def generate_margin(rank: int, world: int, job: dict[str, Any]) -> list[list[tuple[int, dict[int, tuple[int, float]]]]]:
    """The same for a checkpoint of margin_deepseek.py, with the answers at every position: see `answer_margin`.

    With data parallelism all replicas but the first answer one prompt of a round, and then run dummy batches beside the others.
    """
    llm = make_engine(world, job)
    if llm.llm_engine.vllm_config.parallel_config.data_parallel_rank:
        job = job | {"rounds": [batch[:1] for batch in job["rounds"]]}
    return answer_margin(llm, job)


def generate_broken(rank: int, world: int, job: dict[str, Any]) -> list[list[tuple[int, dict[int, tuple[int, float]]]]]:
    """`generate_margin` with a fault of `_ckv_ranks.broken` put in by hand: `job["broken"]`."""
    from ._ckv_ranks import broken

    llm = make_engine(world, job)
    with broken(job["broken"]):
        return answer_margin(llm, job)


def generate_both(rank: int, world: int, job: dict[str, Any]) -> tuple[list, list]:
    """`generate` of `job`, then `generate_margin` of `job["margin"]` (model, rounds, max_tokens) by the same engine, which changes its
    weights in between: much of a world's time is its start. Both checkpoints have the same config.json."""
    llm = make_engine(world, job)
    answers = answer_random(llm, job)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": job["margin"]["model"]})
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache keeps blocks of the old weights: a request is still running")
    return answers, answer_margin(llm, job["margin"])


def sleep_and_wake(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Answers before, after sleep level 1 and after level 2, with new weights then; and what the process held on the GPU meanwhile."""
    import torch

    llm = make_engine(world, job | {"engine": {"enable_sleep_mode": True} | job.get("engine", {})})
    found, used = [answer_margin(llm, job)], []

    def held() -> int:
        """Bytes that vLLM's allocator has mapped, and those of torch's own."""
        from vllm.device_allocator.cumem import CuMemAllocator

        return CuMemAllocator.get_instance().get_current_usage() + torch.cuda.memory_reserved()

    for level in (1, 2):
        used.append(held())
        llm.sleep(level=level)
        used.append(held())
        if level == 1:
            llm.wake_up()
        else:
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights", kwargs={"weights_path": job["model"]})
            llm.wake_up(tags=["kv_cache"])
        found.append(answer_margin(llm, job))
    impl = next(layer.impl for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values() if hasattr(layer, "impl"))
    workspace = getattr(impl, "ckv_workspace", None)
    return {"found": found, "held": used, "prefetch": workspace is not None and workspace.prefetch is not None}


def start(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine and answer; return its warnings and what exists in it. For a start that upstream refuses, the error."""
    import logging

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("vllm").addHandler(handler)
    try:
        llm = make_engine(world, job)
    except (NotImplementedError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}", "warnings": warnings}
    from vllm.distributed import dcp_groups

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return {
        "error": None,
        "warnings": warnings,
        "backends": sorted({layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}),
        "groups": [dcp_groups._QUERY_SPLIT is not None, dcp_groups._CKV_PREFETCH is not None],
        "found": answer_margin(llm, job),
    }


def soak(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Send `job["requests"]` random requests, or those of `job["prompts"]`, a few at a time, abort every tenth; return answers, memory
    and time.

    The order of calls is seeded: with external_launcher every rank drives its own engine and must do the same.
    """
    import torch
    from vllm import SamplingParams

    engine = make_engine(world, job).llm_engine
    rng = random.Random(job.get("seed", 1))
    given = job.get("prompts")
    total, sent, answers, reserved = len(given) if given else job["requests"], 0, {}, []
    aborted: set[str] = set()
    started = time.monotonic()
    while sent < total or engine.has_unfinished_requests():
        while sent < total and rng.random() < 0.6:
            prompt = given[sent] if given else [rng.randrange(2, 2048) for _ in range(rng.choice([3, 17, 64, 65, 300, 900, 2500]))]
            engine.add_request(str(sent), {"prompt_token_ids": prompt}, SamplingParams(max_tokens=rng.randrange(1, 9), temperature=0, detokenize=False, logprobs=2, ignore_eos=True))
            if sent % 10 == 9:
                aborted.add(str(sent - 3))
                engine.abort_request([str(sent - 3)])
            sent += 1
            if sent in (total // 4, total):
                reserved.append(torch.cuda.memory_reserved())
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = _answer(output)
    reserved.append(torch.cuda.memory_reserved())
    return {"answers": answers, "aborted": sorted(aborted), "reserved": reserved, "seconds": time.monotonic() - started}


def die_in_prefill(rank: int, world: int, job: dict[str, Any]) -> str:
    """Rank 1 ends without a word in the third forward pass; return the error that the others get, raise if they get none."""
    llm = make_engine(world, job)
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_worker import Worker

    steps, execute = [0], Worker.execute_model

    def counted(self, *args, **kwargs):
        steps[0] += 1
        if rank == 1 and steps[0] == 3:
            os._exit(0)  # the exit code of a rank that is done: the parent waits for the others
        return execute(self, *args, **kwargs)

    Worker.execute_model = counted
    started = time.monotonic()
    try:
        llm.generate([{"prompt_token_ids": p} for p in job["rounds"][0]], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    except Exception as error:  # what kind it is depends on the collective that broke
        return f"{type(error).__name__} after {time.monotonic() - started:.1f} s: {error}"
    raise RuntimeError(f"rank {rank} answered although rank 1 was gone")


def lose_worker(rank: int, world: int, job: dict[str, Any]) -> str:
    """As an operator runs it: one engine whose executor starts `world` workers, over NCCL. Kill the last one in mid prefill.

    Returns the error that the caller of `generate` gets, raises if it gets none. To be called in a process that may have children.
    """
    import threading

    import psutil

    llm = make_engine(world, job | {"engine": {"distributed_executor_backend": "mp"}})
    from vllm import SamplingParams

    (last,) = (p for p in psutil.Process().children(recursive=True) if f"_TP{world - 1}" in " ".join(p.cmdline()))
    threading.Timer(job["after"], last.kill).start()
    started = time.monotonic()
    try:
        llm.generate([{"prompt_token_ids": p} for p in job["rounds"][0]], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    except Exception as error:  # vLLM's EngineDeadError, or what the executor raises first
        return f"{type(error).__name__} after {time.monotonic() - started:.1f} s: {error}"
    raise RuntimeError("the engine answered although a worker was gone")
