"""Llama 4 (Meta, 2025).

Its global layers have no positions (2305.19466), and scale queries by position (2501.19399).
"""

from collections.abc import Mapping
from typing import Any

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Data, Family, FieldPath
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, joined, same, then_transposed, transposed
from workhorse.models.huggingface.rotation import read_rope

CHUNKED = "chunked_attention"


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Llama 4 config: chunked attention with RoPE; full attention without positions.

    RoPE pairs adjacent features. The router's weights scale the inputs of the experts, not their
    outputs.
    """
    hf.ignore("router_jitter_noise", "for_llm_compressor")
    n_layers = hf.need("num_hidden_layers", int)
    norm = llama_like.rms_norm(hf, eps=1e-5)
    bias = hf.get("attention_bias", False)
    width = hf.get("intermediate_size", 8192)
    feed_forwards: dict[bool, nn.FeedForwardConfig] = {
        False: llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size_mlp", 16384)),
        True: nn.MoEConfig(
            n_experts=hf.get("num_local_experts", 16),
            top_k=hf.get("num_experts_per_tok", 1),
            d_ff=width,
            activation=llama_like.activation(hf),
            router=nn.RouterConfig(score="sigmoid"),
            weigh="input",
            shared=llama_like.gated_mlp(hf, d_ff=width),
        ),
    }
    interval = hf.get("no_rope_layer_interval", 4)
    turning = hf.sequence("no_rope_layers", int) or [
        int((n + 1) % interval != 0) for n in range(n_layers)
    ]
    types = llama_like.layer_types(
        hf, (CHUNKED if turns else llama_like.FULL for turns in turning), CHUNKED
    )
    step = hf.get("interleave_moe_layer_step", 1)
    sparse = hf.sequence("moe_layers", int)
    sparse = range(step - 1, n_layers, step) if sparse is None else sparse
    chunk = hf.optional("attention_chunk_size", int, 8192)
    turning_layers, still_layers = _turning(hf, norm.eps), _still(hf)

    def block(turns: int, layer_type: str, is_sparse: bool) -> nn.PreNormConfig:
        return nn.PreNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 8),
                head_dim=hf.optional("head_dim", int, 128),
                chunk=chunk if layer_type == CHUNKED else None,
                qkv_bias=bias,
                out_bias=bias,
                **(turning_layers if turns else still_layers),
            ),
            feed_forward=feed_forwards[is_sparse],
        )

    kinds = [(turning[n], types[n], n in sparse) for n in range(n_layers)]
    return llama_like.decoder(
        hf,
        [block(*kind) for kind in kinds],
        norm,
        names=[
            "_".join(
                (llama_like.SHORT_NAMES[of], "rope" if turns else "nope", "moe" if moe else "dense")
            )
            for turns, of, moe in kinds
        ],
    )


def _turning(hf: Fields, eps: float) -> Mapping[str, Any]:
    """Read fields of `AttentionConfig` for layers with RoPE and, after it, norms on q and k."""
    norm = nn.QKNormConfig(norm=nn.RMSNormConfig(eps=eps, weight=False), after_rope=True)
    return {
        "position": read_rope(hf, theta=500_000.0, pairing="interleaved", precision="float32"),
        "qk_norm": norm if hf.get("use_qk_norm", True) else None,
    }


def _still(hf: Fields) -> Mapping[str, Any]:
    """Read fields of `AttentionConfig` for layers without RoPE, with query scaling by position."""
    growth = nn.QueryScalingConfig(
        scale=hf.get("attn_scale", 0.1), length=hf.get("floor_scale", 8192), offset=1
    )
    return {
        "position": nn.NoPositionConfig(),
        "query_scaling": growth if hf.truth("attn_temperature_tuning", True) else None,
    }


def attentions(data: Data) -> list[Data]:
    """Return the attention config of each layer, as plain data."""
    return [layer["attention"] for layer in data["layers"]]


def written_turning(data: Data) -> list[int]:
    """Return `no_rope_layers` for `config.json`: despite the name, 1 for layers with RoPE."""
    return [int(one["position"]["kind"] == "rope") for one in attentions(data)]


def written_types(data: Data) -> list[str]:
    """Return `layer_types` for `config.json`: chunked or full attention for each layer."""
    return [CHUNKED if one["chunk"] else llama_like.FULL for one in attentions(data)]


def chunk_size(data: Data) -> int:
    """Return `attention_chunk_size` for `config.json`: the chunk of the first chunked layer."""
    return [one["chunk"] for one in attentions(data) if one["chunk"]][0]  # noqa: RUF015 needs IndexError


def moe_layers(data: Data) -> list[int]:
    """Return `moe_layers` for `config.json`: indices of the layers with a mixture of experts."""
    layers = data["layers"]
    return [n for n, layer in enumerate(layers) if layer["feed_forward"]["kind"] == "moe"]


def any_has(part: str) -> FieldPath:
    """Return a function that gives True if the attention of any layer has a value for `part`."""
    return lambda data: any(one[part] for one in attentions(data))


def growth(field: str) -> FieldPath:
    """Return a function that finds a query-scaling field in the first layer that has one."""

    def find(data: Data) -> object:
        grown = (one["query_scaling"] for one in attentions(data))
        return [one for one in grown if one][0][field]  # noqa: RUF015 needs IndexError

    return find


FEED_FORWARD, THEIRS = "layers.{i}.feed_forward.", "model.layers.{i}.feed_forward."

HUGGING_FACE = (
    Family(
        model_type="llama4_text",
        architecture="Llama4ForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "intermediate_size": mixtures.of_sparse("d_ff"),
            "intermediate_size_mlp": mixtures.of_dense("d_ff"),
            "num_local_experts": mixtures.of_sparse("n_experts"),
            "num_experts_per_tok": mixtures.of_sparse("top_k"),
            "moe_layers": moe_layers,
            "attention_bias": "block.attention.qkv_bias",
            "attention_chunk_size": chunk_size,
            "layer_types": written_types,
            "no_rope_layers": written_turning,
            "use_qk_norm": any_has("qk_norm"),
            "attn_temperature_tuning": any_has("query_scaling"),
            "attn_scale": growth("scale"),
            "floor_scale": growth("length"),
        },
        rules=instead(
            *(
                same(f"{FEED_FORWARD}{name}_proj", f"{THEIRS}{name}_proj")
                for name in ("gate", "up", "down")
            ),
            same(FEED_FORWARD + "router.proj", THEIRS + "router"),
            then_transposed(
                joined(
                    (
                        FEED_FORWARD + "experts.gate_proj.weight",
                        FEED_FORWARD + "experts.up_proj.weight",
                    ),
                    THEIRS + "experts.gate_up_proj",
                    dim=1,
                )
            ),
            transposed(FEED_FORWARD + "experts.down_proj.weight", THEIRS + "experts.down_proj"),
            *(
                same(f"{FEED_FORWARD}shared.{name}_proj", f"{THEIRS}shared_expert.{name}_proj")
                for name in ("gate", "up", "down")
            ),
            base=llama_like.RULES,
        ),
    ),
)
