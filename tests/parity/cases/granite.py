"""Small shapes of Granite and its mixtures."""

from tests.parity.cases.llama import GROUPED, SMALL

MULTIPLIED = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
CASES = {
    "granite": [
        GROUPED | MULTIPLIED,
        SMALL | MULTIPLIED | {"attention_bias": True, "mlp_bias": True},
        GROUPED | {"tie_word_embeddings": True, "hidden_act": "gelu", "rms_norm_eps": 1e-4},
    ],
    "granitemoe": [
        GROUPED | MULTIPLIED | EXPERTS,
        GROUPED | EXPERTS | {"attention_bias": True, "tie_word_embeddings": True},
        SMALL | MULTIPLIED | {"num_local_experts": 3, "num_experts_per_tok": 1},
    ],
    "granitemoeshared": [
        GROUPED | MULTIPLIED | EXPERTS | {"shared_intermediate_size": 24},
        GROUPED | MULTIPLIED | EXPERTS | {"shared_intermediate_size": 0},
        SMALL | EXPERTS | {"shared_intermediate_size": 9, "attention_bias": True},
    ],
}
