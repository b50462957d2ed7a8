"""DBRX (Databricks, 2024)."""

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import Rule, Shape, Tensors, joined, reshaped, same
from workhorse.models.huggingface.rotation import ROPE_KEYS, read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a DBRX config: LayerNorm without bias, clipped q, k and v, and a mixture of experts."""
    hf.ignore("num_key_value_heads")  # a copy of the value in attn_config
    hf.refuse("tie_word_embeddings", False, "DBRX in transformers has no tied head")
    parts = hf.section("attn_config") or Fields({})
    experts = hf.section("ffn_config") or Fields({})
    experts.ignore("moe_loss_weight")
    experts.refuse(
        "hidden_size", hf.get("d_model", 2048), "the experts must have the width of the model"
    )
    normalize = experts.optional("moe_normalize_expert_weights", float, 1.0)
    if normalize is not None:
        experts.refuse(
            "moe_normalize_expert_weights", 1.0, "weights are always divided by their sum"
        )
    norm = nn.LayerNormConfig(eps=1e-5, bias=False)
    block = nn.PreNormConfig(
        norm=norm,
        attention=nn.AttentionConfig(
            n_heads=hf.get("n_heads", 16),
            n_kv_heads=parts.get("kv_n_heads", 1),
            clip=parts.need("clip_qkv", float),  # required by transformers
            position=read_rope(hf, theta=parts.get("rope_theta", 10_000.0)),
            dropout=parts.get("attn_pdrop", 0.0),
        ),
        feed_forward=nn.MoEConfig(
            n_experts=experts.get("moe_num_experts", 4),
            top_k=experts.get("moe_top_k", 1),
            d_ff=experts.get("ffn_hidden_size", 3584),
            activation=llama_like.activation(experts.section("ffn_act_fn") or Fields({}), "name"),
            router=nn.RouterConfig(score="softmax", normalize=normalize is not None),
        ),
        dropout=hf.get("resid_pdrop", 0.0),
    )
    return nn.DecoderConfig(
        vocab_size=hf.get("vocab_size", 32000),
        d_model=hf.get("d_model", 2048),
        n_layers=hf.get("n_layers", 24),
        max_seq_len=hf.get("max_seq_len", 2048),
        embedding=nn.EmbeddingConfig(dropout=hf.get("emb_pdrop", 0.0)),
        blocks={"main": block},
        final_norm=norm,
        init=nn.NormalInitConfig(std=hf.get("initializer_range", 0.02), residual="plain"),
    )


def attn_config(data: Data) -> Data:
    """Return `attn_config` for `config.json`: the options of the attention."""
    attention = data["block"]["attention"]
    return {
        "kv_n_heads": attention["n_kv_heads"],
        "clip_qkv": attention["clip"],
        "rope_theta": attention["position"]["theta"],
    }


def ffn_config(data: Data) -> Data:
    """Return `ffn_config` for `config.json`: the options of the mixture of experts."""
    mixture = data["block"]["feed_forward"]
    return {
        "hidden_size": data["d_model"],
        "ffn_hidden_size": mixture["d_ff"],
        "ffn_act_fn": {"name": llama_like.WRITTEN_ACTIVATIONS[mixture["activation"]]},
        "moe_num_experts": mixture["n_experts"],
        "moe_top_k": mixture["top_k"],
        "moe_normalize_expert_weights": 1.0 if mixture["router"]["normalize"] else None,
    }


def flat(shape: Shape) -> Shape:
    """Return the shape of one matrix that holds the rows of all experts."""
    return shape[0] * shape[1], shape[2]


def flat_transposed(ours: str, theirs: str) -> Rule:
    """Conversion rule for the matrices of all experts, stored transposed in one matrix."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: nn.BlockConfig) -> Tensors:
        del block
        experts = cast(Tensor, tensors[0].unflatten(0, (shapes[0][0], -1)))
        return [experts.mT]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: nn.BlockConfig) -> Tensors:
        del shapes, block
        return [tensors[0].mT.flatten(0, 1)]

    return Rule((ours,), (theirs,), take, put)


ATTENTION, THEIR_ATTENTION = "layers.{i}.attention.", "transformer.blocks.{i}.norm_attn_norm."
EXPERTS = "layers.{i}.feed_forward.experts."
THEIR_EXPERTS = "transformer.blocks.{i}.ffn.experts.mlp."

HUGGING_FACE = (
    Family(
        model_type="dbrx",
        architecture="DbrxForCausalLM",
        read=read,
        keys={
            "vocab_size": "vocab_size",
            "d_model": "d_model",
            "n_layers": "n_layers",
            "n_heads": "block.attention.n_heads",
            "max_seq_len": "max_seq_len",
            "attn_config": attn_config,
            "ffn_config": ffn_config,
            "tie_word_embeddings": "head.tied",
            **ROPE_KEYS,
        },
        rules=(
            same("embedding.tokens", "transformer.wte"),
            joined(
                (ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"),
                THEIR_ATTENTION + "attn.Wqkv",
            ),
            same(ATTENTION + "out_proj", THEIR_ATTENTION + "attn.out_proj"),
            same("layers.{i}.attention_norm", THEIR_ATTENTION + "norm_1"),
            same("layers.{i}.feed_forward_norm", THEIR_ATTENTION + "norm_2"),
            same("layers.{i}.feed_forward.router.proj", "transformer.blocks.{i}.ffn.router.layer"),
            reshaped(EXPERTS + "gate_proj.weight", THEIR_EXPERTS + "w1", flat),
            reshaped(EXPERTS + "up_proj.weight", THEIR_EXPERTS + "v1", flat),
            flat_transposed(EXPERTS + "down_proj.weight", THEIR_EXPERTS + "w2"),
            same("final_norm", "transformer.norm_f"),
            same("head.proj", "lm_head"),
        ),
    ),
)
