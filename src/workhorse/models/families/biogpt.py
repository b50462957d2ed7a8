"""BioGPT: generative pre-trained transformer for biomedical text (Luo et al., 2210.10341)."""

import math

from workhorse import nn
from workhorse.models.families.opt import FAIRSEQ_OFFSET, decoder_rules
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same

NAMES = {
    "attention_dropout": "attention_probs_dropout_prob",
    "hidden_dropout": "hidden_dropout_prob",
}


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a BioGPT config: GPT-2 with learned positions that start at 2, as in fairseq.

    `layer_norm_eps` has no effect: every norm uses an epsilon of 1e-5.
    """
    hf = hf.renamed(NAMES)
    hf.ignore("layer_norm_eps")
    return read_scaled(hf, nn.LearnedPositionConfig(offset=FAIRSEQ_OFFSET))


def read_scaled(hf: Fields, position: nn.EmbeddingPositionConfig) -> nn.DecoderConfig:
    """Read a pre-norm decoder with all biases; `sqrt(d_model)` may scale the embedding."""
    hf.ignore("layerdrop")
    norm = nn.LayerNormConfig(eps=1e-5)
    dropout = hf.get("hidden_dropout", 0.1)
    block = nn.PreNormConfig(
        norm=norm,
        attention=gpt_like.attention(hf, dropout=0.1, qkv_bias=True, out_bias=True),
        feed_forward=gpt_like.mlp(hf, "gelu", dropout=hf.get("activation_dropout", 0.0)),
        dropout=dropout,
    )
    root = math.sqrt(hf.need("hidden_size", int))
    embedding = nn.EmbeddingConfig(
        position=position,
        multiplier=root if hf.get("scale_embedding", True) else 1.0,
        dropout=dropout,
    )
    return llama_like.decoder(hf, block, norm, tied=True, embedding=embedding)


def scale_embedding(data: Data) -> bool:
    """Return `scale_embedding` for `config.json`: True if the embedding is scaled."""
    return data["embedding"]["multiplier"] != 1.0


HUGGING_FACE = (
    Family(
        model_type="biogpt",
        architecture="BioGptForCausalLM",
        read=read,
        keys=gpt_like.written(NAMES) | {"scale_embedding": scale_embedding},
        rules=instead(same("head.proj", "output_projection"), base=decoder_rules("biogpt.")),
    ),
)
