"""Small shapes of GPT-J and CodeGen."""

from tests.parity.cases.gpt2 import SMALL

TURNED = SMALL | {"rotary_dim": 4}
WIDE = {"n_embd": 48, "n_head": 8, "rotary_dim": 6, "n_inner": 50, "layer_norm_epsilon": 1e-3}
CASES = {
    "gptj": [
        TURNED,
        SMALL | WIDE | {"activation_function": "relu", "tie_word_embeddings": True},
    ],
    "codegen": [
        TURNED,
        SMALL | WIDE | {"activation_function": "gelu", "tie_word_embeddings": True},
    ],
}
