"""Small shapes of Qwen2 and Qwen3."""

from tests.parity.cases.llama import GROUPED

WINDOW = {"use_sliding_window": True, "sliding_window": 5}
SPARSE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = SPARSE | {"shared_expert_intermediate_size": 28}
CASES = {
    "qwen2": [
        GROUPED | {"tie_word_embeddings": True},
        GROUPED | WINDOW | {"num_hidden_layers": 3, "max_window_layers": 1},
        GROUPED | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
        GROUPED | {"sliding_window": 5, "rms_norm_eps": 1e-5, "hidden_act": "gelu"},
    ],
    "qwen3": [
        GROUPED | {"head_dim": 6, "attention_bias": True},
        GROUPED | WINDOW | {"head_dim": 8, "max_window_layers": 1, "tie_word_embeddings": True},
    ],
    "qwen2_moe": [
        SHARED | {"num_hidden_layers": 3, "decoder_sparse_step": 2},
        SHARED | {"num_hidden_layers": 3, "mlp_only_layers": [0], "norm_topk_prob": True},
        SHARED | WINDOW | {"num_hidden_layers": 3, "max_window_layers": 2, "qkv_bias": False},
        SHARED | {"sliding_window": 5, "num_experts_per_tok": 1},
    ],
    "qwen3_moe": [
        SPARSE | {"head_dim": 6, "norm_topk_prob": True},
        SPARSE | WINDOW | {"attention_bias": True, "mlp_only_layers": [1]},
        SPARSE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    ],
}
