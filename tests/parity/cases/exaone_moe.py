"""Small shapes of K-EXAONE."""

from tests.parity.cases.llama import GROUPED, SMALL

EXPERTS = {
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
CASES = {
    "exaone_moe": [
        GROUPED | EXPERTS | {"num_hidden_layers": 4, "sliding_window": 5},
        GROUPED
        | EXPERTS
        | {
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "head_dim": 6,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
        },
        SMALL
        | EXPERTS
        | {
            "num_key_value_heads": 4,
            "layer_types": ["full_attention"] * 2,
            "first_k_dense_replace": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ],
}
