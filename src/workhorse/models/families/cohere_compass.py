"""The language model of North Micro Vision (Cohere, 2026), a multimodal model."""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.families.cohere import COHERE_KEYS, COHERE_RULES, layer_norm
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.rotation import ROPE_KEYS, read_rope, written_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Compass text config: Command R; each layer type has its own window and RoPE.

    RoPE pairs the two halves of a head. A text token has the same position in time, height and
    width, so the three sections of the multimodal RoPE use the same positions.
    """
    hf.ignore("head_dim", "pooling")  # derived from other keys; for classifiers
    norm, bias = layer_norm(hf), hf.get("attention_bias", False)
    types = llama_like.layer_types(hf, [llama_like.FULL] * hf.need("num_hidden_layers", int))
    window = hf.get("sliding_window", 4096)

    def block(kind: str) -> nn.ParallelConfig:
        return nn.ParallelConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                head_dim=None,
                position=_position(hf, kind),
                window=window if kind == llama_like.SLIDING else None,
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
        head={"multiplier": hf.get("logit_scale", 1.0)},
    )


def _position(hf: Fields, kind: str) -> nn.RopeConfig | nn.NoPositionConfig:
    """Read the RoPE settings of a layer type; null means layers without position encoding."""
    rotations = hf.section("rope_parameters")
    if rotations is None or kind not in rotations.values:
        raise ConfigError(
            f"{hf.where}: rope_parameters has no {kind!r}; add RoPE settings, or null for none"
        )
    rotation = rotations.section(kind)
    if not rotation:
        return nn.NoPositionConfig()
    rotation.ignore("mrope_section")  # sections have the same positions for text
    return read_rope(hf, layer_type=kind)


def rotations(data: Data) -> Data:
    """Return `rope_parameters` for `config.json`: by layer type, settings, or null without RoPE."""
    positions: Data = {}
    for kind, layer in zip(llama_like.written_layer_types(data), data["layers"], strict=True):
        position = layer["attention"]["position"]
        positions[kind] = written_rope(position) if position["kind"] == "rope" else None
    return positions


HUGGING_FACE = (
    Family(
        model_type="cohere_compass_text",
        architecture="CohereCompassForCausalLM",
        read=read,
        keys={key: path for key, path in COHERE_KEYS.items() if key not in ROPE_KEYS}
        | {
            "rope_parameters": rotations,
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
        },
        rules=COHERE_RULES,
    ),
)
