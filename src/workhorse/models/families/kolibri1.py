"""Kolibri 1 (Aleph Alpha, 2026)."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    FULL,
    KEYS,
    RULES,
    SLIDING,
    activation,
    alternating,
    attention,
    decoder,
    gated_mlp,
    layer_types,
    rms_norm,
    written_layer_types,
    written_window,
)
from workhorse.models.huggingface.mixtures import FEED_FORWARD, MIXTURE_RULES
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import SandwichNormConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import RouterConfig
from workhorse.nn.positions.absolute import NoPositionConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a Kolibri 1 config: EXAONE 4's attention, sandwich norms, and mixtures of experts.

    Experts are chosen by logit plus bias, and weighted by the sigmoid of the logit.
    """
    hf = hf.renamed({"num_experts": "num_local_experts"})
    hf.ignore("intermediate_size")  # width of dense layers, which Kolibri 1 does not have
    norm, rope = rms_norm(hf), read_rope(hf)
    window = hf.get("sliding_window", 513)
    types = layer_types(hf, alternating(hf, (SLIDING,) * 4 + (FULL,)))
    mixture = MoEConfig(
        n_experts=hf.get("num_experts", 384),
        top_k=hf.get("num_experts_per_tok", 6),
        d_ff=hf.get("moe_intermediate_size", 512),
        activation=activation(hf),
        router=RouterConfig(
            score="sigmoid",
            normalize=hf.get("norm_topk_prob", False),
            selection_bias=True,
            bias_on="logit",
        ),
        shared=gated_mlp(hf, d_ff=hf.get("shared_expert_intermediate_size", 512)),
    )

    def block(kind: str) -> SandwichNormConfig:
        local = kind == SLIDING
        return SandwichNormConfig(
            norm=norm,
            attention=attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 4),
                head_dim=hf.get("head_dim", 128),
                position=rope if local else NoPositionConfig(),
                window=window if local else None,
                qk_norm=QKNormConfig(norm=norm),
            ),
            feed_forward=mixture,
        )

    return decoder(hf, [block(kind) for kind in types], norm, names=types)


HUGGING_FACE = (
    Family(
        model_type="kolibri1",
        architecture="Kolibri1ForCausalLM",
        read=read,
        keys={key: path for key, path in KEYS.items() if key != "intermediate_size"}
        | {
            "num_local_experts": "block.feed_forward.n_experts",
            "num_experts_per_tok": "block.feed_forward.top_k",
            "norm_topk_prob": "block.feed_forward.router.normalize",
            "moe_intermediate_size": "block.feed_forward.d_ff",
            "shared_expert_intermediate_size": "block.feed_forward.shared.d_ff",
            "sliding_window": written_window,
            "layer_types": written_layer_types,
        },
        rules=instead(
            same(FEED_FORWARD + "router.selection_bias", "model.layers.{i}.moe.router.expert_bias"),
            same("layers.{i}.attention_output_norm", "model.layers.{i}.post_attn_norm"),
            same("layers.{i}.feed_forward_output_norm", "model.layers.{i}.post_ffn_norm"),
            base=(*MIXTURE_RULES, *RULES),
        ),
    ),
)
