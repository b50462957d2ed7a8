"""Small shapes of Cohere 2 with mixtures."""

from tests.parity.cases.llama import GROUPED

SPARSE = GROUPED | {
    "head_dim": 6,
    "num_hidden_layers": 5,
    "sliding_window": 5,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
CASES = {
    "cohere2_moe": [
        SPARSE | {"num_shared_experts": 2, "tie_word_embeddings": True},
        SPARSE
        | {
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "first_k_dense_replace": 2,
            "prefix_dense_intermediate_size": 24,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "logit_scale": 2.0,
        },
        SPARSE
        | {
            "num_hidden_layers": 3,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "prefix_dense_sliding_window_pattern": 2,
        },
    ],
}
