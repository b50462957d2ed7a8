"""Continuous batching: requests join and leave the running batch at any time.

Apart from beam search, this is the only decoding loop. In a step the `Scheduler` decides which
tokens are processed, and the `Runner` processes them in one pass, or one for each adapter in use.
Then a token is chosen for each request whose known tokens have all been processed, or several
tokens if guesses are accepted. A request has its own random generator and is computed
independently, so its completion does not depend on other requests, except by rounding: logits from
batches of different shapes differ slightly, so another token can be chosen if two are almost
equally likely. `GenerationConfig.exact` prevents this.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError, nearest, shown
from workhorse.execute.backend import Backend
from workhorse.generate.checks import (
    StreamingTokenizer,
    check_draft,
    check_exact,
    check_functions,
    check_prompts,
    checked_adapters,
    checked_config,
    checked_models,
    usable_vocab,
    whole,
)
from workhorse.generate.config import Delta, GenerationConfig
from workhorse.generate.pace import PromptPace
from workhorse.generate.request import Guess, LogitProcessor, Request, StopCondition
from workhorse.generate.runner import Chunk, Logits, Runner, tokens_needed, wait
from workhorse.generate.sampling import Chooser, token_logprobs
from workhorse.generate.scheduler import Scheduler
from workhorse.generate.sequence import PIECE
from workhorse.generate.speculation import Draft, PromptLookup, Proposer, slack_of
from workhorse.nn import Decoder, evaluation_mode

TOKEN_BUDGET = 4096


class Load(NamedTuple):
    """The load of an engine."""

    running: int
    """Number of requests that have cache blocks."""
    waiting: int
    """Number of requests in the queue."""
    cache: float
    """Fraction of the cache blocks that sequences use."""


class Engine:
    """Generates completions of any number of prompts, which may be added and cancelled at any time.

    Args:
        decoder: the model; dropout is off during a step. A decoder's modules are called; a backend
            (`Model.backend`) may be faster.
        adapters: the same model with an adapter, by the adapter's name; see `Model.with_adapter`. A
            step has a pass for each adapter in use.
        tokenizer: decodes tokens, and defines eos and the number of ids in use. None: deltas have
            no text, and no eos token ends a completion.
        draft: a smaller decoder with the same vocabulary, which guesses tokens for requests with
            `speculate`. None: guesses are looked up in the prompt and the completion.
        max_sequences: the maximum number of completions that advance together; others wait.
        max_tokens: the maximum number of tokens of all sequences in the cache. (One block of 32
            tokens per sequence is added.) None: enough for `max_sequences` full contexts. If
            requests need more, the newest are preempted and processed again later.
        token_budget: the maximum number of tokens per step, at least `max_sequences` times
            `1 + speculate`. A smaller budget makes long prompts delay other requests less. None:
            4096, or that minimum if it is larger.
        prompt_share: the fraction by which prompts may lengthen a step in which other requests
            decode; see `PromptPace`. None, or on CUDA: only `token_budget` limits prompts.
        speculate: the maximum number of guessed tokens of a request per step.
        prefix_caching: True to keep keys and values while the cache has room, so that a later
            prompt is processed only after the prefix that is in the cache. The weights must not
            change.

    Raises:
        WorkhorseError: an option has a wrong type or is out of range, an adapter belongs to another
            model; or see `check_draft`.
    """

    def __init__(
        self,
        decoder: Decoder | Backend,
        *,
        adapters: Mapping[str, Decoder | Backend] | None = None,
        tokenizer: StreamingTokenizer | None = None,
        draft: Decoder | Backend | None = None,
        max_sequences: int = 32,
        max_tokens: int | None = None,
        token_budget: int | None = None,
        prompt_share: float | None = None,
        speculate: int = 0,
        prefix_caching: bool = False,
    ) -> None:
        backend, draft = checked_models(decoder, draft, tokenizer)
        adapted = checked_adapters(backend, adapters or {})
        if not isinstance(prefix_caching, bool):
            raise WorkhorseError(
                f"prefix_caching={shown(prefix_caching)} is not a bool; give True or False"
            )
        self._backend = backend
        self.decoder = decoder = backend.decoder
        self.tokenizer = tokenizer
        self.max_sequences = whole("max_sequences", max_sequences, 1)
        self._draft = draft
        self._speculate = speculate = whole("speculate", speculate, 0)
        check_draft(backend, draft, speculate, tokenizer)
        least = self.max_sequences * (1 + speculate)
        if token_budget is None:
            token_budget = max(TOKEN_BUDGET, least)
        budget = whole("token_budget", token_budget, 1)
        if budget < least:
            raise WorkhorseError(
                f"token_budget={budget} is too small for one token and speculate={speculate} "
                f"guesses of each of max_sequences={self.max_sequences} sequences; "
                f"give token_budget={least} or more"
            )
        tokens = self.max_sequences * (decoder.max_seq_len + speculate)
        if max_tokens is not None:
            tokens = whole("max_tokens", max_tokens, 1)
        self._runner = Runner(
            backend,
            tokens=tokens,
            sequences=self.max_sequences,
            slack=speculate,
            adapters=adapted,
        )
        self._scheduler = Scheduler(
            self._runner.cache,
            token_budget=budget,
            max_sequences=self.max_sequences,
            prefix_caching=prefix_caching,
        )
        self.looks_ahead = decoder.device.type == "cuda"
        """True if a chosen token may be processed before it is copied to the host, so that the
        device waits less for the host. If the completion has ended, the result is discarded. If
        weights change between steps, the change takes effect one token later."""
        self._pace = None
        if prompt_share is not None:
            if not isinstance(prompt_share, int | float) or not prompt_share > 0:
                raise WorkhorseError(
                    f"prompt_share={shown(prompt_share)} is not a positive number; give one"
                )
            if not self.looks_ahead:
                self._pace = PromptPace(prompt_share)
        self._proposer: Proposer = PromptLookup()
        if draft is not None:
            self._proposer = Draft(draft, self._runner, prefix_caching=prefix_caching)
        self._vocab = usable_vocab(decoder, tokenizer)
        # Dynamic NTK and LongRoPE choose the angles of a whole pass by the length at its end: past
        # the original length, a guess would change the logits of the tokens before it.
        self._steady = decoder.config.steady_length()
        self._choosers: dict[str, Chooser] = {}
        self._added = 0
        self._requests: dict[int, Request] = {}
        """All requests that have not ended."""
        self._taken: dict[int, Request] = {}
        """Requests with deltas that `step` has not returned yet, by index."""
        self._returned: dict[int, int] = {}
        """Number of deltas that `step` has returned, by index of each started request."""
        self._step: list[Request] = []
        self._is_stepping = False
        self._is_dirty = False
        """True during a step, and after a failed step until `_recover` has finished."""
        self._cancelled: set[int] = set()
        self._prompt_seconds = 0.0

    @property
    def unfinished(self) -> Collection[int]:
        """Indices of the completions that wait or run, or have tokens that `step` will return."""
        return self._requests.keys() | self._taken.keys()

    @property
    def load(self) -> Load:
        """Numbers of requests and cache tokens in use."""
        cache = self._runner.cache
        used = max(
            (pool.capacity - pool.available) / pool.capacity for pool in cache.pools.values()
        )
        return Load(len(self._scheduler.running), len(self._scheduler.waiting), used)

    @property
    def is_idle(self) -> bool:
        """True if no request waits or runs, and `step` has returned every token."""
        return not (self._requests or self._taken)

    def add(
        self,
        prompt: Sequence[int],
        config: GenerationConfig | None = None,
        *,
        processors: Sequence[LogitProcessor] = (),
        stop_conditions: Sequence[StopCondition] = (),
        client: str = "",
        adapter: str | None = None,
    ) -> range:
        """Request completions of a prompt.

        Args:
            prompt: token ids.
            config: the options; None: the defaults of `GenerationConfig`.
            processors: functions applied to the logits in this order, before penalties and filters.
            stop_conditions: functions; a completion ends when one of them returns True.
            client: name of the client that asks. Clients share the engine equally: the first
                requests of all clients come before the second ones.
            adapter: name of one of the engine's adapters; None: the model itself.

        Returns:
            The indices of the prompt's `n_samples` completions; see `Delta.index`.

        Raises:
            WorkhorseError: see `check_prompts` and `check_exact`; or the engine does not have the
                adapter; or the config has beam search, or more guesses, samples or tokens than the
                engine allows.
        """
        self._repair()
        config = checked_config(config).with_seed()
        processors = check_functions("processors", processors)
        stop_conditions = check_functions("stop_conditions", stop_conditions)
        (fitting,) = check_prompts(self.decoder, [prompt], config, self.tokenizer)
        if adapter not in self._runner.backends:
            known = nearest(str(adapter), filter(None, self._runner.backends))
            raise WorkhorseError(f"the engine has no adapter {shown(adapter)}; {known}")
        self._check(config, len(fitting), self._runner.backends[adapter])
        indices = range(self._added, self._added + config.n_samples)
        requests = [
            Request(
                index,
                fitting,
                config,
                (config.seed or 0) + sample,
                self.decoder.max_seq_len,
                tokenizer=self.tokenizer,
                processors=processors,
                stop_conditions=stop_conditions,
                client=client,
            )
            for sample, index in enumerate(indices)
        ]
        for request in requests:
            sequence = self._runner.new_sequence(
                fitting,
                exact=config.exact,
                adapter=adapter,
                is_scored=config.prompt_logprobs is not None,
                speculates=config.speculate > 0,
            )
            request.begin(sequence, requests[1:] if request is requests[0] else ())
        self._added = indices.stop
        with self._runner.changing():
            self._scheduler.add(requests[0])
            self._requests |= zip(indices, requests, strict=True)
        return indices

    def _check(self, config: GenerationConfig, prompt_tokens: int, backend: Backend) -> None:
        """Raise a WorkhorseError if the engine can never serve a request with this backend."""
        if config.beams > 1:
            raise WorkhorseError(
                f"beams={config.beams}: beam search returns no tokens before its end, so an engine "
                "cannot run it; omit beams"
            )
        if slack_of(config, self.decoder) > self._speculate:
            raise WorkhorseError(
                f"speculate={config.speculate} is more than speculate={self._speculate} of this "
                f"engine; create it with speculate={config.speculate}"
            )
        check_exact(backend, config, self._speculate, has_draft=self._draft is not None)
        separate = config.exact and not backend.is_invariant
        piece = self.max_sequences - 1 + min(PIECE, self.decoder.max_seq_len)
        if separate and self._scheduler.token_budget < piece:
            raise WorkhorseError(
                f"token_budget={self._scheduler.token_budget} is too small for exact=True with "
                f"max_sequences={self.max_sequences}; "
                f"create the engine with token_budget={piece}"
            )
        if config.n_samples > self.max_sequences:
            raise WorkhorseError(
                f"n_samples={config.n_samples} is more than max_sequences={self.max_sequences}; "
                f"create the engine with max_sequences={config.n_samples}"
            )
        context, slack = self.decoder.max_seq_len, self._runner.slack
        most = tokens_needed(prompt_tokens, config.max_new_tokens - 1, context, slack)
        if not self._runner.cache.holds(most):
            raise WorkhorseError(
                f"the request needs {most} tokens of cache, and the engine has "
                f"{self._runner.cache.tokens}; reduce max_new_tokens, or create the engine with a "
                "larger max_tokens"
            )

    def cancel(self, index: int) -> None:
        """Drop a waiting or running completion. A completion that has ended is not affected.

        Raises:
            WorkhorseError: no completion has this index.
        """
        if whole("index", index, 0) >= self._added:
            raise WorkhorseError(
                f"index={index} is not the index of a completion; give one that `add` returned"
            )
        self._repair()
        self._cancelled.add(index)
        if not self._is_stepping:  # a processor may call cancel inside a step, which drops it later
            self._drop_cancelled()

    def step(self) -> list[Delta]:
        """Process tokens of the requests, choose their next tokens, and return the new tokens.

        An exception loses no token: the next step continues from there. Only requests that caused
        the error, by their own processors, stop conditions or logits, are dropped.

        Raises:
            WorkhorseError: logits are not finite, a processor does not return logits, or `step` is
                called inside a step.
            Exception: a processor, a stop condition or the tokenizer raised it.
        """
        if self._is_stepping:
            raise WorkhorseError("step was called inside a step; return from that one first")
        self._repair()
        self._drop_cancelled()
        with ExitStack() as around:
            for backend in (*self._runner.backends.values(), self._draft):
                if backend is not None:
                    around.enter_context(evaluation_mode(backend.decoder))
            try:
                self._is_stepping = self._is_dirty = True
                self._advance()
                self._is_dirty = False
            except BaseException:
                self._recover()
                raise
            finally:
                self._is_stepping = False
        self._drop_cancelled()
        taken, before = self._taken, self._returned
        deltas = [delta for n, one in taken.items() for delta in one.deltas[before.get(n, 0) :]]
        counts = before | {n: len(one.deltas) for n, one in taken.items()}
        counts = {n: count for n, count in counts.items() if n in self._requests}
        # Python handles no signal between these two statements, so deltas are never lost.
        self._taken, self._returned = {}, counts
        return deltas

    def _repair(self) -> None:
        """Recover from an exception raised while block tables changed, or during a recovery."""
        if self._runner.is_changing or (self._is_dirty and not self._is_stepping):
            self._recover(starts_over=True)

    def _advance(self) -> None:
        """Plan a step, process its tokens and choose the next ones."""
        self._step = []
        self._guess()
        with self._runner.changing():
            chunks = self._plan()
        if not chunks:
            return
        logits, requests = self._read(chunks)
        if requests:
            self._choose(logits, requests)
        with self._runner.changing():
            for request in self._step:
                self._settle(request)
            for request in requests:
                if request.finish_reason is not None:
                    self._end(request)

    def _read(self, chunks: Sequence[tuple[Request, int]]) -> tuple[Logits, list[Request]]:
        """Run the decoder on the given number of tokens of each request.

        Returns the logits, and the requests whose next tokens can be chosen from them.
        """
        started = time.perf_counter()
        of_prompts = [count for request, count in chunks if not request.sequence.is_decoding]
        reads_prompt = bool(of_prompts)
        logits = self._runner.run([_chunk(*both) for both in chunks])
        requests: list[Request] = []
        lasts: list[int] = []
        with self._runner.changing():
            for (request, count), last in zip(chunks, logits.last, strict=True):
                if request.needs_scores:
                    self._score_prompt(request, logits.of[last + 1 - count : last + 1])
                if request.sequence.pending == 0:
                    some = [request, *self._start_copies(request)]
                    requests += some
                    lasts += [last] * len(some)
        if not all(request.deltas for request in requests):
            reads_prompt = True
            wait(logits.of)
        if self._pace is not None and len(of_prompts) < len(chunks):
            wait(logits.of)
            self._pace.note(sum(of_prompts), time.perf_counter() - started)
        if reads_prompt:
            self._prompt_seconds += time.perf_counter() - started
        return Logits(logits.of, lasts), requests

    def _score_prompt(self, request: Request, logits: Tensor) -> None:
        """Compute log-probabilities of prompt tokens from the logits of the tokens before them."""
        start = request.sequence.cached.length - len(logits)
        following = torch.tensor(request.prompt[start + 1 : start + 1 + len(logits)])
        rows, n = logits[: len(following)], request.config.prompt_logprobs
        following = following.to(rows.device)
        scores = token_logprobs(rows, following, n, self._backend.scores(rows, following))
        request.score(start, [one for one in scores if one is not None])

    def _plan(self) -> list[tuple[Request, int]]:
        """Return the requests of this step, and the number of tokens to process for each."""
        if self._pace is not None:
            self._scheduler.limit_prompts(self._pace.tokens)
        chunks = self._scheduler.schedule()
        self._step = [request for request, _ in chunks]
        for request in self._scheduler.preempted:
            request.restore()
            self._proposer.leave(request)
        return chunks

    def _start_copies(self, request: Request) -> list[Request]:
        """Start the other samples of a prompt that has been processed."""
        copies = request.start_copies(self._runner.cache)
        for copy in copies:
            self._scheduler.join(copy)
        self._step += copies
        return copies

    def _settle(self, request: Request) -> None:
        """Remove rejected guesses from the cache, and add final blocks to the prefix cache."""
        sequence = request.sequence
        certain = len(sequence.tokens) - 1
        if request.deltas and sequence.ahead is None and sequence.cached.length > certain:
            self._runner.cache.truncate(sequence.cached, certain)
        if self._scheduler.prefix_caching:
            sequence.label_prefix(self._runner.cache)
        self._fit(request)

    def _fit(self, request: Request) -> None:
        """Drop a sequence's oldest tokens if it has become longer than the context."""
        if len(request.sequence.tokens) > self.decoder.max_seq_len:
            request.sequence.drop_oldest(self.decoder.max_seq_len, self._runner.cache)

    def _recover(self, *, starts_over: bool = False) -> None:
        """Recover from an exception: the next step repeats a pass that was interrupted."""
        starts_over, broken = starts_over or self._runner.is_changing, self._runner.is_in_pass
        with self._runner.changing():
            self._choosers.clear()
            self._proposer.reset()
            for index, request in (self._requests | self._taken).items():
                if request.is_at_fault:
                    self._taken.pop(index, None)
                else:
                    request.restore()
            if starts_over:
                self._start_over()
            for request in list(self._scheduler.running):
                if request.is_at_fault or request.finish_reason is not None:
                    self._end(request)
                elif request in self._step and (broken or request.sequence.pending <= 0):
                    self._scheduler.preempt(request)
            for request in self._requests.values():
                self._fit(request)
            self._step = []
            self._is_dirty = False
            self._runner.abandon_pass()

    def _start_over(self) -> None:
        """Release all blocks, and return all requests that have not ended to the queue."""
        self._runner.reset()
        self._scheduler.clear()
        for request in list(self._requests.values()):
            request.start_over(self._runner.cache)
            if request.finish_reason is None and not request.is_at_fault:
                self._scheduler.add(request)
            else:
                del self._requests[request.index]

    def _end(self, request: Request) -> None:
        """Remove a waiting or running request, and release its blocks."""
        self._proposer.leave(request)
        self._scheduler.remove(request)
        del self._requests[request.index]

    def _drop_cancelled(self) -> None:
        with self._runner.changing():
            for index in list(self._cancelled):
                self._taken.pop(index, None)
                self._returned.pop(index, None)
                request = self._requests.get(index)
                if request is not None and self._scheduler.leave_prompt(request):
                    del self._requests[index]
                elif request is not None:
                    self._end(request)
            self._cancelled.clear()

    def _choose(self, logits: Logits, requests: Sequence[Request]) -> None:
        """Choose the next tokens, together for requests with the same options."""
        ahead: Callable[[Tensor], object] | None = None
        if self._can_look_ahead(requests):
            ahead = partial(self._runner.run_ahead, [request.sequence for request in requests])
        for chooser, indices in self._groups(requests):
            chosen = [requests[n] for n in indices]
            last = [logits.last[n] for n in indices]
            for request, token, logprob in chooser.choose(logits.of, last, chosen, ahead):
                self._taken[request.index] = request
                seconds = 0.0 if request.deltas else self._prompt_seconds
                request.take(token, logprob, prompt_seconds=seconds)
                if seconds:
                    self._prompt_seconds = 0.0

    def _can_look_ahead(self, requests: Sequence[Request]) -> bool:
        """True if the next tokens of these requests may be processed before they are on the host.

        This requires that no other request runs or waits, that all have the same adapter and the
        same sampling options, and that the cache and the context have room for one more token of
        each.
        """
        if not self.looks_ahead or self._scheduler.waiting:
            return False
        if len(requests) < len(self._scheduler.running):
            return False
        context = self.decoder.max_seq_len
        alike = all(
            request.sampling_key == requests[0].sampling_key
            and request.sequence.adapter == requests[0].sequence.adapter
            and request.may_look_ahead
            and request.sequence.prompt is None
            and len(request.sequence.tokens) < context
            for request in requests
        )
        return alike and self._scheduler.has_room_for_one_more()

    def _groups(self, requests: Sequence[Request]) -> list[tuple[Chooser, list[int]]]:
        groups: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            groups.setdefault(request.sampling_key, []).append(n)
        used = {request.sampling_key for request in self._scheduler.running}
        self._choosers = {key: chooser for key, chooser in self._choosers.items() if key in used}
        for key, indices in groups.items():
            if key not in self._choosers:
                config = requests[indices[0]].config
                self._choosers[key] = Chooser(config, self._vocab, self._backend)
        return [(self._choosers[key], indices) for key, indices in groups.items()]

    def _guess(self) -> None:
        """Guess tokens for the requests that decode and have a new token.

        The pass over a prompt's last token has no guesses, since other samples may start from it.
        Guesses end at `DecoderConfig.steady_length`, since later ones would change earlier logits.
        """
        for request in self._scheduler.running:
            request.expect(Guess())
        guessing = [
            request
            for request in self._scheduler.running
            if request.config.speculate and request.sequence.pending == 1 and request.deltas
        ]
        for chooser, indices in self._groups(guessing):
            some = [guessing[n] for n in indices]
            guesses = self._proposer.propose(some, list(map(self._most_guesses, some)), chooser)
            for request, guess in zip(some, guesses, strict=True):
                request.expect(guess)

    def _most_guesses(self, request: Request) -> int:
        steady = self._steady - len(request.sequence.tokens)
        return max(0, min(request.config.speculate, self._speculate, request.left - 1, steady))


def _chunk(request: Request, count: int) -> Chunk:
    """Create the chunk with the next `count` tokens of a request.

    If no tokens are left after it, it requests the logits after the last token and each guess. If
    the prompt's log-probabilities are needed, it requests the logits after each token.
    """
    if request.needs_scores:
        return Chunk(request.sequence, count, count)
    complete = count == request.sequence.pending
    return Chunk(request.sequence, count, 1 + len(request.guess.tokens) if complete else 0)
