"""Small shapes of InternLM3."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "internlm3": [
        GROUPED | {"head_dim": 8},
        SMALL
        | {
            "head_dim": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-3,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        SMALL
        | {
            "num_key_value_heads": 1,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 6.0},
        },
    ],
}
