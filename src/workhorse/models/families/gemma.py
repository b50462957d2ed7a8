"""Gemma: Open Models Based on Gemini Research and Technology (Gemma Team, 2403.08295).

Also reads Gemma 2 (2408.00118), Gemma 3 (2503.19786) and VaultGemma (2510.15001).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def gemma(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_ff: int,
    head_dim: int = 256,
    vocab_size: int = 256_000,
    max_seq_len: int = 8192,
) -> nn.DecoderConfig:
    """Build a Gemma config: RMSNorm (1 + weight), GeGLU, wide heads, and a scaled embedding.

    The embedding is multiplied by `sqrt(d_model)`.
    """
    norm = nn.RMSNormConfig(eps=1e-6, offset=True, multiply="before_cast")
    block = nn.PreNormConfig(
        norm=norm,
        attention=nn.AttentionConfig(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            position=nn.RopeConfig(theta=10_000.0),
        ),
        feed_forward=nn.GatedMlpConfig(d_ff=d_ff, activation="gelu_tanh"),
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        embedding=nn.EmbeddingConfig(multiplier=math.sqrt(d_model), round_multiplier=True),
        blocks={"main": block},
        final_norm=norm,
        head=nn.HeadConfig(tied=True),
        init=nn.NormalInitConfig(std=0.02, residual="plain"),
    )


TANH = "gelu_pytorch_tanh"


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Gemma 1 config. Its first files say `gelu` but mean the tanh form of GELU."""
    hf.ignore("hidden_activation")
    gelu = llama_like.activation(hf, "hidden_act", TANH)
    norm, width, bias = _shared(hf)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 16),
            head_dim=width,
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=llama_like.gated_mlp(hf, activation="gelu_tanh" if gelu == "gelu" else gelu),
    )
    return llama_like.decoder(hf, block, norm, tied=True, embedding=_scaled(hf))


def read_gemma2(hf: Fields) -> nn.DecoderConfig:
    """Read a Gemma 2 config (2408.00118 §2): sandwich norms, capped scores, alternating windows."""
    return _capped(hf, nn.SandwichNormConfig)


def read_vaultgemma(hf: Fields) -> nn.DecoderConfig:
    """Read a VaultGemma config (2510.15001): Gemma 2 in pre-norm."""
    return _capped(hf, nn.PreNormConfig)


def _capped(
    hf: Fields, wiring: type[nn.PreNormConfig] | type[nn.SandwichNormConfig]
) -> nn.DecoderConfig:
    """Read a decoder with capped scores and logits, and a window in every other layer."""
    return _alternating(
        hf,
        wiring,
        llama_like.alternating(hf, (llama_like.SLIDING, llama_like.FULL)),
        cap=hf.optional("final_logit_softcapping", float, 30.0),
        softcap=hf.optional("attn_logit_softcapping", float, 50.0),
    )


def read_gemma3(hf: Fields) -> nn.DecoderConfig:
    """Read a Gemma 3 config (2503.19786 §2): norms on q and k, one of six layers is global.

    Local and global layers have separate RoPE settings. A RoPE scaling that is given only once
    applies to the global layers.
    """
    hf.ignore("_sliding_window_pattern")
    hf.refuse("attn_logit_softcapping", None, "transformers reads it but does not cap scores")
    types = [
        llama_like.FULL if last else llama_like.SLIDING
        for last in llama_like.every(hf, "sliding_window_pattern", 6)
    ]
    return _alternating(
        hf,
        nn.SandwichNormConfig,
        types,
        cap=hf.optional("final_logit_softcapping", float),
        qk_norm=nn.QKNormConfig(norm=_shared(hf)[0]),
        ropes={
            llama_like.FULL: read_rope(hf, theta=1e6, layer_type=llama_like.FULL, older="updates"),
            llama_like.SLIDING: _local_rope(hf),
        },
    )


def _local_rope(hf: Fields) -> nn.RopeConfig:
    key = "rope_local_base_freq"
    if hf.values.get("rope_parameters") is None:
        fraction = hf.get("partial_rotary_factor", 1.0)
        return nn.RopeConfig(theta=hf.get(key, 10_000.0), fraction=fraction)
    return read_rope(hf, theta_key=key, layer_type=llama_like.SLIDING, older="ignored")


def _alternating(
    hf: Fields,
    wiring: type[nn.PreNormConfig] | type[nn.SandwichNormConfig],
    types: Sequence[str],
    *,
    cap: float | None,
    ropes: Mapping[str, nn.RopeConfig] = {},
    **heads: Any,
) -> nn.DecoderConfig:
    """Read a decoder with local layers (with a window) and global layers.

    `types` is for a config that does not list the layer types; `ropes` has the RoPE settings of
    each type, if they differ.
    """
    norm, width, bias = _shared(hf)
    types = llama_like.layer_types(hf, types)
    window = hf.optional("sliding_window", int, 4096)

    def block(kind: str) -> nn.PreNormConfig | nn.SandwichNormConfig:
        return wiring(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 4),
                head_dim=width,
                scale=hf.positive("query_pre_attn_scalar", 256.0) ** -0.5,
                window=window if kind == llama_like.SLIDING else None,
                position=ropes[kind] if ropes else read_rope(hf),
                qkv_bias=bias,
                out_bias=bias,
                **heads,
            ),
            feed_forward=llama_like.gated_mlp(
                hf, activation=llama_like.activation(hf, "hidden_activation", TANH)
            ),
        )

    return llama_like.decoder(
        hf,
        [block(kind) for kind in types],
        norm,
        names=types,
        tied=True,
        embedding=_scaled(hf),
        head={"cap": cap},
    )


def _shared(hf: Fields) -> tuple[nn.RMSNormConfig, int, bool]:
    """Read settings of all Gemma versions: norm, head width, and True if attention has biases."""
    hf.refuse("use_bidirectional_attention", False, "only causal attention can generate")
    norm = llama_like.rms_norm(hf, offset=True, multiply="before_cast")
    return norm, hf.get("head_dim", 256), hf.get("attention_bias", False)


def _scaled(hf: Fields) -> nn.EmbeddingConfig:
    width = max(hf.need("hidden_size", int), 0)  # the decoder's own check refuses a negative width
    return nn.EmbeddingConfig(multiplier=math.sqrt(width), round_multiplier=width != 1)


def query_scalar(data: Data) -> int:
    """Return `query_pre_attn_scalar` as a whole number, computed from the scale of the scores."""
    return round(data["block"]["attention"]["scale"] ** -2)


SANDWICH = (
    same("layers.{i}.attention_output_norm", "model.layers.{i}.post_attention_layernorm"),
    same("layers.{i}.feed_forward_norm", "model.layers.{i}.pre_feedforward_layernorm"),
    same("layers.{i}.feed_forward_output_norm", "model.layers.{i}.post_feedforward_layernorm"),
)
GEMMA_KEYS = llama_like.KEYS | {"attention_bias": "block.attention.qkv_bias"}
ALTERNATING_KEYS = {key: path for key, path in GEMMA_KEYS.items() if key != "hidden_act"} | {
    "hidden_activation": llama_like.written_activation(),
    "query_pre_attn_scalar": query_scalar,
    "final_logit_softcapping": "head.cap",
    "sliding_window": llama_like.written_window,
    "layer_types": llama_like.written_layer_types,
}
CAPPED_KEYS = ALTERNATING_KEYS | {"attn_logit_softcapping": "block.attention.softcap"}

HUGGING_FACE = (
    Family(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        read=read,
        keys=GEMMA_KEYS,
        rules=llama_like.RULES,
    ),
    Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        read=read_gemma2,
        keys=CAPPED_KEYS,
        rules=instead(*SANDWICH, base=llama_like.RULES),
    ),
    Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        read=read_gemma3,
        keys={
            **ALTERNATING_KEYS,
            **llama_like.ROPE_BY_TYPE_KEYS,
            "rope_local_base_freq": lambda data: llama_like.written_rope_by_type(data)[
                llama_like.SLIDING
            ]["rope_theta"],
        },
        rules=instead(*SANDWICH, base=llama_like.RULES),
    ),
    Family(
        model_type="vaultgemma",
        architecture="VaultGemmaForCausalLM",
        read=read_vaultgemma,
        keys=CAPPED_KEYS,
        rules=instead(
            same("layers.{i}.feed_forward_norm", "model.layers.{i}.pre_feedforward_layernorm"),
            base=llama_like.RULES,
        ),
    ),
)
