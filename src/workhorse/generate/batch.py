"""The rows that are decoded together: their tokens, their cache, and the next logits."""

import time
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.nn import Cache, Decoder


def left_pad(
    rows: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Rows of unequal length as one batch, ends aligned; row r goes on from position `starts[r]`.

    Returns:
        tokens, int64 `(batch, seq)`, and positions, int64 `(batch, seq)` with -1 for padding, or
        None when the rows have one length and need none.
    """
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return tokens, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    index = torch.arange(longest, device=device) - (longest - lengths)[:, None]
    first = torch.tensor(starts, device=device)[:, None]
    return tokens, torch.where(index >= 0, index + first, -1)


class PrefixCache:
    """The cache of one conversation, kept between requests.

    A request feeds only what follows the tokens that its prompt shares with those that were
    consumed already; the others are forgotten.
    """

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._tokens: tuple[int, ...] = ()

    @cached_property
    def draft(self) -> "PrefixCache":
        """The same for the draft of speculative decoding."""
        return PrefixCache()

    def take(
        self, prompt: Sequence[int], capacity: int, slack: int = 0
    ) -> tuple[Cache, int] | None:
        """The cache and how many of the prompt's tokens it holds; None where it cannot be used."""
        cache, held = self._cache, self._tokens
        self._cache, self._tokens = None, ()  # whoever takes it changes it
        if cache is None or cache.capacity < capacity or cache.slack < slack:
            return None
        differ = (n for n, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b)
        # The last token of a prompt is always fed: its logits are wanted.
        shared = min(next(differ, len(held)), len(prompt) - 1)
        try:
            cache.truncate([shared])
        except WorkhorseError:  # a window that has moved on
            return None
        return cache, shared

    def put(self, cache: Cache, tokens: Sequence[int]) -> None:
        """Keep `cache`, which has consumed `tokens`."""
        self._cache, self._tokens = cache, tuple(tokens)


def to_choose_from(logits: Tensor) -> Tensor:
    """The logits where tokens are chosen: on the CPU instead of MPS, which has no float64."""
    return logits.cpu() if logits.device.type == "mps" else logits


class RowBatch:
    """Rows of tokens, the cache that has consumed them, and the logits after them.

    A row that outgrows the context forgets all but the newer half of it, and is consumed anew as
    if it began there. Rows do so each at its own time, whatever their neighbours do.

    Args:
        decoder: in evaluation mode.
        rows: the tokens of each row, at least one and at most the context.
        room: tokens that may still be appended to each row.
        prefix: a conversation's cache to start from, for a single row.
        slack: tokens that may be appended beyond `room` and taken back, see `forget`.

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
        *,
        slack: int = 0,
    ) -> None:
        self._decoder = decoder
        self._device = decoder.embedding.tokens.weight.device
        self._context = decoder.max_seq_len
        self._slack = slack
        self.rows = [list(row) for row in rows]
        self._room = [room] * len(rows)
        self._start(prefix)

    def wait(self) -> float:
        """The time, in seconds of `time.perf_counter`, when the device has computed `logits`."""
        self.logits[:1, :1].cpu()
        return time.perf_counter()

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> None:
        """Append one token to each row and consume it."""
        self.extend([[token] for token in tokens])

    @torch.no_grad()
    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to each row, at least one in all, and consume them.

        Returns:
            The logits after each of them, `(batch, seq, vocab)`, ends aligned: what stands before
            the columns of a row's own tokens means nothing, nor do `logits` of a row without.
        """
        starts, to_read = [len(row) for row in self.rows], list(tokens)
        for r, (row, new) in enumerate(zip(self.rows, tokens, strict=True)):
            row.extend(new)
            self._room[r] -= len(new)
            if len(row) > self._context:
                del row[: -max(1, self._context // 2)]
                starts[r], to_read[r] = 0, row
        if 0 in starts:  # what the others hold stays as it is
            self.cache.truncate(starts)
        padded, positions = left_pad(to_read, starts, self._device)
        logits = self._consume(padded, positions, last=max(len(new) for new in tokens))
        self._leave_no_gap()
        return logits

    @torch.no_grad()
    def forget(self, counts: Sequence[int]) -> None:
        """Take back the newest `counts[r]` tokens of each row r; `logits` are of no use then."""
        if not any(counts):
            return
        for r, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            del row[len(row) - count :]
            self._room[r] += count
        self.cache.truncate([len(row) for row in self.rows])

    @torch.no_grad()
    def select_rows(self, index: Sequence[int]) -> None:
        """Keep, reorder or repeat rows: row r becomes what row `index[r]` was."""
        self.rows = [list(self.rows[row]) for row in index]
        self._room = [self._room[row] for row in index]
        where = torch.tensor(index, device=self._device)
        self.cache.select_rows(where)
        self.logits = self.logits[where.to(self.logits.device)]
        self._leave_no_gap()

    @torch.no_grad()
    def _start(self, prefix: PrefixCache | None) -> None:
        lengths = [len(row) for row in self.rows]
        to_come = zip(self._room, lengths, strict=True)
        capacity = self._slack + max(min(room + n, self._context) for room, n in to_come)
        capacity = max(capacity, *lengths)  # where the last token is not to be consumed
        kept = prefix.take(self.rows[0], capacity, self._slack) if prefix else None
        if kept is None:
            # A conversation goes on, so its cache is made for the whole context at once.
            room = max(capacity, self._context + self._slack) if prefix else capacity
            kept = self._decoder.new_cache(len(self.rows), room, self._slack), 0
        self.cache, held = kept
        new = [row[held:] for row in self.rows]
        tokens, positions = left_pad(new, [held] * len(new), self._device)
        self._consume(tokens, positions, last=1)

    def _leave_no_gap(self) -> None:
        """Count the columns of the longest row: not its padding, nor those of rows that left."""
        lengths = [len(row) for row in self.rows]
        if self.cache.length > max(lengths):
            self.cache.truncate(lengths)

    def _consume(self, tokens: Tensor, positions: Tensor | None, last: int) -> Tensor:
        """Logits of the last columns, `(batch, last, vocab)`."""
        if last == 1:
            logits = self._decoder.next_logits(tokens, positions=positions, cache=self.cache)
            self.logits = to_choose_from(logits)
            return self.logits[:, None]
        if last == tokens.shape[1]:
            logits = self._decoder(tokens, positions=positions, cache=self.cache)
        else:
            x = self._decoder.hidden(tokens, positions=positions, cache=self.cache)
            logits = self._decoder.unembed(x[:, -last:])
        logits = to_choose_from(logits)
        self.logits = logits[:, -1]
        return logits
