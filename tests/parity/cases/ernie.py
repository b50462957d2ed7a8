"""Small shapes of ERNIE 4.5."""

from tests.parity.cases.llama import GROUPED, SMALL

EXPERTS = {
    "moe_intermediate_size": 12,
    "moe_num_experts": 8,
    "moe_k": 3,
    "num_hidden_layers": 3,
}
CASES = {
    "ernie4_5": [
        GROUPED | {"head_dim": 8},
        SMALL
        | {
            "num_key_value_heads": 1,
            "head_dim": 12,
            "use_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 500.0},
            "rms_norm_eps": 1e-4,
            "hidden_act": "gelu",
        },
        SMALL | {"num_key_value_heads": None, "head_dim": None},
    ],
    "ernie4_5_moe": [
        GROUPED | EXPERTS,
        GROUPED
        | EXPERTS
        | {
            "use_bias": True,
            "num_hidden_layers": 7,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 5,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 1,
            "rope_parameters": {"rope_theta": 500.0},
        },
        SMALL
        | EXPERTS
        | {
            "use_bias": True,
            "num_key_value_heads": 1,
            "moe_layer_start_index": 0,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-4,
        },
        GROUPED | EXPERTS | {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
        GROUPED | EXPERTS | {"num_hidden_layers": 2, "moe_layer_start_index": 2},
    ],
}
