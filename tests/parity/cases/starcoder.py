"""Small shapes of StarCoder, with shared and with separate keys and values, and StarCoder 2."""

from tests.parity.cases import llama
from tests.parity.cases.gpt2 import SMALL

CASES = {
    "gpt_bigcode": [
        SMALL,
        SMALL | {"multi_query": False, "n_embd": 30, "n_head": 6, "n_inner": 50},
        SMALL
        | {
            "scale_attn_weights": False,
            "activation_function": "gelu",
            "layer_norm_epsilon": 0.01,
            "tie_word_embeddings": False,
        },
    ],
    "starcoder2": [
        llama.GROUPED | {"sliding_window": 5},
        llama.SMALL
        | {
            "num_key_value_heads": 1,
            "use_bias": False,
            "norm_epsilon": 0.01,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ],
}
