"""Small shapes of XGLM."""

SMALL = {
    "d_model": 32,
    "num_layers": 2,
    "attention_heads": 4,
    "ffn_dim": 40,
    "max_position_embeddings": 64,
}
CASES = {
    "xglm": [
        SMALL,
        SMALL
        | {
            "d_model": 30,
            "attention_heads": 6,
            "scale_embedding": False,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ],
}
