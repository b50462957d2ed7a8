"""GPT-Neo: Large Scale Autoregressive Language Modeling with Mesh-Tensorflow (Black, 2021)."""

from typing import Any, cast

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import same

NAMES = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_act": "activation_function",
    "hidden_dropout": "resid_dropout",
    "embedding_dropout": "embed_dropout",
}


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a GPT-Neo config: GPT-2 with windows in some layers, and unscaled scores.

    There are no biases on queries, keys and values.
    """
    hf = hf.renamed(NAMES)
    hf.ignore("classifier_dropout", *gpt_like.SUMMARY_KEYS)
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_epsilon", 1e-5))
    kinds = _kinds(hf)
    window = hf.get("window_size", 256)

    def block(kind: str) -> nn.PreNormConfig:
        return nn.PreNormConfig(
            norm=norm,
            attention=gpt_like.attention(
                hf, scale=1.0, out_bias=True, window=window if kind == "local" else None
            ),
            feed_forward=gpt_like.mlp(hf, "gelu_new", d_ff=gpt_like.d_ff_or_fourfold(hf)),
            dropout=hf.get("hidden_dropout", 0.0),
        )

    blocks = [block(kind) for kind in kinds]
    embedding = gpt_like.learned_positions(hf)
    return llama_like.decoder(hf, blocks, norm, names=kinds, tied=True, embedding=embedding)


def _kinds(hf: Fields) -> list[str]:
    """Read the kind of each layer's attention: `global` or `local` (with a window)."""
    hf.ignore("attention_types")
    n_layers = hf.need("num_hidden_layers", int)
    kinds = hf.sequence("attention_layers", str)
    if kinds is None:
        stretches = hf.values.get("attention_types") or [[["global", "local"], 12]]
        kinds = _expanded(stretches, n_layers)
    if len(kinds) != n_layers or not {"global", "local"}.issuperset(kinds):
        raise ConfigError(
            f"{hf.where}: attention_types does not give global or local for {n_layers} layers; "
            'write it as [[["global", "local"], repetitions], …]'
        )
    return kinds


def _expanded(stretches: Any, at_most: int) -> list[str]:
    """Expand a list of `[kinds, repetitions]` into kinds; empty if the list is malformed."""
    kinds: list[str] = []
    try:
        for names, count in cast(list[tuple[list[Any], int]], stretches):
            kinds += [str(name) for name in names] * min(count, at_most + 1)
    except (TypeError, ValueError):
        return []
    return kinds


def written_kinds(data: Data) -> list[str]:
    """Return `attention_layers` for `config.json`: `global` or `local` for each layer."""
    return ["local" if layer["attention"]["window"] else "global" for layer in data["layers"]]


def attention_types(data: Data) -> list[Any]:
    """Return `attention_types` for `config.json`: the layer kinds with repetitions."""
    return [[written_kinds(data), 1]]


LAYER = "transformer.h.{i}."
HUGGING_FACE = (
    Family(
        model_type="gpt_neo",
        architecture="GPTNeoForCausalLM",
        read=read,
        keys=gpt_like.written(NAMES, gelu_tanh="gelu_new")
        | {
            "attention_types": attention_types,
            "attention_layers": written_kinds,
            "window_size": llama_like.written_window,
            "layer_norm_epsilon": "final_norm.eps",
        },
        rules=(
            same("embedding.tokens", "transformer.wte"),
            same("embedding.positions.table", "transformer.wpe"),
            same("layers.{i}.attention.q_proj", LAYER + "attn.attention.q_proj"),
            same("layers.{i}.attention.k_proj", LAYER + "attn.attention.k_proj"),
            same("layers.{i}.attention.v_proj", LAYER + "attn.attention.v_proj"),
            same("layers.{i}.attention.out_proj", LAYER + "attn.attention.out_proj"),
            same("layers.{i}.feed_forward.up_proj", LAYER + "mlp.c_fc"),
            same("layers.{i}.feed_forward.down_proj", LAYER + "mlp.c_proj"),
            same("layers.{i}.attention_norm", LAYER + "ln_1"),
            same("layers.{i}.feed_forward_norm", LAYER + "ln_2"),
            same("final_norm", "transformer.ln_f"),
            same("head.proj", "lm_head"),
        ),
        ignored=(r".*\.attn\.attention\.(bias|masked_bias)",),
    ),
)
