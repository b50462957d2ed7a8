"""Ends of values: the tokens that complete what a grammar has begun.

The search reads the grammar with a second matcher, whose vocabulary has only the 256 bytes and the
special tokens. So its masks take microseconds, and an end exists for every tokenizer with bytes.
"""

import heapq
import itertools
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from workhorse.serve.grammar_process import limits
from workhorse.serve.messages import GrammarError, GrammarSource

MOST_SECONDS = 2.0
"""Maximum CPU time of a search. Only a slow grammar reaches it before the number of states."""
FIRST_STATES, MORE_STATES, FEW_STATES = 8000, 2000, 100
"""Maximum numbers of states of a search: before the first token, for a new end when the known one
was left, and for the end after a token that may be chosen."""
LONGEST_PART = 256
"""Number of tokens by which a single token may make the end of a value longer."""
SEARCHED, CANDIDATES = 2, 32
"""When the end is near, one of the likeliest `CANDIDATES` tokens is chosen. If one of the likeliest
`SEARCHED` leaves the known end, another end is searched."""
MANY = 32
"""Maximum number of symbols that the search for the shortest end tries in a state."""
DETOUR = 32
"""Maximum number of symbols that this search adds to an end to make a later part shorter."""
COMMON, SPACE = b"}])>\"',:;./|-_=*<01aA", b" \n\t"
"""The bytes that are tried first, and last."""
SUFFIX = re.compile(r'\[suffix=("(?:[^"\\]|\\.)*")\]')
"""The strings that end free text in a Lark grammar."""

Symbols = tuple[int, ...]
"""Ids of the second matcher: bytes, and special tokens from 256 on."""


def tokenizer_of(
    tokens: Sequence[bytes],
    special: Collection[int],
    ends: Sequence[int],
    encode: Callable[[str], list[int]],
) -> LLTokenizer:
    """Return a tokenizer of llguidance; `ends` are the special tokens that end completions."""
    names = [
        f"<|{token}|>".encode() if token in special else data for token, data in enumerate(tokens)
    ]

    class Vocabulary:
        eos_token_id, bos_token_id = ends[0], None
        special_token_ids = sorted(special)
        tokens = names

        def __call__(self, text: str) -> list[int]:
            return encode(text)

    return LLTokenizer(TokenizerWrapper(Vocabulary()), eos_token=list(ends))


class End(NamedTuple):
    """Symbols that end a value."""

    symbols: Symbols
    needs: tuple[int, ...]
    """The fewest tokens that have the symbols from each place on."""
    first: tuple[int, ...]
    """The first of these tokens, for each place."""

    def after(self, place: int) -> "End":
        """Return the end without its first symbols."""
        return End(self.symbols[place:], self.needs[place:], self.first[place:])


class Closings:
    """Finds ends of values for one tokenizer.

    Args:
        tokens: the bytes of each token.
        special: ids of special tokens, including those that end completions.
        ends: ids that end completions.
    """

    def __init__(
        self, tokens: Sequence[bytes], special: Collection[int], ends: Sequence[int]
    ) -> None:
        self.ends = ends
        self._tokens = tokens
        self._special = {token: symbol for symbol, token in enumerate(special, 256)}
        self._of_symbols: dict[Symbols, int] = {
            self.symbols(token): token for token in range(len(tokens)) if self.symbols(token)
        }
        self._longest = max(map(len, self._of_symbols))
        eos = [self._special[end] for end in ends]
        self._eos = eos[0]
        first, last = (*COMMON, *self._special.values()), (*SPACE, *eos)
        order = [*first, *({*range(256)}.difference(first, last)), *SPACE]
        self.order = np.array([symbol for symbol in order if symbol not in eos])
        """The symbols in the order in which they are tried."""
        own = [*(bytes([byte]) for byte in range(256)), *[b""] * len(special)]
        symbols = self._special.values()
        self._tokenizer = tokenizer_of(own, symbols, eos, lambda text: [*text.encode()])

    def matcher(self, source: GrammarSource) -> LLMatcher:
        """Compile a grammar for the search."""

        def symbol(match: re.Match[str]) -> str:
            return f"<[{self._special.get(int(match[1]), match[1])}]>"

        text = re.sub(r"<\[(\d+)\]>", symbol, source.text)
        return LLMatcher(self._tokenizer, text, log_level=0, limits=limits())

    def hints(self, source: GrammarSource) -> list[Symbols]:
        """Return symbols that end free text, which a search would not find."""
        texts = [json.loads(one).encode() for one in SUFFIX.findall(source.text)]
        reasoning = [symbol for token in source.end_of_reasoning for symbol in self.symbols(token)]
        return [tuple(one) for one in (reasoning, *texts) if one]

    def symbols(self, token: int) -> Symbols:
        """Return the symbols of a token."""
        found = self._special.get(token)
        return tuple(self._tokens[token]) if found is None else (found,)

    def follow(self, matcher: LLMatcher, token: int, end: End, most: int) -> End | None:
        """Return a part of `end` that is an end after a token, with up to `most` tokens."""
        own = self.symbols(token)
        for place in (0, *range(min(len(own), len(end.symbols)), 0, -1)):
            if end.needs[place] <= most and self.ends_with(matcher, own + end.symbols[place:]):
                return end.after(place)
        return None

    def ends_with(self, matcher: LLMatcher, symbols: Symbols) -> bool:
        """True if the value ends after these symbols."""
        if not symbols:
            return matcher.is_accepting()
        return matcher.validate_tokens([*symbols, self._eos]) > len(symbols)

    def divided(self, path: Symbols) -> End | None:
        """Divide symbols into the fewest tokens; None if the tokenizer lacks a byte."""
        needs, first = [0] * (len(path) + 1), [0] * len(path)
        for at in reversed(range(len(path))):
            found = [
                (1 + needs[end], at - end, token)
                for end in range(at + 1, min(at + self._longest, len(path)) + 1)
                if (token := self._of_symbols.get(path[at:end])) is not None
            ]
            if not found:
                return None
            needs[at], _, first[at] = min(found)
        return End(path, tuple(needs), tuple(first))


class _State(NamedTuple):
    matcher: LLMatcher
    path: Symbols
    allowed: bytes
    """A bit for each symbol that may follow."""


class Search:
    """A search for an end, over copies of a matcher.

    Args:
        closings: finds the tokens.
        matcher: the matcher of the first state; it is not changed.
        hints: see `Closings.hints`.
        states: maximum number of states.
    """

    def __init__(
        self, closings: Closings, matcher: LLMatcher, hints: Sequence[Symbols], states: int
    ) -> None:
        self._closings = closings
        self._start = _State(matcher, (), matcher.compute_bitmask())
        self._hints = hints
        self._states = states
        self._until = time.thread_time() + MOST_SECONDS

    def any(self) -> End | None:
        """Search depth-first for any end; None if none was found."""
        stack = [iter((self._start,))]
        while stack and self._continues():
            if (state := next(stack[-1], None)) is None:
                stack.pop()
            elif state.matcher.is_accepting() and (end := self._closings.divided(state.path)):
                return end
            else:
                stack.append(self._followers(state))
        return None

    def shortest(self, most: int, known: End | None = None) -> End | None:
        """Search for the shortest end, or one with up to `most` tokens; None if none was found.

        After any end is known, the first states are those from which a part of the known end leads
        to the shortest end. States are taken for equal if they allow the same symbols, the same
        part of the known end ended the value equally many symbols before, and the symbols since
        then are the same, except those that did not change what is allowed. A shorter end becomes
        the known one of another search.
        """
        best = known = known or self.any()
        if known is None or best is None:
            return None
        total, counter = len(known.symbols), itertools.count()
        lengths: dict[tuple[bytes, int, Symbols, int], int] = {}
        queue: list[tuple[int, int, _State, int, Symbols, int]]
        queue = [(total, next(counter), self._start, 0, (), 0)]
        while queue and self._continues() and best.needs[0] > most:
            least, _, state, place, changes, distance = heapq.heappop(queue)
            if least > len(best.symbols) + DETOUR:
                break
            for one in self._followers(state, MANY):
                fitting = self._fitting(one, known)
                if fitting is None:
                    at, beside = place, distance + 1
                    changed = one.allowed != state.allowed
                    since = (*changes, one.path[-1]) if changed else changes
                else:
                    at, since, beside = fitting, (), 0
                key, length = (one.allowed, at, since, beside), len(one.path)
                if length >= min(lengths.get(key, length + 1), len(best.symbols)):
                    continue
                lengths[key] = length
                heapq.heappush(queue, (length + total - at, next(counter), one, at, since, beside))
                if fitting is not None and length + total - at < len(best.symbols):
                    best = self._closings.divided(one.path + known.symbols[at:]) or best
        return best if best is known or best.needs[0] <= most else self.shortest(most, best)

    def _continues(self) -> bool:
        return self._states > 0 and time.thread_time() < self._until

    def _followers(self, state: _State, most: int | None = None) -> Iterator[_State]:
        """Yield the states that follow; those that allow the same symbols come last."""
        bits = np.unpackbits(np.frombuffer(state.allowed, dtype=np.uint8), bitorder="little")
        order, same = self._closings.order, list[_State]()
        symbols: list[int] = order[bits[order] > 0].tolist()
        for step in [*self._hints, *((symbol,) for symbol in symbols)][:most]:
            self._states -= 1
            if state.matcher.validate_tokens(list(step)) < len(step):  # far faster than an error
                continue
            matcher = state.matcher.deep_copy()
            if matcher.consume_tokens(list(step)):
                one = _State(matcher, state.path + step, matcher.compute_bitmask())
                if one.allowed == state.allowed:
                    same.append(one)
                else:
                    yield one
        yield from same

    def _fitting(self, state: _State, end: End) -> int | None:
        """Return the last place of an end from which on it ends the value of a state."""
        if state.matcher.is_accepting():
            return len(end.symbols)
        for place, symbol in reversed([*enumerate(end.symbols)]):
            may_follow = state.allowed[symbol >> 3] >> (symbol & 7) & 1
            if may_follow and self._closings.ends_with(state.matcher, end.symbols[place:]):
                return place
        return None


class Closing:
    """Keeps the end of one completion's value in reach.

    It knows an end of the value, and follows it while tokens are read. Once the end has almost as
    many tokens as are left, only tokens are allowed after which an end is known.

    Args:
        closings: finds ends.
        source: the grammar.
        most_new: maximum number of tokens of the completion.

    Raises:
        GrammarError: the shortest completion has more than `most_new` tokens.
    """

    def __init__(self, closings: Closings, source: GrammarSource, most_new: int) -> None:
        self._closings = closings
        self._matcher = closings.matcher(source)
        self._hints = closings.hints(source)
        self._left = most_new
        self._end = end = self._search(self._matcher, FIRST_STATES).shortest(most_new)
        shortest = 0 if end is None else end.needs[0]
        if shortest > most_new:
            raise GrammarError(
                f"the shortest completion found for the grammar has {shortest} tokens, and "
                f"this one may have {most_new}; choose max_tokens={shortest} or more, and "
                "a prompt that leaves room for them"
            )
        self._search_at = -1 if end is None else shortest + 4 * LONGEST_PART
        """Number of tokens left at which an end is searched if none is known."""
        self._fitting: dict[int, End] = {}
        """For tokens that the last mask allowed, an end after the token."""

    def advance(self, token: int) -> None:
        """Read a token that the grammar allows, before its matcher stops."""
        self._left -= 1
        end, self._end = self._end, self._fitting.get(token)
        if self._end is None and end is not None and self._left <= self._search_at:
            self._end = self._closings.follow(self._matcher, token, end, self._left)
        self._fitting = {}
        if not self._matcher.consume_tokens(list(self._closings.symbols(token))):
            self._end, self._search_at = None, -1

    def restrict(self, masked: Tensor) -> Tensor:
        """Forbid tokens after which the value could not be ended in time.

        Args:
            masked: logits, float32 `(vocab,)`, with -inf for tokens that the grammar forbids.
        """
        if self._end is None and self._left <= self._search_at:
            self._end = self._search(self._matcher, MORE_STATES).shortest(self._left)
            if self._end is None:
                self._search_at = self._left // 2
        end, left = self._end, self._left
        if end is None or not end.needs[0] <= left <= end.needs[0] + LONGEST_PART:
            return masked
        self._fitting = self._fits(masked, end)
        allowed = [*self._fitting, *(one for one in self._closings.ends if one < len(masked))]
        only = torch.full_like(masked, -torch.inf)
        only[allowed] = values = masked[allowed]
        if (values > -torch.inf).any():
            return only
        only[[*self._fitting][:1]] = 0.0  # of a forced text, the mask has only the usual tokens
        return only if self._fitting else masked

    def _fits(self, masked: Tensor, end: End) -> dict[int, End]:
        """Return the end after each of the likeliest tokens, if one is known and in time."""
        fitting: dict[int, End] = {}
        if end.symbols:
            fitting[end.first[0]] = end.after(len(self._closings.symbols(end.first[0])))
        values, tokens = masked.topk(min(CANDIDATES, len(masked)))
        for rank, (value, token) in enumerate(zip(values.tolist(), tokens.tolist(), strict=True)):
            if value == -torch.inf:
                break
            found = self._closings.follow(self._matcher, token, end, self._left - 1)
            if found is None and rank < SEARCHED:
                after = self._matcher.deep_copy()
                after.consume_tokens(list(self._closings.symbols(token)))
                found = self._search(after, FEW_STATES).any()
            if found is not None and found.needs[0] < self._left:
                fitting[token] = found
        return fitting

    def _search(self, matcher: LLMatcher, states: int) -> Search:
        return Search(self._closings, matcher, self._hints, states)
