"""Training speed of a GPU: tokens per second, and share of the GPU's matmul rate.

nanoGPT takes part if the environment variable NANOGPT names a checkout, transformers if it is
installed.
"""

import gc
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.contestants.ours import gpt
from benchmarks.contestants.training import (
    BETAS,
    LEARNING_RATE,
    STEPS,
    WARM_UP,
    WEIGHT_DECAY,
    fused_adamw,
    plain_step,
)
from benchmarks.gpu.block import Check, Figures, Setting
from benchmarks.harness import limits
from benchmarks.harness.shapes import TRAINING, Shape
from benchmarks.harness.worker import Round
from workhorse.data import Batch
from workhorse.memory.capacity import fit_micro_batch
from workhorse.memory.step_memory import PlannedStep
from workhorse.models.families.llama import llama
from workhorse.nn import DecoderConfig
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import build_step
from workhorse.train.step.step import TrainingStep

GPT2 = Shape("gpt2-124m", 12, 12, 12, 768, 3072, 50_304, context=1024, batch=32, gated=False)
LLAMA = Shape("llama-1.3b", 24, 16, 16, 2048, 5504, 32_000, context=2048, batch=32, gated=True)
TINY_GPT2 = Shape("tiny-gpt2", 2, 2, 2, 64, 128, 64, context=32, batch=2, gated=False)
TINY_LLAMA = Shape("tiny-llama", 2, 2, 2, 64, 128, 64, context=32, batch=2, gated=True)
"""The batch of a LLaMA is the largest number of rows to try."""

SQUARE, TINY_SQUARE = 8192, 256
STEPS_TIMED, TINY_STEPS = 10, 2
ROUNDS = 3
DOCUMENTS = 4
"""Number of documents of equal length in a packed row."""
PEER_ROWS = 4
"""Rows of transformers' LLaMA, whose logits and attention take more memory."""
SMALL_SHARE, LARGE_SHARE = 0.55, 0.50
"""Goals for GPT-2 and LLaMA, as shares of the matmul rate."""
FASTER_THAN_NANOGPT = 1.2

ADAMW = {
    "kind": "adamw",
    "learning_rate": LEARNING_RATE,
    "beta1": BETAS[0],
    "beta2": BETAS[1],
    "weight_decay": WEIGHT_DECAY,
}
MUON = {"kind": "muon", "learning_rate": LEARNING_RATE}


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        name: the name of the variant.
        train: fields of `TrainConfig` that differ from AdamW, bfloat16 and compiled layers (tiny
            sizes are not compiled).
        packed: True if rows hold several documents.
        whole: True for one compiled program for all layers and the loss, instead of one per layer.
    """

    name: str
    train: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    whole: bool = False


COMPILED = Variant("compiled layers", {"execution": "compiled"})
OTHERS = (
    Variant("eager", {"execution": "auto"}),
    Variant("compiled whole", {"execution": "auto"}, whole=True),
    Variant("muon", {"optimizer": MUON}),
    Variant("sdpa, documents", {"kernel": "sdpa"}, packed=True),
    Variant("flex, documents", {"kernel": "flex"}, packed=True),
    Variant("checkpointing", {"activation_checkpointing": True}),
    Variant("fp8", {"fp8": True}),
)


class Rates:
    """Rates measured so far; later checks are compared with them."""

    products: float | None = None
    """Floating-point operations per second."""
    nanogpt: float | None = None
    """Tokens per second."""


def checks(setting: Setting) -> Iterator[Check]:
    """The matmuls, then peers and variants, those with a goal first."""
    gpt2, large = (TINY_GPT2, TINY_LLAMA) if setting.tiny else (GPT2, LLAMA)
    device = setting.device
    rates = Rates()
    yield Check("products, square", partial(_square_products, setting, rates))
    for shape in (gpt2, large):
        yield Check(f"products, {shape.name}", partial(_products_of, shape, device))
    yield _training(gpt2, COMPILED, setting, rates)
    yield Check("nanoGPT, compiled", partial(alone, partial(_nanogpt, gpt2, setting, rates)))
    for shape in (large, gpt2):
        if shape is large:
            yield _training(shape, COMPILED, setting, rates)
        for variant in OTHERS:
            yield _training(shape, variant, setting, rates)
        peer = _transformers_llama if shape.gated else _transformers_gpt2
        name = f"transformers, {shape.name}"
        yield Check(name, partial(alone, partial(peer, shape, setting, rates)))


def at_least(value: float, goal: float) -> Figures:
    """A figure that must reach a goal."""
    return {"value": value, "goal": goal, "reached": value >= goal}


def at_most(value: float, goal: float) -> Figures:
    """A figure that must not exceed a goal."""
    return {"value": value, "goal": goal, "reached": value <= goal}


def product_rate(size: int, device: torch.device) -> float:
    """Floating-point operations per second of square bfloat16 matmuls."""
    take = limits.products(
        shapes=[(size, size, 1)],
        tokens=size,
        dtype="bfloat16",
        device=str(device),
        backward=False,
        threads=torch.get_num_threads(),
    )
    return 1e9 * take()["gflops"]


def decoder_config(shape: Shape) -> DecoderConfig:
    """The config of GPT-2's architecture or LLaMA's."""
    if not shape.gated:
        return gpt(shape)
    return llama(
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        d_ff=shape.d_ff,
        vocab_size=shape.vocab_size,
        max_seq_len=shape.context,
    )


def training(rows: int, seq_len: int, **fields: Any) -> TrainConfig:
    """A training config with AdamW and bfloat16, unless `fields` say otherwise."""
    given = {"optimizer": ADAMW, "dtype": "bfloat16", **fields}
    return TrainConfig.from_dict(
        {"steps": 1_000_000, "batch_size": rows, "seq_len": seq_len, **given}
    )


def random_batch(
    config: DecoderConfig, train: TrainConfig, device: torch.device, *, packed: bool = False
) -> Batch:
    """Random tokens as training reads them: on the host, in pinned memory for a GPU."""
    rows, seq = train.batch_size, train.seq_len
    drawn = torch.randint(config.vocab_size, (rows, seq + 1))
    number = torch.arange(seq) * DOCUMENTS // seq
    made = Batch(
        drawn[:, :-1].contiguous(),
        drawn[:, 1:].contiguous(),
        number.repeat(rows, 1) if packed else None,
        torch.zeros(rows, dtype=torch.int64),
    )
    return made.pinned() if device.type == "cuda" else made


def built(config: DecoderConfig, train: TrainConfig, device: torch.device) -> TrainingStep:
    """The training step of a new model."""
    torch.manual_seed(0)
    return build_step(config.build(train.kernel, device=device), train, device)


def taking(step: TrainingStep, batch: Batch) -> Callable[[], None]:
    """A function that takes a whole step on the same rows each time."""

    def take() -> None:
        step.update(*step.backward(batch), schedule=1.0)

    return take


def alone(work: Callable[[], Figures]) -> Figures:
    """Run a function, then free its compiled programs and tensors."""
    try:
        return work()
    finally:
        torch.compiler.reset()
        gc.collect()


def _square_products(setting: Setting, rates: Rates) -> Figures:
    size = TINY_SQUARE if setting.tiny else SQUARE
    rates.products = product_rate(size, setting.device)
    return {"size": size, "tflops": rates.products / 1e12}


def _products_of(shape: Shape, device: torch.device) -> Figures:
    """Matmul rate of forward and both gradients, for 32 rows of GPT-2 and 8 of LLaMA."""
    tokens = (shape.batch if not shape.gated else shape.batch // 4 or 1) * shape.context
    take = limits.products(
        shapes=shape.products,
        tokens=tokens,
        dtype="bfloat16",
        device=str(device),
        backward=True,
        threads=torch.get_num_threads(),
    )
    return {"tokens": tokens, "tflops": take()["gflops"] / 1e3}


def _training(shape: Shape, variant: Variant, setting: Setting, rates: Rates) -> Check:
    work = partial(_tokens_per_second, shape, variant, setting, rates)
    return Check(f"{shape.name}, {variant.name}", partial(alone, work))


def _tokens_per_second(shape: Shape, variant: Variant, setting: Setting, rates: Rates) -> Figures:
    device, config = setting.device, decoder_config(shape)
    fields = {"execution": "auto" if setting.tiny else "compiled", **variant.train}
    train = training(shape.batch, shape.context, **fields)
    if shape.gated:
        train = _most_rows(config, train, device, packed=variant.packed)
    step = built(config, train, device)
    if variant.whole:
        step.objective.compile()
    batch = random_batch(config, train, device, packed=variant.packed)
    tokens = _rate(taking(step, batch), train.tokens_per_step, setting)
    figures = {"rows": train.batch_size, **_figures(tokens, shape, rates)}
    if (share := figures["share_of_products"]) is not None:
        goal = LARGE_SHARE if shape.gated else SMALL_SHARE
        figures["share_of_products"] = at_least(share, goal)
    if rates.nanogpt is not None and not shape.gated:
        figures["times_nanogpt"] = at_least(tokens / rates.nanogpt, FASTER_THAN_NANOGPT)
    return figures


def _most_rows(
    config: DecoderConfig, train: TrainConfig, device: torch.device, *, packed: bool
) -> TrainConfig:
    """The config with the largest batch that fits in one pass."""
    step = PlannedStep(config, train, device, packed=packed).with_train(micro_batch_size="auto")
    return train.replace(batch_size=fit_micro_batch(step).train.micro_batch_size)


def _rate(step: Callable[[], object], tokens: int, setting: Setting) -> float:
    """Tokens per second of several steps, the median of some rounds."""
    count = TINY_STEPS if setting.tiny else STEPS_TIMED

    def steps() -> None:
        for _ in range(count):
            step()

    for _ in range(WARM_UP):
        step()
    seconds = [limits.seconds_of(steps, str(setting.device)) for _ in range(ROUNDS)]
    return count * tokens / statistics.median(seconds)


def _known(shape: Shape, setting: Setting) -> dict[str, Any]:
    """The arguments of peers; registers the shape, which they look up by name."""
    TRAINING[shape.name] = shape
    STEPS[shape.name] = TINY_STEPS if setting.tiny else STEPS_TIMED
    return {
        "shape": shape.name,
        "dtype": "bfloat16",
        "device": str(setting.device),
        "threads": torch.get_num_threads(),
    }


def _of_peer(take: Round, shape: Shape, rates: Rates) -> Figures:
    return _figures(statistics.median(take()["tokens"] for _ in range(ROUNDS)), shape, rates)


def _figures(tokens: float, shape: Shape, rates: Rates) -> Figures:
    flops = tokens * shape.training_flops
    share = None if rates.products is None else flops / rates.products
    return {"tokens_per_second": tokens, "tflops": flops / 1e12, "share_of_products": share}


def _nanogpt(shape: Shape, setting: Setting, rates: Rates) -> Figures:
    from benchmarks.peers import nanogpt

    if (checkout := os.environ.get("NANOGPT")) is None:
        return {"missing": "NANOGPT names no checkout"}
    take = nanogpt.train(**_known(shape, setting), checkout=checkout, compiled=True)
    found = _of_peer(take, shape, rates)
    rates.nanogpt = found["tokens_per_second"]
    return found


def _transformers_gpt2(shape: Shape, setting: Setting, rates: Rates) -> Figures:
    from benchmarks.peers import transformers

    return _of_peer(transformers.train(**_known(shape, setting)), shape, rates)


def _transformers_llama(shape: Shape, setting: Setting, rates: Rates) -> Figures:
    import transformers

    config = transformers.LlamaConfig(**llama_fields(shape))
    with setting.device:
        model = transformers.LlamaForCausalLM(config).train()
        rows = torch.randint(shape.vocab_size, (PEER_ROWS, shape.context + 1))
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def loss() -> torch.Tensor:
        # The targets are shifted already.
        return model(tokens, labels=targets, shift_labels=targets, use_cache=False).loss

    step = plain_step(model, fused_adamw(model), loss, "bfloat16", str(setting.device))
    found = _figures(_rate(step, tokens.numel(), setting), shape, rates)
    return {"rows": PEER_ROWS, **found}


def llama_fields(shape: Shape) -> dict[str, Any]:
    """A shape as transformers' `LlamaConfig` writes it."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "max_position_embeddings": shape.context,
    }
