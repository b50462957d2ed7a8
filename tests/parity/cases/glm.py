"""Small shapes of GLM-4 and GLM-4.5."""

from tests.parity.cases.llama import GROUPED, SMALL

HEADS = GROUPED | {"head_dim": 8}
EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
}
CASES = {
    "glm": [
        HEADS,
        HEADS
        | {"attention_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
        HEADS | {"head_dim": 10},  # half of the head width is odd
        HEADS
        | {
            "head_dim": 12,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0},
            "rms_norm_eps": 1e-4,
        },
    ],
    "glm4": [
        HEADS,
        HEADS | {"attention_bias": False, "tie_word_embeddings": True},
        HEADS | {"head_dim": 12, "rope_parameters": {"rope_theta": 500.0}},
    ],
    "glm4_moe": [
        GROUPED | EXPERTS,
        GROUPED
        | EXPERTS
        | {
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "first_k_dense_replace": 2,
        },
        SMALL
        | EXPERTS
        | {
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ],
}
