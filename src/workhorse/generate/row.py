"""One result in the making: its tokens, its text, its random numbers, and what was guessed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.generate.config import GenerationConfig
from workhorse.generate.requests import TextOfTokens, stop_tokens
from workhorse.generate.result import Delta, FinishReason, TokenLogprob
from workhorse.generate.text import TextStream


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may come next, see `workhorse.generate.speculate`."""

    tokens: tuple[int, ...] = ()
    drawn_from: Tensor | None = None
    """Probabilities that the tokens were drawn from, float64 `(len(tokens), vocab)`; None where
    nothing was drawn."""


class Row:
    """One result in the making.

    Args:
        index: its number.
        prompt: what it continues.
        context: of the decoder, in tokens.
        config: how tokens are chosen and where it ends.
        tokenizer: gives the text and the eos.
        seed: sample j of a prompt starts its generator from `seed + j`.

    Attributes:
        tokens: the prompt and all new tokens.
        left: how many more it may take.
        finish_reason: why it ended; None while it goes on.
        guess: what was guessed for this pass.
        agreed: how many of the guessed tokens were chosen so far.
        is_ahead: whether the token chosen last was guessed, so that this pass knows what follows.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        context: int,
        config: GenerationConfig,
        *,
        tokenizer: TextOfTokens | None,
        seed: int,
    ) -> None:
        self.tokens = list(prompt)
        self.finish_reason: FinishReason | None = None
        self._index = index
        self.left = config.max_new_tokens
        if config.truncate == "refuse":
            # The last token of a text is predicted but not consumed, so it may lie one beyond.
            self.left = min(self.left, context + 1 - len(prompt))
        self._stop_tokens = stop_tokens(config, tokenizer)
        self._text = None
        if tokenizer is not None:
            self._text = TextStream(tokenizer.stream(skip_special=True, after=prompt), config.stop)
        self._generator = torch.Generator()
        if config.samples:
            self._generator.manual_seed(seed + index % config.n_samples)
        self.expect(Guess())

    def expect(self, guess: Guess) -> None:
        """Begin a pass over the last token and these."""
        self.guess = guess
        self.agreed = 0
        self.is_ahead = False

    @property
    def unmet(self) -> int:
        """How many guessed tokens were not chosen."""
        return len(self.guess.tokens) - self.agreed

    def uniform(self) -> float:
        """The next number of this row's generator, on CPU whatever the device."""
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()

    def take(self, token: int, logprob: TokenLogprob | None) -> Delta:
        """The chosen token, and whether the row ends with it."""
        begins = self.agreed == 0
        guessed = self.unmet > 0 and token == self.guess.tokens[self.agreed]
        self.agreed += guessed
        self.tokens.append(token)
        self.left -= 1
        text = ""
        if token in self._stop_tokens:
            self.finish_reason = "eos"
        elif self._text is not None:
            text = self._text.push(token)
            if self._text.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and self.left == 0:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._text is not None:
            text += self._text.finish()
        self.is_ahead = guessed and self.finish_reason is None
        return Delta(
            self._index,
            token,
            text,
            logprob,
            self.finish_reason,
            proposed=len(self.guess.tokens) if begins else 0,
            accepted=guessed,
        )
