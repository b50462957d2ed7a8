"""Flint (RecursiveSI, 2026): Qwen3's mixture, windows, attention sinks and a shared expert."""

from workhorse import nn
from workhorse.models.families.qwen import MIXTURE_KEYS
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Flint config: RoPE only in layers with a window, a learned attention sink per head."""
    norm, rope, bias = llama_like.rms_norm(hf, multiply="before_cast"), read_rope(hf), _bias(hf)
    window = hf.get("sliding_window", 513)
    types = llama_like.layer_types(hf, _types(hf.need("num_hidden_layers", int)))
    mixture = nn.MoEConfig(
        n_experts=hf.get("num_experts", 256),
        top_k=hf.get("num_experts_per_tok", 6),
        d_ff=hf.get("moe_intermediate_size", 512),
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(score="sigmoid", normalize=hf.get("norm_topk_prob", True)),
        shared=llama_like.gated_mlp(hf, d_ff=hf.get("shared_expert_intermediate_size", 1024)),
    )
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 6144))

    def block(kind: str, sparse: bool) -> nn.PreNormConfig:
        return nn.PreNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 4),
                head_dim=hf.get("head_dim", 128),
                position=rope if kind == llama_like.SLIDING else nn.NoPositionConfig(),
                window=window if kind == llama_like.SLIDING else None,
                qk_norm=nn.QKNormConfig(norm=norm),
                sinks=True,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=mixture if sparse else dense,
        )

    kinds = list(zip(types, _sparse(hf), strict=True))
    names = [llama_like.SHORT_NAMES[kind] + ("" if sparse else "_dense") for kind, sparse in kinds]
    return llama_like.decoder(hf, [block(*kind) for kind in kinds], norm, names=names)


def _bias(hf: Fields) -> bool:
    return hf.get("attention_bias", False)


def _types(depth: int) -> list[str]:
    """Return default layer types: full in the first two, in every fourth and in the last layer."""
    return [
        llama_like.FULL if n in (0, 1, depth - 1) or n % 4 == 1 else llama_like.SLIDING
        for n in range(depth)
    ]


def _sparse(hf: Fields) -> list[bool]:
    """Read for each layer whether it has a mixture of experts."""
    given = hf.sequence("mlp_only_layers", int)
    dense = {0, 1} if given is None else set(given)
    return [
        last and n not in dense
        for n, last in enumerate(llama_like.every(hf, "decoder_sparse_step", 1))
    ]


FEED_FORWARD, MLP = "layers.{i}.feed_forward.", "model.layers.{i}.mlp."

HUGGING_FACE = (
    Family(
        model_type="flint",
        architecture="FlintForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | MIXTURE_KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
            "shared_expert_intermediate_size": mixtures.of_sparse("shared.d_ff"),
        },
        rules=instead(
            same("layers.{i}.attention.kernel.sinks", "model.layers.{i}.self_attn.softmax_offset"),
            same(FEED_FORWARD + "router.proj", MLP + "gate"),
            *mixtures.EXPERT_RULES,
            *(
                same(f"{FEED_FORWARD}shared.{proj}", f"{MLP}shared_expert.{proj}")
                for proj in ("gate_proj", "up_proj", "down_proj")
            ),
            base=llama_like.RULES,
        ),
    ),
)
