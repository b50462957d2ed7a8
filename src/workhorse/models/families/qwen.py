"""Qwen2 (2407.10671) and Qwen3 (2505.09388), dense and with mixtures of experts."""

from collections.abc import Sequence

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same


def read_qwen2(hf: Fields) -> nn.DecoderConfig:
    """Read a Qwen2 config: LLaMA with biases on q, k and v, and windows in the upper layers."""
    hf.refuse("use_mrope", False, "a model of text does not need multimodal RoPE")
    heads = llama_like.attention(
        hf, n_kv_heads=hf.optional("num_key_value_heads", int, 32), qkv_bias=True
    )
    return _windowed(hf, heads, _windows_above(hf), [llama_like.gated_mlp(hf)] * _depth(hf))


def read_qwen3(hf: Fields) -> nn.DecoderConfig:
    """Read a Qwen3 config: Qwen2 with norms on queries and keys instead of the biases."""
    heads = _normed_heads(hf, n_kv_heads=hf.optional("num_key_value_heads", int, 32), head_dim=128)
    return _windowed(hf, heads, _windows_above(hf), [llama_like.gated_mlp(hf)] * _depth(hf))


def read_qwen2_moe(hf: Fields) -> nn.DecoderConfig:
    """Read a Qwen2-MoE config: a mixture of experts with a gated shared expert.

    Windows, if enabled, are in every other layer.
    """
    heads = llama_like.attention(
        hf,
        n_kv_heads=hf.optional("num_key_value_heads", int, 16),
        qkv_bias=hf.get("qkv_bias", True),
    )
    limit = hf.get("max_window_layers", 28)
    limit = limit if hf.get("use_sliding_window", False) else 0
    types = [
        llama_like.SLIDING if n % 2 == 0 and n < limit else llama_like.FULL
        for n in range(_depth(hf))
    ]
    mixture = _mixture(hf, n_experts=hf.get("num_experts", 60), top_k=4, d_ff=1408).replace(
        shared=nn.GatedMlpConfig(
            d_ff=hf.get("shared_expert_intermediate_size", 5632),
            activation=llama_like.activation(hf),
        ),
        shared_gate=True,
    )
    return _windowed(hf, heads, types, _sparse(hf, mixture, d_ff=5632))


def read_qwen3_moe(hf: Fields) -> nn.DecoderConfig:
    """Read a Qwen3-MoE config: Qwen3 with a mixture of experts.

    A window, if enabled, is in every layer.
    """
    hf.ignore("max_window_layers")  # transformers does not use it here
    heads = _normed_heads(hf, n_kv_heads=hf.get("num_key_value_heads", 4), head_dim=None)
    n_experts = hf.get("num_experts", hf.get("num_local_experts", 128))
    mixture = _mixture(hf, n_experts=n_experts, top_k=8, d_ff=768)
    kind = llama_like.SLIDING if hf.get("use_sliding_window", False) else llama_like.FULL
    return _windowed(hf, heads, [kind] * _depth(hf), _sparse(hf, mixture, d_ff=6144))


def _depth(hf: Fields) -> int:
    return hf.need("num_hidden_layers", int)


def _normed_heads(
    hf: Fields, *, n_kv_heads: int | None, head_dim: int | None
) -> nn.AttentionConfig:
    bias = hf.get("attention_bias", False)
    return llama_like.attention(
        hf,
        n_kv_heads=n_kv_heads,
        head_dim=hf.optional("head_dim", int, head_dim),
        qk_norm=nn.QKNormConfig(norm=llama_like.rms_norm(hf)),
        qkv_bias=bias,
        out_bias=bias,
    )


def _windows_above(hf: Fields) -> list[str]:
    """Return layer types. Despite its name, `max_window_layers` is the first one with a window."""
    first = hf.get("max_window_layers", 28)
    depth = _depth(hf)
    if not hf.get("use_sliding_window", False) or _window(hf) is None:
        first = depth
    return [llama_like.FULL if n < first else llama_like.SLIDING for n in range(depth)]


def _window(hf: Fields) -> int | None:
    return hf.optional("sliding_window", int, 4096)


def _windowed(
    hf: Fields,
    heads: nn.AttentionConfig,
    types: Sequence[str],
    feed_forwards: Sequence[nn.FeedForwardConfig],
) -> nn.DecoderConfig:
    """Read a decoder with layers that differ in window and feed-forward.

    `heads` has no window. `types` is for a config that does not list the layer types.
    """
    norm = llama_like.rms_norm(hf)
    window = _window(hf)
    if not hf.get("use_sliding_window", False):
        window = None
    types = [kind if window else llama_like.FULL for kind in llama_like.layer_types(hf, types)]
    blocks = [
        nn.PreNormConfig(
            norm=norm,
            attention=heads.replace(window=window if kind == llama_like.SLIDING else None),
            feed_forward=feed_forward,
        )
        for kind, feed_forward in zip(types, feed_forwards, strict=True)
    ]
    names = [
        llama_like.SHORT_NAMES[kind] + ("_dense" if feed_forward.kind != "moe" else "")
        for kind, feed_forward in zip(types, feed_forwards, strict=True)
    ]
    return llama_like.decoder(hf, blocks, norm, names=names)


def _mixture(hf: Fields, *, n_experts: int, top_k: int, d_ff: int) -> nn.MoEConfig:
    """Read the routed experts; `top_k` and `d_ff` are the family's defaults."""
    return nn.MoEConfig(
        n_experts=n_experts,
        top_k=hf.get("num_experts_per_tok", top_k),
        d_ff=hf.get("moe_intermediate_size", d_ff),
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(normalize=hf.get("norm_topk_prob", False)),
    )


def _sparse(hf: Fields, mixture: nn.MoEConfig, *, d_ff: int) -> list[nn.FeedForwardConfig]:
    """Put a mixture in every `decoder_sparse_step`-th layer, except in `mlp_only_layers`.

    `d_ff` is the default width of the dense layers.
    """
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", d_ff))
    excepted = set(hf.sequence("mlp_only_layers", int) or ())
    return [
        mixture if last and n not in excepted else dense
        for n, last in enumerate(llama_like.every(hf, "decoder_sparse_step", 1))
    ]


def dense_layers(data: Data) -> list[int]:
    """Return `mlp_only_layers` for `config.json`: indices of layers without a mixture."""
    layers = enumerate(data["layers"])
    return [n for n, layer in layers if layer["feed_forward"]["kind"] != "moe"]


def uses_window(data: Data) -> bool:
    """Return `use_sliding_window` for `config.json`: True if any layer has a window."""
    return any(layer["attention"]["window"] for layer in data["layers"])


WINDOW_KEYS = {
    "use_sliding_window": uses_window,
    "sliding_window": llama_like.written_window,
    "layer_types": llama_like.written_layer_types,
}
MIXTURE_KEYS = {
    "num_experts": mixtures.of_sparse("n_experts"),
    "num_experts_per_tok": mixtures.of_sparse("top_k"),
    "moe_intermediate_size": mixtures.of_sparse("d_ff"),
    "intermediate_size": mixtures.of_dense("d_ff"),
    "norm_topk_prob": mixtures.of_sparse("router.normalize"),
    "mlp_only_layers": dense_layers,
}

ROUTER = same("layers.{i}.feed_forward.router.proj", "model.layers.{i}.mlp.gate")

HUGGING_FACE = (
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        read=read_qwen2,
        keys=llama_like.KEYS | WINDOW_KEYS,
        rules=llama_like.RULES,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        read=read_qwen3,
        keys=llama_like.KEYS | WINDOW_KEYS | {"attention_bias": "block.attention.qkv_bias"},
        rules=llama_like.RULES,
    ),
    Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        read=read_qwen2_moe,
        keys=llama_like.KEYS
        | WINDOW_KEYS
        | MIXTURE_KEYS
        | {
            "qkv_bias": "block.attention.qkv_bias",
            "shared_expert_intermediate_size": mixtures.of_sparse("shared.d_ff"),
        },
        rules=instead(
            ROUTER,
            *mixtures.EXPERT_RULES,
            *(
                same(
                    f"layers.{{i}}.feed_forward.shared.{proj}",
                    f"model.layers.{{i}}.mlp.shared_expert.{proj}",
                )
                for proj in ("gate_proj", "up_proj", "down_proj")
            ),
            same("layers.{i}.feed_forward.shared_gate", "model.layers.{i}.mlp.shared_expert_gate"),
            base=llama_like.RULES,
        ),
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        read=read_qwen3_moe,
        keys=llama_like.KEYS
        | MIXTURE_KEYS
        | {
            "use_sliding_window": uses_window,
            "sliding_window": llama_like.written_window,
            "attention_bias": "block.attention.qkv_bias",
        },
        rules=instead(ROUTER, *mixtures.EXPERT_RULES, base=llama_like.RULES),
    ),
)
