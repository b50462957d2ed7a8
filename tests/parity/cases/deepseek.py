"""Small shapes of DeepSeek-V2 and DeepSeek-V3."""

from tests.parity.cases.llama import SMALL as HEADS

SMALL = HEADS | {"num_key_value_heads": 4}
LATENT = {
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.3,
}
WITHOUT_MSCALE = {name: value for name, value in YARN.items() if name != "mscale"}
GROUPS = {"n_group": 4, "topk_group": 2}
CASES = {
    "deepseek_v2": [
        SMALL | LATENT | EXPERTS,
        SMALL
        | LATENT
        | EXPERTS
        | GROUPS
        | {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "n_shared_experts": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        SMALL
        | LATENT
        | EXPERTS
        | GROUPS
        | {
            "first_k_dense_replace": 0,
            "v_head_dim": 14,
            "rms_norm_eps": 1e-3,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": YARN,
        },
        SMALL | LATENT | EXPERTS | {"mlp_bias": True, "rope_parameters": WITHOUT_MSCALE},
    ],
    "deepseek_v3": [
        SMALL | LATENT | EXPERTS | GROUPS,
        SMALL
        | LATENT
        | EXPERTS
        | {
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        SMALL
        | LATENT
        | EXPERTS
        | {
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "v_head_dim": 14,
            "rms_norm_eps": 1e-3,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": YARN,
        },
        SMALL
        | LATENT
        | EXPERTS
        | GROUPS
        | {"first_k_dense_replace": 0, "rope_interleave": False, "rope_parameters": YARN},
    ],
}
