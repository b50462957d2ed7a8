"""Speculative decoding: tokens are guessed cheaply, and one pass of the model verifies several.

If a pass of the model is bound by memory bandwidth, several tokens cost little more than one. A
pass reads the last token and the guesses after it, and so gives the logits after each of them.
Tokens are chosen from these logits as usual, as long as the chosen token equals the guessed one;
the rest of the guess is taken back. Guesses change the speed, never the distribution of the text:

- A guess that was not drawn (`PromptLookup`; any guess in greedy decoding) is only compared with
  the chosen token. The text is the one that plain decoding gives with the same seed.
- A guess drawn from a draft's distribution is accepted or replaced as in 2211.17192 §2.3 and
  2302.01318 §2 (`after_guess`), which accepts more guesses. The text then differs from the one
  that plain decoding draws with the seed, but comes from exactly the same distribution.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workhorse.generate.config import GenerationConfig
from workhorse.generate.request import Guess, Request
from workhorse.generate.sampling.samplers import History, Shaper
from workhorse.nn import Decoder


class SamplingRule(Protocol):
    """The rule by which a group of rows chooses tokens; `Chooser` is one."""

    config: GenerationConfig
    shape: Shaper

    def history(self, rows: Sequence[Request], device: torch.device) -> History | None:
        """The tokens that penalties count; None without penalties."""
        ...


class Proposer(Protocol):
    """Guesses how rows continue."""

    def propose(
        self, rows: Sequence[Request], most: Sequence[int], rule: SamplingRule
    ) -> list[Guess]:
        """Guesses for the next pass, at most `most[r]` tokens for row r."""
        ...

    def leave(self, row: Request) -> None:
        """Forget a request that has ended or was preempted."""
        ...

    def reset(self) -> None:
        """Forget all requests, also after an exception at any moment."""
        ...


def after_guess(target: Tensor, token: int, draft: Tensor, uniform: float) -> Tensor:
    """The weights to draw from after a guess drawn from `draft`, so that the draw follows `target`.

    All weight is on the guessed token with probability `min(1, target/draft)`, and otherwise it is
    the excess `max(0, target - draft)`. Papers: 2211.17192 §2.3; 2302.01318, algorithm 2.

    Args:
        target: the model's probabilities, float64 `(vocab,)`.
        token: the guess.
        draft: the probabilities that the guess was drawn from, float64 `(vocab,)`.
        uniform: in [0, 1), used for nothing else.

    Returns:
        Weights, float64 `(vocab,)`.
    """
    if uniform * draft[token] < target[token]:
        accepted = torch.zeros_like(target)
        accepted[token] = 1
        return accepted
    excess = (target - draft).clamp(min=0)
    # There is no excess if the distributions differ only by the rounding of their sums.
    return excess if bool(excess.any()) else target


def slack_of(config: GenerationConfig, decoder: Decoder) -> int:
    """The most tokens that a cache must be able to take back."""
    return min(config.speculate, config.max_new_tokens, decoder.max_seq_len)
