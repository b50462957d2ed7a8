"""dots.llm1 Technical Report (2506.05767)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a dots.llm1 config: DeepSeek-V3's mixture, q and k norms, windows in upper layers."""
    norm = llama_like.rms_norm(hf)
    bias = hf.get("attention_bias", False)
    mixture = mixtures.sigmoid_mixture(
        hf, n_experts=None, top_k=None, d_ff=1408, n_shared=None, normalize=False
    )
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 10944))
    window = hf.optional("sliding_window", int, 4096)
    n_global = hf.get("max_window_layers", 62) if window else hf.need("num_hidden_layers", int)
    in_order = range(hf.need("num_hidden_layers", int))
    types = llama_like.layer_types(
        hf, (llama_like.SLIDING if n >= n_global else llama_like.FULL for n in in_order)
    )
    kinds = mixtures.dense_first(hf, hf.get("first_k_dense_replace", 0))

    def block(kind: str, layer_type: str) -> nn.PreNormConfig:
        return nn.PreNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 32),
                qk_norm=nn.QKNormConfig(norm=norm),
                window=window if layer_type == llama_like.SLIDING else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=mixture if kind == mixtures.SPARSE else dense,
        )

    return llama_like.decoder(
        hf,
        [block(*both) for both in zip(kinds, types, strict=True)],
        norm,
        names=[
            f"{kind}_{llama_like.SHORT_NAMES[of]}" for kind, of in zip(kinds, types, strict=True)
        ],
    )


HUGGING_FACE = (
    Family(
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | mixtures.MIXTURE_KEYS
        | mixtures.ROUTER_KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
        },
        rules=(*llama_like.RULES, *mixtures.MIXTURE_RULES),
    ),
)
