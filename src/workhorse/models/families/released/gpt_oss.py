"""gpt-oss-20b and gpt-oss-120b (OpenAI, 2508.10925)."""

from workhorse.models.families.released.release import Release

gpt_oss = Release(
    "gpt_oss",
    "2508.10925 Table 1; the released config.json",
    vocab_size=201_088,
    hidden_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=2880,
    num_experts_per_tok=4,
    sliding_window=128,
    attention_bias=True,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    tie_word_embeddings=False,
)

PRESETS = (
    gpt_oss(
        "gpt-oss-20b", 20_914_757_184, printed="20.91B", num_hidden_layers=24, num_local_experts=32
    ),
    gpt_oss(
        "gpt-oss-120b",
        116_829_156_672,
        printed="116.83B",
        num_hidden_layers=36,
        num_local_experts=128,
    ),
)
