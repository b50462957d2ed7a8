"""Structured output: masks of the tokens that a grammar allows next, computed by llguidance.

`GrammarChecker` compiles a client's grammar in a process with limits first, so that one which takes
too long to compile cannot stop the engine.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from workhorse.serve.grammar_process import error_of, limits
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
LONGEST_CLOSING = 256
"""Maximum number of tokens that are reserved to end a value."""
MARGIN = 8
"""Number of tokens by which a single token may make the end of a value longer. An escape sequence
or a character of four bytes needs less."""
CLOSING = (*b'}]"0,:tfn-ae', *range(33, 127), *range(0x80, 0xC0), *b" \n")
"""Bytes by which `Grammar` ends a value, the preferred first."""
QUOTE, IN_STRINGS = ord('"'), ord("#")
"""A string is ended by a quote. A `#` is allowed only in strings."""


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


class _Vocabulary:
    """The tokens as llguidance reads them."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        special = set(tokenizer.special_tokens.values()) | set(ends)
        self.eos_token_id = ends[0]
        size = max(tokenizer.vocab_size, *(end + 1 for end in ends))
        self.bos_token_id = None
        self.special_token_ids = sorted(special)
        self.tokens = [
            f"<|{token}|>".encode() if token in special else tokenizer.display_bytes(token) or b""
            for token in range(size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


class Grammars:
    """Makes grammars for one tokenizer.

    Args:
        tokenizer: the model's tokenizer.
        ends: ids that end a completion; empty: a completion ends only when nothing can follow.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        ends = ends or (tokenizer.vocab_size,)  # an id that is never chosen
        self._special = {*tokenizer.special_tokens.values()}.difference(ends)
        wrapped = TokenizerWrapper(_Vocabulary(tokenizer, ends))
        self._tokenizer = LLTokenizer(wrapped, eos_token=list(ends))
        one_byte = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
        self._of_byte = {data[0]: token for data, token in one_byte.items() if len(data) == 1}

    def make(self, source: GrammarSource, prompt: int, most_new: int) -> "Grammar":
        """Compile a grammar for one completion.

        Args:
            source: the grammar.
            prompt: number of tokens of the prompt.
            most_new: maximum number of tokens of the completion.

        Raises:
            GrammarError: the grammar is not valid.
        """
        matcher = LLMatcher(self._tokenizer, source.text, log_level=0, limits=limits())
        _check(matcher)
        closing = _Closing(self._of_byte, self._special, source.end_of_reasoning)
        return Grammar(matcher, closing, prompt, most_new)


def _check(matcher: LLMatcher) -> None:
    if reason := error_of(matcher):
        raise GrammarError(f"the grammar cannot be used: {reason}; change it")


class Grammar:
    """The grammar of one completion: a `LogitProcessor` that forbids all other tokens.

    Towards the maximum number of tokens it only allows tokens that end the value in time, if it
    finds any.
    """

    def __init__(self, matcher: LLMatcher, closing: "_Closing", prompt: int, most_new: int) -> None:
        self._matcher = matcher
        self._closing = closing
        self._prompt = prompt
        self._most_new = most_new
        self._consumed = 0
        self._seconds = 0.0
        """CPU time of all masks, and of reading tokens."""
        self._check_at = LONGEST_CLOSING
        self._plan: list[int] = []
        """The tokens that end the value, once there is only room for these."""

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
        left = self._most_new - self._consumed
        if not self._plan and left <= self._check_at:
            self._reserve(left)
        if self._plan:
            only = torch.full_like(logits, -torch.inf)
            only[self._plan[0]] = 0.0
            return only
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _check(self._matcher)
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(bool)
        return torch.where(torch.from_numpy(allowed).to(logits.device), logits, -torch.inf)

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
            if self._plan:
                self._plan.pop(0)
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                _check(self._matcher)

    def _reserve(self, left: int) -> None:
        """Find out how many tokens end the value; if no more are left, allow only these."""
        closing = self._closing.of(self._matcher, min(left, LONGEST_CLOSING))
        spare = 0 if closing is None else left - len(closing)
        if closing and spare <= MARGIN:
            self._plan = closing
        else:
            self._check_at = left - max(1, spare // 8)


class _Closing:
    """Finds tokens that end a value.

    Args:
        of_byte: the token of each byte.
        special: ids of special tokens, except those that end completions.
        end_of_reasoning: see `GrammarSource`.
    """

    def __init__(
        self, of_byte: Mapping[int, int], special: Collection[int], end_of_reasoning: Sequence[int]
    ) -> None:
        self._of_byte = of_byte
        self._special = special
        self._end_of_reasoning = end_of_reasoning

    def of(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Return up to `most` tokens that end the value, chosen greedily; None if they do not."""
        found = self._after(matcher, [], most)
        if found is None and self._end_of_reasoning:
            found = self._after(matcher, self._end_of_reasoning, most)
        return found

    def _after(self, matcher: LLMatcher, first: Sequence[int], most: int) -> list[int] | None:
        trial, tokens = matcher.deep_copy(), [*first]
        if trial.validate_tokens(tokens) < len(tokens):
            return None
        for token in first:
            trial.consume_token(token)
        while not trial.is_accepting():
            next_token = self._ending(trial)
            if next_token is None:
                next_token = self._special_ending(trial)
            if next_token is None or len(tokens) >= most:
                return None
            trial.consume_token(next_token)
            tokens.append(next_token)
        return tokens

    def _ending(self, matcher: LLMatcher) -> int | None:
        """Return the allowed token that most likely leads to the end of a JSON value."""

        def of(value: int) -> int | None:
            token = self._of_byte.get(value)
            return token if token is not None and matcher.validate_tokens([token]) else None

        order = (QUOTE, *CLOSING) if of(IN_STRINGS) is not None else CLOSING
        return next((token for value in order if (token := of(value)) is not None), None)

    def _special_ending(self, matcher: LLMatcher) -> int | None:
        """Return an allowed special token, preferably one that ends the value."""
        found = [token for token in self._special if matcher.validate_tokens([token])]
        for token in found:
            after = matcher.deep_copy()
            after.consume_token(token)
            if after.is_accepting():
                return token
        return found[0] if found else None


class GrammarChecker:
    """Compiles grammars in a process with limits of memory and time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def check(self, source: str) -> str:
        """Return the reason why a grammar cannot be used; empty if it can."""
        if len(source) > MOST_GRAMMAR:
            return TOO_LONG
        async with self._lock:
            try:
                process = self._process or await self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(source).encode() + b"\n")
                async with asyncio.timeout(CHECK_SECONDS):
                    answer = await process.stdout.readline()
                    if answer:
                        return json.loads(answer)
            except (OSError, TimeoutError):
                pass
            except BaseException:
                await self.close()  # else the next check would read this answer
                raise
            await self.close()
            return f"it takes more than {CHECK_SECONDS:g} seconds or too much memory to compile"

    async def _start(self) -> asyncio.subprocess.Process:
        script = Path(__file__).with_name("grammar_process.py")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # without the folder of this file, whose modules could shadow others
            str(script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return self._process

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
