"""Small shapes of Kolibri 1."""

from tests.parity.cases.llama import GROUPED

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
    "head_dim": 8,
}
CASES = {
    "kolibri1": [
        GROUPED | EXPERTS | {"num_hidden_layers": 5, "sliding_window": 5},
        GROUPED
        | EXPERTS
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 4,
            "head_dim": 6,
            "norm_topk_prob": True,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
        GROUPED
        | EXPERTS
        | {
            "sliding_window": 3,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    ],
}
