"""Small shapes of Aria's language model."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "aria_text": [
        GROUPED | {"moe_num_experts": 6, "moe_topk": 3},
        SMALL
        | {
            "moe_num_experts": 4,
            "moe_topk": 1,
            "moe_num_shared_experts": 1,
            "head_dim": 6,
            "hidden_act": "gelu",
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    ],
}
