"""Small shapes of EXAONE 4."""

from tests.parity.cases.llama import GROUPED

LETTERS = ["sliding_attention", "full_attention"]
CASES = {
    "exaone4": [
        GROUPED | {"num_hidden_layers": 4, "sliding_window": 5, "tie_word_embeddings": True},
        GROUPED | {"sliding_window": None, "layer_types": ["full_attention"] * 2, "head_dim": 6},
        GROUPED | {"sliding_window": 4, "layer_types": LETTERS, "sliding_window_pattern": "LG"},
        GROUPED | {"num_hidden_layers": 3, "sliding_window": 4, "sliding_window_pattern": 2},
    ],
}
