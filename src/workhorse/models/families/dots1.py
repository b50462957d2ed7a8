"""dots.llm1 Technical Report (2506.05767)."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    FULL,
    KEYS,
    RULES,
    SHORT_NAMES,
    SLIDING,
    attention,
    decoder,
    gated_mlp,
    layer_types,
    rms_norm,
    written_layer_types,
    written_window,
)
from workhorse.models.huggingface.mixtures import (
    MIXTURE_KEYS,
    MIXTURE_RULES,
    ROUTER_KEYS,
    SPARSE,
    dense_first,
    sigmoid_mixture,
)
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import PreNormConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a dots.llm1 config: DeepSeek-V3's mixture, q and k norms, windows in upper layers."""
    norm = rms_norm(hf)
    bias = hf.get("attention_bias", False)
    mixture = sigmoid_mixture(
        hf, n_experts=None, top_k=None, d_ff=1408, n_shared=None, normalize=False
    )
    dense = gated_mlp(hf, d_ff=hf.get("intermediate_size", 10944))
    window = hf.optional("sliding_window", int, 4096)
    n_global = hf.get("max_window_layers", 62) if window else hf.need("num_hidden_layers", int)
    in_order = range(hf.need("num_hidden_layers", int))
    types = layer_types(hf, (SLIDING if n >= n_global else FULL for n in in_order))
    kinds = dense_first(hf, hf.get("first_k_dense_replace", 0))

    def block(kind: str, layer_type: str) -> PreNormConfig:
        return PreNormConfig(
            norm=norm,
            attention=attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 32),
                qk_norm=QKNormConfig(norm=norm),
                window=window if layer_type == SLIDING else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=mixture if kind == SPARSE else dense,
        )

    return decoder(
        hf,
        [block(*both) for both in zip(kinds, types, strict=True)],
        norm,
        names=[f"{kind}_{SHORT_NAMES[of]}" for kind, of in zip(kinds, types, strict=True)],
    )


HUGGING_FACE = (
    Family(
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        read=read,
        keys=KEYS
        | MIXTURE_KEYS
        | ROUTER_KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "sliding_window": written_window,
            "layer_types": written_layer_types,
        },
        rules=(*RULES, *MIXTURE_RULES),
    ),
)
