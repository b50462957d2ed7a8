"""Small shapes of Falcon: the 7B's layout, the larger models', and Falcon-RW's."""

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ALIBI = SMALL | {"alibi": True, "attn_implementation": "sdpa"}
"""transformers' eager attention adds the ALiBi biases twice; its default attention does not."""
NEW = SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}
CASES = {
    "falcon": [
        SMALL,
        NEW | {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
        NEW | {"num_ln_in_parallel_attn": 1, "bias": True, "ffn_hidden_size": 50},
        ALIBI | {"bias": True, "multi_query": False, "parallel_attn": False},
        ALIBI | {"num_attention_heads": 6, "hidden_size": 36, "activation": "relu"},
        SMALL | {"multi_query": False, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        SMALL | {"rope_theta": 500.0},
    ],
}
