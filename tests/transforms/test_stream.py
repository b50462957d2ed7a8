"""Streaming weights changes where they lie and how fast they are read, and nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.native.machine import OPERATORS, needs
from workhorse.native import MatrixUnit, Operators
from workhorse.nn import Decoder, DecoderConfig
from workhorse.transforms.record import transforms_of
from workhorse.transforms.stream import FEW_ROWS, ONE_PASS, StreamedLinear, stream_weights

CONFIG = {
    "vocab_size": 96,
    "d_model": 64,
    "n_layers": 2,
    "max_seq_len": 64,
    "blocks": {
        "main": {
            "kind": "pre_norm",
            "norm": {"kind": "rms_norm"},
            "attention": {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}},
            "feed_forward": {"kind": "gated_mlp", "d_ff": 96},
        }
    },
    "final_norm": {"kind": "rms_norm"},
    "head": {"tied": True},
    "init": {"kind": "normal", "std": 0.2},
}


@pytest.fixture
def decoder() -> Decoder:
    return DecoderConfig.from_dict(CONFIG).build().eval()


@needs("decoding")
def test_same_model(decoder: Decoder) -> None:
    tokens = torch.arange(24).view(2, 12)
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    with torch.no_grad():
        expected = decoder(tokens[:, :4])
        stream_weights(decoder, OPERATORS)
        assert isinstance(decoder.layers[0].attention.q_proj, StreamedLinear)
        torch.testing.assert_close(decoder(tokens[:, :4]), expected, rtol=1e-4, atol=1e-4)
    after = decoder.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert decoder.head.proj.weight is decoder.embedding.tokens.weight


@needs("decoding")
def test_many_rows_and_training_are_as_before(decoder: Decoder) -> None:
    layer = nn.Linear(32, 16)
    streamed = nn.Sequential(layer)
    stream_weights(streamed, OPERATORS)
    many = torch.randn(FEW_ROWS[torch.float32] + 1, 32)
    with torch.no_grad():
        assert torch.equal(streamed(many), layer(many))
    x = torch.randn(2, 32)
    streamed(x).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(16, 32))


@needs("decoding")
@needs("matrix_unit")
@pytest.mark.parametrize("rows", [ONE_PASS, ONE_PASS + 1])
def test_many_rows_of_bfloat16_are_a_product(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    layer = nn.Linear(48, 80).bfloat16()
    x = torch.randn(2, rows, 48).bfloat16()[:1]
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    streamed = nn.Sequential(layer)
    stream_weights(streamed, OPERATORS)
    with torch.no_grad():
        y = streamed(x)
        assert y.shape == exact.shape
        assert ((y - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()
        monkeypatch.setattr(MatrixUnit, "linear", lambda *_: "a product")
        assert (streamed(x) == "a product") is (rows > ONE_PASS)


@needs("decoding")
def test_what_it_cannot_read_stays() -> None:
    model = nn.Sequential(nn.Linear(32, 16).double(), nn.Identity())
    stream_weights(model, OPERATORS)
    assert type(model[0]) is nn.Linear


def test_without_native_operators(decoder: Decoder) -> None:
    stream_weights(decoder, Operators())
    assert not any(isinstance(part, StreamedLinear) for part in decoder.modules())
    assert not transforms_of(decoder)
