"""The largest training step and serving load that fit on a device, and changes that save memory."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from workhorse.config.base import ConfigError
from workhorse.devices.tape import stand_in, without_data
from workhorse.errors import WorkhorseError
from workhorse.memory.device_memory import device_memory, peak_of_passes
from workhorse.memory.model_memory import cache_bytes, cache_of_layers
from workhorse.memory.step_memory import PlannedStep
from workhorse.models.describe import flops_per_token, recomputed_flops
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.facts import linear_layers
from workhorse.optim.muon import MuonConfig
from workhorse.plan.devices import GIGA
from workhorse.transforms.quantization import FormatName, place_codes

WAYS: dict[str, FormatName | None] = {"bfloat16": None, "int8": "int8", "int4": "int4"}
"""Names of weight formats for serving, with their quantisation; None: not quantised."""


def serving(
    config: DecoderConfig,
    device: torch.device,
    *,
    context: int,
    room: int | None,
    bandwidth: float | None,
) -> dict[str, Any]:
    """Estimate memory and speed of serving a model with bfloat16, int8 and int4 weights.

    `tokens_per_second` is the limit that memory bandwidth sets for one sequence: each token reads
    every weight that multiplies it, and on average half of the sequence's cache.

    Args:
        config: the decoder's config.
        device: the device; only its type matters.
        context: number of tokens per sequence.
        room: memory of the device in bytes; None if unknown.
        bandwidth: memory bandwidth in 10^9 bytes per second; None if unknown.

    Returns:
        `bytes_per_token` (KV cache bytes of the first token), `context` and `bytes_per_text` (KV
        cache bytes of a sequence of `context` tokens). For each name in `WAYS`, a mapping with
        `weights` (bytes allocated), `texts` (maximum number of concurrent sequences) and
        `tokens_per_second`, or None if no layer is wide enough to quantise.
    """
    layers = cache_of_layers(config, torch.bfloat16)
    per_text = cache_bytes(layers, context)
    ways: dict[str, dict[str, Any] | None] = dict.fromkeys(WAYS)
    for name, format in WAYS.items():
        try:
            weights, multiplied = bytes_of_weights(config, device, format)
        except WorkhorseError:
            continue
        texts = None if room is None else max(0, (room - weights) // per_text)
        speed = None if bandwidth is None else bandwidth * GIGA / (multiplied + per_text / 2)
        ways[name] = {"weights": weights, "texts": texts, "tokens_per_second": speed}
    return {
        "bytes_per_token": cache_bytes(layers, 1),
        "context": context,
        "bytes_per_text": per_text,
        **ways,
    }


def bytes_of_weights(
    config: DecoderConfig, device: torch.device, format: FormatName | None
) -> tuple[int, int]:
    """Bytes of all weights of a decoder for inference, and of those that multiply one token.

    Layers with the same name have the same size, so the sizes are computed from small decoders:
    one with a single layer of each name, and, for each repeated name, one with a second layer of
    that name.

    Args:
        config: the decoder's config.
        device: the device; its type decides which weights are quantised, see `place_codes`.
        format: the quantisation format; None: all weights are bfloat16.

    Raises:
        WorkhorseError: no layer is wide enough to quantise.
    """
    here = stand_in(device)

    def of(names: Sequence[str]) -> tuple[int, int]:
        few = config.replace(n_layers=len(names), pattern=tuple(names))
        with without_data(here):
            decoder = few.build(device=here, dtype=torch.bfloat16).eval()
            if format is not None:
                place_codes(decoder, format)
        multiplied = sum(int(share * one.nbytes) for _, one, share in linear_layers(decoder))
        return allocated(decoder), multiplied

    counts = Counter(config.layer_names())
    once = weights, multiplied = of(tuple(counts))
    for name, count in counts.items():
        if count > 1:
            more = of((*counts, name))
            weights += (count - 1) * (more[0] - once[0])
            multiplied += (count - 1) * (more[1] - once[1])
    return weights, multiplied


def allocated(decoder: Decoder) -> int:
    """Bytes of a decoder's parameters and buffers; storage that tensors share counts once."""
    tensors = (*decoder.parameters(), *decoder.buffers())
    storages = {id(one := tensor.untyped_storage()): one for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


MOST_TOKENS = 2**17
"""Maximum number of tokens per micro-batch that the search for the largest step tries."""
FINEST = 8
"""The search for the maximum sequence length has a relative precision of 1 / `FINEST`."""


class Limits(NamedTuple):
    """The largest training steps that fit on a device."""

    micro_batch_size: int
    """Maximum number of rows of `train.seq_len` tokens per micro-batch; 0 if no row fits."""
    seq_len: int
    """Maximum length in tokens if a micro-batch has one row; 0 if no tried length fits."""


class _Peaks:
    """Computes the peak bytes of variants of a step.

    The weight update is recorded once for all variants with the same update.
    """

    def __init__(self) -> None:
        self.updates: dict[tuple[str, str, bool], int] = {}

    def __call__(self, step: PlannedStep) -> int:
        return max(self.update(step), peak_of_passes(step))

    def update(self, step: PlannedStep) -> int:
        """Peak bytes of the update, which has float32 gradients if there are micro-batches."""
        train = step.train
        several = train.micro_batches(step.parallel).count > 1
        key = train.dtype, str(train.optimizer), several
        if key not in self.updates:
            self.updates[key] = device_memory(step).update
        return self.updates[key]


def limits(step: PlannedStep, room: int) -> Limits:
    """Find the largest training steps that fit into `room` bytes per device."""
    config, train, mesh, peak = step.config, step.train, step.parallel, _Peaks()

    def needed(rows: int, length: int) -> int:
        batch = rows * mesh.parts * mesh.pipeline  # enough micro-batches to fill the first stage
        if train.batch_size > batch:  # several micro-batches, whose gradients need memory for sums
            batch *= 2
        longer = config.replace(max_seq_len=max(config.max_seq_len, length))
        tried = replace(step, config=longer)
        return peak(tried.with_train(batch_size=batch, micro_batch_size=rows, seq_len=length))

    rows = length = 0
    if peak.update(step) <= room:
        tokens = train.seq_len
        most = max(1, MOST_TOKENS // tokens)
        rows = largest(lambda rows: needed(rows, tokens), room, 1, most, exact=True)
        most = max(tokens, MOST_TOKENS)
        length = largest(lambda length: needed(1, length), room, tokens, most)
    return Limits(rows, length)


def largest(
    needed: Callable[[int], int], room: int, start: int, most: int, *, exact: bool = False
) -> int:
    """Search for the largest size with `needed(size) <= room`; 0 if no size fits.

    A size is a number of rows or their length in tokens. Because `needed` is slow, each guess is
    extrapolated from sizes tried before.

    Args:
        needed: function that returns the bytes for a size; must be increasing.
        room: the available bytes.
        start: the first size to try.
        most: the largest size to try.
        exact: False for a relative precision of 1 / `FINEST`.
    """
    known: dict[int, int] = {}

    def fine(size: int) -> int:
        """The precision near a size: the largest power of two up to `size / FINEST`, or 1."""
        return 1 if exact else 1 << max(0, (size // FINEST).bit_length() - 1)

    def fits(size: int) -> bool:
        known[size] = needed(size)
        return known[size] <= room

    low, high = start, min(2 * start, most)
    while not fits(low):
        low, high = low // 2, low
        if low == 0:
            return 0
    while high not in known and fits(high):
        if high == most:
            return most
        guess = _expected(known, room, high, most)
        low, high = high, min(max(guess - guess % fine(guess), high + fine(high)), most)
    while high - low > fine(low):
        guess = _expected(known, room, low, high)
        middle = min(max(guess - guess % fine(guess), low + fine(low)), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _expected(known: dict[int, int], room: int, low: int, high: int) -> int:
    """Predict the largest size from `low` to `high` that fits into `room` bytes.

    The bytes in `known` are interpolated by a parabola: they grow linearly with the number of rows
    and with their length, or with the square of the length if attention scores or masks are stored.
    """
    x, y, *others = sorted(known, key=lambda size: abs(known[size] - room))[:3]
    slope = (known[y] - known[x]) / (y - x)
    bend = 0.0
    if others:
        (z,) = others
        bend = ((known[z] - known[x]) / (z - x) - slope) / (z - y)

    def expected(size: int) -> float:
        return known[x] + (size - x) * (slope + (size - y) * max(bend, 0.0))

    return max(low, low + bisect_right(range(low, high + 1), room, key=expected) - 1)


WORTHWHILE = 0.01
"""Minimum fraction of the peak memory that a change of settings must save to be suggested."""
NAMED = 3
"""Number of suggested changes to show."""


class Remedy(NamedTuple):
    """A change of settings that saves memory."""

    setting: str
    """The change, as `section.key=value`; two settings are separated by a space."""
    cost: str
    """The disadvantage of the change, in words."""
    saves: int
    """Reduction of the peak memory in bytes."""
    fits: bool
    """True if the step fits after the change."""


def remedies(step: PlannedStep, room: int) -> list[Remedy]:
    """Up to three changes of settings that save memory, those with the least side effects first.

    If none of them makes the step fit, the next change that does is added. If no change does, a
    combination of changes that does is added. The arguments are the same as in `limits`.
    """
    train, peak = step.train, _Peaks()
    before = device_memory(step).total
    found: dict[str, tuple[Remedy, Change]] = {}
    decoder = step.config.build(device="meta")
    once = flops_per_token(decoder, train.seq_len, frozen=step.adapter is not None)
    share = recomputed_flops(decoder, train.seq_len) / once
    for change in _changes(step, f"{share:.0%} more arithmetic"):
        setting, cost, fields = change
        key = setting.partition("=")[0]
        if key in found and found[key][0].fits:
            continue
        try:
            after = peak(step.with_train(**fields))
        except ConfigError:
            continue
        if before - after >= WORTHWHILE * before:
            found[key] = Remedy(setting, cost, before - after, after <= room), change
    cheapest = [remedy for remedy, _ in found.values()]
    named, fitting = cheapest[:NAMED], [remedy for remedy in cheapest if remedy.fits]
    if fitting:
        return named if fitting[0] in named else [*named, fitting[0]]
    settings, costs, combined = list[str](), list[str](), dict[str, Any]()
    for _, (setting, cost, fields) in found.values():
        settings, costs, combined = [*settings, setting], [*costs, cost], combined | fields
        after = peak(step.with_train(**combined))
        if after <= room:
            return [*named, Remedy(" ".join(settings), "; ".join(costs), before - after, True)]
    return named


Change = tuple[str, str, dict[str, Any]]
"""A setting and its cost as in `Remedy`, and the changed fields of `train`."""


def _changes(step: PlannedStep, recomputation: str) -> Iterator[Change]:
    """Yield the changes to try, those with the least effect on training first.

    If several change the same key, the first that fits is suggested. `recomputation` is the cost of
    activation checkpointing.
    """
    train = step.train
    rows = train.micro_batches(step.parallel).size

    while rows > 1:
        rows //= 2
        cost = "same gradient; smaller matmuls are slower"
        yield f"train.micro_batch_size={rows}", cost, {"micro_batch_size": rows}
    if not train.activation_checkpointing:
        setting = "train.activation_checkpointing=true"
        yield setting, recomputation, {"activation_checkpointing": True}
    if train.dtype == "float32":
        cost = "activations and gradients are rounded"
        yield "train.dtype=bfloat16", cost, {"dtype": "bfloat16"}
    if not isinstance(train.optimizer, MuonConfig):
        cost = "another optimizer: tune its learning rate"
        yield "train.optimizer.kind=muon", cost, {"optimizer": MuonConfig()}
    if train.seq_len > 1:
        half = train.seq_len // 2
        yield f"train.seq_len={half}", "half the context", {"seq_len": half}
