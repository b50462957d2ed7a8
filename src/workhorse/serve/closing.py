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

MOST_SECONDS, FIRST_STATES, MORE_STATES, FEW_STATES = 2.0, 8000, 2000, 100
"""Maximum CPU time of a search, which only slow grammars reach, and maximum numbers of its states:
before the first token, after the known end was left, and for a token that may be chosen."""
DIRECT_STATES = 500
"""Maximum number of states of a search that does not avoid the loops of a grammar."""
LONGEST_PART = 256
"""Number of tokens by which a single token may make the end of a value longer."""
SEARCHED, CANDIDATES = 2, 32
"""Near the end, only the likeliest `CANDIDATES` tokens are allowed. If one of the likeliest
`SEARCHED` leaves the known end, another end is searched."""
MANY = DETOUR = 32
"""Maximum numbers of symbols to try in a state beside those of the known end, and to add to an end
to make a later part shorter. Only the search for the shortest end has these limits."""
COMMON, SPACE = b"}])>\"',:;./|-_=*<01aA", b"\\ \n\t"
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
    names = [f"<|{one}|>".encode() if one in special else tokens[one] for one in range(len(tokens))]

    class Vocabulary:
        eos_token_id, bos_token_id = ends[0], None
        special_token_ids = sorted(special)
        tokens = names
        __call__ = staticmethod(encode)

    return LLTokenizer(TokenizerWrapper(Vocabulary()), eos_token=list(ends))


class End(NamedTuple):
    """Symbols that end a value; for each place, the fewest tokens from it on, and their first."""

    symbols: Symbols
    needs: tuple[int, ...]
    first: tuple[int, ...]

    def after(self, place: int) -> "End":
        """Return the end without its first symbols."""
        return End(self.symbols[place:], self.needs[place:], self.first[place:])


class Closings:
    """The vocabulary of ends of values, for one tokenizer.

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
        self._of_symbols = {self.symbols(token): token for token in range(len(tokens))}
        self._longest = max(map(len, self._of_symbols))
        symbols, eos = self._special.values(), [self._special[end] for end in ends]
        self._eos = eos[0]
        first = [*COMMON, *({*symbols}.difference(eos))]
        self.order = np.array([*first, *({*range(256)}.difference(first, SPACE)), *SPACE])
        """The symbols in the order in which they are tried."""
        own = [*(bytes([byte]) for byte in range(256)), *[b""] * len(special)]
        self._tokenizer = tokenizer_of(own, symbols, eos, lambda text: [*text.encode()])

    def read(self, source: GrammarSource) -> tuple[LLMatcher, list[Symbols]]:
        """Compile a grammar. Also return symbols that end free text: a search cannot find them."""

        def symbol(match: re.Match[str]) -> str:
            return f"<[{self._special.get(int(match[1]), match[1])}]>"

        text = re.sub(r"<\[(\d+)\]>", symbol, source.text)
        hints = [sum(map(self.symbols, source.end_of_reasoning), ())]
        hints += [tuple(json.loads(one).encode()) for one in SUFFIX.findall(source.text)]
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits())
        return matcher, [one for one in hints if one]

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


class _Search:
    """A search for an end, over up to `states` copies of a matcher."""

    def __init__(
        self, closings: Closings, matcher: LLMatcher, hints: Sequence[Symbols], states: int
    ) -> None:
        self._closings, self._hints, self._states = closings, hints, states
        self._start = _State(matcher, (), matcher.compute_bitmask())
        self._until = time.thread_time() + MOST_SECONDS
        self._seen: set[bytes] | None = None
        """The combinations of symbols that states have allowed; None: not recorded."""

    def any(self) -> End | None:
        """Search depth-first for any end; None if none was found.

        If an order that gives short ends finds none, one that leaves the loops of a grammar is
        used: repeated characters, escapes in a string, and nested values.
        """
        states = self._states
        tries = (min(states // 2, DIRECT_STATES), None), (states, {self._start.allowed})
        for self._states, self._seen in tries:
            stack = [iter((self._start,))]
            while stack:
                if (state := next(stack[-1], None)) is None:
                    stack.pop()
                elif state.matcher.is_accepting() and (end := self._closings.divided(state.path)):
                    return end
                else:
                    stack.append(self._followers(state))
        return None

    def shortest(self, most: int, known: End | None = None) -> End | None:
        """Search for the shortest end, or one with up to `most` tokens; None if none was found.

        The first states are those from which a part of the known end leads to the shortest end.
        States are equal if they allow the same symbols, and have in common: the part of the known
        end that last ended the value, the number of symbols since then, and those of the symbols
        that changed what is allowed. A shorter end becomes the known end of another search.
        """
        known = known or self.any()
        if known is None:
            return None
        self._seen, tried = None, {*known.symbols}
        total, counter, best = len(known.symbols), itertools.count(1), known
        lengths: dict[tuple[bytes, int, Symbols, int], int] = {}
        queue: list[tuple[int, int, _State, int, Symbols, int]]
        queue = [(total, 0, self._start, 0, (), 0)]
        while queue and best.needs[0] > most:
            least, _, state, place, changes, beside = heapq.heappop(queue)
            if least > len(best.symbols) + DETOUR:
                break
            for one in self._followers(state, tried):
                at, since, distance = self._fitting(one, known), (), 0
                if at is None:
                    at, since, distance = place, changes, beside + 1
                    if one.allowed != state.allowed:
                        since = (*changes, one.path[-1])
                key, length = (one.allowed, at, since, distance), len(one.path)
                if length >= min(lengths.get(key, length + 1), len(best.symbols)):
                    continue
                lengths[key], least = length, length + total - at
                heapq.heappush(queue, (least, next(counter), one, at, since, distance))
                if not distance and least < len(best.symbols):
                    best = self._closings.divided(one.path + known.symbols[at:]) or best
        return best if best is known or best.needs[0] <= most else self.shortest(most, best)

    def _followers(self, state: _State, tried: Collection[int] | None = None) -> Iterator[_State]:
        """Yield the states that follow; those that allow the same symbols come last.

        If `tried` is given, only its symbols and `MANY` others are tried.
        """
        bits = np.unpackbits(np.frombuffer(state.allowed, dtype=np.uint8), bitorder="little")
        order, known, same = self._closings.order, list[_State](), list[_State]()
        steps = [*self._hints, *zip(order[bits[order] > 0].tolist())]
        if tried is not None:
            steps = [one for at, one in enumerate(steps) if at < MANY or one[0] in tried]
        for step in steps:
            if self._states <= 0 or time.thread_time() > self._until:
                return
            self._states -= 1
            if len(step) > 1 and state.matcher.validate_tokens(list(step)) < len(step):
                continue  # far faster than an error
            matcher = state.matcher.deep_copy()
            if matcher.consume_tokens(list(step)):
                one = _State(matcher, state.path + step, matcher.compute_bitmask())
                if one.allowed == state.allowed:
                    same.append(one)
                elif self._seen is None or one.allowed not in self._seen:
                    if self._seen is not None:
                        self._seen.add(one.allowed)
                    yield one
                else:
                    known.append(one)
        yield from (*known, *same)

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
        self._closings, self._left = closings, most_new
        self._matcher, self._hints = closings.read(source)
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
        end = self._end
        if end is None or not end.needs[0] <= self._left <= end.needs[0] + LONGEST_PART:
            return masked
        self._fitting = self._fits(masked, end)
        allowed = [*self._fitting, *(one for one in self._closings.ends if one < len(masked))]
        only = torch.full_like(masked, -torch.inf)
        only[allowed] = values = masked[allowed]
        if (values > -torch.inf).any():
            return only
        only[[*self._fitting][:1]] = 0.0  # the mask of forced text has only its usual tokens
        return only if self._fitting else masked

    def _fits(self, masked: Tensor, end: End) -> dict[int, End]:
        """Return the end after each of the likeliest tokens, if one is known and in time."""
        fitting: dict[int, End] = {}
        if end.symbols:
            fitting[end.first[0]] = end.after(len(self._closings.symbols(end.first[0])))
        values, tokens = masked.topk(min(CANDIDATES, len(masked)))
        for rank, token in enumerate(tokens[values > -torch.inf].tolist()):
            found = self._closings.follow(self._matcher, token, end, self._left - 1)
            if found is None and rank < SEARCHED:
                after = self._matcher.deep_copy()
                after.consume_tokens(list(self._closings.symbols(token)))
                found = self._search(after, FEW_STATES).any()
            if found is not None and found.needs[0] < self._left:
                fitting[token] = found
        return fitting

    def _search(self, matcher: LLMatcher, states: int) -> _Search:
        return _Search(self._closings, matcher, self._hints, states)
