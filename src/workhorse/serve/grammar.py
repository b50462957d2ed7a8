"""Structured output: masks of the tokens that a grammar allows next, computed by llguidance."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from workhorse.child_process import ChildProcess, NoAnswerError
from workhorse.serve.closing import Closing, Closings, tokenizer_of
from workhorse.serve.grammar_process import MEMORY, error_of, limits
from workhorse.serve.messages import GrammarError, GrammarSource
from workhorse.serve.schema import MOST_GRAMMAR, TOO_LONG, StructuredOutputs
from workhorse.tokenizers import Tokenizer

WHITESPACE = r"[ \n]{0,32}"
"""White space between the parts of a JSON value. It is bounded, because an unbounded run of spaces
would never end."""
CHECK_SECONDS = 5.0
"""Time after which the compilation of a grammar is ended."""
MOST_SECONDS, MOST_MEAN_SECONDS = 2.0, 0.005
"""CPU time of a completion's masks, in all and on average. Above both, the completion ends with an
error, since all others wait for its masks."""


def source_of(asked: StructuredOutputs) -> str:
    """Return the grammar of the completions that a request allows, in llguidance's format.

    Raises:
        ValueError: llguidance cannot express it.
    """
    if asked.json_ is not None:
        return LLMatcher.grammar_from_json_schema(
            asked.json_, overrides={"whitespace_pattern": WHITESPACE}
        )
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    return LLMatcher.grammar_from_lark(asked.grammar or "")


class Grammars:
    """Makes grammars for one tokenizer.

    Args:
        tokenizer: the model's tokenizer.
        ends: ids that end a completion; empty: a completion ends only when nothing can follow.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        ends = ends or (tokenizer.vocab_size,)  # an id that is never chosen
        special = {*tokenizer.special_tokens.values(), *ends}
        size = max(tokenizer.vocab_size, *(end + 1 for end in ends))
        tokens = [
            b"" if one in special else tokenizer.display_bytes(one) or b"" for one in range(size)
        ]
        self._tokenizer = tokenizer_of(tokens, special, ends, tokenizer.encode)
        self._closings = Closings(tokens, special, ends)

    def make(self, source: GrammarSource, prompt: int, most_new: int) -> "Grammar":
        """Compile a grammar for one completion.

        Args:
            source: the grammar.
            prompt: number of tokens of the prompt.
            most_new: maximum number of tokens of the completion.

        Raises:
            GrammarError: the grammar is not valid, or each completion has more tokens.
        """
        matcher = LLMatcher(self._tokenizer, source.text, log_level=0, limits=limits())
        _check(matcher)
        return Grammar(matcher, Closing(self._closings, source, most_new), prompt)


def _check(matcher: LLMatcher) -> None:
    if reason := error_of(matcher):
        raise GrammarError(f"the grammar cannot be used: {reason}; change it")


class Grammar:
    """The grammar of one completion: a `LogitProcessor` that forbids all other tokens.

    Towards the maximum number of tokens, it only allows tokens after which the value can end in
    time; see `Closing`.
    """

    def __init__(self, matcher: LLMatcher, closing: Closing, prompt: int) -> None:
        self._matcher = matcher
        self._closing = closing
        self._prompt = prompt
        self._consumed = 0
        self._seconds = 0.0
        """CPU time of all masks, and of reading tokens."""

    def __call__(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Set the logits of all tokens that the grammar does not allow next to -inf.

        Raises:
            GrammarError: the grammar exceeds a limit.
        """
        with self._timed():
            masked = self._masked(logits, tokens[self._prompt :])
        mean = self._seconds / (self._consumed + 1)
        if self._seconds > MOST_SECONDS and mean > MOST_MEAN_SECONDS:
            raise GrammarError(
                f"the grammar takes {1000 * mean:.1f} ms per token, above the limit of "
                f"{1000 * MOST_MEAN_SECONDS:g} ms; make it less ambiguous"
            )
        return masked

    def _masked(self, logits: Tensor, completion: Sequence[int]) -> Tensor:
        self._advance(completion)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _check(self._matcher)
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(bool)
        masked = torch.where(torch.from_numpy(allowed).to(logits.device), logits, -torch.inf)
        return self._closing.restrict(masked)

    def ends(self, tokens: Sequence[int], text: str) -> bool:
        """A `StopCondition`: True if nothing can follow."""
        with self._timed():
            self._advance(tokens)
        return self._matcher.is_stopped()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the CPU time of a block."""
        started = time.thread_time()
        yield
        self._seconds += time.thread_time() - started

    def _advance(self, completion: Sequence[int]) -> None:
        """Give the matcher the tokens that it has not seen."""
        for token in completion[self._consumed :]:
            self._consumed += 1
            if not self._matcher.is_stopped():
                self._closing.advance(token)
                self._matcher.consume_token(token)
                _check(self._matcher)


class GrammarChecker:
    """Compiles grammars of clients in a process with limits of memory and time.

    So a grammar that takes too long to compile cannot stop the engine.
    """

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
