"""LLaMA: Open and Efficient Foundation Language Models (Touvron et al., 2302.13971)."""

from functools import partial

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.preset import Preset


def llama(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    n_kv_heads: int | None = None,
    eps: float = 1e-6,
    vocab_size: int = 32000,
    max_seq_len: int = 2048,
) -> nn.DecoderConfig:
    """Build a LLaMA config: RMSNorm, RoPE and SwiGLU; no biases, no dropout, an untied head.

    RoPE pairs feature i with i + head_dim/2, as the Hugging Face checkpoints need. Meta's own files
    pair adjacent features. The two differ by a fixed permutation of the rows of q_proj and k_proj.
    """
    norm = nn.RMSNormConfig(eps=eps, multiply="after_cast")
    block = nn.PreNormConfig(
        norm=norm,
        attention=nn.AttentionConfig(
            n_heads=n_heads, n_kv_heads=n_kv_heads, position=nn.RopeConfig(theta=10_000.0)
        ),
        feed_forward=nn.GatedMlpConfig(d_ff=d_ff, activation="silu"),
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        blocks={"main": block},
        final_norm=norm,
        init=nn.NormalInitConfig(std=0.02, residual="plain"),
    )


SOURCE = "2302.13971 Table 2; the released params.json (feed-forward width, eps, vocabulary)"
WIDTH = (
    "The paper gives the feed-forward width as 2/3 · 4d; the released code rounds it up to a "
    "multiple of 256."
)
INIT = "The paper does not give the initialization of weights; normal 0.02 here."

PRESETS = (
    Preset(
        "llama-7b",
        partial(llama, d_model=4096, n_layers=32, n_heads=32, d_ff=11008),
        parameters=6_738_415_616,
        exactness="released",
        printed="6.7B",
        source=SOURCE,
        notes=(WIDTH, INIT),
    ),
    Preset(
        "llama-13b",
        partial(llama, d_model=5120, n_layers=40, n_heads=40, d_ff=13824),
        parameters=13_015_864_320,
        exactness="released",
        printed="13.0B",
        source=SOURCE,
        notes=(WIDTH, INIT),
    ),
    Preset(
        "llama-30b",
        partial(llama, d_model=6656, n_layers=60, n_heads=52, d_ff=17920),
        parameters=32_528_943_616,
        exactness="released",
        printed="32.5B",
        source=SOURCE,
        notes=(WIDTH, INIT, "The paper calls it 33B, the released files 30B."),
    ),
    Preset(
        "llama-65b",
        partial(llama, d_model=8192, n_layers=80, n_heads=64, d_ff=22016, eps=1e-5),
        parameters=65_285_660_672,
        exactness="released",
        printed="65.2B",
        source=SOURCE,
        notes=(
            WIDTH,
            INIT,
            "The paper prints 65.2B; the released model has 65.29B.",
            "Its eps is 1e-5; the smaller sizes have 1e-6.",
        ),
    ),
)


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a LLaMA config of any generation; Llama 3 only adds a RoPE scaling."""
    norm = llama_like.rms_norm(hf)
    bias = hf.get("attention_bias", False)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(hf, qkv_bias=bias, out_bias=bias),
        feed_forward=llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False)),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
        },
        rules=llama_like.RULES,
    ),
)
