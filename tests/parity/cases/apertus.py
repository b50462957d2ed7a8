"""Small shapes of Apertus."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "apertus": [
        GROUPED,
        SMALL | {"attention_bias": True, "head_dim": 6, "tie_word_embeddings": True},
        GROUPED
        | {
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ],
}
