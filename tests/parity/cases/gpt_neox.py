"""Small shapes of GPT-NeoX."""

from tests.parity.cases.llama import SMALL

JAPANESE = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
CASES = {
    "gpt_neox": [
        SMALL | {"hidden_size": 64},
        SMALL | {"use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500},
        SMALL | {"attention_bias": False, "hidden_act": "gelu_fast", "tie_word_embeddings": True},
        SMALL | {"rotary_pct": 0.65},  # 5 of 8 features, rounded up to 6
        SMALL
        | {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "layer_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 600.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ],
    "gpt_neox_japanese": [
        JAPANESE,
        JAPANESE | {"num_hidden_layers": 1, "rotary_pct": 0.5, "tie_word_embeddings": True},
        JAPANESE
        | {
            "num_hidden_layers": 3,
            "intermediate_multiple_size": 2,
            "rotary_emb_base": 500,
            "hidden_act": "relu",
            "layer_norm_eps": 1e-3,
        },
    ],
}
