"""Small shapes of North Micro Vision's language model."""

from typing import Any

from tests.parity.cases.llama import GROUPED, SMALL

FULL, SLIDING = "full_attention", "sliding_attention"


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 500.0, **more}


CASES = {
    "cohere_compass_text": [
        GROUPED
        | {
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, SLIDING, FULL],
            "sliding_window": 5,
            "rope_parameters": {SLIDING: rope(mrope_section=[2, 1, 1]), FULL: None},
            "logit_scale": 0.25,
        },
        SMALL
        | {
            "rope_parameters": {FULL: rope(rope_theta=10000.0)},
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-3,
            "hidden_act": "gelu",
        },
        GROUPED
        | {
            "layer_types": [FULL, SLIDING],
            "sliding_window": 4,
            "rope_parameters": {SLIDING: rope(), FULL: rope(rope_type="linear", factor=2.0)},
        },
    ],
}
