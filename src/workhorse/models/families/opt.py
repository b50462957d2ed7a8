"""OPT: Open Pre-trained Transformer Language Models (Zhang et al., 2205.01068)."""

from workhorse import nn
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Data, Family, equals
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import Rule, same

NAMES = {
    "intermediate_size": "ffn_dim",
    "hidden_act": "activation_function",
    "hidden_dropout": "dropout",
    "initializer_range": "init_std",
}
FAIRSEQ_OFFSET = 2
"""Number of unused rows before the first position: fairseq's positions start after padding id 1."""


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an OPT config: pre-norm blocks with learned positions.

    OPT-350M is post-norm without a final norm, and has a narrow embedding.
    """
    hf = hf.renamed(NAMES)
    hf.ignore("activation_dropout", "layerdrop")
    affine = hf.get("layer_norm_elementwise_affine", True)
    norm = nn.LayerNormConfig(weight=affine, bias=affine)
    bias = hf.get("enable_bias", True)
    parts: Data = {
        "norm": norm,
        "attention": gpt_like.attention(hf, qkv_bias=bias, out_bias=bias),
        "feed_forward": gpt_like.mlp(hf, "relu", bias=bias),
        "dropout": hf.get("hidden_dropout", 0.1),
    }
    before = hf.get("do_layer_norm_before", True)
    bare = hf.get("_remove_final_layer_norm", False) or not before
    width = hf.optional("word_embed_proj_dim", int)
    embedding = nn.EmbeddingConfig(
        position=nn.LearnedPositionConfig(offset=FAIRSEQ_OFFSET), width=width
    )
    block = nn.PreNormConfig(**parts) if before else nn.PostNormConfig(**parts)
    return llama_like.decoder(
        hf, block, nn.NoNormConfig() if bare else norm, tied=True, embedding=embedding
    )


def removed_norm(data: Data) -> bool:
    """Return `_remove_final_layer_norm`: True if a pre-norm model has no final norm.

    Some models that were fine-tuned before 2022 have none.
    """
    return data["block"]["kind"] == "pre_norm" and data["final_norm"]["kind"] == "none"


def decoder_rules(theirs: str) -> tuple[Rule, ...]:
    """Return tensor rules for decoders derived from BART: OPT, XGLM and BioGPT."""
    layer = theirs + "layers.{i}."
    return (
        same("embedding.tokens", theirs + "embed_tokens"),
        same("embedding.positions.table", theirs + "embed_positions"),
        same("layers.{i}.attention.q_proj", layer + "self_attn.q_proj"),
        same("layers.{i}.attention.k_proj", layer + "self_attn.k_proj"),
        same("layers.{i}.attention.v_proj", layer + "self_attn.v_proj"),
        same("layers.{i}.attention.out_proj", layer + "self_attn.out_proj"),
        same("layers.{i}.feed_forward.up_proj", layer + "fc1"),
        same("layers.{i}.feed_forward.down_proj", layer + "fc2"),
        same("layers.{i}.attention_norm", layer + "self_attn_layer_norm"),
        same("layers.{i}.feed_forward_norm", layer + "final_layer_norm"),
        same("final_norm", theirs + "layer_norm"),
        same("head.proj", "lm_head"),
    )


HUGGING_FACE = (
    Family(
        model_type="opt",
        architecture="OPTForCausalLM",
        read=read,
        keys=gpt_like.written(NAMES)
        | {
            "do_layer_norm_before": equals("block.kind", "pre_norm"),
            "_remove_final_layer_norm": removed_norm,
            "word_embed_proj_dim": "embedding.width",
            "enable_bias": "block.attention.qkv_bias",
            "layer_norm_elementwise_affine": "block.norm.weight",
        },
        rules=(
            same("embedding.project", "model.decoder.project_in"),
            same("head.project", "model.decoder.project_out"),
            same("final_norm", "model.decoder.final_layer_norm"),
            *decoder_rules("model.decoder."),
        ),
    ),
)
