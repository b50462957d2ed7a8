"""Small models of every type that can be written as GGUF, as options of transformers' configs.

Heads are 32 wide and all other sizes are multiples of 32, so that Q8_0 can store every matrix.
"""

from typing import Any

import torch
import transformers as hf

from workhorse.models.huggingface import Fields, family
from workhorse.nn import Decoder, DecoderConfig

VOCAB = 512
CONTEXT = 128

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * n for n in range(16)],
    "long_factor": [2.0 + 0.3 * n for n in range(16)],
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
WIDE: dict[str, Any] = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads that are wider than the model in total."""

LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

CASES: dict[str, list[dict[str, Any]]] = {
    "llama": [
        SIZES,
        SIZES | WIDE | {"tie_word_embeddings": True, "attention_bias": True},
        SIZES | {"rope_parameters": LLAMA3},
        SIZES | {"rope_parameters": YARN},
        SIZES | {"rope_parameters": LINEAR, "mlp_bias": True},
        SIZES | {"rope_parameters": YARN | {"attention_factor": 1.3}},
    ],
    "mistral": [SIZES | {"sliding_window": None}, SIZES | WIDE | {"sliding_window": 64}],
    "mixtral": [SIZES | {"num_local_experts": 6, "sliding_window": None}],
    "qwen2": [SIZES, SIZES | {"tie_word_embeddings": True, "rope_parameters": YARN}],
    "qwen3": [SIZES | WIDE, SIZES | {"head_dim": 64, "tie_word_embeddings": True}],
    "qwen2_moe": [SIZES | EXPERTS | {"shared_expert_intermediate_size": 96}],
    "qwen3_moe": [SIZES | WIDE | EXPERTS | {"norm_topk_prob": True}],
    "gemma": [SIZES | WIDE],
    "gemma2": [SIZES | WIDE | {"sliding_window": 8, "query_pre_attn_scalar": 32}],
    "gemma3_text": [
        SIZES | WIDE | {"sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 7},
    ],
    "gpt2": [{"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": CONTEXT}],
    "phi": [SIZES | {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}],
    "phi3": [
        SIZES | {"num_key_value_heads": 2, "sliding_window": None},
        SIZES | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ],
    "gpt_oss": [
        SIZES
        | WIDE
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8}
        | {"num_hidden_layers": 4}
    ],
    "olmo": [SIZES, SIZES | {"clip_qkv": 0.6}],
    "olmo2": [SIZES],
    "olmo3": [SIZES | {"sliding_window": 8, "num_hidden_layers": 5}],
    "olmoe": [SIZES | {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2}],
    "smollm3": [SIZES | {"num_hidden_layers": 5}],
    "gpt_neox": [SIZES, SIZES | {"use_parallel_residual": False, "rotary_pct": 0.5}],
    "falcon": [
        SIZES | {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
        SIZES | {"new_decoder_architecture": True, "num_kv_heads": 1},
    ],
    "mpt": [
        {"d_model": 64, "n_layers": 3, "n_heads": 2, "max_seq_len": CONTEXT},
        {"d_model": 96, "n_layers": 2, "n_heads": 3, "max_seq_len": CONTEXT}
        | {"attn_config": {"clip_qkv": 0.6}},
    ],
    "bloom": [{"hidden_size": 64, "n_layer": 3, "n_head": 2}],
    "starcoder2": [SIZES, SIZES | {"sliding_window": 64}],
    "stablelm": [
        SIZES,
        SIZES | {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ],
    "cohere": [SIZES],
    "cohere2": [SIZES | {"sliding_window": 8, "num_hidden_layers": 5}],
    "glm4": [SIZES | WIDE],
    "glm4_moe": [
        SIZES
        | WIDE
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    ],
    "granite": [
        SIZES
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}
        | {"attention_multiplier": 0.1}
    ],
    "granitemoe": [
        SIZES
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "logits_scaling": 2.0}
        | {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.1}
    ],
    "granitemoeshared": [
        SIZES
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
        | {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.1}
    ],
    "exaone4": [
        SIZES | {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        SIZES | {"sliding_window": 8, "sliding_window_pattern": 4, "num_hidden_layers": 64},
    ],
    "nemotron": [SIZES],
    "dots1": [
        SIZES
        | {"num_key_value_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 64, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1}
    ],
    "deepseek_v2": [
        LATENT | {"n_group": 1, "topk_group": 1},
        LATENT | {"q_lora_rank": None, "num_hidden_layers": 4, "topk_method": "greedy"},
    ],
    "deepseek_v3": [
        LATENT | {"n_group": 1, "topk_group": 1},
        LATENT
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ],
    "ernie4_5": [SIZES | {"head_dim": 32}],
    "hunyuan_v1_dense": [SIZES | {"head_dim": 32}],
    "hunyuan_v1_moe": [SIZES | {"head_dim": 32, "num_experts": 6, "moe_topk": 2}],
    "arcee": [SIZES | {"head_dim": 32}],
    "seed_oss": [SIZES | WIDE],
}


EACH = [(model_type, number) for model_type, cases in CASES.items() for number in range(len(cases))]


def make(model_type: str, number: int = 0, **options: Any) -> Decoder:
    """A decoder with weights that are large enough for each part to affect the logits."""
    config = decoder_config(model_type, {"vocab_size": VOCAB} | CASES[model_type][number] | options)
    torch.manual_seed(0)
    decoder = config.build("eager").eval()
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            noise = torch.randn_like(weight)
            if weight.ndim == 1 or "norm" in name:
                weight.add_(0.2 * noise)
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
    return decoder


def decoder_config(model_type: str, options: dict[str, Any]) -> DecoderConfig:
    """Our config for a transformers config."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = hf.AutoConfig.for_model(model_type, **tokens, **options)
    return family(model_type).read(Fields(config.to_dict()))
