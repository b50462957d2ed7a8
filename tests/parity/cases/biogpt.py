"""Small shapes of BioGPT."""

from tests.parity.cases.llama import SMALL

CASES = {
    "biogpt": [
        SMALL | {"tie_word_embeddings": True},
        SMALL
        | {
            "hidden_size": 30,
            "num_attention_heads": 6,
            "scale_embedding": False,
            "hidden_act": "relu",
            "layer_norm_eps": 0.1,
        },
    ],
}
