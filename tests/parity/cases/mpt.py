"""Small shapes of MPT."""

SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
CASES = {
    "mpt": [
        SMALL,
        SMALL
        | {
            "d_model": 36,
            "n_heads": 6,
            "layer_norm_epsilon": 1e-3,
            "norm_type": "layernorm",
            "tie_word_embeddings": False,
        },
        SMALL | {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
    ],
}
