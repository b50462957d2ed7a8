"""The rows that are decoded together: their tokens, their cache, and the next logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workhorse.nn import Cache, Decoder


def left_pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of unequal length as one batch, ends aligned.

    Returns:
        tokens, int64 `(batch, seq)`, and positions, int64 `(batch, seq)` with -1 for padding, or
        None when the rows have one length and need none.
    """
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return tokens, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    positions = torch.arange(longest, device=device) - (longest - lengths)[:, None]
    return tokens, positions.clamp(min=-1)


class PrefixCache:
    """The cache of one conversation, kept between requests.

    A request whose prompt begins with the tokens that were already consumed feeds only the rest;
    any other prompt starts anew.
    """

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._tokens: tuple[int, ...] = ()

    def take(self, prompt: Sequence[int], capacity: int) -> tuple[Cache, int] | None:
        """The cache and how many of the prompt's tokens it holds, where both fit; else None."""
        cache, held = self._cache, self._tokens
        self._cache, self._tokens = None, ()  # whoever takes it changes it
        reusable = (
            cache is not None
            and cache.capacity >= capacity
            and len(held) < len(prompt)
            and tuple(prompt[: len(held)]) == held
        )
        return (cache, len(held)) if cache is not None and reusable else None

    def put(self, cache: Cache, tokens: Sequence[int]) -> None:
        """Keep `cache`, which has consumed `tokens`."""
        self._cache, self._tokens = cache, tuple(tokens)


class RowBatch:
    """Rows of tokens, the cache that has consumed them, and the logits after them.

    A row that outgrows the context forgets all but the newer half of it, and is consumed anew as
    if it began there. Rows do so each at its own time, whatever their neighbours do.

    Args:
        decoder: in evaluation mode.
        rows: the tokens of each row, at least one and at most the context.
        room: tokens that may still be appended to each row.
        prefix: a conversation's cache to start from, for a single row.

    Attributes:
        rows: what the cache has consumed of each row.
        logits: `(batch, vocab)`, after the last token of each row.
    """

    def __init__(
        self,
        decoder: Decoder,
        rows: Sequence[Sequence[int]],
        room: int,
        prefix: PrefixCache | None = None,
    ) -> None:
        self._decoder = decoder
        self._device = decoder.embedding.tokens.weight.device
        self._context = decoder.max_seq_len
        self._room = room
        self.rows = [list(row) for row in rows]
        self._start(prefix)

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> None:
        """Append one token to each row and consume it."""
        self._room -= 1
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)
        if all(len(row) <= self._context for row in self.rows):
            self._consume(torch.tensor(tokens, device=self._device)[:, None], None)
            return
        half = -max(1, self._context // 2)
        self.rows = [row if len(row) <= self._context else row[half:] for row in self.rows]
        self._start()

    @torch.no_grad()
    def select_rows(self, index: Sequence[int]) -> None:
        """Keep, reorder or repeat rows: row r becomes what row `index[r]` was."""
        self.rows = [list(self.rows[row]) for row in index]
        where = torch.tensor(index, device=self._device)
        self.cache.select_rows(where)
        self.logits = self.logits[where]

    @torch.no_grad()
    def _start(self, prefix: PrefixCache | None = None) -> None:
        lengths = [len(row) for row in self.rows]
        # Columns, not tokens: a short row beside a long one starts late and may go on for longer.
        capacity = max(lengths) + min(self._room, self._context - min(lengths))
        kept = prefix.take(self.rows[0], capacity) if prefix else None
        # A conversation goes on, so its cache is made for the whole context at once.
        room = max(capacity, self._context) if prefix else max(capacity, 1)
        self.cache, held = kept or (self._decoder.new_cache(len(self.rows), room), 0)
        tokens, positions = left_pad([row[held:] for row in self.rows], self._device)
        self._consume(tokens, positions)

    def _consume(self, tokens: Tensor, positions: Tensor | None) -> None:
        x = self._decoder.hidden(tokens, positions=positions, cache=self.cache)
        self.logits = self._decoder.unembed(x[:, -1:])[:, 0]
