"""Small shapes of SmolLM3."""

from tests.parity.cases.llama import GROUPED

CASES = {
    "smollm3": [
        GROUPED | {"num_hidden_layers": 4, "tie_word_embeddings": True},
        GROUPED | {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5},
        GROUPED | {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "attention_bias": True},
        GROUPED
        | {
            "head_dim": 6,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "no_rope_layers": [1, 0],
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ],
}
