"""Presets beside transformers' own implementation of the same model.

At full size on the meta device the two must learn equally many numbers. At a small size, with the
same weights, they must compute the same logits, which pins what counts cannot see: eps, the form of
GELU, the wiring, the pairing of rotations, the scale of scores and embeddings. The transformers
configs here are the released config.json files, so they come to us by another way than ours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
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

from workhorse.models import (
    falcon,
    find_preset,
    gemma,
    gpt,
    gpt2,
    llama,
    llama2,
    mpt,
    olmo,
    preset_names,
)
from workhorse.nn import DecoderConfig

Weights = dict[str, Tensor]


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
    "mpt-30b": (
        MptForCausalLM,
        MptConfig(d_model=7168, n_heads=64, n_layers=48, vocab_size=50432, max_seq_len=8192),
    ),
}


def test_every_released_family_has_a_reference() -> None:
    unreleased = {"gpt3", "palm", "transformer"}
    missing = {name for name in preset_names() if name.split("-")[0] in unreleased}
    assert set(preset_names()) - set(RELEASED) == missing | {"olmo-65b"}


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_equal_the_reference(name: str) -> None:
    model, config = RELEASED[name]
    with torch.device("meta"):
        reference = model(config)
    reference.tie_weights()
    assert find_preset(name).parameters == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("name", RELEASED)
def test_settings_without_parameters_equal_the_reference(name: str) -> None:
    _, released = RELEASED[name]
    config = find_preset(name).config
    block = config.blocks["main"]
    context = "max_seq_len" if name.startswith("mpt") else "max_position_embeddings"
    assert config.max_seq_len == getattr(released, context)
    assert config.vocab_size == released.vocab_size
    assert config.n_layers == released.num_hidden_layers
    assert block.attention.n_heads == released.num_attention_heads
    assert config.head.tied == released.tie_word_embeddings
    eps = {getattr(released, key, None) for key in ("rms_norm_eps", "layer_norm_epsilon")} - {None}
    assert {block.norm.eps} == (eps or {1e-5})  # OLMo's is written into its code
    theta = (getattr(released, "rope_parameters", None) or {}).get("rope_theta")
    assert getattr(block.attention.position, "theta", None) == theta
    dropout = {getattr(released, key, 0.0) for key in ("attn_pdrop", "attention_dropout")} - {0.0}
    assert {block.attention.dropout} == (dropout or {0.0})


# The same weights in both. Each function turns a reference's state into ours.


def rename(weights: Weights, *pairs: tuple[str, str]) -> Weights:
    result: Weights = {}
    for name, weight in weights.items():
        for old, new in pairs:
            name = name.replace(old, new)  # noqa: PLW2901 the pairs apply one after the other
        result[name] = weight
    return result


def split(weights: Weights, fused: str, parts: Callable[[Tensor], tuple[Tensor, ...]]) -> Weights:
    """Every weight and bias named `fused` as q_proj, k_proj and v_proj."""
    result: Weights = {}
    for name, weight in weights.items():
        if fused in name:
            for part, tensor in zip(("q_proj", "k_proj", "v_proj"), parts(weight), strict=True):
                result[name.replace(fused, part)] = tensor
        else:
            result[name] = weight
    return result


def from_gpt(weights: Weights) -> Weights:
    straight = {  # the original stores its matrices as (in, out)
        name: weight.T if "c_" in name and name.endswith("weight") else weight
        for name, weight in weights.items()
    }
    apart = split(straight, "c_attn", lambda fused: fused.chunk(3))
    return rename(
        apart,
        ("transformer.h.", "layers."),
        ("transformer.tokens_embed", "embedding.tokens"),
        ("transformer.positions_embed", "embedding.positions.table"),
        ("transformer.wte", "embedding.tokens"),
        ("transformer.wpe", "embedding.positions.table"),
        ("transformer.ln_f", "final_norm"),
        ("attn.c_proj", "attention.out_proj"),
        ("attn.", "attention."),
        ("mlp.c_fc", "feed_forward.up_proj"),
        ("mlp.c_proj", "feed_forward.down_proj"),
        ("ln_1", "attention_norm"),
        ("ln_2", "feed_forward_norm"),
        ("lm_head", "head.proj"),
    )


def from_llama(weights: Weights) -> Weights:
    return rename(
        weights,
        ("model.layers", "layers"),
        ("model.embed_tokens", "embedding.tokens"),
        ("model.norm", "final_norm"),
        ("self_attn.o_proj", "attention.out_proj"),
        ("self_attn", "attention"),
        ("mlp", "feed_forward"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "feed_forward_norm"),
        ("lm_head", "head.proj"),
    )


def from_falcon(n_heads: int, n_kv_heads: int) -> Callable[[Weights], Weights]:
    def apart(fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each key-value head's rows follow those of the queries that share it."""
        group = n_heads // n_kv_heads
        heads = fused.unflatten(0, (n_kv_heads, group + 2, -1))
        return (
            heads[:, :group].flatten(0, 2),
            heads[:, group].flatten(0, 1),
            heads[:, group + 1].flatten(0, 1),
        )

    def convert(weights: Weights) -> Weights:
        return rename(
            split(weights, "query_key_value", apart),
            ("transformer.h.", "layers."),
            ("transformer.word_embeddings", "embedding.tokens"),
            ("transformer.ln_f", "final_norm"),
            ("self_attention.dense", "attention.out_proj"),
            ("self_attention", "attention"),
            ("mlp.dense_h_to_4h", "feed_forward.up_proj"),
            ("mlp.dense_4h_to_h", "feed_forward.down_proj"),
            ("input_layernorm", "norm"),
            ("ln_attn", "attention_norm"),
            ("ln_mlp", "feed_forward_norm"),
            ("lm_head", "head.proj"),
        )

    return convert


def from_mpt(weights: Weights) -> Weights:
    return rename(
        split(weights, "Wqkv", lambda fused: fused.chunk(3)),
        ("transformer.blocks", "layers"),
        ("transformer.wte", "embedding.tokens"),
        ("transformer.norm_f", "final_norm"),
        ("attn.", "attention."),
        ("ffn", "feed_forward"),
        ("norm_1", "attention_norm"),
        ("norm_2", "feed_forward_norm"),
        ("lm_head", "head.proj"),
    )


TINY = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 61, "max_seq_len": 24}
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 24,
    "pad_token_id": None,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 24}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}

LOGITS: dict[str, tuple[DecoderConfig, type[nn.Module], Any, Callable[[Weights], Weights]]] = {
    "gpt": (gpt.gpt(**TINY), OpenAIGPTLMHeadModel, OpenAIGPTConfig(**GPT), from_gpt),
    "gpt2": (gpt2.gpt2(**TINY), GPT2LMHeadModel, GPT2Config(**GPT), from_gpt),
    "llama": (
        llama.llama(**TINY, d_ff=48),
        LlamaForCausalLM,
        LlamaConfig(**LLAMA, rms_norm_eps=1e-6),
        from_llama,
    ),
    "llama2": (
        llama2.llama2(**{**TINY, "d_ff": 48, "n_kv_heads": 2}),
        LlamaForCausalLM,
        LlamaConfig(**LLAMA, rms_norm_eps=1e-5, num_key_value_heads=2),
        from_llama,
    ),
    "olmo": (olmo.olmo(**TINY, d_ff=48), OlmoForCausalLM, OlmoConfig(**LLAMA), from_llama),
    "falcon-7b": (
        falcon.falcon(**TINY, n_kv_heads=1, norms=1),
        FalconForCausalLM,
        FalconConfig(**FALCON),
        from_falcon(4, 1),
    ),
    "falcon-40b": (
        falcon.falcon(**TINY, n_kv_heads=2, norms=2),
        FalconForCausalLM,
        FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True),
        from_falcon(4, 2),
    ),
    "gemma": (
        gemma.gemma(**TINY, n_kv_heads=1, d_ff=48, head_dim=16),
        GemmaForCausalLM,
        GemmaConfig(**LLAMA, num_key_value_heads=1, head_dim=16),
        from_llama,
    ),
    "mpt": (
        mpt.mpt(**TINY),
        MptForCausalLM,
        MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=61, max_seq_len=24),
        from_mpt,
    ),
}


@pytest.mark.parametrize("family", LOGITS)
def test_logits_equal_the_reference(family: str) -> None:
    config, model, released, convert = LOGITS[family]
    reference = model(released).eval()
    for name, weight in reference.named_parameters():  # norms and biases of 1 and 0 hide mistakes
        nn.init.normal_(weight, mean=1.0 if "norm" in name or "ln_" in name else 0.0, std=0.1)
    decoder = config.build().eval()
    decoder.load_state_dict(convert(reference.state_dict()))
    tokens = torch.randint(61, (2, 24))
    with torch.inference_mode():
        torch.testing.assert_close(decoder(tokens), reference(tokens).logits, atol=1e-5, rtol=1e-5)
