"""Small shapes of AFM."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "arcee": [
        GROUPED | {"hidden_act": "relu2"},
        SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
        GROUPED | {"tie_word_embeddings": True, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
    ],
}
