"""Linear layers that multiply natively train as PyTorch's do."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.native.machine import MATRIX_UNIT, needs
from tests.train.conftest import MODEL
from workhorse.native import MatrixUnit
from workhorse.nn import DecoderConfig, HeadLoss
from workhorse.transforms.checkpointing import checkpoint_activations
from workhorse.transforms.native_training.linear import (
    Gemm,
    NativeLinear,
    replace_linear,
)
from workhorse.transforms.native_training.loss import replace_head_loss

pytestmark = needs("matrix_unit")


def results(layer: nn.Module, x: Tensor, above: Tensor) -> list[Tensor]:
    """What a layer gives, and the gradients of x and its parameters."""
    given = x.clone().requires_grad_()
    y = layer(given)
    return [y, *torch.autograd.grad(y, (given, *layer.parameters()), above)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 50, 48), (2, 7, 33), (1, 1600, 64), (70,)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-8), (torch.float32, 2**-16)])
def test_gradients_are_those_of_pytorch(
    dtype: torch.dtype, error: float, shape: tuple[int, ...], bias: bool
) -> None:
    """To half a step of bfloat16, or of a float32 number's two parts, taken over all numbers."""
    layer = nn.Linear(shape[-1], 40, bias=bias).to(dtype)
    x, above = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 40).to(dtype)
    wide = nn.Linear(shape[-1], 40, bias=bias).double()
    wide.load_state_dict(layer.state_dict())
    layer = replace_linear(layer, Gemm(MATRIX_UNIT, "high"))
    expected = results(wide, x.double(), above.double())
    ours = results(layer, x, above)
    for exact, value in zip(expected, ours, strict=True):
        assert value.dtype == dtype
        assert value.shape == exact.shape
        assert (value.double() - exact).norm() <= error * exact.norm()


def test_gradients_of_any_order_in_memory() -> None:
    layer = nn.Linear(32, 48).bfloat16()
    x = torch.randn(32, 20, 3).bfloat16().permute(2, 1, 0)
    aboves = [
        torch.ones(1).bfloat16().expand(3, 20, 48),
        torch.randn(48, 20, 3).bfloat16().permute(2, 1, 0),
    ]
    plain = [results(layer, x, above) for above in aboves]
    layer = replace_linear(layer, Gemm(MATRIX_UNIT))
    for above, expected in zip(aboves, plain, strict=True):
        for exact, value in zip(expected, results(layer, x, above), strict=True):
            torch.testing.assert_close(value, exact, atol=0.05, rtol=2**-7)


def test_only_what_is_wanted_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(32, 32).bfloat16()
    layer.weight.requires_grad_(False)
    layer = replace_linear(layer, Gemm(MATRIX_UNIT))
    y = layer(torch.randn(4, 32).bfloat16())
    monkeypatch.setattr(MatrixUnit, "gemm", None)
    y.sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_plain_layers_alone_are_replaced_and_names_stay() -> None:
    class Other(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), Other(4, 4))
    names = list(module.state_dict())
    replace_linear(module, Gemm(MATRIX_UNIT))
    assert [type(part) for part in module] == [NativeLinear, Other]
    assert list(module.state_dict()) == names


def test_highest_precision_of_float32_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixUnit, "gemm", None)
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    expected = layer(x)
    layer = replace_linear(layer, Gemm(MATRIX_UNIT))
    assert torch.equal(layer(x), expected)
    assert torch.equal(Gemm(MATRIX_UNIT)(x, layer.weight.t(), layer.bias), expected)
    assert torch.equal(Gemm(MATRIX_UNIT)(x, layer.weight.t()), F.linear(x, layer.weight))


def test_compiled_and_checkpointed_layers_have_the_same_gradients() -> None:
    config = DecoderConfig.from_dict({**MODEL, "vocab_size": 11, "max_seq_len": 8})
    decoder = config.build().bfloat16()
    replace_linear(decoder, Gemm(MATRIX_UNIT))
    tokens = torch.randint(11, (2, 8))
    gradients = []
    for change in (
        lambda: None,
        lambda: checkpoint_activations(decoder),
        eagerly_compiled(decoder),
    ):
        change()
        decoder.zero_grad()
        decoder(tokens).float().square().sum().backward()
        gradients.append([parameter.grad for parameter in decoder.parameters()])
    for plain, checkpointed, compiled in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)
        assert torch.equal(plain, compiled)


def eagerly_compiled(decoder: nn.Module):
    def change() -> None:
        for layer in decoder.layers:
            layer.compile(backend="eager")

    return change


@pytest.mark.parametrize("max_logits", [2**20, 2**11])
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.02), (torch.float32, 2**-16)])
def test_head_loss_multiplies_natively(dtype: torch.dtype, error: float, max_logits: int) -> None:
    """In one part and in several, as near to float32 as the type allows."""
    config = DecoderConfig.from_dict({**MODEL, "vocab_size": 190, "max_seq_len": 32})
    head = config.build().head
    x, targets = torch.randn(2, 32, config.d_model), torch.randint(190, (2, 32))
    results = []
    plain = HeadLoss(max_logits)
    native = replace_head_loss(HeadLoss(max_logits), Gemm(MATRIX_UNIT, "high"))
    for each, way in ((torch.float32, plain), (dtype, native)):
        head = head.to(each)
        y = x.to(each).requires_grad_()
        losses, _ = way(y, targets, head)
        loss = losses.sum()
        results.append((loss, *torch.autograd.grad(loss, (y, *head.parameters()))))
    for exact, ours in zip(*results, strict=True):
        assert (ours.float() - exact).norm() < error * exact.norm()
