"""Persimmon-8B (Elsen et al., Adept, 2023)."""

from workhorse import nn
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Family, differs
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import ROPE_KEYS, read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Persimmon config: LayerNorm, squared ReLU, all biases, RoPE on half of each head.

    Queries and keys also have a LayerNorm.
    """
    hf.ignore("num_key_value_heads")
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_eps", 1e-5))
    block = nn.PreNormConfig(
        norm=norm,
        attention=gpt_like.attention(
            hf,
            position=read_rope(hf, fraction=0.5),
            qk_norm=nn.QKNormConfig(norm=norm) if hf.get("qk_layernorm", True) else None,
            qkv_bias=True,
            out_bias=True,
        ),
        feed_forward=gpt_like.mlp(hf, "relu2"),
        dropout=hf.get("hidden_dropout", 0.0),
    )
    return llama_like.decoder(hf, block, norm)


LAYER = "model.layers.{i}."
HUGGING_FACE = (
    Family(
        model_type="persimmon",
        architecture="PersimmonForCausalLM",
        read=read,
        keys=gpt_like.written()
        | ROPE_KEYS
        | {
            "partial_rotary_factor": "block.attention.position.fraction",
            "qk_layernorm": differs("block.attention.qk_norm", None),
            "layer_norm_eps": "final_norm.eps",
        },
        rules=instead(
            gpt_like.fused_qkv(LAYER + "self_attn.query_key_value"),
            same("layers.{i}.attention.out_proj", LAYER + "self_attn.dense"),
            same("layers.{i}.attention.q_norm", LAYER + "self_attn.q_layernorm"),
            same("layers.{i}.attention.k_norm", LAYER + "self_attn.k_layernorm"),
            same("layers.{i}.feed_forward.up_proj", LAYER + "mlp.dense_h_to_4h"),
            same("layers.{i}.feed_forward.down_proj", LAYER + "mlp.dense_4h_to_h"),
            same("final_norm", "model.final_layernorm"),
            base=llama_like.RULES,
        ),
    ),
)
