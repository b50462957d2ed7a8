"""Small shapes of Gemma."""

from tests.parity.cases.llama import GROUPED

SMALL = GROUPED | {"head_dim": 6, "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "gemma": [SMALL, SMALL | {"num_key_value_heads": 1, "attention_bias": True}],
    "gemma2": [
        SMALL | {"sliding_window": 5, "query_pre_attn_scalar": 9},
        SMALL
        | {
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ],
    "gemma3_text": [
        SMALL | {"num_hidden_layers": 6, "sliding_window": 5, "query_pre_attn_scalar": 9},
        SMALL
        | {
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "rope_theta": 500.0,
            "rope_local_base_freq": 700.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "final_logit_softcapping": 3.0,
        },
        SMALL
        | {
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_theta": 500.0, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 600.0},
            },
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ],
    "vaultgemma": [
        SMALL | {"sliding_window": 5, "query_pre_attn_scalar": 9},
        SMALL
        | {
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    ],
}
