"""HyperCLOVA X SEED Think (NAVER, 2025; first models: 2404.01954).

Granite's multipliers on LLaMA's block, and norms on both sides of each sub-layer (2502.02732).
"""

from workhorse.models.huggingface.family import Family, equals
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    KEYS,
    RULES,
    attention,
    decoder,
    gated_mlp,
    rms_norm,
)
from workhorse.models.huggingface.moves import instead, same
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import PreNormConfig, SandwichNormConfig
from workhorse.nn.embedding import EmbeddingConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a HyperCLOVA X config: LLaMA with multipliers.

    `logits_scaling` multiplies the logits, unlike in Granite, which divides by it.
    """
    norm, bias = rms_norm(hf), hf.get("attention_bias", False)
    wiring = SandwichNormConfig if hf.get("use_post_norm", True) else PreNormConfig
    block = wiring(
        norm=norm,
        attention=attention(
            hf,
            scale=hf.optional("attention_multiplier", float),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=gated_mlp(hf, bias=hf.get("mlp_bias", False)),
        residual_multiplier=hf.get("residual_multiplier", 1.0),
    )
    return decoder(
        hf,
        block,
        norm,
        embedding=EmbeddingConfig(multiplier=hf.get("embedding_multiplier", 1.0)),
        head={"multiplier": hf.get("logits_scaling", 1.0)},
    )


HUGGING_FACE = (
    Family(
        model_type="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        read=read,
        keys=KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
            "embedding_multiplier": "embedding.multiplier",
            "attention_multiplier": "block.attention.scale",
            "residual_multiplier": "block.residual_multiplier",
            "logits_scaling": "head.multiplier",
            "use_post_norm": equals("block.kind", "sandwich_norm"),
        },
        rules=instead(
            same("layers.{i}.attention_output_norm", "model.layers.{i}.post_norm1"),
            same("layers.{i}.feed_forward_output_norm", "model.layers.{i}.post_norm2"),
            base=RULES,
        ),
    ),
)
