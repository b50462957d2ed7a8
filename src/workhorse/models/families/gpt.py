"""GPT: Improving Language Understanding by Generative Pre-Training (Radford et al., 2018)."""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.errors import nearest
from workhorse.models.families.gpt2 import RULES
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same


def gpt(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    vocab_size: int = 40478,
    max_seq_len: int = 512,
    dropout: float = 0.1,
) -> nn.DecoderConfig:
    """Build a GPT config: post-norm blocks, learned positions, tanh GELU, and no final norm."""
    block = nn.PostNormConfig(
        norm=nn.LayerNormConfig(eps=1e-5),
        attention=nn.AttentionConfig(
            n_heads=n_heads, qkv_bias=True, out_bias=True, dropout=dropout
        ),
        feed_forward=nn.MlpConfig(d_ff=4 * d_model, activation="gelu_tanh", bias=True),
        dropout=dropout,
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        embedding=nn.EmbeddingConfig(position=nn.LearnedPositionConfig(), dropout=dropout),
        blocks={"main": block},
        head=nn.HeadConfig(tied=True),
        init=nn.NormalInitConfig(std=0.02, residual="plain"),
    )


ACTIVATIONS: dict[str, nn.ActivationName] = {
    "gelu": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activation of each value of `afn`. `gelu` is the tanh form, as in the original code."""


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a GPT config. Its feed-forward is always four times as wide as the model."""
    hf = hf.renamed(gpt_like.GPT_NAMES)
    hf.ignore("n_ctx", "n_special", "predict_special_tokens", *gpt_like.SUMMARY_KEYS)
    name = hf.get("afn", "gelu")
    if name not in ACTIVATIONS:
        raise ConfigError(f"{hf.where}: afn {name!r} is unknown; {nearest(name, ACTIVATIONS)}")
    block = nn.PostNormConfig(
        norm=nn.LayerNormConfig(eps=hf.get("layer_norm_epsilon", 1e-5)),
        attention=gpt_like.attention(hf, dropout=0.1, qkv_bias=True, out_bias=True),
        feed_forward=nn.MlpConfig(
            d_ff=4 * hf.need("hidden_size", int), activation=ACTIVATIONS[name], bias=True
        ),
        dropout=hf.get("hidden_dropout", 0.1),
    )
    return llama_like.decoder(
        hf,
        block,
        nn.NoNormConfig(),
        tied=True,
        embedding=gpt_like.learned_positions(hf, dropout=0.1),
    )


def afn(data: Data) -> str:
    """Return `afn` for `config.json`: the first name of the activation in `ACTIVATIONS`."""
    names = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return names[data["block"]["feed_forward"]["activation"]]


WITHOUT_KEY = ("n_inner", "activation_function")
HUGGING_FACE = (
    Family(
        model_type="openai-gpt",
        architecture="OpenAIGPTLMHeadModel",
        read=read,
        keys={
            key: path
            for key, path in gpt_like.written(gpt_like.GPT_NAMES).items()
            if key not in WITHOUT_KEY
        }
        | {"afn": afn, "layer_norm_epsilon": "block.norm.eps"},
        rules=instead(
            same("embedding.tokens", "transformer.tokens_embed"),
            same("embedding.positions.table", "transformer.positions_embed"),
            base=RULES,
        ),
        ignored=(r".*\.attn\.bias", r".*position_ids"),
    ),
)
