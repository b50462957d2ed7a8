"""Small shapes of BLOOM."""

SMALL = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
CASES = {
    "bloom": [
        SMALL,
        SMALL | {"hidden_size": 36, "n_head": 6, "apply_residual_connection_post_layernorm": True},
        SMALL
        | {
            "hidden_size": 30,
            "n_head": 5,
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 0.01,
        },
    ],
}
