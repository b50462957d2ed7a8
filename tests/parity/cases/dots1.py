"""Small shapes of dots.llm1."""

from tests.parity.cases.llama import GROUPED, SMALL

EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
}
CASES = {
    "dots1": [
        GROUPED | EXPERTS | {"num_hidden_layers": 3, "first_k_dense_replace": 1},
        SMALL
        | EXPERTS
        | {
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "max_window_layers": 2,
            "sliding_window": 5,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        GROUPED
        | EXPERTS
        | {
            "num_hidden_layers": 3,
            "head_dim": 6,
            "first_k_dense_replace": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
}
