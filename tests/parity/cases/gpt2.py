"""Small shapes of GPT-2."""

SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
CASES = {
    "gpt2": [
        SMALL,
        SMALL | {"n_embd": 30, "n_head": 6, "n_inner": 50, "tie_word_embeddings": False},
        SMALL | {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
        SMALL | {"scale_attn_weights": False},
    ],
}
