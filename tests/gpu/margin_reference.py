# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 in plain torch, from a checkpoint folder by the names of its weights: sparse indexer, MLA in its absorbed form over a
cache of fp8 latents, dense MLPs or experts, the MTP layer. One request, no tensor parallelism, on the CPU.

Numbers are rounded where vLLM's kernels round them: every tensor between two operations is bfloat16, latents and the indexer's
queries and keys are fp8 with power-of-two scales; sums are float32. What a layer reads of its cache can be changed on the way
(`edit`, `select`): that is how faults are put in.
"""
import dataclasses
import json
import pathlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

BLOCK = 128  # of fp8 values with one scale


@dataclasses.dataclass
class Cache:
    """What one layer keeps of a request's tokens, as its readers see it after dequantisation; float32."""

    latent: torch.Tensor  # [tokens, kv_lora_rank]
    rope: torch.Tensor  # [tokens, qk_rope_head_dim]
    key: torch.Tensor  # [tokens, index_head_dim], the indexer's

    def clone(self) -> "Cache":
        return Cache(self.latent.clone(), self.rope.clone(), self.key.clone())


# What a layer reads: (layer, its cache) -> a changed copy.
Edit = Callable[[int, Cache], Cache]
# What a layer attends to: (layer, positions [rows], ids [rows, topk] with -1 for none) -> ids.
Select = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def fp8(x: torch.Tensor, least: float = 1e-4) -> torch.Tensor:
    """Round to e4m3, with a power-of-two scale for each 128 elements of the last dimension."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = torch.exp2(torch.ceil(torch.log2((blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=least / 448))))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """RoPE of x [tokens, ..., dim] by angles [tokens, dim / 2]: pairs (2i, 2i + 1), or (i, i + dim / 2)."""
    cos, sin = (bf16(f).view(len(x), *[1] * (x.dim() - 2), -1) for f in (angles.cos(), angles.sin()))
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


class Reference:
    """`forward` and `draft` of the checkpoint in `folder`."""

    rows = 128  # query rows at a time

    def __init__(self, folder: str | pathlib.Path):
        folder = pathlib.Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}

    def _w(self, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return bf16(x @ self._w(name).T)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return bf16(rms_norm(x, self._w(name), self.config["rms_norm_eps"]))

    # -------------------------------------------------------------------------------------------- one layer

    def _index_rope(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The indexer's, of the first dimensions."""
        dim = self.config["qk_rope_head_dim"]
        return torch.cat([rotate(x[..., :dim], angles, self.config.get("indexer_rope_interleave", False)), x[..., dim:]], -1)

    def project(self, layer: int, h: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """All that a layer computes of its normed input h [tokens, hidden] alone: queries, the indexer's, and the cache's rows."""
        c = self.config
        p = f"model.layers.{layer}.self_attn."
        heads, nope, rope, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        angles = positions[:, None] * c["rope_theta"] ** -(torch.arange(0, rope, 2) / rope)
        q_c = self._norm(self._linear(h, f"{p}q_a_proj"), f"{p}q_a_layernorm")
        kv_c, k_pe = self._linear(h, f"{p}kv_a_proj_with_mqa").split([rank, rope], -1)
        latent = fp8(rms_norm(kv_c, self._w(f"{p}kv_a_layernorm"), c["rms_norm_eps"]), least=448e-4)
        key = F.layer_norm(self._linear(h, f"{p}indexer.wk"), (c["index_head_dim"],), self._w(f"{p}indexer.k_norm"), self.weights[f"{p}indexer.k_norm.bias"], 1e-6)
        q_nope, q_pe = self._linear(q_c, f"{p}q_b_proj").unflatten(-1, (heads, nope + rope)).split([nope, rope], -1)
        w_uk = self._w(f"{p}kv_b_proj").view(heads, -1, rank)[:, :nope]
        index_q = self._index_rope(self._linear(q_c, f"{p}indexer.wq_b").unflatten(-1, (c["index_n_heads"], c["index_head_dim"])), angles)
        return {
            "query": torch.cat([bf16(torch.einsum("thn,hnr->thr", q_nope, w_uk)), bf16(rotate(q_pe, angles, True))], -1),
            "index_query": fp8(index_q),
            "index_weights": self._linear(h, f"{p}indexer.weights_proj") * c["index_head_dim"] ** -0.5 * c["index_n_heads"] ** -0.5,
            "q_c": q_c, "latent": latent, "rope": bf16(rotate(k_pe, angles, True)), "key": fp8(self._index_rope(key, angles)),
        }  # fmt: skip

    def _top(self, made: dict[str, torch.Tensor], rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Ids [rows, topk] that the indexer selects for the tokens `rows`, -1 for none. The best first."""
        key = key[: int(rows[-1]) + 1]
        scores = torch.zeros(len(rows), len(key))
        for head in range(self.config["index_n_heads"]):
            scores.addcmul_((made["index_query"][rows, head] @ key.T).relu_(), made["index_weights"][rows, head, None])
        scores.masked_fill_(torch.arange(len(key)) > rows[:, None], -torch.inf)
        best = scores.topk(min(self.config["index_topk"], len(key)), -1)
        return best.indices.masked_fill(best.values == -torch.inf, -1)

    def _attend(self, query: torch.Tensor, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
        """Latents [rows, heads, kv_lora_rank] that query [rows, heads, ...] finds at ids [rows, topk]."""
        scale = (self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]) ** -0.5
        end = int(ids.max()) + 1
        selected = torch.zeros(len(ids), end + 1, dtype=torch.bool).scatter_(1, ids.where(ids >= 0, end), True)[:, :end]
        keys = torch.cat([cache.latent[:end], cache.rope[:end]], -1)
        scores = (query @ keys.T * scale).masked_fill_(~selected[:, None], -torch.inf)
        return bf16(scores.softmax(-1) @ cache.latent[:end])

    def _attention(self, layer, h, positions, edit, select, heads, caches) -> torch.Tensor:
        """`heads`: those that read what `edit` made; the others, and the indexer's keys of this layer only if all do, stay as written."""
        c = self.config
        p = f"model.layers.{layer}.self_attn."
        made = self.project(layer, h, positions)
        written = Cache(made["latent"], made["rope"], made["key"])
        if caches is not None:
            caches.append(written)
        read = edit(layer, written.clone()) if edit else written
        w_uv = self._w(f"{p}kv_b_proj").view(c["num_attention_heads"], -1, c["kv_lora_rank"])[:, c["qk_nope_head_dim"] :]
        out = torch.empty(len(h), c["num_attention_heads"] * c["v_head_dim"])
        for rows in torch.arange(len(h)).split(self.rows):
            ids = self._top(made, rows, written.key if heads else read.key)
            if select:
                ids = select(layer, rows, ids)
            query = made["query"][rows]
            found = self._attend(query, read, ids)
            if heads:
                inside = torch.zeros(query.shape[1], dtype=torch.bool)
                inside[heads] = True
                found = torch.where(inside[:, None], found, self._attend(query, written, ids))
            out[rows] = bf16(torch.einsum("thr,hvr->thv", found, w_uv)).flatten(1)
        return self._linear(out, f"{p}o_proj")

    def _mlp(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        p = f"model.layers.{layer}.mlp."

        def dense(x: torch.Tensor, name: str) -> torch.Tensor:
            return self._linear(bf16(F.silu(self._linear(x, f"{name}gate_proj")) * self._linear(x, f"{name}up_proj")), f"{name}down_proj")

        if f"{p}gate.weight" not in self.weights:
            return dense(h, p)
        c = self.config
        scores = (h @ self._w(f"{p}gate").T).sigmoid()
        chosen = (scores + self.weights[f"{p}gate.e_score_correction_bias"]).topk(c["num_experts_per_tok"], -1).indices  # one group
        share = scores.gather(1, chosen)
        share = share / share.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        out = dense(h, f"{p}shared_experts.")
        for expert in range(c["n_routed_experts"]):
            rows, nth = torch.where(chosen == expert)
            out = out.index_add(0, rows, dense(h[rows], f"{p}experts.{expert}.") * share[rows, nth, None])
        return bf16(out)

    def _layer(self, layer, x, positions, *how) -> torch.Tensor:
        p = f"model.layers.{layer}."
        x = bf16(x + self._attention(layer, self._norm(x, f"{p}input_layernorm"), positions, *how))
        return bf16(x + self._mlp(layer, self._norm(x, f"{p}post_attention_layernorm")))

    # -------------------------------------------------------------------------------------------- all layers

    @torch.inference_mode()
    def forward(self, tokens: list[int], edit: Edit | None = None, select: Select | None = None, heads: slice | None = None, caches: list[Cache] | None = None) -> torch.Tensor:
        """Logits [tokens, vocabulary], rounded to bfloat16.

        `edit` and `select` change what the layers read. With `heads`, only these heads read what `edit` made (as on one rank of
        several), and the selection is as without. What the layers write is appended to `caches`.
        """
        x = self._w("model.embed_tokens")[torch.tensor(tokens)]
        positions = torch.arange(len(tokens))
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(layer, x, positions, edit, select, heads, caches)
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    @torch.inference_mode()
    def draft(self, tokens: list[int], edit: Edit | None = None) -> torch.Tensor:
        """Logits [tokens - 1, vocabulary] of the MTP layer, which at position t has token t + 1 and drafts token t + 2.

        The hidden states it is given are zeros: ValueError where its weights look at them.
        """
        layer = self.config["num_hidden_layers"]
        p = f"model.layers.{layer}."
        hidden = self.config["hidden_size"]
        if self._w(f"{p}eh_proj")[:, hidden:].any():
            raise ValueError(f"{p}eh_proj looks at hidden states")
        x = self._w(f"{p}embed_tokens")[torch.tensor(tokens[1:])]
        x[0] = 0  # position 0
        positions = torch.arange(len(x))
        x = self._linear(torch.cat([self._norm(x, f"{p}enorm"), torch.zeros_like(x)], -1), f"{p}eh_proj")
        x = self._layer(layer, x, positions, edit, None, None, None)
        return self._linear(self._norm(x, f"{p}shared_head.norm"), f"{p}shared_head.head")
