"""Small shapes of Granite with windows."""

from tests.parity.cases.granite import EXPERTS, MULTIPLIED
from tests.parity.cases.llama import GROUPED, SMALL

DEEP = {"num_hidden_layers": 5, "sliding_window": 5}
CASES = {
    "granite_swa": [
        GROUPED | MULTIPLIED | DEEP,
        GROUPED
        | MULTIPLIED
        | DEEP
        | {
            "layer_rope_theta": [0, 500.0, 10_000.0, 500.0, 0],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        SMALL
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "mlp_bias": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0},
        },
    ],
    "granitemoe_swa": [
        GROUPED | MULTIPLIED | DEEP | EXPERTS | {"shared_intermediate_size": 24},
        GROUPED
        | EXPERTS
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [500.0, 0],
            "sliding_window": 4,
            "attention_bias": True,
        },
    ],
}
