"""OLMo: Accelerating the Science of Language Models (Groeneveld et al., 2402.00838).

Also reads OLMo 2 (2501.00656), OLMo 3 (2512.13961) and the mixture OLMoE (2409.02060).
"""

from typing import Any

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def olmo(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    tied: bool = False,
    vocab_size: int = 50304,
    max_seq_len: int = 2048,
) -> nn.DecoderConfig:
    """Build an OLMo config: LLaMA's block with LayerNorm without weight and bias, in float32.

    Weights start with standard deviation `1/sqrt(fan_in)`. Projections onto the residual stream
    start smaller: the original divides by `sqrt(2 · layer)` and truncates at three deviations; here
    all are divided by `sqrt(2 · n_layers)`, without truncation.
    """
    norm = nn.LayerNormConfig(eps=1e-5, weight=False, bias=False, precision="float32")
    block = nn.PreNormConfig(
        norm=norm,
        attention=nn.AttentionConfig(
            n_heads=n_heads, position=nn.RopeConfig(theta=10_000.0, precision="float32")
        ),
        feed_forward=nn.GatedMlpConfig(d_ff=d_ff, activation="silu"),
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        blocks={"main": block},
        final_norm=norm,
        head=nn.HeadConfig(tied=tied),
        init=nn.FanInInitConfig(embedding_std=d_model**-0.5, residual="scaled"),
    )


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an OLMo 1 config. Its norm has no weights, and no key sets the norm's epsilon."""
    norm = nn.LayerNormConfig(eps=1e-5, weight=False, bias=False, precision="float32")
    block = nn.PreNormConfig(
        norm=norm,
        attention=_attention(
            hf,
            position=read_rope(hf, precision="float32"),
            clip=hf.optional("clip_qkv", float),
        ),
        feed_forward=llama_like.gated_mlp(hf),
    )
    return llama_like.decoder(hf, block, norm)


def read_olmo2(hf: Fields) -> nn.DecoderConfig:
    """Read an OLMo 2 config (2501.00656 §2.1): norms on sub-layer outputs, queries and keys."""
    norm = llama_like.rms_norm(hf, eps=1e-5, multiply="before_cast")
    block = nn.ReorderedNormConfig(
        norm=norm,
        attention=_normed_attention(hf, norm, position=read_rope(hf, precision="float32")),
        feed_forward=llama_like.gated_mlp(hf),
    )
    return llama_like.decoder(hf, block, norm)


def read_olmo3(hf: Fields) -> nn.DecoderConfig:
    """Read an OLMo 3 config (2512.13961): OLMo 2 with windows in three of four layers.

    A RoPE scaling that is given only once applies to the layers without a window.
    """
    norm = llama_like.rms_norm(hf, eps=1e-5, multiply="before_cast")
    types = llama_like.layer_types(
        hf,
        llama_like.alternating(
            hf, (llama_like.SLIDING, llama_like.SLIDING, llama_like.SLIDING, llama_like.FULL)
        ),
    )
    window = hf.optional("sliding_window", int, 4096)
    for_each = hf.values.get("rope_parameters") is not None

    def block(kind: str) -> nn.ReorderedNormConfig:
        rope = read_rope(
            hf,
            theta=5e5,
            theta_key="rope_theta" if kind == llama_like.FULL else None,
            layer_type=kind,
            scaled=for_each or kind == llama_like.FULL,
            older="updates" if kind == llama_like.FULL else "ignored",
            precision="float32",
        )
        return nn.ReorderedNormConfig(
            norm=norm,
            attention=_normed_attention(
                hf, norm, position=rope, window=window if kind == llama_like.SLIDING else None
            ),
            feed_forward=llama_like.gated_mlp(hf),
        )

    return llama_like.decoder(hf, [block(kind) for kind in types], norm, names=types)


def read_olmoe(hf: Fields) -> nn.DecoderConfig:
    """Read an OLMoE config (2409.02060): small experts, norms on q and k, pre-norm blocks."""
    hf.refuse(
        "clip_qkv",
        None,
        "OLMoE clips after the norms on queries and keys; here clipping comes before them",
    )
    norm = llama_like.rms_norm(hf, eps=1e-5)
    block = nn.PreNormConfig(
        norm=norm,
        attention=_normed_attention(hf, norm),
        feed_forward=nn.MoEConfig(
            n_experts=hf.get("num_experts", hf.get("num_local_experts", 64)),
            top_k=hf.get("num_experts_per_tok", 8),
            d_ff=hf.get("intermediate_size", 2048),
            activation=llama_like.activation(hf),
            router=nn.RouterConfig(normalize=hf.get("norm_topk_prob", False)),
        ),
    )
    return llama_like.decoder(hf, block, norm)


def _attention(hf: Fields, **changes: Any) -> nn.AttentionConfig:
    bias = hf.get("attention_bias", False)
    return llama_like.attention(hf, qkv_bias=bias, out_bias=bias, **changes)


def _normed_attention(hf: Fields, norm: nn.RMSNormConfig, **changes: Any) -> nn.AttentionConfig:
    return _attention(hf, qk_norm=nn.QKNormConfig(norm=norm, over="full"), **changes)


BIAS = {"attention_bias": "block.attention.qkv_bias"}
QK_NORM = (
    same("layers.{i}.attention.q_norm.norm", "model.layers.{i}.self_attn.q_norm"),
    same("layers.{i}.attention.k_norm.norm", "model.layers.{i}.self_attn.k_norm"),
)
REORDERED = (
    same("layers.{i}.attention_norm", "model.layers.{i}.post_attention_layernorm"),
    same("layers.{i}.feed_forward_norm", "model.layers.{i}.post_feedforward_layernorm"),
)

HUGGING_FACE = (
    Family(
        model_type="olmo",
        architecture="OlmoForCausalLM",
        read=read,
        keys={key: path for key, path in llama_like.KEYS.items() if key != "rms_norm_eps"}
        | BIAS
        | {"clip_qkv": "block.attention.clip"},
        rules=llama_like.RULES,
    ),
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        read=read_olmo2,
        keys=llama_like.KEYS | BIAS,
        rules=instead(*QK_NORM, *REORDERED, base=llama_like.RULES),
    ),
    Family(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        read=read_olmo3,
        keys=llama_like.KEYS
        | BIAS
        | llama_like.ROPE_BY_TYPE_KEYS
        | {
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
        },
        rules=instead(*QK_NORM, *REORDERED, base=llama_like.RULES),
    ),
    Family(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        read=read_olmoe,
        keys=llama_like.KEYS
        | BIAS
        | {
            "num_experts": "block.feed_forward.n_experts",
            "num_experts_per_tok": "block.feed_forward.top_k",
            "norm_topk_prob": "block.feed_forward.router.normalize",
        },
        rules=instead(*QK_NORM, *mixtures.MIXTURE_RULES, base=llama_like.RULES),
    ),
)
