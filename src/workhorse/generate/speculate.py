"""Speculative decoding: tokens are guessed cheaply, and one pass of the model checks several.

Where memory bounds the model's pass, several tokens cost little more than one. Each pass reads the
last token and the guesses after it, so it gives the logits after every one of them; tokens are then
chosen from those as ever, for as long as what is chosen is what was guessed. The rest of the guess
is taken back. Guesses change how fast a text comes and never what it is:

- A guess that was not drawn (`PromptLookup`; any guess in greedy decoding) is only compared with
  the token chosen. The text is the one that plain decoding gives, seed by seed.
- A guess drawn from a draft's distribution is accepted or replaced as in 2211.17192 §2.3 and
  2302.01318 §2 (`after_guess`), which accepts more of them. The text is then another one than plain
  decoding draws with the seed, from exactly the same distribution.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workhorse.generate.config import GenerationConfig
from workhorse.generate.row import Guess, Row
from workhorse.generate.samplers import History, Shaper


class How(Protocol):
    """How the tokens of some rows are chosen."""

    config: GenerationConfig
    shape: Shaper

    def history(self, rows: Sequence[Row], device: torch.device) -> History | None:
        """What the penalties look at."""
        ...


class Proposer(Protocol):
    """Guesses how rows go on."""

    def propose(self, rows: Sequence[Row], most: Sequence[int], how: How) -> list[Guess]:
        """Guesses for the next pass, at most `most[r]` tokens for row r."""
        ...

    def leave(self, row: Row) -> None:
        """Nothing more is to be guessed for a row."""
        ...


def after_guess(target: Tensor, token: int, draft: Tensor, uniform: float) -> Tensor:
    """What to draw from where `token` was drawn from `draft`, so that the draw follows `target`.

    The token itself with probability `min(1, target/draft)`, and otherwise the excess
    `max(0, target - draft)`. Papers: 2211.17192 §2.3; 2302.01318, algorithm 2.

    Args:
        target: probabilities, float64 `(vocab,)`.
        token: what was guessed.
        draft: the probabilities it was drawn from, float64 `(vocab,)`.
        uniform: in [0, 1), used for nothing else.

    Returns:
        Weights, float64 `(vocab,)`.
    """
    if uniform * draft[token] < target[token]:
        accepted = torch.zeros_like(target)
        accepted[token] = 1
        return accepted
    excess = (target - draft).clamp(min=0)
    # Equal distributions whose sums differ by rounding leave none.
    return excess if bool(excess.any()) else target


def slack_of(config: GenerationConfig) -> int:
    """Tokens that a cache must be able to take back."""
    return min(config.speculate, config.max_new_tokens)
