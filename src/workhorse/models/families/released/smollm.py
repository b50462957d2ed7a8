"""SmolLM2 (2502.02737) and SmolLM3 (Hugging Face, 2025)."""

from workhorse.models.families.released.release import Release

smollm2 = Release(
    "llama",
    "2502.02737; the released config.json",
    vocab_size=49152,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
smollm3 = Release("smollm3", "Hugging Face's announcement of 2025; the released config.json")

PRESETS = (
    smollm2(
        "smollm2-135m",
        134_515_008,
        printed="135M",
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        rope_theta=100_000.0,
    ),
    smollm2(
        "smollm2-360m",
        361_821_120,
        printed="360M",
        notes=("Named 360M; it has 361.8M.",),
        hidden_size=960,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
        intermediate_size=2560,
        rope_theta=100_000.0,
    ),
    smollm2(
        "smollm2-1.7b",
        1_711_376_384,
        printed="1.7B",
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        rope_theta=130_000.0,
    ),
    smollm3(
        "smollm3-3b",
        3_075_098_624,
        printed="3B",
        vocab_size=128_256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=11008,
        no_rope_layer_interval=4,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        tie_word_embeddings=True,
    ),
)
