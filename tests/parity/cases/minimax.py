"""Small shapes of MiniMax-M2."""

from tests.parity.cases.llama import GROUPED, SMALL

EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
CASES = {
    "minimax_m2": [
        GROUPED | EXPERTS | {"head_dim": 8},
        SMALL
        | EXPERTS
        | {
            "head_dim": 12,
            "num_key_value_heads": 1,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
        GROUPED | EXPERTS | {"head_dim": 8, "rotary_dim": 4},
    ],
}
