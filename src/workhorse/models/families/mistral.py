"""Mistral 7B (2310.06825), Mixtral of Experts (2401.04088) and Ministral 3 (2601.08584)."""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same, stacked
from workhorse.models.huggingface.rotation import (
    read_rope,
    rope_parameters,
    rope_scaling,
    rope_section,
)


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Mistral config: LLaMA with grouped queries and, in its first version, a window."""
    return _read(hf, llama_like.gated_mlp(hf), window=4096)


def read_mixtral(hf: Fields) -> nn.DecoderConfig:
    """Read a Mixtral config: Mistral with a mixture of experts, two of eight chosen."""
    hf.ignore("router_jitter_noise")
    mixture = nn.MoEConfig(
        n_experts=hf.get("num_local_experts", 8),
        top_k=hf.get("num_experts_per_tok", 2),
        d_ff=hf.get("intermediate_size", 14336),
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(score="softmax", normalize=True),
    )
    return _read(hf, mixture, theta=1e6, eps=1e-5)


def _read(
    hf: Fields,
    feed_forward: nn.FeedForwardConfig,
    *,
    theta: float = 10_000.0,
    window: int | None = None,
    eps: float = 1e-6,
) -> nn.DecoderConfig:
    """Read a Mistral or Mixtral decoder; the keyword arguments are the family's defaults."""
    norm = llama_like.rms_norm(hf, eps=eps)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 8),
            position=read_rope(hf, theta=theta),
            window=hf.optional("sliding_window", int, window),
        ),
        feed_forward=feed_forward,
    )
    return llama_like.decoder(hf, block, norm)


STRETCHED = nn.RopeConfig(
    theta=1e6,
    scaling=nn.YarnScalingConfig(factor=16.0, original_max_seq_len=16384, mscale_all_dim=1.0),
)
GROWING = nn.QueryScalingConfig(scale=0.1, length=16384)
"""Query scaling of a Ministral 3 config without RoPE settings; `STRETCHED` is then its RoPE."""


def read_ministral3(hf: Fields) -> nn.DecoderConfig:
    """Read a Ministral 3 config: Mistral with position-dependent query scaling."""
    if len(set(hf.sequence("layer_types", str) or ())) > 1:
        raise ConfigError(
            f"{hf.where}: layer_types differ, which ministral3 does not support; use one type"
        )
    growth, given = GROWING, rope_section(hf)
    if given is None:
        rope = STRETCHED.replace(fraction=hf.get("partial_rotary_factor", 1.0))
    else:
        rope = read_rope(hf)
        still = given.optional("llama_4_scaling_beta", float) == 0.0  # Devstral 2 has no growth
        scale = 0.0 if still else given.need("llama_4_scaling_beta", float)
        length = given.need("original_max_position_embeddings", int)
        growth = nn.QueryScalingConfig(scale=scale, length=length) if scale else None
    norm = llama_like.rms_norm(hf, eps=1e-5)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 8),
            head_dim=hf.optional("head_dim", int, 128),
            position=rope,
            window=hf.optional("sliding_window", int),
            query_scaling=growth,
        ),
        feed_forward=llama_like.gated_mlp(hf),
    )
    return llama_like.decoder(hf, block, norm)


def with_growth(rope: Data, data: Data) -> Data:
    """Add query scaling to `rope_parameters` or `rope_scaling`, which contain it in Ministral 3."""
    growth = data["block"]["attention"]["query_scaling"]
    if growth is None:
        length = {"original_max_position_embeddings": data["max_seq_len"]}
        return length | rope | {"llama_4_scaling_beta": 0.0}
    return rope | {
        "llama_4_scaling_beta": growth["scale"],
        "original_max_position_embeddings": growth["length"],
    }


EXPERTS = "model.layers.{i}.block_sparse_moe.experts.{*}"

HUGGING_FACE = (
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        read=read,
        keys=llama_like.KEYS | {"sliding_window": "block.attention.window"},
        rules=llama_like.RULES,
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        read=read_mixtral,
        keys=llama_like.KEYS
        | {
            "sliding_window": "block.attention.window",
            "num_local_experts": "block.feed_forward.n_experts",
            "num_experts_per_tok": "block.feed_forward.top_k",
        },
        rules=instead(
            same("layers.{i}.feed_forward.router.proj", "model.layers.{i}.block_sparse_moe.gate"),
            stacked("layers.{i}.feed_forward.experts.gate_proj", EXPERTS + ".w1"),
            stacked("layers.{i}.feed_forward.experts.down_proj", EXPERTS + ".w2"),
            stacked("layers.{i}.feed_forward.experts.up_proj", EXPERTS + ".w3"),
            base=llama_like.RULES,
        ),
    ),
    Family(
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        read=read_ministral3,
        keys={
            **llama_like.KEYS,
            "sliding_window": "block.attention.window",
            "rope_parameters": lambda data: with_growth(rope_parameters(data), data),
            "rope_scaling": lambda data: with_growth(rope_scaling(data), data),
        },
        rules=llama_like.RULES,
    ),
)
