"""Guesses by a smaller model, for speculative decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.generate.reader import Reader, Reading
from workhorse.generate.row import Guess, Row
from workhorse.generate.sampling.choose import check_finite
from workhorse.generate.sampling.samplers import History, all_finite, draw_from, greedy
from workhorse.generate.speculation.speculate import SamplingRule
from workhorse.nn import Decoder


@dataclass(eq=False)
class _Followed:
    """A row as the draft has read it."""

    reading: Reading
    read: int = 0
    """How many of the row's own tokens were read before the last guess."""
    guessed: list[int] = field(default_factory=list)
    """The guessed tokens that were read after them."""


class Draft:
    """Guesses by a smaller decoder of the same vocabulary, with the same filters.

    Args:
        decoder: in evaluation mode when it guesses.
        of: the reader of the model's rows. A text that outgrows either context is read again from
            its newer half.
        remembers: see `Reader`.
    """

    def __init__(self, decoder: Decoder, of: Reader, *, remembers: bool = False) -> None:
        cache = of.cache
        self._reader = Reader(
            decoder,
            tokens=cache.tokens + cache.texts * (of.slack + 2),
            texts=cache.texts,
            context=min(decoder.max_seq_len, of.context),
            slack=of.slack,
            remembers=remembers,
        )
        self._vocab_size = of.decoder.config.vocab_size
        self._followed: dict[Row, _Followed] = {}

    @torch.no_grad()
    def propose(self, rows: Sequence[Row], most: Sequence[int], rule: SamplingRule) -> list[Guess]:
        # A draft whose context is full starts again with half of it free: a guess must fit there.
        most = [min(n, self._reader.context // 2) for n in most]
        guesses: list[list[int]] = [[] for _ in rows]
        drawn: list[list[Tensor]] = [[] for _ in rows]
        indices = [r for r, n in enumerate(most) if n]
        if not indices:
            return [Guess()] * len(rows)
        logits = self._caught_up([rows[r] for r in indices])
        history = rule.history(rows, logits.device)
        history = None if history is None else history.copy(range(len(rows)))
        while indices:
            shaped = self._shaped(logits, rule, None if history is None else history.copy(indices))
            if rule.config.samples:
                # A row's generator serves that row's own guesses only.
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
            if indices:
                logits = self._read([rows[r] for r in indices], [guesses[r][-1:] for r in indices])
        for row, guess in zip(rows, guesses, strict=True):
            if guess:
                self._followed[row].guessed = guess[:-1]
        return [
            Guess(tuple(guess), torch.stack(probabilities) if probabilities else None)
            for guess, probabilities in zip(guesses, drawn, strict=True)
        ]

    def leave(self, row: Row) -> None:
        if row in self._followed:
            self._reader.close(self._followed.pop(row).reading)

    def _caught_up(self, rows: Sequence[Row]) -> Tensor:
        """Read the rows that are guessed for to their ends; returns logits `(batch, vocab)`.

        What the draft has read of a row therefore never depends on the other rows.
        """
        came: list[list[int]] = []
        back: list[int] = []
        for row in rows:
            followed = self._followed.get(row)
            if followed is None:
                text = row.tokens[-self._reader.context :]
                followed = _Followed(self._reader.open(text, row.left + self._reader.slack))
                self._followed[row] = followed
                came.append(text[len(followed.reading.tokens) :])
                back.append(0)
            else:
                new = row.tokens[followed.read :]
                agreed = _agreed(followed.guessed, new[:-1])  # the last token is always read again
                came.append(new[agreed:])
                back.append(len(followed.guessed) - agreed)
            followed.read, followed.guessed = len(row.tokens), []
        self._reader.forget([self._followed[row].reading for row in rows], back)
        return self._read(rows, came)

    def _read(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> Tensor:
        """The logits after these tokens, `(batch, vocab)`."""
        return self._reader.read([self._followed[row].reading for row in rows], tokens)[:, 0]

    def _shaped(self, logits: Tensor, rule: SamplingRule, history: History | None) -> Tensor:
        check_finite(all_finite(logits), "the draft")
        wider = self._vocab_size - logits.shape[-1]
        return rule.shape(F.pad(logits, (0, wider), value=-torch.inf), history)


def _agreed(guessed: Sequence[int], came: Sequence[int]) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(guessed, came, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(guessed), len(came)))
