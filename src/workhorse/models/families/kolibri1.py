"""Kolibri 1 (Aleph Alpha, 2026)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Kolibri 1 config: EXAONE 4's attention, sandwich norms, and mixtures of experts.

    Experts are chosen by logit plus bias, and weighted by the sigmoid of the logit.
    """
    hf = hf.renamed({"num_experts": "num_local_experts"})
    hf.ignore("intermediate_size")  # width of dense layers, which Kolibri 1 does not have
    norm, rope = llama_like.rms_norm(hf), read_rope(hf)
    window = hf.get("sliding_window", 513)
    types = llama_like.layer_types(
        hf, llama_like.alternating(hf, (llama_like.SLIDING,) * 4 + (llama_like.FULL,))
    )
    mixture = nn.MoEConfig(
        n_experts=hf.get("num_experts", 384),
        top_k=hf.get("num_experts_per_tok", 6),
        d_ff=hf.get("moe_intermediate_size", 512),
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(
            score="sigmoid",
            normalize=hf.get("norm_topk_prob", False),
            selection_bias=True,
            bias_on="logit",
        ),
        shared=llama_like.gated_mlp(hf, d_ff=hf.get("shared_expert_intermediate_size", 512)),
    )

    def block(kind: str) -> nn.SandwichNormConfig:
        local = kind == llama_like.SLIDING
        return nn.SandwichNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 4),
                head_dim=hf.get("head_dim", 128),
                position=rope if local else nn.NoPositionConfig(),
                window=window if local else None,
                qk_norm=nn.QKNormConfig(norm=norm),
            ),
            feed_forward=mixture,
        )

    return llama_like.decoder(hf, [block(kind) for kind in types], norm, names=types)


HUGGING_FACE = (
    Family(
        model_type="kolibri1",
        architecture="Kolibri1ForCausalLM",
        read=read,
        keys={key: path for key, path in llama_like.KEYS.items() if key != "intermediate_size"}
        | {
            "num_local_experts": "block.feed_forward.n_experts",
            "num_experts_per_tok": "block.feed_forward.top_k",
            "norm_topk_prob": "block.feed_forward.router.normalize",
            "moe_intermediate_size": "block.feed_forward.d_ff",
            "shared_expert_intermediate_size": "block.feed_forward.shared.d_ff",
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
        },
        rules=instead(
            same(
                mixtures.FEED_FORWARD + "router.selection_bias",
                "model.layers.{i}.moe.router.expert_bias",
            ),
            same("layers.{i}.attention_output_norm", "model.layers.{i}.post_attn_norm"),
            same("layers.{i}.feed_forward_output_norm", "model.layers.{i}.post_ffn_norm"),
            base=(*mixtures.MIXTURE_RULES, *llama_like.RULES),
        ),
    ),
)
