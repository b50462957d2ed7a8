"""Mistral 7B (2310.06825) and Mixtral of Experts (2401.04088)."""

from workhorse.models.families.released.release import Release

mistral = Release(
    "mistral",
    "2310.06825 Table 1; the released config.json",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
mixtral = Release(
    "mixtral",
    "2401.04088 Table 1; the released config.json",
    vocab_size=32000,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    sliding_window=None,
    tie_word_embeddings=False,
)

PRESETS = (
    mistral(
        "mistral-7b-v0.1",
        7_241_732_096,
        printed="7B",
        vocab_size=32000,
        rope_theta=10_000.0,
        sliding_window=4096,
    ),
    mistral(
        "mistral-7b-v0.3",
        7_248_023_552,
        printed="7B",
        vocab_size=32768,
        rope_theta=1e6,
        sliding_window=None,
        notes=("Since version 0.2 there is no window, and theta is 1e6.",),
    ),
    mixtral(
        "mixtral-8x7b",
        46_702_792_704,
        printed="47B",
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        intermediate_size=14336,
        max_position_embeddings=32768,
    ),
    mixtral(
        "mixtral-8x22b",
        140_620_634_112,
        printed="141B",
        hidden_size=6144,
        num_hidden_layers=56,
        num_attention_heads=48,
        intermediate_size=16384,
        max_position_embeddings=65536,
    ),
)
