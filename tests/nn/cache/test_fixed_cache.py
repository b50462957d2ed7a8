"""A step with a `FixedCache` equals the step with the paged cache it views."""

import pytest
import torch
from torch import Tensor

from tests.nn.grid import CAUSAL, COVERING, error, fixed_length, make, name, random_tokens
from tests.nn.paged import paged
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.cache.fixed import FixedCache, layout_of, tensors_of
from workhorse.nn.cache.paged_view import PagedView

TOLERANCE = 1e-5
every_config_of_fixed_angles = pytest.mark.parametrize(
    "config",
    [config for config in CAUSAL if fixed_length(config) is None],
    ids=lambda config: name(COVERING.index(config)),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three tokens, so that a short sequence has several."""
    for module in ("fixed", "paged", "paged_view"):
        monkeypatch.setattr(f"workhorse.nn.cache.{module}.BLOCK", 3)


def fixed_step(decoder: Decoder, tokens: Tensor, view: PagedView) -> Tensor:
    """Logits after some more tokens (batch, seq)."""
    rows, seq = tokens.shape
    view.reserve([seq] * rows)
    logits = decoder(tokens, cache=FixedCache(layout_of(view), tensors_of(view)))
    view.advance(seq)
    return logits


@pytest.mark.parametrize("slack", [0, 2])
@every_config_of_fixed_angles
@torch.no_grad()
def test_fixed_and_plain_steps_may_alternate_in_a_ragged_batch(
    config: DecoderConfig, slack: int
) -> None:
    decoder = make(config)
    tokens = random_tokens(config, 2, 16)
    prompt = torch.stack((tokens[0, :4], tokens[1, :2].new_zeros(4)))
    prompt[1, 2:] = tokens[1, :2]
    positions = torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]])
    cache = paged(decoder, 2, 16, slack)
    decoder(prompt, positions=positions, cache=cache)
    for step in range(10):
        following = torch.stack((tokens[0, 4 + step], tokens[1, 2 + step]))[:, None]
        if step % 4 == 3:
            logits = decoder.next_logits(following, cache=cache)
        else:
            logits = fixed_step(decoder, following, cache)[:, -1]
        for row, consumed in enumerate((5 + step, 3 + step)):
            alone = decoder(tokens[row : row + 1, :consumed])[:, -1]
            assert error(logits[row : row + 1], alone) <= TOLERANCE, (row, step)
    assert cache.lengths.tolist() == [14, 12]
    assert cache.length == 14


@every_config_of_fixed_angles
@torch.no_grad()
def test_guesses_are_checked_and_taken_back(config: DecoderConfig) -> None:
    decoder = make(config)
    tokens = random_tokens(config, 2, 16)
    wrong = (tokens + 1) % config.vocab_size
    slack = 3
    cache = paged(decoder, 2, 16, slack)
    decoder(tokens[:, :3], cache=cache)
    for start in (3, 6, 9, 12):  # three correct tokens, then a wrong one
        guess = torch.cat((tokens[:, start : start + 3], wrong[:, start + 3 : start + 4]), dim=1)
        logits = fixed_step(decoder, guess, cache)
        whole = decoder(torch.cat((tokens[:, :start], guess), dim=1))
        assert error(logits, whole[:, start:]) <= TOLERANCE, start
        cache.truncate([start + 3] * 2)
