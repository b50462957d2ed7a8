"""Configs of families before LLaMA that are refused with a one-line reason."""

import pytest

from workhorse.config.base import ConfigError
from workhorse.models.huggingface import Fields, family

GPT = {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FALCON = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MPT = {"vocab_size": 67, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
NEO = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 64,
}
XGLM = {
    "vocab_size": 67,
    "d_model": 32,
    "num_layers": 2,
    "attention_heads": 4,
    "ffn_dim": 40,
    "max_position_embeddings": 64,
}
NO_FALCON = "are not a Falcon layout; correct the file"
NOT_SAID = "does not give global or local for 2 layers"

REFUSED = {
    "a missing key, named as the family names it": (
        "openai-gpt",
        {**GPT, "n_embd": None},
        "has no 'n_embd'",
    ),
    "a number of heads of 0": (
        "gptj",
        GPT | {"n_head": 0},
        "n_head=0 is not above 0; correct the file",
    ),
    "an unknown activation": ("openai-gpt", GPT | {"afn": "gleu"}, "afn 'gleu' is unknown"),
    "unscaled scores": (
        "gptj",
        GPT | {"rotary_dim": 4, "scale_attn_weights": False},
        "scale_attn_weights=",
    ),
    "a head that is too narrow": ("gptj", GPT, "rotary_dim=64 does not fit a head of width 8"),
    "heads that are not divisible by 4": (
        "codegen",
        GPT | {"n_head": 2, "rotary_dim": 4},
        "n_head=2 is not divisible by 4",
    ),
    "attention and feed-forward in sequence": (
        "falcon",
        FALCON | {"new_decoder_architecture": True, "parallel_attn": False},
        NO_FALCON,
    ),
    "two norms in the old layout": ("falcon", FALCON | {"num_ln_in_parallel_attn": 2}, NO_FALCON),
    "three norms": (
        "falcon",
        FALCON | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
        NO_FALCON,
    ),
    "a residual after the norm": (
        "falcon",
        FALCON | {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm=True is not supported",
    ),
    "another expansion ratio": (
        "mpt",
        MPT | {"expansion_ratio": 2},
        "expansion_ratio=2 is not supported",
    ),
    "biases": ("mpt", MPT | {"no_bias": False}, "no_bias=False is not supported"),
    "an unknown norm": ("mpt", MPT | {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm' is unknown"),
    "no ALiBi": ("mpt", MPT | {"attn_config": {"alibi": False}}, "alibi=False is not supported"),
    "grouped heads": (
        "mpt",
        MPT | {"attn_config": {"kv_n_heads": 2}},
        "has 'kv_n_heads', which transformers ignores in MPT; remove it",
    ),
    "too few layer types": ("gpt_neo", NEO | {"attention_types": [[["global"], 1]]}, NOT_SAID),
    "10^15 layer types": ("gpt_neo", NEO | {"attention_types": [[["local"], 10**15]]}, NOT_SAID),
    "malformed layer types": ("gpt_neo", NEO | {"attention_types": "global"}, NOT_SAID),
    "an unknown layer type": (
        "gpt_neo",
        NEO | {"attention_layers": ["global", "sparse"]},
        NOT_SAID,
    ),
    "an odd width": ("xglm", XGLM | {"d_model": 33, "attention_heads": 3}, "need an even d_model"),
    "padding at a used position": (
        "xglm",
        XGLM | {"pad_token_id": 5},
        "pad_token_id must be below 2",
    ),
    "another feed-forward": (
        "starcoder2",
        FALCON | {"intermediate_size": 40, "max_position_embeddings": 64, "mlp_type": "gated"},
        "mlp_type='gated' is not supported",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_is_refused_in_one_line(what: str) -> None:
    model_type, values, message = REFUSED[what]
    with pytest.raises(ConfigError) as error:
        family(model_type).read(Fields(values))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_slopes_that_transformers_would_not_have_are_read_and_not_written() -> None:
    """MPT-7B-StoryWriter's smallest slope is 2^-16; transformers always uses 2^-8 for MPT."""
    mpt = family("mpt")
    config = mpt.read(Fields(MPT | {"attn_config": {"alibi_bias_max": 16}}))
    assert config.blocks["main"].attention.position.max_bias == 16
    difference = mpt.difference(config)
    assert difference is not None
    assert "max_bias is 16" in difference
