"""Options and results of a generation."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import model_validator

from workhorse.config.base import Config, ConfigError
from workhorse.generate.options import SHIFT, Bound, Decoding, Options, table


class GenerationConfig(Options, Config):
    """How tokens are chosen and when a completion ends.

    Decoding samples if `temperature > 0` and `beams == 1`, is greedy if `temperature == 0`, and
    searches for the likeliest completion if `beams > 1`. Setting an option that this way of
    decoding does not use raises an error, except for `seed` with `temperature=0`. The options are
    those of `workhorse.generate.options`.
    """

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        for name, row in table().items():
            _check(name, getattr(self, name), row.option.bounds)
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias of token {token}", bias, (SHIFT,))
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
        how, remedy = {
            "sampling": ("it is an option of beam search", "set beams to 2 or more, or omit it"),
            "greedy": ("temperature=0 always takes the likeliest token", "omit one of the two"),
            "beam_search": (
                f"beam search (beams={self.beams}) does not use it",
                "omit one of the two",
            ),
        }[self.decoding]
        for name, row in table().items():
            value = getattr(self, name)
            if value != row.default and self.decoding not in row.option.read_by:
                raise ConfigError(f"{name}={value!r} would have no effect: {how}; {remedy}")
        return self

    @property
    def decoding(self) -> Decoding:
        """The way of decoding."""
        if self.beams > 1:
            return "beam_search"
        return "greedy" if self.temperature == 0 else "sampling"

    @property
    def sampling_key(self) -> str:
        """The values of all options that change which token is chosen, or its log-probabilities."""
        names = {name for name, row in table().items() if row.option.chooses}
        return self.model_dump_json(include=names)

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random: neither beam search nor greedy decoding."""
        return self.decoding == "sampling"

    def with_seed(self) -> Self:
        """Return the config with a random seed if it samples and has none; otherwise unchanged."""
        if self.samples and self.seed is None:
            return self.replace(seed=secrets.randbits(32))
        return self


def _check(name: str, value: float | None, bounds: Sequence[Bound]) -> None:
    for bound in bounds:
        if value is not None and not bound.holds(value):
            raise ConfigError(f"{name}={value:g} {bound.otherwise}")


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
