"""Small shapes of Solar Open."""

from tests.parity.cases.llama import GROUPED

EXPERTS = {
    "head_dim": 6,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
CASES = {
    "solar_open": [
        GROUPED | EXPERTS,
        GROUPED
        | EXPERTS
        | {
            "head_dim": 8,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_theta": 500.0},
        },
    ],
}
