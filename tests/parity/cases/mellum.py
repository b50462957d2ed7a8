"""Small shapes of Mellum 2."""

from tests.parity.cases.llama import GROUPED

EXPERTS = {
    "head_dim": 6,
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
CASES = {
    "mellum": [
        GROUPED | EXPERTS,
        GROUPED
        | EXPERTS
        | {
            "num_hidden_layers": 3,
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 5,
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
        GROUPED
        | EXPERTS
        | {
            "head_dim": 8,
            "layer_types": [GLOBAL, LOCAL],
            "sliding_window": 4,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                GLOBAL: YARN,
                LOCAL: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ],
}
