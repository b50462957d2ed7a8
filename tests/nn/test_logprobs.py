"""Log-probabilities, losses and gradients equal PyTorch's functions on the full logits."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import workhorse
from tests.nn.grid import COVERING, make, random_tokens
from workhorse.nn import (
    IGNORE,
    HeadLoss,
    Logprobs,
    TokenLogprobs,
    logprobs,
    next_token_loss,
    products,
)
from workhorse.nn.embedding import HeadConfig
from workhorse.nn.logprobs import Vocabulary, is_linear, score
from workhorse.nn.products import parts_of, product

BATCH, SEQ, VOCAB, WIDTH = 3, 5, 11, 6
HEADS = {
    "plain": HeadConfig(),
    "biased": HeadConfig(bias=True, multiplier=0.3),
    "capped": HeadConfig(bias=True, multiplier=2.0, cap=1.5),
}


def targets() -> Tensor:
    chosen = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    chosen[0, :2] = IGNORE
    chosen[2, 4] = IGNORE
    return chosen


def weights(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(0, 2, BATCH * SEQ, dtype=dtype).view(BATCH, SEQ)


def build(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    head = HEADS[kind].build(VOCAB, WIDTH, WIDTH).to(dtype)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


def reference(logits: Tensor, wanted: Tensor) -> list[Tensor]:
    """The fields of `Logprobs`, computed by PyTorch."""
    every = logits.log_softmax(dim=-1)
    counted = wanted != IGNORE
    target = every.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    entropy = torch.special.entr(every.exp()).sum(-1)
    return [one * counted for one in (target, logits.logsumexp(dim=-1), entropy)]


def plain_loss(logits: Tensor, wanted: Tensor, z_loss: float = 0.0) -> Tensor:
    """The summed loss, computed by PyTorch."""
    flat = logits.flatten(0, 1)
    z = (flat.logsumexp(dim=-1).square() * (wanted.flatten() != IGNORE)).sum()
    return F.cross_entropy(flat, wanted.flatten(), reduction="sum") + z_loss * z


def with_gradients(found: list[Tensor], x: Tensor, head: nn.Module) -> list[Tensor]:
    """Add gradients of a weighted sum; each token's term has a different weight, some negative."""
    joined = torch.cat([one.flatten() for one in found])
    above = torch.linspace(-1, 2, len(joined), dtype=joined.dtype)
    return [*found, *torch.autograd.grad(joined, (x, *head.parameters()), above)]


@pytest.mark.parametrize("max_logits", [1, 40, 2**24])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("way", ["linear", "called"])
def test_they_and_their_gradients_are_those_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, kind: str, max_logits: int, way: str
) -> None:
    """In float64, in one part and in many; with a hook, the head is called instead."""
    monkeypatch.setitem(products.BLOCK, "cpu", 2 * VOCAB)
    head = build(kind)
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = with_gradients(reference(head(x), targets()), x, head)
    if way == "called":
        head.cap.register_forward_hook(lambda *_: None)
    assert is_linear(head) == (way == "linear")
    ours = TokenLogprobs(max_logits, entropy=True)(x, targets(), head)
    for plain, found in zip(expected, with_gradients([*ours], x, head), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", ["linear", "called"])
def test_a_token_that_cannot_be_has_probability_0(way: str) -> None:
    """A bias may be -inf: results and gradients are not NaN, and gradcheck passes."""
    head = build("biased")
    with torch.no_grad():
        head.proj.bias[3] = -torch.inf
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64, requires_grad=True)
    wanted = targets().where(targets() != 3, 4)
    if way == "called":
        head.cap.register_forward_hook(lambda *_: None)
    ours = TokenLogprobs(entropy=True)
    expected = reference(head(x), wanted)
    for plain, found in zip(expected, ours(x, wanted, head), strict=True):
        torch.testing.assert_close(found, plain)
    assert torch.autograd.gradcheck(lambda x: tuple(ours(x, wanted, head)), (x,))


class Shard(Vocabulary):
    """The vocabulary shard of one rank; the logits of all ranks are given."""

    def __init__(self, rank: int, shards: list[Tensor], wanted: Tensor) -> None:
        self.wanted = wanted
        self.start = sum(one.shape[1] for one in shards[:rank])
        self.stop = self.start + shards[rank].shape[1]
        self.all = torch.cat(shards, dim=1)

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        here = ((targets >= self.start) & (targets < self.stop))[:, None]
        return here, (targets[:, None] - self.start).where(here, 0)

    def largest(self, of_rows: Tensor) -> Tensor:
        del of_rows
        return self.all.amax(dim=1, keepdim=True)

    def add(self, of_rows: Tensor) -> Tensor:
        """Compute the sums from their definitions."""
        powers = (self.all - self.all.amax(dim=1, keepdim=True)).exp()
        spread = (powers * powers.log()).sum(dim=1, keepdim=True)
        chosen = self.all.gather(1, self.wanted.clamp(min=0)[:, None])
        return torch.cat((powers.sum(dim=1, keepdim=True), chosen, spread), dim=1)[
            :, : of_rows.shape[1]
        ]


@pytest.mark.parametrize("n_shards", [2, 4])
def test_each_shard_of_a_vocabulary_gives_the_terms_of_all_and_its_part_of_the_gradient(
    n_shards: int,
) -> None:
    """Runs in one process; `tests/parallel` tests the collectives."""
    logits = torch.randn(BATCH * SEQ, VOCAB, dtype=torch.float64)
    wanted = targets().flatten()
    by = torch.randn(len(wanted), 4, dtype=torch.float64)
    gradient = logits.clone()
    terms = score(gradient, wanted, by, entropy=True)
    shards = [*logits.tensor_split(n_shards, dim=1)]
    found: list[Tensor] = []
    for rank in range(n_shards):
        shard = Shard(rank, shards, wanted)
        own = shards[rank].clone()
        torch.testing.assert_close(score(own, wanted, by, entropy=True, vocabulary=shard), terms)
        found.append(own)
    torch.testing.assert_close(torch.cat(found, dim=1), gradient)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("max_logits", [1, 40, 2**24])
@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_and_its_gradients_are_the_plain_ones(
    kind: str, max_logits: int, z_loss: float, weighted: bool
) -> None:
    head = build(kind)
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64, requires_grad=True)
    counts = targets() != IGNORE
    of_each = weights(torch.float64) if weighted else counts.double()
    target, logsumexp, _ = reference(head(x), targets())
    expected = (of_each * (z_loss * logsumexp.square() - target)).sum()
    given = weights(torch.float64) if weighted else None
    losses, count = HeadLoss(max_logits)(x, targets(), head, z_loss=z_loss, weights=given)
    loss, same_count = next_token_loss(head(x), targets(), z_loss, given)
    assert count == same_count == (of_each * counts).sum()
    for ours in (losses.sum(), loss):
        results = [
            [one, *torch.autograd.grad(one * 0.7, (x, *head.parameters()), retain_graph=True)]
            for one in (expected, ours)
        ]
        for plain, found in zip(*results, strict=True):
            torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_the_loss_is_its_formula(z_loss: float) -> None:
    logits, wanted = 3 * torch.randn(BATCH, SEQ, VOCAB), targets()
    expected, counted = 0.0, 0
    for row in range(BATCH):
        for column in range(SEQ):
            if wanted[row, column] == IGNORE:
                continue
            normaliser = logits[row, column].double().exp().sum().log()
            expected += normaliser - logits[row, column, wanted[row, column]].double()
            expected += z_loss * normaliser**2
            counted += 1
    loss, count = next_token_loss(logits, wanted, z_loss=z_loss)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert count.item() == counted == 12


@pytest.mark.parametrize("config", COVERING[:12])
def test_it_takes_every_head(config: object) -> None:
    decoder = make(config)
    assert is_linear(decoder.head)
    tokens = random_tokens(config, 2, 6)
    plain = plain_loss(decoder(tokens), tokens)
    plain.backward()
    expected = {name: weight.grad for name, weight in decoder.named_parameters()}
    for ours in (HeadLoss(70), TokenLogprobs(70)):
        decoder.zero_grad()
        found = ours(decoder.hidden(tokens), tokens, decoder.head)
        loss = -found.target.sum() if isinstance(found, Logprobs) else found[0].sum()
        loss.backward()
        assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
        for name, weight in decoder.named_parameters():
            if expected[name] is not None:
                torch.testing.assert_close(weight.grad, expected[name], atol=1e-4, rtol=1e-4)


def test_ignored_positions_have_no_gradient() -> None:
    logits = torch.randn(BATCH, SEQ, VOCAB, requires_grad=True)
    loss, _ = next_token_loss(logits, targets(), z_loss=0.1)
    loss.backward()
    ignored = targets() == IGNORE
    assert torch.count_nonzero(logits.grad[ignored]) == 0
    assert (logits.grad[~ignored].abs().sum(-1) > 0).all()


def test_a_batch_without_targets_has_loss_0() -> None:
    nothing = torch.full((BATCH, SEQ), IGNORE)
    loss, count = next_token_loss(torch.randn(BATCH, SEQ, VOCAB), nothing, z_loss=0.1)
    assert loss.item() == 0.0
    assert count.item() == 0


def test_the_loss_is_float32_from_bfloat16_logits() -> None:
    logits = torch.randn(BATCH, SEQ, VOCAB).bfloat16()
    loss, _ = next_token_loss(logits, targets())
    assert loss.dtype == torch.float32
    exact, _ = next_token_loss(logits.double().float(), targets())
    assert loss == exact


def test_bfloat16_logits_never_exist_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only blocks are converted; the result equals float32 within bfloat16's rounding."""
    monkeypatch.setitem(products.BLOCK, "cpu", 2 * VOCAB)
    head = HeadConfig().build(VOCAB, WIDTH, WIDTH)
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(BATCH, SEQ, WIDTH)
    exact = plain_loss(head(x), targets())
    exact.backward()
    expected = head.proj.weight.grad
    head.zero_grad()
    head.bfloat16()
    wide: list[int] = []
    widened = logprobs.widened

    def counted(logits: Tensor) -> Tensor:
        wide.append(logits.numel())
        return widened(logits)

    monkeypatch.setattr(logprobs, "widened", counted)
    losses, _ = HeadLoss()(x.bfloat16(), targets(), head)
    loss = losses.sum()
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)
    error = (head.proj.weight.grad.float() - expected).norm() / expected.norm()
    assert error < 0.02
    assert max(wide) == 2 * VOCAB


def test_no_logits_are_kept_and_bfloat16_ones_are_float32_in_blocks_alone() -> None:
    head = HeadConfig().build(500, 8, 8).bfloat16()
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(4, 16, 8).bfloat16().requires_grad_()
    wanted = torch.randint(500, (4, 16))
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = TokenLogprobs()(x, wanted, head).target
    assert found.dtype == torch.float32
    assert max(tensor.numel() for tensor in kept) == head.proj.weight.numel()
    exact, *_ = reference(copy.deepcopy(head).float()(x.float()), wanted)
    assert (found - exact).abs().max() < 0.05
    found.sum().backward()
    assert x.grad is not None


def test_a_gradient_is_given_once_and_has_none_itself() -> None:
    head, x = HeadConfig().build(VOCAB, WIDTH, WIDTH), torch.randn(BATCH, SEQ, WIDTH)
    x.requires_grad_()
    losses, _ = HeadLoss()(x, targets(), head)
    loss = losses.sum()
    with pytest.raises(
        RuntimeError, match="the loss has no second derivative; remove create_graph=True"
    ):
        torch.autograd.grad(loss, x, create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError,
        match=r"^the first backward pass freed the gradients of the loss; compute the loss again$",
    ):
        loss.backward(retain_graph=True)


@pytest.mark.parametrize("way", [HeadLoss(30), TokenLogprobs(30)])
def test_without_gradients_there_are_the_results_alone(way: TokenLogprobs) -> None:
    head = build("plain", torch.float32)
    x = torch.randn(BATCH, SEQ, WIDTH)
    with torch.no_grad():
        found = way(x, targets(), head)
        loss = -found.target.sum() if isinstance(found, Logprobs) else found[0].sum()
        expected = plain_loss(head(x), targets())
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("change", ["replaced", "watched"])
def test_a_head_that_must_be_called_is_called(change: str) -> None:
    head = HeadConfig(multiplier=0.3).build(VOCAB, WIDTH, WIDTH)
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(BATCH, SEQ, WIDTH)
    expected, _ = HeadLoss()(x, targets(), head, z_loss=0.1)
    called: list[object] = []
    if change == "replaced":
        head.proj = torch.nn.Sequential(head.proj)
        called.append(head)
    else:
        head.multiply.register_forward_hook(lambda *_: called.append(head))
    assert not is_linear(head)
    losses, count = HeadLoss()(x, targets(), head, z_loss=0.1)
    assert called
    assert count.item() == 12
    torch.testing.assert_close(losses, expected)


def test_a_head_that_must_be_called_never_gives_more_logits_than_asked() -> None:
    head, seen = build("plain", torch.float32), list[int]()
    head.register_forward_hook(lambda _, __, logits: seen.append(logits.numel()))
    x = torch.randn(BATCH, SEQ, WIDTH, requires_grad=True)
    losses, _ = HeadLoss(40)(x, targets(), head)
    losses.sum().backward()
    assert max(seen) <= 40
    assert sum(seen) >= 2 * BATCH * SEQ * VOCAB  # forward, and again in backward


@pytest.mark.parametrize(("way", "again"), [(HeadLoss, 0), (TokenLogprobs, 1)])
@pytest.mark.parametrize("frozen", ["proj.weight", "proj.bias", "x"])
def test_what_is_frozen_costs_no_product(
    monkeypatch: pytest.MonkeyPatch, frozen: str, way: type[TokenLogprobs], again: int
) -> None:
    head = HeadConfig(bias=True).build(VOCAB, WIDTH, WIDTH)
    x = torch.randn(BATCH, SEQ, WIDTH, requires_grad=frozen != "x")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name != frozen)
    made: list[Tensor] = []

    def counted(*given: Tensor | None) -> Tensor:
        made.append(product(*given))
        return made[-1]

    monkeypatch.setattr(logprobs, "product", counted)
    way()(x, targets(), head)[0].sum().backward()
    assert len(made) - again == (3 if frozen == "proj.bias" else 2)
    gradients = {"x": x.grad} | {name: p.grad for name, p in head.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == [frozen]


class Largest(TorchDispatchMode):
    """Records the element count of the largest tensor of each dtype that operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.numbers[made.dtype] = max(self.numbers.get(made.dtype, 0), made.numel())
        return result


@pytest.mark.parametrize("way", [HeadLoss, TokenLogprobs])
def test_a_batchs_logits_never_exist_at_once_and_blocks_alone_in_float32(
    monkeypatch: pytest.MonkeyPatch, way: type[TokenLogprobs]
) -> None:
    """In the forward and the backward pass."""
    vocab, width, tokens, block, at_once = 256, 4, 192, 8 * 256, 16 * 256
    monkeypatch.setitem(products.BLOCK, "cpu", block)
    head = HeadConfig().build(vocab, width, width).bfloat16()
    torch.nn.init.normal_(head.proj.weight)
    x = torch.randn(2, tokens // 2, width).bfloat16().requires_grad_()
    wanted = torch.randint(vocab, (2, tokens // 2))
    with Largest() as largest:
        way(max_logits=at_once)(x, wanted, head)[0].sum().backward()
    assert largest.numbers[torch.bfloat16] == at_once < tokens * vocab
    assert largest.numbers[torch.float32] == block > vocab * width  # the size of gradient sums


@pytest.mark.parametrize("way", ["compile", "trace"])
def test_no_part_is_left_out_of_what_others_record(way: str) -> None:
    """Compilers and tracers use tensors without data, but their programs run on real data."""

    def doubled(x: Tensor) -> Tensor:
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
    for compute in (HeadLoss(), TokenLogprobs()):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            compute(x, expected, head)


def test_nothing_else_in_the_package_computes_log_probabilities() -> None:
    places = [
        path.name
        for path in Path(workhorse.__file__).parent.rglob("*.py")
        for name in ("log_softmax(", "logsumexp(", "cross_entropy(")
        if name in path.read_text("utf-8")
    ]
    assert set(places) == {"logprobs.py"}
