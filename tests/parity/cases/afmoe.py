"""Small shapes of AFMoE."""

from tests.parity.cases.llama import GROUPED, SMALL

EXPERTS = {"moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 8}
CASES = {
    "afmoe": [
        GROUPED | EXPERTS | {"num_hidden_layers": 5, "sliding_window": 5},
        SMALL
        | EXPERTS
        | {
            "num_hidden_layers": 4,
            "global_attn_every_n_layers": 2,
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            "route_scale": 2.5,
            "mup_enabled": True,
            "sliding_window": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        GROUPED
        | EXPERTS
        | {
            "num_dense_layers": 0,
            "head_dim": 6,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ],
}
