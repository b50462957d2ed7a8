"""Guesses by a smaller model, for speculative decoding."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.generate.batch import PrefixCache, RowBatch
from workhorse.generate.config import GenerationConfig
from workhorse.generate.row import Guess, Row
from workhorse.generate.samplers import History, Shaper, all_finite, draw_from, greedy
from workhorse.generate.speculate import slack_of
from workhorse.nn import Decoder


class Draft:
    """Guesses by a smaller decoder of the same vocabulary, through the same filters.

    Args:
        decoder: in evaluation mode. A text beyond its context is read from its newer half on.
        config: of the request.
        shape: what happens to logits, those of the target.
        vocab_size: of the target; the draft's own may be padded otherwise.
        prefix: the draft's cache of one conversation, for a single row.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: GenerationConfig,
        shape: Shaper,
        vocab_size: int,
        prefix: PrefixCache | None = None,
    ) -> None:
        self._decoder = decoder
        self._config = config
        self._shape = shape
        self._vocab_size = vocab_size
        self._prefix = prefix
        self._batch: RowBatch | None = None
        self._read: list[int] = []  # tokens of each row that were read before the last guess …
        self._guessed: list[list[int]] = []  # … and the guessed ones that were read after them

    @torch.no_grad()
    def propose(
        self, rows: Sequence[Row], most: Sequence[int], history: History | None
    ) -> list[Guess]:
        # The half of its context that the draft goes on from, when that is full, holds all guesses.
        most = [min(n, self._decoder.max_seq_len // 2) for n in most]
        batch = self._caught_up(rows, most)
        if history is not None:
            history = history.copy(range(len(rows)))
        guesses: list[list[int]] = [[] for _ in rows]
        probabilities = []
        for step in range(max(most)):
            if step:
                batch.extend(
                    [guess[-1:] if step < n else [] for guess, n in zip(guesses, most, strict=True)]
                )
            shaped = self._shaped(batch.logits, history)
            if self._config.samples:
                # A row's generator serves that row's own guesses only.
                uniforms = [
                    row.uniform() if step < n else 0.0 for row, n in zip(rows, most, strict=True)
                ]
                probabilities.append(shaped.softmax(dim=-1, dtype=torch.float64))
                tokens = draw_from(probabilities[-1], torch.tensor(uniforms, dtype=torch.float64))
            else:
                tokens = greedy(shaped)
            if history is not None:
                history.add(tokens)
            for guess, token, n in zip(guesses, tokens.tolist(), most, strict=True):
                if step < n:
                    guess.append(token)
        for r, guess in enumerate(guesses):
            if guess:
                self._guessed[r] = guess[:-1]
        drawn = torch.stack(probabilities, dim=1) if probabilities else None  # (rows, step, vocab)
        return [
            Guess(tuple(guess), None if drawn is None else drawn[r])
            for r, guess in enumerate(guesses)
        ]

    def select_rows(self, index: Sequence[int]) -> None:
        if self._batch is not None:
            self._batch.select_rows(index)
            self._read = [self._read[row] for row in index]
            self._guessed = [self._guessed[row] for row in index]

    def finish(self) -> None:
        """Leave what was read of a conversation for its next turn."""
        if self._prefix is not None and self._batch is not None:
            self._prefix.put(self._batch.cache, self._batch.rows[0])

    def _caught_up(self, rows: Sequence[Row], most: Sequence[int]) -> RowBatch:
        """Read those rows that something is to be guessed for to their ends.

        The others wait, so that what is known of a row never depends on its neighbours.
        """
        if self._batch is None:
            self._batch = RowBatch(
                self._decoder,
                [row.tokens[-self._decoder.max_seq_len :] for row in rows],
                self._config.max_new_tokens,
                self._prefix,
                slack=slack_of(self._config),
            )
            self._read = [len(row.tokens) for row in rows]
            self._guessed = [[] for _ in rows]
            return self._batch
        forgotten, new = [0] * len(rows), [[] for _ in rows]
        for r, row in enumerate(rows):
            if most[r]:
                came = row.tokens[self._read[r] :]
                agreed = _agreed(self._guessed[r], came[:-1])  # the last logits are wanted anew
                forgotten[r], new[r] = len(self._guessed[r]) - agreed, came[agreed:]
                self._read[r], self._guessed[r] = len(row.tokens), []
        self._batch.forget(forgotten)
        if any(new):
            self._batch.extend(new)
        return self._batch

    def _shaped(self, logits: Tensor, history: History | None) -> Tensor:
        if not all_finite(logits):
            raise WorkhorseError(
                "the draft's logits are not finite numbers; its weights are damaged"
            )
        wider = self._vocab_size - logits.shape[-1]
        return self._shape(F.pad(logits, (0, wider), value=-torch.inf), history)


def _agreed(guessed: Sequence[int], came: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    pairs = enumerate(zip(guessed, came, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(guessed), len(came)))
