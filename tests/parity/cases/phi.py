"""Small shapes of Phi, Phi-3 and Phi-3.5-MoE."""

from tests.parity.cases.llama import GROUPED, LONG, SMALL

LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, **LONG}
MSCALE = {"short_mscale": 1.2, "long_mscale": 1.2}
CASES = {
    "phi": [
        SMALL,
        GROUPED | {"qk_layernorm": True, "partial_rotary_factor": 0.75, "hidden_act": "relu"},
        GROUPED | {"partial_rotary_factor": 1.0, "layer_norm_eps": 1e-6},
    ],
    "phi3": [
        GROUPED | {"tie_word_embeddings": True, "sliding_window": 5},
        GROUPED | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        GROUPED | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
        GROUPED | {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.75}},
    ],
    "phimoe": [
        GROUPED | {"num_local_experts": 4, "router_jitter_noise": 0.3},
        GROUPED
        | {
            "num_local_experts": 3,
            "rope_parameters": LONGROPE | MSCALE | {"original_max_position_embeddings": 32},
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 6,
        },
    ],
}
