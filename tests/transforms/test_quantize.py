"""Quantised layers: how far weights move, and that the model around them stays."""

import copy
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.transforms.quantize import FormatName, QuantizedLinear, quantize

FORMATS: tuple[FormatName, ...] = get_args(FormatName)
BITS = {"int8": 8.5, "int4": 4.5}
ATTENTION = {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}}
MLP = {"kind": "gated_mlp", "d_ff": 96}


def build(attention: dict[str, object], feed_forward: dict[str, object]) -> Decoder:
    block = {"kind": "pre_norm", "norm": {"kind": "rms_norm"}}
    block |= {"attention": attention, "feed_forward": feed_forward}
    return (
        DecoderConfig.from_dict(
            {
                "vocab_size": 96,
                "d_model": 64,
                "n_layers": 2,
                "max_seq_len": 64,
                "blocks": {"main": block},
                "final_norm": {"kind": "rms_norm"},
                "head": {"tied": True},
                "init": {"kind": "normal", "std": 0.2},
            }
        )
        .build()
        .eval()
    )


def groups(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))


def scales_of(layer: QuantizedLinear) -> Tensor:
    """(out, groups, 1)."""
    scales = layer.scales.view(torch.bfloat16).float().transpose(1, 2).flatten(0, 1)
    return scales[: layer.out_features, :, None]


@pytest.mark.parametrize(("out", "width"), [(16, 32), (37, 50), (1, 1), (700, 1000)])
def test_int8_is_within_half_a_step(out: int, width: int) -> None:
    linear = nn.Linear(width, out)
    nn.init.normal_(linear.weight)
    layer = QuantizedLinear.of(linear, "int8")
    error = groups(layer.dequantized(torch.float32) - linear.weight.detach()).abs()
    assert (error <= scales_of(layer).abs() * 0.5001).all()


def test_int4_error() -> None:
    linear = nn.Linear(1024, 512)
    nn.init.normal_(linear.weight)
    layer = QuantizedLinear.of(linear, "int4")
    error = layer.dequantized(torch.float32) - linear.weight
    assert (
        error.square().mean() < 0.0058
    )  # evenly spaced levels with the scale of the largest: 0.0074
    within = groups(error.detach()).abs() <= scales_of(layer).abs() * 12.5001
    assert within.float().mean() > 0.95


@pytest.mark.parametrize("format", FORMATS)
def test_size(format: FormatName) -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 32, bias=False), format)
    stored = sum(value.nbytes for value in layer.state_dict().values())
    assert stored * 8 == BITS[format] * 64 * 32


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_but_zeros(format: FormatName) -> None:
    linear = nn.Linear(40, 20)
    nn.init.zeros_(linear.weight)
    assert not QuantizedLinear.of(linear, format).dequantized(torch.float32).any()


@pytest.mark.parametrize("format", FORMATS)
def test_quantising_again_changes_nothing_of_levels(format: FormatName) -> None:
    linear = nn.Linear(64, 32)
    once = QuantizedLinear.of(linear, format).dequantized(torch.float32)
    linear.weight.data = once
    twice = QuantizedLinear.of(linear, format).dequantized(torch.float32)
    torch.testing.assert_close(twice, once, rtol=0.01, atol=0.01 * once.abs().max().item())


@pytest.mark.parametrize("format", FORMATS)
def test_plain_forward_is_the_product_with_the_codes(format: FormatName) -> None:
    layer = QuantizedLinear.of(nn.Linear(50, 37), format)
    x = torch.randn(2, 3, 50)
    assert torch.equal(layer(x), F.linear(x, layer.dequantized(torch.float32), layer.bias))


@pytest.mark.parametrize("format", FORMATS)
def test_decoder_computes_with_the_moved_weights(format: FormatName) -> None:
    decoder = build(ATTENTION, MLP)
    embedding = decoder.embedding.tokens.weight.clone()
    expected = copy.deepcopy(decoder)
    for name, layer in list(expected.named_modules()):
        if isinstance(layer, nn.Linear):
            moved = copy.deepcopy(layer)
            dequantized = QuantizedLinear.of(layer, format).dequantized(torch.float32)
            moved.weight = nn.Parameter(dequantized)
            expected.set_submodule(name, moved)
    quantize(decoder, format)
    assert not any(isinstance(part, nn.Linear) for part in decoder.modules())
    assert torch.equal(decoder.embedding.tokens.weight, embedding)
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(decoder(tokens), expected(tokens))


@pytest.mark.parametrize("format", FORMATS)
def test_plain_and_native_agree_in_bfloat16(format: FormatName) -> None:
    decoder = quantize(build(ATTENTION, MLP).bfloat16(), format)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        native = decoder(tokens).float()
    for part in decoder.modules():
        if isinstance(part, QuantizedLinear):
            part.native = False
    with torch.no_grad():
        plain = decoder(tokens).float()
    torch.testing.assert_close(native, plain, rtol=0.05, atol=0.05 * plain.abs().max().item())


def test_codes_survive_a_cast() -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 32).bfloat16(), "int4")
    before = layer.dequantized(torch.float32)
    assert torch.equal(layer.double().bfloat16().dequantized(torch.float32), before)


def test_state_comes_back() -> None:
    layer = QuantizedLinear.of(nn.Linear(50, 37), "int4")
    other = QuantizedLinear(50, 37, "int4", nn.Parameter(torch.zeros(37)))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 50)
    assert torch.equal(other(x), layer(x))


def test_routers_and_experts_stay() -> None:
    mixture = {
        "kind": "moe",
        "n_experts": 4,
        "top_k": 2,
        "d_ff": 32,
    }
    decoder = quantize(build(ATTENTION, mixture), "int8")
    kinds = {type(part).__name__ for part in decoder.layers[0].feed_forward.modules()}
    assert "QuantizedLinear" not in kinds
    assert decoder(torch.arange(6).view(1, 6)).isfinite().all()


def test_latent_attention_works() -> None:
    latent = {"kind": "latent_attention", "n_heads": 2, "kv_rank": 32, "nope_dim": 16}
    latent |= {"rope_dim": 16, "value_dim": 32, "position": {"kind": "rope"}}
    decoder = quantize(build(latent, MLP), "int8")
    tokens = torch.arange(6).view(1, 6)
    cache = decoder.new_cache(1, 6)
    with torch.no_grad():
        steps = [decoder(tokens[:, i : i + 1], cache=cache) for i in range(6)]
        torch.testing.assert_close(torch.cat(steps, 1), decoder(tokens), rtol=1e-3, atol=1e-3)


def test_refused() -> None:
    with pytest.raises(WorkhorseError, match="quantize=int3 is not a format; choose int8 or int4"):
        quantize(nn.Linear(64, 64), "int3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorkhorseError, match="finds no linear layer"):
        quantize(nn.Sequential(nn.Linear(8, 8)), "int8")
