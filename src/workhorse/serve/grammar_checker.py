"""Compiles a client's grammar in a process with limits, before the engine compiles it.

So a grammar that takes too long to compile cannot stop the engine.
"""

import asyncio
from pathlib import Path
from subprocess import DEVNULL

from workhorse.child_process import ChildProcess, NoAnswerError
from workhorse.serve.grammar_process import MEMORY
from workhorse.serve.schema import MOST_GRAMMAR, TOO_LONG

CHECK_SECONDS = 5.0
"""Time after which the compilation of a grammar is ended."""


class GrammarChecker:
    """Compiles grammars in a process with limits of memory and time."""

    def __init__(self, seconds: float = CHECK_SECONDS) -> None:
        self._limits = f"; its limits are {seconds:g} seconds and {MEMORY / 2**30:g} GiB of memory"
        self._lock = asyncio.Lock()
        program = Path(__file__).with_name("grammar_process.py")
        self._process = ChildProcess(program, seconds=seconds, stderr=DEVNULL)

    async def check(self, source: str) -> str:
        """Return the reason why a grammar cannot be used; empty if it can."""
        if len(source) > MOST_GRAMMAR:
            return TOO_LONG
        async with self._lock:
            try:
                return await asyncio.to_thread(self._process.ask, source)
            except NoAnswerError as error:
                return f"the process that compiles it {error}{self._limits}"
            except BaseException:
                self._process.close()  # else the next check would wait for this one
                raise
