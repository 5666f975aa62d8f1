# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V3.2-shaped checkpoint whose answers hang on single KV rows, by construction. Prompts for it: margin_prompts.py.

It follows pointers, one a layer. A *symbol* has a code of 128 signs. A token may hold a *row*, symbol s pointing at the next one of
its line, and may *ask* a symbol: layer 0 reads the row of s, layer 1 that of the symbol found there, and so on; the answer is the
token of the last one. Each hop reads one row of that layer's cache, and a layer lays its rows out in its own way, so a row that is
missing, of another token, layer or request, or damaged in any of its parts, breaks every chain through it.

Broken means broken, not blurred. Token 0 (BOS, the first of each prompt) is a sink: it scores SINK times what a full match scores and
holds zeros. A head of H writes 128 / H numbers of the code, so where some heads read something wrong the match of the next hop falls
below the sink's score, and nothing is found. In the vocabulary NULL is such a sink: the answer where less than SINK of the code
is found. So an answer's lead is (1 - SINK) * LOGIT, or it is wrong.

Kinds of tokens, P_s, Q_s and E_s of a symbol s:
  P_s  a row: s points at s + 1. No question.
  Q_s  asks s. Its row holds zeros.
  E_s  of *thread* lines: asks s, and its row holds a symbol of the chain of the next one, E_{s+hops}, which is its answer. So a
       thread that is generated reads, at each step, the row written in the step before.
A row of a *loud* line is among the first that the indexer selects, whatever is asked: with enough of them in front, the row that is
asked comes last among index_topk.

What it does not see: rows that only change places where all rows are selected, in prompts up to index_topk, for a row is where it
is found; what happens to the zeros of Q rows; small errors, and a row's part that is too large but for the last layer. Log-probabilities
of random weights (tiny_deepseek.py) see the latter two.

Numbers are signs times powers of two where they can be, and matrices signed permutations: fp8 and bfloat16 keep nearly all exactly.
"""
import dataclasses
import functools
import json
import pathlib

import numpy as np
import torch
from safetensors.torch import save_file

D = 128  # signs of a code
Q_RANK, KV_RANK, ROPE, INDEX_HEADS, INDEX_DIM = 512, 512, 64, 64, 128
INTERMEDIATE, EXPERT = 2048, 256

BOS, NULL = 0, 1
SINK = 0.94  # between 1 - 1/16, one of 16 heads wrong, and 1
MATCH = 200.0  # nats of a full match; the sink's lead over a broken one, and that of a match over the sink, are 6% of it
RECORD = 30.0  # nats by which each row would lose without the RoPE part of its record
LOGIT = 100.0  # of the right answer
CONSTANT = 128.0  # an element that all tokens have: it fixes the norms
Q_CONSTANT = 8.0  # the same in the queries' latent, where a code has ones
LOUD = 8.0  # of a loud row, where its code has ones
INDEX_SIGNS = 63  # of a code, that the indexer compares
INDEX_LOUD = 17.0  # of the indexer's queries, where a code has ones: loud rows score 17 * 8, a match 63 * 1.43


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape of a checkpoint. ValueError for one that does not work."""

    hops: int = 3  # layers
    heads: int = 16  # a divisor of 128
    nope: int = 128  # >= 128; GLM-5 has 192
    v_dim: int = 128  # >= 128; GLM-5 has 256
    topk: int = 512
    mtp: int = 0  # layers for drafts, 0 or 1
    experts: int = 0  # routed experts of all layers but the first; their output is zero
    max_positions: int = 32768
    lines: int = 112
    line: int = 96  # symbols of a line
    threads: int = 24  # of the lines, that have E tokens
    seed: int = 0

    def __post_init__(self):
        wrong = [
            text
            for bad, text in [
                (D % self.heads, f"heads={self.heads} must divide {D}"),
                (self.nope < D, f"nope={self.nope} must be at least {D}"),
                (self.v_dim < D, f"v_dim={self.v_dim} must be at least {D}"),
                (self.hops < 2, f"hops={self.hops} must be at least 2"),
                (self.mtp not in (0, 1), f"mtp={self.mtp} must be 0 or 1"),
                (self.experts == 1 or self.experts < 0, f"experts={self.experts} must be 0 or at least 2"),
                (self.line % self.hops or self.line < 4 * self.hops, f"line={self.line} must be a multiple of hops={self.hops}, at least {4 * self.hops}"),
                (not 0 <= self.threads <= self.lines - self.loud, f"threads={self.threads} must fit into lines={self.lines}, of which {self.loud} are loud"),
            ]
            if bad
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def loud(self) -> int:
        """Loud lines, the last ones: about three quarters of `topk` rows."""
        return self.topk * 3 // 4 // self.line

    @property
    def hidden(self) -> int:
        return -(-D * (self.hops + 5) // 512) * 512

    @property
    def symbols(self) -> int:
        return self.lines * self.line

    @property
    def layers(self) -> int:
        """Including the MTP layer."""
        return self.hops + self.mtp


class Vocabulary:
    """Which token is what. Symbols are numbered line by line; the last of a line points at its first."""

    def __init__(self, spec: Spec):
        symbol = np.arange(spec.symbols)
        self.place = symbol % spec.line
        self.line = symbol // spec.line
        thread = self.line < spec.threads
        supplied = thread & (self.place % spec.hops == self.line % spec.hops)  # rows of E tokens
        leads = thread & (self.place % spec.hops == 0)
        self.is_loud = self.line >= spec.lines - spec.loud
        counted = 2
        tables = []
        for has in (~supplied, np.ones_like(thread), leads):
            tables.append(np.where(has, counted + np.cumsum(has) - 1, -1))
            counted += int(has.sum())
        self.pair, self.ask, self.thread = tables  # token ids by symbol, -1 for none
        self.answer = np.where(leads, self.thread, self.ask)  # the token that stands for a symbol in answers
        self.size = -(-counted // 128) * 128
        # By token: the symbol of its row, and the one it asks; -1 for none.
        self.row, self.asks = np.full(self.size, -1), np.full(self.size, -1)
        self.row[self.pair[~supplied]] = symbol[~supplied]
        self.asks[self.ask] = symbol
        self.asks[self.thread[leads]] = symbol[leads]
        self.row[self.thread[leads]] = self.after(spec, symbol[leads], spec.hops + self.line[leads] % spec.hops)

    @staticmethod
    def after(spec: Spec, symbol, steps):
        """The symbol `steps` further in the line of `symbol`; numbers or arrays."""
        return symbol // spec.line * spec.line + (symbol + steps) % spec.line


@functools.cache
def vocabulary(spec: Spec) -> Vocabulary:
    return Vocabulary(spec)


def config(spec: Spec) -> dict:
    """config.json."""
    dense = 1 if spec.experts else spec.layers
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": spec.hidden, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": spec.hops, "first_k_dense_replace": dense, "vocab_size": vocabulary(spec).size, "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.heads, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": spec.nope, "qk_rope_head_dim": ROPE,
        "v_head_dim": spec.v_dim, "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "index_topk": spec.topk,
        # The slowest pair of RoPE turns by 0.03 over 16,384 positions: it carries the constants.
        "rope_theta": 1000000, "max_position_embeddings": spec.max_positions, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": BOS, "eos_token_id": NULL, "num_nextn_predict_layers": spec.mtp,
        "moe_layer_freq": 1, "moe_intermediate_size": EXPERT, "n_routed_experts": spec.experts or 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ weights


class _Slots:
    """Where things lie in the residual stream: slots of 128 elements, then single ones."""

    def __init__(self, spec: Spec):
        self.key, self.value = 0, D
        self.query = [D * (2 + hop) for hop in range(spec.hops + 1)]  # the last one is the answer
        self.draft = D * (3 + spec.hops)  # what the MTP layer asks: the last hop
        self.constant = D * (4 + spec.hops)
        self.sink, self.loud = self.constant + 1, self.constant + 2


def _norm(spec: Spec, *squares: float) -> float:
    """What RMSNorm divides by, for a token with the constant and these further sums of squares."""
    return ((CONSTANT**2 + sum(squares)) / spec.hidden) ** 0.5


def _signs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 2, shape) * 2.0 - 1.0


def _sparse(shape: tuple[int, int], *entries) -> torch.Tensor:
    """bfloat16 zeros [rows, columns] but for `entries` of (rows, columns, values)."""
    out = np.zeros(shape, np.float32)
    for rows, columns, values in entries:
        out[rows, columns] = values
    return torch.from_numpy(out).to(torch.bfloat16)


def codes(spec: Spec) -> np.ndarray:
    """[symbols, 128] of 1 and -1."""
    return _signs(np.random.default_rng([spec.seed, 0]), spec.symbols, D)


def _embedding(spec: Spec, slots: _Slots) -> torch.Tensor:
    words, code = vocabulary(spec), codes(spec)
    out = np.zeros((words.size, spec.hidden), np.float32)
    rows, asks = np.flatnonzero(words.row >= 0), np.flatnonzero(words.asks >= 0)
    symbol, asked = words.row[rows], words.asks[asks]
    out[rows, slots.key : slots.key + D] = code[symbol]
    out[rows, slots.value : slots.value + D] = code[words.after(spec, symbol, 1)]
    out[rows, slots.loud] = np.where(words.is_loud[symbol], LOUD, 0)
    out[asks, slots.query[0] : slots.query[0] + D] = code[asked]
    out[asks, slots.draft : slots.draft + D] = code[words.after(spec, asked, spec.hops - 1)]
    out[:, slots.constant] = CONSTANT
    out[BOS, slots.sink] = CONSTANT
    return torch.from_numpy(out).to(torch.bfloat16)


def _lm_head(spec: Spec, slots: _Slots) -> torch.Tensor:
    words = vocabulary(spec)
    out = np.zeros((words.size, spec.hidden), np.float32)
    scale = LOGIT * _norm(spec, D * (spec.hops + 1))
    out[words.answer, slots.query[-1] : slots.query[-1] + D] = codes(spec) * (scale / D)
    out[NULL, slots.constant] = SINK * scale / CONSTANT
    return torch.from_numpy(out).to(torch.bfloat16)


def _attention(spec: Spec, slots: _Slots, query: int, target: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Weights of one hop: from the code in slot `query` to the code in slot `target`."""
    head, code = np.arange(spec.heads)[:, None], np.arange(D)
    scale = (spec.nope + ROPE) ** -0.5
    # q_a: the code, and a constant that bounds the norm where there is no code. Of an asking token, after the norm:
    asked = (Q_RANK / (D + Q_CONSTANT**2)) ** 0.5
    # Where code elements go: latent dimensions of the layer, and dimensions of each head.
    latent = rng.permutation(KV_RANK)[: 2 * D]
    key_at, value_at = latent[:D], latent[D:]
    key_sign, value_sign = _signs(rng, D), _signs(rng, D)
    nope_at = np.argsort(rng.random((spec.heads, spec.nope)), axis=1)[:, :D]
    v_at = np.argsort(rng.random((spec.heads, spec.v_dim)), axis=1)[:, :D]
    nope_sign, v_sign = _signs(rng, spec.heads, D), _signs(rng, spec.heads, D)
    share = np.sort(rng.permutation(D).reshape(spec.heads, -1), axis=1)  # of the code, that a head answers for
    # The slowest RoPE pair: its first element is the constant, of each row and query alike; BOS has more.
    slow = ROPE - 2
    row_constant = _norm(spec, 2 * D) / CONSTANT  # times a row's constant is 1
    bos = CONSTANT / _norm(spec, CONSTANT**2)
    bos_sink = ((RECORD + SINK * MATCH) / RECORD - row_constant * bos) / bos
    q_rows = spec.nope + ROPE
    kv_rows = spec.nope + spec.v_dim
    # The indexer compares some signs beside its RoPE dimensions; its last dimension is loudness.
    compared = np.sort(rng.permutation(D)[:INDEX_SIGNS])
    at = ROPE + np.arange(INDEX_SIGNS)
    index_sign = _signs(rng, INDEX_SIGNS)
    index_head = np.arange(INDEX_HEADS)[:, None] * INDEX_DIM
    return {
        "q_a_proj.weight": _sparse((Q_RANK, spec.hidden), (code, query + code, 1), (D, slots.constant, Q_CONSTANT / CONSTANT)),
        "q_a_layernorm.weight": torch.ones(Q_RANK, dtype=torch.bfloat16),
        "q_b_proj.weight": _sparse(
            (spec.heads * q_rows, Q_RANK),
            (head * q_rows + nope_at, code, MATCH / (scale * D * asked) * nope_sign),
            (head * q_rows + spec.nope + slow, D, RECORD / (scale * asked * Q_CONSTANT)),
        ),
        "kv_a_proj_with_mqa.weight": _sparse(
            (KV_RANK + ROPE, spec.hidden),
            (key_at, slots.key + code, key_sign),
            (value_at, slots.value + code, value_sign),
            (KV_RANK + slow, slots.constant, row_constant),
            (KV_RANK + slow, slots.sink, bos_sink),
        ),
        # A row's latent has 256 elements of the same size: 1 after the norm.
        "kv_a_layernorm.weight": torch.full((KV_RANK,), (2 * D / KV_RANK) ** 0.5, dtype=torch.bfloat16),
        "kv_b_proj.weight": _sparse(
            (spec.heads * kv_rows, KV_RANK),
            (head * kv_rows + nope_at, key_at, nope_sign * key_sign),
            (head * kv_rows + spec.nope + v_at, value_at, v_sign * value_sign),
        ),
        "o_proj.weight": _sparse(
            (spec.hidden, spec.heads * spec.v_dim),
            (target + share, head * spec.v_dim + np.take_along_axis(v_at, share, 1), np.take_along_axis(v_sign, share, 1)),
        ),
        "indexer.wq_b.weight": _sparse(
            (INDEX_HEADS * INDEX_DIM, Q_RANK),
            (index_head + at, compared, index_sign),
            (index_head + INDEX_DIM - 1, D, INDEX_LOUD / Q_CONSTANT),
        ),
        "indexer.wk.weight": _sparse(
            (INDEX_DIM, spec.hidden),
            (at, slots.key + compared, index_sign),
            (INDEX_DIM - 1, np.array([slots.loud, slots.sink]), 1),
        ),
        "indexer.k_norm.weight": torch.ones(INDEX_DIM),
        "indexer.k_norm.bias": torch.zeros(INDEX_DIM),
        # Some heads weigh less.
        "indexer.weights_proj.weight": _sparse((INDEX_HEADS, spec.hidden), (np.arange(INDEX_HEADS), slots.constant, 2.0 ** -rng.integers(5, 8, INDEX_HEADS))),
    }


def _mlp(spec: Spec, layer: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Something at the way in, nothing at the way out."""

    def dense(prefix: str, size: int) -> dict[str, torch.Tensor]:
        into = {name: torch.from_numpy(rng.standard_normal((size, spec.hidden), np.float32) / spec.hidden**0.5).to(torch.bfloat16) for name in ("gate_proj", "up_proj")}
        return {f"{prefix}{name}.weight": w for name, w in (into | {"down_proj": torch.zeros(spec.hidden, size, dtype=torch.bfloat16)}).items()}

    if not spec.experts or layer == 0:
        return dense("", INTERMEDIATE)
    out = {
        "gate.weight": torch.from_numpy(rng.standard_normal((spec.experts, spec.hidden), np.float32)).to(torch.bfloat16),
        "gate.e_score_correction_bias": torch.zeros(spec.experts),
    }
    for name in [f"experts.{e}" for e in range(spec.experts)] + ["shared_experts"]:
        out |= dense(f"{name}.", EXPERT)
    return out


def weights(spec: Spec) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name: bfloat16, float32 for the indexer's key norm and the router's bias."""
    slots = _Slots(spec)
    ones = functools.partial(torch.ones, spec.hidden, dtype=torch.bfloat16)
    embedding, lm_head = _embedding(spec, slots), _lm_head(spec, slots)
    out = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones(), "lm_head.weight": lm_head}
    for layer in range(spec.layers):
        rng = np.random.default_rng([spec.seed, 1 + layer])
        prefix = f"model.layers.{layer}."
        drafts = layer == spec.hops
        attention = _attention(spec, slots, slots.draft if drafts else slots.query[layer], slots.query[-1 if drafts else layer + 1], rng)
        out |= {f"{prefix}input_layernorm.weight": ones(), f"{prefix}post_attention_layernorm.weight": ones()}
        out |= {f"{prefix}self_attn.{name}": w for name, w in attention.items()} | {f"{prefix}mlp.{name}": w for name, w in _mlp(spec, layer, rng).items()}
        if drafts:
            # Its row at position t is that of token t + 1, and so is its question. It does not look at the hidden state. Undo the norm.
            kept = np.r_[slots.key : slots.value + D, slots.draft : slots.loud + 1]
            out |= {f"{prefix}{name}.weight": ones() for name in ("enorm", "hnorm", "shared_head.norm")}
            out |= {f"{prefix}eh_proj.weight": _sparse((spec.hidden, 2 * spec.hidden), (kept, kept, _norm(spec, 2 * D))),
                    f"{prefix}embed_tokens.weight": embedding.clone(), f"{prefix}shared_head.head.weight": lm_head.clone()}  # fmt: skip
    return out


def write(folder: pathlib.Path, spec: Spec) -> pathlib.Path:
    """Write config.json and model.safetensors into `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(spec), indent=1))
    save_file(weights(spec), folder / "model.safetensors")
    return folder
