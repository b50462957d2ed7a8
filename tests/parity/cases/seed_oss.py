"""Small shapes of Seed-OSS."""

from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "seed_oss": [
        GROUPED | {"head_dim": 8},
        SMALL
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "attention_out_bias": True,
            "head_dim": None,
        },
        GROUPED | {"mlp_bias": True, "head_dim": 6, "tie_word_embeddings": True},
    ],
}
