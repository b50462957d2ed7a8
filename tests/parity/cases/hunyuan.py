"""Small shapes of Hunyuan and Hy3."""

from tests.parity.cases.llama import GROUPED, SMALL

HEADS = GROUPED | {"head_dim": 8}
ROPE = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 1.0, "alpha": 50.0}
ALPHA = {"rope_parameters": ROPE}
EXPERTS = {
    "head_dim": 6,
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
}
CASES = {
    "hunyuan_v1_dense": [
        HEADS,
        SMALL
        | ALPHA
        | {
            "num_key_value_heads": 1,
            "head_dim": 6,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "hidden_act": "gelu",
        },
        SMALL
        | {
            "head_dim": 12,
            "max_position_embeddings": 16,  # below SEQ: `alpha` ignores the length
            "rope_theta": 500.0,
            "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
        },
        HEADS | {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ],
    "hunyuan_v1_moe": [
        HEADS | {"num_experts": 4, "moe_topk": 2},
        HEADS | ALPHA | {"num_experts": 4, "moe_topk": [1, 3, 1], "num_hidden_layers": 3},
        SMALL
        | {
            "num_experts": 5,
            "moe_topk": [2, 2],
            "num_key_value_heads": 1,
            "head_dim": 6,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
        },
    ],
    "hy_v3": [
        GROUPED | EXPERTS,
        GROUPED
        | EXPERTS
        | {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_theta": 500.0},
        },
    ],
}
