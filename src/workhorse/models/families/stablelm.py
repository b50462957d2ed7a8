"""StableLM 3B and 2 (Stability AI, 2023; 2402.17834)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family, differs, equals
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a StableLM config: LLaMA with LayerNorm, and RoPE on a quarter of each head.

    Queries and keys may have a norm with separate weights for each head.
    """
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_eps", 1e-5))
    per_head = nn.QKNormConfig(norm=norm.replace(bias=False), over="each_head")
    parts: Data = {
        "norm": norm,
        "attention": llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 32),
            head_dim=None,
            position=read_rope(hf, fraction=0.25),
            qkv_bias=hf.get("use_qkv_bias", False),
            qk_norm=per_head if hf.get("qk_layernorm", False) else None,
        ),
        "feed_forward": llama_like.gated_mlp(hf),
        "dropout": hf.get("hidden_dropout", 0.0),
    }
    parallel = hf.get("use_parallel_residual", False)
    block = nn.ParallelConfig(**parts) if parallel else nn.PreNormConfig(**parts)
    return llama_like.decoder(hf, block, norm)


WITHOUT_KEY = ("rms_norm_eps", "head_dim")
LAYER = "model.layers.{i}."
HUGGING_FACE = (
    Family(
        model_type="stablelm",
        architecture="StableLmForCausalLM",
        read=read,
        keys={key: path for key, path in llama_like.KEYS.items() if key not in WITHOUT_KEY}
        | {
            "partial_rotary_factor": "block.attention.position.fraction",
            "use_qkv_bias": "block.attention.qkv_bias",
            "qk_layernorm": differs("block.attention.qk_norm", None),
            "use_parallel_residual": equals("block.kind", "parallel"),
            "layer_norm_eps": "final_norm.eps",
        },
        rules=instead(
            same(
                "layers.{i}.attention.q_norm.heads.{*}",
                LAYER + "self_attn.q_layernorm.norms.{*}",
            ),
            same(
                "layers.{i}.attention.k_norm.heads.{*}",
                LAYER + "self_attn.k_layernorm.norms.{*}",
            ),
            same("layers.{i}.norm", LAYER + "input_layernorm"),
            base=llama_like.RULES,
        ),
    ),
)
