"""Granite 3.3 (IBM, 2025)."""

from workhorse.models.families.released.release import Release

granite = Release("granite", "IBM, 2025; the released config.json of granite-3.3-8b-instruct")

PRESETS = (
    granite(
        "granite-3.3-8b",
        8_170_864_640,
        printed="8B",
        vocab_size=49159,
        hidden_size=4096,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=12800,
        embedding_multiplier=12.0,
        attention_multiplier=0.0078125,
        residual_multiplier=0.22,
        logits_scaling=16.0,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=1e7,
        tie_word_embeddings=True,
    ),
)
