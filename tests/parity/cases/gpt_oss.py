"""Small shapes of gpt-oss."""

from tests.parity.cases.llama import GROUPED

SMALL = GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "gpt_oss": [
        SMALL | {"sliding_window": 5},
        SMALL
        | {
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": False,
            "num_experts_per_tok": 1,
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        SMALL
        | {
            "head_dim": 6,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
        },
    ],
}
