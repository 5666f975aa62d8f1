# SPDX-License-Identifier: Apache-2.0
"""What an operator does beside serving: sleep and wake up, and start with a backend or a model that the flags do not fit."""
import pytest

from . import engine_ranks, margin_deepseek, ranks
from .margin_deepseek import Spec
from .margin_prompts import judge, make_prompt
from .side_by_side import SideBySide, outcome, selected

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.gpu, pytest.mark.timeout(400)]

SPEC = Spec()
ROUNDS = [[make_prompt(SPEC, n) for n in (300, 2100, 6000)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(margin_deepseek.write(tmp_path_factory.mktemp("margin"), SPEC))


def _job(model, dcp, **engine):
    return {"model": model, "dcp": dcp, "interleave": 64 if dcp > 1 else 1, "rounds": [[p.tokens for p in batch] for batch in ROUNDS], "max_tokens": 8, "engine": engine}


def _sleep(model, flags):
    return outcome(lambda: ranks.run_ranks(engine_ranks.sleep_and_wake, 2, _job(model, 2), env=engine_ranks.FLAGS[flags], timeout=360))


def _start(model, engine, tp, dcp):
    return outcome(lambda: ranks.run_ranks(engine_ranks.start, tp, _job(model, dcp, **engine), env=engine_ranks.FLAGS["all"], timeout=300))


@pytest.fixture(scope="module")
def worlds(request, model):
    """Starts the worlds of the tests that were selected."""
    side_by_side = SideBySide(5)
    for test, params in selected(request, "test_sleep", "test_a_start_of_each_backend"):
        if test == "test_sleep":
            side_by_side.start(params["flags"], _sleep, model, params["flags"])
        else:
            side_by_side.start(params["name"], _start, model, params["engine"], params["tp"], params["dcp"])
    yield side_by_side
    side_by_side.close()


def _results(found):
    if isinstance(found, AssertionError):
        raise found
    return found


@pytest.mark.parametrize("flags", ["off", "all"])
def test_sleep(worlds, model, flags):
    """Level 1 keeps the weights on the host, level 2 nothing: three prompts after each, in chunks that look ahead."""
    results = _results(worlds.result(flags, _sleep, model, flags))
    for result in results:
        assert result["prefetch"] == (flags == "all")
        for found in result["found"]:
            judge(ROUNDS, found, 2, 64)
        assert result["found"] == results[0]["found"]
        awake, asleep, again, gone = result["held"]
        print(f"flags {flags}: held {awake >> 20} MiB, asleep at level 1 {asleep >> 20}, awake {again >> 20}, at level 2 {gone >> 20}")
    # What sleep frees: the gather's two buffers among it, 2 * 2 * 33,280 rows of 656 bytes.
    assert awake - asleep > (80 << 20) * (flags == "all")


# (name, backend and cache, TP, DCP, words of the one warning about a flag, groups that exist)
STARTS = [
    ("flashmla", dict(attention_config={"sparse_mla_force_mqa": True, "backend": "FLASHMLA_SPARSE"}), 2, 2, None, [True, True]),
    ("flashmla-without-dcp", dict(attention_config={"sparse_mla_force_mqa": True, "backend": "FLASHMLA_SPARSE"}), 1, 1, "decode_context_parallel_size is 1", [False, False]),
    ("flash-attn-sparse", dict(attention_config={"sparse_mla_force_mqa": True, "backend": "FLASH_ATTN_MLA_SPARSE"}, kv_cache_dtype="auto"), 2, 2, "FLASH_ATTN_MLA_SPARSE does not know it", [True, False]),
    ("flash-attn-sparse-without-dcp", dict(attention_config={"sparse_mla_force_mqa": True, "backend": "FLASH_ATTN_MLA_SPARSE"}, kv_cache_dtype="auto"), 1, 1, "decode_context_parallel_size is 1", [False, False]),
    ("flashmla-bfloat16", dict(attention_config={"sparse_mla_force_mqa": True, "backend": "FLASHMLA_SPARSE"}, kv_cache_dtype="auto"), 2, 2, None, None),
    ("chosen-by-upstream", dict(attention_config={"sparse_mla_force_mqa": True}), 2, 2, None, [True, True]),
]  # fmt: skip


@pytest.mark.parametrize("name, engine, tp, dcp, words, groups", STARTS, ids=[s[0] for s in STARTS])
def test_a_start_of_each_backend(worlds, model, name, engine, tp, dcp, words, groups):
    """All flags on: a warning where no layer takes one, and no group then. What upstream refuses is said, not counted."""
    for result in _results(worlds.result(name, _start, model, engine, tp, dcp)):
        about = [line for line in result["warnings"] if "has no effect" in line]
        if result["error"]:
            # Refused with a message: ours names the flag, upstream's the backend.
            print(f"{name}: refused: {result['error'][:300]}")
            assert groups is None or "DCP" in result["error"] or "dcp" in result["error"] or "not valid" in result["error"], result["error"]
            continue
        judge(ROUNDS, result["found"], dcp, 64 if dcp > 1 else 1)
        print(f"{name}: {result['backends']}, groups {result['groups']}, warnings {about}")
        assert groups is None or result["groups"] == groups
        assert bool(about) == (words is not None) and all(words in line for line in about)
