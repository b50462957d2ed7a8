"""Small shapes of Ministral 8B."""

from tests.parity.cases.llama import GROUPED, SMALL

HEADS = GROUPED | {"head_dim": 6}
CASES = {
    "ministral": [
        HEADS | {"sliding_window": 5, "tie_word_embeddings": True},
        HEADS
        | {
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_theta": 500.0},
        },
        SMALL | {"num_key_value_heads": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    ],
}
