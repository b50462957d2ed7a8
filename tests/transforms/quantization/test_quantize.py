"""A quantised model: replaced and kept modules, and no memory for all weights and codes at once."""

import copy
import weakref
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.native.machine import DECODING
from workhorse.devices.instructions import SWITCH
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.transforms.quantization import (
    FormatName,
    QuantizedGroupedLinear,
    QuantizedLinear,
    QuantizedWeight,
    place_codes,
    quantize,
)

FORMATS: tuple[FormatName, ...] = get_args(FormatName)
ATTENTION = {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}}
MLP = {"kind": "gated_mlp", "d_ff": 96}
MIXTURE = {"kind": "moe", "n_experts": 4, "top_k": 2, "d_ff": 32, "bias": True}
ALL_EXPERTS = MIXTURE | {"top_k": 4}
"""A mixture that uses all experts, so rounding cannot change the choice at near ties."""


def build(attention: dict[str, Any], feed_forward: dict[str, Any], *, tied: bool = True) -> Decoder:
    block: dict[str, Any] = {"kind": "pre_norm", "norm": {"kind": "rms_norm"}}
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
                "head": {"tied": tied},
                "init": {"kind": "normal", "std": 0.2},
            }
        )
        .build()
        .eval()
    )


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
    # In float64, because native operators round: see `packed_linear.h`.
    torch.testing.assert_close(decoder.double()(tokens), expected.double()(tokens))


@pytest.mark.parametrize("feed_forward", [MLP, ALL_EXPERTS], ids=["mlp", "mixture"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("dtype", "apart"), [(torch.bfloat16, 0.05), (torch.float32, 0.001)])
def test_plain_and_native_agree(
    format: FormatName, dtype: torch.dtype, apart: float, feed_forward: dict[str, Any]
) -> None:
    decoder = quantize(build(ATTENTION, feed_forward).to(dtype), format)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        native = decoder(tokens).float()
    for part in decoder.modules():
        if isinstance(part, QuantizedWeight):
            part.decoding = None
    with torch.no_grad():
        plain = decoder(tokens).float()
    atol = apart * plain.abs().max().item()
    torch.testing.assert_close(native, plain, rtol=apart, atol=atol)


@pytest.mark.parametrize("native", [True, False])
def test_experts_where_an_operator_multiplies_by_their_codes(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and DECODING is None:
        pytest.skip("no native operators")
    if not native:
        monkeypatch.setenv(SWITCH, "0")
    decoder = quantize(build(ATTENTION, MIXTURE), "int8")
    mixture = decoder.get_submodule("layers.0.feed_forward")
    projection = mixture.get_submodule("experts.down_proj")
    assert isinstance(projection, QuantizedGroupedLinear) == native
    router = mixture.get_submodule("router")
    assert not any(isinstance(part, QuantizedWeight) for part in router.modules())


def test_each_weight_is_let_go_of_when_its_codes_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = build(ATTENTION, MLP)
    matrices = [
        weakref.ref(part.weight) for part in decoder.modules() if isinstance(part, nn.Linear)
    ]
    alive: list[int] = []
    copy_ = QuantizedLinear.copy_

    def counted(layer: QuantizedLinear, weight: Tensor) -> QuantizedLinear:
        alive.append(sum(matrix() is not None for matrix in matrices))
        return copy_(layer, weight)

    monkeypatch.setattr(QuantizedLinear, "copy_", counted)
    quantize(decoder, "int8")
    # The first is the head; its weight is tied to the embedding and stays.
    assert alive == [len(matrices), *range(len(matrices), 1, -1)]


@pytest.mark.parametrize("tied", [True, False])
def test_places_are_those_of_the_weights(tied: bool) -> None:
    decoder = build(ATTENTION, MLP, tied=tied)
    weights = {name: weight.clone() for name, weight in decoder.named_parameters()}
    afterwards = quantize(copy.deepcopy(decoder), "int4")
    places = place_codes(decoder, "int4")
    assert list(places) == list(weights)
    for name, weight in weights.items():
        assert places[name].shape == weight.shape
        places[name].copy_(weight.detach())
    for name, value in afterwards.state_dict().items():
        assert torch.equal(decoder.state_dict()[name], value), name


def test_latent_attention_works() -> None:
    latent = {"kind": "latent_attention", "n_heads": 2, "kv_rank": 32, "nope_dim": 16}
    latent |= {"rope_dim": 16, "value_dim": 32, "position": {"kind": "rope"}}
    decoder = build(latent, MLP)
    quantize(decoder, "int8")
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
