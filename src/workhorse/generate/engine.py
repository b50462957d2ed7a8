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
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from workhorse.config.arguments import integer
from workhorse.errors import WorkhorseError, nearest, shown
from workhorse.execute.backend import Backend
from workhorse.generate.checks import (
    StreamingTokenizer,
    check_draft,
    check_functions,
    check_prompts,
    checked_adapters,
    checked_config,
    checked_models,
    usable_vocab,
)
from workhorse.generate.config import Delta, GenerationConfig
from workhorse.generate.limits import Limits, Load
from workhorse.generate.next_tokens import NextTokens, may_look_ahead, score_prompt
from workhorse.generate.pace import PromptPace
from workhorse.generate.request import LogitProcessor, Request, StopCondition
from workhorse.generate.runner import Logits, Runner, wait
from workhorse.generate.scheduler import Scheduler
from workhorse.generate.speculation import Draft, PromptLookup
from workhorse.nn import Decoder, evaluation_mode


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
        self._draft = draft
        self._limits = limits = Limits.checked(
            decoder.max_seq_len,
            max_sequences=max_sequences,
            speculate=speculate,
            token_budget=token_budget,
            max_tokens=max_tokens,
            has_draft=draft is not None,
        )
        check_draft(backend, draft, limits.speculate, tokenizer)
        self._runner = Runner(
            backend,
            tokens=limits.tokens,
            sequences=limits.sequences,
            slack=limits.speculate,
            adapters=adapted,
        )
        self._scheduler = Scheduler(
            self._runner.cache,
            token_budget=limits.budget,
            max_sequences=limits.sequences,
            prefix_caching=prefix_caching,
        )
        self.looks_ahead = decoder.device.type == "cuda"
        """True if a chosen token may be processed before it is copied to the host, so that the
        device waits less for the host. If the completion has ended, the result is discarded. If
        weights change between steps, the change takes effect one token later."""
        pace = None if prompt_share is None else PromptPace.checked(prompt_share)
        self._pace = None if self.looks_ahead else pace
        guesser = (
            None if draft is None else Draft(draft, self._runner, prefix_caching=prefix_caching)
        )
        vocab, guesser = usable_vocab(decoder, tokenizer), guesser or PromptLookup()
        self._next = NextTokens(backend, vocab, guesser, limits.speculate)
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
        is_checked: bool = False,
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
            is_checked: True if `check_prompts` returned the prompt.

        Returns:
            The indices of the prompt's `n_samples` completions; see `Delta.index`.

        Raises:
            WorkhorseError: see `check_prompts` and `Limits.check`; or the engine does not have the
                adapter.
        """
        self._repair()
        config, fitting = checked_config(config).with_seed(), prompt
        if not is_checked:
            (fitting,) = check_prompts(self.decoder, [prompt], config, self.tokenizer)
            processors = check_functions("processors", processors)
            stop_conditions = check_functions("stop_conditions", stop_conditions)
        if adapter not in self._runner.backends:
            known = nearest(str(adapter), filter(None, self._runner.backends))
            raise WorkhorseError(f"the engine has no adapter {shown(adapter)}; {known}")
        self._limits.check(config, len(fitting), self._runner.backends[adapter], self._runner.cache)
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

    def cancel(self, index: int) -> None:
        """Drop a waiting or running completion. A completion that has ended is not affected.

        Raises:
            WorkhorseError: no completion has this index.
        """
        if integer("index", index, 0) >= self._added:
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
        self._next.guess(self._scheduler.running)
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
        logits = self._runner.run([request.chunk(count) for request, count in chunks])
        requests: list[Request] = []
        lasts: list[int] = []
        with self._runner.changing():
            for (request, count), last in zip(chunks, logits.last, strict=True):
                if request.needs_scores:
                    score_prompt(self._backend, request, logits.of[last + 1 - count : last + 1])
                if request.sequence.pending == 0:
                    copies = request.start_copies(self._runner.cache)
                    for copy in copies:
                        self._scheduler.join(copy)
                    self._step += copies
                    requests += [request, *copies]
                    lasts += [last] * (1 + len(copies))
        if not all(request.deltas for request in requests):
            reads_prompt = True
            wait(logits.of)
        if self._pace is not None and len(of_prompts) < len(chunks):
            wait(logits.of)
            self._pace.note(sum(of_prompts), time.perf_counter() - started)
        if reads_prompt:
            self._prompt_seconds += time.perf_counter() - started
        return Logits(logits.of, lasts), requests

    def _plan(self) -> list[tuple[Request, int]]:
        """Return the requests of this step, and the number of tokens to process for each."""
        if self._pace is not None:
            self._scheduler.limit_prompts(self._pace.tokens)
        chunks = self._scheduler.schedule()
        self._step = [request for request, _ in chunks]
        for request in self._scheduler.preempted:
            request.restore()
            self._next.leave(request)
        return chunks

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
            self._next.reset()
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
        self._next.leave(request)
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
        """Choose the next tokens of requests."""
        ahead = None
        if self._can_look_ahead(requests):
            ahead = partial(self._runner.run_ahead, [request.sequence for request in requests])
        for request, token, logprob in self._next.choose(logits, requests, ahead):
            self._taken[request.index] = request
            seconds = 0.0 if request.deltas else self._prompt_seconds
            request.take(token, logprob, prompt_seconds=seconds)
            if seconds:
                self._prompt_seconds = 0.0

    def _can_look_ahead(self, requests: Sequence[Request]) -> bool:
        """True if no other request runs or waits, and the cache has room; see `may_look_ahead`."""
        waiting, running = self._scheduler.waiting, self._scheduler.running
        if not self.looks_ahead or waiting or len(requests) < len(running):
            return False
        together = may_look_ahead(requests, self.decoder.max_seq_len)
        return together and self._scheduler.has_room_for_one_more()
