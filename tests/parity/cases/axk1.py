"""Small shapes of A.X K1."""

from tests.parity.cases.deepseek import GROUPS, LATENT, SMALL, YARN

EXPERTS = {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
WHOLE = {"n_group": 1, "topk_group": 1}
CASES = {
    "axk1": [
        SMALL | LATENT | EXPERTS | GROUPS | {"num_hidden_layers": 3},
        SMALL
        | LATENT
        | EXPERTS
        | WHOLE
        | {
            "mlp_layer_types": ["sparse", "dense"],
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "rope_interleave": False,
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
        SMALL | LATENT | EXPERTS | WHOLE | {"rope_parameters": YARN},
    ],
}
