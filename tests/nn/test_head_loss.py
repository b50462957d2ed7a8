"""The loss that comes with its gradient: the plain loss and the plain gradient."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.nn.grid import COVERING, make, random_tokens
from workhorse.nn import IGNORE, head_loss, next_token_loss
from workhorse.nn.head import HeadConfig
from workhorse.nn.head_loss import HeadLoss, is_linear, parts_of
from workhorse.nn.logprobs import token_logprobs

BATCH, SEQ, VOCAB, WIDTH = 3, 5, 11, 6


def targets() -> torch.Tensor:
    chosen = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    chosen[0, :2] = IGNORE
    chosen[2, 4] = IGNORE
    return chosen


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("max_logits", [1, 40, 2**24])
@pytest.mark.parametrize(
    "head",
    [
        HeadConfig(),
        HeadConfig(bias=True, multiplier=0.3),
        HeadConfig(bias=True, multiplier=2.0, cap=1.5),
    ],
)
def test_loss_and_gradients_are_the_plain_ones(
    head: HeadConfig, max_logits: int, z_loss: float
) -> None:
    module = head.build(VOCAB, WIDTH, WIDTH)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(BATCH, SEQ, WIDTH)
    results = []
    for fused in (False, True):
        given = x.clone().requires_grad_()
        module.zero_grad()
        if fused:
            losses, count = HeadLoss(max_logits)(given, targets(), module, z_loss)
            loss = losses.sum()
        else:
            loss, count = next_token_loss(module(given), targets(), z_loss)
        (loss * 0.7).backward()
        results.append((loss, count, given.grad, *[p.grad for p in module.parameters()]))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", COVERING[:12])
def test_it_takes_every_head(config: object) -> None:
    decoder = make(config)
    assert is_linear(decoder.head)
    tokens = random_tokens(config, 2, 6)
    plain, _ = next_token_loss(decoder(tokens), tokens)
    plain.backward()
    expected = {name: weight.grad for name, weight in decoder.named_parameters()}
    decoder.zero_grad()
    loss, _ = HeadLoss(70)(decoder.hidden(tokens), tokens, decoder.head)
    loss = loss.sum()
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for name, weight in decoder.named_parameters():
        if expected[name] is not None:
            torch.testing.assert_close(weight.grad, expected[name], atol=1e-4, rtol=1e-4)


def test_bfloat16_logits_never_exist_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of them do; the result is the float32 one within bfloat16's rounding."""
    monkeypatch.setitem(head_loss.BLOCK, "cpu", 2 * VOCAB)
    head = HeadConfig().build(VOCAB, WIDTH, WIDTH)
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(BATCH, SEQ, WIDTH)
    exact, _ = next_token_loss(head(x), targets())
    exact.backward()
    expected = head.proj.weight.grad
    head.zero_grad()
    head.bfloat16()
    wide: list[int] = []
    widened = head_loss.widened

    def counted(logits: torch.Tensor) -> torch.Tensor:
        wide.append(logits.numel())
        return widened(logits)

    monkeypatch.setattr(head_loss, "widened", counted)
    losses, _ = HeadLoss()(x.bfloat16(), targets(), head)
    loss = losses.sum()
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)
    error = (head.proj.weight.grad.float() - expected).norm() / expected.norm()
    assert error < 0.02
    assert max(wide) == 2 * VOCAB


def test_a_gradient_is_given_once_and_has_none_itself() -> None:
    head, x = HeadConfig().build(VOCAB, WIDTH, WIDTH), torch.randn(BATCH, SEQ, WIDTH)
    x.requires_grad_()
    losses, _ = HeadLoss()(x, targets(), head, 0.0)
    loss = losses.sum()
    with pytest.raises(RuntimeError, match="twice; leave create_graph out"):
        torch.autograd.grad(loss, x, create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="in its first backward pass; compute it again"):
        loss.backward(retain_graph=True)


def test_without_gradients_there_is_the_loss_alone() -> None:
    head = HeadConfig().build(VOCAB, WIDTH, WIDTH)
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(BATCH, SEQ, WIDTH)
    with torch.no_grad():
        losses, count = HeadLoss(30)(x, targets(), head)
        loss = losses.sum()
        expected, _ = next_token_loss(head(x), targets())
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert count.item() == 12


@pytest.mark.parametrize("change", ["replaced", "watched"])
def test_a_head_that_must_be_called_is_called(change: str) -> None:
    head = HeadConfig(multiplier=0.3).build(VOCAB, WIDTH, WIDTH)
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(BATCH, SEQ, WIDTH)
    expected, _ = HeadLoss()(x, targets(), head, 0.1)
    called: list[object] = []
    if change == "replaced":
        head.proj = torch.nn.Sequential(head.proj)
        called.append(head)
    else:
        head.multiply.register_forward_hook(lambda *_: called.append(head))
    assert not is_linear(head)
    losses, count = HeadLoss()(x, targets(), head, 0.1)
    assert called
    assert count.item() == 12
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("frozen", ["proj.weight", "proj.bias", "x"])
def test_what_is_frozen_costs_no_product(frozen: str) -> None:
    head = HeadConfig(bias=True).build(VOCAB, WIDTH, WIDTH)
    x = torch.randn(BATCH, SEQ, WIDTH, requires_grad=frozen != "x")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name != frozen)
    fused = Counted()
    losses, _ = fused(x, targets(), head)
    losses.sum().backward()
    assert fused.products == (3 if frozen == "proj.bias" else 2)
    gradients = {"x": x.grad} | {name: p.grad for name, p in head.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == [frozen]


class Counted(HeadLoss):
    """Counts the products of matrices."""

    products = 0

    def multiply(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.products += 1
        return super().multiply(a, b, bias)


@pytest.mark.parametrize("way", ["compile", "trace"])
def test_no_part_is_left_out_of_what_others_record(way: str) -> None:
    """Of their tensors without data they make a program for tensors with data."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([2 * part for (part,) in parts_of(2, x)])

    x = torch.randn(20, 4)
    if way == "compile":
        program = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    else:
        program = make_fx(doubled, tracing_mode="fake")(x)
    assert torch.equal(program(x), 2 * x)


@pytest.mark.parametrize("wrong", [-1, -99, VOCAB])
def test_a_target_that_is_no_token_is_refused(wrong: int) -> None:
    head = HeadConfig().build(VOCAB, WIDTH, WIDTH)
    x, expected = torch.randn(1, SEQ, WIDTH), torch.full((1, SEQ), wrong)
    for compute in (HeadLoss(), token_logprobs):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            compute(x, expected, head)
