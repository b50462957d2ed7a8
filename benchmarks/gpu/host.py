"""Cost of the host to a GPU: waits within a step, idle time, and reading batches."""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from benchmarks.contestants.training import WARM_UP
from benchmarks.gpu.block import Check, Figures, Setting
from benchmarks.gpu.memory import mixture
from benchmarks.gpu.speed import (
    GPT2,
    TINY_GPT2,
    alone,
    at_most,
    built,
    decoder_config,
    random_batch,
    taking,
    training,
)
from benchmarks.harness import limits
from workhorse.data import Batch
from workhorse.data.batches import Batches
from workhorse.data.dataset import Split, TokenStream
from workhorse.nn import DecoderConfig
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.step import TrainingStep

STEPS, TINY_STEPS = 10, 2
ROUNDS = 3
PROFILED = 3
IDLE, WAIT = 0.02, 0.02
"""Goals for idle time and for waiting, as shares of a step."""
SHORT = 10.0
"""Length in microseconds below which a gap between kernels is not caused by a late host."""
LISTED, NAME = 10, 100
"""Number of gaps of a step that are listed, and maximum length of a kernel's name."""
ROWS = 16
WAITS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    *("aten::_local_scalar_dense", "aten::nonzero"),
)
"""Events in which the host waits for a GPU. The last two also exist on a CPU, without a wait."""
OURS = re.compile(r"(?:.*/)?(workhorse/(?!benchmarks|src|tests).*)")
"""The profiler's name of a function of the package: `FILE(LINE): NAME`."""
TOKENS, DOCUMENT = 10_000_000, 1000
"""Number of tokens of the corpus that batches are read from, and of each of its documents."""


def checks(setting: Setting) -> Iterator[Check]:
    """Waits and idle time of a dense model and of a mixture of experts; then batches."""
    shape = TINY_GPT2 if setting.tiny else GPT2
    rows = shape.batch if setting.tiny else ROWS
    for name, config, fields in (
        ("dense", decoder_config(shape), {}),
        ("dense, compiled", decoder_config(shape), {"execution": "compiled"}),
        ("mixture", mixture(shape), {"balance_rate": 0.001}),
    ):
        train = training(rows, shape.context, **fields)
        for what, work in (("waits", _waits), ("idle", _idle)):
            yield Check(f"{what}: {name}", partial(alone, partial(work, config, train, setting)))
    for packing in ("windows", "documents"):
        train = training(rows, shape.context)
        work = partial(_reading, decoder_config(shape), train, setting, packing)
        yield Check(f"batches: {packing}", partial(alone, work))


def _warm(config: DecoderConfig, train: TrainConfig, setting: Setting) -> Callable[[], None]:
    """A function that takes a step, after the steps that compile and allocate."""
    batch = random_batch(config, train, setting.device)
    take = taking(built(config, train, setting.device), batch)
    for _ in range(WARM_UP):
        take()
    return take


def _waits(config: DecoderConfig, train: TrainConfig, setting: Setting) -> Figures:
    """The waits of a step by kind and place: their number, and the host's microseconds."""
    take = _warm(config, train, setting)
    activities = [ProfilerActivity.CPU]
    if setting.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, with_stack=True) as profiler:
        for _ in range(PROFILED):
            take()
    on_host = [event for event in (profiler.events() or ()) if event.device_type == DeviceType.CPU]
    frames = [(event, found[1]) for event in on_host if (found := OURS.fullmatch(event.name))]
    counts: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for event in on_host:
        if event.name in WAITS:
            counts[event.name, _innermost(event, frames)].append(event.time_range.elapsed_us())
    found = [
        {
            "kind": kind,
            "place": place,
            "per_step": len(times) / PROFILED,
            "us_per_step": sum(times) / PROFILED,
        }
        for (kind, place), times in counts.items()
    ]
    synchronised = [one for one in found if one["kind"].startswith("cuda")]
    return {
        "synchronisations": sum(one["per_step"] for one in synchronised),
        "waits": sorted(found, key=lambda one: -one["us_per_step"]),
    }


def _innermost(event: Any, frames: list[tuple[Any, str]]) -> str:
    """The function of the package that was running when an event began.

    Functions are matched by time. So work of autograd's own thread is attributed to the function
    that started the backward pass.
    """
    at = event.time_range.start
    around = [
        (frame.time_range.start, name)
        for frame, name in frames
        if frame.time_range.start <= at <= frame.time_range.end
    ]
    return max(around, default=(0, "outside"))[1]


def _idle(config: DecoderConfig, train: TrainConfig, setting: Setting) -> Figures:
    """The share of some steps in which no kernel runs, from the first kernel to the last."""
    take = _warm(config, train, setting)
    count = TINY_STEPS if setting.tiny else STEPS
    seconds = _seconds(take, setting)
    figures: Figures = {"seconds_of_step": seconds}
    if setting.device.type != "cuda":
        return figures
    figures |= timeline(take, count)
    figures["idle"] = at_most(figures["idle"], IDLE)
    figures["idle_unprofiled"] = at_most(1 - figures["busy_seconds_of_step"] / seconds, IDLE)
    return figures


def timeline(take: Callable[[], object], count: int) -> Figures:
    """Work of a GPU in `count` steps: its heaviest kernels, and the gaps between kernels.

    Times of kernels are milliseconds per step; gaps are in microseconds.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            take()
        torch.cuda.synchronize()
    events = [event for event in (profiler.events() or ()) if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    heaviest: defaultdict[str, float] = defaultdict(float)
    gaps: list[tuple[float, str, str]] = []
    busy, last = 0.0, events[0]
    for event in events:
        begin, end, until = event.time_range.start, event.time_range.end, last.time_range.end
        heaviest[event.name[:NAME]] += (end - begin) / 1e3 / count
        if begin > until:
            gaps.append((begin - until, last.name[:NAME], event.name[:NAME]))
        busy += max(0.0, end - max(begin, until))
        last = max(last, event, key=lambda one: one.time_range.end)
    whole = last.time_range.end - events[0].time_range.start
    short = sum(length for length, *_ in gaps if length < SHORT)
    return {
        "kernels_per_step": len(events) / count,
        "busy_seconds_of_step": busy / 1e6 / count,
        "idle": 1 - busy / whole,
        "idle_in_short_gaps": short / whole,
        "longest_gaps": sorted(gaps, reverse=True)[: LISTED * count],
        "heaviest": sorted(heaviest.items(), key=lambda item: -item[1])[: 2 * LISTED],
    }


def _seconds(take: Callable[[], object], setting: Setting) -> float:
    """Seconds of a step, the median of some rounds."""
    count = TINY_STEPS if setting.tiny else STEPS

    def steps() -> None:
        for _ in range(count):
            take()

    return statistics.median(
        limits.seconds_of(steps, str(setting.device)) / count for _ in range(ROUNDS)
    )


def _reading(config: DecoderConfig, train: TrainConfig, setting: Setting, packing: Any) -> Figures:
    """Waiting time of steps whose batches are read while the device works, as in training.

    For comparison: the same step with a batch that is already read, and with unpinned batches.
    """
    is_cuda = setting.device.type == "cuda"
    step = built(config, train, setting.device)
    batches = _batches(config, train, packing)

    def read(number: int, pinned: bool) -> Batch:
        batch = batches[number]
        return batch.pinned() if pinned else batch

    ready = read(0, is_cuda)
    for _ in range(WARM_UP):
        taking(step, ready)()
    there = _seconds(taking(step, ready), setting)
    figures: Figures = {
        "seconds_with_batch_there": there,
        "seconds_to_read": limits.seconds_of(lambda: read(1, is_cuda), "cpu"),
    }
    for name, pinned in (("pinned", is_cuda), ("unpinned", False)):
        seconds = _seconds(_Reading(step, partial(read, pinned=pinned)), setting)
        figures[name] = {
            "seconds_of_step": seconds,
            "waiting": at_most(max(0.0, seconds / there - 1), WAIT),
        }
    return figures


class _Reading:
    """Steps that read the next batch after queueing the passes of this one."""

    def __init__(self, step: TrainingStep, read: Callable[[int], Batch]) -> None:
        self.step, self.read = step, read
        self.number = 0
        self.next = read(0)

    def __call__(self) -> None:
        loss, counted = self.step.backward(self.next)
        self.number += 1
        self.next = self.read(self.number)
        self.step.update(loss, counted, schedule=1.0)


def _batches(config: DecoderConfig, train: TrainConfig, packing: Any) -> Batches:
    """Batches of random tokens in documents of equal length."""
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=TOKENS, dtype=np.uint16)
    ends = np.arange(DOCUMENT, TOKENS + 1, DOCUMENT)
    split = Split("train", (TokenStream("random", [tokens], ends),), (1.0,))
    return Batches(split, seq_len=train.seq_len, batch_size=train.batch_size, packing=packing)
