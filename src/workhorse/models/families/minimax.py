"""MiniMax-M2 (2025), whose predecessor is MiniMax-01 (2501.08313)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same, stacked
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a MiniMax-M2 config: a sigmoid-routed mixture of experts in every layer.

    One norm covers the queries of all heads, another the keys of all heads.
    """
    hf.ignore("router_jitter_noise", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    hf.refuse(
        "scoring_func", "sigmoid", "transformers implements only sigmoid scores for MiniMax-M2"
    )
    hf.refuse(
        "use_qk_norm", True, "MiniMax-M2 in transformers always has norms on queries and keys"
    )
    hf.refuse("qk_norm_type", "per_layer", "transformers implements only per_layer")
    hf.refuse("shared_intermediate_size", 0, "transformers has no shared expert here")
    hf.refuse(
        "attn_type_list",
        [1] * hf.need("num_hidden_layers", int),
        "linear attention is not implemented",
    )
    norm = llama_like.rms_norm(hf)
    head_dim = hf.get("head_dim", 128)
    turning = hf.get("rotary_dim", head_dim)  # key of files older than the transformers class
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 8),
            head_dim=head_dim,
            position=read_rope(hf, theta=5e6, fraction=turning / head_dim),
            qk_norm=nn.QKNormConfig(norm=norm, over="full"),
        ),
        feed_forward=nn.MoEConfig(
            n_experts=hf.get("num_local_experts", 256),
            top_k=hf.get("num_experts_per_tok", 8),
            d_ff=hf.get("intermediate_size", 1536),
            activation=llama_like.activation(hf),
            router=nn.RouterConfig(score="sigmoid", normalize=True, selection_bias=True),
        ),
    )
    return llama_like.decoder(hf, block, norm)


FEED_FORWARD, MIXTURE = "layers.{i}.feed_forward.", "model.layers.{i}.block_sparse_moe."

HUGGING_FACE = (
    Family(
        model_type="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "num_local_experts": "block.feed_forward.n_experts",
            "num_experts_per_tok": "block.feed_forward.top_k",
        },
        rules=instead(
            same("layers.{i}.attention.q_norm.norm", "model.layers.{i}.self_attn.q_norm"),
            same("layers.{i}.attention.k_norm.norm", "model.layers.{i}.self_attn.k_norm"),
            same(FEED_FORWARD + "router.proj", MIXTURE + "gate"),
            same(FEED_FORWARD + "router.selection_bias", MIXTURE + "e_score_correction_bias"),
            stacked(FEED_FORWARD + "experts.gate_proj", MIXTURE + "experts.{*}.w1"),
            stacked(FEED_FORWARD + "experts.down_proj", MIXTURE + "experts.{*}.w2"),
            stacked(FEED_FORWARD + "experts.up_proj", MIXTURE + "experts.{*}.w3"),
            base=llama_like.RULES,
        ),
    ),
)
