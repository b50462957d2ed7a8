"""The HTTP process's side of the engine: starts its process, sends jobs, and restarts it."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal

from workhorse.errors import WorkhorseError
from workhorse.generate import Delta, GenerationConfig
from workhorse.generate.limits import Load
from workhorse.serve.messages import (
    LENGTH,
    Cancel,
    EngineSettings,
    Failed,
    GrammarSource,
    Job,
    ModelFacts,
    Stepped,
    packed,
    unpacked,
)

COMMAND = (sys.executable, "-P", "-m", "workhorse.serve.engine_process")
"""Without -P, files of the current folder would shadow modules of Python."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 30.0
"""Seconds before the engine is restarted: after its first death, and after many in a row."""
HEALTHY = 60.0
"""Seconds after which an engine that dies counts as having worked."""
NOTHING_RUNS = Stepped({}, Load(0, 0, 0.0), 0.0)
"""Reported when the engine has died."""


class EngineDied(Exception):
    """The engine's process has ended. It is being restarted."""


class JobFailed(Exception):
    """A job has ended because of an error.

    Args:
        message: the reason.
        is_input: True if the input was wrong.
    """

    def __init__(self, message: str, is_input: bool) -> None:
        super().__init__(message)
        self.is_input = is_input


class EngineClient:
    """Starts the engine's process, and starts it again whenever it dies.

    Args:
        settings: settings of the engine.
        say: called with each message for the operator.
        on_step: called with each report of a step.
        command: the command of the process; the descriptor of its connection is appended.

    Attributes:
        state: `loading`, `ready`, or `closed`.
        restarts: the number of times that the process was started again.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        say: Callable[[str], object],
        on_step: Callable[[Stepped], object],
        command: Sequence[str],
    ) -> None:
        self.state: Literal["loading", "ready", "closed"] = "loading"
        self.restarts = 0
        self._settings = settings
        self._say = say
        self._on_step = on_step
        self._command = command
        self._ids = itertools.count()
        self._jobs: dict[int, asyncio.Queue[list[Delta] | Exception]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> ModelFacts:
        """Start the process and wait until the model is loaded.

        Raises:
            WorkhorseError: the model cannot be loaded.
        """
        reader, facts = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(reader))
        return facts

    async def close(self) -> None:
        """End the process. Jobs in progress fail with `EngineDied`."""
        self.state = "closed"
        for queue in self._jobs.values():
            queue.put_nowait(EngineDied())
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        await self._end_process()

    async def complete(
        self,
        prompt: list[int],
        config: GenerationConfig,
        client: str,
        grammar: GrammarSource | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[list[Delta]]:
        """Complete a prompt; yields the new tokens of each step. `Delta.index` counts from 0.

        If the iterator is closed early, the job is cancelled.

        Raises:
            EngineDied: the engine's process has ended, or is being restarted.
            JobFailed: the engine refused the job, or an error ended it.
        """
        if self._writer is None:
            raise EngineDied
        job = Job(next(self._ids), prompt, config, client, grammar, adapter)
        queue = self._jobs[job.id] = asyncio.Queue()
        left = config.n_samples
        self._writer.write(packed(job))
        try:
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    left = 0
                    raise item
                left -= sum(delta.finish_reason is not None for delta in item)
                yield item
        finally:
            del self._jobs[job.id]
            if left and self._writer is not None:
                self._writer.write(packed(Cancel(job.id)))

    async def _launch(self) -> tuple[asyncio.StreamReader, ModelFacts]:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(packed(self._settings))
        answer = await _read(reader)
        if not isinstance(answer, ModelFacts):
            writer.close()
            code = await self._end_process()
            if isinstance(answer, Failed):
                raise WorkhorseError(answer.message)
            raise WorkhorseError(
                f"the process of the model died while it loaded ({_described(code)}); if there is "
                "too little memory, choose --quantize or fewer --cache-tokens"
            )
        self._writer = writer
        self.state = "ready"
        return reader, answer

    async def _supervise(self, reader: asyncio.StreamReader) -> None:
        wait = FIRST_WAIT
        while True:
            started = time.monotonic()
            await self._receive(reader)
            self._on_step(NOTHING_RUNS)
            self.state, writer, self._writer = "loading", self._writer, None
            if writer is not None:
                writer.close()
            for queue in self._jobs.values():
                queue.put_nowait(EngineDied())
            code = await self._end_process()
            if time.monotonic() - started > HEALTHY:
                wait = FIRST_WAIT
            self._say(f"the engine died ({_described(code)}); restarting")
            while True:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
                self.restarts += 1
                try:
                    reader, _ = await self._launch()
                    break
                except (WorkhorseError, OSError) as error:
                    self._say(f"the engine cannot be restarted: {error}")
            self._say("the engine runs again")

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Pass the reports of the engine to the jobs until the connection ends."""
        while (message := await _read(reader)) is not None:
            match message:
                case Stepped():
                    self._on_step(message)
                    for job, deltas in message.tokens.items():
                        if job in self._jobs:
                            self._jobs[job].put_nowait(deltas)
                case Failed(int(job), reason, is_input) if job in self._jobs:
                    self._jobs[job].put_nowait(JobFailed(reason, is_input))

    async def _end_process(self) -> int | None:
        """Kill the process if it still runs, and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # `process.kill` would hide the exit code
        return await process.wait()


async def _read(reader: asyncio.StreamReader) -> object:
    """Return the next message; None if the connection has ended."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return unpacked(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None


def _described(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
