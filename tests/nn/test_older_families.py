"""Families with names of their own: fused projections, ALiBi, post-norm, sinusoids."""

import math
from collections.abc import Callable

import pytest
import transformers as hf
from torch import Tensor

from tests.nn.reference import assert_same_logits, tail

VOCAB, D_MODEL, D_FF, HEADS = 31, 16, 64, 4
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYER = {"kind": "layer_norm"}
BIASED = {"n_heads": HEADS, "qkv_bias": True, "out_bias": True}


def ours(block: dict, **changes: object) -> dict:
    feed_forward = {"kind": "mlp", "d_ff": D_FF, "bias": True, **block.pop("feed_forward", {})}
    return {
        "vocab_size": VOCAB,
        "d_model": D_MODEL,
        "n_layers": 2,
        "max_seq_len": 64,
        "blocks": {
            "main": {
                "kind": "pre_norm",
                "norm": LAYER,
                "attention": BIASED,
                "feed_forward": feed_forward,
                **block,
            }
        },
        "final_norm": LAYER,
        **changes,
    }


def part_of_each_head(name: str) -> Callable[[dict, str, str, str], Tensor]:
    """q, k or v from a projection that holds the three side by side for each head."""

    def take(weights: dict, layer: str, part: str, kind: str) -> Tensor:
        fused = weights[name.format(layer) + f".{kind}"]
        return fused.unflatten(0, (HEADS, 3, -1))[:, "qkv".index(part)].flatten(0, 1)

    return take


QKV = tail(r"attention\.([qkv])_proj\.(\w+)")


@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_neox(parallel: bool) -> None:
    """Parallel with two norms; a quarter of each head turns, in halves."""
    model = hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=D_FF,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.25,
            },
            use_parallel_residual=parallel,
            **TOKENS,
        )
    )
    wiring = {"kind": "parallel", "norms": 2} if parallel else {"kind": "pre_norm"}
    rope = {"kind": "rope", "theta": 100.0, "fraction": 0.25}
    data = ours({**wiring, "attention": {**BIASED, "position": rope}}, d_model=32)
    layer = r"gpt_neox.layers.\1."
    rules = [
        (r"embedding\.tokens", "gpt_neox.embed_in"),
        (r"final_norm", "gpt_neox.final_layer_norm"),
        (r"head\.proj", "embed_out" if "embed_out.weight" in model.state_dict() else "lm_head"),
        (QKV, part_of_each_head("gpt_neox.layers.{}.attention.query_key_value")),
        (tail(r"attention\.out_proj"), layer + "attention.dense"),
        (tail("attention_norm"), layer + "input_layernorm"),
        (tail("feed_forward_norm"), layer + "post_attention_layernorm"),
        (tail(r"feed_forward\.up_proj"), layer + "mlp.dense_h_to_4h"),
        (tail(r"feed_forward\.down_proj"), layer + "mlp.dense_4h_to_h"),
    ]
    assert_same_logits(model, data, rules)


def test_gpt_j() -> None:
    """Parallel with one norm; half of each head turns, in neighbouring pairs."""
    model = hf.GPTJForCausalLM(
        hf.GPTJConfig(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=HEADS,
            n_inner=D_FF,
            n_positions=64,
            rotary_dim=4,
            **TOKENS,
        )
    )
    rope = {"kind": "rope", "pairing": "interleaved", "fraction": 0.5}
    data = ours(
        {
            "kind": "parallel",
            "attention": {"n_heads": HEADS, "position": rope},
            "feed_forward": {"activation": "gelu_tanh"},
        },
        d_model=32,
        head={"bias": True},
    )
    layer = r"transformer.h.\1."
    rules = [
        (r"embedding\.tokens", "transformer.wte"),
        (r"final_norm", "transformer.ln_f"),
        (r"head\.proj", "lm_head"),
        (tail(r"attention\.(\w+_proj)"), layer + r"attn.\2"),
        (tail("norm"), layer + "ln_1"),
        (tail(r"feed_forward\.up_proj"), layer + "mlp.fc_in"),
        (tail(r"feed_forward\.down_proj"), layer + "mlp.fc_out"),
    ]
    assert_same_logits(model, data, rules)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("normed_residual", [False, True])
def test_bloom(heads: int, normed_residual: bool) -> None:
    """ALiBi, a norm on the embedding, and the residual from before or after the norm."""
    d_model = 8 * heads
    model = hf.BloomForCausalLM(
        hf.BloomConfig(
            vocab_size=VOCAB,
            hidden_size=d_model,
            n_layer=2,
            n_head=heads,
            apply_residual_connection_post_layernorm=normed_residual,
            **TOKENS,
        )
    )
    data = ours(
        {
            "norm_residual": normed_residual,
            "attention": {**BIASED, "n_heads": heads, "position": {"kind": "alibi"}},
            "feed_forward": {"activation": "gelu_tanh", "d_ff": 4 * d_model},
        },
        d_model=d_model,
        embedding={"norm": LAYER},
        head={"tied": True},
    )
    layer = r"transformer.h.\1."

    def take(weights: dict, index: str, part: str, kind: str) -> Tensor:
        fused = weights[f"transformer.h.{index}.self_attention.query_key_value.{kind}"]
        return fused.unflatten(0, (heads, 3, -1))[:, "qkv".index(part)].flatten(0, 1)

    rules = [
        (r"embedding\.tokens", "transformer.word_embeddings"),
        (r"embedding\.norm", "transformer.word_embeddings_layernorm"),
        (r"final_norm", "transformer.ln_f"),
        (r"head\.proj", "lm_head"),
        (QKV, take),
        (tail(r"attention\.out_proj"), layer + "self_attention.dense"),
        (tail("attention_norm"), layer + "input_layernorm"),
        (tail("feed_forward_norm"), layer + "post_attention_layernorm"),
        (tail(r"feed_forward\.up_proj"), layer + "mlp.dense_h_to_4h"),
        (tail(r"feed_forward\.down_proj"), layer + "mlp.dense_4h_to_h"),
    ]
    assert_same_logits(model, data, rules)


@pytest.mark.parametrize("narrow", [False, True])
def test_opt(narrow: bool) -> None:
    """Learned positions from row 2; the 350M is post-norm with a narrower embedding."""
    model = hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=D_MODEL,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            ffn_dim=D_FF,
            max_position_embeddings=64,
            do_layer_norm_before=not narrow,
            word_embed_proj_dim=6 if narrow else D_MODEL,
            **TOKENS,
        )
    )
    data = ours(
        {
            "kind": "post_norm" if narrow else "pre_norm",
            "feed_forward": {"activation": "relu"},
        },
        embedding={
            "position": {"kind": "learned", "offset": 2},
            "width": 6 if narrow else None,
        },
        final_norm={"kind": "none"} if narrow else LAYER,
        head={"tied": True},
    )
    layer = r"model.decoder.layers.\1."
    rules = [
        (r"embedding\.tokens", "model.decoder.embed_tokens"),
        (r"embedding\.positions\.table", "model.decoder.embed_positions"),
        (r"embedding\.project", "model.decoder.project_in"),
        (r"head\.project\.", "model.decoder.project_out."),
        (r"head\.proj", "lm_head"),
        (r"final_norm", "model.decoder.final_layer_norm"),
        (tail(r"attention\.(\w+_proj)"), layer + r"self_attn.\2"),
        (tail("attention_norm"), layer + "self_attn_layer_norm"),
        (tail("feed_forward_norm"), layer + "final_layer_norm"),
        (tail(r"feed_forward\.up_proj"), layer + "fc1"),
        (tail(r"feed_forward\.down_proj"), layer + "fc2"),
    ]
    assert_same_logits(model, data, rules)


def test_xglm() -> None:
    """Sinusoids in halves with their own spacing, scaled embeddings, exact GELU."""
    model = hf.XGLMForCausalLM(
        hf.XGLMConfig(
            vocab_size=VOCAB,
            d_model=D_MODEL,
            num_layers=2,
            attention_heads=HEADS,
            ffn_dim=D_FF,
            max_position_embeddings=64,
            scale_embedding=True,
            **TOKENS,
        )
    )
    waves = {"kind": "sinusoidal", "layout": "halves", "spacing": "half_minus_one", "offset": 2}
    data = ours(
        {"feed_forward": {"activation": "gelu"}},
        embedding={"multiplier": math.sqrt(D_MODEL), "position": waves},
        head={"tied": True},
    )
    layer = r"model.layers.\1."
    rules = [
        (r"embedding\.tokens", "model.embed_tokens"),
        (r"head\.proj", "lm_head"),
        (r"final_norm", "model.layer_norm"),
        (tail(r"attention\.(\w+_proj)"), layer + r"self_attn.\2"),
        (tail("attention_norm"), layer + "self_attn_layer_norm"),
        (tail("feed_forward_norm"), layer + "final_layer_norm"),
        (tail(r"feed_forward\.up_proj"), layer + "fc1"),
        (tail(r"feed_forward\.down_proj"), layer + "fc2"),
    ]
    assert_same_logits(model, data, rules)


def test_gpt2_with_inverse_layer_scales() -> None:
    """Projections stored the other way round and fused; GPT-2's option of dividing by the layer."""
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=D_MODEL,
            n_layer=2,
            n_head=HEADS,
            n_positions=64,
            scale_attn_by_inverse_layer_idx=True,
            attn_implementation="eager",
            **TOKENS,
        )
    )
    data = ours(
        {
            "attention": {**BIASED, "scale_by_layer": True},
            "feed_forward": {"activation": "gelu_tanh"},
        },
        embedding={"position": {"kind": "learned"}},
        head={"tied": True},
    )
    names = {"attention.out_proj": "attn.c_proj"}
    names |= {"feed_forward.up_proj": "mlp.c_fc", "feed_forward.down_proj": "mlp.c_proj"}

    def qkv(weights: dict, index: str, part: str, kind: str) -> Tensor:
        fused = weights[f"transformer.h.{index}.attn.c_attn.{kind}"]
        return fused.chunk(3, dim=-1)["qkv".index(part)].permute(*reversed(range(fused.ndim)))

    def other(weights: dict, index: str, name: str, kind: str) -> Tensor:
        tensor = weights[f"transformer.h.{index}.{names[name]}.{kind}"]
        return tensor.permute(*reversed(range(tensor.ndim)))

    rules = [
        (r"embedding\.tokens", "transformer.wte"),
        (r"embedding\.positions\.table", "transformer.wpe"),
        (r"head\.proj", "lm_head"),
        (r"final_norm", "transformer.ln_f"),
        (QKV, qkv),
        (tail(r"(\w+\.\w+_proj)\.(\w+)"), other),
        (tail("attention_norm"), r"transformer.h.\1.ln_1"),
        (tail("feed_forward_norm"), r"transformer.h.\1.ln_2"),
    ]
    assert_same_logits(model, data, rules)
