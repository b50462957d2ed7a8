"""Small shapes of GPT-Neo."""

SMALL = {
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "window_size": 5,
    "attention_types": [[["global", "local"], 2]],
}
CASES = {
    "gpt_neo": [
        SMALL,
        SMALL
        | {
            "hidden_size": 30,
            "num_heads": 6,
            "num_layers": 3,
            "attention_types": [[["local"], 2], [["global"], 1]],
            "intermediate_size": 50,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False,
        },
        SMALL | {"num_layers": 2, "attention_types": [[["global"], 2]]},
    ],
}
