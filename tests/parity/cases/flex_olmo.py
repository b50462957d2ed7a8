"""Small shapes of FlexOlmo."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "flex_olmo": [
        GROUPED | {"num_experts": 4, "num_experts_per_tok": 2},
        SMALL
        | {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 6,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_theta": 500.0},
        },
    ],
}
