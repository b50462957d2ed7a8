"""Texts as a decoder has read them: what its cache holds of each, and what it says comes next."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.generate.prefixes import PrefixTree
from workhorse.nn import Decoder
from workhorse.nn.cache.blocks import BLOCK, CachedText
from workhorse.nn.cache.paged_view import PagedView


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


def to_choose_from(logits: Tensor) -> Tensor:
    """The logits where tokens are chosen: on the CPU instead of MPS, which has no float64."""
    return logits.cpu() if logits.device.type == "mps" else logits


@dataclass(eq=False)
class Reading:
    """One text, as far as it was read.

    Attributes:
        tokens: what the cache has consumed.
        text: where it lies.
    """

    tokens: list[int]
    text: CachedText


class Reader:
    """Reads texts with a decoder, any number at once, each as far as it likes.

    A text that outgrows the context forgets all but the newer half of it, and is read anew as if it
    began there. Texts do so each at its own time, whatever the others do.

    Args:
        decoder: in evaluation mode.
        tokens: that all texts together may hold.
        texts: that there may be at a time.
        context: how long a text may get; left out: the decoder's context.
        slack: the newest tokens of a text that can be taken back, see `forget`.
        remembers: whether texts that were read are kept, as far as there is room, so that others
            that begin alike need not be read again.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        tokens: int,
        texts: int,
        context: int | None = None,
        slack: int = 0,
        remembers: bool = False,
    ) -> None:
        self.decoder = decoder
        self.context = context or decoder.max_seq_len
        self.slack = slack
        self.cache = decoder.new_paged_cache(tokens, texts, slack)
        self._device = decoder.embedding.tokens.weight.device
        if self._device.type == "meta":
            raise WorkhorseError("a decoder on the device meta has no weights; build it elsewhere")
        self._prefixes = PrefixTree(self.cache) if remembers else None
        self._view: PagedView | None = None

    def room_for(self, prompt: int, new: int) -> int:
        """What a text takes of the cache, in tokens: one of `prompt` tokens and `new` more."""
        return max(min(prompt + new, self.context) + self.slack, prompt)

    def open(self, prompt: Sequence[int], new: int) -> Reading:
        """Begin to read a text, or go on after what is known of it; its last token is left.

        Args:
            prompt: its first tokens, within the context.
            new: how many may follow.

        Raises:
            WorkhorseError: there is no room.
        """
        text = self.cache.open(self.room_for(len(prompt), new))
        known = 0
        if self._prefixes is not None:
            known = self._prefixes.adopt(text, prompt[:-1])
        return Reading(list(prompt[:known]), text)

    def fork(self, reading: Reading) -> Reading:
        """Another text that has the same beginning, without reading it again."""
        text = self.cache.open(reading.text.most)
        self.cache.adopt(text, reading.text.length, reading.text.tables)
        return Reading(list(reading.tokens), text)

    def select(self, readings: Sequence[Reading], index: Sequence[int]) -> list[Reading]:
        """Keep, reorder or repeat texts: text r becomes what text `index[r]` was."""
        for r in set(range(len(readings))).difference(index):
            self.close(readings[r])
        first = {r: n for n, r in reversed(list(enumerate(index)))}
        return [
            readings[r] if first[r] == n else self.fork(readings[r]) for n, r in enumerate(index)
        ]

    def restart(self, reading: Reading) -> None:
        """Let a text hold nothing, however it was left, and keep its room."""
        self.cache.clear(reading.text)
        reading.tokens = []
        self._view = None

    def close(self, reading: Reading) -> None:
        """Let a text go."""
        if self._prefixes is not None:
            self._prefixes.remember(reading.tokens, reading.text)
        self.cache.close(reading.text)

    def remember(self, reading: Reading) -> None:
        """Let others begin with the whole blocks of what was read of a text, which goes on."""
        if self._prefixes is not None:
            whole = len(reading.tokens) // BLOCK * BLOCK
            self._prefixes.remember(reading.tokens[:whole], reading.text)

    @torch.no_grad()
    def read(
        self, readings: Sequence[Reading], tokens: Sequence[Sequence[int]], last: int = 1
    ) -> Tensor:
        """Append tokens to each text, one at least, and read them.

        Returns:
            The logits after the last `last` columns, `(batch, last, vocab)`, ends aligned: what
            stands before the columns of a text's own tokens means nothing.
        """
        to_read = [list(some) for some in tokens]
        for n, reading in enumerate(readings):
            if len(reading.tokens) + len(to_read[n]) > self.context:
                to_read[n] = [*reading.tokens, *to_read[n]][-max(1, self.context // 2) :]
                reading.tokens = []
                self.cache.clear(reading.text)
                self._view = None
        starts = [len(reading.tokens) for reading in readings]
        padded, positions = left_pad(to_read, starts, self._device)
        logits = self._consume(padded, positions, self._view_of(readings), last)
        for reading, some in zip(readings, to_read, strict=True):
            reading.tokens += some
        return to_choose_from(logits)

    def forget(self, readings: Sequence[Reading], counts: Sequence[int]) -> None:
        """Take back the newest `counts[r]` tokens of each text r."""
        if not any(counts):
            return
        for reading, count in zip(readings, counts, strict=True):
            del reading.tokens[len(reading.tokens) - count :]
        self._view_of(readings).truncate([len(reading.tokens) for reading in readings])

    def _view_of(self, readings: Sequence[Reading]) -> PagedView:
        texts = [reading.text for reading in readings]
        if self._view is None or self._view.texts != texts:
            self._view = PagedView(self.cache, texts)
        return self._view

    def _consume(
        self, tokens: Tensor, positions: Tensor | None, view: PagedView, last: int
    ) -> Tensor:
        if last == 1:
            return self.decoder.next_logits(tokens, positions=positions, cache=view)[:, None]
        if last == tokens.shape[1]:
            return self.decoder(tokens, positions=positions, cache=view)
        x = self.decoder.hidden(tokens, positions=positions, cache=view)
        return self.decoder.unembed(x[:, -last:])


def wait(logits: Tensor) -> None:
    """Until the device has computed them."""
    logits[:1, :1, :1].cpu()
