"""Small shapes of Nemotron."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "nemotron": [
        GROUPED,
        SMALL
        | {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "partial_rotary_factor": 1.0,
        },
        GROUPED
        | {
            "head_dim": 12,
            "norm_eps": 0.01,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "rope_theta": 500.0,
        },
    ],
}
