"""Small shapes of nanochat."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "nanochat": [
        SMALL | {"final_logit_softcapping": 3.0},
        GROUPED | {"attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
        GROUPED | {"final_logit_softcapping": None, "head_dim": 6, "rms_norm_eps": 1e-5},
    ],
}
