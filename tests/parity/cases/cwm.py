"""Small shapes of CWM."""

from tests.parity.cases.llama import GROUPED

CASES = {
    "cwm": [
        GROUPED | {"num_hidden_layers": 5, "head_dim": 8, "sliding_window": 5},
        GROUPED
        | {
            "num_hidden_layers": 3,
            "head_dim": 6,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ],
}
