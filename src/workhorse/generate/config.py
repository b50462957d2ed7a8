"""Options and results of a generation."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from workhorse.config.base import Config, ConfigError

COLDEST = 1e-6
MOST_TIMES = 1e6
LARGEST_SHIFT = 1e9
LARGEST_POWER = 10.0
"""Bounds of options. Within these, finite logits stay finite for all combinations of options."""
MOST_ROWS = 8192
"""Maximum number of completions generated at once for one prompt."""


class GenerationConfig(Config):
    """How tokens are chosen and when a completion ends.

    Decoding samples if `temperature > 0` and `beams == 1`, is greedy if `temperature == 0`, and
    searches for the likeliest completion if `beams > 1`. Setting an option that this way of
    decoding does not use raises an error, except for `seed` with `temperature=0`.
    """

    max_new_tokens: int = 128
    """Maximum number of new tokens, at least 1."""
    temperature: float = 1.0
    """Divisor of the logits, at least 1e-6; 0 takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Sample only from the k likeliest tokens."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together have this probability (nucleus)."""
    min_p: float = 0.0
    """Sample only from tokens with at least this fraction of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Values above 1 make tokens in the prompt or the completion less likely; 1e-6 to 1e6."""
    presence_penalty: float = 0.0
    """Value subtracted once from the logit of each token in the completion; -1e9 to 1e9."""
    frequency_penalty: float = 0.0
    """Value subtracted from a token's logit for each occurrence in the completion; -1e9 to 1e9."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Value to add to the logit, by token id; -1e9 to 1e9."""
    seed: int | None = None
    """Seed of the random generator, 0 to 2^63 - 1; None: a random seed."""
    n_samples: int = 1
    """Number of completions per prompt, generated at once, up to 8192. Completion j is
    the one that `n_samples=1` gives with `seed + j`."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. The completion ends before the string. A `Model` also stops at
    a special token of that name."""
    stop_tokens: tuple[int, ...] | None = None
    """Token ids that end a completion. None: the tokenizer's eos; empty: no token ends it."""
    shown_tokens: tuple[int, ...] = ()
    """Special tokens whose names belong to the text, such as those around a tool call."""
    logprobs: int | None = None
    """Return log-probabilities of each token and of the n likeliest at its position; n may be 0."""
    processed_logprobs: bool = False
    """True if `logprobs` describe the distribution from which a token is drawn: after processors,
    bias, penalties, temperature and filters. With `temperature=0`: after processors, bias and
    penalties, before the likeliest token is taken. False: the model's own distribution."""
    prompt_logprobs: int | None = None
    """The model's own log-probabilities of each token of the prompt except the first, as with
    `logprobs`. The prefix cache is then not used."""
    truncate: Literal["refuse", "left"] = "refuse"
    """Behaviour when the context is full. refuse: a prompt that does not fit raises an error, and a
    completion ends. left: the oldest tokens are dropped, and the completion continues."""
    speculate: int = 0
    """Number of tokens guessed at a time (speculative decoding), by a draft model or from the
    sequence. The model verifies them in one pass, so guesses change the speed but never the
    distribution of completions. 0: no guesses."""
    exact: bool = False
    """True to make results bitwise independent of other requests and of the prefix cache. If the
    decoder is not invariant (`Decoder.is_invariant`), this is slower: prompts are never batched,
    and decode steps are batched only if this changes no bit (native operators). It then cannot be
    combined with `speculate`."""
    beams: int = 1
    """Number of hypotheses of beam search, up to 8192; 1: no beam search."""
    length_penalty: float = 1.0
    """Beam search divides the summed log-probability by `length ** length_penalty`; -10 to 10."""
    early_stopping: bool = False
    """True to end beam search with the first `beams` finished hypotheses, even if better could
    follow."""

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
                f"sample's seed would be {self.seed + self.n_samples - 1}; choose a smaller seed"
            )
        if self.processed_logprobs and self.logprobs is None:
            raise ConfigError(
                "processed_logprobs=True would have no effect without logprobs; set logprobs"
            )
        if not all(self.stop):
            raise ConfigError(
                "stop contains an empty string, which would end every completion; remove it"
            )
        return self

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        if self.beams > 1:
            how = f"beam search (beams={self.beams}) does not use it"
            unread, remedy = _NOT_IN_BEAM_SEARCH, "omit one of the two"
        elif self.temperature == 0:
            how = "temperature=0 always takes the likeliest token"
            unread, remedy = _NOT_IN_GREEDY, "omit one of the two"
        else:
            how = "it is an option of beam search"
            unread, remedy = _ONLY_IN_BEAM_SEARCH, "set beams to 2 or more, or omit it"
        for name in unread:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ConfigError(f"{name}={value!r} would have no effect: {how}; {remedy}")
        return self

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random: neither beam search nor greedy decoding."""
        return self.beams == 1 and self.temperature > 0

    def with_seed(self) -> Self:
        """Return the config with a random seed if it samples and has none; otherwise unchanged."""
        if self.samples and self.seed is None:
            return self.replace(seed=secrets.randbits(32))
        return self


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
    "shown_tokens",
    "logprobs",
    "prompt_logprobs",
    "seed",
    "speculate",
)


class _Bound(NamedTuple):
    holds: Callable[[float], bool]
    otherwise: str
    """The end of the error message, after the option's name and value."""

    def check(self, name: str, value: float | None) -> None:
        if value is not None and not self.holds(value):
            raise ConfigError(f"{name}={value:g} {self.otherwise}")


def _between(least: float, most: float) -> _Bound:
    return _Bound(
        lambda value: least <= value <= most, f"is out of range; choose {least:g} to {most:g}"
    )


_SHIFT = _between(-LARGEST_SHIFT, LARGEST_SHIFT)
_BOUNDS = {
    "max_new_tokens": [_Bound(lambda n: n >= 1, "is less than 1; choose 1 or more")],
    "temperature": [
        _Bound(lambda t: t >= 0, "is negative; choose 0 (greedy) or more"),
        _Bound(
            lambda t: t == 0 or t >= COLDEST,
            f"is too small to divide by; choose 0 (greedy), or {COLDEST:g} or more",
        ),
    ],
    "top_k": [_Bound(lambda k: k >= 1, "is less than 1; choose 1 or more, or omit it")],
    "top_p": [_Bound(lambda p: 0 < p <= 1, "is not a probability; choose 0 < top_p <= 1")],
    "min_p": [_Bound(lambda p: 0 <= p <= 1, "is not a fraction; choose 0 <= min_p <= 1")],
    "repetition_penalty": [
        _Bound(lambda penalty: penalty > 0, "is not positive; choose more than 0"),
        _between(1 / MOST_TIMES, MOST_TIMES),
    ],
    "presence_penalty": [_SHIFT],
    "frequency_penalty": [_SHIFT],
    "length_penalty": [_between(-LARGEST_POWER, LARGEST_POWER)],
    "n_samples": [
        _Bound(lambda n: n >= 1, "is less than 1; choose 1 or more"),
        _between(1, MOST_ROWS),
    ],
    "logprobs": [_Bound(lambda n: n >= 0, "is negative; choose 0 or more, or omit it")],
    "prompt_logprobs": [_Bound(lambda n: n >= 0, "is negative; choose 0 or more, or omit it")],
    "speculate": [_Bound(lambda n: n >= 0, "is negative; choose 0 (no guesses) or more")],
    "beams": [
        _Bound(lambda n: n >= 1, "is less than 1; choose 1 (no beam search) or more"),
        _between(1, MOST_ROWS),
    ],
}


FinishReason = Literal["eos", "stop", "length"]
"""Reason why a completion ended. eos: a stop token; stop: a stop string or a stop condition;
length: `max_new_tokens` or the end of the context."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (nats) at the position of one chosen token.

    They describe the model's own distribution, before bias, penalties, temperature and filters, or
    the one after these; see `GenerationConfig.processed_logprobs`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log-probabilities, best first; no impossible ones."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One new token of a completion."""

    index: int
    """Index of the completion: `prompt * n_samples + sample`."""
    token: int
    text: str
    """New text of the completion that can no longer change. It is empty while a character or a stop
    string may be incomplete; a later delta then has the text of several tokens."""
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    """Set on the last delta of a completion."""
    proposed: int = 0
    """Number of tokens that speculative decoding guessed for a pass of the model. Set on the first
    delta of the pass; 0 on others."""
    accepted: bool = False
    """True if the token was guessed by speculative decoding."""
    prompt_seconds: float = field(default=0.0, compare=False)
    """Seconds to process the prompts of a batch. Set on the batch's first delta; 0 on others."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """See `GenerationConfig.prompt_logprobs`. Set on the first delta of a completion."""
    cached_tokens: int = field(default=0, compare=False)
    """Number of prompt tokens taken from the prefix cache. Set on the first delta."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished completion of a prompt."""

    text: str
    """New text without prompt, special tokens and stop string; empty without a tokenizer."""
    tokens: tuple[int, ...]
    """All new tokens, including the stop token, or the tokens of the stop string, that ended it."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Length of the given prompt, in tokens."""
    seed: int | None = None
    """Seed that reproduces this completion; None if nothing was sampled."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """See `GenerationConfig.prompt_logprobs`."""
    score: float | None = None
    """`sum of log-probabilities / length ** length_penalty`; None without beam search."""
    proposed: int | None = None
    """Number of tokens guessed by speculative decoding; None without it."""
    accepted: int | None = None
    """Number of guessed tokens in the completion; None without speculative decoding."""
    prompt_seconds: float = field(default=0.0, compare=False)
    """Seconds to process the prompts of a batch. Set on its first completion; 0 on others."""
    decoded: bool = True
    """True if `text` was decoded by a tokenizer; False if there was no tokenizer."""

    def __str__(self) -> str:
        """The text, or the token ids without a tokenizer."""
        return self.text if self.decoded else str(list(self.tokens))
