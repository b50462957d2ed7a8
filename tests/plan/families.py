"""Small models of published families, from fields of their config.json."""

from typing import Any

from workhorse.models.huggingface import Fields, family
from workhorse.nn import DecoderConfig

WIDTH = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = WIDTH | {"intermediate_size": 160, "num_hidden_layers": 3, "max_position_embeddings": 64}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def small(model_type: str, **fields: Any) -> DecoderConfig:
    """The config of a decoder with a model type and `SIZES`, overridden by fields.

    Args:
        model_type: the model type in transformers.
        fields: fields of its config.json.
    """
    return family(model_type).read(Fields({"vocab_size": 515, **SIZES, **fields}))
