"""MiniCPM3 (OpenBMB, 2024; the multipliers are MiniCPM's, 2404.06395 §3)."""

import math

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a MiniCPM3 config: LLaMA with multipliers, and DeepSeek's latent attention.

    RoPE pairs the two halves of a head. Sub-layer outputs are multiplied by
    `scale_depth / sqrt(n_layers)`, and logits by `dim_model_base / d_model`.
    """
    width, depth = hf.need("hidden_size", int), hf.need("num_hidden_layers", int)
    n_heads, scaled = hf.need("num_attention_heads", int), hf.get("scale_emb", 12.0)
    attention = llama_like.latent_attention(hf, neighbours=False).replace(
        q_rank=hf.optional("q_lora_rank", int, 768),
        kv_rank=hf.get("kv_lora_rank", 256),
        nope_dim=hf.get("qk_nope_head_dim", 64),
        rope_dim=hf.get("qk_rope_head_dim", 32),
        value_dim=hf.get("v_head_dim", width // n_heads),
    )
    block = nn.PreNormConfig(
        norm=llama_like.rms_norm(hf, eps=1e-5),
        attention=attention,
        feed_forward=llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False)),
        residual_multiplier=(hf.optional("scale_depth", float, 1.4) or depth**0.5) / depth**0.5,
    )
    return llama_like.decoder(
        hf,
        block,
        block.norm,
        tied=True,
        embedding=nn.EmbeddingConfig(multiplier=scaled, round_multiplier=scaled != 1),
        head={"multiplier": (hf.optional("dim_model_base", int, 256) or width) / width},
    )


def scale_depth(data: Data) -> float:
    """Return `scale_depth` for `config.json`: residual multiplier times `sqrt(n_layers)`."""
    return data["block"]["residual_multiplier"] * math.sqrt(data["n_layers"])


def dim_model_base(data: Data) -> int:
    """Return `dim_model_base` for `config.json`: the width at which logits are not scaled."""
    return round(data["head"]["multiplier"] * data["d_model"])


HUGGING_FACE = (
    Family(
        model_type="minicpm3",
        architecture="MiniCPM3ForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | llama_like.LATENT_KEYS
        | {
            "mlp_bias": "block.feed_forward.bias",
            "scale_emb": "embedding.multiplier",
            "scale_depth": scale_depth,
            "dim_model_base": dim_model_base,
        },
        rules=instead(*llama_like.LATENT_RULES, base=llama_like.RULES),
    ),
)
