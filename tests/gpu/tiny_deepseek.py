# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V3.2-shaped checkpoint small enough to make in a test: sparse indexer, MLA, dense MLP, seeded weights.

The weights spread enough that greedy tokens and log-probabilities tell two computations apart; dummy weights would repeat
one token. index_topk is 512, so prompts above that select. It can be laid out as another checkpoint of the same sizes, so that one
engine runs both, one after the other (margin_deepseek.py).
"""
import json
import pathlib

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCAB, HEADS, Q_RANK, KV_RANK, NOPE, ROPE, V_DIM = 1024, 2048, 2048, 16, 512, 512, 128, 64, 128
INDEX_HEADS, INDEX_DIM = 64, 128


def config(layers: int) -> dict:
    """config.json of a model with `layers` dense layers."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers, "first_k_dense_replace": layers, "vocab_size": VOCAB, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V_DIM,
        "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "index_topk": 512, "rope_theta": 10000, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
        # Read by the config class, without effect while every layer is dense.
        "moe_layer_freq": 1, "moe_intermediate_size": 256, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    }  # fmt: skip


def weights(layers: int, seed: int) -> dict[str, torch.Tensor]:
    """bfloat16 weights (float32 for the indexer's key norm), each matrix scaled to keep the variance of its input."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, std: float | None = None) -> None:
        out[f"{name}.weight"] = (torch.randn(rows, columns, generator=generator) * (std or columns**-0.5)).to(torch.bfloat16)

    def norm(name: str, size: int) -> None:
        out[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    matrix("model.embed_tokens", VOCAB, HIDDEN, std=1.0)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention, indexer, mlp = f"{prefix}.self_attn", f"{prefix}.self_attn.indexer", f"{prefix}.mlp"
        norm(f"{prefix}.input_layernorm", HIDDEN)
        norm(f"{prefix}.post_attention_layernorm", HIDDEN)
        norm(f"{attention}.q_a_layernorm", Q_RANK)
        norm(f"{attention}.kv_a_layernorm", KV_RANK)
        matrix(f"{attention}.q_a_proj", Q_RANK, HIDDEN)
        matrix(f"{attention}.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK)
        matrix(f"{attention}.kv_a_proj_with_mqa", KV_RANK + ROPE, HIDDEN)
        matrix(f"{attention}.kv_b_proj", HEADS * (NOPE + V_DIM), KV_RANK)
        matrix(f"{attention}.o_proj", HIDDEN, HEADS * V_DIM)
        matrix(f"{indexer}.wq_b", INDEX_HEADS * INDEX_DIM, Q_RANK)
        matrix(f"{indexer}.wk", INDEX_DIM, HIDDEN)
        matrix(f"{indexer}.weights_proj", INDEX_HEADS, HIDDEN)
        out[f"{indexer}.k_norm.weight"], out[f"{indexer}.k_norm.bias"] = torch.ones(INDEX_DIM), torch.zeros(INDEX_DIM)
        matrix(f"{mlp}.gate_proj", INTERMEDIATE, HIDDEN)
        matrix(f"{mlp}.up_proj", INTERMEDIATE, HIDDEN)
        matrix(f"{mlp}.down_proj", HIDDEN, INTERMEDIATE)
    norm("model.norm", HIDDEN)
    matrix("lm_head", VOCAB, HIDDEN, std=0.08)
    return out


def write(folder: pathlib.Path, layers: int = 3, seed: int = 0, like: dict | None = None) -> pathlib.Path:
    """Write config.json and model.safetensors into `folder`; return it.

    `like`: config.json of another checkpoint, to be written instead of one's own. Its vocabulary may be larger: the tokens that
    this one lacks are zeros, and never the best. ValueError where a weight would have another size.
    """
    ours, tensors = config(layers), weights(layers, seed)
    if like is not None:
        sizes = [name for name in ours if isinstance(ours[name], int) and name.startswith(("hidden", "intermediate", "num_", "q_", "kv_", "qk_", "v_", "index_"))]
        differ = {name: (ours[name], like[name]) for name in sizes if ours[name] != like[name] and name != "num_nextn_predict_layers"}
        if differ or like["vocab_size"] < VOCAB:
            raise ValueError(f"the other checkpoint has other sizes: {differ or like['vocab_size']}")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, like["vocab_size"] - VOCAB))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(like or ours, indent=1))
    save_file(tensors, folder / "model.safetensors")
    return folder
