"""Small shapes of ModernBERT as a decoder."""

from tests.parity.cases.llama import SMALL

WHOLE = SMALL | {"cls_token_id": 1, "sep_token_id": 2, "tie_word_embeddings": True}
CASES = {
    "modernbert-decoder": [
        WHOLE | {"num_hidden_layers": 4, "local_attention": 10},
        WHOLE
        | {
            "num_hidden_layers": 3,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "global_rope_theta": 500.0,
            "local_rope_theta": 700.0,
            "norm_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
            "classifier_bias": True,
            "classifier_activation": "silu",
            "tie_word_embeddings": False,
        },
        WHOLE
        | {
            "local_attention": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "decoder_bias": False,
            "hidden_activation": "silu",
            "norm_eps": 1e-6,
        },
    ],
}
