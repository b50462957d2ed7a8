"""Cohere 2 with mixtures of experts (Cohere, 2026)."""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.errors import nearest
from workhorse.models.families.cohere import COHERE_KEYS, COHERE_RULES, layer_norm, scaled
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Data, Family, FieldPath, look_up
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead
from workhorse.models.huggingface.rotation import read_rope

AVERAGE, SUM = "average", "sum"


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Cohere 2 config: Command R7B with a mixture of experts in most layers.

    The shared experts are read as one wide expert.
    """
    norm = _either_norm(hf)
    # transformers reads the top-level key only if there is no mapping
    fraction_key = "partial_rotary_factor" if hf.values.get("rope_parameters") is None else None
    rope = read_rope(hf, fraction_key=fraction_key, pairing="interleaved", precision="float32")
    bias, window = hf.get("attention_bias", False), hf.optional("sliding_window", int, 4096)
    n_dense = hf.get("first_k_dense_replace", 0)
    turn_anyway = hf.get("prefix_dense_sliding_window_pattern", 1) == 1
    types = llama_like.layer_types(hf, _prefixed_types(hf, n_dense))
    kinds = mixtures.mlp_layer_types(hf, mixtures.dense_first(hf, n_dense))
    mixture, dense = _mixture(hf), _dense(hf)

    def block(kind: str, of: str) -> nn.ParallelConfig:
        local = kind == llama_like.SLIDING and window is not None
        return nn.ParallelConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                head_dim=hf.get("head_dim", 128),
                position=rope
                if local or (of == mixtures.DENSE and turn_anyway)
                else nn.NoPositionConfig(),
                window=window if local else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=mixture if of == mixtures.SPARSE else dense,
        )

    pairs = list(zip(types, kinds, strict=True))
    return llama_like.decoder(
        hf,
        [block(*pair) for pair in pairs],
        norm,
        names=[f"{llama_like.SHORT_NAMES[kind]}_{of}" for kind, of in pairs],
        tied=True,
        head=scaled(hf),
    )


def _either_norm(hf: Fields) -> nn.LayerNormConfig | nn.RMSNormConfig:
    eps = hf.optional("rms_norm_eps", float)
    if eps is None:
        return layer_norm(hf)
    hf.ignore("layer_norm_eps")
    return nn.RMSNormConfig(eps=eps)


def _prefixed_types(hf: Fields, n_dense: int) -> list[str]:
    """Return layer types: every n-th layer has full attention, the others a window.

    The leading dense layers and the layers after them are counted separately.
    """
    dense, sparse = (
        llama_like.every(hf, key, default)
        for key, default in (
            ("prefix_dense_sliding_window_pattern", 1),
            ("sliding_window_pattern", 4),
        )
    )
    last = [*dense[:n_dense], *sparse[: len(sparse) - n_dense]]
    return [llama_like.FULL if one else llama_like.SLIDING for one in last]


def _mixture(hf: Fields) -> nn.MoEConfig:
    score, n_shared = hf.get("expert_selection_fn", "softmax"), hf.get("num_shared_experts", 0)
    if score not in ("softmax", "sigmoid"):
        remedy = nearest(score, ("softmax", "sigmoid"))
        raise ConfigError(f"{hf.where}: expert_selection_fn {score!r} is unknown; {remedy}")
    how = hf.get("shared_expert_combination_strategy", AVERAGE)
    if how not in (AVERAGE, SUM):
        remedy = nearest(how, (AVERAGE, SUM))
        raise ConfigError(
            f"{hf.where}: shared_expert_combination_strategy {how!r} is unknown; {remedy}"
        )
    normalize = hf.get("norm_topk_prob", True)
    d_ff = hf.need("intermediate_size", int)
    return nn.MoEConfig(
        n_experts=hf.get("num_experts", 8),
        top_k=hf.get("num_experts_per_tok", 2),
        d_ff=d_ff,
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(score=score, normalize=normalize or score == "softmax"),
        shared=llama_like.gated_mlp(hf, d_ff=n_shared * d_ff) if n_shared else None,
        multiplier=0.5 if n_shared and how == AVERAGE else 1.0,
    )


def _dense(hf: Fields) -> nn.GatedMlpConfig:
    width = hf.optional("prefix_dense_intermediate_size", int)
    return llama_like.gated_mlp(hf, d_ff=width or hf.need("intermediate_size", int))


def dense_layers_turn(data: Data) -> int:
    """Return `prefix_dense_sliding_window_pattern`: 1 if dense, full layers use RoPE, else 2."""
    for layer in data["layers"]:
        attention = layer["attention"]
        if layer["feed_forward"]["kind"] != "moe" and attention["window"] is None:
            return 1 if attention["position"]["kind"] == "rope" else 2
    raise KeyError("prefix_dense_sliding_window_pattern")


def norm_eps(kind: str) -> FieldPath:
    """Return a function that finds the epsilon of a config's final norm if it has this kind."""

    def write(data: Data) -> object:
        if data["final_norm"]["kind"] != kind:
            raise KeyError("eps")
        return data["final_norm"]["eps"]

    return write


def combination(data: Data) -> str:
    """Return `shared_expert_combination_strategy`: add or average routed and shared outputs."""
    return SUM if look_up(data, mixtures.of_sparse("multiplier")) == 1.0 else AVERAGE


HUGGING_FACE = (
    Family(
        model_type="cohere2_moe",
        architecture="Cohere2MoeForCausalLM",
        read=read,
        keys=COHERE_KEYS
        | {
            "layer_norm_eps": norm_eps("layer_norm"),
            "rms_norm_eps": norm_eps("rms_norm"),
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
            "mlp_layer_types": mixtures.written_mlp_layer_types,
            "prefix_dense_sliding_window_pattern": dense_layers_turn,
            "prefix_dense_intermediate_size": mixtures.of_dense("d_ff"),
            "intermediate_size": mixtures.of_sparse("d_ff"),
            "num_experts": mixtures.of_sparse("n_experts"),
            "num_experts_per_tok": mixtures.of_sparse("top_k"),
            "num_shared_experts": mixtures.n_shared_experts,
            "expert_selection_fn": mixtures.of_sparse("router.score"),
            "norm_topk_prob": mixtures.of_sparse("router.normalize"),
            "shared_expert_combination_strategy": combination,
        },
        rules=instead(*mixtures.MIXTURE_RULES, base=COHERE_RULES),
    ),
)
