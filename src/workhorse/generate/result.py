"""What generation gives back."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["eos", "stop", "length"]
"""eos: a stop token; stop: a stop text; length: `max_new_tokens` or the context is used up."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (nats) where one token was chosen.

    They are those of the model's own distribution, before bias, penalties, temperature and filters.
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
    """Text that is now certain; often empty, or longer than the token, as characters complete."""
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    """Set on the last delta of a result."""
    proposed: int = 0
    """Tokens guessed for the pass that begins with this one; see `GenerationConfig.speculate`."""
    accepted: bool = False
    """Whether the token was guessed."""
    prompt_seconds: float = field(default=0.0, compare=False)
    """With the first token of a batch: how long reading its prompts took."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished result."""

    text: str
    """The new text without the prompt, special tokens, and the stop text; empty when generation
    was given no tokenizer."""
    tokens: tuple[int, ...]
    """Every new token, with the stop token or the tokens of the stop text that ended it."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Length of the prompt in tokens, as given."""
    seed: int | None = None
    """What draws this text again; None where nothing was drawn."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    score: float | None = None
    """Beam search's `sum of log-probabilities / length ** length_penalty`."""
    proposed: int | None = None
    """Tokens guessed in speculative decoding, and `accepted` of them are in the text; None where
    nothing was to be guessed."""
    accepted: int | None = None
    prompt_seconds: float = field(default=0.0, compare=False)
    """With the first result of a batch: how long reading the batch's prompts took."""
    decoded: bool = True
    """Whether there was a tokenizer to make text of the tokens."""

    def __str__(self) -> str:
        """The text, or the ids of the tokens where nothing makes text of them."""
        return self.text if self.decoded else str(list(self.tokens))
