"""Configs of families since LLaMA that are refused with a one-line reason."""

import pytest

from workhorse.config.base import ConfigError
from workhorse.models.huggingface import Fields, family

SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
MSCALE = {"short_mscale": 1.0, "long_mscale": 1.2}

REFUSED = {
    "a pattern of 0": ("gemma3_text", {"sliding_window_pattern": 0}, "is not above zero"),
    "a pattern of letters": ("exaone4", {"sliding_window_pattern": "LG"}, "is not a whole number"),
    "too few layer types": (
        "olmo3",
        {"layer_types": ["full_attention"]},
        "layer_types has length 1 for 2 layers",
    ),
    "a layer type of another family": (
        "qwen2",
        {"layer_types": ["chunked_attention"] * 2},
        "layer type 'chunked_attention' is unknown",
    ),
    "too few values of no_rope_layers": (
        "smollm3",
        {"no_rope_layers": [1]},
        "no_rope_layers has length 1 for 2 layers",
    ),
    "two windows": (
        "ministral3",
        {"layer_types": ["sliding_attention", "full_attention"]},
        "layer_types differ",
    ),
    "no window": ("modernbert-decoder", {"local_attention": 1}, "gives an empty window"),
    "a clip after a norm": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
    "a cap that is not used": (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        "but does not cap scores",
    ),
    "bidirectional attention": (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "only causal",
    ),
    "three experts": ("phimoe", {"num_experts_per_tok": 3}, "this router chooses two experts"),
    "heads wider than their norm": ("bitnet", {"head_dim": 16}, "head_dim=16 is not supported"),
    "a missing original length": (
        "phi3",
        {"rope_scaling": {"type": "longrope", **LONG}},
        "has no 'original_max_position_embeddings'",
    ),
    "another scaling": (
        "phi3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type 'linear' is not supported",
    ),
    "two scales of amplitude": (
        "phimoe",
        {"rope_scaling": {"type": "longrope", **LONG, **MSCALE}},
        "short_mscale=1.0 and long_mscale=1.2 is not supported",
    ),
    "missing RoPE parameters": (
        "cohere_compass_text",
        {"rope_parameters": {"sliding_attention": None}},
        "rope_parameters has no 'full_attention'",
    ),
    "queries of unknown growth": (
        "ministral3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "has no 'llama_4_scaling_beta'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_is_refused_in_one_line(what: str) -> None:
    model_type, values, message = REFUSED[what]
    with pytest.raises(ConfigError) as error:
        family(model_type).read(Fields(SMALL | values))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
