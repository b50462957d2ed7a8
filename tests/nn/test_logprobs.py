"""Log-probabilities of tokens: those of log_softmax, and its gradients."""

import copy

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from workhorse.nn import IGNORE, HeadLoss, token_logprobs
from workhorse.nn import head_loss as fused
from workhorse.nn.head import HeadConfig

BATCH, SEQ, VOCAB, WIDTH = 3, 5, 11, 6
HEADS = {
    "plain": HeadConfig(),
    "biased": HeadConfig(bias=True, multiplier=0.3),
    "capped": HeadConfig(bias=True, multiplier=2.0, cap=1.5),
}


def targets() -> Tensor:
    chosen = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    chosen[0, :2] = IGNORE
    return chosen


def reference(x: Tensor, head: torch.nn.Module) -> Tensor:
    logprobs = head(x).log_softmax(dim=-1)
    wanted = targets()
    chosen = logprobs.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(wanted == IGNORE, 0)


def results(found: Tensor, x: Tensor, head: torch.nn.Module) -> list[Tensor]:
    """Each token's weight is another, negative ones too."""
    above = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view(found.shape)
    return [found, *torch.autograd.grad(found, (x, *head.parameters()), above)]


@pytest.mark.parametrize("max_logits", [1, 40, 2**24])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("called", [False, True])
def test_they_are_those_of_log_softmax(
    monkeypatch: pytest.MonkeyPatch, kind: str, max_logits: int, called: bool
) -> None:
    """In one part and in many, fused or, where somebody listens, by the head itself."""
    monkeypatch.setitem(fused.BLOCK, "cpu", 2 * VOCAB)
    head = HEADS[kind].build(VOCAB, WIDTH, WIDTH).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = results(reference(x, head), x, head)
    if called:
        head.cap.register_forward_hook(lambda *_: None)
    ours = results(token_logprobs(x, targets(), head, max_logits=max_logits), x, head)
    for exact, value in zip(expected, ours, strict=True):
        torch.testing.assert_close(value, exact, atol=1e-12, rtol=1e-12)


def test_their_sum_is_the_loss() -> None:
    head = HEADS["capped"].build(VOCAB, WIDTH, WIDTH)
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(BATCH, SEQ, WIDTH)
    losses, _ = HeadLoss()(x, targets(), head)
    torch.testing.assert_close(-token_logprobs(x, targets(), head).sum(), losses.sum())


def test_no_logits_are_kept_and_bfloat16_ones_are_float32_in_blocks_alone() -> None:
    head = HeadConfig().build(500, 8, 8).bfloat16()
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(4, 16, 8).bfloat16().requires_grad_()
    wanted = torch.randint(500, (4, 16))
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = token_logprobs(x, wanted, head)
    assert found.dtype == torch.float32
    assert max(tensor.numel() for tensor in kept) == head.proj.weight.numel()
    exact = (
        copy.deepcopy(head)
        .float()(x.float())
        .log_softmax(dim=-1)
        .gather(-1, wanted[..., None])[..., 0]
    )
    assert (found - exact).abs().max() < 0.05
    found.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("frozen", ["proj.weight", "proj.bias", "x"])
def test_what_is_frozen_costs_no_product(monkeypatch: pytest.MonkeyPatch, frozen: str) -> None:
    head = HeadConfig(bias=True).build(VOCAB, WIDTH, WIDTH)
    x = torch.randn(BATCH, SEQ, WIDTH, requires_grad=frozen != "x")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name != frozen)
    found = token_logprobs(x, targets(), head)
    products: list[torch.Size] = []

    def counted(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        products.append(a.shape)
        return fused.product(a, b, bias)

    monkeypatch.setattr("workhorse.nn.logprobs.product", counted)
    found.sum().backward()
    assert len(products) == (3 if frozen == "proj.bias" else 2)
    gradients = {"x": x.grad} | {name: p.grad for name, p in head.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == [frozen]


def test_without_gradients_nothing_is_kept() -> None:
    head = HeadConfig().build(VOCAB, WIDTH, WIDTH)
    with torch.no_grad():
        assert not token_logprobs(torch.randn(BATCH, SEQ, WIDTH), targets(), head).requires_grad


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor of each type has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.numbers[made.dtype] = max(self.numbers.get(made.dtype, 0), made.numel())
        return result


@pytest.mark.parametrize("what", ["loss", "logprobs"])
def test_a_batchs_logits_never_exist_at_once_and_blocks_alone_in_float32(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Forwards and backwards."""
    vocab, width, tokens, block, at_once = 256, 4, 192, 8 * 256, 16 * 256
    monkeypatch.setitem(fused.BLOCK, "cpu", block)
    head = HeadConfig().build(vocab, width, width).bfloat16()
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(2, tokens // 2, width).bfloat16().requires_grad_()
    wanted = torch.randint(vocab, (2, tokens // 2))
    with Largest() as largest:
        if what == "loss":
            losses, _ = HeadLoss(max_logits=at_once)(x, wanted, head)
            losses.sum().backward()
        else:
            token_logprobs(x, wanted, head, max_logits=at_once).sum().backward()
    assert largest.numbers[torch.bfloat16] == at_once < tokens * vocab
    assert largest.numbers[torch.float32] == block > vocab * width  # which sums of gradients have
