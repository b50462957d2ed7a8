"""Small shapes of IQuest-Coder."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "iquestcoder": [
        GROUPED | {"head_dim": 10},
        SMALL
        | {
            "num_key_value_heads": 4,
            "head_dim": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ],
}
