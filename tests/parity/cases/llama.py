"""Small shapes of LLaMA: odd heads, grouped heads, biases, tied and untied, every scaling."""

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GROUPED = SMALL | {"num_key_value_heads": 2}


def scaled(kind: str, **more: object) -> dict:
    return GROUPED | {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **more}}


LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}
CASES = {
    "llama": [
        SMALL,
        GROUPED | {"tie_word_embeddings": True, "head_dim": 6, "rms_norm_eps": 1e-5},
        GROUPED | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
        scaled("linear", factor=2.0),
        scaled(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        scaled("yarn", factor=4.0, original_max_position_embeddings=16),
        scaled("dynamic", factor=2.0),
        scaled("longrope", factor=4.0, original_max_position_embeddings=32, **LONG),
    ],
}
