# SPDX-License-Identifier: Apache-2.0
"""Steps in which requests share blocks or verify drafts: what gathers, what travels early, and every gathered byte.

From the real Scheduler on, see scheduled.py.
"""
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import load_cases
from tests.distributed.ranks import in_dcp_world, run_ranks
from tests.distributed.scheduled import PAGE, Engine, torch_kernels
from tests.gpu._ckv_prefetch import ENV

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.forked, pytest.mark.timeout(400)]


def ranks(world, fn, *args):
    return run_ranks(in_dcp_world, world, fn, *args, env=ENV | {"VLLM_LOGGING_LEVEL": "ERROR"}, timeout=350)


def prompt(seed, length):
    source = random.Random(str(seed))
    return [source.randrange(1, 1000) for _ in range(length)]


class Alone:
    """Inside: the scheduler sees no request that runs, and `budget` tokens."""

    def __init__(self, engine, budget):
        self.scheduler, self.budget = engine.scheduler, budget

    def __enter__(self):
        self.held, self.scheduler.running = self.scheduler.running, []
        self.scheduler.max_num_scheduled_tokens, self.before = self.budget, self.scheduler.max_num_scheduled_tokens

    def __exit__(self, *error):
        self.scheduler.running = self.held + self.scheduler.running
        self.scheduler.max_num_scheduled_tokens = self.before


def compute(engine, name, tokens, first, max_tokens=4):
    """Add a request, and compute the first tokens of its prompt in a step of its own."""
    engine.add(name, tokens, max_tokens)
    with Alone(engine, first):
        engine.step()
    assert engine.done[name] == first


# ------------------------------------------------------------------------------------------------ the public cases


def arrange(engine, case):
    """Bring the engine to where the case's step is next. Returns the requests' names."""
    tokens_per_block = PAGE * engine.world
    content, contents = {}, []
    for request in case["requests"]:
        length = request["computed"] + request["scheduled"]
        tokens = [t for block in request["blocks"] for t in content.setdefault(block, prompt(("block", block), tokens_per_block))]
        contents.append(tokens[:length])
    late = {request: first for request, first, _ in reversed(case["expected_written_in_this_step"])}
    names = [f"r{i}" for i in range(len(contents))]
    held = set()
    for i, (request, name) in enumerate(zip(case["requests"], names)):
        continues = request["computed"] % tokens_per_block or any(r == i for r in writers(case))
        if request["computed"] and continues and i not in late:
            decodes = request["scheduled"] == 1
            first = contents[i][: request["computed"]] if decodes else contents[i]
            compute(engine, name, first, request["computed"])
            if decodes:  # its next token is its own
                contents[i] = engine.tokens[name]
                content[request["blocks"][request["computed"] // tokens_per_block]] = engine.tokens[name][-tokens_per_block:]
            held.add(i)
    for i, request in enumerate(case["requests"]):
        # The part of the context that is older than the step, by a request that has ended.
        old = late.get(i, request["computed"]) // tokens_per_block * tokens_per_block
        if i not in held and old:
            engine.add(f"old{i}", contents[i][: old + 1] if old < len(contents[i]) else contents[i], 1)
            with Alone(engine, 1 << 20):
                engine.step()
    for i, name in enumerate(names):
        if i in held:
            continue
        tokens = [t for block in case["requests"][i]["blocks"] for t in content[block]][: len(contents[i])]
        engine.add(name, tokens)
    return names


def writers(case):
    """Requests in whose new rows another one's context lies."""
    tokens_per_block, found = case["tokens_per_block"], set()
    for reader, first, _ in case["expected_written_in_this_step"]:
        block = case["requests"][reader]["blocks"][first // tokens_per_block]
        found |= {i for i, r in enumerate(case["requests"]) if i != reader and block in r["blocks"] and r["computed"] <= first}
    return found


def _same_step(rank, world, runner, cases):
    torch_kernels()
    out, engines = [], {}
    for case in cases:
        engine = engines.get(case["interleave"]) or Engine(rank, world, interleave=case["interleave"], runner=runner, num_blocks=256, max_tokens=16384, max_model_len=16384)
        engines[case["interleave"]] = engine
        engine.begin()
        names = arrange(engine, case)
        before = {name: engine.done[name] for name in names}
        steps = engine.seen.steps
        engine.scheduler.max_num_scheduled_tokens = sum(r["scheduled"] for r in case["requests"])
        engine.step()
        batch = engine.last_batch
        # The real Scheduler made the case's step.
        assert sorted(batch) == sorted(names) and engine.seen.steps == steps + 1
        made = [(before[n] if before[n] else engine.last_start[n], engine.last_scheduled[n]) for n in names]
        assert made == [(r["computed"], r["scheduled"]) for r in case["requests"]], (case["name"], made)
        ranges = sorted([names.index(batch[r]), first, end] for r, first, end in engine.written)
        out.append((case["name"], ranges, engine.seen.wrong))
        while engine.busy:
            engine.step()
    return out, engine.seen.wrong


@pytest.mark.parametrize("runner", ["v2", "v1"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_rows_that_a_step_writes(world, runner):
    """Every case of same_step_prefix.json: made by the real Scheduler, judged by the real planner, gathered and compared."""
    cases = [case for case in load_cases("same_step_prefix") if case["dcp"] == world]
    assert cases
    for results, wrong in ranks(world, _same_step, runner, cases):
        assert wrong == []
        for case, (name, ranges, wrong) in zip(cases, results, strict=True):
            assert name == case["name"] and wrong == []
            assert ranges == case["expected_written_in_this_step"], name


def _verify(rank, world, runner, cases):
    from vllm.v1.outputs import DraftTokenIds

    torch_kernels()
    out, engines = [], {}
    for case in cases:
        shape = case["interleave"], case["drafts"]
        longest = max(row["context"] + row["query"] for row in case["rows"])
        if shape not in engines:
            engines[shape] = Engine(rank, world, interleave=shape[0], drafts=shape[1], runner=runner, num_blocks=8192, max_num_seqs=20, max_tokens=longest, max_model_len=longest + 8)
        engine = engines[shape]
        engine.begin()
        for i, row in enumerate(case["rows"]):
            if row["prefilling"]:
                compute(engine, f"r{i}", prompt(i, row["context"] + row["query"]), row["context"])
            else:
                compute(engine, f"r{i}", prompt(i, row["context"]), row["context"], max_tokens=100)
        drafts = {f"r{i}": prompt(("draft", i), row["query"] - 1) for i, row in enumerate(case["rows"]) if row["query"] > 1 and not row["prefilling"]}
        engine.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
        before = engine.seen.verifying
        engine.step()
        queries = {f"r{i}": row["query"] for i, row in enumerate(case["rows"])}
        assert engine.last_scheduled == queries
        start, _, num_reqs = engine.seen.alike[-1][1:4] if engine.seen.alike[-1][1] is not None else (None, None, 0)
        gathered = engine.last_batch[len(queries) - num_reqs :]
        out.append((sorted(int(name[1:]) for name in gathered), start, sum(engine.last_scheduled[n] for n in engine.last_batch[: len(queries) - num_reqs]), engine.seen.verifying - before))
    return out, engine.seen.wrong, [e.seen.wrong for e in engines.values()]


@pytest.mark.parametrize("runner", ["v2", "v1"])
def test_rows_that_verify_drafts(runner):
    """Every case of verify_rows.json, scheduled and ordered by vLLM: exactly what prefills is gathered, whatever the builder's split."""
    cases = load_cases("verify_rows")
    for results, *wrong in ranks(2, _verify, runner, cases):
        assert not any(map(any, wrong))
        for case, (gathered, start, before, verified) in zip(cases, results, strict=True):
            assert gathered == case["expected_gathered_requests"], case["name"]
            if gathered:
                assert start == before  # rows that keep the exchange path are those of the other requests
                assert verified == (case["drafts"] > 0)


# ------------------------------------------------------------------------------------------------ random steps

# (seed of all that follows, arrivals, how many families of prompts there are)
scenarios = st.tuples(st.integers(0, 1 << 32), st.integers(6, 16), st.integers(1, 3))


def play(engine, scenario):
    """Requests that arrive together, one after the other and while others decode; aborts; a cache that is too small for all of them.

    Prompts are made of a few families' blocks, so that many begin alike.
    """
    seed, arrivals, families = scenario
    source = random.Random(seed)
    engine.begin(seed)
    per_block, names = PAGE * engine.world, []
    while len(names) < arrivals:
        family = prompt((seed, source.randrange(families)), 4 * per_block)
        for _ in range(source.choice((1, 1, 2, 3, 4))):  # at once
            name = f"r{len(names)}"
            # Now and then a prompt ends just before a block does, so that a decode completes it.
            length = source.randint(0, 3) * per_block + (-source.randint(1, 3) if source.random() < 0.4 else source.randint(1, 60))
            tokens = family[: max(length, 1)]
            if source.random() < 0.4:
                tokens = tokens + prompt((seed, name), source.randint(1, 100))
            engine.add(name, tokens, source.choice((1, 4, 8, 30)))
            names.append(name)
        if source.random() < 0.2:
            engine.abort(source.choice(names))
        for _ in range(source.choice((0, 1, 1, 2, 4))):
            engine.step()
    # What they go on with, they have found by now: another request that begins like one of them.
    for _ in range(3):
        name = f"r{len(names)}"
        engine.add(name, engine.tokens[source.choice(names)][: 5 * per_block] + prompt((seed, name), 20), 2)
        names.append(name)
        engine.step()
    for _ in range(source.choice((0, 3, 100))):
        if not engine.busy:
            break
        engine.step()


def _random_steps(rank, world, runner, interleave, drafts, asynchronous, steps, break_it=None):
    torch_kernels()
    if break_it is not None:
        globals()[break_it]()
    engine = Engine(rank, world, interleave=interleave, runner=runner, drafts=drafts, num_blocks=12, max_num_seqs=8, max_tokens=6 * PAGE * world, max_model_len=7 * PAGE * world,
                    asynchronous=asynchronous)  # fmt: skip

    # The same examples on all ranks: derived, not random, and each ends the same way everywhere.
    @settings(max_examples=1000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(scenarios)
    def run(scenario):
        if engine.seen.steps >= steps:
            return
        play(engine, scenario)
        if break_it is None:
            wrong = torch.tensor([len(engine.seen.wrong)])
            dist.all_reduce(wrong)
            assert wrong.item() == 0, scenario

    run()
    return engine.seen


WORLDS = [  # world, runner, interleave, drafts, asynchronous, steps
    (2, "v2", 1, 0, False, 400),
    (2, "v2", 64, 3, False, 400),
    (2, "v1", 64, 3, False, 400),
    (2, "v1", 1, 0, False, 300),
    (2, "v2", 16, 0, True, 400),
    (4, "v2", 64, 1, False, 200),
    (8, "v2", 16, 0, False, 100),
]


@pytest.mark.parametrize("world, runner, interleave, drafts, asynchronous, steps", WORLDS)
def test_random_steps(world, runner, interleave, drafts, asynchronous, steps):
    """2,200 steps in all, with shared blocks, decodes as writers, verified drafts, aborts and preemption."""
    first, *others = ranks(world, _random_steps, runner, interleave, drafts, asynchronous, steps)
    for seen in (first, *others):
        assert seen.wrong == []
        assert seen.alike == first.alike, "ranks decide alike"
    assert first.steps >= steps and first.gathered > steps / 8 and first.ahead > steps / 20, first
    assert first.late > steps / 50 and (first.preempted > 0 or world > 4), first
    assert (first.verifying > 0) == (drafts > 0), first


def own_history():
    """The fault that was there: all of a request's context is history."""
    from vllm.v1.attention.ops import ckv_plan

    ckv_plan.rows_written_by_batch = lambda *args: np.empty((0, 3), dtype=np.int64)


def only_prefills_write():
    """Decoding requests are not taken for writers."""
    from vllm.v1.attention.ops import ckv_plan

    written = ckv_plan.rows_written_by_batch

    def mutant(table, table_rows, starts, ends, *more):
        return written(table, table_rows, np.where(ends - starts == 1, ends, starts), ends, *more)

    ckv_plan.rows_written_by_batch = mutant


def rows_of_the_batch():
    """Requests are looked up by their place in the batch, not by their row of the runner's tables."""
    from vllm.v1.attention.ops import ckv_plan

    written = ckv_plan.rows_written_by_batch
    ckv_plan.rows_written_by_batch = lambda table, table_rows, *more: written(table, np.arange(len(table_rows)), *more)


@pytest.mark.parametrize("how", ["own_history", "only_prefills_write", "rows_of_the_batch"])
def test_broken_on_purpose_is_seen(how):
    assert all(seen.wrong for seen in ranks(2, _random_steps, "v2", 1, 0, False, 400, how))
