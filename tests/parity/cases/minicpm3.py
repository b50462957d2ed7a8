"""Small shapes of MiniCPM3."""

from tests.parity.cases.deepseek import LATENT, SMALL

CASES = {
    "minicpm3": [
        SMALL | LATENT | {"scale_emb": 11.3, "dim_model_base": 8},
        SMALL
        | LATENT
        | {
            "q_lora_rank": None,
            "scale_depth": None,
            "dim_model_base": None,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        SMALL
        | LATENT
        | {"scale_emb": 1, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 500.0}},
    ],
}
