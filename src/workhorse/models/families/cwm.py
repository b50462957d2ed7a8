"""CWM: An Open-Weights LLM for Research on Code Generation with World Models (2510.02387)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family, always
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.rotation import read_rope, rope_section

STRETCH = nn.Llama3ScalingConfig(
    factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
)
"""RoPE scaling of the released model, and the default for a config without RoPE settings."""

BOS = 128_000
"""The transformers class needs a `bos_token_id` even without a tokenizer; this is its default."""


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a CWM config: LLaMA with three local layers (with a window) after each global one."""
    norm = llama_like.rms_norm(hf, eps=1e-5)
    types = llama_like.layer_types(
        hf,
        llama_like.alternating(
            hf, (llama_like.FULL, llama_like.SLIDING, llama_like.SLIDING, llama_like.SLIDING)
        ),
    )
    window = hf.optional("sliding_window", int, 8192)

    def block(kind: str) -> nn.PreNormConfig:
        return nn.PreNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 8),
                head_dim=hf.optional("head_dim", int, 128),
                position=read_rope(
                    hf,
                    theta=1e6,
                    theta_key="rope_theta" if rope_section(hf) else None,
                    absent=STRETCH,
                ),
                window=window or None if kind == llama_like.SLIDING else None,
            ),
            feed_forward=llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False)),
        )

    return llama_like.decoder(hf, [block(kind) for kind in types], norm, names=types)


HUGGING_FACE = (
    Family(
        model_type="cwm",
        architecture="CwmForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "mlp_bias": "block.feed_forward.bias",
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
            "bos_token_id": always(BOS),
        },
        rules=llama_like.RULES,
    ),
)
