"""Granite with windows (IBM, Granite Swash, 2026): dense and with mixtures of experts.

Three of four layers have a window, and every head has a learned attention sink (2508.10925). Each
layer may have its own RoPE theta, or no position encoding.
"""

from collections.abc import Mapping

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.families.granite import (
    FEED_FORWARD,
    MIXED,
    MIXTURE,
    MULTIPLIED,
    SHARED_RULES,
    block,
    mixture,
    multiplied,
    shared_expert,
    shared_width,
)
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family, FieldPath
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, joined, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read the config of a dense Granite model with windows."""
    feed_forward = llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False))
    return _read(hf, feed_forward, eps=1e-5, n_kv_heads=4, tied=True)


def read_mixture(hf: Fields) -> nn.DecoderConfig:
    """Read the config of a Granite model with windows and mixtures of experts."""
    n_heads = hf.need("num_attention_heads", int)
    feed_forward = mixture(hf, shared=shared_expert(hf))
    return _read(hf, feed_forward, eps=1e-6, n_kv_heads=n_heads, tied=False)


def _read(
    hf: Fields, feed_forward: nn.FeedForwardConfig, *, eps: float, n_kv_heads: int, tied: bool
) -> nn.DecoderConfig:
    """Read a Granite decoder with windows; the keyword arguments are the family's defaults."""
    types = llama_like.layer_types(
        hf,
        llama_like.alternating(
            hf, (llama_like.FULL, llama_like.SLIDING, llama_like.SLIDING, llama_like.SLIDING)
        ),
    )
    thetas, window = _thetas(hf, len(types)), hf.optional("sliding_window", int, 128)
    rope = read_rope(hf)
    layers = [
        block(
            hf,
            feed_forward,
            eps=eps,
            n_kv_heads=hf.optional("num_key_value_heads", int, n_kv_heads),
            position=rope.replace(theta=theta) if theta else nn.NoPositionConfig(),
            window=window if kind == llama_like.SLIDING else None,
            sinks=True,
        )
        for kind, theta in zip(types, thetas, strict=True)
    ]
    ropes = _rotation_names(thetas)
    names = [
        llama_like.SHORT_NAMES[kind] + ropes[theta]
        for kind, theta in zip(types, thetas, strict=True)
    ]
    return multiplied(hf, layers, names=names, tied=tied)


def _thetas(hf: Fields, n_layers: int) -> list[float]:
    """Read the RoPE theta of each layer; 0 for a layer without RoPE."""
    thetas = hf.sequence("layer_rope_theta", float)
    if thetas is None:
        return [read_rope(hf).theta] * n_layers
    if len(thetas) != n_layers:
        raise ConfigError(
            f"{hf.where}: layer_rope_theta has length {len(thetas)} for {n_layers} layers; "
            "give one value per layer"
        )
    return thetas


def _rotation_names(thetas: list[float]) -> Mapping[float, str]:
    """Return a block-name suffix for each theta; empty if layers with RoPE share one theta."""
    turning = sorted({theta for theta in thetas if theta})
    numbers = {theta: f"_{number}" for number, theta in enumerate(turning, 1)}
    return (numbers if len(turning) > 1 else dict.fromkeys(turning, "")) | {0.0: "_no_rope"}


def layer_thetas(data: Data) -> list[float]:
    """Return `layer_rope_theta` for `config.json`: theta of each layer, 0 without RoPE."""
    return [layer["attention"]["position"].get("theta", 0.0) for layer in data["layers"]]


WINDOWED: dict[str, FieldPath] = {
    "sliding_window": llama_like.written_window,
    "layer_types": llama_like.written_layer_types,
    "layer_rope_theta": layer_thetas,
}
SINKS = same("layers.{i}.attention.kernel.sinks", "model.layers.{i}.self_attn.sinks")

HUGGING_FACE = (
    Family(
        model_type="granite_swa",
        architecture="GraniteSWAForCausalLM",
        read=read,
        keys=MULTIPLIED | WINDOWED | {"mlp_bias": "block.feed_forward.bias"},
        rules=instead(SINKS, base=llama_like.RULES),
    ),
    Family(
        model_type="granitemoe_swa",
        architecture="GraniteMoeSWAForCausalLM",
        read=read_mixture,
        keys=MIXED | WINDOWED | {"shared_intermediate_size": shared_width},
        rules=instead(
            SINKS,
            same(FEED_FORWARD + "router.proj", MIXTURE + "router"),
            joined(
                (
                    FEED_FORWARD + "experts.gate_proj.weight",
                    FEED_FORWARD + "experts.up_proj.weight",
                ),
                MIXTURE + "experts.gate_up_proj",
                dim=1,
            ),
            same(FEED_FORWARD + "experts.down_proj.weight", MIXTURE + "experts.down_proj"),
            *SHARED_RULES,
            base=llama_like.RULES,
        ),
    ),
)
