"""Small shapes of BitNet."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "bitnet": [
        GROUPED,
        SMALL
        | {
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-3,
        },
        GROUPED
        | {
            "num_key_value_heads": 1,
            "intermediate_size": 24,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    ],
}
