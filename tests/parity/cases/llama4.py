"""Small shapes of Llama 4."""

from tests.parity.cases.llama import GROUPED, SMALL

TEXT = {
    "head_dim": 8,
    "intermediate_size_mlp": 56,
    "num_local_experts": 5,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "num_hidden_layers": 5,
}
CASES = {
    "llama4_text": [
        GROUPED | TEXT,
        SMALL
        | TEXT
        | {
            "num_key_value_heads": 1,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        GROUPED
        | TEXT
        | {
            "num_hidden_layers": 4,
            "head_dim": 6,
            "moe_layers": [0, 3],
            "no_rope_layers": [0, 1, 1, 0],
            "layer_types": [
                "chunked_attention",
                "full_attention",
                "chunked_attention",
                "full_attention",
            ],
            "attention_chunk_size": 5,
            "attn_scale": 0.5,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ],
}
