"""Decoding speed of a GPU: tokens per second, and share of its memory copy rate.

A step reads every weight once, and the keys and values of every earlier token.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Literal

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from benchmarks.contestants.ours import greedy
from benchmarks.gpu.block import Check, Figures, Setting
from benchmarks.gpu.speed import alone, at_least, decoder_config, llama_fields
from benchmarks.harness import limits
from benchmarks.harness.shapes import DECODING, NEW_TOKENS, PROMPT_TOKENS, Shape
from benchmarks.harness.tokens import TokenClock, random_tokens
from workhorse.execute.backend import Backend, backend_of
from workhorse.execute.compiled.compiled_step import CompiledStep
from workhorse.execute.compiled.fixed_step import CapturedStep, FixedStep, FixedStepBackend
from workhorse.generate import GenerationConfig, generate, stream
from workhorse.nn import Decoder
from workhorse.transforms.quantization import FormatName, quantize

LARGE = Shape("8b", 32, 32, 8, 4096, 14_336, 128_256, context=2048, batch=1, gated=True)
TINY = Shape("tiny", 2, 4, 2, 64, 128, 64, context=256, batch=1, gated=True)
Precision = Literal["bfloat16"] | FormatName
PRECISIONS: tuple[Precision, ...] = ("bfloat16", "int8", "int4")
BATCHES = (1, 8, 64)
LONG_PROMPT, TINY_PROMPT = 1024, 16
PROMPTS = (1, 8)
PEER_BATCHES = (1, 64)
GUESSES = 4
PREFERRED = {0: 1e6}
"""Bias of a token's logit, which makes it always chosen and so every guess right."""
TINY_NEW = 8
COPIED, TINY_COPIED = 1 << 32, 1 << 22
"""Size in bytes of the tensor that is copied."""
TRIES = 10
SHORT = 10.0
"""Length in microseconds below which a gap between kernels is not caused by a late host."""
LISTED, NAME = 10, 100
"""Number of gaps of a step that are listed, and maximum length of a kernel's name."""
BANDWIDTH_SHARE = 0.75
FASTER_THAN_TRANSFORMERS = 2.0


class Rates:
    """Rates measured so far; later checks are compared with them."""

    def __init__(self) -> None:
        self.copy: float | None = None
        """Bytes per second; a byte counts once when read and once when written."""
        self.transformers: dict[tuple[str, int], float] = {}
        """New tokens per second in bfloat16, by shape and batch."""


@dataclass(frozen=True)
class Subject:
    """A model of ours, and the function that creates it at its first use."""

    shape: Shape
    precision: Precision
    make: Callable[[], Backend]


def checks(setting: Setting) -> Iterator[Check]:
    """The copy; then bfloat16, with its peer first; then 8 and 4 bits."""
    rates = Rates()
    yield Check("copy", partial(_copy, setting, rates))
    shapes = (TINY,) if setting.tiny else (DECODING["1b"], LARGE)
    for precision, shape in product(PRECISIONS, shapes):
        if precision == "bfloat16":
            for batch in PEER_BATCHES:
                work = partial(_transformers, shape, batch, setting, rates)
                yield Check(f"{shape.name}, transformers, batch {batch}", partial(alone, work))
        yield from _ours(shape, precision, setting, rates)


def _ours(shape: Shape, precision: Precision, setting: Setting, rates: Rates) -> Iterator[Check]:
    """Checks of one model: plain, then compiled, each also with CUDA graphs."""
    about = f"{shape.name} {precision}"
    plain = cache(partial(_model, shape, precision, setting.device))
    compiled = cache(lambda: CompiledStep(plain().decoder))

    def by(step: FixedStep) -> Backend:
        return FixedStepBackend(plain(), step, "steps")

    ways: dict[str, Callable[[], Backend]] = {
        "plain": plain,
        "compiled": cache(lambda: by(compiled())),
    }
    if setting.device.type == "cuda":
        ways["plain, graphs"] = cache(lambda: by(CapturedStep(plain().decoder)))
        ways["compiled, graphs"] = cache(lambda: by(CapturedStep(plain().decoder, compiled())))
    for name, make in ways.items():
        subject = Subject(shape, precision, make)
        for batch in BATCHES:
            work = partial(_decode, subject, batch, setting, rates)
            yield Check(f"{about}, {name}, batch {batch}", work)
        if precision == "bfloat16":
            yield Check(f"{about}, {name}, guesses", partial(_guess, subject, setting))
        if setting.device.type == "cuda":
            yield Check(f"{about}, {name}, kernels", partial(_kernels, subject, setting))
    for batch in PROMPTS:
        work = partial(_prefill, Subject(shape, precision, plain), batch, setting)
        yield Check(f"{about}, prompts, batch {batch}", work)


def _copy(setting: Setting, rates: Rates) -> Figures:
    size = TINY_COPIED if setting.tiny else COPIED
    source = torch.ones(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    fastest = min(limits.seconds_of(copy, str(setting.device)) for _ in range(TRIES))
    rates.copy = 2 * size / fastest
    return {"bytes": size, "gbytes_per_second": rates.copy / 1e9}


def _model(shape: Shape, precision: Precision, device: torch.device) -> Backend:
    """A model with random weights, prepared as `workhorse.load` prepares a preset."""
    torch.manual_seed(0)
    decoder = decoder_config(shape).build(device=device, dtype=torch.bfloat16).eval()
    if precision != "bfloat16":
        quantize(decoder, precision)
    return backend_of(decoder)


def _decode(subject: Subject, batch: int, setting: Setting, rates: Rates) -> Figures:
    backend, shape = subject.make(), subject.shape
    prompt, new = _lengths(setting)
    config = GenerationConfig(max_new_tokens=new, temperature=0, stop_tokens=())
    found = greedy(backend, random_tokens(batch, prompt, shape.vocab_size), config)()
    figures: Figures = {"tokens_per_second": found["decode"], "prompt_tokens": found["prefill"]}
    if rates.copy is not None:
        read = _weight_bytes(backend.decoder) + batch * (prompt + new / 2) * _token_bytes(shape)
        share = found["decode"] / batch * read / rates.copy
        figures["share_of_copy"] = at_least(share, BANDWIDTH_SHARE) if batch == 1 else share
    theirs = rates.transformers.get((shape.name, batch))
    if theirs is not None and subject.precision == "bfloat16":
        figures["times_transformers"] = at_least(found["decode"] / theirs, FASTER_THAN_TRANSFORMERS)
    return figures


def _kernels(subject: Subject, setting: Setting) -> Figures:
    """Work of the GPU for a token of one sequence; see `timeline`."""
    backend = subject.make()
    prompt, new = _lengths(setting)
    config = GenerationConfig(max_new_tokens=new, temperature=0, stop_tokens=())
    prompts = random_tokens(1, prompt, subject.shape.vocab_size)
    generate(backend, prompts, config)
    deltas = stream(backend, prompts, config)
    for _ in range(new // 4):
        next(deltas)
    return timeline(lambda: next(deltas), new // 4)


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


def _lengths(setting: Setting) -> tuple[int, int]:
    """Number of prompt tokens, and of new tokens."""
    return (TINY_PROMPT, TINY_NEW) if setting.tiny else (PROMPT_TOKENS, NEW_TOKENS)


def _weight_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that a step reads: all but the embedding, which only looks up a row."""
    state = {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
    return sum(one.nbytes for name, one in state.items() if not name.startswith("embedding."))


def _token_bytes(shape: Shape) -> int:
    """Bytes that a token takes in the cache, in bfloat16."""
    return 2 * 2 * shape.n_layers * shape.n_kv_heads * (shape.d_model // shape.n_heads)


def _prefill(subject: Subject, batch: int, setting: Setting) -> Figures:
    """Prefill of prompts of a thousand tokens, up to their first new token."""
    length = TINY_PROMPT if setting.tiny else LONG_PROMPT
    prompts = random_tokens(batch, length, subject.shape.vocab_size)
    config = GenerationConfig(max_new_tokens=1, temperature=0, stop_tokens=())
    tokens = greedy(subject.make(), prompts, config)()["prefill"]
    return {"tokens_per_second": tokens, "tflops": tokens * subject.shape.forward_flops / 1e12}


def _guess(subject: Subject, setting: Setting) -> Figures:
    """Largest gain of guesses, which are looked up in the sequence: all of them are right."""
    backend = subject.make()
    length, new = _lengths(setting)
    prompts = random_tokens(1, length, subject.shape.vocab_size)
    figures: Figures = {}
    for guesses in (0, GUESSES):
        config = GenerationConfig(
            max_new_tokens=new,
            temperature=0,
            stop_tokens=(),
            speculate=guesses,
            logit_bias=PREFERRED,
        )
        generate(backend, prompts, config)
        started = time.perf_counter()
        (text,) = generate(backend, prompts, config)
        name = "with_guesses" if guesses else "without"
        figures[name] = {"tokens_per_second": new / (time.perf_counter() - started)}
        if guesses:
            figures[name] |= {"proposed": text.proposed, "accepted": text.accepted}
    return figures


def _transformers(shape: Shape, batch: int, setting: Setting, rates: Rates) -> Figures:
    """The peer transformers, with its static cache: it compiles the step on a GPU."""
    import transformers

    from benchmarks.peers.transformers import _Streamer

    prompt, new = _lengths(setting)
    with setting.device:
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**llama_fields(shape)), dtype=torch.bfloat16
        ).eval()
        rows = torch.tensor(random_tokens(batch, prompt, shape.vocab_size))
    model.generation_config.eos_token_id = None

    def take() -> dict[str, float]:
        clock = TokenClock(batch, prompt)
        model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            streamer=_Streamer(clock),
        )
        return clock.rates(new)

    take()
    take()  # a second batch may compile again
    found = take()
    rates.transformers[shape.name, batch] = found["decode"]
    return {"tokens_per_second": found["decode"], "prompt_tokens": found["prefill"]}
