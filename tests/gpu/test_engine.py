# SPDX-License-Identifier: Apache-2.0
"""The whole engine, patched, with a GPU for each rank or all on one, with two models.

A tiny one with random weights: every flag against TP 1 / DCP 1, by log-probabilities. And one whose answers hang on single KV rows
(margin_deepseek.py): each position that asks, and each generated token, must be right by more than a nat, in every world, without a
reference. An engine that has run the one takes the other's weights.

TOLERANCE: on one H200 a repeat of TP 1 itself differs by 0.06 (the indexer's top-k keeps no order), TP 2 against TP 1, both
without DCP, by 0.06, and stock TP 2 / DCP 2 by 0.12; three times the noise is allowed. Where a token differs, the reference must
have had a near-tie there.

The soak compares some 1,900 tokens of 450 requests, sixty times as many, and its tails reach further: stock TP 4 with and without
DCP 2 differ by 0.17, in 35 requests, once where the best token led by 0.25; a repeat of stock TP 4 / DCP 2 differs by 0.16, in 26
requests. SOAK_TOLERANCE and SOAK_SHARE allow for that.
"""
import concurrent.futures
import dataclasses
import multiprocessing
import pathlib

import pytest

from tests.processes import collect

from . import engine_ranks, margin_deepseek, ranks, tiny_deepseek
from .margin_deepseek import Spec
from .margin_prompts import Prompt, check_answers, judge, make_prompt
from .side_by_side import SideBySide

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.gpu, pytest.mark.timeout(600)]

TOLERANCE = 0.2
SOAK_TOLERANCE = 0.35
SOAK_SHARE = 0.15  # of the requests may leave the reference at a near-tie
LENGTHS = [5, 64, 65, 300, 2100, 9000]
# (TP, DCP, interleave, flags)
REFERENCE = (1, 1, 1, "off")
WORLDS = [(2, 1, 1, "off"), (2, 2, 1, "off"), (2, 2, 64, "all"), (4, 4, 1, "prefetch"), (4, 4, 64, "gather"),
          *((4, 2, interleave, flags) for flags in engine_ranks.FLAGS for interleave in (1, 64))]  # fmt: skip
SPEC = Spec()


@dataclasses.dataclass(frozen=True)
class Models:
    """Checkpoint folders of one shape: random weights, and the ones with margins."""

    random: str
    margin: str


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    like = margin_deepseek.config(SPEC)
    return Models(str(tiny_deepseek.write(folder / "random", like=like)), str(margin_deepseek.write(folder / "margin", SPEC)))


@pytest.fixture(scope="session")
def mtp_model(tmp_path_factory) -> str:
    return str(margin_deepseek.write(tmp_path_factory.mktemp("mtp"), Spec(mtp=1)))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """Random weights in their own shape."""
    return str(tiny_deepseek.write(tmp_path_factory.mktemp("model")))


def rounds_of(kind: str) -> tuple[list[list[Prompt]], int]:
    """Rounds of prompts for the model with margins, and how many tokens to generate."""
    if kind == "prefix":
        # Twins of a prompt that was there before. Then twins of one that is new: blocks that one of them fills are found by the others.
        old, new = make_prompt(SPEC, 2100, 1), make_prompt(SPEC, 900, 2)
        return [[old], [make_prompt(SPEC, n, seed, old.tokens) for seed, n in enumerate((2101, 2105, 2300, 3000))],
                [make_prompt(SPEC, n, seed, new.tokens) for seed, n in enumerate((1000, 1001, 1200))]], 12  # fmt: skip
    if kind == "preempt":
        return [[make_prompt(SPEC, 900, seed, new_tokens=80) for seed in range(6)]], 80
    shared = make_prompt(SPEC, 1000, 3)
    return [[make_prompt(SPEC, n) for n in LENGTHS] + [make_prompt(SPEC, 1500, seed, shared.tokens) for seed in (1, 2)]], 12


def _run(models: Models, world: tuple[int, int, int, str], kind: str):
    tp, dcp, interleave, flags = world
    prompts = engine_ranks.prompts(LENGTHS)
    job = {"model": models.random, "dcp": dcp, "interleave": interleave, "rounds": [prompts]}
    if kind == "prefix":  # the second round finds the first one's blocks in the cache, then goes on
        job["rounds"] = [prompts[3:5], [p + engine_ranks.prompts([40], seed=i)[0] for i, p in enumerate(prompts[3:5])]]
        job["engine"] = {"enable_prefix_caching": True}
    if kind == "preempt":  # room for about two of the six requests: some are preempted and computed again
        job["rounds"] = [engine_ranks.prompts([900] * 6, seed=3)]
        job |= {"max_tokens": 80, "engine": {"num_gpu_blocks_override": 34 // dcp + 1, "max_model_len": 2048}}
    rounds, new_tokens = rounds_of(kind)
    job["margin"] = {"model": models.margin, "rounds": [[p.tokens for p in batch] for batch in rounds], "max_tokens": new_tokens}
    try:
        return ranks.run_ranks(engine_ranks.generate_both, tp, job, env=engine_ranks.FLAGS[flags], timeout=500)
    except AssertionError as failure:  # kept, too: the next test would start the world again
        return failure


@pytest.fixture(scope="session")
def worlds(request, models, mtp_model):
    """Starts what the session's tests will ask for."""
    side_by_side = SideBySide()
    for item in request.session.items:
        world = getattr(item, "callspec", None) and item.callspec.params.get("world")
        if item.path.name != pathlib.Path(__file__).name or world is None:
            continue
        if item.originalname in ("test_against_tp1", "test_margin"):
            for key in {REFERENCE, world} if item.originalname == "test_against_tp1" else {world}:
                side_by_side.start((key, "plain"), _run, models, key, "plain")
        elif item.originalname in ("test_twins", "test_broken_on_purpose_is_seen"):
            side_by_side.start(world, _run_twins, models.margin, mtp_model, world)
    yield side_by_side
    side_by_side.close()


def both(worlds: SideBySide, models: Models, world: tuple[int, int, int, str], kind: str = "plain"):
    """(answers of the random model, those of the one with margins) of one world; every rank must agree."""
    results = worlds.result((world, kind), _run, models, world, kind)
    if isinstance(results, AssertionError):
        raise results
    assert all(r == results[0] for r in results), "ranks answered differently"
    return results[0]


@dataclasses.dataclass
class Difference:
    largest: float = 0.0
    compared: int = 0
    near_ties: int = 0


def compare(reference, found, tolerance: float = TOLERANCE) -> Difference:
    """Largest log-probability difference up to the first differing token of each prompt; AssertionError beyond `tolerance`."""
    result = Difference()
    for batch, (wanted, got) in enumerate(zip(reference, found, strict=True)):
        for prompt, (a, b) in enumerate(zip(wanted, got, strict=True)):
            assert len(a) == len(b)
            for step, ((token, logprob, lead), (other, other_logprob, _)) in enumerate(zip(a, b, strict=True)):
                where = f"round {batch}, prompt {prompt}, token {step}"
                if token != other:
                    assert lead <= tolerance, f"{where}: {other} instead of {token}, which led by {lead:.3f}"
                    result.near_ties += 1
                    break
                assert abs(logprob - other_logprob) <= tolerance, f"{where}: log-probability {other_logprob:.4f}, the reference has {logprob:.4f}"
                result.largest = max(result.largest, abs(logprob - other_logprob))
                result.compared += 1
    assert result.compared >= len(reference[0]), "almost nothing could be compared"
    return result


def test_repeat_noise(worlds, models):
    again = ranks.run_ranks(engine_ranks.generate, 1, {"model": models.random, "rounds": [engine_ranks.prompts(LENGTHS)]}, timeout=500)[0]
    noise = compare(both(worlds, models, REFERENCE)[0], again)
    print(f"repeat of TP1: largest difference {noise.largest:.4f} over {noise.compared} tokens")


def _name(world: tuple[int, int, int, str]) -> str:
    return "tp{}-dcp{}-i{}-{}".format(*world)


@pytest.mark.parametrize("world", WORLDS, ids=_name)
def test_against_tp1(worlds, models, world):
    found = compare(both(worlds, models, REFERENCE)[0], both(worlds, models, world)[0])
    print(f"{world}: largest difference {found.largest:.4f} over {found.compared} tokens, {found.near_ties} near-ties")


@pytest.mark.parametrize("world", [REFERENCE, *WORLDS], ids=_name)
def test_margin(worlds, models, world):
    answers, smallest = judge(rounds_of("plain")[0], both(worlds, models, world)[1], *world[1:3])
    print(f"{world}: {answers} answers right, smallest lead {smallest:.2f}")


@pytest.mark.parametrize("kind", ["prefix", "preempt"])
def test_prefix_cache_and_preemption(worlds, models, kind):
    compare(both(worlds, models, REFERENCE, kind)[0], both(worlds, models, (4, 2, 64, "all"), kind)[0])


@pytest.mark.parametrize("world", [REFERENCE, (4, 2, 64, "all")], ids=_name)
@pytest.mark.parametrize("kind", ["prefix", "preempt"])
def test_margin_prefix_cache_and_preemption(worlds, models, kind, world):
    found = both(worlds, models, world, kind)[1]
    answers, smallest = judge(rounds_of(kind)[0], found, *world[1:3])
    hits = [[cached for cached, _ in outputs] for outputs in found]
    print(f"{world}, {kind}: {answers} answers right, smallest lead {smallest:.2f}, cached tokens {hits}")
    if kind == "prefix":
        assert min(hits[1]) > 1800 and sum(h > 0 for h in hits[2]) == 2, f"the prefix cache was not used: {hits}"


@pytest.mark.parametrize(
    "tp, dcp, interleave, flags, spec",
    [
        (4, 4, 64, "gather", Spec(heads=128)),  # 128 gathered heads
        (2, 2, 1, "all", Spec(heads=64, nope=192, v_dim=256, topk=2048)),  # GLM-5's shape
        (2, 2, 64, "all", Spec(mtp=1)),
    ],
    ids=["128-heads", "glm-5", "mtp"],
)
def test_margin_shapes(tmp_path, tp, dcp, interleave, flags, spec):
    rounds = [[make_prompt(spec, n) for n in LENGTHS]]
    job = {"model": str(margin_deepseek.write(tmp_path, spec)), "dcp": dcp, "interleave": interleave, "rounds": [[p.tokens for p in rounds[0]]], "max_tokens": 12}
    if spec.mtp:
        job["engine"] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    results = ranks.run_ranks(engine_ranks.generate_margin, tp, job, env=engine_ranks.FLAGS[flags], timeout=500)
    assert all(r == results[0] for r in results), "ranks answered differently"
    answers, smallest = judge(rounds, results[0], dcp, interleave)
    print(f"{spec}: {answers} answers right, smallest lead {smallest:.2f}")


# ------------------------------------------------------------------------------------------------ same prefix, same step

# (flags, interleave, drafts, model runner V2, fault put in by hand), all at TP2/DCP2.
TWINS = [(flags, interleave, drafts, 1, "nothing") for drafts in (0, 1) for flags in ("gather", "prefetch", "all") for interleave in (1, 64)] + [
    ("all", 64, 0, 0, "nothing"), ("all", 1, 1, 0, "nothing"), ("cost", 64, 0, 1, "nothing"), ("off", 1, 0, 1, "nothing")]  # fmt: skip
BROKEN = [("all", interleave, 0, v2, how) for how, interleave, v2 in (("own-history", 1, 1), ("own-history", 64, 0), ("local-clamp", 1, 1), ("wrong-start", 64, 1), ("wrong-unit", 1, 1))]


def twins(spec: Spec) -> list[list[Prompt]]:
    """After a prompt that lets the prefetch find its layers: five prompts that begin alike, together; eight that share three prefixes;
    and new ones behind prefixes of all of these, which their requests left in the cache."""
    prefixes = [make_prompt(spec, n, 10 + n) for n in (1400, 700, 2100, 900)]

    def behind(prefix, n, seed):
        return make_prompt(spec, len(prefix.tokens) + n, seed, prefix.tokens)

    first, *three = prefixes
    return [
        [make_prompt(spec, 3000)],
        [behind(first, n, seed) for seed, n in enumerate((150, 40, 33, 300, 64))],
        [behind(three[i % 3], 30 + 20 * i, 20 + i) for i in range(8)],
        [behind(prefix, 50, 40 + i) for i, prefix in enumerate(prefixes)],
    ]


def _run_twins(plain: str, mtp: str, world):
    flags, interleave, drafts, v2, broken = world
    engine = {"enable_prefix_caching": True, "max_num_batched_tokens": 8192}
    if drafts:
        engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    job = {"model": mtp if drafts else plain, "dcp": 2, "interleave": interleave, "rounds": [[p.tokens for p in batch] for batch in twins(Spec(mtp=drafts))], "max_tokens": 12,
           "engine": engine, "broken": broken}  # fmt: skip
    try:
        return ranks.run_ranks(engine_ranks.generate_broken, 2, job, env=engine_ranks.FLAGS[flags] | {"VLLM_USE_V2_MODEL_RUNNER": str(v2)}, timeout=500)
    except AssertionError as failure:
        return failure


def twin_answers(worlds: SideBySide, models: Models, mtp_model: str, world):
    """(rounds of prompts, the answers of rank 0) of one world; every rank must agree."""
    results = worlds.result(world, _run_twins, models.margin, mtp_model, world)
    if isinstance(results, AssertionError):
        raise results
    assert all(r == results[0] for r in results), "ranks answered differently"
    return twins(Spec(mtp=world[2])), results[0]


def _twin_name(world) -> str:
    flags, interleave, drafts, v2, how = world
    return f"{flags}-i{interleave}-mtp{drafts}-v{1 + v2}" + (f"-{how}" if how != "nothing" else "")


@pytest.mark.parametrize("world", TWINS, ids=_twin_name)
def test_twins(worlds, models, mtp_model, world):
    """Requests of one step that find blocks which another one of the same step fills: with prefix caching upstream hands those out."""
    rounds, found = twin_answers(worlds, models, mtp_model, world)
    hits = [[cached for cached, _ in outputs] for outputs in found]
    assert sum(h > 0 for h in hits[1]) == 4 and sum(h > 0 for h in hits[2]) >= 4 and all(hits[3]), f"the prefix cache was not used as meant: {hits}"
    answers, smallest = judge(rounds, found, 2, world[1])
    print(f"{world}: {answers} answers right, smallest lead {smallest:.2f}, cached tokens {hits}")


@pytest.mark.parametrize("world", BROKEN, ids=_twin_name)
def test_broken_on_purpose_is_seen(worlds, models, mtp_model, world):
    rounds, found = twin_answers(worlds, models, mtp_model, world)
    with pytest.raises(AssertionError, match="answers wrong") as seen:
        judge(rounds, found, 2, world[1])
    print(f"{world}: {str(seen.value).splitlines()[0]}")


def test_soak(model):
    """Flags on against flags off, and flags off again, in the same world: the three run side by side."""
    job = {"model": model, "dcp": 2, "interleave": 64, "requests": 500}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        worlds = [pool.submit(ranks.run_ranks, engine_ranks.soak, 4, job, env=engine_ranks.FLAGS[flags], timeout=550) for flags in ("all", "off", "off")]
        on, off, again = (world.result() for world in worlds)
    for world in (on, off, again):
        for rank in world:
            assert rank["answers"] == world[0]["answers"], "ranks answered differently"
            assert rank["reserved"][-1] <= rank["reserved"][0] * 1.02 + (64 << 20), "memory grew"
    kept = sorted(set(off[0]["answers"]) - set(off[0]["aborted"]), key=int)
    assert len(kept) >= 400 and on[0]["aborted"] == off[0]["aborted"] and set(kept) <= set(on[0]["answers"])
    for name, world in (("flags off again", again), ("all flags on", on)):
        found = compare([[off[0]["answers"][k] for k in kept]], [[world[0]["answers"][k] for k in kept]], SOAK_TOLERANCE)
        print(f"soak, flags off against {name}: largest difference {found.largest:.4f} over {found.compared} tokens, {found.near_ties} near-ties in {len(kept)} requests")
        assert found.near_ties <= SOAK_SHARE * len(kept)


def test_margin_soak(models):
    """Requests with margins, twins among them, come and go and are aborted, over a prefix cache; every generated token must be right."""
    shared = make_prompt(SPEC, 900, 1).tokens
    lengths = [5, 17, 64, 65, 300, 900, 2500, 1000, 1300]
    prompts = [make_prompt(SPEC, lengths[i % 9], i, shared if i % 9 > 6 else None, new_tokens=8) for i in range(200)]
    job = {"model": models.margin, "dcp": 2, "interleave": 64, "prompts": [p.tokens for p in prompts], "engine": {"enable_prefix_caching": True}}
    results = ranks.run_ranks(engine_ranks.soak, 4, job, env=engine_ranks.FLAGS["all"], timeout=550)
    assert all(r["answers"] == results[0]["answers"] for r in results), "ranks answered differently"
    answered, asked, smallest = 0, 0, float("inf")
    for name, answer in results[0]["answers"].items():
        prompt = prompts[int(name)]
        last = len(prompt.tokens) - 1
        kept = dataclasses.replace(prompt, asks=[], generated=prompt.generated[: len(answer)])
        verdict = check_answers(kept, {last + i: (token, lead) for i, (token, _, lead) in enumerate(answer)})
        assert not verdict.wrong, f"request {name}, {len(prompt.tokens)} tokens: {verdict.explain(2, 64)}"
        answered, asked, smallest = answered + 1, asked + verdict.asked, min(smallest, verdict.smallest)
    assert answered >= 150
    print(f"margin soak: {asked} tokens of {answered} requests right, smallest lead {smallest:.2f}")


def test_dead_rank_ends_the_others(model, monkeypatch):
    """Every rank its own engine, over gloo, whose collectives notice."""
    monkeypatch.setenv(ranks.CHOICE, "gloo")
    job = {"model": model, "dcp": 2, "interleave": 64, "rounds": [engine_ranks.prompts([9000])]}
    with pytest.raises(AssertionError, match="still running") as stopped:
        ranks.run_ranks(engine_ranks.die_in_prefill, 2, job, env=engine_ranks.FLAGS["gather"], timeout=120)
    # Rank 1 never answers, so run_ranks ends by its timeout; rank 0 must have got an error well before.
    assert "ranks [1] of 2" in str(stopped.value)


def _lose_worker(results, job):
    results.put((0, True, engine_ranks.lose_worker(0, 2, job)))


def test_lost_worker_ends_the_engine(model, monkeypatch):
    """One engine that starts its workers, over NCCL, which notices nothing by itself: the executor must."""
    ranks.require_nccl(2)
    for name, value in (ranks.ENVIRONMENT | engine_ranks.FLAGS["prefetch"] | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}).items():
        monkeypatch.setenv(name, value)
    job = {"model": model, "dcp": 2, "interleave": 64, "rounds": [engine_ranks.prompts([9000] * 200)], "after": 1.0}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_lose_worker, args=(results, job))  # no daemon: it has children
    process.start()
    (error,) = collect([process], results, 300)
    print(f"a worker lost: {error}")
    assert error.startswith("EngineDeadError") and float(error.split()[2]) < 60
