"""Small shapes of Flint."""

from tests.parity.cases.llama import GROUPED

SPARSE = GROUPED | {
    "head_dim": 6,
    "num_hidden_layers": 4,
    "sliding_window": 5,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
CASES = {
    "flint": [
        SPARSE,
        SPARSE
        | {
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
        },
    ],
}
