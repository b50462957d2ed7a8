"""Ministral 8B (Mistral AI, 2024)."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    FULL,
    KEYS,
    RULES,
    SLIDING,
    alternating,
    attention,
    decoder,
    gated_mlp,
    layer_types,
    rms_norm,
    written_layer_types,
    written_window,
)
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import PreNormConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a Ministral 8B config: Mistral; each layer has a window or full attention."""
    norm = rms_norm(hf)
    window = hf.optional("sliding_window", int, 4096)
    kinds = layer_types(hf, alternating(hf, [SLIDING if window else FULL]))
    heads = attention(hf, n_kv_heads=hf.get("num_key_value_heads", 8))
    layers = [
        PreNormConfig(
            norm=norm,
            attention=heads.replace(window=window if kind == SLIDING else None),
            feed_forward=gated_mlp(hf),
        )
        for kind in kinds
    ]
    return decoder(hf, layers, norm, names=kinds)


HUGGING_FACE = (
    Family(
        model_type="ministral",
        architecture="MinistralForCausalLM",
        read=read,
        keys=KEYS | {"sliding_window": written_window, "layer_types": written_layer_types},
        rules=RULES,
    ),
)
