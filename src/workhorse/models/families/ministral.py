"""Ministral 8B (Mistral AI, 2024)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Ministral 8B config: Mistral; each layer has a window or full attention."""
    norm = llama_like.rms_norm(hf)
    window = hf.optional("sliding_window", int, 4096)
    kinds = llama_like.layer_types(
        hf, llama_like.alternating(hf, [llama_like.SLIDING if window else llama_like.FULL])
    )
    heads = llama_like.attention(hf, n_kv_heads=hf.get("num_key_value_heads", 8))
    layers = [
        nn.PreNormConfig(
            norm=norm,
            attention=heads.replace(window=window if kind == llama_like.SLIDING else None),
            feed_forward=llama_like.gated_mlp(hf),
        )
        for kind in kinds
    ]
    return llama_like.decoder(hf, layers, norm, names=kinds)


HUGGING_FACE = (
    Family(
        model_type="ministral",
        architecture="MinistralForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
        },
        rules=llama_like.RULES,
    ),
)
