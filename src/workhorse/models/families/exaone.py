"""EXAONE 4.0: Unified Large Language Models (LG AI Research, 2507.11407)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an EXAONE 4 config: norms on sub-layer outputs, q and k; windows in most layers.

    If some layers have a window, the other layers have no position encoding.
    """
    hf.refuse("reorder_and_qk_norm", True, "every model of this type has these norms")
    norm, rope = llama_like.rms_norm(hf, eps=1e-5), read_rope(hf)
    window = hf.optional("sliding_window", int, 4096)
    types = llama_like.layer_types(hf, _types(hf, window))
    hf.ignore("sliding_window_pattern")

    def block(kind: str) -> nn.ReorderedNormConfig:
        turns = kind == llama_like.SLIDING or window is None
        return nn.ReorderedNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 32),
                position=rope if turns else nn.NoPositionConfig(),
                window=window if kind == llama_like.SLIDING else None,
                qk_norm=nn.QKNormConfig(norm=norm),
            ),
            feed_forward=llama_like.gated_mlp(hf),
        )

    return llama_like.decoder(hf, [block(kind) for kind in types], norm, names=types)


def _types(hf: Fields, window: int | None) -> list[str]:
    """Return the layer types of a file without `layer_types`."""
    if window is None or hf.values.get("layer_types") is not None:
        return [llama_like.FULL] * hf.need("num_hidden_layers", int)
    return [
        llama_like.FULL if last else llama_like.SLIDING
        for last in llama_like.every(hf, "sliding_window_pattern", 4)
    ]


def window_or_null(data: Data) -> int | None:
    """Return `sliding_window` for `config.json`; null if no layer has a window."""
    windows = (layer["attention"]["window"] for layer in data["layers"])
    return next((window for window in windows if window), None)


HUGGING_FACE = (
    Family(
        model_type="exaone4",
        architecture="Exaone4ForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {"sliding_window": window_or_null, "layer_types": llama_like.written_layer_types},
        rules=instead(
            same("layers.{i}.attention_norm", "model.layers.{i}.post_attention_layernorm"),
            same("layers.{i}.feed_forward_norm", "model.layers.{i}.post_feedforward_layernorm"),
            base=llama_like.RULES,
        ),
    ),
)
