"""CTRL: A Conditional Transformer Language Model for Controllable Generation (1909.05858)."""

import math

from workhorse import nn
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import same

NAMES = gpt_like.GPT_NAMES | {"intermediate_size": "dff"}


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a CTRL config: the Transformer of 2017 with pre-norm blocks; the tied head has a bias.

    `layer_norm_epsilon` applies only to the final norm; no key sets the epsilon of other norms.
    """
    hf = hf.renamed(NAMES)
    hf.ignore("n_ctx")
    block = nn.PreNormConfig(
        norm=nn.LayerNormConfig(eps=1e-6),
        attention=gpt_like.attention(hf, qkv_bias=True, out_bias=True),
        feed_forward=gpt_like.mlp(hf, "relu", activation="relu"),
        dropout=hf.get("hidden_dropout", 0.1),
    )
    return llama_like.decoder(
        hf,
        block,
        nn.LayerNormConfig(eps=hf.get("layer_norm_epsilon", 1e-6)),
        tied=True,
        embedding=nn.EmbeddingConfig(
            position=nn.SinusoidalPositionConfig(layout="halves"),
            multiplier=math.sqrt(hf.need("hidden_size", int)),
            dropout=hf.get("embedding_dropout", 0.1),
        ),
        head={"bias": True},
    )


LAYER = "transformer.h.{i}."
HUGGING_FACE = (
    Family(
        model_type="ctrl",
        architecture="CTRLLMHeadModel",
        read=read,
        keys={
            key: path
            for key, path in gpt_like.written(NAMES).items()
            if key != "activation_function"
        }
        | {"layer_norm_epsilon": "final_norm.eps"},
        rules=(
            same("embedding.tokens", "transformer.w"),
            same("layers.{i}.attention.q_proj", LAYER + "multi_head_attention.Wq"),
            same("layers.{i}.attention.k_proj", LAYER + "multi_head_attention.Wk"),
            same("layers.{i}.attention.v_proj", LAYER + "multi_head_attention.Wv"),
            same("layers.{i}.attention.out_proj", LAYER + "multi_head_attention.dense"),
            same("layers.{i}.feed_forward.up_proj", LAYER + "ffn.0"),
            same("layers.{i}.feed_forward.down_proj", LAYER + "ffn.2"),
            same("layers.{i}.attention_norm", LAYER + "layernorm1"),
            same("layers.{i}.feed_forward_norm", LAYER + "layernorm2"),
            same("final_norm", "transformer.layernorm"),
            same("head.proj", "lm_head"),
        ),
        ignored=(r".*\.pos_encoding",),
    ),
)
