"""What DeepSeek's descendants share: latent attention, its keys and its tensor names."""

import math
from typing import Literal

from workhorse.models.huggingface.family import FieldPath, equals
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.rotation import read_rope
from workhorse.models.huggingface.rules import Rule, interleaved_by, joined, same
from workhorse.nn.attention.latent import LatentAttentionConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.norms import RMSNormConfig
from workhorse.nn.positions.rope_scaling import YarnScalingConfig


def latent_attention(
    hf: Fields, *, neighbours: bool, precision: Literal["native", "float32"] = "native"
) -> LatentAttentionConfig:
    """The latent attention of a config.

    Args:
        hf: the config.
        neighbours: whether features are paired with their neighbours, or in halves.
        precision: of the rotation.
    """
    # every head has keys of its own; the widths are made of the other keys, whatever they say
    hf.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    bias = hf.get("attention_bias", False)
    nope_dim, rope_dim = hf.get("qk_nope_head_dim", 128), hf.get("qk_rope_head_dim", 64)
    position = read_rope(hf, pairing="interleaved" if neighbours else "half", precision=precision)
    yarn, scale = position.scaling, None
    if isinstance(yarn, YarnScalingConfig) and yarn.mscale_all_dim:
        scale = yarn.growth(yarn.mscale_all_dim) ** 2 / math.sqrt(nope_dim + rope_dim)
    return LatentAttentionConfig(
        n_heads=hf.need("num_attention_heads", int),
        q_rank=hf.optional("q_lora_rank", int, 1536),
        kv_rank=hf.get("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=hf.get("v_head_dim", 128),
        position=position,
        norm=RMSNormConfig(eps=1e-6),  # whatever `rms_norm_eps` is
        scale=scale,
        qkv_bias=bias,
        out_bias=bias,
        dropout=hf.get("attention_dropout", 0.0),
    )


LATENT_KEYS: dict[str, FieldPath] = {
    "num_key_value_heads": "block.attention.n_heads",
    "q_lora_rank": "block.attention.q_rank",
    "kv_lora_rank": "block.attention.kv_rank",
    "qk_nope_head_dim": "block.attention.nope_dim",
    "qk_rope_head_dim": "block.attention.rope_dim",
    "v_head_dim": "block.attention.value_dim",
    "attention_bias": "block.attention.qkv_bias",
}
"""Where the values of the usual keys stand in our config."""
PAIRING_KEYS: dict[str, FieldPath] = {
    "rope_interleave": equals("block.attention.position.pairing", "interleaved"),
}
"""For models that may rotate neighbours or halves; DeepSeek-V2 rotates neighbours."""


def _n_heads(block: BlockConfig) -> int:
    return block.attention.n_heads


OURS, THEIRS = "layers.{i}.attention.", "model.layers.{i}.self_attn."
LATENT_RULES: tuple[Rule, ...] = (
    same(OURS + "q_down_proj", THEIRS + "q_a_proj"),
    same(OURS + "q_norm", THEIRS + "q_a_layernorm"),
    same(OURS + "q_up_proj", THEIRS + "q_b_proj"),
    joined((OURS + "kv_down_proj", OURS + "k_rope_proj"), THEIRS + "kv_a_proj_with_mqa"),
    same(OURS + "kv_norm", THEIRS + "kv_a_layernorm"),
    interleaved_by((OURS + "k_up_proj", OURS + "v_up_proj"), THEIRS + "kv_b_proj", _n_heads),
)
"""The usual rules; they come before those of LLaMA."""
