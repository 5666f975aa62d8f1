# SPDX-License-Identifier: Apache-2.0
"""The checkpoint whose answers hang on single KV rows (tests/gpu/margin_deepseek.py): right where nothing is wrong, and wrong where one
row is.

By a reference in plain torch, which is held against transformers and against vLLM's fused kernels in Triton's interpreter. The
whole engine on CPU ranks: tests/distributed/test_margin_engine.py.
"""
import dataclasses
import random
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu import margin_deepseek, margin_reference, tiny_deepseek
from tests.gpu._ckv_ranks import dequantize
from tests.gpu.margin_deepseek import Spec, vocabulary
from tests.gpu.margin_prompts import Prompt, best_two, check_answers, make_prompt
from tests.gpu.margin_reference import Cache, Reference
from tests.oracle import deal

pytestmark = [pytest.mark.base("v0.33.0"), pytest.mark.timeout(600)]

SMALL = Spec(lines=24, threads=6, topk=128, mtp=1)  # one loud line
LEAD = 5.0  # of an answer with nothing wrong: 6 but for the steps of 0.5 that bfloat16 logits of 100 have
HEADS_OF_ONE_OF_8 = 2  # of 16


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices: threads that wait for each other cost more than they bring where others compute, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Reference:
    return Reference(margin_deepseek.write(tmp_path_factory.mktemp("margin"), SMALL))


def prefill_only(prompt: Prompt) -> Prompt:
    """Without the tokens to be generated, but for the first."""
    return dataclasses.replace(prompt, generated=prompt.generated[:1])


# ------------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize("length", [5, 6, 8, 13, 64, 65, 300, 512, 900, 2100, 9000, 16000])
def test_prompts(length):
    spec = Spec()
    prompt = make_prompt(spec, length)
    assert prompt == make_prompt(spec, length) and len(prompt.tokens) == length
    assert length < 300 or prompt.tokens != make_prompt(spec, length, 1).tokens
    words = vocabulary(spec)
    rows = {position: int(words.row[token]) for position, token in enumerate(prompt.tokens) if words.row[token] >= 0}
    assert len(set(rows.values())) == len(rows), "a row is there twice"
    assert all(max(ask.rows) <= ask.position and len(set(ask.rows)) == spec.hops for ask in prompt.asks)
    assert len(prompt.generated) == 12 if length >= 64 else prompt.generated
    chains = {(layer, row) for layer, row in prompt.chains() if row < length}
    if length >= 300:
        # Of all rows that point somewhere, in all layers: those that some answer needs.
        assert len(chains) > 0.85 * spec.hops * len(rows) and len({row for _, row in chains}) > 0.9 * len(rows)
        assert len(rows) > 0.45 * length and len(prompt.asks) > 0.45 * length
    if length >= 2100:
        loud = sum(bool(words.is_loud[symbol]) for symbol in rows.values())
        assert loud >= 192 and loud + 64 <= spec.topk
        # Chains start everywhere: in each page, and so in each interleave unit of 64, on each rank.
        starts = {ask.rows[0] // 64 for ask in prompt.asks + prompt.generated}
        assert starts >= set(range(length // 64 - 3))
        assert sum(ask.position >= length // 2 for ask in prompt.asks) > 0.5 * len(prompt.asks)
        read = {row for _, row in chains}
        for world, interleave in ((2, 1), (8, 1), (8, 64)):
            assert all(len(read.intersection(positions)) > 0.4 * len(positions) for positions in deal(length, world, interleave))


def test_prompts_that_cannot_be():
    for spec, length, message in ((Spec(), 4, "at least 5"), (Spec(lines=24, threads=6), 9000, "unused lines")):
        with pytest.raises(ValueError, match=message):
            make_prompt(spec, length)
    with pytest.raises(ValueError, match="heads=12 must divide 128; nope=64 must be at least 128"):
        Spec(heads=12, nope=64)


def test_twins():
    spec = Spec()
    shared = make_prompt(spec, 3000)
    for tail in (1, 2, 10, 100, 2000):
        twins = [make_prompt(spec, 3000 + tail, seed, shared.tokens) for seed in range(3)]
        for twin in twins:
            assert twin.tokens[:3000] == shared.tokens and twin.asks[: len(shared.asks)] == shared.asks and len(twin.generated) == 12
            asked = [ask for ask in twin.asks if ask.position >= 3000]
            reaching = sum(min(ask.rows) < 3000 for ask in asked)
            assert len(asked) >= (tail - 1) // 2 and reaching >= 0.4 * len(asked)
            assert min(min(ask.rows) for ask in twin.generated) < 3000 or tail >= 100
        if tail >= 10:
            assert len({tuple(twin.tokens[3000:]) for twin in twins}) == 3
        else:  # the same shared questions, or other ones
            assert len({twin.generated[0].answer for twin in twins}) > 1


def test_check_answers():
    prompt = make_prompt(SMALL, 100)
    right = {ask.position: (ask.answer, 6.0) for ask in prompt.asks + prompt.generated}
    verdict = check_answers(prompt, right)
    assert not verdict.wrong and verdict.smallest == 6 and verdict.asked == len(prompt.asks) + 12
    ask, later, token = prompt.asks[7], prompt.asks[20], prompt.generated[3]
    changes = {"wrong": (2, 5.0), "weak": (ask.answer, 1.0), "not a number": (ask.answer, float("nan")), "absent": None}
    for what, change in changes.items():
        found = right | {ask.position: change}
        if change is None:
            del found[ask.position]
        verdict = check_answers(prompt, found)
        assert [w.ask for w in verdict.wrong] == [ask], what
        assert f"layer 1 row {ask.rows[1]} of rank {ask.rows[1] // 16 % 4}" in verdict.explain(4, 16), what
    assert check_answers(prompt, right | {ask.position: (2, 5.0)}).smallest == -5
    # From a position on, and of generated tokens the first wrong one only.
    found = right | {ask.position: (2, 5.0), later.position: (2, 5.0)} | {g.position: (2, 5.0) for g in prompt.generated[3:]}
    assert [w.ask for w in check_answers(prompt, found, ask.position + 1).wrong] == [later, token]


# ------------------------------------------------------------------------------------------------ nothing wrong


def answer(reference: Reference, prompt: Prompt) -> dict[int, tuple[int, float]]:
    """Of the prompt, and of each token that the model generates by itself."""
    tokens = list(prompt.tokens)
    found = best_two(reference.forward(tokens))
    for _ in prompt.generated[1:]:
        tokens.append(found[len(tokens) - 1][0])
        found |= {len(tokens) - 1: best_two(reference.forward(tokens))[len(tokens) - 1]}
    return found


@pytest.mark.parametrize(
    "spec, length, new_tokens",
    [
        (SMALL, 900, 2),
        (SMALL, 64, 12),
        (SMALL, 5, 12),
        (Spec(lines=24, threads=6), 600, 2),
        (dataclasses.replace(SMALL, heads=64), 200, 2),
        (dataclasses.replace(SMALL, heads=128), 200, 2),
        (dataclasses.replace(SMALL, nope=192, v_dim=256), 300, 3),  # GLM-5's
        (dataclasses.replace(SMALL, hops=2), 200, 3),
        (dataclasses.replace(SMALL, hops=4, line=96), 300, 3),
        (dataclasses.replace(SMALL, experts=4), 200, 2),
        (dataclasses.replace(SMALL, seed=5), 300, 2),
    ],
    ids=lambda v: "-".join(f"{f.name}{getattr(v, f.name)}" for f in dataclasses.fields(v) if getattr(v, f.name) != getattr(SMALL, f.name)) if isinstance(v, Spec) else str(v),
)
def test_all_answers_are_right(tmp_path, spec, length, new_tokens):
    reference = Reference(margin_deepseek.write(tmp_path, spec))
    prompt = make_prompt(spec, length, new_tokens=new_tokens)
    verdict = check_answers(prompt, answer(reference, prompt), least=LEAD)
    assert not verdict.wrong, verdict.explain()
    assert len(prompt.generated) == (1 if length == 5 else new_tokens) and verdict.asked == len(prompt.asks) + len(prompt.generated)


def test_a_selection_that_loses_its_end_is_seen(tmp_path):
    """With enough loud rows in front, the asked ones come last: here behind 96 of 128."""
    spec = dataclasses.replace(SMALL, line=48)  # two loud lines
    reference = Reference(margin_deepseek.write(tmp_path, spec))
    prompt = prefill_only(make_prompt(spec, 1000))
    words = vocabulary(spec)
    loud = [position for position, token in enumerate(prompt.tokens) if words.row[token] >= 0 and words.is_loud[words.row[token]]]
    assert len(loud) == 96

    def first_three_quarters(layer, rows, ids):
        return torch.cat([ids[:, :96], torch.full_like(ids[:, 96:], -1)], 1)

    verdict = check_answers(prompt, best_two(reference.forward(prompt.tokens, select=first_three_quarters)))
    behind = [ask for ask in prompt.asks if ask.position > loud[-1] and not set(ask.rows) & set(loud)]
    assert len(behind) > 20 and {w.ask for w in verdict.wrong} >= set(behind)


def test_drafts(small):
    """The MTP layer drafts what follows a question from its own cache, for all but those that need the row of its position 0; a wrong row there
    spoils the draft."""
    prompt = make_prompt(SMALL, 200)
    asks = [ask for ask in prompt.asks if ask.rows[-1] > 1]
    found = best_two(small.draft(prompt.tokens))
    assert [found[ask.position - 1][0] for ask in asks] == [ask.answer for ask in asks] and len(asks) > 80
    ask = asks[-1]
    layer = SMALL.hops
    broken = best_two(small.draft(prompt.tokens, edit=lambda at, cache: with_row(cache, ask.rows[-1] - 1, lambda row: row.zero_()) if at == layer else cache))
    assert [a for a in asks if broken[a.position - 1][0] != a.answer] == [a for a in asks if a.rows[-1] == ask.rows[-1]]


# ------------------------------------------------------------------------------------------------ other implementations


def test_reference_against_transformers(tmp_path):
    """Random weights, more tokens than the indexer selects, without fp8, which transformers leaves out. Differences are bfloat16 noise, 0.015
    on average; a top-k of 480 instead of 512 makes it 0.029, an indexer without RoPE 0.038."""
    tokens = random.Random(1).choices(range(2, 2048), k=700)
    folder = tiny_deepseek.write(tmp_path, layers=2)
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    with mock.patch.object(margin_reference, "fp8", lambda x, least=0.0: x):
        ours = Reference(folder).forward(tokens).log_softmax(-1)
    difference = (ours - theirs).abs()
    assert difference.mean() < 0.022 and difference.max() < 0.35


def test_checkpoint_in_transformers(small, tmp_path):
    """The same tensors by the same names, and every logit that matters the same."""
    folder = margin_deepseek.write(tmp_path, SMALL)
    model, loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    unused = [name for name in loaded["unexpected_keys"] if not name.startswith(f"model.layers.{SMALL.hops}.")]
    assert not unused and not loaded["missing_keys"] and not loaded["mismatched_keys"]
    prompt = prefill_only(make_prompt(SMALL, 300))
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt.tokens])).logits[0].float()
    assert not check_answers(prompt, best_two(theirs), least=LEAD).wrong
    asked = [ask.position for ask in prompt.asks + prompt.generated]
    assert (theirs[asked] - small.forward(prompt.tokens)[asked]).abs().max() <= 0.5  # one step of bfloat16 at 100


def test_reference_against_fused_kernels(small):
    """vLLM's kernels that norm, rotate, quantise and write the caches, and the one that makes the queries, in Triton's interpreter; equal
    but for the last bit of what is rounded."""
    from vllm.models.deepseek_v32.common import kernels

    words = vocabulary(SMALL)
    loud = int(words.is_loud.argmax())
    tokens = torch.tensor([margin_deepseek.BOS, words.pair[1], words.pair[loud], words.ask[7], words.thread[3]])
    positions = torch.tensor([0, 3, 2000, 9001, 16383])
    prefix = "model.layers.1.self_attn."
    h = small._norm(small._w("model.embed_tokens")[tokens], "model.layers.1.input_layernorm")
    made = small.project(1, h, positions)
    angles = torch.arange(16384)[:, None] * small.config["rope_theta"] ** -(torch.arange(0, 64, 2) / 64)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()

    def linear(name, x=h):
        return small._linear(x, f"{prefix}{name}").bfloat16()

    def weight(name):
        return small.weights[f"{prefix}{name}"]

    kv_c, k_pe = linear("kv_a_proj_with_mqa").split([512, 64], -1)
    records, keys = torch.zeros(2, 64, 656, dtype=torch.uint8), torch.zeros(2, 64, 132, dtype=torch.uint8)
    slots = torch.tensor([70, 3, 127, 64, 9])
    q_c = kernels.fused_norm_rope(
        positions, linear("q_a_proj"), weight("q_a_layernorm.weight"), 1e-6, kv_c, weight("kv_a_layernorm.weight"), 1e-6, k_pe, cos_sin,
        linear("indexer.wk"), weight("indexer.k_norm.weight"), weight("indexer.k_norm.bias"), 1e-6, cos_sin, torch.zeros(5, 128, dtype=torch.int32),
        slot_mapping=slots, indexer_k_cache=keys, mla_kv_cache=records, mla_kv_cache_dtype="fp8_ds_mla")  # fmt: skip
    assert torch.allclose(q_c.float(), made["q_c"], rtol=2**-7)
    found = dequantize(records.view(-1, 656)[slots]).float()
    assert torch.equal(found[:, :512], made["latent"]) and torch.allclose(found[:, 512:], made["rope"], rtol=2**-7)
    pages = keys.view(2, -1)  # of the values of all tokens, then their scales
    values, scales = pages[:, : 64 * 128].reshape(-1, 128)[slots], pages[:, 64 * 128 :].reshape(-1, 4)[slots]
    assert torch.allclose(values.view(torch.float8_e4m3fn).float() * scales.view(torch.float32), made["key"], rtol=2**-3, atol=2**-4)
    # Rows of a pair and of a thread, BOS, a loud row, and a question, which holds nothing.
    assert made["latent"].abs().sum(1).tolist() == [0, 256, 256, 0, 256] and [k > 5 for k in made["key"].abs().amax(1).tolist()] == [True, False, True, False, False]

    q_pe = linear("q_b_proj", made["q_c"]).view(5, 16, 192)[..., 128:]
    index_q = linear("indexer.wq_b", made["q_c"]).view(5, 64, 128)
    quantized, weights, rotated = kernels.fused_q(
        positions, q_pe, cos_sin, index_q, cos_sin, made["query"][..., :512].bfloat16(), torch.ones(1), linear("indexer.weights_proj"), 128**-0.5, 64**-0.5, quantize_mqa=False)  # fmt: skip
    assert torch.allclose(rotated.float(), made["query"][..., 512:], rtol=2**-7, atol=1e-6)
    scale = weights / made["index_weights"]  # a query's is in its weight
    assert torch.allclose(quantized.float() * scale[..., None], made["index_query"], rtol=2**-3)


# ------------------------------------------------------------------------------------------------ something wrong


def with_row(cache: Cache, row: int, change) -> Cache:
    for part in (cache.latent, cache.rope, cache.key):
        change(part[row])
    return cache


class Faults:
    """Ways to break what layer `layer` reads of position `row`."""

    def __init__(self, reference: Reference, prompt: Prompt, other: Prompt, rng: random.Random):
        self.rng, self.length = rng, len(prompt.tokens)
        self.caches: list[Cache] = []
        self.others: list[Cache] = []
        reference.forward(prompt.tokens, caches=self.caches)
        reference.forward(other.tokens, caches=self.others)

    def replaced(self, layer: int, row: int, source: Cache, at: int):
        def edit(here: int, cache: Cache) -> Cache:
            if here == layer:
                cache.latent[row], cache.rope[row], cache.key[row] = source.latent[at], source.rope[at], source.key[at]
            return cache

        return edit

    def changed(self, layer: int, row: int, part: str, factor: float, columns: slice = slice(None)):
        def edit(here: int, cache: Cache) -> Cache:
            if here == layer:
                getattr(cache, part)[row, columns] *= factor
            return cache

        return edit

    def make(self, kind: str, layer: int, row: int) -> dict:
        elsewhere = self.rng.choice([i for i in range(self.length) if i != row])
        tile = self.rng.randrange(4) * 128
        rank = self.rng.randrange(8) * HEADS_OF_ONE_OF_8
        zero = Cache(*(torch.zeros_like(part) for part in (self.caches[layer].latent, self.caches[layer].rope, self.caches[layer].key)))
        one_rank = {"heads": slice(rank, rank + HEADS_OF_ONE_OF_8)}
        return {
            "zero": lambda: {"edit": self.replaced(layer, row, zero, row)},
            "another position": lambda: {"edit": self.replaced(layer, row, self.caches[layer], elsewhere)},
            "another layer": lambda: {"edit": self.replaced(layer, row, self.caches[(layer + self.rng.choice([1, 2])) % 3], row)},
            "another request": lambda: {"edit": self.replaced(layer, row, self.others[layer], row)},
            "no latent": lambda: {"edit": self.changed(layer, row, "latent", 0)},
            "no RoPE part": lambda: {"edit": self.changed(layer, row, "rope", 0)},
            "a tile's scale": lambda: {"edit": self.changed(layer, row, "latent", self.rng.choice([0, 0.5, -1]), slice(tile, tile + 128))},
            "not selected": lambda: {"select": lambda here, rows, ids: ids.masked_fill(ids == row, -1) if here == layer else ids},
            "zero on one rank of 8": lambda: {"edit": self.replaced(layer, row, zero, row)} | one_rank,
            "another position on one rank of 8": lambda: {"edit": self.replaced(layer, row, self.caches[layer], elsewhere)} | one_rank,
        }[kind]()


KINDS = ["zero", "another position", "another layer", "another request", "no latent", "no RoPE part", "a tile's scale", "not selected", "zero on one rank of 8",
         "another position on one rank of 8"]  # fmt: skip


@pytest.fixture(scope="module")
def faults(small):
    prompt = prefill_only(make_prompt(SMALL, 240))
    return prompt, Faults(small, prompt, make_prompt(SMALL, 240, 1), random.Random(7))


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_row_of_one_layer(small, faults, kind):
    """A row that some chain reads, at random. Answers whose chains pass through it break, and no others."""
    prompt, make = faults
    for layer, row in make.rng.sample(sorted(prompt.chains()), 3):
        verdict = check_answers(prompt, best_two(small.forward(prompt.tokens, **make.make(kind, layer, row))))
        assert verdict.wrong, f"{kind}: row {row} of layer {layer}: all answers right, smallest lead {verdict.smallest:.2f}"
        assert all(w.ask.rows[layer] == row for w in verdict.wrong), f"{kind}: row {row} of layer {layer}: {verdict.explain()}"


def test_a_lost_index_key(small):
    """Where the indexer has to choose, a row without its key is not chosen."""
    prompt = prefill_only(make_prompt(SMALL, 900))
    layer, row = random.Random(3).choice([(layer, row) for ask in prompt.asks if ask.position > 700 for layer, row in enumerate(ask.rows)])

    def edit(here, cache):
        if here == layer:
            cache.key[row] = 0
        return cache

    verdict = check_answers(prompt, best_two(small.forward(prompt.tokens, edit=edit)))
    assert [w.ask for w in verdict.wrong] == [ask for ask in prompt.asks + prompt.generated if ask.rows[layer] == row]


def test_a_row_that_no_chain_reads(small, faults):
    """The other way round: a fault that may not matter does not."""
    prompt, make = faults
    unread = [(layer, row) for layer in range(3) for row in range(1, 240) if (layer, row) not in prompt.chains()]
    for layer, row in make.rng.sample(unread, 2):
        assert not check_answers(prompt, best_two(small.forward(prompt.tokens, **make.make("zero", layer, row))), least=LEAD).wrong


@pytest.mark.parametrize("world, interleave, wrong", [(2, 16, 1), (4, 16, 32), (8, 1, 2)])
def test_a_wrong_interleave(small, world, interleave, wrong):
    """Records that were written to shards by one interleave, and are looked for by another. (Where all rows are selected anyway, rows
    that have changed places are still the same rows.)"""
    prompt = prefill_only(make_prompt(SMALL, 500))
    length = len(prompt.tokens)
    source = [0] * length
    for shard, sought in zip(deal(length, world, interleave), deal(length, world, wrong), strict=True):
        for local, position in enumerate(sought):
            source[position] = shard[min(local, len(shard) - 1)]

    def edit(layer, cache):
        return Cache(cache.latent[source], cache.rope[source], cache.key)

    verdict = check_answers(prompt, best_two(small.forward(prompt.tokens, edit=edit)))
    selecting = [ask for ask in prompt.asks if ask.position > 2 * SMALL.topk]
    moved = [ask for ask in selecting if any(source[row] != row for row in ask.rows)]
    assert len(moved) > 50 and len({w.ask for w in verdict.wrong} & set(moved)) > 0.75 * len(moved), verdict.explain(world, interleave)
