"""BLOOM: A 176B-Parameter Open-Access Multilingual Language Model (2211.05100)."""

from workhorse import nn
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import same

NAMES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "seq_length",
}
MEGATRON_KEYS = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "n_inner",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
    "unk_token_id",
)
"""Keys about training and implementation, and keys that transformers never reads."""


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a BLOOM config: ALiBi, a norm on the embedding, and a feed-forward of width 4 · d_model.

    transformers reads no key for the context length; the published files have `seq_length`.
    """
    hf = hf.renamed(NAMES)
    hf.ignore(*MEGATRON_KEYS)
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_epsilon", 1e-5))
    block = nn.PreNormConfig(
        norm=norm,
        norm_residual=hf.get("apply_residual_connection_post_layernorm", False),
        attention=gpt_like.attention(hf, position=nn.AlibiConfig(), qkv_bias=True, out_bias=True),
        feed_forward=gpt_like.mlp(
            hf, "gelu", d_ff=4 * hf.need("hidden_size", int), activation="gelu_tanh"
        ),
        dropout=hf.get("hidden_dropout", 0.0),
    )
    length = hf.get("max_position_embeddings", 2048)
    embedding = nn.EmbeddingConfig(norm=norm)
    return llama_like.decoder(hf, block, norm, tied=True, embedding=embedding, max_seq_len=length)


WITHOUT_KEY = ("intermediate_size", "hidden_act")
LAYER = "transformer.h.{i}."
HUGGING_FACE = (
    Family(
        model_type="bloom",
        architecture="BloomForCausalLM",
        read=read,
        keys={key: path for key, path in gpt_like.written(NAMES).items() if key not in WITHOUT_KEY}
        | {
            "apply_residual_connection_post_layernorm": "block.norm_residual",
            "layer_norm_epsilon": "final_norm.eps",
        },
        rules=(
            same("embedding.tokens", "transformer.word_embeddings"),
            same("embedding.norm", "transformer.word_embeddings_layernorm"),
            gpt_like.fused_qkv(LAYER + "self_attention.query_key_value"),
            same("layers.{i}.attention.out_proj", LAYER + "self_attention.dense"),
            same("layers.{i}.feed_forward.up_proj", LAYER + "mlp.dense_h_to_4h"),
            same("layers.{i}.feed_forward.down_proj", LAYER + "mlp.dense_4h_to_h"),
            same("layers.{i}.attention_norm", LAYER + "input_layernorm"),
            same("layers.{i}.feed_forward_norm", LAYER + "post_attention_layernorm"),
            same("final_norm", "transformer.ln_f"),
            same("head.proj", "lm_head"),
        ),
    ),
)
