"""Youtu-LLM (2512.24618)."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    KEYS,
    LATENT_KEYS,
    LATENT_RULES,
    PAIRING_KEYS,
    RULES,
    decoder,
    gated_mlp,
    latent_attention,
    rms_norm,
)
from workhorse.models.huggingface.moves import instead
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import PreNormConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a Youtu-LLM config: DeepSeek-V3's attention in a dense model."""
    hf.ignore("embedding_initializer_range")
    hf.refuse("mlp_bias", False, "Youtu-LLM in transformers has no feed-forward biases")
    norm = rms_norm(hf)
    neighbours = hf.optional("rope_interleave", bool, True) or False
    block = PreNormConfig(
        norm=norm,
        attention=latent_attention(hf, neighbours=neighbours),
        feed_forward=gated_mlp(hf),
    )
    return decoder(hf, block, norm, tied=True)


HUGGING_FACE = (
    Family(
        model_type="youtu",
        architecture="YoutuForCausalLM",
        read=read,
        keys=KEYS | LATENT_KEYS | PAIRING_KEYS,
        rules=instead(*LATENT_RULES, base=RULES),
    ),
)
