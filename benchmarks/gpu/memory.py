"""Memory use of a GPU: a step compared with its prediction, `auto` near the limit, attention.

On a CPU, whose allocator records no peak, only the prediction is shown.
"""

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.block import Check, Figures, Setting
from benchmarks.gpu.speed import (
    ADAMW,
    GPT2,
    LLAMA,
    MUON,
    TINY_GPT2,
    TINY_LLAMA,
    alone,
    at_most,
    built,
    decoder_config,
    random_batch,
    taking,
    training,
)
from benchmarks.harness.shapes import DECODING, Shape
from workhorse.devices.memory import available
from workhorse.memory.capacity import fit_micro_batch, step_bytes, usable
from workhorse.memory.step_memory import PlannedStep
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.kernels import KernelName, Scoring, make_kernel
from workhorse.nn.attention.masks import AttentionPattern, Placement
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.positions.absolute import alibi_slopes
from workhorse.train.recipe.training import TrainConfig

DIFFERENCE = 0.05
"""Goal for the difference between prediction and measured peak, relative to the peak."""
GIB = 2**30
ROWS = {"gpt2-124m": 8, "llama-1.3b": 2, "160m": 8}
TINY_ROWS = 2
MIXTURE_ROWS, MIXTURE_SEQ = 4, 1024
TRAININGS = [
    {
        "dtype": dtype,
        "activation_checkpointing": checkpointing,
        "optimizer": optimizer,
        "micro_batches": micro_batches,
    }
    for dtype, checkpointing, optimizer, micro_batches in product(
        ("bfloat16", "float32"), (False, True), (ADAMW, MUON), (1, 2)
    )
]
STRIDE = 3
"""Each model is trained in every third way; together the models cover all ways."""

EDGES = ((GPT2, 6), (GPT2, 20), (LLAMA, 40), (LLAMA, None))
"""Models, and the GiB left free for them; None for all memory."""
EDGE_ROWS = 64

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
SEQ, TINY_SEQ = 2048, 128
LENGTHS = (1, 2, 4)
DOCUMENTS = 4


@dataclass(frozen=True)
class Attending:
    """An attention layer whose kernels and memory are measured."""

    name: str
    kernel: KernelName
    kv_heads: int = KV_HEADS
    packed: bool = False
    alibi: bool = False


ATTENTIONS = (
    Attending("causal, grouped", "sdpa"),
    Attending("documents, grouped", "sdpa", packed=True),
    Attending("documents, not grouped", "sdpa", kv_heads=HEADS, packed=True),
    Attending("documents, grouped, flex", "flex", packed=True),
    Attending("ALiBi", "sdpa", kv_heads=HEADS, alibi=True),
    Attending("ALiBi, flex", "flex", kv_heads=HEADS, alibi=True),
)


def checks(setting: Setting) -> Iterator[Check]:
    """Attention first, which takes little time; then `auto`, then the predictions."""
    for case in ATTENTIONS:
        yield Check(f"attention: {case.name}", partial(alone, partial(_attention, case, setting)))
    edges = ((TINY_GPT2, None),) if setting.tiny else EDGES
    for shape, free in edges:
        name = f"auto: {shape.name}, {free or 'all'} GiB free"
        yield Check(name, partial(alone, partial(_edge, shape, free, setting)))
    for number, (name, config, rows, seq) in enumerate(_models(setting)):
        for fields in TRAININGS[number % STRIDE :: STRIDE]:
            train = _train(fields, rows, seq)
            work = partial(_account, config, train, setting.device)
            yield Check(f"account: {name}, {_short(train)}", partial(alone, work))


def _models(setting: Setting) -> Iterator[tuple[str, DecoderConfig, int, int]]:
    """Name, config, rows and tokens per row of each model."""
    if setting.tiny:
        for shape in (TINY_GPT2, TINY_LLAMA):
            yield shape.name, decoder_config(shape), TINY_ROWS, shape.context
        return
    for shape in (GPT2, DECODING["160m"], LLAMA):
        yield shape.name, decoder_config(shape), ROWS[shape.name], shape.context
    yield "mixture", mixture(GPT2), MIXTURE_ROWS, MIXTURE_SEQ


def mixture(shape: Shape) -> DecoderConfig:
    """The LLaMA of a shape with mixtures of 8 experts, half as wide, as feed-forwards."""
    config = decoder_config(replace(shape, gated=True))
    experts = MoEConfig(d_ff=shape.d_ff // 2, n_experts=8, top_k=2)
    blocks = {"main": config.blocks["main"].replace(feed_forward=experts)}
    return config.replace(blocks=blocks)


def _train(fields: dict[str, Any], rows: int, seq: int) -> TrainConfig:
    given = dict(fields)
    return training(rows, seq, micro_batch_size=rows // given.pop("micro_batches"), **given)


def _short(train: TrainConfig) -> str:
    checkpointing = ", checkpointing" if train.activation_checkpointing else ""
    passes = f"{train.micro_batch_size} of {train.batch_size} rows"
    return f"{train.dtype}, {train.optimizer.kind}{checkpointing}, {passes}"


def _account(config: DecoderConfig, train: TrainConfig, device: torch.device) -> Figures:
    predicted = step_bytes(PlannedStep(config, train, device))
    figures: Figures = {"predicted": predicted}
    if device.type == "cuda":
        measured = figures["measured"] = _peak_of_step(config, train, device)
        figures["difference"] = predicted / measured - 1
        figures["off"] = at_most(abs(figures["difference"]), DIFFERENCE)
    return figures


def _peak_of_step(config: DecoderConfig, train: TrainConfig, device: torch.device) -> int:
    """Peak bytes of the second step, including the model."""
    before = _settled(device)
    take = taking(built(config, train, device), random_batch(config, train, device))
    take()
    torch.cuda.reset_peak_memory_stats(device)
    take()
    return torch.cuda.max_memory_allocated(device) - before


def _settled(device: torch.device) -> int:
    """Bytes that are allocated before the test, including the workspace of the matmul library."""
    gc.collect()
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(256, 256, device=device, dtype=dtype)
        square.mm(square)
    del square
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def _edge(shape: Shape, free: int | None, setting: Setting) -> Figures:
    """The micro-batch size that `auto` chose, and whether it and twice that size run."""
    device, config = setting.device, decoder_config(shape)
    is_cuda = device.type == "cuda"
    left = available(device) or 0
    ballast = None
    if is_cuda and free is not None:
        ballast = torch.empty(left - free * GIB, dtype=torch.uint8, device=device)
        left = available(device) or 0
    rows = TINY_ROWS if setting.tiny else EDGE_ROWS
    auto = training(rows, shape.context, micro_batch_size="auto")
    chosen = fit_micro_batch(PlannedStep(config, auto, device)).train
    size = chosen.micro_batch_size
    assert isinstance(size, int)
    figures: Figures = {"free": left, "usable": usable(left, device), "chosen": size}
    figures |= {"predicted": step_bytes(PlannedStep(config, chosen, device))}
    figures["ran"] = _runs(config, chosen, device)
    if is_cuda and size < rows:
        twice = chosen.replace(micro_batch_size=min(rows, 2 * size))
        figures["predicted_of_twice"] = step_bytes(PlannedStep(config, twice, device))
        figures["twice_ran"] = _runs(config, twice, device)
    del ballast
    return figures


def _runs(config: DecoderConfig, train: TrainConfig, device: torch.device) -> bool:
    """True if two steps fit into memory."""
    try:
        take = taking(built(config, train, device), random_batch(config, train, device))
        take()
        take()
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def _attention(case: Attending, setting: Setting) -> Figures:
    """Kernels that run, growth of memory with the length, and difference from the eager kernel."""
    seq = TINY_SEQ if setting.tiny else SEQ
    kernel: KernelName = case.kernel
    if setting.tiny and kernel == "flex":
        kernel = "flex-uncompiled"
    is_cuda = setting.device.type == "cuda"
    attend = partial(_attend, case, kernel, setting.device)
    take = attend(seq)
    found = take()  # compiles
    with profile(
        activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]
    ) as profiler:
        take()
    kind = DeviceType.CUDA if is_cuda else DeviceType.CPU
    names = {event.name[:160] for event in (profiler.events() or ()) if event.device_type == kind}
    names = sorted(name for name in names if is_cuda or "attention" in name)
    plain = _attend(case, "eager", setting.device, seq)()
    figures: Figures = {"seq": seq, "kernels": names}
    figures["off_eager"] = float((found - plain).abs().max())
    del take, found, plain
    if is_cuda:
        masks, peaks = zip(*(_peak_of(partial(attend, seq * n)) for n in LENGTHS), strict=True)
        growth = math.log(max(peaks[-1], 1) / max(peaks[0], 1), LENGTHS[-1] / LENGTHS[0])
        figures |= {"mask_bytes": masks, "peak_bytes": peaks, "power_of_seq": growth}
    return figures


def _attend(
    case: Attending, kernel: KernelName, device: torch.device, seq: int
) -> Callable[[], Tensor]:
    """Create inputs and mask of an attention layer; return a function that runs it.

    On a GPU the function also runs the backward pass.
    """
    torch.manual_seed(0)
    pattern = AttentionPattern(alibi_slopes=alibi_slopes(HEADS) if case.alibi else ())
    module = make_kernel(kernel, pattern, Scoring(scale=HEAD_DIM**-0.5), HEADS)
    positions = torch.arange(seq, device=device)[None]
    documents = positions * DOCUMENTS // seq if case.packed else None
    place = Placement(positions, positions, documents, aligned=True)
    back = device.type == "cuda"
    q, k, v = (
        torch.randn(1, heads, seq, HEAD_DIM, device=device, dtype=DTYPE, requires_grad=back)
        for heads in (HEADS, case.kv_heads, case.kv_heads)
    )
    mask = module.render(pattern, place, DTYPE)

    def attend() -> Tensor:
        y = module(q, k, v, mask)
        if back:
            y.backward(torch.ones_like(y))
        return y.detach()

    return attend


def _peak_of(make: Callable[[], Callable[[], Tensor]]) -> tuple[int, int]:
    """Bytes of inputs, their gradients and the mask; and the peak beyond them."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    attend = make()
    attend()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend()
    torch.cuda.synchronize()
    return held - before, torch.cuda.max_memory_allocated() - held
