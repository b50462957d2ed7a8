"""Youtu-LLM (2512.24618)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Youtu-LLM config: DeepSeek-V3's attention in a dense model."""
    hf.ignore("embedding_initializer_range")
    hf.refuse("mlp_bias", False, "Youtu-LLM in transformers has no feed-forward biases")
    norm = llama_like.rms_norm(hf)
    neighbours = hf.optional("rope_interleave", bool, True) or False
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.latent_attention(hf, neighbours=neighbours),
        feed_forward=llama_like.gated_mlp(hf),
    )
    return llama_like.decoder(hf, block, norm, tied=True)


HUGGING_FACE = (
    Family(
        model_type="youtu",
        architecture="YoutuForCausalLM",
        read=read,
        keys=llama_like.KEYS | llama_like.LATENT_KEYS | llama_like.PAIRING_KEYS,
        rules=instead(*llama_like.LATENT_RULES, base=llama_like.RULES),
    ),
)
