"""The options of a generation, and its results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from workhorse.config.base import Config, ConfigError

COLDEST = 1e-6
MOST_TIMES = 1e6
LARGEST_SHIFT = 1e9
LARGEST_POWER = 10.0
"""Bounds within which finite logits stay finite, whatever options are combined."""
MOST_ROWS = 8192
"""The most texts generated at once for one prompt."""


class GenerationConfig(Config):
    """How tokens are chosen and where a text ends.

    Decoding samples if `temperature > 0` and `beams == 1`, is greedy if `temperature == 0`, and
    searches for the likeliest text if `beams > 1`. An option that the chosen way of decoding does
    not read is refused, except for a seed with `temperature=0`, which has no effect.
    """

    max_new_tokens: int = 128
    """The most tokens to add, 1 or more."""
    temperature: float = 1.0
    """Divides the logits, by 1e-6 or more; 0 takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Sample only from the k likeliest tokens."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together have this probability (nucleus)."""
    min_p: float = 0.0
    """Sample only from tokens with at least this fraction of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens seen in the prompt or the new text less likely; 1e-6 to 1e6."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the new text; -1e9 to 1e9."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the new text; -1e9 to 1e9."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logit of a token id; -1e9 to 1e9."""
    seed: int | None = None
    """Seeds the request's own generator, 0 to 2^63 - 1; None draws a fresh seed."""
    n_samples: int = 1
    """Texts per prompt, generated at once, at most 8192; sample j is the text that `seed + j` gives
    on its own."""
    stop: tuple[str, ...] = ()
    """Texts that end the result; neither they nor anything after them is part of it. A `Model` also
    stops at a special token of that name."""
    stop_tokens: tuple[int, ...] | None = None
    """Token ids that end the result. None: the tokenizer's eos; empty: no token ends it."""
    logprobs: int | None = None
    """Return each token's log-probability and those of the n likeliest; 0 returns only its own."""
    truncate: Literal["refuse", "left"] = "refuse"
    """What happens at the end of the context. refuse: a longer prompt is an error, and the text
    ends there; left: the oldest tokens are dropped, and the text continues."""
    speculate: int = 0
    """Tokens guessed at a time, by a draft model or from the text itself, and verified in one pass
    of the model. Changes the speed, never the distribution of the text. 0 guesses none."""
    exact: bool = False
    """Read each prompt by itself, in pieces that end at fixed positions, and texts together only
    where that changes no bit (native steps), so that every number has the same bits whatever else
    is read or remembered. Elsewhere batching then saves no time."""
    beams: int = 1
    """Hypotheses kept by beam search, at most 8192; 1 means no search."""
    length_penalty: float = 1.0
    """Beam search divides the summed log-probability by `length ** length_penalty`; -10 to 10."""
    early_stopping: bool = False
    """Beam search ends with the first `beams` finished texts, even if better ones could follow."""

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        for name, bounds in _BOUNDS.items():
            for bound in bounds:
                bound.check(name, getattr(self, name))
        for token, bias in self.logit_bias.items():
            _SHIFT.check(f"logit_bias of token {token}", bias)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} is out of range; choose 0 to 2^63 - 1")
        if self.seed is not None and self.seed + self.n_samples > 2**63:
            raise ConfigError(
                f"seed={self.seed} with n_samples={self.n_samples} is out of range: the last "
                f"sample's would be {self.seed + self.n_samples - 1}; choose a smaller seed"
            )
        if self.exact and self.speculate:
            raise ConfigError(
                f"exact and speculate={self.speculate}: the same token would be read in passes of "
                "different lengths; leave one of the two out"
            )
        if not all(self.stop):
            raise ConfigError("stop holds an empty text, which ends everything; leave it out")
        return self

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        if self.beams > 1:
            how = f"beams={self.beams} draws nothing and scores whole texts"
            unread, remedy = _NOT_IN_BEAM_SEARCH, "leave one of the two out"
        elif self.temperature == 0:
            how = "temperature=0 always takes the likeliest token"
            unread, remedy = _NOT_IN_GREEDY, "leave one of the two out"
        else:
            how = "without beams there is no search"
            unread, remedy = _ONLY_IN_BEAM_SEARCH, "choose beams of 2 or more, or leave it out"
        for name in unread:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ConfigError(f"{name}={value!r} would have no effect: {how}; {remedy}")
        return self

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random: neither beam search nor greedy decoding."""
        return self.beams == 1 and self.temperature > 0


_ONLY_IN_BEAM_SEARCH = ("length_penalty", "early_stopping")
_NOT_IN_GREEDY = ("top_k", "top_p", "min_p", "n_samples", *_ONLY_IN_BEAM_SEARCH)
_NOT_IN_BEAM_SEARCH = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n_samples",
    "stop",
    "logprobs",
    "seed",
    "speculate",
)


class _Bound(NamedTuple):
    holds: Callable[[float], bool]
    otherwise: str
    """The rest of the message, after the option and its value."""

    def check(self, name: str, value: float | None) -> None:
        if value is not None and not self.holds(value):
            raise ConfigError(f"{name}={value:g} {self.otherwise}")


def _between(least: float, most: float) -> _Bound:
    return _Bound(
        lambda value: least <= value <= most, f"is out of range; choose {least:g} to {most:g}"
    )


_SHIFT = _between(-LARGEST_SHIFT, LARGEST_SHIFT)
_BOUNDS = {
    "max_new_tokens": [_Bound(lambda n: n >= 1, "adds nothing; choose 1 or more")],
    "temperature": [
        _Bound(lambda t: t >= 0, "is negative; choose 0 (greedy) or more"),
        _Bound(
            lambda t: t == 0 or t >= COLDEST,
            f"is too small to divide by; choose 0 (greedy), or {COLDEST:g} or more",
        ),
    ],
    "top_k": [_Bound(lambda k: k >= 1, "leaves no token; choose 1 or more, or leave it out")],
    "top_p": [_Bound(lambda p: 0 < p <= 1, "is not a probability; choose 0 < top_p <= 1")],
    "min_p": [_Bound(lambda p: 0 <= p <= 1, "is not a fraction; choose 0 <= min_p <= 1")],
    "repetition_penalty": [
        _Bound(lambda penalty: penalty > 0, "divides nothing; choose more than 0"),
        _between(1 / MOST_TIMES, MOST_TIMES),
    ],
    "presence_penalty": [_SHIFT],
    "frequency_penalty": [_SHIFT],
    "length_penalty": [_between(-LARGEST_POWER, LARGEST_POWER)],
    "n_samples": [
        _Bound(lambda n: n >= 1, "asks for no text; choose 1 or more"),
        _between(1, MOST_ROWS),
    ],
    "logprobs": [_Bound(lambda n: n >= 0, "is negative; choose 0 or more, or leave it out")],
    "speculate": [_Bound(lambda n: n >= 0, "is negative; choose 0 (guess nothing) or more")],
    "beams": [
        _Bound(lambda n: n >= 1, "searches nothing; choose 1 (no search) or more"),
        _between(1, MOST_ROWS),
    ],
}


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
