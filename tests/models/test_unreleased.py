"""Presets that transformers does not implement, compared with the formulas of their papers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workhorse.models import preset, search
from workhorse.models.families.gpt2 import gpt2
from workhorse.models.families.gpt3 import BAND, gpt3
from workhorse.models.families.palm import palm
from workhorse.models.families.transformer2017 import transformer2017
from workhorse.nn import Decoder


def drawn(decoder: Decoder) -> Decoder:
    """Redraw all weights of a decoder, because norms of 1 and biases of 0 hide mistakes."""
    for name, weight in decoder.named_parameters():
        nn.init.normal_(weight, mean=float("norm.weight" in name), std=0.2)
    return decoder.eval()


def rotated(x: Tensor) -> Tensor:
    """RoPE with complex numbers: feature i is the real part, i + half the imaginary part."""
    seq, width = x.shape[-2:]
    turn = torch.arange(seq)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def test_palm_is_its_paper() -> None:
    d, heads, width, seq = 32, 3, 8, 12
    config = palm(d_model=d, n_layers=2, n_heads=heads, head_dim=width, vocab_size=61)
    decoder = drawn(config.build())
    w = decoder.state_dict()
    tokens = torch.randint(61, (1, seq))
    x = w["embedding.tokens.weight"][tokens[0]]  # (seq, d_model)
    future = torch.full((seq, seq), -math.inf).triu(1)
    for layer in ("layers.0.", "layers.1."):
        y = F.layer_norm(x, (d,), w[layer + "norm.weight"], eps=1e-6)
        q = (y @ w[layer + "attention.q_proj.weight"].T).view(seq, heads, width).transpose(0, 1)
        k = y @ w[layer + "attention.k_proj.weight"].T  # one head, which all queries share
        v = y @ w[layer + "attention.v_proj.weight"].T
        scores = rotated(q) @ rotated(k).T / math.sqrt(width) + future
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        gate = F.silu(y @ w[layer + "feed_forward.gate_proj.weight"].T)
        hidden = gate * (y @ w[layer + "feed_forward.up_proj.weight"].T)
        x = (
            x
            + hidden @ w[layer + "feed_forward.down_proj.weight"].T
            + attended @ w[layer + "attention.out_proj.weight"].T
        )
    x = F.layer_norm(x, (d,), w["final_norm.weight"], eps=1e-6)
    logits = x @ w["embedding.tokens.weight"].T / math.sqrt(d)
    with torch.inference_mode():
        torch.testing.assert_close(decoder(tokens)[0], logits, atol=1e-5, rtol=1e-5)


def test_the_2017_decoder_is_torchs_transformer_layer() -> None:
    d, seq = 32, 12
    config = transformer2017(d_model=d, n_layers=2, n_heads=4, d_ff=64, dropout=0.1, vocab_size=61)
    decoder = drawn(config.build())
    w = decoder.state_dict()
    tokens = torch.randint(61, (1, seq))
    wave = torch.arange(seq)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
    positions = torch.stack((wave.sin(), wave.cos()), dim=-1).flatten(1)
    x = w["embedding.tokens.weight"][tokens] * math.sqrt(d) + positions
    mask = nn.Transformer.generate_square_subsequent_mask(seq)
    for layer in ("layers.0.", "layers.1."):
        reference = nn.TransformerEncoderLayer(
            d, 4, 64, dropout=0.1, activation="relu", layer_norm_eps=1e-6, batch_first=True
        ).eval()
        nn.init.zeros_(reference.self_attn.in_proj_bias)
        nn.init.zeros_(reference.self_attn.out_proj.bias)
        qkv = [w[f"{layer}attention.{part}_proj.weight"] for part in "qkv"]
        reference.self_attn.in_proj_weight.data = torch.cat(qkv)
        for theirs, ours in {
            "self_attn.out_proj.weight": "attention.out_proj.weight",
            "linear1.weight": "feed_forward.up_proj.weight",
            "linear1.bias": "feed_forward.up_proj.bias",
            "linear2.weight": "feed_forward.down_proj.weight",
            "linear2.bias": "feed_forward.down_proj.bias",
            "norm1.weight": "attention_norm.weight",
            "norm1.bias": "attention_norm.bias",
            "norm2.weight": "feed_forward_norm.weight",
            "norm2.bias": "feed_forward_norm.bias",
        }.items():
            reference.get_parameter(theirs).data = w[layer + ours]
        x = reference(x, src_mask=mask, is_causal=True)
    logits = x @ w["embedding.tokens.weight"].T
    with torch.inference_mode():
        torch.testing.assert_close(decoder(tokens), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", search("gpt3-")[0])
def test_gpt3_alternates_dense_and_banded_layers(name: str) -> None:
    config = preset(name)
    windows = [config.blocks[layer].attention.window for layer in config.layer_names()]
    assert windows == [None, BAND] * (config.n_layers // 2)


def test_gpt3_within_its_band_is_gpt2_and_past_it_is_not() -> None:
    shape = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 31, "max_seq_len": 300}
    banded = drawn(gpt3(**shape, head_dim=8).build())
    dense = gpt2(**shape).build().eval()
    dense.load_state_dict(banded.state_dict())
    tokens = torch.randint(31, (1, 300))
    with torch.inference_mode():
        ours, theirs = banded(tokens), dense(tokens)
    torch.testing.assert_close(ours[:, :BAND], theirs[:, :BAND], atol=1e-5, rtol=1e-5)
    assert (ours[:, BAND:] - theirs[:, BAND:]).abs().max() > 1e-3
