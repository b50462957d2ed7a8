"""Granite: dense (IBM, Granite 3.0 Language Models, 2024) and mixtures of experts (2408.13359).

LLaMA with multipliers on embedding, scores, sub-layers and logits (muP, 2203.03466).
"""

from collections.abc import Sequence
from typing import Any

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family, FieldPath
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, joined, same


def read(hf: Fields) -> nn.DecoderConfig:
    """Read the config of a dense Granite model."""
    return multiplied(hf, block(hf, llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False))))


def read_mixture(hf: Fields) -> nn.DecoderConfig:
    """Read a config of Granite with mixtures of experts: softmax over the chosen experts."""
    return multiplied(hf, block(hf, mixture(hf)))


def read_shared(hf: Fields) -> nn.DecoderConfig:
    """Read a config of Granite with mixtures, and a shared expert unless its width is 0."""
    return multiplied(hf, block(hf, mixture(hf, shared=shared_expert(hf))))


def mixture(hf: Fields, *, shared: nn.GatedMlpConfig | None = None) -> nn.MoEConfig:
    """Read Granite's routed experts; `shared` is an optional shared expert."""
    return nn.MoEConfig(
        n_experts=hf.get("num_local_experts", 8),
        top_k=hf.get("num_experts_per_tok", 2),
        d_ff=hf.need("intermediate_size", int),
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(score="softmax", normalize=True),
        shared=shared,
    )


def shared_expert(hf: Fields) -> nn.GatedMlpConfig | None:
    """Read the shared expert, which processes every token; None if its width is 0."""
    width = hf.get("shared_intermediate_size", 0)
    return llama_like.gated_mlp(hf, d_ff=width) if width else None


def block(
    hf: Fields, feed_forward: nn.FeedForwardConfig, *, eps: float = 1e-6, **heads: Any
) -> nn.PreNormConfig:
    """Read a layer of Granite, with its multipliers.

    Args:
        hf: the config.
        feed_forward: feed-forward of the layer.
        eps: default epsilon of the norms in the family.
        heads: fields of `AttentionConfig` to set.
    """
    bias = hf.get("attention_bias", False)
    return nn.PreNormConfig(
        norm=llama_like.rms_norm(hf, eps=eps),
        attention=llama_like.attention(
            hf, scale=hf.get("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias, **heads
        ),
        feed_forward=feed_forward,
        residual_multiplier=hf.get("residual_multiplier", 1.0),
    )


def multiplied(
    hf: Fields, layers: nn.PreNormConfig | Sequence[nn.PreNormConfig], **more: Any
) -> nn.DecoderConfig:
    """Read a decoder with multipliers on embedding and logits; `more` is passed to `decoder`."""
    first = layers[0] if isinstance(layers, Sequence) else layers
    return llama_like.decoder(
        hf,
        layers,
        first.norm,
        embedding=nn.EmbeddingConfig(multiplier=hf.get("embedding_multiplier", 1.0)),
        head={"multiplier": 1 / hf.get("logits_scaling", 1.0)},
        **more,
    )


def logits_scaling(data: Data) -> float:
    """Return `logits_scaling` for `config.json`: the divisor of the logits."""
    return 1 / data["head"]["multiplier"]


def shared_width(data: Data) -> int:
    """Return the width of the shared expert for `config.json`; 0 if there is none."""
    shared = data["block"]["feed_forward"]["shared"]
    return shared["d_ff"] if shared else 0


MULTIPLIED: dict[str, FieldPath] = llama_like.KEYS | {
    "attention_bias": "block.attention.qkv_bias",
    "embedding_multiplier": "embedding.multiplier",
    "attention_multiplier": "block.attention.scale",
    "residual_multiplier": "block.residual_multiplier",
    "logits_scaling": logits_scaling,
}
MIXED = MULTIPLIED | {
    "num_local_experts": "block.feed_forward.n_experts",
    "num_experts_per_tok": "block.feed_forward.top_k",
}
FEED_FORWARD, MIXTURE = "layers.{i}.feed_forward.", "model.layers.{i}.block_sparse_moe."
SHARED_RULES = (
    joined(
        (FEED_FORWARD + "shared.gate_proj", FEED_FORWARD + "shared.up_proj"),
        "model.layers.{i}.shared_mlp.input_linear",
    ),
    same(FEED_FORWARD + "shared.down_proj", "model.layers.{i}.shared_mlp.output_linear"),
)
MIXTURE_RULES = instead(
    same(FEED_FORWARD + "router.proj", MIXTURE + "router.layer"),
    joined(
        (FEED_FORWARD + "experts.gate_proj", FEED_FORWARD + "experts.up_proj"),
        MIXTURE + "input_linear",
        dim=1,
    ),
    same(FEED_FORWARD + "experts.down_proj", MIXTURE + "output_linear"),
    *SHARED_RULES,
    base=llama_like.RULES,
)

HUGGING_FACE = (
    Family(
        model_type="granite",
        architecture="GraniteForCausalLM",
        read=read,
        keys=MULTIPLIED | {"mlp_bias": "block.feed_forward.bias"},
        rules=llama_like.RULES,
    ),
    Family(
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        read=read_mixture,
        keys=MIXED,
        rules=MIXTURE_RULES,
    ),
    Family(
        model_type="granitemoeshared",
        architecture="GraniteMoeSharedForCausalLM",
        read=read_shared,
        keys=MIXED | {"shared_intermediate_size": shared_width},
        rules=MIXTURE_RULES,
    ),
)
