"""What a request for text may ask for."""

from typing import Literal, Self

from pydantic import Field, model_validator

from workhorse.config import Config, ConfigError

COLDEST = 1e-6
MOST_TIMES = 1e6
LARGEST_SHIFT = 1e9
LARGEST_POWER = 10.0
"""Bounds within which whatever is done to finite logits, all of it together, stays finite."""
MOST_ROWS = 8192
"""Texts of one prompt that are made side by side."""


class GenerationConfig(Config):
    """How text is chosen and where it ends.

    Sampling is on when `temperature > 0` and `beams == 1`, greedy is `temperature=0`, and
    `beams > 1` searches for the likeliest text. An option that the chosen way of decoding would
    not read is refused, but for a seed beside `temperature=0`, which decides nothing.
    """

    max_new_tokens: int = 128
    """Tokens to add at most, 1 or more."""
    temperature: float = 1.0
    """Divides the logits, by 1e-6 or more; 0 takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Sample among the k likeliest tokens only."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together hold this probability (nucleus)."""
    min_p: float = 0.0
    """Sample among tokens with at least this fraction of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens seen in the prompt or the new text less likely; 1e-6 to 1e6."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the new text; -1e9 to 1e9."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the new text; -1e9 to 1e9."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logit of a token id; -1e9 to 1e9."""
    seed: int | None = None
    """Starts the request's own generator, 0 to 2^63 - 1; None draws a fresh seed."""
    n_samples: int = 1
    """Texts per prompt, made side by side, 8192 at most; sample j is what `seed + j` gives by
    itself."""
    stop: tuple[str, ...] = ()
    """Texts that end the result; neither they nor anything after them is part of it."""
    stop_tokens: tuple[int, ...] | None = None
    """Token ids that end the result. None: the tokenizer's eos; empty: nothing ends it."""
    logprobs: int | None = None
    """Give each token's log-probability and those of the n likeliest; 0 gives only its own."""
    truncate: Literal["refuse", "left"] = "refuse"
    """When the context is full: refuse a longer prompt and end the text there, or forget the
    oldest tokens and go on."""
    speculate: int = 0
    """Tokens guessed at a time, by a draft model or from the text itself, for one pass of the model
    to check; it changes the speed. 0 guesses none."""
    beams: int = 1
    """Hypotheses kept by beam search, 8192 at most; 1 is no search."""
    length_penalty: float = 1.0
    """Beam search divides the summed log-probability by `length ** length_penalty`; -10 to 10."""
    early_stopping: bool = False
    """Beam search ends with the first `beams` finished texts, though a better one may follow."""

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        _require(
            self.max_new_tokens >= 1,
            f"max_new_tokens={self.max_new_tokens} adds nothing; choose 1 or more",
        )
        _require(
            self.temperature >= 0,
            f"temperature={self.temperature:g} is negative; choose 0 (greedy) or more",
        )
        _require(
            self.temperature == 0 or self.temperature >= COLDEST,
            f"temperature={self.temperature:g} is too small to divide by; choose 0 (greedy), or "
            f"{COLDEST:g} or more",
        )
        _require(
            self.top_k is None or self.top_k >= 1,
            f"top_k={self.top_k} leaves no token; choose 1 or more, or leave it out",
        )
        _require(
            0 < self.top_p <= 1, f"top_p={self.top_p:g} is not a probability; choose 0 < top_p <= 1"
        )
        _require(
            0 <= self.min_p <= 1, f"min_p={self.min_p:g} is not a fraction; choose 0 <= min_p <= 1"
        )
        _require(
            self.repetition_penalty > 0,
            f"repetition_penalty={self.repetition_penalty:g} divides nothing; choose more than 0",
        )
        _within("repetition_penalty", self.repetition_penalty, 1 / MOST_TIMES, MOST_TIMES)
        for name in ("presence_penalty", "frequency_penalty"):
            _within(name, getattr(self, name), -LARGEST_SHIFT, LARGEST_SHIFT)
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias of token {token}", bias, -LARGEST_SHIFT, LARGEST_SHIFT)
        _within("length_penalty", self.length_penalty, -LARGEST_POWER, LARGEST_POWER)
        _require(
            self.seed is None or 0 <= self.seed < 2**63,
            f"seed={self.seed} is out of range; choose 0 to 2^63 - 1",
        )
        _require(
            self.n_samples >= 1, f"n_samples={self.n_samples} asks for no text; choose 1 or more"
        )
        _within("n_samples", self.n_samples, 1, MOST_ROWS)
        _require(
            self.seed is None or self.seed + self.n_samples <= 2**63,
            f"seed={self.seed} with n_samples={self.n_samples} is out of range: the last sample's "
            f"would be {(self.seed or 0) + self.n_samples - 1}; choose a smaller seed",
        )
        _require(all(self.stop), "stop holds an empty text, which ends everything; leave it out")
        _require(
            self.logprobs is None or self.logprobs >= 0,
            f"logprobs={self.logprobs} is negative; choose 0 or more, or leave it out",
        )
        _require(
            self.speculate >= 0,
            f"speculate={self.speculate} is negative; choose 0 (guess nothing) or more",
        )
        _require(
            self.beams >= 1, f"beams={self.beams} searches nothing; choose 1 (no search) or more"
        )
        _within("beams", self.beams, 1, MOST_ROWS)
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
        """Whether tokens are drawn, and not searched for or taken greedily."""
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


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConfigError(otherwise)


def _within(name: str, value: float, least: float, most: float) -> None:
    _require(
        least <= value <= most,
        f"{name}={value:g} is out of range; choose {least:g} to {most:g}",
    )
