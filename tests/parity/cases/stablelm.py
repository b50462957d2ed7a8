"""Small shapes of StableLM."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "stablelm": [
        GROUPED | {"hidden_size": 64, "qk_layernorm": True},
        SMALL
        | {
            "num_key_value_heads": 4,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "partial_rotary_factor": 1.0,
            "layer_norm_eps": 0.01,
        },
        GROUPED
        | {
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "partial_rotary_factor": 0.5,
            "rope_theta": 500.0,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ],
}
