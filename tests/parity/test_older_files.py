"""Files written before transformers 5, as most published ones are: other keys, the same model."""

from copy import deepcopy
from typing import Any

import pytest
import transformers as hf

from tests.parity.reference import quiet
from workhorse.models.huggingface import Fields, family
from workhorse.models.huggingface.family import differences, plain

SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "rope_theta": 500.0,
    "torch_dtype": "bfloat16",
    "pad_token_id": 0,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 2.5, 3.0], "type": "longrope"}
AMPLITUDE = {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

FILES: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_scaling": YARN, "sliding_window": 32, "use_sliding_window": False},
    "qwen3": {"head_dim": 8, "max_window_layers": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []},
    "olmo": {"clip_qkv": None, "pretraining_tp": 1},
    "olmo3": {
        "rope_scaling": YARN | {"rope_type": "yarn"},
        "rope_theta": 500_000,
        "sliding_window": 8,
    },
    "phi": {"partial_rotary_factor": 0.4, "hidden_size": 40, "hidden_act": "gelu_new"},
    "phi3": {
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONG,
        "original_max_position_embeddings": 16,
        "attention_bias": False,
        "interpolate_factor": 1,
    },
    "phimoe": {
        "head_dim": 6,
        "rope_scaling": LONG | AMPLITUDE,
        "original_max_position_embeddings": 16,
        "hidden_dropout": 0.0,
        "input_jitter_noise": 0.01,
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    "cohere": {"model_max_length": 128, "logit_scale": 0.25},
    "cohere2": {
        "cache_implementation": "hybrid",
        "head_dim": 8,
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "sliding_window": 8,
        "sliding_window_pattern": 4,
        "use_parallel_block": True,
    },
    "gemma2": {"cache_implementation": "hybrid", "head_dim": 8, "sliding_window": 8},
    "gemma3_text": {
        "cache_implementation": "hybrid",
        "head_dim": 8,
        "rope_local_base_freq": 700,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
    "exaone4": {
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16},
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]),
        "sliding_window": 8,
        "sliding_window_pattern": "LLLG",
        "reorder_and_qk_norm": True,
    },
    "modernbert-decoder": {
        "num_key_value_heads": 4,
        "bos_token_id": 1,
        "rope_theta": None,
        "global_rope_theta": 500.0,
        "local_rope_theta": 700.0,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        "position_embedding_type": "sans_pos",
        "sparse_prediction": False,
    },
}


@pytest.mark.parametrize("model_type", FILES)
def test_an_older_file_means_what_transformers_reads_in_it(model_type: str) -> None:
    file = {"model_type": model_type, **SMALL, **FILES[model_type]}
    with quiet():
        parsed = hf.AutoConfig.for_model(**deepcopy(file)).to_dict()  # it writes into mappings
    fields = Fields(file)
    ours = family(model_type).read(fields)
    theirs = family(model_type).read(Fields(parsed))
    assert list(differences(plain(ours), plain(theirs))) == []
    assert fields.unused() == []
