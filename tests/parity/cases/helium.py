"""Small shapes of Helium; all heads together are as wide as the model."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "helium": [
        GROUPED | {"head_dim": 8},
        SMALL | {"head_dim": 8, "num_key_value_heads": 1, "attention_bias": True},
        GROUPED | {"head_dim": 8, "mlp_bias": True, "tie_word_embeddings": True},
    ],
}
