"""One completion that is being generated: its tokens, text, random numbers and guesses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.generate.checks import StreamingTokenizer, TextStream, stop_tokens
from workhorse.generate.config import Delta, FinishReason, GenerationConfig, TokenLogprob
from workhorse.generate.runner import Chunk
from workhorse.generate.sequence import TokenSequence
from workhorse.nn.cache.paged import PagedCache

LogitProcessor = Callable[[Tensor, Sequence[int]], Tensor]
"""Function that changes logits before penalties and filters: `(logits float32 (vocab,), token ids
of prompt and completion) -> logits (vocab,)`. -inf forbids a token."""
StopCondition = Callable[[Sequence[int], str], bool]
"""Function that ends a completion: `(token ids of the completion, its text) -> bool`."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Guessed next tokens; see `workhorse.generate.speculation`."""

    tokens: tuple[int, ...] = ()
    drawn_from: Tensor | None = None
    """The probabilities that the guessed tokens were drawn from, float64 `(len(tokens), vocab)`;
    None if they were not drawn at random."""


class Request:
    """A prompt, and the completion that is generated for it.

    The state can be restored from the deltas (`restore`), so an exception at any time loses no
    token.

    Args:
        index: index of the completion, in the order of arrival.
        prompt: token ids, no more than the context; see `checks.check_prompts`.
        config: the generation options.
        seed: seed of the random generator.
        context: the decoder's maximum sequence length.
        tokenizer: decodes tokens and defines eos.
        client: name of the client; see `Engine.add`.
        processors: functions applied to the logits.
        stop_conditions: functions that end the completion.

    Attributes:
        sequence: the tokens that the decoder processes.
        copies: requests for other samples of the same prompt. They start when the prompt has been
            processed.
        sampling_key: a key of the sampling options. Tokens of requests with the same key are chosen
            together. The key of an exact request is unique, because batching could change its
            tokens.
        deltas: a `Delta` for each new token.
        scores: log-probabilities of the prompt's tokens, from the second one on, if they are asked
            for and computed.
        tokens: the prompt and all new tokens.
        guess: the tokens guessed for the current pass.
        agreed: number of these guessed tokens that have also been chosen so far.
        has_more_logits: True if the last chosen token was guessed, so that this pass also computed
            the logits after it.
        is_at_fault: True if the request itself caused an error and cannot continue.
    """

    sequence: TokenSequence

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        config: GenerationConfig,
        seed: int,
        context: int,
        *,
        tokenizer: StreamingTokenizer | None,
        client: str = "",
        processors: Sequence[LogitProcessor] = (),
        stop_conditions: Sequence[StopCondition] = (),
    ) -> None:
        self.index = index
        self.client = client
        self.prompt = tuple(prompt)
        self.config = config
        self.processors = processors
        self.stop_conditions = stop_conditions
        self.copies: list[Request] = []
        key = config.sampling_key
        # The sums of top-p depend on the shape of the batch.
        self.sampling_key = f"{index} {key}" if config.exact and config.top_p < 1 else key
        self.is_at_fault = False
        self.deltas: list[Delta] = []
        self.scores: list[TokenLogprob] = []
        self.tokens = list(prompt)
        self._limit = config.max_new_tokens
        if config.truncate == "refuse":
            # The last token is predicted but never processed: it may be one past the context.
            self._limit = min(self._limit, context + 1 - len(prompt))
        self._stop_tokens = stop_tokens(config, tokenizer)
        self._tokenizer = tokenizer
        self._stream = self._new_stream()
        self._is_taking = False
        self._seed = seed
        self._generator = torch.Generator()
        if config.samples:
            self._generator.manual_seed(seed)
        self._numbers: list[float] = []
        self._used = 0
        self._used_before = [0]
        """For each delta, and for the next one, the number of random numbers used before it."""
        self.guess, self.agreed, self.has_more_logits = Guess(), 0, False

    def begin(self, sequence: TokenSequence, copies: "Sequence[Request]" = ()) -> None:
        """Get a sequence, which the other samples of the prompt (`copies`) will share."""
        self.sequence = sequence
        self.copies = list(copies)

    def start_copies(self, cache: PagedCache) -> "list[Request]":
        """Return the other samples of the prompt, which has been processed, with sequences."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy._continue(self, self.sequence.fork(cache), [])
        return copies

    def _continue(self, of: "Request", sequence: TokenSequence, copies: "list[Request]") -> None:
        self.begin(sequence, copies)
        self.scores = of.scores

    def hand_over(self) -> "Request":
        """Return the next sample of the prompt; it takes over the sequence and the others."""
        heir, *others = self.copies
        heir._continue(self, self.sequence, others)
        return heir

    def start_over(self, cache: PagedCache) -> None:
        """Drop the blocks after a reset of the cache; the copies wait by themselves."""
        self.copies = []
        self.sequence.forget_blocks(cache)

    def score(self, start: int, scores: Sequence[TokenLogprob]) -> None:
        """Add log-probabilities of prompt tokens, from index `start` of `scores` on."""
        self.scores[start:] = scores

    def fail(self) -> None:
        """Note that the request itself caused an error and cannot continue."""
        self.is_at_fault = True

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def left(self) -> int:
        """Maximum number of tokens that may still be generated."""
        return self._limit - len(self.deltas)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the completion ended; None while it continues."""
        return self.deltas[-1].finish_reason if self.deltas else None

    @property
    def needs_scores(self) -> bool:
        """True if log-probabilities of the prompt are asked for and not complete."""
        asked = self.config.prompt_logprobs is not None
        return asked and len(self.scores) < len(self.prompt) - 1

    def chunk(self, count: int) -> Chunk:
        """Return the chunk with the next `count` tokens.

        If no tokens are left after it, it requests the logits after the last token and each guess.
        If the prompt's log-probabilities are needed, it requests the logits after each token.
        """
        if self.needs_scores:
            return Chunk(self.sequence, count, count)
        complete = count == self.sequence.pending
        return Chunk(self.sequence, count, 1 + len(self.guess.tokens) if complete else 0)

    def expect(self, guess: Guess) -> None:
        """Prepare for a pass over the last token and these guessed tokens."""
        self.sequence.guess(guess.tokens)
        self.guess = guess
        self.agreed = 0
        self.has_more_logits = False

    @property
    def may_look_ahead(self) -> bool:
        """True if the next token may be processed before it is copied to the host.

        False with log-probabilities: they are computed after the token is chosen, and would have to
        wait until the pass over the token has finished.
        """
        return self.left > 1 and not self.config.speculate and self.config.logprobs is None

    @property
    def unmet(self) -> int:
        """Number of guessed tokens that have not been chosen yet."""
        return len(self.guess.tokens) - self.agreed

    def uniform(self) -> float:
        """Return the next random number in [0, 1), the same for every device."""
        if self._used == len(self._numbers):
            self._draw()
        self._used += 1
        return self._numbers[self._used - 1]

    def _draw(self) -> None:
        number = torch.rand((), dtype=torch.float64, generator=self._generator).item()
        self._numbers.append(number)

    def take(
        self, token: int, logprob: TokenLogprob | None, *, prompt_seconds: float = 0.0
    ) -> None:
        """Append the chosen token, and end the completion if it is the last one.

        Raises:
            Exception: a stop condition or the tokenizer raised it; `is_at_fault` is then True.
        """
        begins = self.agreed == 0
        guessed = self.unmet > 0 and token == self.guess.tokens[self.agreed]
        self._is_taking = True
        try:
            text, reason = self._text_and_reason(token)
        except Exception:
            self.fail()
            raise
        delta = Delta(
            self.index,
            token,
            text,
            logprob,
            reason,
            proposed=len(self.guess.tokens) if begins else 0,
            accepted=guessed,
            prompt_seconds=prompt_seconds,
            prompt_logprobs=self._scores_of_prompt(),
            cached_tokens=0 if self.deltas else self.sequence.adopted,
        )
        self._used_before.append(self._used)
        self.deltas.append(delta)  # from here on the token is taken, even if an exception follows
        self.tokens.append(token)
        self.sequence.take(token, agrees=guessed)
        self.agreed += guessed
        self.has_more_logits = guessed and reason is None
        self._is_taking = False

    def _scores_of_prompt(self) -> tuple[TokenLogprob, ...] | None:
        first = not self.deltas and self.config.prompt_logprobs is not None
        return tuple(self.scores) if first else None

    def _text_and_reason(self, token: int) -> tuple[str, FinishReason | None]:
        text, reason = "", None
        if token in self._stop_tokens:
            reason = "eos"
        elif self._stream is not None:
            text = self._stream.push(token)
            if self._stream.stopped:
                reason = "stop"
        if reason is None and self._meets_a_condition(token, text):
            reason = "stop"
        if reason is None and self.left == 1:
            reason = "length"
        if reason is not None and self._stream is not None:
            text += self._stream.finish()
        return text, reason

    def _meets_a_condition(self, token: int, text: str) -> bool:
        if not self.stop_conditions:
            return False
        tokens = [*self.new_tokens, token]
        text = "".join(delta.text for delta in self.deltas) + text
        return any(bool(stops(tokens, text)) for stops in self.stop_conditions)

    def restore(self) -> None:
        """Undo an interrupted step: return to the state after the last `Delta` was created."""
        count = len(self.deltas)
        self.tokens[len(self.prompt) :] = [delta.token for delta in self.deltas]
        self.sequence.restore(self.tokens)
        del self._used_before[count + 1 :]
        self._used = self._used_before[count]
        if self.config.samples:  # the exception may have come between a draw and its storage
            self._generator.manual_seed(self._seed)
            self._numbers = []
            for _ in range(self._used):
                self._draw()
        self.expect(Guess())
        if self._is_taking:
            self._stream = self._new_stream()
            self._is_taking = False

    def _new_stream(self) -> TextStream | None:
        """Create a text stream, and pass it the completion so far; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        shown = self.config.shown_tokens
        tokens = self._tokenizer.stream(skip_special=True, shown=shown, after=self.prompt)
        stream = TextStream(tokens, self.config.stop)
        for delta in self.deltas:
            stream.push(delta.token)
        return stream
