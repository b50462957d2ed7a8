"""HyperCLOVA X SEED Think (NAVER, 2025; first models: 2404.01954).

Granite's multipliers on LLaMA's block, and norms on both sides of each sub-layer (2502.02732).
"""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family, equals
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a HyperCLOVA X config: LLaMA with multipliers.

    `logits_scaling` multiplies the logits, unlike in Granite, which divides by it.
    """
    norm, bias = llama_like.rms_norm(hf), hf.get("attention_bias", False)
    wiring = nn.SandwichNormConfig if hf.get("use_post_norm", True) else nn.PreNormConfig
    block = wiring(
        norm=norm,
        attention=llama_like.attention(
            hf,
            scale=hf.optional("attention_multiplier", float),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False)),
        residual_multiplier=hf.get("residual_multiplier", 1.0),
    )
    return llama_like.decoder(
        hf,
        block,
        norm,
        embedding=nn.EmbeddingConfig(multiplier=hf.get("embedding_multiplier", 1.0)),
        head={"multiplier": hf.get("logits_scaling", 1.0)},
    )


HUGGING_FACE = (
    Family(
        model_type="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        read=read,
        keys=llama_like.KEYS
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
            base=llama_like.RULES,
        ),
    ),
)
