"""Guesses by a smaller model, for speculative decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.generate.choose import check_finite
from workhorse.generate.reader import Reader, Reading
from workhorse.generate.row import Guess, Row
from workhorse.generate.samplers import History, all_finite, draw_from, greedy
from workhorse.generate.speculate import How
from workhorse.nn import Decoder


@dataclass(eq=False)
class _Followed:
    """How far the draft has read a row."""

    reading: Reading
    read: int = 0
    """Tokens of the row that were read before the last guess …"""
    guessed: list[int] = field(default_factory=list)
    """… and the guessed ones that were read after them."""


class Draft:
    """Guesses by a smaller decoder of the same vocabulary, through the same filters.

    Args:
        decoder: in evaluation mode when it guesses.
        of: reads the rows that are guessed for. A text beyond either context is read from its newer
            half on.
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
    def propose(self, rows: Sequence[Row], most: Sequence[int], how: How) -> list[Guess]:
        # The half of its context that the draft goes on from, when that is full, holds all guesses.
        most = [min(n, self._reader.context // 2) for n in most]
        guesses: list[list[int]] = [[] for _ in rows]
        drawn: list[list[Tensor]] = [[] for _ in rows]
        here = [r for r, n in enumerate(most) if n]
        if not here:
            return [Guess()] * len(rows)
        logits = self._caught_up([rows[r] for r in here])
        history = how.history(rows, logits.device)
        history = None if history is None else history.copy(range(len(rows)))
        while here:
            shaped = self._shaped(logits, how, None if history is None else history.copy(here))
            if how.config.samples:
                # A row's generator serves that row's own guesses only.
                uniforms = [rows[r].uniform() for r in here]
                weights = shaped.softmax(dim=-1, dtype=torch.float64)
                tokens = draw_from(weights, torch.tensor(uniforms, dtype=torch.float64))
                for r, probabilities in zip(here, weights, strict=True):
                    drawn[r].append(probabilities)
            else:
                tokens = greedy(shaped)
            if history is not None:
                history.add(tokens, here)
            for r, token in zip(here, tokens.tolist(), strict=True):
                guesses[r].append(token)
            here = [r for r in here if len(guesses[r]) < most[r]]
            if here:
                logits = self._read([rows[r] for r in here], [guesses[r][-1:] for r in here])
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
        """Read rows to their ends; those that nothing is guessed for wait.

        So what is known of a row never depends on its neighbours.
        """
        came: list[list[int]] = []
        back: list[int] = []
        for row in rows:
            followed = self._followed.get(row)
            if followed is None:
                text = row.tokens[-self._reader.context :]
                followed = _Followed(self._reader.open(text, row.left + row.config.speculate))
                self._followed[row] = followed
                came.append(text[len(followed.reading.tokens) :])
                back.append(0)
            else:
                new = row.tokens[followed.read :]
                agreed = _agreed(followed.guessed, new[:-1])  # the last logits are wanted anew
                came.append(new[agreed:])
                back.append(len(followed.guessed) - agreed)
            followed.read, followed.guessed = len(row.tokens), []
        self._reader.forget([self._followed[row].reading for row in rows], back)
        return self._read(rows, came)

    def _read(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> Tensor:
        """The logits after these, (batch, vocab)."""
        return self._reader.read([self._followed[row].reading for row in rows], tokens)[:, 0]

    def _shaped(self, logits: Tensor, how: How, history: History | None) -> Tensor:
        check_finite(all_finite(logits), "the draft")
        wider = self._vocab_size - logits.shape[-1]
        return how.shape(F.pad(logits, (0, wider), value=-torch.inf), history)


def _agreed(guessed: Sequence[int], came: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    pairs = enumerate(zip(guessed, came, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(guessed), len(came)))
