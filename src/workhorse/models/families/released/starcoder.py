"""StarCoder 2 (2402.19173)."""

from workhorse.models.families.released.release import Release

starcoder2 = Release(
    "starcoder2",
    "2402.19173; the released config.json",
    vocab_size=49152,
    use_bias=True,
    sliding_window=4096,
    max_position_embeddings=16384,
    norm_epsilon=1e-5,
    hidden_act="gelu_pytorch_tanh",
)

PRESETS = (
    starcoder2(
        "starcoder2-3b",
        3_030_371_328,
        printed="3B",
        hidden_size=3072,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
        intermediate_size=12288,
        rope_theta=999_999.4420358813,
    ),
    starcoder2(
        "starcoder2-7b",
        7_173_923_840,
        printed="7B",
        hidden_size=4608,
        num_hidden_layers=32,
        num_attention_heads=36,
        num_key_value_heads=4,
        intermediate_size=18432,
        rope_theta=1e6,
    ),
)
