"""Command R (Cohere, 2024), and Command R7B and Command A (report: 2504.00698)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same, unstacked
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Command R config: parallel blocks, RoPE on adjacent features, and scaled logits."""
    hf.ignore("model_max_length")
    norm, bias = layer_norm(hf), hf.get("attention_bias", False)
    block = nn.ParallelConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            position=read_rope(hf, theta=5e5, pairing="interleaved", precision="float32"),
            qk_norm=nn.QKNormConfig(norm=norm, over="each_head")
            if hf.get("use_qk_norm", False)
            else None,
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=llama_like.gated_mlp(hf),
    )
    return llama_like.decoder(hf, block, norm, tied=True, head=scaled(hf))


def read_cohere2(hf: Fields) -> nn.DecoderConfig:
    """Read a Command R7B config: three of four layers have a window and RoPE.

    The fourth layer has full attention and no positions.
    """
    hf.ignore("head_dim", *DESCRIPTIONS)
    norm, bias = layer_norm(hf), hf.get("attention_bias", False)
    rope = read_rope(hf, pairing="interleaved", precision="float32")
    last = llama_like.every(hf, "sliding_window_pattern", 4)
    types = llama_like.layer_types(
        hf, [llama_like.FULL if one else llama_like.SLIDING for one in last]
    )
    window = hf.get("sliding_window", 4096)

    def block(kind: str) -> nn.ParallelConfig:
        local = kind == llama_like.SLIDING
        return nn.ParallelConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                head_dim=None,
                position=rope if local else nn.NoPositionConfig(),
                window=window if local else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=llama_like.gated_mlp(hf),
        )

    return llama_like.decoder(
        hf,
        [block(kind) for kind in types],
        norm,
        names=types,
        tied=True,
        head=scaled(hf),
    )


DESCRIPTIONS = (
    "layer_switch",
    "order_of_interleaved_layers",
    "position_embedding_type",
    "use_embedding_sharing",
    "use_gated_activation",
    "use_parallel_block",
    "use_parallel_embedding",
)
"""Ignored keys of Command R7B's config: they state properties that all models of this type have."""


def layer_norm(hf: Fields) -> nn.LayerNormConfig:
    """Read the LayerNorm of a config."""
    return nn.LayerNormConfig(eps=hf.get("layer_norm_eps", 1e-5), bias=False, precision="float32")


def scaled(hf: Fields) -> Data:
    """Read the fields of `HeadConfig` that scale the logits."""
    return {"multiplier": hf.get("logit_scale", 0.0625)}


COHERE_KEYS = {key: path for key, path in llama_like.KEYS.items() if key != "rms_norm_eps"} | {
    "layer_norm_eps": "final_norm.eps",
    "logit_scale": "head.multiplier",
    "attention_bias": "block.attention.qkv_bias",
}
COHERE_RULES = instead(
    same("layers.{i}.norm", "model.layers.{i}.input_layernorm"),
    unstacked("layers.{i}.attention.q_norm.heads.{*}", "model.layers.{i}.self_attn.q_norm"),
    unstacked("layers.{i}.attention.k_norm.heads.{*}", "model.layers.{i}.self_attn.k_norm"),
    base=llama_like.RULES,
)

HUGGING_FACE = (
    Family(
        model_type="cohere",
        architecture="CohereForCausalLM",
        read=read,
        keys={
            **COHERE_KEYS,
            "use_qk_norm": lambda data: data["block"]["attention"]["qk_norm"] is not None,
        },
        rules=COHERE_RULES,
    ),
    Family(
        model_type="cohere2",
        architecture="Cohere2ForCausalLM",
        read=read_cohere2,
        keys=COHERE_KEYS
        | {
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
        },
        rules=COHERE_RULES,
    ),
)
