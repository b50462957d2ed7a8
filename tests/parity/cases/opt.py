"""Small shapes of OPT, including the layout of OPT-350M."""

SMALL = {
    "hidden_size": 32,
    "ffn_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CASES = {
    "opt": [
        SMALL,
        SMALL | {"do_layer_norm_before": False, "word_embed_proj_dim": 6},
        SMALL | {"enable_bias": False, "layer_norm_elementwise_affine": False},
        SMALL
        | {
            "hidden_size": 30,
            "num_attention_heads": 6,
            "_remove_final_layer_norm": True,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ],
}
