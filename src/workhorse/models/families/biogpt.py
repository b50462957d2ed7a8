"""BioGPT: generative pre-trained transformer for biomedical text (Luo et al., 2210.10341)."""

import math

from workhorse.models.families.opt import FAIRSEQ_OFFSET, decoder_rules
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.gpt_like import attention, mlp, written
from workhorse.models.huggingface.llama_like import decoder
from workhorse.models.huggingface.moves import instead, same
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.embedding import EmbeddingConfig, EmbeddingPositionConfig
from workhorse.nn.norms import LayerNormConfig
from workhorse.nn.positions.absolute import LearnedPositionConfig

NAMES = {
    "attention_dropout": "attention_probs_dropout_prob",
    "hidden_dropout": "hidden_dropout_prob",
}


def read(hf: Fields) -> DecoderConfig:
    """Read a BioGPT config: GPT-2 with learned positions that start at 2, as in fairseq.

    `layer_norm_eps` has no effect: every norm uses an epsilon of 1e-5.
    """
    hf = hf.renamed(NAMES)
    hf.ignore("layer_norm_eps")
    return read_scaled(hf, LearnedPositionConfig(offset=FAIRSEQ_OFFSET))


def read_scaled(hf: Fields, position: EmbeddingPositionConfig) -> DecoderConfig:
    """Read a pre-norm decoder with all biases; `sqrt(d_model)` may scale the embedding."""
    hf.ignore("layerdrop")
    norm = LayerNormConfig(eps=1e-5)
    dropout = hf.get("hidden_dropout", 0.1)
    block = PreNormConfig(
        norm=norm,
        attention=attention(hf, dropout=0.1, qkv_bias=True, out_bias=True),
        feed_forward=mlp(hf, "gelu", dropout=hf.get("activation_dropout", 0.0)),
        dropout=dropout,
    )
    root = math.sqrt(hf.need("hidden_size", int))
    embedding = EmbeddingConfig(
        position=position,
        multiplier=root if hf.get("scale_embedding", True) else 1.0,
        dropout=dropout,
    )
    return decoder(hf, block, norm, tied=True, embedding=embedding)


def scale_embedding(data: Data) -> bool:
    """Return `scale_embedding` for `config.json`: True if the embedding is scaled."""
    return data["embedding"]["multiplier"] != 1.0


HUGGING_FACE = (
    Family(
        model_type="biogpt",
        architecture="BioGptForCausalLM",
        read=read,
        keys=written(NAMES) | {"scale_embedding": scale_embedding},
        rules=instead(same("head.proj", "output_projection"), base=decoder_rules("biogpt.")),
    ),
)
