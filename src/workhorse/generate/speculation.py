"""Speculative decoding: guesses from a draft model or from the sequence, and their verification.

If a pass of the model is bound by memory bandwidth, several tokens cost little more than one. A
pass processes the last token and the guesses after it, and returns the logits after each token.
Tokens are chosen from these logits as usual, as long as the chosen token equals the guessed one.
The remaining guesses are removed. Guesses change the speed, never the distribution of completions:

- A guess that was not drawn at random (`PromptLookup`, or greedy decoding) is only compared with
  the chosen token. The completion is the same as without guesses and with the same seed.
- A guess drawn from the draft model's distribution is accepted or replaced as in 2211.17192 §2.3
  and 2302.01318 §2 (`after_guess`), which accepts more guesses. With the same seed, the completion
  differs from the one without guesses, but it comes from exactly the same distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.execute.backend import Backend
from workhorse.generate.request import Guess, Request
from workhorse.generate.runner import Chunk, Runner
from workhorse.generate.sampling import (
    Chooser,
    History,
    all_finite,
    check_finite,
    draw_from,
    greedy,
)
from workhorse.generate.sequence import TokenSequence
from workhorse.nn.cache.paged import PagedCache


class Proposer(Protocol):
    """Guesses the next tokens of requests."""

    def propose(self, rows: Sequence[Request], most: Sequence[int], rule: Chooser) -> list[Guess]:
        """Return guesses for the next pass, up to `most[r]` tokens for request r."""
        ...

    def leave(self, row: Request) -> None:
        """Drop a request that has ended or was preempted."""
        ...

    def reset(self) -> None:
        """Drop all requests; must also work after an exception in another method."""
        ...


LONGEST_MATCH, SHORTEST_MATCH = 3, 2  # a single token recurs too often to predict the next


class PromptLookup:
    """Guesses the tokens that followed an earlier occurrence of the last 2 or 3 tokens.

    The latest occurrence is used. Source: Saxena, "Prompt Lookup Decoding" (2023), which uses the
    first one.
    """

    def __init__(self) -> None:
        self._indices: dict[Request, _Index] = {}

    def propose(self, rows: Sequence[Request], most: Sequence[int], rule: Chooser) -> list[Guess]:
        del rule
        return [
            Guess(self._indices.setdefault(row, _Index()).continuation(row.tokens, n))
            for row, n in zip(rows, most, strict=True)
        ]

    def leave(self, row: Request) -> None:
        self._indices.pop(row, None)

    def reset(self) -> None:
        self._indices.clear()


class _Index:
    """Index of the last occurrence of each n-gram in a growing token sequence."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._read = 0  # n-grams that end up to here are in the index

    def continuation(self, text: Sequence[int], n: int) -> tuple[int, ...]:
        """Guess the next n tokens of a sequence; none if its last tokens did not occur before."""
        # The next call indexes the n-grams at the end: no token follows them yet.
        for end in range(self._read + 1, len(text)):
            for gram in _grams_before(text, end):
                self._ends[gram] = end
        self._read = max(self._read, len(text) - 1)
        for gram in _grams_before(text, len(text)):
            if (start := self._ends.get(gram)) is not None:
                # Past the end of the sequence the guess continues periodically.
                period = len(text) - start
                return tuple(text[start + step % period] for step in range(n))
        return ()


def _grams_before(text: Sequence[int], end: int) -> list[tuple[int, ...]]:
    """Return the n-grams that end just before index `end` of a sequence, longest first."""
    longest = min(LONGEST_MATCH, end)
    return [tuple(text[end - n : end]) for n in range(longest, SHORTEST_MATCH - 1, -1)]


@dataclass(eq=False)
class _Followed:
    """A request's tokens in the cache of the draft model."""

    sequence: TokenSequence
    read: int
    """Number of tokens, including the prompt, that the request had at its last guess."""

    def catch_up(self, row: Request, cache: PagedCache) -> None:
        """Replace the guesses by the tokens that the request got since then."""
        self.sequence.follow(row.tokens[self.read :], cache)
        self.read = len(row.tokens)


class Draft:
    """Guesses from a smaller decoder with the same vocabulary and the same sampling filters.

    Args:
        draft: the draft model, in evaluation mode when it guesses.
        of: the runner of the model that verifies the guesses. If a sequence exceeds the context of
            the model or of the draft, its older half is dropped and the rest processed again.
        prefix_caching: see `Engine`.
    """

    def __init__(self, draft: Backend, of: Runner, *, prefix_caching: bool = False) -> None:
        cache = of.cache
        self._context = min(draft.decoder.max_seq_len, of.decoder.max_seq_len)
        self._runner = Runner(
            draft,
            # Guesses, and up to two tokens that the model has not processed.
            tokens=cache.tokens + cache.sequences * (of.slack + 2),
            sequences=cache.sequences,
            slack=of.slack,
        )
        self._prefix_caching = prefix_caching
        self._vocab_size = of.decoder.config.vocab_size
        self._followed: dict[Request, _Followed] = {}

    def propose(self, rows: Sequence[Request], most: Sequence[int], rule: Chooser) -> list[Guess]:
        if not self._holds([*rows, *self._followed]):
            for row in set(self._followed).difference(rows):
                self.leave(row)
        if len(rows) == 1 or self._holds(rows):
            return self._propose(rows, most, rule)
        # Too many requests for the cache. Guess for one half after the other: guesses must not
        # depend on the number of requests.
        half, guesses = len(rows) // 2, list[Guess]()
        for part in (slice(half), slice(half, None)):
            guesses += self.propose(rows[part], most[part], rule)
        return guesses

    def _holds(self, rows: Sequence[Request]) -> bool:
        """True if the cache has room for all tokens and guesses of these requests."""
        slack, context = self._runner.slack, self._context
        return self._runner.cache.holds(
            *(min(len(row.tokens) + slack, context) + slack for row in set(rows))
        )

    @torch.no_grad()
    def _propose(self, rows: Sequence[Request], most: Sequence[int], rule: Chooser) -> list[Guess]:
        # When the draft's context is full, half of it is freed: a guess must fit into that half.
        most = [min(n, self._context // 2) for n in most]
        guesses: list[list[int]] = [[] for _ in rows]
        drawn: list[list[Tensor]] = [[] for _ in rows]
        indices = [r for r, n in enumerate(most) if n]
        if not indices:
            return [Guess()] * len(rows)
        logits = self._catch_up([rows[r] for r in indices])
        history = rule.history(rows, logits.device)
        history = None if history is None else history.copy(range(len(rows)))
        while indices:
            past = None if history is None else history.copy(indices)
            shaped = self._shaped(logits, [rows[r] for r in indices], rule, past)
            if rule.config.samples:
                # Each request uses its own generator, so guesses do not depend on the batch.
                uniforms = [rows[r].uniform() for r in indices]
                weights = shaped.softmax(dim=-1, dtype=torch.float64)
                tokens = draw_from(weights, torch.tensor(uniforms, dtype=torch.float64))
                for r, probabilities in zip(indices, weights, strict=True):
                    drawn[r].append(probabilities)
            else:
                tokens = greedy(shaped)
            if history is not None:
                history.add(tokens, indices)
            for r, token in zip(indices, tokens.tolist(), strict=True):
                guesses[r].append(token)
            indices = [r for r in indices if len(guesses[r]) < most[r]]
            for r in indices:
                self._followed[rows[r]].sequence.guess(guesses[r][-1:])
            if indices:
                logits = self._read([rows[r] for r in indices])
        return [
            Guess(tuple(guess), torch.stack(probabilities) if probabilities else None)
            for guess, probabilities in zip(guesses, drawn, strict=True)
        ]

    def leave(self, row: Request) -> None:
        if row in self._followed:
            self._followed.pop(row).sequence.clear(self._runner.cache)

    def reset(self) -> None:
        self._followed.clear()
        self._runner.reset()

    def _catch_up(self, rows: Sequence[Request]) -> Tensor:
        """Let the draft process all tokens of these requests that it has not processed yet.

        Returns the logits after the last token of each request, `(batch, vocab)`.
        """
        cache = self._runner.cache
        for row in rows:
            followed = self._followed.get(row)
            if followed is None:
                tokens = row.tokens[-self._context :]
                followed = self._followed[row] = _Followed(
                    TokenSequence(tokens, cache), len(row.tokens)
                )
                if self._prefix_caching:
                    followed.sequence.adopt_prefix(cache)
            else:
                followed.catch_up(row, cache)
        return self._read(rows)

    def _read(self, rows: Sequence[Request]) -> Tensor:
        """Let the draft process all tokens that are not in its cache yet.

        Returns the logits after the last token of each request, `(batch, vocab)`.
        """
        sequences = [self._followed[row].sequence for row in rows]
        for sequence in sequences:
            if self._prefix_caching:
                sequence.label_prefix(self._runner.cache)
            if len(sequence.tokens) > self._context:
                sequence.drop_oldest(self._context, self._runner.cache)
        logits = self._runner.run([Chunk(sequence, sequence.pending) for sequence in sequences])
        return logits.of[logits.last]

    def _shaped(
        self,
        logits: Tensor,
        rows: Sequence[Request],
        rule: Chooser,
        history: History | None,
    ) -> Tensor:
        if not all_finite(logits):
            for row, its_logits in zip(rows, logits, strict=True):
                if not all_finite(its_logits[None]):
                    row.fail()
            check_finite(False, "the draft")
        wider = self._vocab_size - logits.shape[-1]
        return rule.shape(F.pad(logits, (0, wider), value=-torch.inf), history)
