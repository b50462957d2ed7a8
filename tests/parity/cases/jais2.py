"""Small shapes of Jais 2."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "jais2": [
        SMALL | {"layer_norm_eps": 1e-3},
        GROUPED
        | {
            "attention_bias": False,
            "mlp_bias": False,
            "head_dim": 6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        },
    ],
}
