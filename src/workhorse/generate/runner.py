"""Runs a decoder over sequences in a paged cache: tokens in, logits of the next tokens out."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.execute.backend import Backend
from workhorse.generate.sequence import PIECE, TokenSequence
from workhorse.nn.cache.paged import CachedSequence
from workhorse.nn.cache.paged_view import PagedView


class Chunk(NamedTuple):
    """The next `count` tokens of a sequence, to be processed in one pass of the decoder."""

    sequence: TokenSequence
    count: int
    wanted: int = 1
    """Number of tokens, at the end of the chunk, whose next-token logits are needed."""


class Logits(NamedTuple):
    """The requested logits of several chunks; see `Chunk.wanted`."""

    of: Tensor
    """The logits of all chunks, `(tokens, vocab)`."""
    last: list[int]
    """For each chunk, the row of `of` after its last token; invalid if its `wanted` is 0."""


def on_sampling_device(logits: Tensor) -> Tensor:
    """Move logits to the device where tokens are chosen: the CPU for MPS, which has no float64."""
    return logits.cpu() if logits.device.type == "mps" else logits


def tokens_needed(prompt: int, new: int, context: int, slack: int = 0) -> int:
    """Return the cache size, in tokens, that a prompt and up to `new` more tokens need.

    Args:
        prompt: length of the prompt.
        new: maximum number of tokens after the prompt.
        context: the decoder's maximum sequence length.
        slack: number of newest tokens that can be removed, such as rejected guesses.
    """
    return max(min(prompt + new, context) + slack, prompt)


class Runner:
    """A decoder and its paged cache.

    All tokens of a call of `run` are processed in one packed pass, without padding. Only sequences
    of other adapters, and exact ones (see `TokenSequence`), have separate passes.

    Args:
        backend: computes logits; its decoder is in evaluation mode.
        tokens: the maximum number of tokens of all sequences together.
        sequences: the maximum number of sequences at a time.
        slack: the number of a sequence's newest tokens that can be removed, such as rejected
            guesses.
        adapters: the backend with each adapter, by the adapter's name.

    Attributes:
        decoder: the decoder of `backend`.
        backends: the backend for each name of an adapter, and None for the base.
        is_changing: True while block tables change. It stays True after an exception, and the
            tables are then inconsistent until `reset`.
        is_in_pass: True during a pass. It stays True after an exception, and the sequences of the
            pass then have no valid keys and values.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        tokens: int,
        sequences: int,
        slack: int = 0,
        adapters: Mapping[str, Backend] | None = None,
    ) -> None:
        self.decoder = decoder = backend.decoder
        self.backends: dict[str | None, Backend] = {None: backend}
        self.backends.update(adapters or {})
        self.slack = slack
        if any(one.is_invariant for one in self.backends.values()):
            slack = max(slack, PIECE - 1)  # only up to this number of tokens if there is a window
        self.cache = decoder.new_paged_cache(tokens, sequences, slack)
        self.is_changing = False
        self.is_in_pass = False
        self._device = decoder.device
        if self._device.type == "meta":
            raise WorkhorseError(
                "a decoder on the device meta has no weights; build it on another device"
            )
        self._views: dict[str | None, dict[tuple[CachedSequence, ...], PagedView]] = {}
        """The views of the last pass of each adapter."""

    def new_sequence(
        self,
        tokens: Sequence[int],
        *,
        exact: bool = False,
        adapter: str | None = None,
        **options: bool,
    ) -> TokenSequence:
        """Create a sequence whose tokens are not in the cache yet.

        Args:
            tokens: the tokens known so far.
            exact: True if its logits must not depend, bit by bit, on other sequences and passes.
            adapter: name of the adapter; None: the base.
            options: see `TokenSequence`.
        """
        if not self.backends[adapter].is_invariant:
            return TokenSequence(tokens, self.cache, exact=exact, adapter=adapter, **options)
        has_window = any(reach is not None for reach in self.cache.pools)
        most = self.cache.slack + 1 if has_window else None
        return TokenSequence(tokens, self.cache, most=most, adapter=adapter, **options)

    @contextmanager
    def changing(self) -> Generator[None]:
        """Context in which block tables change. After an exception `is_changing` stays True."""
        self.is_changing = True
        yield
        self.is_changing = False

    def abandon_pass(self) -> None:
        """Note that an interrupted pass will be repeated."""
        self.is_in_pass = False

    def reset(self) -> None:
        """Release all blocks, and clear the prefix cache. Existing sequences become invalid."""
        self.cache.reset()
        self._views = {}

    def select(
        self, sequences: Sequence[TokenSequence], index: Sequence[int]
    ) -> list[TokenSequence]:
        """Keep, reorder or copy sequences: sequence n of the result is `sequences[index[n]]`.

        Sequences that are not in the result release their blocks.
        """
        for n in set(range(len(sequences))).difference(index):
            sequences[n].clear(self.cache)
        first = {of: n for n, of in reversed(list(enumerate(index)))}
        return [
            sequences[of] if first[of] == n else sequences[of].fork(self.cache)
            for n, of in enumerate(index)
        ]

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk]) -> Logits:
        """Process the tokens of the chunks, and return the logits that they request.

        Args:
            chunks: chunks of different sequences. A chunk may be empty only if its sequence already
                has the logits (`TokenSequence.ahead`). The chunk of an exact sequence has at most
                `TokenSequence.chunk` tokens.
        """
        batches = self._batches(chunks)
        if [len(batch) for batch in batches] == [len(chunks)]:
            return self._pass(chunks)
        found: dict[int, Tensor] = {}
        for batch in batches:
            logits = self._pass([chunks[n] for n in batch])
            for n, last in zip(batch, logits.last, strict=True):
                found[n] = logits.of[last + 1 - chunks[n].wanted : last + 1]
        for n, (sequence, count, wanted) in enumerate(chunks):
            if not count:
                found[n] = sequence.take_ahead()
            elif n not in found:
                alone = Chunk(sequence, count, max(wanted, 1))
                found[n] = self._pass([alone]).of[:wanted]
        lasts, rows = list[int](), 0
        for n in range(len(chunks)):
            rows += len(found[n])
            lasts.append(rows - 1)
        return Logits(torch.cat([found[n] for n in range(len(chunks))]), lasts)

    def _batches(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """Return the indices of chunks that can be processed in one pass, for each pass.

        Pieces of the prompts of exact sequences, and empty chunks, are not among them.
        """
        batches: list[list[int]] = []
        for adapter in dict.fromkeys(chunk.sequence.adapter for chunk in chunks):
            own = [n for n, one in enumerate(chunks) if one.sequence.adapter == adapter]
            packed = [n for n in own if chunks[n].count and chunks[n].sequence.prompt is None]
            steps = [n for n in own if chunks[n].count == 1 and chunks[n].sequence.is_step]
            most = self.backends[adapter].invariant_batch if steps else 1
            batches += [packed] if packed else []
            batches += [steps[start : start + most] for start in range(0, len(steps), most)]
        return batches

    @torch.no_grad()
    def run_ahead(self, sequences: Sequence[TokenSequence], tokens: Tensor) -> None:
        """Start to process the next token of each sequence before it is copied to the host.

        The logits are stored in `TokenSequence.ahead`.

        Args:
            sequences: sequences of one adapter that are not exact and have room in the cache and in
                the context.
            tokens: int64 `(batch,)`; negative ids, which mark non-finite logits, are replaced by 0.
        """
        adapter = sequences[0].adapter
        with self.changing():
            view = self._view(adapter, [sequence.cached for sequence in sequences])
            view.reserve([1] * len(sequences))
        read = tokens.to(self._device).clamp(min=0)
        self.is_in_pass = True
        logits = self.backends[adapter].logits(read, [(view, 1)], [1] * len(sequences))
        logits = on_sampling_device(logits)
        self.is_in_pass = False
        for sequence, row in zip(sequences, logits.split(1), strict=True):
            sequence.look_ahead(row)

    def _pass(self, chunks: Sequence[Chunk]) -> Logits:
        """Process the tokens of all chunks, which have the same adapter, in one pass."""
        adapter = chunks[0].sequence.adapter
        # Empty sequences get their own batch: it attends only to its new keys, not to the cache.
        batches: dict[tuple[int, bool], list[int]] = {}
        for n, (sequence, count, _) in enumerate(chunks):
            batches.setdefault((count, sequence.cached.length == 0), []).append(n)
        order = [n for batch in batches.values() for n in batch]
        tokens = [token for n in order for token in chunks[n].sequence.next_tokens(chunks[n].count)]
        with self.changing():
            views = [
                (self._view(adapter, [chunks[n].sequence.cached for n in batch]), count)
                for (count, _), batch in batches.items()
            ]
            for view, count in views:
                view.reserve([count] * len(view.sequences))
            self._views[adapter] = {tuple(view.sequences): view for view, _ in views}
        wanted = [chunks[n].wanted for n in order]
        if not any(wanted) or (len(views) == 1 and max(wanted) == 1):
            wanted = [1] * len(order)
        self.is_in_pass = True
        read = torch.tensor(tokens, device=self._device)
        logits = self.backends[adapter].logits(read, views, wanted)
        self.is_in_pass = False
        ends = {n: end - 1 for n, end in zip(order, accumulate(wanted), strict=True)}
        return Logits(on_sampling_device(logits), [ends[n] for n in range(len(chunks))])

    def _view(self, adapter: str | None, sequences: Sequence[CachedSequence]) -> PagedView:
        known = self._views.get(adapter, {})
        return known.get(tuple(sequences)) or PagedView(self.cache, sequences)


def wait(logits: Tensor) -> None:
    """Wait until the device has computed the logits."""
    logits[:1, :1].cpu()
