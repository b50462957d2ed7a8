"""Phi-1 to Phi-2 (2306.11644, 2309.05463), Phi-3 and 4 (2404.14219), Phi-3.5-MoE (2409.12136)."""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, joined, same, stacked
from workhorse.models.huggingface.rotation import (
    read_rope,
    rope_parameters,
    rope_scaling,
    rope_section,
)


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a config of Phi-1 to Phi-2: parallel blocks, RoPE on half of each head, all biases."""
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_eps", 1e-5))
    block = nn.ParallelConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            position=read_rope(hf, fraction=0.5),
            qk_norm=nn.QKNormConfig(norm=norm) if hf.get("qk_layernorm", False) else None,
            qkv_bias=True,
            out_bias=True,
        ),
        feed_forward=nn.MlpConfig(
            d_ff=hf.need("intermediate_size", int),
            activation=llama_like.activation(hf, default="gelu_new"),
            bias=True,
        ),
        dropout=hf.get("resid_pdrop", 0.0),
    )
    embedding = nn.EmbeddingConfig(dropout=hf.get("embd_pdrop", 0.0))
    return llama_like.decoder(hf, block, norm, embedding=embedding, head={"bias": True})


def read_phi3(hf: Fields) -> nn.DecoderConfig:
    """Read a Phi-3 config: LLaMA with fused q/k/v and fused gate/up matrices in its files."""
    hf.ignore("embd_pdrop", "original_max_position_embeddings")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        hf.refuse(key, False, "Phi-3 has no biases")
    for key in ("full_attn_mod", "interpolate_factor"):
        hf.refuse(key, 1, "transformers reads it but does not use it")
    norm = llama_like.rms_norm(hf, eps=1e-5)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf, position=_long_rope(hf), window=hf.optional("sliding_window", int)
        ),
        feed_forward=llama_like.gated_mlp(hf),
        dropout=hf.get("resid_pdrop", 0.0),
    )
    return llama_like.decoder(hf, block, norm)


def read_phimoe(hf: Fields) -> nn.DecoderConfig:
    """Read a Phi-3.5-MoE config: a mixture of experts with a SparseMixer router.

    Beyond the original length, transformers keeps the short RoPE factors and never reads the long
    ones. Here the long ones are used, as in the code released with the weights.
    """
    hf.ignore("hidden_dropout", "input_jitter_noise", "original_max_position_embeddings")
    hf.refuse("num_experts_per_tok", 2, "this router chooses two experts")
    norm = nn.LayerNormConfig(eps=hf.get("rms_norm_eps", 1e-5))
    bias = hf.get("attention_bias", False)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 8),
            position=_amplified(hf, read_rope(hf, theta=1e6)),
            window=hf.optional("sliding_window", int),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=nn.MoEConfig(
            n_experts=hf.get("num_local_experts", 16),
            top_k=2,
            d_ff=hf.get("intermediate_size", 6400),
            activation=llama_like.activation(hf),
            router=nn.RouterConfig(score="sparsemixer", jitter=hf.get("router_jitter_noise", 0.01)),
        ),
    )
    return llama_like.decoder(hf, block, norm, head={"bias": hf.get("lm_head_bias", False)})


def _long_rope(hf: Fields) -> nn.RopeConfig:
    """Read the RoPE settings of Phi-3; its only supported scaling is LongRoPE."""
    rope = read_rope(hf)
    if rope.scaling is None:
        return rope
    if not isinstance(rope.scaling, nn.LongRopeScalingConfig):
        raise ConfigError(
            f"{hf.where}: rope_type {rope.scaling.kind!r} is not supported; use 'longrope'"
        )
    hf.need("original_max_position_embeddings", int)  # transformers would assume 4096
    return rope


def _amplified(hf: Fields, rope: nn.RopeConfig) -> nn.RopeConfig:
    """Set RoPE's attention factor from `short_mscale` and `long_mscale` of Phi-3.5-MoE's files."""
    if rope.scaling is None:
        return rope
    given = rope_section(hf)
    assert given is not None
    short, long = (given.need(f"{length}_mscale", float) for length in ("short", "long"))
    if short != long or not isinstance(rope.scaling, nn.LongRopeScalingConfig):
        raise ConfigError(
            f"{hf.where}: {rope.scaling.kind} scaling with short_mscale={short} and "
            f"long_mscale={long} is not supported; use longrope with equal values"
        )
    return rope.replace(scaling=rope.scaling.replace(attention_factor=short))


def with_amplitude(rope: Data) -> Data:
    """Replace `attention_factor` in RoPE settings by `short_mscale` and `long_mscale`."""
    if rope["rope_type"] == "default":
        return rope
    amplitude = rope.pop("attention_factor")
    return rope | {"short_mscale": amplitude, "long_mscale": amplitude}


ORIGINAL = "block.attention.position.scaling.original_max_seq_len"
FRACTION = {"partial_rotary_factor": "block.attention.position.fraction"}
PHI, THEIRS = "layers.{i}.", "model.layers.{i}."
EXPERTS = THEIRS + "block_sparse_moe.experts.{*}"

HUGGING_FACE = (
    Family(
        model_type="phi",
        architecture="PhiForCausalLM",
        read=read,
        keys={
            **{key: path for key, path in llama_like.KEYS.items() if key != "rms_norm_eps"},
            **FRACTION,
            "hidden_act": llama_like.written_activation(gelu_tanh="gelu_new"),
            "layer_norm_eps": "final_norm.eps",
            "qk_layernorm": lambda data: data["block"]["attention"]["qk_norm"] is not None,
        },
        rules=instead(
            same(PHI + "attention.out_proj", THEIRS + "self_attn.dense"),
            same(PHI + "attention.q_norm", THEIRS + "self_attn.q_layernorm"),
            same(PHI + "attention.k_norm", THEIRS + "self_attn.k_layernorm"),
            same(PHI + "feed_forward.up_proj", THEIRS + "mlp.fc1"),
            same(PHI + "feed_forward.down_proj", THEIRS + "mlp.fc2"),
            same(PHI + "norm", THEIRS + "input_layernorm"),
            same("final_norm", "model.final_layernorm"),
            base=llama_like.RULES,
        ),
    ),
    Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        read=read_phi3,
        keys=llama_like.KEYS
        | FRACTION
        | {
            "sliding_window": "block.attention.window",
            "original_max_position_embeddings": ORIGINAL,
        },
        rules=instead(
            joined(
                tuple(PHI + f"attention.{name}_proj" for name in "qkv"),
                THEIRS + "self_attn.qkv_proj",
            ),
            joined(
                (PHI + "feed_forward.gate_proj", PHI + "feed_forward.up_proj"),
                THEIRS + "mlp.gate_up_proj",
            ),
            base=llama_like.RULES,
        ),
    ),
    Family(
        model_type="phimoe",
        architecture="PhimoeForCausalLM",
        read=read_phimoe,
        keys={
            **llama_like.KEYS,
            "attention_bias": "block.attention.qkv_bias",
            "sliding_window": "block.attention.window",
            "num_local_experts": "block.feed_forward.n_experts",
            "num_experts_per_tok": "block.feed_forward.top_k",
            "router_jitter_noise": "block.feed_forward.router.jitter",
            "lm_head_bias": "head.bias",
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": lambda data: with_amplitude(rope_parameters(data)),
            "rope_scaling": lambda data: with_amplitude(rope_scaling(data)),
        },
        rules=instead(
            same(PHI + "feed_forward.router.proj", THEIRS + "block_sparse_moe.gate"),
            stacked(PHI + "feed_forward.experts.gate_proj", EXPERTS + ".w1"),
            stacked(PHI + "feed_forward.experts.down_proj", EXPERTS + ".w2"),
            stacked(PHI + "feed_forward.experts.up_proj", EXPERTS + ".w3"),
            base=llama_like.RULES,
        ),
    ),
)
