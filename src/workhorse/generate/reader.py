"""Reads texts with a decoder and its paged cache: tokens in, logits of the next token out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.generate.interrupts import interrupts_let_through
from workhorse.generate.prefixes import PIECE, PrefixTree
from workhorse.nn import Decoder
from workhorse.nn.cache.blocks import BLOCK, CachedText
from workhorse.nn.cache.paged_view import PagedView


def left_pad(
    rows: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Left-pad rows of unequal length to one batch; row r begins at position `starts[r]`.

    Returns:
        Tokens, int64 `(batch, seq)`, and positions, int64 `(batch, seq)` with -1 for padding, or
        None if the rows have the same length.
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
    """The logits on the device where tokens are chosen: the CPU for MPS, which has no float64."""
    return logits.cpu() if logits.device.type == "mps" else logits


def room_for(prompt: int, new: int, context: int, slack: int = 0) -> int:
    """The tokens of a cache that a text of `prompt` tokens and `new` more needs."""
    return max(min(prompt + new, context) + slack, prompt)


@dataclass(eq=False)
class Reading:
    """A text being read.

    Attributes:
        tokens: those read so far.
        text: their keys and values in the cache.
        prompt: the length of an exact text's prompt; None: the text is not exact. The prompt of an
            exact text is read by itself, in pieces that end at multiples of `PIECE`, and all later
            tokens one by one, beside others' only where that changes no bit (`rows_apart`). So the
            bits of all results depend on the text alone.
        begin: how many tokens before these were forgotten, because the context was full.
    """

    tokens: list[int]
    text: CachedText
    prompt: int | None = None
    begin: int = 0

    @property
    def shareable(self) -> int:
        """How many of its tokens other texts may share; exact texts share with exact ones only."""
        if self.prompt is None:
            return len(self.tokens)
        return min(len(self.tokens), self.prompt) // PIECE * PIECE

    def is_step(self, tokens: Sequence[int]) -> bool:
        """Whether these are a single token after the prompt of an exact text."""
        exact = self.prompt is not None and len(self.tokens) >= self.prompt
        return exact and len(tokens) == 1

    def passes(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """The tokens to append, as an exact text's passes read them."""
        assert self.prompt is not None
        begin = len(self.tokens)
        at, end = begin, begin + len(tokens)
        while at < end:
            to = at + 1 if at >= self.prompt else min(at // PIECE * PIECE + PIECE, self.prompt)
            yield tokens[at - begin : to - begin]
            at = to


class Reader:
    """Reads any number of texts at once, each at its own position.

    A text that outgrows the context keeps only its newest tokens, as many as fill half of it, and
    is read again as if it began there. Other texts are not affected.

    Args:
        decoder: in evaluation mode.
        tokens: the most tokens that all texts together may hold.
        texts: the most texts that may be open at a time.
        context: the most tokens of one text; None: the decoder's context.
        slack: how many of a text's newest tokens can be taken back; see `forget`.
        remembers: whether closed texts stay in the cache while there is room, so that a text with
            the same prefix need not read it again.
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
        self._device = decoder.device
        if self._device.type == "meta":
            raise WorkhorseError(
                "a decoder on the device meta has no weights; build it on another device"
            )
        self._prefixes = PrefixTree(self.cache) if remembers else None
        self._view: PagedView | None = None
        self._ahead: dict[Reading, Tensor] = {}
        """Logits that `read_ahead` gave, until `read` takes them."""

    def can_read_ahead(self, readings: Sequence[Reading]) -> bool:
        """Whether `read_ahead` may follow.

        Closed texts are not remembered, and none of these is exact or fills the context.
        """
        return self._prefixes is None and all(
            one.prompt is None and len(one.tokens) < self.context for one in readings
        )

    def room_for(self, prompt: int, new: int) -> int:
        """The tokens to reserve in the cache for a text of `prompt` tokens and `new` more."""
        return room_for(prompt, new, self.context, self.slack)

    def open(self, prompt: Sequence[int], new: int, *, exact: bool = False) -> Reading:
        """Open a text with the remembered prefix of its prompt, which never has the last token.

        Args:
            prompt: its first tokens, within the context.
            new: how many tokens may follow.
            exact: whether the text is exact; see `Reading.prompt`.

        Raises:
            WorkhorseError: there is no room.
        """
        text = self.cache.open(self.room_for(len(prompt), new))
        known = 0
        if self._prefixes is not None:
            known = self._prefixes.adopt(text, prompt[:-1], exact=exact)
        return Reading(list(prompt[:known]), text, len(prompt) if exact else None)

    def fork(self, reading: Reading) -> Reading:
        """Open another text that shares everything read of this one."""
        text = self.cache.open(reading.text.most)
        self.cache.adopt(text, reading.text.length, reading.text.tables)
        return Reading(list(reading.tokens), text, reading.prompt, reading.begin)

    def select(self, readings: Sequence[Reading], index: Sequence[int]) -> list[Reading]:
        """Keep, reorder or repeat texts: text r becomes what text `index[r]` was."""
        for r in set(range(len(readings))).difference(index):
            self.close(readings[r])
        first = {r: n for n, r in reversed(list(enumerate(index)))}
        return [
            readings[r] if first[r] == n else self.fork(readings[r]) for n, r in enumerate(index)
        ]

    def restart(self, reading: Reading) -> None:
        """Empty a text, whatever state it was left in; it keeps its reserved room."""
        self.cache.clear(reading.text)
        reading.tokens = []
        self._view = None

    def close(self, reading: Reading) -> None:
        """Close a text, after remembering it if texts are remembered."""
        self._ahead.pop(reading, None)
        if not reading.text.is_closed:
            self._remember(reading, reading.shareable)
            self.cache.close(reading.text)

    def remember(self, reading: Reading) -> None:
        """Let other texts share the full blocks of a text that stays open."""
        self._remember(reading, reading.shareable // BLOCK * BLOCK)

    def _remember(self, reading: Reading, count: int) -> None:
        if self._prefixes is not None:
            exact = reading.prompt is not None
            self._prefixes.remember(reading.tokens[:count], reading.text, exact=exact)

    @torch.no_grad()
    def read_ahead(self, readings: Sequence[Reading], tokens: Tensor) -> None:
        """Begin to read the next token of each text while the host does not know it yet.

        The next `read` appends these tokens and gives their logits; until then a text can only be
        closed. If one was closed meanwhile, nothing is read.

        Args:
            readings: the texts, of which `can_read_ahead` holds; each has room in the cache.
            tokens: int64 (batch,); negative ones, of logits that are not finite, are read as 0.
        """
        if any(reading.text.is_closed for reading in readings):
            return
        view = self._view_of(readings)
        view.reserve([1] * len(readings))
        with interrupts_let_through():
            logits = self._consume(tokens.to(self._device).clamp(min=0)[:, None], None, view, 1)
        self._ahead = dict(zip(readings, to_choose_from(logits).split(1), strict=True))

    def forget_ahead(self) -> None:
        """Forget what was read ahead, after which the texts must be restarted."""
        self._ahead = {}

    @torch.no_grad()
    def read(
        self, readings: Sequence[Reading], tokens: Sequence[Sequence[int]], last: int = 1
    ) -> Tensor:
        """Append tokens to each text, at least one, and read them.

        Returns:
            The logits of the last `last` columns, `(batch, last, vocab)`, right-aligned; columns
            before a text's own tokens are meaningless.
        """
        if self._ahead:
            return self._read_with_ahead(readings, tokens, last)
        return self._read(readings, tokens, last)

    def _read(
        self, readings: Sequence[Reading], tokens: Sequence[Sequence[int]], last: int
    ) -> Tensor:
        """`read` of texts of which none was read ahead."""
        to_read = [list(new) for new in tokens]
        for n, reading in enumerate(readings):
            length = len(reading.tokens) + len(to_read[n])
            if length > self.context:
                to_read[n] = [*reading.tokens, *to_read[n]][-max(1, self.context // 2) :]
                reading.begin += length - len(to_read[n])
                reading.tokens = []
                reading.prompt = None if reading.prompt is None else len(to_read[n])
                self.cache.clear(reading.text)
                self._view = None
        together = [n for n, reading in enumerate(readings) if reading.prompt is None]
        if len(together) == len(readings):
            return to_choose_from(self._pass(readings, to_read, last))
        steps = [n for n, reading in enumerate(readings) if reading.is_step(to_read[n])]
        most = self.decoder.rows_apart
        batches = [steps[i : i + most] for i in range(0, len(steps), most)]
        logits: dict[int, Tensor] = {}
        for batch in [together, *batches] if together else batches:
            both = [readings[n] for n in batch], [to_read[n] for n in batch]
            logits |= zip(batch, self._pass(*both, last).split(1), strict=True)
        for n, reading in enumerate(readings):
            if n not in logits:
                for new in reading.passes(to_read[n]):
                    logits[n] = self._pass([reading], [new], last)
        return to_choose_from(torch.cat([logits[n] for n in range(len(readings))]))

    def _read_with_ahead(
        self, readings: Sequence[Reading], tokens: Sequence[Sequence[int]], last: int
    ) -> Tensor:
        """`read` of texts of which some were read ahead."""
        logits: dict[int, Tensor] = {}
        for n, reading in enumerate(readings):
            if reading in self._ahead:
                assert len(tokens[n]) == 1, "one token was read ahead"
                # the last column is the only one of its own
                logits[n] = self._ahead.pop(reading).expand(-1, last, -1)
                reading.tokens += tokens[n]
        others = [n for n in range(len(readings)) if n not in logits]
        if others:
            both = [readings[n] for n in others], [tokens[n] for n in others]
            logits |= zip(others, self._read(*both, last).split(1), strict=True)
        return torch.cat([logits[n] for n in range(len(readings))])

    def _pass(
        self, readings: Sequence[Reading], tokens: Sequence[Sequence[int]], last: int
    ) -> Tensor:
        """One pass of the decoder over these texts."""
        starts = [len(reading.tokens) for reading in readings]
        padded, positions = left_pad(tokens, starts, self._device)
        view = self._view_of(readings)
        view.reserve(list(map(len, tokens)))  # before what an interrupt may end
        with interrupts_let_through():
            logits = self._consume(padded, positions, view, last)
        for reading, new in zip(readings, tokens, strict=True):
            reading.tokens += new
        return logits

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
    """Wait until the device has computed the logits."""
    logits[:1, :1, :1].cpu()
