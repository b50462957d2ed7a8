"""Runs a decoder over sequences in a paged cache: tokens in, logits of the next tokens out."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.generate.sequence import TokenSequence
from workhorse.nn import Decoder
from workhorse.nn.cache.paged import CachedSequence
from workhorse.nn.cache.paged_view import PackedView, PagedView


class Chunk(NamedTuple):
    """The next tokens of a sequence to read."""

    sequence: TokenSequence
    count: int
    wanted: int = 1
    """How many of these tokens, the last ones, to compute the logits after."""


class Logits(NamedTuple):
    """Logits after the wanted tokens of some chunks."""

    of: Tensor
    """(tokens, vocab)."""
    last: list[int]
    """For each chunk, the row of the logits after its last token; meaningless if none is wanted."""


def on_sampling_device(logits: Tensor) -> Tensor:
    """The logits on the device where tokens are chosen: the CPU for MPS, which has no float64."""
    return logits.cpu() if logits.device.type == "mps" else logits


def room_for(prompt: int, new: int, context: int, slack: int = 0) -> int:
    """The number of tokens in a cache that a prompt and up to `new` more tokens need."""
    return max(min(prompt + new, context) + slack, prompt)


class Runner:
    """A decoder and its paged cache.

    All tokens of a call are read in one packed pass, without padding, except those of exact
    sequences; see `TokenSequence`.

    Args:
        decoder: in evaluation mode.
        tokens: the maximum number of tokens of all sequences together.
        sequences: the maximum number of sequences at a time.
        slack: how many of a sequence's newest tokens can be taken back.

    Attributes:
        is_changing: True while tables change. An exception then leaves them half changed, and only
            `reset` helps.
        is_in_pass: True during a pass. An exception then leaves the sequences of the pass without
            valid keys and values.
    """

    def __init__(self, decoder: Decoder, *, tokens: int, sequences: int, slack: int = 0) -> None:
        self.decoder = decoder
        self.slack = slack
        self.cache = decoder.new_paged_cache(tokens, sequences, slack)
        self.is_changing = False
        self.is_in_pass = False
        self._device = decoder.device
        if self._device.type == "meta":
            raise WorkhorseError(
                "a decoder on the device meta has no weights; build it on another device"
            )
        self._views: dict[tuple[CachedSequence, ...], PagedView] = {}

    @contextmanager
    def changing(self) -> Generator[None]:
        """A block in which tables change. After an exception `is_changing` stays True."""
        self.is_changing = True
        yield
        self.is_changing = False

    def reset(self) -> None:
        """Release all blocks and forget all prefixes; no sequence may be used afterwards."""
        self.cache.reset()
        self._views = {}

    def select(
        self, sequences: Sequence[TokenSequence], index: Sequence[int]
    ) -> list[TokenSequence]:
        """Keep, reorder or repeat sequences: sequence n becomes what sequence `index[n]` was."""
        for n in set(range(len(sequences))).difference(index):
            sequences[n].clear(self.cache)
        first = {of: n for n, of in reversed(list(enumerate(index)))}
        return [
            sequences[of] if first[of] == n else sequences[of].fork(self.cache)
            for n, of in enumerate(index)
        ]

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk]) -> Logits:
        """Read tokens.

        Args:
            chunks: of different sequences, each of at least one token, or of none if the sequence
                has logits `ahead`. Those of exact sequences are no longer than
                `TokenSequence.chunk`.
        """
        if all(chunk.sequence.prompt is None and chunk.count for chunk in chunks):
            return self._pass(chunks)
        found: dict[int, Tensor] = {}
        packed = [n for n, one in enumerate(chunks) if one.count and one.sequence.prompt is None]
        steps = [n for n, one in enumerate(chunks) if one.count == 1 and one.sequence.is_step]
        most = self.decoder.invariant_batch
        batches = [steps[start : start + most] for start in range(0, len(steps), most)]
        for batch in [packed, *batches] if packed else batches:
            logits = self._pass([chunks[n] for n in batch])
            for n, last in zip(batch, logits.last, strict=True):
                found[n] = logits.of[last + 1 - chunks[n].wanted : last + 1]
        for n, (sequence, count, wanted) in enumerate(chunks):
            if not count:
                assert sequence.ahead is not None, "a chunk without tokens was read ahead"
                found[n], sequence.ahead = sequence.ahead, None
            elif n not in found:
                found[n] = self._pass([Chunk(sequence, count)]).of[:wanted]
        lasts, rows = list[int](), 0
        for n in range(len(chunks)):
            rows += len(found[n])
            lasts.append(rows - 1)
        return Logits(torch.cat([found[n] for n in range(len(chunks))]), lasts)

    @torch.no_grad()
    def run_ahead(self, sequences: Sequence[TokenSequence], tokens: Tensor) -> None:
        """Begin to read the next token of each sequence before the host knows it.

        The logits are kept as `TokenSequence.ahead`.

        Args:
            sequences: have room in the cache and in the context, and are not exact.
            tokens: int64 (batch,); negative ones, of logits that are not finite, are read as 0.
        """
        with self.changing():
            view = self._view([sequence.cached for sequence in sequences])
            view.reserve([1] * len(sequences))
        read = tokens.to(self._device).clamp(min=0)[:, None]
        self.is_in_pass = True
        logits = on_sampling_device(self.decoder.next_logits(read, cache=view))
        self.is_in_pass = False
        for sequence, row in zip(sequences, logits.split(1), strict=True):
            sequence.ahead = row

    def _pass(self, chunks: Sequence[Chunk]) -> Logits:
        """Read tokens in one pass."""
        batches: dict[tuple[int, bool], list[int]] = {}
        for n, (sequence, count, _) in enumerate(chunks):
            batches.setdefault((count, sequence.cached.length == 0), []).append(n)
        order = [n for batch in batches.values() for n in batch]
        tokens = [chunks[n].sequence.next_tokens(chunks[n].count) for n in order]
        with self.changing():
            views = [
                (self._view([chunks[n].sequence.cached for n in batch]), count)
                for (count, _), batch in batches.items()
            ]
            for view, count in views:
                view.reserve([count] * len(view.sequences))
            self._views = {tuple(view.sequences): view for view, _ in views}
        wanted = [chunk.wanted for chunk in chunks]
        self.is_in_pass = True
        if len(views) == 1 and max(wanted) <= 1:
            logits = self.decoder.next_logits(self._tensor(tokens), cache=views[0][0])
            ends = list(range(len(order)))
        elif len(views) == 1 and set(wanted) == {views[0][1]}:
            logits = self.decoder(self._tensor(tokens), cache=views[0][0]).flatten(0, 1)
            ends = list(range(views[0][1] - 1, len(logits), views[0][1]))
        else:
            index, ends, start = list[int](), list[int](), 0
            for n, some in zip(order, tokens, strict=True):
                start += len(some)
                index += range(start - chunks[n].wanted, start)
                ends.append(len(index) - 1)
            flat = self._tensor([[token for some in tokens for token in some]])
            packed = PackedView(views)
            logits = self.decoder.next_logits_packed(flat, index or [start - 1], packed)
        self.is_in_pass = False
        lasts = dict(zip(order, ends, strict=True))
        return Logits(on_sampling_device(logits), [lasts[n] for n in range(len(chunks))])

    def _view(self, sequences: Sequence[CachedSequence]) -> PagedView:
        return self._views.get(tuple(sequences)) or PagedView(self.cache, sequences)

    def _tensor(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(tokens, device=self._device)


def wait(logits: Tensor) -> None:
    """Wait until the device has computed the logits."""
    logits[:1, :1].cpu()
