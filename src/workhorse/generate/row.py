"""One result being generated (its tokens, text, random numbers and guesses), and its prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workhorse.generate.config import GenerationConfig
from workhorse.generate.reader import Reading
from workhorse.generate.requests import TextOfTokens, stop_tokens
from workhorse.generate.result import Delta, FinishReason, TokenLogprob
from workhorse.generate.text import TextStream

LogitProcessor = Callable[[Tensor, Sequence[int]], Tensor]
"""`(logits float32 (vocab,), tokens of the prompt and the new text) -> logits (vocab,)`, before
penalties and filters. -inf forbids a token."""
StopCondition = Callable[[Sequence[int], str], bool]
"""`(new tokens, new text) -> whether the text ends here`."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Guessed next tokens; see `workhorse.generate.speculation.speculate`."""

    tokens: tuple[int, ...] = ()
    drawn_from: Tensor | None = None
    """The probabilities that the tokens were drawn from, float64 `(len(tokens), vocab)`; None if
    they were not drawn."""


_SAMPLING = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "logprobs"),
}


def sampling_key(config: GenerationConfig) -> str:
    """The options by which tokens are chosen, as a key: rows with equal ones share a `Chooser`."""
    return config.model_dump_json(include=_SAMPLING)


@dataclass(frozen=True)
class Request:
    """A prompt to continue, and how."""

    prompt: tuple[int, ...]
    """No longer than the context; see `requests.check_prompts`."""
    config: GenerationConfig
    seed: int
    """Sample j seeds its generator with `seed + j`."""
    processors: tuple[LogitProcessor, ...] = ()
    stop_conditions: tuple[StopCondition, ...] = ()


@dataclass(eq=False)
class Prompt:
    """A text to be read, and the rows that wait for it."""

    request: Request
    rows: "list[Row]"
    tokens: list[int]
    reading: Reading | None = None
    left: list[int] = field(default_factory=list)
    """The tokens that are not read yet."""


class Row:
    """One result being generated.

    Args:
        index: its number among all results.
        request: the request that it belongs to.
        sample: its number among the samples of the request.
        context: of the decoder, in tokens.
        tokenizer: gives the text and the eos.

    Attributes:
        sampling_key: equal for rows that choose tokens by the same options.
        tokens: the prompt and all new tokens.
        left: how many more tokens it may take.
        finish_reason: why it ended; None while it goes on.
        guess: the guess for this pass.
        agreed: how many of the guessed tokens were chosen so far.
        is_ahead: whether the last chosen token was guessed, so that this pass has the logits after
            it as well.
        reading: the text as the decoder has read it.
        is_at_fault: whether it caused an error itself and cannot go on.
    """

    reading: Reading

    def __init__(
        self,
        index: int,
        request: Request,
        sample: int,
        context: int,
        *,
        tokenizer: TextOfTokens | None,
    ) -> None:
        self.index = index
        self.request = request
        self.config = config = request.config
        key = sampling_key(config)
        self.sampling_key = f"{index} {key}" if config.exact else key
        self.tokens = list(request.prompt)
        self.finish_reason: FinishReason | None = None
        self.is_at_fault = False
        self.left = config.max_new_tokens
        if config.truncate == "refuse":
            # The last token of a text is predicted but never read: it may be one past the context.
            self.left = min(self.left, context + 1 - len(request.prompt))
        self._stop_tokens = stop_tokens(config, tokenizer)
        self._stream = None
        if tokenizer is not None:
            stream = tokenizer.stream(skip_special=True, after=request.prompt)
            self._stream = TextStream(stream, config.stop)
        self._text = ""
        self._numbers: list[float] = []
        self._used = 0
        self._generator = torch.Generator()
        if config.samples:
            self._generator.manual_seed(request.seed + sample)
        self.expect(Guess())

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    def expect(self, guess: Guess) -> None:
        """Begin a pass over the last token and a guess."""
        self.guess = guess
        self.agreed = 0
        self.is_ahead = False

    @property
    def takes_one_more(self) -> bool:
        """Whether its next token, unless that ends it, is read by itself in the next pass.

        Not with log-probabilities, which are taken after the choice and would wait for that pass.
        """
        return self.left > 1 and not self.config.speculate and self.config.logprobs is None

    @property
    def unmet(self) -> int:
        """How many guessed tokens were not chosen."""
        return len(self.guess.tokens) - self.agreed

    def uniform(self) -> float:
        """The next number of this row's generator, which is on the CPU whatever the device."""
        if self._used == len(self._numbers):
            number = torch.rand((), dtype=torch.float64, generator=self._generator).item()
            self._numbers.append(number)
        self._used += 1
        return self._numbers[self._used - 1]

    def rewind(self) -> None:
        """Give the numbers again that were drawn since the last token."""
        self._used = 0

    def take(self, token: int, logprob: TokenLogprob | None) -> Delta:
        """Append the chosen token, and end the row if it is the last."""
        begins = self.agreed == 0
        self.is_at_fault = True  # until done: a token that is half taken cannot be taken back
        guessed = self.unmet > 0 and token == self.guess.tokens[self.agreed]
        self.agreed += guessed
        del self._numbers[: self._used]
        self.rewind()
        self.tokens.append(token)
        self.left -= 1
        text = ""
        if token in self._stop_tokens:
            self.finish_reason = "eos"
        elif self._stream is not None:
            text = self._stream.push(token)
            if self._stream.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and self._is_to_stop(text):
            self.finish_reason = "stop"
        if self.finish_reason is None and self.left == 0:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._stream is not None:
            text += self._stream.finish()
        self.is_ahead = guessed and self.finish_reason is None
        self.is_at_fault = False
        return Delta(
            self.index,
            token,
            text,
            logprob,
            self.finish_reason,
            proposed=len(self.guess.tokens) if begins else 0,
            accepted=guessed,
        )

    def _is_to_stop(self, text: str) -> bool:
        conditions = self.request.stop_conditions
        if not conditions:
            return False
        self._text += text
        return any(bool(stops(self.new_tokens, self._text)) for stops in conditions)
