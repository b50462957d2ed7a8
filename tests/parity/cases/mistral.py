"""Small shapes of Mistral, Mixtral and Ministral 3."""

from tests.parity.cases.llama import GROUPED

GROWING = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, **GROWING}
CASES = {
    "mistral": [GROUPED | {"sliding_window": 5}, GROUPED | {"sliding_window": None, "head_dim": 6}],
    "mixtral": [
        GROUPED | {"num_local_experts": 4, "sliding_window": None},
        GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 6},
    ],
    "ministral3": [
        GROUPED | {"head_dim": 6, "rope_parameters": YARN},
        GROUPED
        | {
            "head_dim": 8,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
        GROUPED | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, **GROWING}},
        GROUPED | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}},
    ],
}
