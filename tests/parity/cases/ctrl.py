"""Small shapes of CTRL."""

SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "dff": 40}
CASES = {
    "ctrl": [
        SMALL,
        SMALL
        | {
            "n_embd": 35,
            "n_head": 5,
            "layer_norm_epsilon": 0.01,
            "tie_word_embeddings": False,
        },
    ],
}
