"""Streaming weights changes the place of weights and the speed of reading them, nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.native.machine import DECODING, MATRIX_UNIT, OPERATORS, VECTORS, needs
from workhorse.execute.native_decoding import layers
from workhorse.execute.native_decoding.layers import (
    DOT_ROWS,
    DOT_ROWS_BESIDE_GEMM,
    StreamedLinear,
    stream_weights,
)
from workhorse.native import Operators
from workhorse.nn import Decoder, DecoderConfig

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
    stream_weights(streamed, Operators(DECODING))
    many = torch.randn(DOT_ROWS[torch.float32] + 1, 32)
    with torch.no_grad():
        assert torch.equal(streamed(many), layer(many))
    x = torch.randn(2, 32)
    streamed(x).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(16, 32))


ON_UNIT = pytest.param(
    Operators(DECODING, matrix_unit=MATRIX_UNIT),
    torch.bfloat16,
    id="unit",
    marks=needs("matrix_unit"),
)
IN_VECTORS = pytest.param(
    Operators(DECODING, vectors=VECTORS),
    torch.float32,
    id="vectors",
    marks=needs("vectors"),
)
NARROW = pytest.param(
    Operators(DECODING, vectors=VECTORS),
    torch.bfloat16,
    id="narrow vectors",
    marks=needs("vectors"),
)


@needs("decoding")
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(("operators", "dtype"), [ON_UNIT, IN_VECTORS, NARROW])
def test_many_rows_are_a_product(
    monkeypatch: pytest.MonkeyPatch,
    operators: Operators,
    dtype: torch.dtype,
    more: int,
) -> None:
    layer = nn.Linear(48, 80).to(dtype)
    x = torch.randn(2, DOT_ROWS_BESIDE_GEMM[dtype] + more, 48).to(dtype)[:1]
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    streamed = nn.Sequential(layer)
    stream_weights(streamed, operators)
    with torch.no_grad():
        y = streamed(x)
        assert y.shape == exact.shape
        rtol, atol = (2**-8, 1e-4) if dtype == torch.bfloat16 else (1e-5, 1e-6)
        torch.testing.assert_close(y.double(), exact, rtol=rtol, atol=atol)
        monkeypatch.setattr(streamed[0], "many_rows", lambda *_: "a product")
        assert (streamed(x) == "a product") is bool(more)


@needs("decoding")
def test_bfloat16_without_instructions_for_it_is_multiplied_as_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "cpu_has", lambda name: name == "sse4_2")
    layer = nn.Linear(48, 80).bfloat16()
    x = torch.randn(DOT_ROWS_BESIDE_GEMM[torch.bfloat16] + 1, 48).bfloat16()
    exact = F.linear(x.float(), layer.weight.float(), layer.bias.float())
    streamed = nn.Sequential(layer)
    stream_weights(streamed, Operators(DECODING))
    with torch.no_grad():
        assert torch.equal(streamed(x), exact.bfloat16())


@needs("decoding")
def test_what_it_cannot_read_stays() -> None:
    model = nn.Sequential(nn.Linear(32, 16).double(), nn.Identity())
    stream_weights(model, OPERATORS)
    assert type(model[0]) is nn.Linear


def test_without_native_operators(decoder: Decoder) -> None:
    stream_weights(decoder, Operators())
    assert not any(isinstance(part, StreamedLinear) for part in decoder.modules())


@needs("decoding")
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 300])
def test_a_bias_that_is_replaced_may_have_gaps(rows: int) -> None:
    model = nn.Sequential(nn.Linear(32, 8))
    stream_weights(model, OPERATORS)
    model[0].bias = nn.Parameter(torch.randn(16)[::2])
    x = torch.randn(rows, 32)
    expected = F.linear(x, model[0].weight, model[0].bias)
    torch.testing.assert_close(model(x), expected)


@needs("decoding")
@torch.no_grad()
@pytest.mark.parametrize("widens", [True, False])
def test_without_gemms_pytorch_multiplies_as_operators_would(
    widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "widens", lambda: widens)
    monkeypatch.setattr(layers, "cpu_has", lambda _: True)
    model = nn.Sequential(nn.Linear(32, 8)).bfloat16()
    expected = F.linear(x := torch.randn(300, 32).bfloat16(), model[0].weight, model[0].bias)
    stream_weights(model, Operators(decoding=DECODING))
    assert model[0].many_rows is (layers._widened if widens else F.linear)
    torch.testing.assert_close(model(x), expected)
