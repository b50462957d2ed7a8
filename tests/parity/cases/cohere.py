"""Small shapes of Command R and Command R7B."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "cohere": [
        GROUPED | {"tie_word_embeddings": True, "logit_scale": 0.25},
        SMALL | {"attention_bias": True, "layer_norm_eps": 1e-6, "hidden_act": "gelu"},
        GROUPED | {"use_qk_norm": True, "head_dim": 6},
    ],
    "cohere2": [
        GROUPED | {"num_hidden_layers": 4, "sliding_window": 5, "tie_word_embeddings": True},
        GROUPED | {"num_hidden_layers": 3, "sliding_window": 4, "sliding_window_pattern": 2},
        GROUPED
        | {
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": True,
            "logit_scale": 2.0,
        },
    ],
}
