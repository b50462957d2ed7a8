"""GLM-4 (2406.12793)."""

from workhorse.models.families.released.release import Release

glm4 = Release("glm", "2406.12793; the released config.json of glm-4-9b-chat-hf")

PRESETS = (
    glm4(
        "glm-4-9b-chat",
        9_399_951_360,
        printed="9B",
        vocab_size=151_552,
        hidden_size=4096,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=13696,
        attention_bias=True,
        max_position_embeddings=131_072,
        rms_norm_eps=1.5625e-07,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    ),
)
