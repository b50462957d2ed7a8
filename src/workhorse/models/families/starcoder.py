"""StarCoder (Li et al., 2305.06161; type `gpt_bigcode`) and StarCoder 2 (2402.19173)."""

from workhorse import nn
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Family, differs, equals
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import ROPE_KEYS, read_rope

HOW_IT_IS_COMPUTED = (
    "attention_softmax_in_fp32",
    "inference_runner",
    "max_batch_size",
    "max_sequence_length",
    "n_ctx",
    "num_key_value_heads",
    "pad_key_length",
    "pre_allocate_kv_cache",
    "scale_attention_softmax_in_fp32",
    "validate_runner_input",
)


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a StarCoder config: GPT-2 with one key-value head.

    If `multi_query` is false, each query head has its own key-value head.
    """
    hf = hf.renamed(gpt_like.GPT_NAMES)
    hf.ignore(*HOW_IT_IS_COMPUTED, *gpt_like.SUMMARY_KEYS)
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_epsilon", 1e-5))
    block = nn.PreNormConfig(
        norm=norm,
        attention=gpt_like.attention(
            hf,
            dropout=0.1,
            n_kv_heads=1 if hf.get("multi_query", True) else None,
            scale=None if hf.get("scale_attn_weights", True) else 1.0,
            qkv_bias=True,
            out_bias=True,
        ),
        feed_forward=gpt_like.mlp(hf, "gelu_pytorch_tanh", d_ff=gpt_like.d_ff_or_fourfold(hf)),
        dropout=hf.get("hidden_dropout", 0.1),
    )
    return llama_like.decoder(
        hf, block, norm, tied=True, embedding=gpt_like.learned_positions(hf, dropout=0.1)
    )


def read_starcoder2(hf: Fields) -> nn.DecoderConfig:
    """Read a StarCoder 2 config: RoPE, grouped queries, LayerNorm; all biases or none."""
    hf = hf.renamed({"hidden_dropout": "residual_dropout"})
    hf.ignore("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon")
    hf.ignore("scale_attention_softmax_in_fp32")
    hf.refuse("mlp_type", "default", "transformers ignores it")
    hf.refuse("norm_type", "layer_norm", "transformers ignores it")
    hf.refuse("scale_attn_weights", True, "transformers ignores it")
    norm = nn.LayerNormConfig(eps=hf.get("norm_epsilon", 1e-5))
    bias = hf.get("use_bias", True)
    block = nn.PreNormConfig(
        norm=norm,
        attention=gpt_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 2),
            head_dim=hf.optional("head_dim", int),
            position=read_rope(hf),
            window=hf.optional("sliding_window", int),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=gpt_like.mlp(hf, "gelu_pytorch_tanh", bias=bias),
        dropout=hf.get("hidden_dropout", 0.0),
    )
    embedding = nn.EmbeddingConfig(dropout=hf.get("embedding_dropout", 0.0))
    return llama_like.decoder(hf, block, norm, tied=True, embedding=embedding)


LAYER = "transformer.h.{i}."
HUGGING_FACE = (
    Family(
        model_type="gpt_bigcode",
        architecture="GPTBigCodeForCausalLM",
        read=read,
        keys=gpt_like.written(gpt_like.GPT_NAMES)
        | {
            "multi_query": equals("block.attention.n_kv_heads", 1),
            "scale_attn_weights": differs("block.attention.scale", 1.0),
            "layer_norm_epsilon": "final_norm.eps",
        },
        rules=(
            same("embedding.tokens", "transformer.wte"),
            same("embedding.positions.table", "transformer.wpe"),
            gpt_like.fused_qkv(LAYER + "attn.c_attn"),
            same("layers.{i}.attention.out_proj", LAYER + "attn.c_proj"),
            same("layers.{i}.feed_forward.up_proj", LAYER + "mlp.c_fc"),
            same("layers.{i}.feed_forward.down_proj", LAYER + "mlp.c_proj"),
            same("layers.{i}.attention_norm", LAYER + "ln_1"),
            same("layers.{i}.feed_forward_norm", LAYER + "ln_2"),
            same("final_norm", "transformer.ln_f"),
            same("head.proj", "lm_head"),
        ),
        ignored=(r".*\.attn\.(bias|masked_bias)",),
    ),
    Family(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        read=read_starcoder2,
        keys=gpt_like.written()
        | ROPE_KEYS
        | {
            "num_key_value_heads": "block.attention.n_kv_heads",
            "head_dim": "block.attention.head_dim",
            "sliding_window": "block.attention.window",
            "use_bias": "block.attention.qkv_bias",
            "norm_epsilon": "final_norm.eps",
        },
        rules=instead(
            same("layers.{i}.feed_forward.up_proj", "model.layers.{i}.mlp.c_fc"),
            same("layers.{i}.feed_forward.down_proj", "model.layers.{i}.mlp.c_proj"),
            base=llama_like.RULES,
        ),
    ),
)
