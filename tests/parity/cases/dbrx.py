"""Small shapes of DBRX."""

SMALL = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
ATTENTION = {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}
EXPERTS = {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2}
CASES = {
    "dbrx": [
        SMALL | {"attn_config": ATTENTION, "ffn_config": EXPERTS},
        SMALL
        | {
            "d_model": 48,
            "attn_config": ATTENTION | {"kv_n_heads": 1, "clip_qkv": 0.5},
            "ffn_config": EXPERTS
            | {"moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ],
}
