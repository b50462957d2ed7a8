"""Small shapes of HyperCLOVA X."""

from tests.parity.cases.granite import MULTIPLIED
from tests.parity.cases.llama import GROUPED, SMALL

CASES = {
    "hyperclovax": [
        GROUPED | MULTIPLIED,
        SMALL
        | MULTIPLIED
        | {
            "use_post_norm": False,
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": None,
        },
        GROUPED | {"head_dim": 6, "tie_word_embeddings": True, "rms_norm_eps": 1e-4},
    ],
}
