"""SmolLM3 (Hugging Face, 2025): LLaMA without positions in every fourth layer.

Layers without positions: RoPE to NoRoPE and Back Again, 2501.18795.
"""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a SmolLM3 config: LLaMA with layers that differ in RoPE and window."""
    hf.ignore("max_window_layers")  # the layer types contain it
    turning = _turning(hf)
    window = hf.optional("sliding_window", int)
    windowed = hf.get("use_sliding_window", False) and window is not None
    types = llama_like.layer_types(
        hf, [llama_like.SLIDING if windowed and not turns else llama_like.FULL for turns in turning]
    )
    norm, rope = llama_like.rms_norm(hf), read_rope(hf, theta=2e6)
    bias = hf.get("attention_bias", False)

    def block(kind: str, turns: int) -> nn.PreNormConfig:
        return nn.PreNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.optional("num_key_value_heads", int, 4),
                position=rope if turns else nn.NoPositionConfig(),
                window=window if kind == llama_like.SLIDING else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False)),
        )

    layers = list(zip(types, turning, strict=True))
    names = [
        ("rope" if turns else "no_rope") + ("_local" if kind == llama_like.SLIDING else "")
        for kind, turns in layers
    ]
    return llama_like.decoder(hf, [block(*layer) for layer in layers], norm, names=names, tied=True)


def _turning(hf: Fields) -> list[int]:
    """Read `no_rope_layers`: despite the name, 1 for layers with RoPE and 0 for the others."""
    given = hf.sequence("no_rope_layers", int)
    without = llama_like.every(hf, "no_rope_layer_interval", 4)
    if given is not None and len(given) != len(without):
        raise ConfigError(
            f"{hf.where}: no_rope_layers has length {len(given)} for {len(without)} layers; "
            "give one value per layer"
        )
    return [int(not one) for one in without] if given is None else given


def turning(data: Data) -> list[int]:
    """Return `no_rope_layers` for `config.json`: 1 for layers with RoPE, 0 for the others."""
    return [int(layer["attention"]["position"]["kind"] == "rope") for layer in data["layers"]]


HUGGING_FACE = (
    Family(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        read=read,
        keys={
            **llama_like.KEYS,
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
            "no_rope_layers": turning,
            "use_sliding_window": lambda data: (
                llama_like.SLIDING in llama_like.written_layer_types(data)
            ),
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
        },
        rules=llama_like.RULES,
    ),
)
