"""The results of generation."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["eos", "stop", "length"]
"""eos: a stop token; stop: a stop text; length: `max_new_tokens` or the end of the context."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (nats) at the position of one chosen token.

    They are of the model's own distribution, before bias, penalties, temperature and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One more token of one result."""

    index: int
    """Which result: `prompt * n_samples + sample`."""
    token: int
    text: str
    """Text that has become certain: empty while a character is incomplete, then that of several
    tokens."""
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    """Set on the last delta of a result."""
    proposed: int = 0
    """Tokens guessed in the pass whose first token this is; see `GenerationConfig.speculate`."""
    accepted: bool = False
    """Whether the token was guessed."""
    prompt_seconds: float = field(default=0.0, compare=False)
    """Set on the first delta of a batch: how long it took to read the batch's prompts."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished result."""

    text: str
    """The new text without the prompt, special tokens and stop text; empty without a tokenizer."""
    tokens: tuple[int, ...]
    """All new tokens, including the stop token, or the tokens of the stop text, that ended it."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Length of the prompt in tokens, as given."""
    seed: int | None = None
    """The seed that reproduces this text; None if nothing was drawn."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    score: float | None = None
    """Beam search's `sum of log-probabilities / length ** length_penalty`."""
    proposed: int | None = None
    """Tokens guessed by speculative decoding; None without it."""
    accepted: int | None = None
    """How many of the guessed tokens are in the text."""
    prompt_seconds: float = field(default=0.0, compare=False)
    """Set on the first result of a batch: how long it took to read the batch's prompts."""
    decoded: bool = True
    """Whether there was a tokenizer to turn the tokens into text."""

    def __str__(self) -> str:
        """The text, or the token ids without a tokenizer."""
        return self.text if self.decoded else str(list(self.tokens))
