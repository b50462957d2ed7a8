"""Steps of fixed shape, and their execution as CUDA graphs.

They add a token to each row of a `PagedView`, or a token and guesses, as many as the cache can take
back. So they can be compiled, or recorded, once for all lengths.

A GPU is done with a small model's step before Python has launched its hundreds of kernels. A step
of fixed shape launches the same ones at every token, on tensors at the same addresses; so they are
recorded once, and replayed after its token, lengths and tables were copied to where it reads them.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder
from workhorse.nn.cache.contiguous import CacheTensors, FixedCache, Layout, layout_of, tensors_of
from workhorse.nn.cache.paged import EMPTY
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.cache.view import CacheView
from workhorse.nn.watched import Held, Watch
from workhorse.transforms.record import become, combined


class Variant(NamedTuple):
    """What a program is specialised on: all steps with these properties run the same one."""

    layout: Layout
    batched: bool
    """Whether there are several rows, of any number."""
    guessed: bool
    """Whether there are several tokens per row, of any number."""


def check_fixed(decoder: Decoder, what: str) -> None:
    """Refuse a decoder whose steps differ in shape or constants.

    Args:
        decoder: whose steps are to be fixed.
        what: what they are fixed for, as in "compiled".

    Raises:
        WorkhorseError: see `why_not_fixed`.
    """
    if reason := why_not_fixed(decoder):
        raise WorkhorseError(f"{reason}, so steps cannot be {what}; choose execution=auto")


def why_not_fixed(decoder: Decoder) -> str:
    """Why steps of a decoder differ in shape or constants; empty: they do not.

    It has a mixture of experts, or angles that depend on the text's length.
    """
    blocks = decoder.config.blocks.values()
    if any(block.mixture for block in blocks):
        return "a mixture of experts has other shapes at every token"
    if any(block.rope and block.rope.depends_on_length for block in blocks):
        return "rope scaling dynamic_ntk and longrope depend on the text's length"
    return ""


def fixed_step(decoder: Decoder, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
    """The logits of a step over a `FixedCache`, by the decoder's modules.

    Args:
        decoder: in evaluation mode.
        variant: of the step.
        tokens: (batch, seq), the new ones.
        tensors: of the cache; `lengths` grows by seq.
    """
    return Decoder.forward(decoder, tokens, cache=FixedCache(variant.layout, tensors))


class FixedStepDecoder(Decoder):
    """A decoder that takes such steps by other means; prompts and everything else run as before.

    So does a decoder with hooks.
    """

    watch: Watch

    def fixed_step(self, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
        """See the function `fixed_step`."""
        return fixed_step(self, variant, tokens, tensors)

    def next_logits(
        self, tokens: Tensor, *, positions: Tensor | None = None, cache: CacheView | None = None
    ) -> Tensor:
        if tokens.shape[1] == 1 and positions is None and self._is_step(cache, 1):
            return self._take(tokens, cache)[:, 0]
        return super().next_logits(tokens, positions=positions, cache=cache)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: CacheView | None = None,
    ) -> Tensor:
        counted = positions is None and documents is None
        if counted and self._is_step(cache, tokens.shape[1]):
            return self._take(tokens, cache)
        return super().forward(tokens, positions=positions, documents=documents, cache=cache)

    def _take(self, tokens: Tensor, view: PagedView) -> Tensor:
        rows, seq = tokens.shape
        view.reserve([seq] * rows)
        variant = Variant(layout_of(view), batched=rows > 1, guessed=seq > 1)
        logits = self.fixed_step(variant, tokens, tensors_of(view))
        view.advance(seq)
        return logits

    def _is_step(self, cache: CacheView | None, seq: int) -> TypeGuard[PagedView]:
        if not isinstance(cache, PagedView) or torch.is_grad_enabled() or self.watch.sees_hooks:
            return False
        return seq <= cache.slack + 1 and all(one.length for one in cache.sequences)


log = logging.getLogger(__name__)

NARROWEST = 16
"""Blocks of a text's table that a recording reads at least; with more it is twice as wide."""
MOST_RECORDINGS = 32
"""The oldest one goes first."""

Replay = tuple[Callable[[], object], Tensor]
"""What runs a recorded function again, and the tensor that then holds its result."""
Recorder = Callable[[Callable[[], Tensor]], Replay]


def capture_steps(decoder: Decoder, recorder: Recorder | None = None) -> "CapturedDecoder":
    """A decoder that replays recorded steps when it adds tokens to a `PagedView`.

    A recording serves one number of rows and of new tokens, in one cache, and texts up to a length
    that doubles. A decoder with hooks, and whatever cannot be recorded, runs as before. If weights
    or modules are replaced later, steps are recorded again.

    Args:
        decoder: in evaluation mode, after the other transforms of inference; with compiled steps
            these are recorded. What is returned takes its place.
        recorder: records a function of no arguments; None: by a CUDA graph.

    Raises:
        WorkhorseError: steps differ in shape or constants, because of a mixture of experts or of
            angles that depend on the text's length.
    """
    check_fixed(decoder, "recorded")
    kind = combined("Captured", CapturedDecoder, type(decoder))
    options = {"recorder": recorder or CudaGraphs(), "watch": Watch(decoder.modules())}
    return become(decoder, kind, **options)


class CudaGraphs:
    """Records on the current CUDA device; all recordings share the memory of their activations."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> Replay:
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # libraries allocate and choose kernels in a first call
            function()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function()
        self._pool = graph.pool()
        return graph.replay, result


class Recording(NamedTuple):
    """A recorded step, and where it reads what changes from one to the next."""

    tokens: Tensor
    lengths: Tensor
    tables: list[Tensor]
    """As wide as the recording reads, `EMPTY` where a text has no block."""
    replay: Callable[[], object]
    logits: Tensor

    def __call__(self, tokens: Tensor, tensors: CacheTensors) -> Tensor:
        """The logits of a step."""
        self.tokens.copy_(tokens)
        self.lengths.copy_(tensors.lengths)
        for own, table in zip(self.tables, tensors.tables, strict=True):
            own.fill_(EMPTY)[:, : table.shape[1]].copy_(table)
        self.replay()
        return self.logits.clone()


class Recordings:
    """The recorded steps of a decoder, as long as its modules and weights stay where they are."""

    def __init__(self, decoder: Decoder) -> None:
        self.held = Held(decoder)
        self._tensors = [*decoder.parameters(), *decoder.buffers()]
        self._addresses = self._current_addresses()
        self.by_shape: dict[Any, Recording] = {}

    @property
    def valid(self) -> bool:
        """Whether nothing of the decoder was replaced or moved since they were made."""
        return self.held.unchanged and self._addresses == self._current_addresses()

    def _current_addresses(self) -> list[int]:
        return [one.data_ptr() for one in self._tensors]


class CapturedDecoder(FixedStepDecoder):
    """See `capture_steps`."""

    recorder: Recorder
    recordings: Recordings | None = None
    records: bool = True

    def __getstate__(self) -> dict[str, Any]:
        """Without the recordings, which are of these weights."""
        state: Any = super().__getstate__()
        return state | {"recordings": None}

    def fixed_step(self, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
        if not self.records:
            return super().fixed_step(variant, tokens, tensors)
        if self.recordings is None or not self.recordings.valid:
            self.recordings = Recordings(self)
        known = self.recordings.by_shape
        widths = tuple(_width(table) for table in tensors.tables)
        stores = tuple((one.data_ptr(), one.shape) for one in (*tensors.keys, *tensors.values))
        shape = variant.layout, tokens.shape, widths, stores
        recording = known.get(shape)
        if recording is None:
            step = partial(super().fixed_step, variant)
            try:
                recording = known[shape] = record_step(step, tokens, tensors, self.recorder)
            except RuntimeError as error:
                self.records = False
                log.warning("steps cannot be recorded, and are taken without: %s", error)
                return step(tokens, tensors)
            if len(known) > MOST_RECORDINGS:
                del known[next(iter(known))]
        logits = recording(tokens, tensors)
        tensors.lengths.add_(tokens.shape[1])
        return logits


@torch.inference_mode(False)
@torch.no_grad()
def record_step(
    step: Callable[[Tensor, CacheTensors], Tensor],
    tokens: Tensor,
    tensors: CacheTensors,
    recorder: Recorder,
) -> Recording:
    """Record a step that counts in the `lengths` that it is given, which a recording does not."""
    lengths, tokens = tensors.lengths.clone(), tokens.clone()
    tables = [
        functional.pad(table, (0, _width(table) - table.shape[1]), value=EMPTY)
        for table in tensors.tables
    ]

    def from_here() -> Tensor:
        return step(tokens, tensors._replace(lengths=lengths.clone(), tables=tables))

    with torch.cuda.device_of(tokens):  # its kernels' device is recorded, no other
        return Recording(tokens, lengths, tables, *recorder(from_here))


def _width(table: Tensor) -> int:
    """Of the table of a recording that serves this one."""
    width = NARROWEST
    while width < table.shape[1]:
        width *= 2
    return width
