"""Next-token loss: its formula, ignored positions, z-loss, and the chunked form."""

import pytest
import torch

from tests.nn.grid import COVERING, make, random_tokens
from workhorse.nn import IGNORE, chunked_next_token_loss, next_token_loss

BATCH, SEQ, VOCAB, D_MODEL = 3, 5, 11, 6


def targets() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    chosen[0, :2] = IGNORE
    chosen[2, 4] = IGNORE
    return chosen


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


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("max_logits", [1, 11, 40, 100, 2**24])
def test_the_chunked_loss_is_the_plain_loss_with_its_gradients(
    z_loss: float, max_logits: int
) -> None:
    x, wanted = torch.randn(BATCH, SEQ, D_MODEL), targets()
    results = []
    for chunked in (False, True):
        torch.manual_seed(2)
        head = torch.nn.Linear(D_MODEL, VOCAB)
        given = x.clone().requires_grad_()
        if chunked:
            loss, count = chunked_next_token_loss(
                given, wanted, head, vocab=VOCAB, z_loss=z_loss, max_logits=max_logits
            )
        else:
            loss, count = next_token_loss(head(given), wanted, z_loss=z_loss)
        loss.backward()
        results.append((loss, count, given.grad, head.weight.grad, head.bias.grad))
    for plain, other in zip(*results, strict=True):
        assert torch.allclose(plain, other, atol=1e-5, rtol=1e-5)


def test_the_chunked_loss_never_holds_more_logits_than_asked() -> None:
    seen: list[int] = []
    head = torch.nn.Linear(D_MODEL, VOCAB)

    def unembed(x: torch.Tensor) -> torch.Tensor:
        logits = head(x)
        seen.append(logits.numel())
        return logits

    x = torch.randn(BATCH, SEQ, D_MODEL, requires_grad=True)
    loss, _ = chunked_next_token_loss(x, targets(), unembed, vocab=VOCAB, max_logits=40)
    loss.backward()
    assert max(seen) <= 40
    assert sum(seen) >= 2 * BATCH * SEQ * VOCAB  # forward, and again in backward


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


@pytest.mark.parametrize("config", COVERING[:12])
def test_the_chunked_loss_of_a_decoder(config: object) -> None:
    """Through any head: cap, bias, multiplier, transform."""
    decoder = make(config)
    tokens = random_tokens(config, 2, 6)
    plain, _ = next_token_loss(decoder(tokens), tokens)
    chunked, _ = chunked_next_token_loss(
        decoder.hidden(tokens), tokens, decoder.unembed, vocab=config.vocab_size, max_logits=70
    )
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-6)
