"""XGLM: Few-shot Learning with Multilingual Language Models (Lin et al., 2112.10668)."""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.families.biogpt import read_scaled, scale_embedding
from workhorse.models.families.opt import FAIRSEQ_OFFSET, decoder_rules
from workhorse.models.huggingface import gpt_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields

NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "attention_heads",
    "intermediate_size": "ffn_dim",
    "hidden_act": "activation_function",
    "hidden_dropout": "dropout",
    "initializer_range": "init_std",
}


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an XGLM config: GPT-2 with sinusoidal positions, all sines before all cosines.

    Raises:
        ConfigError: the width is odd, or `pad_token_id` is 2 or more: the row of a used position.
    """
    hf = hf.renamed(NAMES)
    if hf.need("hidden_size", int) % 2:
        raise ConfigError(
            f"{hf.where}: XGLM's positions need an even d_model; choose an even number"
        )
    if hf.get("pad_token_id", 1) >= FAIRSEQ_OFFSET:
        raise ConfigError(
            f"{hf.where}: pad_token_id must be below {FAIRSEQ_OFFSET} in XGLM, because its "
            "positions start there; remove it"
        )
    waves = nn.SinusoidalPositionConfig(
        layout="halves", spacing="half_minus_one", offset=FAIRSEQ_OFFSET
    )
    return read_scaled(hf, waves)


HUGGING_FACE = (
    Family(
        model_type="xglm",
        architecture="XGLMForCausalLM",
        read=read,
        keys=gpt_like.written(NAMES) | {"scale_embedding": scale_embedding},
        rules=decoder_rules("model."),
        ignored=(r".*\.embed_positions\.weights",),
    ),
)
