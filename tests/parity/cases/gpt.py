"""Small shapes of GPT."""

from tests.parity.cases.gpt2 import SMALL

CASES = {
    "openai-gpt": [
        SMALL,
        SMALL | {"n_embd": 30, "n_head": 6, "afn": "relu", "layer_norm_epsilon": 1e-3},
        SMALL | {"afn": "silu", "n_layer": 3, "tie_word_embeddings": False},
    ],
}
