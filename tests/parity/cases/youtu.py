"""Small shapes of Youtu-LLM."""

from tests.parity.cases.deepseek import LATENT, SMALL, YARN

CASES = {
    "youtu": [
        SMALL | LATENT,
        SMALL
        | LATENT
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
        SMALL | LATENT | {"v_head_dim": 14, "rms_norm_eps": 1e-3, "rope_parameters": YARN},
    ],
}
