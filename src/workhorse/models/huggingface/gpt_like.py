"""Shared code for families like GPT-2: LayerNorm, ungated feed-forwards, fused projections.

The configs of these families name the same settings differently. A family maps the usual names to
its own names, so that the same functions can read and write it.
"""

from collections.abc import Mapping
from typing import Any

from workhorse.models.huggingface.family import Data, FieldPath
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import activation, written_activation
from workhorse.models.huggingface.moves import Rule, interleaved_by
from workhorse.nn import AttentionConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.embedding import EmbeddingConfig
from workhorse.nn.feedforward import MlpConfig
from workhorse.nn.positions.absolute import LearnedPositionConfig

GPT_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "attention_dropout": "attn_pdrop",
    "hidden_dropout": "resid_pdrop",
    "embedding_dropout": "embd_pdrop",
}
"""Usual key names, mapped to the names in GPT and its closest relatives."""

SUMMARY_KEYS = (
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)
"""Keys of a classification head, which GPT's configs also contain; they are ignored."""


def attention(hf: Fields, *, dropout: float = 0.0, **changes: Any) -> AttentionConfig:
    """Read multi-head attention from a config.

    Args:
        hf: the config.
        dropout: the family's default attention dropout.
        changes: fields of `AttentionConfig` to set.
    """
    given: Data = {
        "n_heads": hf.need("num_attention_heads", int),
        "dropout": hf.get("attention_dropout", dropout),
    }
    return AttentionConfig(**{**given, **changes})


def mlp(hf: Fields, default: str, **changes: Any) -> MlpConfig:
    """Read a feed-forward with biases from a config.

    Args:
        hf: the config.
        default: the family's default activation.
        changes: fields of `MlpConfig` to set.
    """
    given: Data = {
        "activation": activation(hf, default=default),
        "bias": True,
    }
    if "d_ff" not in changes:
        given["d_ff"] = hf.need("intermediate_size", int)
    return MlpConfig(**{**given, **changes})


def d_ff_or_fourfold(hf: Fields) -> int:
    """Read the width of the feed-forward; by default it is four times the width of the model."""
    return hf.optional("intermediate_size", int) or 4 * hf.need("hidden_size", int)


def learned_positions(hf: Fields, *, dropout: float = 0.0) -> EmbeddingConfig:
    """Read an embedding with learned positions; `dropout` is the family's default dropout."""
    return EmbeddingConfig(
        position=LearnedPositionConfig(), dropout=hf.get("embedding_dropout", dropout)
    )


def written(
    names: Mapping[str, str] = {}, *, gelu_tanh: str = "gelu_pytorch_tanh"
) -> dict[str, FieldPath]:
    """Return the `config.json` keys that GPT-like families share, with paths in our config.

    Args:
        names: usual key names, mapped to the family's names.
        gelu_tanh: the family's name for the tanh form of GELU.
    """
    paths: dict[str, FieldPath] = {
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
        "num_attention_heads": "block.attention.n_heads",
        "intermediate_size": "block.feed_forward.d_ff",
        "hidden_act": written_activation(gelu_tanh=gelu_tanh),
        "tie_word_embeddings": "head.tied",
    }
    return {names.get(key, key): path for key, path in paths.items()}


def kv_heads(block: BlockConfig) -> int:
    """Number of key-value heads in a block."""
    assert block.grouped is not None
    return block.grouped.n_kv_heads or block.grouped.n_heads


def fused_qkv(theirs: str) -> Rule:
    """Rule for a fused q/k/v tensor that stores each key-value head beside its query heads."""
    ours = tuple(f"layers.{{i}}.attention.{name}_proj" for name in "qkv")
    return interleaved_by(ours, theirs, groups=kv_heads)
