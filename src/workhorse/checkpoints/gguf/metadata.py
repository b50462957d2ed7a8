"""The metadata of a model in a GGUF file: sizes, norms, rotations, kinds of layer."""

from collections.abc import Mapping
from typing import Any

from workhorse.checkpoints.gguf.architecture import Architecture
from workhorse.checkpoints.gguf.field_paths import MISSING, Data, FieldPath, look_up
from workhorse.checkpoints.gguf.rotation import rope_metadata
from workhorse.nn.positions.rope import RopeConfig

EVERYWHERE: dict[str, FieldPath] = {
    "vocab_size": "vocab_size",
    "context_length": "max_seq_len",
    "embedding_length": "d_model",
    "block_count": "n_layers",
    "feed_forward_length": "block.feed_forward.d_ff",
    "attention.head_count": "block.attention.n_heads",
    "attention.head_count_kv": "block.attention.n_kv_heads",
    "attention.key_length": "block.attention.head_dim",
    "attention.value_length": "block.attention.value_dim",
    "expert_count": "mixture.feed_forward.n_experts",
    "expert_used_count": "mixture.feed_forward.top_k",
}
OWN_CONFIG = "workhorse.config"
"""Our config as JSON; it must agree with the other keys, which llama.cpp reads."""
EPSILON = {
    "rms_norm": "attention.layer_norm_rms_epsilon",
    "layer_norm": "attention.layer_norm_epsilon",
}


def model_metadata(architecture: Architecture, data: Data) -> Mapping[str, Any]:
    """The keys in the section of the architecture.

    Args:
        architecture: it fits the model.
        data: of `readable`.
    """
    layers: list[Data] = data["layers"]
    mixtures = [layer for layer in layers if layer["feed_forward"]["kind"] == "moe"]
    data = data | {"block": layers[0], "mixture": next(iter(mixtures), {})}
    norm = data["block"]["norm"]
    keys: dict[str, object] = {**_rotation(layers), EPSILON[norm["kind"]]: norm["eps"]}
    if architecture.windows:
        keys |= _windows(layers)
    paths = {**EVERYWHERE, **architecture.keys}
    keys |= {key: look_up(data, path) for key, path in paths.items()}
    return {
        f"{architecture.name}.{key}": value
        for key, value in keys.items()
        if value is not None and value is not MISSING
    }


def _rotation(layers: list[Data]) -> dict[str, object]:
    """Rotation of layers without a window, and the theta of those with one."""
    turning = [layer["attention"] for layer in layers if _turns(layer)]
    if not turning:
        return {}
    wide = [attention for attention in turning if attention["window"] is None]
    local = [attention for attention in turning if attention["window"] is not None]
    first = (wide or local)[0]
    width = first["head_dim"] if "head_dim" in first else first["rope_dim"]
    keys = dict(rope_metadata(RopeConfig.from_dict(first["position"]), width))
    if local:
        keys["rope.freq_base_swa"] = local[0]["position"]["theta"]
    return keys


def _turns(layer: Data) -> bool:
    return layer["attention"]["position"]["kind"] == "rope"


def _windows(layers: list[Data]) -> dict[str, object]:
    windows: list[int | None] = [layer["attention"]["window"] for layer in layers]
    width = next((window for window in windows if window is not None), None)
    if width is None:
        return {}
    pattern = [window is not None for window in windows]
    return {"attention.sliding_window": width, "attention.sliding_window_pattern": pattern}
