"""DeepSeek-V2 (2405.04434) and DeepSeek-V3 (2412.19437). R1 (2501.12948) is built like V3."""

from collections.abc import Mapping
from typing import Any

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.errors import nearest
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Data, Family, look_up
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead

GREEDY, LIMITED = "greedy", "group_limited_greedy"


def read_v2(hf: Fields) -> nn.DecoderConfig:
    """Read a DeepSeek-V2 config: softmax scores; experts may be chosen from the best groups."""
    hf.refuse("norm_topk_prob", False, "transformers ignores it, unlike DeepSeek's own code")
    _refuse_other_choices(hf, "softmax")
    width = hf.get("moe_intermediate_size", 1407)
    bias = hf.get("mlp_bias", False)
    mixture = nn.MoEConfig(
        n_experts=hf.get("n_routed_experts", 64),
        top_k=hf.need("num_experts_per_tok", int),
        d_ff=width,
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(scale=hf.get("routed_scaling_factor", 1.0), **_v2_groups(hf)),
        shared=llama_like.gated_mlp(hf, d_ff=width * hf.get("n_shared_experts", 2), bias=bias),
    )
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 11008), bias=bias)
    kinds = mixtures.dense_first(hf, hf.get("first_k_dense_replace", 0))
    attention = llama_like.latent_attention(hf, neighbours=True, precision="float32")
    return _decoder(hf, attention, kinds, mixture, dense)


def _v2_groups(hf: Fields) -> Mapping[str, Any]:
    method = hf.get("topk_method", GREEDY)
    groups, chosen = hf.optional("n_group", int), hf.optional("topk_group", int)
    if method == GREEDY:
        return {}
    if method != LIMITED:
        remedy = nearest(method, (GREEDY, LIMITED))
        raise ConfigError(f"{hf.where}: topk_method {method!r} is unknown; {remedy}")
    if groups is None or chosen is None:
        raise ConfigError(f"{hf.where}: {LIMITED} needs n_group and topk_group; set both")
    return {"n_groups": groups, "top_groups": chosen}


def read_v3(hf: Fields) -> nn.DecoderConfig:
    """Read a DeepSeek-V3 config: sigmoid scores, and expert biases that only affect the choice."""
    hf.ignore("num_nextn_predict_layers", "num_mtp_layers")  # heads used only in training
    hf.refuse("topk_method", "noaux_tc", "DeepSeek-V3 chooses experts by score plus bias")
    _refuse_other_choices(hf, "sigmoid")
    mixture = mixtures.sigmoid_mixture(
        hf, n_experts=256, top_k=8, d_ff=2048, scale=2.5, n_group=8, topk_group=4
    )
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 18432))
    neighbours = hf.optional("rope_interleave", bool, True) or False
    kinds = mixtures.dense_first(hf, hf.get("first_k_dense_replace", 3))
    return _decoder(
        hf, llama_like.latent_attention(hf, neighbours=neighbours), kinds, mixture, dense
    )


def _refuse_other_choices(hf: Fields, score: str) -> None:
    """Raise an error for values of DeepSeek's keys that transformers does not implement."""
    hf.ignore("aux_loss_alpha", "ep_size", "seq_aux")  # used only in training
    hf.refuse("moe_layer_freq", 1, "every layer after the dense ones is a mixture")
    hf.refuse("scoring_func", score, f"this model uses {score} scores")


def _decoder(
    hf: Fields,
    attention: nn.LatentAttentionConfig,
    kinds: list[str],
    mixture: nn.MoEConfig,
    dense: nn.GatedMlpConfig,
) -> nn.DecoderConfig:
    norm = llama_like.rms_norm(hf)
    layers = [
        nn.PreNormConfig(
            norm=norm,
            attention=attention,
            feed_forward=mixture if kind == mixtures.SPARSE else dense,
        )
        for kind in kinds
    ]
    return llama_like.decoder(hf, layers, norm, names=kinds)


def written_choice(data: Data) -> str:
    """Return `topk_method` for the `config.json` of DeepSeek-V2."""
    return GREEDY if look_up(data, mixtures.of_sparse("router.n_groups")) == 1 else LIMITED


DEEPSEEK_KEYS = (
    llama_like.KEYS | llama_like.LATENT_KEYS | mixtures.MIXTURE_KEYS | mixtures.ROUTER_KEYS
)
DEEPSEEK_RULES = instead(*llama_like.LATENT_RULES, *mixtures.MIXTURE_RULES, base=llama_like.RULES)

HUGGING_FACE = (
    Family(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        read=read_v2,
        keys=DEEPSEEK_KEYS
        | {"topk_method": written_choice, "mlp_bias": mixtures.of_sparse("shared.bias")},
        rules=DEEPSEEK_RULES,
    ),
    Family(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        read=read_v3,
        keys=DEEPSEEK_KEYS | llama_like.PAIRING_KEYS,
        rules=DEEPSEEK_RULES,
        # Layer 61 of the published files is for multi-token prediction.
        ignored=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.61\..*"),
    ),
)
