"""DeepSeek-V2 (2405.04434) and DeepSeek-V3 (2412.19437)."""

from typing import Any

from workhorse.models.families.released.release import Release


def stretched(mscale: float) -> dict[str, Any]:
    """Return the YaRN scaling of a model first trained on sequences of 4,096 tokens."""
    return {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

deepseek_v2 = Release(
    "deepseek_v2",
    "2405.04434 §3.1.2 and Appendix B; the released config.json",
    vocab_size=102_400,
    rope_scaling=stretched(0.707),
    first_k_dense_replace=1,
    n_shared_experts=2,
    num_experts_per_tok=6,
    norm_topk_prob=False,
    **LATENT,
)
deepseek_v3 = Release(
    "deepseek_v3",
    "2412.19437 §4.2; the released config.json",
    vocab_size=129_280,
    rope_scaling=stretched(1.0),
    first_k_dense_replace=3,
    n_shared_experts=1,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    **LATENT,
)

PRESETS = (
    deepseek_v2(
        "deepseek-v2-lite",
        15_706_484_224,
        printed="15.7B",
        hidden_size=2048,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        q_lora_rank=None,
        n_routed_experts=64,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    ),
    deepseek_v2(
        "deepseek-v2",
        235_741_434_880,
        printed="236B",
        hidden_size=5120,
        num_hidden_layers=60,
        num_attention_heads=128,
        num_key_value_heads=128,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        q_lora_rank=1536,
        n_routed_experts=160,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
    ),
    deepseek_v3(
        "deepseek-v3",
        671_026_419_200,
        printed="671B",
        notes=(
            "The files also hold a 62nd layer, which predicts a second token in training; it is "
            "omitted.",
        ),
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        q_lora_rank=1536,
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    ),
)
