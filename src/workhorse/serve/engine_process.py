"""The process that runs the model. One thread owns it, and another one receives messages.

The process ends if the connection to the HTTP process is closed. It is started with the number of
the connection's file descriptor: `python -m workhorse.serve.engine_process 3`.
"""

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

from workhorse.devices.waiting import share_cores

if __name__ == "__main__":
    share_cores()  # before torch is imported

from workhorse.devices.memory import available
from workhorse.errors import WorkhorseError
from workhorse.generate import Delta, Engine, GenerationConfig
from workhorse.generate.checks import check_exact
from workhorse.model.load import load
from workhorse.model.model import Model
from workhorse.serve.memory import cache_tokens
from workhorse.serve.messages import (
    Cancel,
    EngineSettings,
    Failed,
    GrammarError,
    GrammarSource,
    Job,
    ModelFacts,
    Stepped,
    packed,
    read,
)
from workhorse.tokenizers import Tokenizer

if TYPE_CHECKING:
    from workhorse.serve.grammar import Grammar, Grammars

MOST_FAILURES = 3
"""Number of failed steps in a row after which the process ends, to be started again."""


class Worker:
    """Runs the jobs that arrive on a connection.

    Args:
        engine: the engine.
        connection: the connection to the HTTP process.
        received: the bytes that it receives.
        tokenizer: the model's tokenizer, for grammars.
    """

    def __init__(
        self, engine: Engine, connection: socket.socket, received: BinaryIO, tokenizer: Tokenizer
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._grammars: dict[tuple[int, ...], Grammars] = {}
        """For each set of ids that end completions."""
        self._connection = connection
        self._received = received
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._of: dict[int, tuple[int, int]] = {}
        """Job and number of each unfinished completion, by its index."""
        self._failures = 0

    def run(self) -> None:
        """Work until the connection is closed."""
        threading.Thread(target=self._receive, daemon=True).start()
        while self._process_messages():
            if not self._engine.is_idle:
                self._step()

    def _receive(self) -> None:
        while (message := read(self._received)) is not None:
            self._arrived.put(message)
        self._arrived.put(None)

    def _process_messages(self) -> bool:
        """Process all messages that have arrived; wait for one if there is nothing else to do."""
        wait = self._engine.is_idle
        while True:
            try:
                message = self._arrived.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            match message:
                case None:
                    return False
                case Job():
                    self._add(message)
                    wait = self._engine.is_idle
                case Cancel(id):
                    self._drop(id)
                    if self._engine.is_idle:  # report that nothing is left
                        self._send(Stepped({}, self._engine.load, 0.0))
                        wait = True

    def _add(self, job: Job) -> None:
        try:
            grammars = [self._grammar(job, job.grammar)] if job.grammar else []
            indices = self._engine.add(
                job.prompt,
                job.config,
                client=job.client,
                processors=grammars,
                stop_conditions=[grammar.ends for grammar in grammars],
                adapter=job.adapter,
            )
        except Exception as error:  # must not end the process, and so the other jobs
            self._fail(job.id, error, is_input=isinstance(error, WorkhorseError))
            return
        self._of |= {index: (job.id, number) for number, index in enumerate(indices)}

    def _grammar(self, job: Job, source: GrammarSource) -> "Grammar":
        from workhorse.serve.grammar import Grammars

        ends = job.config.stop_tokens or ()
        if ends not in self._grammars:
            self._grammars[ends] = Grammars(self._tokenizer, ends)
        most_new = job.config.max_new_tokens
        return self._grammars[ends].make(source, len(job.prompt), most_new)

    def _step(self) -> None:
        started = time.perf_counter()
        try:
            deltas = self._engine.step()
            self._failures = 0
        except Exception as error:
            if not self._drop_failed(error):
                self._failures += 1
                if self._failures >= MOST_FAILURES:
                    raise
            return
        tokens: dict[int, list[Delta]] = {}
        for delta in deltas:
            if delta.index not in self._of:
                continue  # its job was cancelled or has failed
            job, number = self._of[delta.index]
            tokens.setdefault(job, []).append(_numbered(delta, number))
            if delta.finish_reason is not None:
                del self._of[delta.index]
        self._send(Stepped(tokens, self._engine.load, time.perf_counter() - started))

    def _drop_failed(self, error: Exception) -> bool:
        """Report the jobs that a failed step has dropped; False if there are none."""
        gone = {self._of[index][0] for index in self._of.keys() - set(self._engine.unfinished)}
        for job in gone:
            self._drop(job)
            self._fail(job, error, is_input=isinstance(error, GrammarError))
        return bool(gone)

    def _drop(self, job: int) -> None:
        """Cancel the unfinished completions of a job."""
        for index in [index for index, (one, _) in self._of.items() if one == job]:
            del self._of[index]
            self._engine.cancel(index)

    def _fail(self, job: int, error: Exception, *, is_input: bool) -> None:
        is_known = isinstance(error, WorkhorseError)
        message = str(error) if is_known else f"{type(error).__name__}: {error}"
        self._send(Failed(job, message, is_input))

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the HTTP process has exited: `_receive` reports it
            self._connection.sendall(packed(message))


def _numbered(delta: Delta, number: int) -> Delta:
    return delta if delta.index == number else replace(delta, index=number)


def facts(
    model: Model,
    settings: EngineSettings,
    tokens: int,
    remarks: list[str],
    adapters: Mapping[str, Model],
) -> ModelFacts:
    """Collect the facts about a loaded model, and the same model with each adapter."""
    tokenizer = model.text
    replies = model.chat_format(settings.template).stop_tokens
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    served = [model, *adapters.values()]
    return ModelFacts(
        name=model.name,
        tokenizer=tokenizer,
        beginning=model.beginning,
        trained_to_chat=model.trained_to_chat,
        settings=replace(settings, cache_tokens=tokens),
        stop_tokens=model.stop_tokens or eos,
        reply_stop_tokens=tuple(dict.fromkeys((*replies, *model.stop_tokens))),
        sampling=dict(model.sampling),
        context=model.decoder.max_seq_len,
        vocab=min(model.decoder.config.vocab_size, tokenizer.vocab_size),
        is_exact=settings.exact == "always"
        or (settings.exact == "auto" and all(one.backend.is_invariant for one in served)),
        announcement=_announcement(model, adapters),
        remarks=tuple(remarks),
    )


def _announcement(model: Model, adapters: Mapping[str, Model]) -> str:
    """Describe how the model is executed, and each adapter that is executed in another way."""
    own = model.announcement
    lines = {name: one.announcement for name, one in adapters.items()}
    return "\n".join([own, *(f"{name}: {line}" for name, line in lines.items() if line != own)])


def _with_adapters(model: Model, settings: EngineSettings) -> dict[str, Model]:
    """Return the model with each adapter that requests may choose."""
    found: dict[str, Model] = {}
    for name, path in settings.adapters.items():
        try:
            found[name] = model.with_adapter(
                path,
                settings.execution,  # pyright: ignore[reportArgumentType]
                exact=settings.exact != "never",
            )
        except WorkhorseError as error:
            raise WorkhorseError(f"adapter {name}: {error}") from None
    return found


def build(settings: EngineSettings) -> tuple[Engine, ModelFacts]:
    """Load the model and create its engine."""
    from workhorse.devices.names import resolve_device, use_threads
    from workhorse.execute.choose import LIBRARIES
    from workhorse.native import resolve

    if settings.threads:
        use_threads(settings.threads)
    if settings.execution == "auto" and resolve_device(settings.device).type == "cpu":
        resolve(*LIBRARIES, wait=True)  # else the first server of a machine would not use them
    remarks: list[str] = []
    model = load(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kernel=settings.kernel,  # pyright: ignore[reportArgumentType]
        quantize=settings.quantize,  # pyright: ignore[reportArgumentType]
        execution=settings.execution,  # pyright: ignore[reportArgumentType]
        adapter=settings.adapter,
        exact=settings.exact != "never",
        notify=remarks.append,
    )
    adapters = _with_adapters(model, settings)
    decoder = model.decoder
    dtype, free = next(decoder.parameters()).dtype, available(decoder.device)
    tokens, _ = cache_tokens(decoder.config, dtype, settings, free)
    about = facts(model, settings, tokens, remarks, adapters)
    for one in (model, *adapters.values()):
        options = GenerationConfig(exact=about.is_exact)
        check_exact(one.backend, options, settings.speculate, has_draft=False)
    engine = Engine(
        model.backend,
        adapters={name: one.backend for name, one in adapters.items()},
        tokenizer=model.text,
        max_sequences=settings.max_sequences,
        max_tokens=tokens + settings.max_sequences * settings.speculate,
        speculate=settings.speculate,
        prompt_share=settings.prompt_share,
        prefix_caching=True,
    )
    return engine, about


def serve(connection: socket.socket, make: Callable[[EngineSettings], tuple[Engine, ModelFacts]]):
    """Receive the settings, load the model, report its facts and run jobs.

    Args:
        connection: the connection to the HTTP process.
        make: creates an engine; see `build`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    received = connection.makefile("rb")
    settings = read(received)
    if settings is None:
        return
    try:
        engine, about = make(settings)
    except (WorkhorseError, OSError) as error:
        connection.sendall(packed(Failed(None, str(error), is_input=True)))
        return
    connection.sendall(packed(about))
    Worker(engine, connection, received, about.tokenizer).run()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), build)
    sys.stdout.flush()
    os._exit(0)  # threads of operators may still wait for work
