"""nanochat (Karpathy, 2025): a whole chat model, small enough to read."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a nanochat config: norms without weights, also on embedding, q and k.

    RoPE rotates in the opposite direction.
    """
    # logits_soft_cap is the old name of final_logit_softcapping.
    hf.ignore("logits_soft_cap", "resid_dropout")
    hf.refuse("qkv_bias", False, "nanochat enables all biases at once, with attention_bias")
    norm = llama_like.rms_norm(hf, weight=False)
    bias = hf.get("attention_bias", False)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            position=read_rope(hf, reverse=True),
            qk_norm=nn.QKNormConfig(norm=norm, after_rope=True),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=nn.MlpConfig(
            d_ff=hf.get("intermediate_size", 8192),
            activation=llama_like.activation(hf, default="relu2"),
        ),
    )
    return llama_like.decoder(
        hf,
        block,
        norm,
        embedding=nn.EmbeddingConfig(norm=norm),
        head={"cap": hf.optional("final_logit_softcapping", float, 15.0)},
    )


HUGGING_FACE = (
    Family(
        model_type="nanochat",
        architecture="NanoChatForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "final_logit_softcapping": "head.cap",
        },
        rules=instead(
            same("layers.{i}.feed_forward.up_proj", "model.layers.{i}.mlp.fc1"),
            same("layers.{i}.feed_forward.down_proj", "model.layers.{i}.mlp.fc2"),
            base=llama_like.RULES,
        ),
    ),
)
