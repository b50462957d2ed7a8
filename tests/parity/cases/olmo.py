"""Small shapes of OLMo, OLMo 2, OLMo 3 and OLMoE."""

from tests.parity.cases.llama import GROUPED, SMALL

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "olmo": [
        SMALL | {"clip_qkv": 0.5},
        GROUPED | {"attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ],
    "olmo2": [
        GROUPED,
        SMALL | {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        GROUPED | {"head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
    "olmo3": [
        GROUPED | {"num_hidden_layers": 4, "sliding_window": 5},
        GROUPED
        | {
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_theta": 500.0, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 600.0},
            },
        },
        GROUPED
        | {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "rope_scaling": YARN,
            "attention_bias": True,
        },
    ],
    "olmoe": [
        GROUPED | EXPERTS,
        SMALL | EXPERTS | {"norm_topk_prob": True, "attention_bias": True},
    ],
}
