"""Presets compared with transformers' implementation of the same model.

On the meta device both must have the same number of parameters. A preset must equal the config read
from transformers' config, or from the fields of the released config.json. `tests/parity` shows that
a config read this way computes the same logits.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from tests.parity.reference import quiet
from workhorse.models import find_preset, preset_names, presets
from workhorse.models.huggingface import Fields, family
from workhorse.models.huggingface.family import compare_plain, plain
from workhorse.nn import DecoderConfig


def llama_released(
    d_model: int, n_layers: int, n_heads: int, d_ff: int, **more: Any
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=d_model,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        intermediate_size=d_ff,
        tie_word_embeddings=False,
        vocab_size=32000,
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, **more},
    )


llama2_released = partial(llama_released, rms_norm_eps=1e-5, max_position_embeddings=4096)


RELEASED: dict[str, tuple[type[nn.Module], Any]] = {
    "gpt": (OpenAIGPTLMHeadModel, OpenAIGPTConfig()),
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=768, n_layer=12, n_head=12)),
    "gpt2-medium": (GPT2LMHeadModel, GPT2Config(n_embd=1024, n_layer=24, n_head=16)),
    "gpt2-large": (GPT2LMHeadModel, GPT2Config(n_embd=1280, n_layer=36, n_head=20)),
    "gpt2-xl": (GPT2LMHeadModel, GPT2Config(n_embd=1600, n_layer=48, n_head=25)),
    "llama-7b": (LlamaForCausalLM, llama_released(4096, 32, 32, 11008)),
    "llama-13b": (LlamaForCausalLM, llama_released(5120, 40, 40, 13824)),
    "llama-30b": (LlamaForCausalLM, llama_released(6656, 60, 52, 17920)),
    "llama-65b": (LlamaForCausalLM, llama_released(8192, 80, 64, 22016, rms_norm_eps=1e-5)),
    "llama-2-7b": (LlamaForCausalLM, llama2_released(4096, 32, 32, 11008)),
    "llama-2-13b": (LlamaForCausalLM, llama2_released(5120, 40, 40, 13824)),
    "llama-2-34b": (LlamaForCausalLM, llama2_released(8192, 48, 64, 22016, num_key_value_heads=8)),
    "llama-2-70b": (LlamaForCausalLM, llama2_released(8192, 80, 64, 28672, num_key_value_heads=8)),
    "olmo-1b": (
        OlmoForCausalLM,
        OlmoConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=16,
            tie_word_embeddings=True,
        ),
    ),
    "olmo-7b": (OlmoForCausalLM, OlmoConfig()),
    "falcon-7b": (FalconForCausalLM, FalconConfig()),
    "falcon-40b": (
        FalconForCausalLM,
        FalconConfig(
            hidden_size=8192,
            num_hidden_layers=60,
            num_attention_heads=128,
            num_kv_heads=8,
            new_decoder_architecture=True,
        ),
    ),
    "falcon-180b": (
        FalconForCausalLM,
        FalconConfig(
            hidden_size=14848,
            num_hidden_layers=80,
            num_attention_heads=232,
            num_kv_heads=8,
            new_decoder_architecture=True,
        ),
    ),
    "gemma-2b": (
        GemmaForCausalLM,
        GemmaConfig(
            hidden_size=2048,
            intermediate_size=16384,
            num_hidden_layers=18,
            num_attention_heads=8,
            num_key_value_heads=1,
        ),
    ),
    "gemma-7b": (GemmaForCausalLM, GemmaConfig()),
    "mpt-7b": (MptForCausalLM, MptConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50432)),
    "mpt-7b-storywriter": (
        MptForCausalLM,
        MptConfig(
            d_model=4096,
            n_heads=32,
            n_layers=32,
            vocab_size=50432,
            max_seq_len=65536,
            attn_config={"alibi_bias_max": 16, "clip_qkv": 6.0},
        ),
    ),
    "mpt-30b": (
        MptForCausalLM,
        MptConfig(d_model=7168, n_heads=64, n_layers=48, vocab_size=50432, max_seq_len=8192),
    ),
}


FILES = {name: found.released for name, found in presets().items() if found.released}
"""The `config.json` fields of presets that are read from them."""


def test_every_released_family_has_a_reference() -> None:
    unreleased = {"gpt3", "palm", "transformer"}
    missing = {name for name in preset_names() if name.split("-")[0] in unreleased}
    assert set(preset_names()) - set(RELEASED) - set(FILES) == missing | {"olmo-65b"}


@pytest.mark.parametrize("name", FILES)
def test_parameters_equal_transformers_of_the_same_file(name: str) -> None:
    """Count 4 and 5 layers and extrapolate, which is faster: later layers have equal sizes."""
    depth_key = "n_layer" if "n_layer" in FILES[name] else "num_hidden_layers"
    depth: int = FILES[name][depth_key]
    fewer, more = (reference_count({**FILES[name], depth_key: n}) for n in (4, 5))
    assert find_preset(name).parameters == fewer + (depth - 4) * (more - fewer)


def reference_count(fields: dict[str, Any]) -> int:
    """Number of parameters of transformers' class, including biases of the expert choice."""
    with torch.device("meta"), quiet():
        reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    reference.tie_weights()
    buffers = dict(reference.named_buffers())
    biases = [one for name, one in buffers.items() if name.endswith("e_score_correction_bias")]
    return sum(tensor.numel() for tensor in (*reference.parameters(), *biases))


@pytest.mark.parametrize("name", FILES)
def test_transformers_understands_the_same_by_a_file(name: str) -> None:
    """The config that transformers parses, with newer keys and defaults, gives the preset."""
    with quiet():
        understood = AutoConfig.for_model(**FILES[name]).to_dict()
    read = family(understood["model_type"]).read(Fields(understood))
    assert list(compare_plain(plain(find_preset(name).config), plain(read))) == []


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_equal_the_reference(name: str) -> None:
    model, config = RELEASED[name]
    with torch.device("meta"):
        reference = model(config)
    reference.tie_weights()
    assert find_preset(name).parameters == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("name", RELEASED)
def test_presets_are_what_the_released_configs_say(name: str) -> None:
    """Compare layer by layer, except for weight initialization, which no such file contains."""
    released = RELEASED[name][1].to_dict()
    read = family(released["model_type"]).read(Fields(released))
    preset = find_preset(name).config
    assert list(compare_plain(plain(preset), plain(read))) == []
    assert dropouts(preset) == dropouts(read)


def dropouts(config: DecoderConfig) -> tuple[float, ...]:
    block = config.blocks["main"]
    inside = (block.attention.dropout, block.feed_forward.dropout)
    return (config.embedding.dropout, block.dropout, *inside)
