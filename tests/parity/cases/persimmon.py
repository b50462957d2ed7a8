"""Small shapes of Persimmon."""

from tests.parity.cases.llama import SMALL

CASES = {
    "persimmon": [
        SMALL,
        SMALL | {"qk_layernorm": False, "partial_rotary_factor": 0.25, "hidden_act": "gelu"},
        SMALL
        | {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "layer_norm_eps": 0.01,
            "tie_word_embeddings": True,
            "rope_theta": 500.0,
        },
    ],
}
