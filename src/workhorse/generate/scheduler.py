"""Continuous batching: requests arrive, advance together and leave, each at its own time.

Apart from beam search's, this is the only decoding loop. A step reads the prompts that have arrived
and gives each row that is already running a token, or several if guesses are accepted. A row has
its own random generator and is processed independently, so its text does not depend on anything
else that runs. One reservation: logits computed in batches of different shapes agree only up to
rounding, so a choice can differ if two tokens are that close (see `GenerationConfig.exact`).
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from torch import Tensor

from workhorse.errors import WorkhorseError, shown
from workhorse.execute.native_decoding.stream import decoding_operators
from workhorse.generate.config import GenerationConfig
from workhorse.generate.interrupts import interrupts_held
from workhorse.generate.prefixes import PIECE
from workhorse.generate.reader import Reader, wait
from workhorse.generate.requests import (
    TextOfTokens,
    check_draft,
    check_functions,
    check_models,
    check_prompts,
    checked_config,
    usable_vocab,
    whole,
)
from workhorse.generate.result import Delta
from workhorse.generate.row import Guess, LogitProcessor, Prompt, Request, Row, StopCondition
from workhorse.generate.sampling.choose import Chooser
from workhorse.generate.speculation.draft import Draft
from workhorse.generate.speculation.lookup import PromptLookup
from workhorse.generate.speculation.speculate import Proposer, slack_of
from workhorse.nn import Decoder, evaluation_mode


class Scheduler:
    """Continues any number of prompts, which may be added and cancelled at any time.

    Args:
        decoder: the model; dropout is off during a step.
        tokenizer: gives the text, the eos, and the number of ids in use; without one there is no
            text, and only `config.stop_tokens` end a result.
        draft: a smaller decoder of the same vocabulary, which guesses tokens for requests that ask
            for guesses; without one, guesses are looked up in the text.
        max_rows: the most rows that advance together; later requests wait.
        max_tokens: the most tokens of all rows together in the cache; None: enough for `max_rows`
            full contexts.
        speculate: the most tokens that a request may have guessed at a time.
        prompt_chunk: the most tokens of each prompt that a step reads (chunked prefill), so that
            running rows do not wait long; rounded up to whole pieces for exact texts. None: all.
        remembers: whether texts that have ended stay in the cache while there is room (prefix
            caching), so that a prompt that begins alike is read only from where it differs.

    Raises:
        WorkhorseError: an option has a wrong type or is out of range; or see `check_draft`.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        tokenizer: TextOfTokens | None = None,
        draft: Decoder | None = None,
        max_rows: int = 32,
        max_tokens: int | None = None,
        speculate: int = 0,
        prompt_chunk: int | None = None,
        remembers: bool = False,
    ) -> None:
        check_models(decoder, draft, tokenizer)
        if not isinstance(remembers, bool):
            raise WorkhorseError(f"remembers={shown(remembers)} is not a bool; give True or False")
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.max_rows = max_rows = whole("max_rows", max_rows, 1)
        self._draft = draft
        self._speculate = speculate = whole("speculate", speculate, 0)
        check_draft(decoder, draft, speculate, tokenizer)
        self._chunk = None if prompt_chunk is None else whole("prompt_chunk", prompt_chunk, 1)
        tokens = max_rows * (decoder.max_seq_len + speculate)
        if max_tokens is not None:
            tokens = whole("max_tokens", max_tokens, 1)
        self._reader = Reader(
            decoder, tokens=tokens, texts=max_rows, slack=speculate, remembers=remembers
        )
        self.looks_ahead = decoder.device.type == "cuda"
        """Whether tokens that a device chose may be read before the host knows them, so that the
        device waits less for the host: not at all for greedy texts, until the choice is launched
        for sampled ones. What is read after the end of a text is left unused; weights that change
        between steps act a token later."""
        self._proposer: Proposer = PromptLookup()
        if draft is not None:
            self._proposer = Draft(draft, self._reader, remembers=remembers)
        self._vocab = usable_vocab(decoder, tokenizer)
        # Dynamic NTK and LongRoPE choose the angles of a whole pass by the length at its end: past
        # the original length, a guess would change the logits of the tokens before it.
        self._steady = decoder.config.steady_length()
        self._waiting: deque[Prompt] = deque()
        self._prompts: list[Prompt] = []
        self._rows: list[Row] = []
        self._choosers: dict[str, Chooser] = {}
        self._added = 0
        self._deltas: list[Delta] = []

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running, and every token was given by a step."""
        return not (self._waiting or self._prompts or self._rows or self._deltas)

    @interrupts_held()
    def add(
        self,
        prompt: Sequence[int],
        config: GenerationConfig | None = None,
        *,
        processors: Sequence[LogitProcessor] = (),
        stop_conditions: Sequence[StopCondition] = (),
    ) -> range:
        """Request the continuations of a prompt.

        Args:
            prompt: token ids.
            config: how tokens are chosen; None: the defaults of `GenerationConfig`.
            processors: applied to the logits, one after the other, before anything else.
            stop_conditions: a text ends when any of them holds.

        Returns:
            The numbers of its `n_samples` results; see `Delta.index`.

        Raises:
            WorkhorseError: see `check_prompts`; or the request asks for beam search, which has no
                next token; for more guesses than the scheduler was made for, or for an exact text
                beside guesses; or for more rows or tokens than it can ever hold.
        """
        config = checked_config(config)
        processors = check_functions("processors", processors)
        stop_conditions = check_functions("stop_conditions", stop_conditions)
        if config.beams > 1:
            raise WorkhorseError(
                f"beams={config.beams} gives its text only at the end; leave beams out"
            )
        if slack_of(config, self.decoder) > self._speculate:
            raise WorkhorseError(
                f"speculate={config.speculate} is more than this scheduler guesses, "
                f"{self._speculate}; make it with speculate={config.speculate}"
            )
        if config.exact and self._speculate:
            raise WorkhorseError(
                f"exact: this scheduler guesses {self._speculate} tokens at a time, and room for "
                "them in its cache changes shapes; make one with speculate=0"
            )
        (fitting,) = check_prompts(self.decoder, [prompt], config, self.tokenizer)
        seed = secrets.randbits(32) if config.seed is None else config.seed
        request = Request(tuple(fitting), config, seed, processors, stop_conditions)
        self._check_room(request)
        results = range(self._added, self._added + config.n_samples)
        self._added += config.n_samples
        rows = [
            Row(index, request, sample, self.decoder.max_seq_len, tokenizer=self.tokenizer)
            for sample, index in enumerate(results)
        ]
        self._waiting.append(Prompt(request, rows, fitting))
        return results

    @interrupts_held()
    def cancel(self, result: int) -> None:
        """Drop a result, whether it waits or runs. One that has ended is not affected.

        Raises:
            WorkhorseError: no result has this number.
        """
        if whole("result", result, 0) >= self._added:
            raise WorkhorseError(
                f"result={result} was never requested; give a number that `add` returned"
            )
        for prompts in (self._waiting, self._prompts):
            for prompt in list(prompts):
                prompt.rows = [row for row in prompt.rows if row.index != result]
                if not prompt.rows:
                    prompts.remove(prompt)
                    if prompt.reading is not None:
                        self._reader.close(prompt.reading)
        for row in self._rows:
            if row.index == result:
                self._leave(row)
        self._rows = [row for row in self._rows if row.index != result]
        self._deltas = [delta for delta in self._deltas if delta.index != result]

    def step(self) -> list[Delta]:
        """Read the prompts that have arrived, and advance each row that was already running.

        If it raises, nothing is lost: the next step continues from there. Only requests that caused
        the error, by their own processors, conditions or logits, are dropped.

        Raises:
            WorkhorseError: logits are not finite, or a processor does not return logits.
        """
        with ExitStack() as around:
            around.enter_context(interrupts_held())
            around.enter_context(evaluation_mode(self.decoder))
            if self._draft is not None:
                around.enter_context(evaluation_mode(self._draft))
            going = self._rows
            try:
                self._admit()
                if self._prompts:
                    self._read_prompts()
                if going:
                    self._advance(going)
            except BaseException:
                self._recover()
                raise
            finally:
                for row in self._rows:
                    if row.finish_reason is not None:
                        self._leave(row)
                self._rows = [row for row in self._rows if row.finish_reason is None]
        deltas, self._deltas = self._deltas, []
        return deltas

    def _recover(self) -> None:
        """After a step that raised: the next one reads again what this one left half read."""
        self._choosers.clear()
        self._reader.forget_ahead()
        for prompt in self._prompts:
            prompt.rows = [row for row in prompt.rows if not row.is_at_fault]
            if prompt.reading is not None:
                self._reader.restart(prompt.reading)
            prompt.left = list(prompt.tokens)
        rows, self._rows = self._rows, []
        for row in rows:
            begin, read = row.reading.begin, len(row.reading.tokens)
            row.rewind()
            self._proposer.leave(row)
            if row.is_at_fault:
                self._reader.restart(row.reading)
                self._reader.close(row.reading)
            elif row.finish_reason is not None or (
                0 < read == row.reading.text.length == len(row.tokens) - 1 - begin
            ):
                self._rows.append(row)
            else:
                row.expect(Guess())
                self._reader.restart(row.reading)
                tokens = row.tokens[begin:]
                again = Prompt(row.request, [row], tokens, row.reading, list(tokens))
                self._prompts.append(again)

    def _admit(self) -> None:
        """Admit waiting requests, in order, while there is room."""
        while self._waiting:
            prompt = self._waiting[0]
            rows = sum(len(other.rows) for other in self._prompts) + len(self._rows)
            if not self._fits(prompt.request, rows):
                return
            self._waiting.popleft()
            request = prompt.request
            new, exact = request.config.max_new_tokens - 1, request.config.exact
            prompt.reading = self._reader.open(request.prompt, new, exact=exact)
            prompt.left = prompt.tokens[len(prompt.reading.tokens) :]
            self._prompts.append(prompt)

    def _fits(self, request: Request, rows: int) -> bool:
        # Rows that wait for their prompt have not reserved room yet, but will.
        promised = [self._most(other.request) for other in self._prompts for _ in other.rows[1:]]
        most = self._most(request)
        n = request.config.n_samples
        return rows + n <= self.max_rows and self._reader.cache.fits(*promised, *[most] * n)

    def _most(self, request: Request) -> int:
        return self._reader.room_for(len(request.prompt), request.config.max_new_tokens - 1)

    def _check_room(self, request: Request) -> None:
        n, cache = request.config.n_samples, self._reader.cache
        if n > self.max_rows:
            raise WorkhorseError(
                f"n_samples={n} is more than the {self.max_rows} rows of this scheduler; "
                f"make it with max_rows={n}"
            )
        if not cache.holds(*[self._most(request)] * n):
            raise WorkhorseError(
                f"{n} × {self._most(request)} tokens do not fit a cache of {cache.tokens}; "
                "ask for fewer, or make the scheduler with more max_tokens"
            )

    def _read_prompts(self) -> None:
        """Read a chunk of each prompt, and choose the first tokens of those that are complete."""
        started = time.perf_counter()
        readings = [prompt.reading for prompt in self._prompts if prompt.reading is not None]
        pieces = [prompt.left[: self._chunk_of(prompt)] for prompt in self._prompts]
        logits = self._reader.read(readings, pieces)
        for prompt, piece in zip(self._prompts, pieces, strict=True):
            del prompt.left[: len(piece)]
        through = [n for n, prompt in enumerate(self._prompts) if not prompt.left]
        if not through:
            return
        wait(logits)
        seconds = time.perf_counter() - started
        rows: list[Row] = []
        parents: list[int] = []
        for n in through:
            prompt = self._prompts[n]
            assert prompt.reading is not None
            self._reader.remember(prompt.reading)
            first, *others = prompt.rows
            first.reading = prompt.reading
            for row in others:  # a prompt is read once for all its samples
                row.reading = self._reader.fork(prompt.reading)
            rows += prompt.rows
            parents += [n] * len(prompt.rows)
        self._prompts = [prompt for prompt in self._prompts if prompt.left]
        self._rows = [*self._rows, *rows]
        before = len(self._deltas)
        self._choose(logits if parents == list(range(len(logits))) else logits[parents], rows)
        self._deltas[before] = replace(self._deltas[before], prompt_seconds=seconds)

    def _chunk_of(self, prompt: Prompt) -> int | None:
        if self._chunk is None or not prompt.request.config.exact:
            return self._chunk
        return -(-self._chunk // PIECE) * PIECE

    def _advance(self, rows: list[Row]) -> None:
        """One token for each row, or several if guesses are accepted."""
        self._guess(rows)
        tokens = [[row.tokens[-1], *row.guess.tokens] for row in rows]
        readings = [row.reading for row in rows]
        logits = self._reader.read(readings, tokens, last=max(map(len, tokens)))
        if self._can_look_ahead(rows) and self._reader.can_read_ahead(readings):
            self._choose(logits, rows, partial(self._reader.read_ahead, readings))
            return
        self._choose(logits, rows)
        self._reader.forget(readings, [row.unmet for row in rows])

    def _can_look_ahead(self, rows: Sequence[Row]) -> bool:
        """Whether these are all rows, choose alike, and are read a token each unless they end."""
        if not self.looks_ahead or self._waiting or self._prompts or len(rows) < len(self._rows):
            return False
        return all(row.sampling_key == rows[0].sampling_key and row.takes_one_more for row in rows)

    def _choose(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        ahead: Callable[[Tensor], object] | None = None,
    ) -> None:
        """Choose the next tokens, at once for rows with the same options, and append them.

        `ahead` (see `Chooser.choose`) is for rows that all have the same options.
        """
        for chooser, indices in self._groups(rows):
            chosen_from = logits if len(indices) == len(rows) else logits[indices]
            for row, token, logprob in chooser.choose(
                chosen_from, [rows[r] for r in indices], ahead
            ):
                self._deltas.append(row.take(token, logprob))

    def _groups(self, rows: Sequence[Row]) -> list[tuple[Chooser, list[int]]]:
        groups: dict[str, list[int]] = {}
        for r, row in enumerate(rows):
            groups.setdefault(row.sampling_key, []).append(r)
        for key in list(self._choosers):
            if key not in groups and not any(row.sampling_key == key for row in self._rows):
                del self._choosers[key]
        for key, indices in groups.items():
            if key not in self._choosers:
                self._choosers[key] = self._chooser(rows[indices[0]].config)
        return [(self._choosers[key], indices) for key, indices in groups.items()]

    def _chooser(self, config: GenerationConfig) -> Chooser:
        size, decoding = self.decoder.config.vocab_size, decoding_operators(self.decoder)
        return Chooser(config, self._vocab, size, decoding)

    def _guess(self, rows: Sequence[Row]) -> None:
        """Guess tokens for the rows. With guesses, no text grows past the steady length."""
        for row in rows:
            row.expect(Guess())
        guessing = [row for row in rows if row.config.speculate]
        for chooser, indices in self._groups(guessing):
            chosen = [guessing[r] for r in indices]
            guesses = self._proposer.propose(chosen, list(map(self._most_guesses, chosen)), chooser)
            for row, guess in zip(chosen, guesses, strict=True):
                row.expect(guess)

    def _most_guesses(self, row: Row) -> int:
        steady = self._steady - len(row.reading.tokens) - 1
        return max(0, min(row.config.speculate, self._speculate, row.left - 1, steady))

    def _leave(self, row: Row) -> None:
        self._proposer.leave(row)
        self._reader.close(row.reading)
