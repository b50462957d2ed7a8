"""Native linear layers train like PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.native.machine import MATRIX_UNIT, VECTORS, needs
from tests.train.conftest import MODEL
from workhorse.execute.lower.train import train_natively
from workhorse.execute.native_training.feedforward import Gemm, NativeLinear
from workhorse.execute.training import checkpoint_activations
from workhorse.native import MatrixUnit, Operators
from workhorse.nn import DecoderConfig, HeadLoss

UNIT = Operators(matrix_unit=MATRIX_UNIT)
IN_VECTORS = Operators(vectors=VECTORS)
BY_UNIT = pytest.param(UNIT, torch.bfloat16, id="unit", marks=needs("matrix_unit"))
SPLIT = pytest.param(UNIT, torch.float32, id="split", marks=needs("matrix_unit"))
BY_VECTORS = pytest.param(IN_VECTORS, torch.float32, id="vectors", marks=needs("vectors"))
NARROW = pytest.param(IN_VECTORS, torch.bfloat16, id="narrow vectors", marks=needs("vectors"))


def results(layer: nn.Module, x: Tensor, above: Tensor) -> list[Tensor]:
    """The output of a layer, and the gradients of x and its parameters."""
    given = x.clone().requires_grad_()
    y = layer(given)
    return [y, *torch.autograd.grad(y, (given, *layer.parameters()), above)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 50, 48), (2, 7, 33), (1, 1600, 64), (70,)])
@pytest.mark.parametrize(("operators", "dtype"), [BY_UNIT, SPLIT, BY_VECTORS, NARROW])
def test_gradients_are_those_of_pytorch(
    operators: Operators, dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    """Tolerance: half a step of bfloat16, of the two-part float32, or of sums in float32."""
    error = 2**-8 if dtype == torch.bfloat16 else 2**-20 if operators is IN_VECTORS else 2**-16
    layer = nn.Linear(shape[-1], 40, bias=bias).to(dtype)
    x, above = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 40).to(dtype)
    wide = nn.Linear(shape[-1], 40, bias=bias).double()
    wide.load_state_dict(layer.state_dict())
    layer = train_natively(layer, operators, precision="high")
    expected = results(wide, x.double(), above.double())
    ours = results(layer, x, above)
    for exact, value in zip(expected, ours, strict=True):
        assert value.dtype == dtype
        assert value.shape == exact.shape
        assert (value.double() - exact).norm() <= error * exact.norm()


@pytest.mark.parametrize(("operators", "dtype"), [BY_UNIT, BY_VECTORS, NARROW])
def test_gradients_of_any_order_in_memory(operators: Operators, dtype: torch.dtype) -> None:
    layer = nn.Linear(32, 48).to(dtype)
    x = torch.randn(32, 20, 3).to(dtype).permute(2, 1, 0)
    aboves = [
        torch.ones(1).to(dtype).expand(3, 20, 48),
        torch.randn(48, 20, 3).to(dtype).permute(2, 1, 0),
    ]
    plain = [results(layer, x, above) for above in aboves]
    layer = train_natively(layer, operators)
    atol, rtol = (0.05, 2**-7) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    for above, expected in zip(aboves, plain, strict=True):
        for exact, value in zip(expected, results(layer, x, above), strict=True):
            torch.testing.assert_close(value, exact, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("operators", "dtype"), [BY_UNIT, BY_VECTORS, NARROW])
def test_only_what_is_wanted_is_computed(operators: Operators, dtype: torch.dtype) -> None:
    layer = nn.Linear(32, 32).to(dtype)
    layer.weight.requires_grad_(False)
    layer = train_natively(layer, operators)
    assert isinstance(layer, NativeLinear)
    multiply = layer.multiply
    y = layer(torch.randn(4, 32).to(dtype))
    multiply.products[dtype] = multiply.sums[dtype] = lambda *_: pytest.fail("multiplied")
    y.sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


@needs("vectors")
def test_plain_layers_alone_are_replaced_and_names_stay() -> None:
    class Other(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), Other(4, 4))
    names = list(module.state_dict())
    train_natively(module, IN_VECTORS)
    assert [type(part) for part in module] == [NativeLinear, Other]
    assert list(module.state_dict()) == names


@needs("matrix_unit")
def test_highest_precision_of_float32_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixUnit, "gemm", None)
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    expected = layer(x)
    layer = train_natively(layer, UNIT)
    assert torch.equal(layer(x), expected)
    assert torch.equal(Gemm(UNIT)(x, layer.weight.t(), layer.bias), expected)
    assert torch.equal(Gemm(UNIT)(x, layer.weight.t()), F.linear(x, layer.weight))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # a warning of PyTorch's own compiler
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("operators", "dtype"), [BY_UNIT, BY_VECTORS, NARROW])
def test_compiled_and_checkpointed_layers_have_the_same_gradients(
    operators: Operators, dtype: torch.dtype
) -> None:
    config = DecoderConfig.from_dict({**MODEL, "vocab_size": 11, "max_seq_len": 8})
    decoder = config.build().to(dtype)
    train_natively(decoder, operators)
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
@pytest.mark.parametrize(("operators", "dtype"), [BY_UNIT, SPLIT, BY_VECTORS, NARROW])
def test_the_loss_multiplies_natively(
    operators: Operators, dtype: torch.dtype, max_logits: int
) -> None:
    """In one part and in several; as close to float32 as the dtype allows."""
    error = 0.02 if dtype == torch.bfloat16 else 2**-20 if operators is IN_VECTORS else 2**-16
    config = DecoderConfig.from_dict({**MODEL, "vocab_size": 190, "max_seq_len": 32})
    head = config.build().head
    x, targets = torch.randn(2, 32, config.d_model), torch.randint(190, (2, 32))
    results = []
    plain = HeadLoss(max_logits)
    native = train_natively(HeadLoss(max_logits), operators, precision="high")
    for each, way in ((torch.float32, plain), (dtype, native)):
        head = head.to(each)
        y = x.to(each).requires_grad_()
        losses, _ = way(y, targets, head)
        loss = losses.sum()
        results.append((loss, *torch.autograd.grad(loss, (y, *head.parameters()))))
    for exact, ours in zip(*results, strict=True):
        assert (ours.float() - exact).norm() < error * exact.norm()
