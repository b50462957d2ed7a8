"""ModernBERT (2412.13663) as a decoder: Seq vs Seq, the Ettin suite (2507.11412)."""

from typing import Any

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, joined, same
from workhorse.models.huggingface.rotation import read_rope

THETAS = {
    llama_like.FULL: ("global_rope_theta", 160_000.0),
    llama_like.SLIDING: ("local_rope_theta", 10_000.0),
}
"""For each layer type: the key of theta in older files, and the default theta."""


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a ModernBERT decoder config: a norm on the embedding; one of three layers is global."""
    hf.ignore(*DESCRIPTIONS, *(key for key, _ in THETAS.values()))
    norm = nn.LayerNormConfig(eps=hf.get("norm_eps", 1e-5), bias=hf.get("norm_bias", False))
    first = llama_like.every(hf, "global_attn_every_n_layers", 3, offset=0)
    types = llama_like.layer_types(
        hf, [llama_like.FULL if one else llama_like.SLIDING for one in first]
    )
    window = _window(hf)
    bias = hf.get("attention_bias", False)

    def block(kind: str, n: int) -> nn.PreNormConfig:
        key, theta = THETAS[kind]
        return nn.PreNormConfig(
            norm=norm,
            norm_attention=n > 0,
            attention=llama_like.attention(
                hf,
                position=read_rope(
                    hf,
                    theta=theta,
                    theta_key=key,
                    layer_type=kind,
                    older="updates",
                    precision="float32",
                ),
                window=window if kind == llama_like.SLIDING else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=llama_like.gated_mlp(
                hf,
                activation=llama_like.activation(hf, "hidden_activation", "gelu"),
                bias=hf.get("mlp_bias", False),
                dropout=hf.get("mlp_dropout", 0.0),
            ),
        )

    return llama_like.decoder(
        hf,
        [block(kind, n) for n, kind in enumerate(types)],
        norm,
        names=[llama_like.SHORT_NAMES[kind] if n else "first" for n, kind in enumerate(types)],
        tied=True,
        embedding=nn.EmbeddingConfig(norm=norm, dropout=hf.get("embedding_dropout", 0.0)),
        head=_head(hf, norm),
    )


DESCRIPTIONS = (
    "causal_mask",
    "classifier_dropout",
    "classifier_pooling",
    "cls_token_id",
    "deterministic_flash_attn",
    "initializer_cutoff_factor",
    "is_causal",
    "layer_norm_eps",
    "mask_token_id",
    "position_embedding_type",
    "reference_compile",
    "repad_logits_with_grad",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "unk_token_id",
)
"""Keys for the ModernBERT encoder and for training; they do not affect the decoder."""


def _window(hf: Fields) -> int:
    """Read the window: half of `local_attention`, which counts both directions of the encoder."""
    both = hf.get("local_attention", 128)
    window = hf.get("sliding_window", both // 2)
    if window < 1:
        raise ConfigError(
            f"{hf.where}: local_attention={both} gives an empty window; set it to 2 or more"
        )
    return window


def _head(hf: Fields, norm: nn.LayerNormConfig) -> dict[str, Any]:
    transform = nn.HeadTransformConfig(
        activation=llama_like.activation(hf, "classifier_activation", "gelu"),
        bias=hf.get("classifier_bias", False),
        norm=norm,
    )
    return {"bias": hf.get("decoder_bias", True), "transform": transform}


def both_directions(data: Data) -> int:
    """Return `local_attention` for `config.json`: twice the window."""
    return 2 * llama_like.written_window(data)


OWN_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "num_attention_heads",
    "intermediate_size",
    "tie_word_embeddings",
)
THEIRS = "model.layers.{i}."

HUGGING_FACE = (
    Family(
        model_type="modernbert-decoder",
        architecture="ModernBertDecoderForCausalLM",
        read=read,
        keys={
            **{key: llama_like.KEYS[key] for key in OWN_KEYS},
            "hidden_activation": llama_like.written_activation(),
            "norm_eps": "final_norm.eps",
            "norm_bias": "final_norm.bias",
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
            "decoder_bias": "head.bias",
            "classifier_bias": "head.transform.bias",
            "classifier_activation": llama_like.written_activation("head.transform.activation"),
            "local_attention": both_directions,
            "layer_types": llama_like.written_layer_types,
            "rope_parameters": llama_like.written_rope_by_type,
            "pad_token_id": lambda _: 0,  # the transformers class does not accept null
            "bos_token_id": lambda _: 0,
        },
        rules=instead(
            same("embedding.tokens", "model.embeddings.tok_embeddings"),
            same("embedding.norm", "model.embeddings.norm"),
            *(
                same(f"layers.{{i}}.attention.{name}_proj", f"{THEIRS}attn.{name}_proj")
                for name in "qkv"
            ),
            same("layers.{i}.attention.out_proj", THEIRS + "attn.Wo"),
            joined(
                ("layers.{i}.feed_forward.gate_proj", "layers.{i}.feed_forward.up_proj"),
                THEIRS + "mlp.Wi",
            ),
            same("layers.{i}.feed_forward.down_proj", THEIRS + "mlp.Wo"),
            same("layers.{i}.attention_norm", THEIRS + "attn_norm"),
            same("layers.{i}.feed_forward_norm", THEIRS + "mlp_norm"),
            same("final_norm", "model.final_norm"),
            same("head.transform.0", "lm_head.dense"),
            same("head.transform.2", "lm_head.norm"),
            same("head.proj", "decoder"),
            base=llama_like.RULES,
        ),
    ),
)
