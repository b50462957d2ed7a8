"""ERNIE 4.5 Technical Report (Baidu, 2025), dense and with mixtures of experts."""

from typing import Any

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Data, Family, FieldPath
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, reshaped, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a dense ERNIE 4.5 config: LLaMA with RoPE on pairs of adjacent features.

    The key `use_bias` enables all biases.
    """
    norm = llama_like.rms_norm(hf, eps=1e-5)
    block = nn.PreNormConfig(
        norm=norm,
        attention=_heads(
            hf,
            n_kv_heads=hf.optional("num_key_value_heads", int, 2),
            head_dim=hf.optional("head_dim", int, 128),
        ),
        feed_forward=llama_like.gated_mlp(hf, bias=hf.get("use_bias", False)),
    )
    return llama_like.decoder(hf, block, norm, tied=True)


def read_mixture(hf: Fields) -> nn.DecoderConfig:
    """Read an ERNIE 4.5 config with a mixture of experts in every n-th layer of a range.

    The layers are otherwise those of `read`. Routed experts have no biases.
    """
    hf.ignore("moe_capacity", "moe_gate", "moe_use_aux_free")  # load balancing in training
    hf.ignore("num_nextn_predict_layers")  # heads used only in training
    hf.refuse("moe_gate_act", "softmax", "transformers uses softmax scores here")
    hf.refuse("moe_norm_min", 1e-12, "the weights of the chosen experts are divided by their sum")
    norm = llama_like.rms_norm(hf, eps=1e-5)
    bias = hf.get("use_bias", False)
    width = hf.get("moe_intermediate_size", 1536)
    n_shared = hf.get("moe_num_shared_experts", 2)
    feed_forwards: dict[str, nn.FeedForwardConfig] = {
        mixtures.DENSE: llama_like.gated_mlp(
            hf, d_ff=hf.get("intermediate_size", 12288), bias=bias
        ),
        mixtures.SPARSE: nn.MoEConfig(
            n_experts=hf.get("moe_num_experts", 64),
            top_k=hf.get("moe_k", 6),
            d_ff=width,
            activation=llama_like.activation(hf),
            router=nn.RouterConfig(normalize=True, selection_bias=True),
            shared=llama_like.gated_mlp(hf, d_ff=width * n_shared, bias=bias) if n_shared else None,
        ),
    }
    heads = _heads(hf, n_kv_heads=hf.optional("num_key_value_heads", int, 4))
    kinds = _kinds(hf)
    layers = [
        nn.PreNormConfig(norm=norm, attention=heads, feed_forward=feed_forwards[kind])
        for kind in kinds
    ]
    return llama_like.decoder(hf, layers, norm, names=kinds, tied=True, head={"bias": bias})


def _heads(hf: Fields, **changes: Any) -> nn.AttentionConfig:
    bias = hf.get("use_bias", False)
    rope = read_rope(hf, theta=500_000.0, pairing="interleaved", precision="float32")
    return llama_like.attention(hf, position=rope, qkv_bias=bias, out_bias=bias, **changes)


def _kinds(hf: Fields) -> list[str]:
    """Return dense or sparse for each layer: in a range, every n-th layer (from 1) is sparse."""
    depth = hf.need("num_hidden_layers", int)
    first, last = hf.get("moe_layer_start_index", 1), hf.get("moe_layer_end_index", -1)
    last = depth - 1 if last == -1 else last
    interval = hf.positive("moe_layer_interval", 1)
    return [
        mixtures.SPARSE if first <= n <= last and (n + 1) % interval == 0 else mixtures.DENSE
        for n in range(depth)
    ]


def sparse_layers(data: Data) -> list[int]:
    """Return the indices of the layers that have a mixture of experts, counted from 0."""
    layers = enumerate(data["layers"])
    return [n for n, layer in layers if layer["feed_forward"]["kind"] == "moe"]


def first_mixture(data: Data) -> int:
    """Return `moe_layer_start_index`; past the last layer if there is no mixture of experts."""
    return next(iter(sparse_layers(data)), data["n_layers"])


def last_mixture(data: Data) -> int:
    """Return `moe_layer_end_index`; the key is omitted if there is no mixture of experts."""
    return sparse_layers(data)[-1]


def interval(data: Data) -> int:
    """Return `moe_layer_interval`: the distance between the first two mixtures of experts."""
    layers = sparse_layers(data)
    return layers[1] - layers[0] if len(layers) > 1 else 1


ERNIE_KEYS: dict[str, FieldPath] = llama_like.KEYS | {"use_bias": "block.attention.qkv_bias"}
MLP = "model.layers.{i}.mlp."

HUGGING_FACE = (
    Family(
        model_type="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        read=read,
        keys=ERNIE_KEYS,
        rules=llama_like.RULES,
    ),
    Family(
        model_type="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        read=read_mixture,
        keys={
            **ERNIE_KEYS,
            "intermediate_size": mixtures.of_dense("d_ff"),
            "moe_intermediate_size": mixtures.of_sparse("d_ff"),
            "moe_k": mixtures.of_sparse("top_k"),
            "moe_num_experts": mixtures.of_sparse("n_experts"),
            "moe_num_shared_experts": mixtures.n_shared_experts,
            "moe_layer_start_index": first_mixture,
            "moe_layer_end_index": last_mixture,
            "moe_layer_interval": interval,
        },
        rules=instead(
            same("layers.{i}.feed_forward.router.proj", MLP + "gate"),
            reshaped(
                "layers.{i}.feed_forward.router.selection_bias",
                MLP + "moe_statics.e_score_correction_bias",
                lambda shape: (1, *shape),
            ),
            *mixtures.EXPERT_RULES,
            *mixtures.SHARED_RULES,
            base=llama_like.RULES,
        ),
        ignored=(r".*\.rotary_emb\.inv_freq", r"model\.mtp_.*"),
    ),
)
