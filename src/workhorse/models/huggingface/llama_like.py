"""Shared code for families like LLaMA, and for latent attention: config readers and tensor rules.

A family's reader calls these functions and overrides the fields that differ.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from workhorse.config.base import ConfigError
from workhorse.errors import nearest
from workhorse.models.huggingface.family import Data, FieldPath, equals
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import Rule, interleaved_by, joined, same
from workhorse.models.huggingface.rotation import ROPE_KEYS, older_scaling, read_rope, written_rope
from workhorse.nn import AttentionConfig, DecoderConfig
from workhorse.nn.attention.latent import LatentAttentionConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.embedding import HeadConfig
from workhorse.nn.feedforward import ActivationName, GatedMlpConfig
from workhorse.nn.init import NormalInitConfig
from workhorse.nn.norms import NormConfig, RMSNormConfig
from workhorse.nn.positions.rope import YarnScalingConfig


def latent_attention(
    hf: Fields, *, neighbours: bool, precision: Literal["native", "float32"] = "native"
) -> LatentAttentionConfig:
    """Read the multi-head latent attention of DeepSeek-V2 from a config.

    Args:
        hf: the config.
        neighbours: True if RoPE pairs adjacent features; False if it pairs the two halves.
        precision: precision in which RoPE is computed.
    """
    # No effect: every head has its own keys, and the widths follow from other config keys.
    hf.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    bias = hf.get("attention_bias", False)
    nope_dim, rope_dim = hf.get("qk_nope_head_dim", 128), hf.get("qk_rope_head_dim", 64)
    position = read_rope(hf, pairing="interleaved" if neighbours else "half", precision=precision)
    yarn, scale = position.scaling, None
    if isinstance(yarn, YarnScalingConfig) and yarn.mscale_all_dim:
        scale = yarn.growth(yarn.mscale_all_dim) ** 2 / math.sqrt(nope_dim + rope_dim)
    return LatentAttentionConfig(
        n_heads=hf.need("num_attention_heads", int),
        q_rank=hf.optional("q_lora_rank", int, 1536),
        kv_rank=hf.get("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=hf.get("v_head_dim", 128),
        position=position,
        norm=RMSNormConfig(eps=1e-6),  # independent of `rms_norm_eps`
        scale=scale,
        qkv_bias=bias,
        out_bias=bias,
        dropout=hf.get("attention_dropout", 0.0),
    )


LATENT_KEYS: dict[str, FieldPath] = {
    "num_key_value_heads": "block.attention.n_heads",
    "q_lora_rank": "block.attention.q_rank",
    "kv_lora_rank": "block.attention.kv_rank",
    "qk_nope_head_dim": "block.attention.nope_dim",
    "qk_rope_head_dim": "block.attention.rope_dim",
    "v_head_dim": "block.attention.value_dim",
    "attention_bias": "block.attention.qkv_bias",
}
"""Usual keys of latent attention, with the paths of their values in our config."""
PAIRING_KEYS: dict[str, FieldPath] = {
    "rope_interleave": equals("block.attention.position.pairing", "interleaved"),
}
"""Additional key of models that may use either RoPE pairing. DeepSeek-V2 lacks it, because it
always pairs adjacent features."""


def _n_heads(block: BlockConfig) -> int:
    return block.attention.n_heads


OURS, THEIRS = "layers.{i}.attention.", "model.layers.{i}.self_attn."
LATENT_RULES: tuple[Rule, ...] = (
    same(OURS + "q_down_proj", THEIRS + "q_a_proj"),
    same(OURS + "q_norm", THEIRS + "q_a_layernorm"),
    same(OURS + "q_up_proj", THEIRS + "q_b_proj"),
    joined((OURS + "kv_down_proj", OURS + "k_rope_proj"), THEIRS + "kv_a_proj_with_mqa"),
    same(OURS + "kv_norm", THEIRS + "kv_a_layernorm"),
    interleaved_by((OURS + "k_up_proj", OURS + "v_up_proj"), THEIRS + "kv_b_proj", _n_heads),
)
"""Tensor rules of latent attention. Put them before LLaMA's rules, because they replace some."""


ACTIVATIONS: dict[str, ActivationName] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "xielu": "xielu",
}
"""transformers' names of activations, mapped to ours. If several names mean the same activation,
the first one is written."""
WRITTEN_ACTIVATIONS = {ours: name for name, ours in reversed(ACTIVATIONS.items())}


def activation(hf: Fields, key: str = "hidden_act", default: str = "silu") -> ActivationName:
    """Read the activation of a config.

    Raises:
        ConfigError: the name is unknown.
    """
    name = hf.get(key, default)
    if name not in ACTIVATIONS:
        raise ConfigError(f"{hf.where}: {key} {name!r} is unknown; {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def written_activation(
    path: str = "block.feed_forward.activation", gelu_tanh: str = "gelu_pytorch_tanh"
) -> FieldPath:
    """Return a function that gives transformers' name of the activation at `path` of a config.

    `gelu_tanh` is the family's name for the tanh form of GELU.
    """
    names = WRITTEN_ACTIVATIONS | {"gelu_tanh": gelu_tanh}

    def write(data: Data) -> object:
        value: Any = data
        for part in path.split("."):
            value = value[part]
        return names[value]

    return write


def rms_norm(hf: Fields, **changes: Any) -> RMSNormConfig:
    """Read an RMSNorm from a config; `changes` are fields of `RMSNormConfig` to set."""
    return RMSNormConfig(eps=hf.get("rms_norm_eps", changes.pop("eps", 1e-6)), **changes)


def attention(hf: Fields, **changes: Any) -> AttentionConfig:
    """Read grouped-query attention with RoPE; `changes` are fields of `AttentionConfig` to set."""
    n_heads = hf.need("num_attention_heads", int)
    given: Data = {
        "n_heads": n_heads,
        "n_kv_heads": hf.get("num_key_value_heads", n_heads),
        "head_dim": hf.optional("head_dim", int),
        "dropout": hf.get("attention_dropout", 0.0),
    }
    if "position" not in changes:
        given["position"] = read_rope(hf)
    return AttentionConfig(**{**given, **changes})


def gated_mlp(hf: Fields, **changes: Any) -> GatedMlpConfig:
    """Read a gated feed-forward from a config; `changes` are fields of `GatedMlpConfig` to set."""
    given: Data = {} if "d_ff" in changes else {"d_ff": hf.need("intermediate_size", int)}
    if "activation" not in changes:
        given["activation"] = activation(hf)
    return GatedMlpConfig(**given, **changes)


def decoder(
    hf: Fields,
    layers: BlockConfig | Sequence[BlockConfig],
    final_norm: NormConfig,
    *,
    names: Sequence[str] = (),
    tied: bool = False,
    head: Mapping[str, Any] = {},
    **changes: Any,
) -> DecoderConfig:
    """Make a decoder's config from its layers and the usual keys of a config.

    Args:
        hf: the config.
        layers: block of each layer, or one block for all layers.
        final_norm: norm before the head.
        names: block name of each layer, if layers differ; `SHORT_NAMES` shortens names from
            `layer_types`.
        tied: the family's default of `tie_word_embeddings`.
        head: fields of `HeadConfig` to set.
        changes: further fields of `DecoderConfig` to set.
    """
    n_layers = hf.need("num_hidden_layers", int)
    given: Data = {
        "vocab_size": hf.need("vocab_size", int),
        "d_model": hf.need("hidden_size", int),
        "n_layers": n_layers,
        "final_norm": final_norm,
        "head": HeadConfig(tied=hf.get("tie_word_embeddings", tied), **head),
        "init": NormalInitConfig(std=hf.get("initializer_range", 0.02), residual="plain"),
    }
    if "max_seq_len" not in changes:
        given["max_seq_len"] = hf.need("max_position_embeddings", int)
    if isinstance(layers, Sequence):
        given |= pattern_of([SHORT_NAMES.get(name, name) for name in names], layers)
    else:
        given["blocks"] = {"main": layers}
    return DecoderConfig(**{**given, **changes})


def pattern_of(names: Sequence[str], layers: Sequence[BlockConfig]) -> Data:
    """Return `blocks` and `pattern` of `DecoderConfig` for a list of layers.

    There is one block for each different name, and the pattern is the shortest that repeats.
    """
    blocks = dict(zip(names, layers, strict=True))
    if len(blocks) == 1:
        return {"blocks": {"main": layers[0]}}
    tiles = (
        names[:period]
        for period in range(1, len(names) + 1)
        if all(name == names[n % period] for n, name in enumerate(names))
    )
    return {"blocks": blocks, "pattern": tuple(next(tiles, ()))}


SLIDING, FULL = "sliding_attention", "full_attention"
SHORT_NAMES = {SLIDING: "local", FULL: "global", "chunked_attention": "local"}


def layer_types(hf: Fields, default: Iterable[str], local: str = SLIDING) -> list[str]:
    """Read each layer's kind of attention, by transformers' names.

    Args:
        hf: the config.
        default: kinds for a config that does not list them.
        local: name of layers with a window or chunks; the other layers are `FULL`.

    Raises:
        ConfigError: the list has another length than the layers, or a kind is unknown.
    """
    n_layers = hf.need("num_hidden_layers", int)
    given = hf.sequence("layer_types", str)
    types = list(default) if given is None else given
    if len(types) != n_layers:
        raise ConfigError(
            f"{hf.where}: layer_types has length {len(types)} for {n_layers} layers; "
            "give one value per layer"
        )
    for name in types:
        if name not in (local, FULL):
            remedy = nearest(name, (local, FULL))
            raise ConfigError(f"{hf.where}: layer type {name!r} is unknown; {remedy}")
    return types


def alternating(hf: Fields, kinds: Sequence[str]) -> list[str]:
    """Repeat a sequence of layer kinds over all layers."""
    return [kinds[n % len(kinds)] for n in range(hf.need("num_hidden_layers", int))]


def every(hf: Fields, key: str, default: int, *, offset: int = 1) -> list[bool]:
    """For each layer, True if its index plus `offset` is a multiple of the value of `key`.

    Raises:
        ConfigError: the value is not a whole number above zero.
    """
    period = hf.positive(key, default)
    return [(n + offset) % period == 0 for n in range(hf.need("num_hidden_layers", int))]


def written_layer_types(data: Data) -> list[str]:
    """Return `layer_types` for `config.json`: sliding for layers with a window, else full."""
    return [SLIDING if layer["attention"]["window"] else FULL for layer in data["layers"]]


def written_window(data: Data) -> int:
    """Return `sliding_window` for `config.json`: the window of the first layer that has one."""
    windows = (cast(int | None, layer["attention"]["window"]) for layer in data["layers"])
    return [window for window in windows if window][0]  # noqa: RUF015 an IndexError means: none


def written_rope_by_type(data: Data) -> Data:
    """Return `rope_parameters` for `config.json`, with separate settings for each layer type."""
    types = written_layer_types(data)
    firsts = {kind: data["layers"][types.index(kind)] for kind in (SLIDING, FULL) if kind in types}
    return {kind: written_rope(layer["attention"]["position"]) for kind, layer in firsts.items()}


ROPE_BY_TYPE_KEYS: dict[str, FieldPath] = {
    "rope_parameters": written_rope_by_type,
    "rope_theta": lambda data: written_rope_by_type(data)[FULL]["rope_theta"],
    "rope_scaling": lambda data: older_scaling(written_rope_by_type(data)[FULL]),
}
"""Keys for RoPE settings that differ between layers with and without a window. `rope_theta` and
`rope_scaling`, the keys before transformers 5, are only for layers without a window."""

KEYS: dict[str, FieldPath] = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
    "num_attention_heads": "block.attention.n_heads",
    "num_key_value_heads": "block.attention.n_kv_heads",
    "head_dim": "block.attention.head_dim",
    "intermediate_size": "block.feed_forward.d_ff",
    "hidden_act": written_activation(),
    "rms_norm_eps": "final_norm.eps",
    "tie_word_embeddings": "head.tied",
    **ROPE_KEYS,
}
"""Usual keys of `config.json`, with the paths of their values in our config."""

RULES: tuple[Rule, ...] = (
    same("embedding.tokens", "model.embed_tokens"),
    same("layers.{i}.attention.q_proj", "model.layers.{i}.self_attn.q_proj"),
    same("layers.{i}.attention.k_proj", "model.layers.{i}.self_attn.k_proj"),
    same("layers.{i}.attention.v_proj", "model.layers.{i}.self_attn.v_proj"),
    same("layers.{i}.attention.out_proj", "model.layers.{i}.self_attn.o_proj"),
    same("layers.{i}.attention.q_norm", "model.layers.{i}.self_attn.q_norm"),
    same("layers.{i}.attention.k_norm", "model.layers.{i}.self_attn.k_norm"),
    same("layers.{i}.feed_forward.gate_proj", "model.layers.{i}.mlp.gate_proj"),
    same("layers.{i}.feed_forward.up_proj", "model.layers.{i}.mlp.up_proj"),
    same("layers.{i}.feed_forward.down_proj", "model.layers.{i}.mlp.down_proj"),
    same("layers.{i}.attention_norm", "model.layers.{i}.input_layernorm"),
    same("layers.{i}.feed_forward_norm", "model.layers.{i}.post_attention_layernorm"),
    same("final_norm", "model.norm"),
    same("head.proj", "lm_head"),
)
"""Tensor rules of LLaMA; a family that differs replaces some of them with `instead`."""
