"""Small shapes of GLM-4.7-Flash."""

from tests.parity.cases.deepseek import LATENT, SMALL, YARN

EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
}
CASES = {
    "glm4_moe_lite": [
        SMALL | LATENT | EXPERTS,
        SMALL
        | LATENT
        | EXPERTS
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": True,
        },
        SMALL | LATENT | EXPERTS | {"rms_norm_eps": 1e-3, "rope_parameters": YARN},
    ],
}
