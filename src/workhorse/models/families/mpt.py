"""MPT: MosaicML's MPT-7B and MPT-30B (2023), as llm-foundry trains them."""

import math
from typing import Literal

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.errors import nearest
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import joined, same


def mpt(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    vocab_size: int = 50432,
    max_seq_len: int = 2048,
    max_bias: float = 8.0,
    clip: float | None = None,
) -> nn.DecoderConfig:
    """Build an MPT config: GPT-2's block with ALiBi, no biases, and LayerNorm in low precision."""
    norm = nn.LayerNormConfig(eps=1e-5, bias=False, precision="low")
    block = nn.PreNormConfig(
        norm=norm,
        attention=nn.AttentionConfig(
            n_heads=n_heads, position=nn.AlibiConfig(max_bias=max_bias), clip=clip
        ),
        feed_forward=nn.MlpConfig(d_ff=4 * d_model, activation="gelu"),
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        blocks={"main": block},
        final_norm=norm,
        head=nn.HeadConfig(tied=True),
        init=nn.HeInitConfig(embedding_std=math.sqrt(2 / d_model), residual="scaled"),
    )


NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
PRECISIONS: dict[str, Literal["low", "native"]] = {
    "low_precision_layernorm": "low",
    "layernorm": "native",
}
ALWAYS_ALIBI = "MPT in transformers always has ALiBi"
ATTENTION_OPTIONS = {
    "alibi": (True, ALWAYS_ALIBI),
    "attn_type": ("multihead_attention", "MPT in transformers always has multi-head attention"),
    "attn_uses_sequence_id": (False, "pass document ids to the decoder instead"),
    "prefix_lm": (False, "only causal attention can generate"),
    "qk_ln": (False, "MPT in transformers has no norms on queries and keys"),
    "rope": (False, ALWAYS_ALIBI),
}
"""Options of the original code that transformers ignores: only supported value, and reason."""


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an MPT config as transformers does, with fewer options than the original code.

    transformers ignores `alibi_bias_max`: its smallest ALiBi slope is always 2^-8. Here the key is
    used, as in the code released with the weights (MPT-7B-StoryWriter has 16). Such a model can be
    read but not written, because transformers would compute something else.
    """
    hf = hf.renamed(NAMES)
    hf.ignore("embedding_fraction", "emb_pdrop", "init_config", "init_device", "learned_pos_emb")
    hf.ignore("resid_pdrop", "tokenizer_name", "verbose")
    hf.refuse("expansion_ratio", 4, "MPT in transformers always has ratio 4")
    hf.refuse("no_bias", True, "MPT in transformers has no biases")
    hf.refuse("logit_scale", None, "transformers ignores it")
    options = _attention_options(hf)
    kind = hf.get("norm_type", "low_precision_layernorm")
    if kind not in PRECISIONS:
        raise ConfigError(f"{hf.where}: norm_type {kind!r} is unknown; {nearest(kind, PRECISIONS)}")
    norm = nn.LayerNormConfig(
        eps=hf.get("layer_norm_epsilon", 1e-5), bias=False, precision=PRECISIONS[kind]
    )
    dropout = options.get("attn_pdrop", 0.0)
    block = nn.PreNormConfig(
        norm=norm,
        attention=gpt_like.attention(
            hf,
            position=nn.AlibiConfig(max_bias=options.get("alibi_bias_max", 8.0)),
            scale=options.optional("softmax_scale", float),
            clip=options.optional("clip_qkv", float),
            dropout=dropout,
        ),
        feed_forward=nn.MlpConfig(d_ff=4 * hf.need("hidden_size", int), activation="gelu"),
        dropout=dropout,
    )
    return llama_like.decoder(hf, block, norm, tied=True)


def _attention_options(hf: Fields) -> Fields:
    """Read `attn_config`."""
    options = hf.section("attn_config") or Fields({})
    for key, (allowed, reason) in ATTENTION_OPTIONS.items():
        options.refuse(key, allowed, reason)
    options.ignore("attn_impl", "attn_pdrop", "alibi_bias_max", "clip_qkv", "softmax_scale")
    if unknown := options.unused():
        raise ConfigError(
            f"{options.where} has {unknown[0]!r}, which transformers ignores in MPT; remove it"
        )
    return options


def attention_options(data: Data) -> Data:
    """Return `attn_config` for `config.json`: the options of the attention."""
    ours = data["block"]["attention"]
    return {
        "alibi": True,
        "clip_qkv": ours["clip"],
        "softmax_scale": ours["scale"],
    }


def norm_type(data: Data) -> str:
    """Return `norm_type` for `config.json`: LayerNorm in low or in native precision."""
    return {ours: name for name, ours in PRECISIONS.items()}[data["final_norm"]["precision"]]


WITHOUT_KEY = ("intermediate_size", "hidden_act")
HUGGING_FACE = (
    Family(
        model_type="mpt",
        architecture="MptForCausalLM",
        read=read,
        keys={key: path for key, path in gpt_like.written(NAMES).items() if key not in WITHOUT_KEY}
        | {
            "attn_config": attention_options,
            "layer_norm_epsilon": "final_norm.eps",
            "norm_type": norm_type,
        },
        rules=(
            same("embedding.tokens", "transformer.wte"),
            joined(
                tuple(f"layers.{{i}}.attention.{name}_proj" for name in "qkv"),
                "transformer.blocks.{i}.attn.Wqkv",
            ),
            same("layers.{i}.attention.out_proj", "transformer.blocks.{i}.attn.out_proj"),
            same("layers.{i}.feed_forward.up_proj", "transformer.blocks.{i}.ffn.up_proj"),
            same("layers.{i}.feed_forward.down_proj", "transformer.blocks.{i}.ffn.down_proj"),
            same("layers.{i}.attention_norm", "transformer.blocks.{i}.norm_1"),
            same("layers.{i}.feed_forward_norm", "transformer.blocks.{i}.norm_2"),
            same("final_norm", "transformer.norm_f"),
            same("head.proj", "lm_head"),
        ),
    ),
)
