"""Workhorse as a contestant, called through its public functions."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

import workhorse
from benchmarks.contestants.training import (
    BETAS,
    GRAD_CLIP,
    LEARNING_RATE,
    WEIGHT_DECAY,
    batch,
    rounds,
)
from benchmarks.harness.models import huggingface_folder
from benchmarks.harness.shapes import DECODING, TRAINING, Shape
from benchmarks.harness.tokens import TokenClock, random_tokens
from benchmarks.harness.worker import Round
from workhorse.data import Batch
from workhorse.execute.backend import Backend
from workhorse.generate import GenerationConfig, stream
from workhorse.native import resolve
from workhorse.native.allocator import keep_freed_memory
from workhorse.nn import AttentionConfig, Decoder, DecoderConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.embedding import EmbeddingConfig, HeadConfig
from workhorse.nn.feedforward import MlpConfig
from workhorse.nn.norms import LayerNormConfig
from workhorse.nn.positions.absolute import LearnedPositionConfig
from workhorse.train.step.step import TrainingStep

if TYPE_CHECKING:
    from workhorse.train.recipe.training import TrainConfig

LOAD_OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
}
"""Options of `workhorse.load` for each precision."""

_PROCESS = ExitStack()
"""Contexts that stay open until the process ends."""


def keep_memory(device: torch.device) -> None:
    """Keep freed memory until the process ends, as `train` does during a run."""
    _PROCESS.enter_context(keep_freed_memory(device))


def train(
    *,
    shape: str,
    dtype: str,
    device: str,
    compiled: bool = False,
    mean_dtype: Literal["float32", "bfloat16"] = "float32",
    matmul_precision: Literal["highest", "high"] = "highest",
    threads: int,
) -> Round:
    """Rounds of training steps, as in `workhorse train`."""
    from workhorse.train.step.build import build_step

    sizes = TRAINING[shape]
    tokens, targets = batch(shape, device, threads)
    config = train_config(
        sizes,
        dtype,
        mean_dtype=mean_dtype,
        batch_size=sizes.batch,
        matmul_precision=matmul_precision,
        execution="compiled" if compiled else "auto",
    )
    keep_memory(torch.device(device))
    training = build_step(gpt(sizes).build(device=device), config, torch.device(device))
    return rounds(shape, step_on(training, tokens, targets), device)


def train_config(
    sizes: Shape, dtype: str, *, mean_dtype: str = "float32", **settings: Any
) -> "TrainConfig":
    """The training config of all contestants; `settings` are more keys of the section `train`."""
    from workhorse.train.recipe.training import TrainConfig

    optimizer = {
        "kind": "adamw",
        "learning_rate": LEARNING_RATE,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY,
        "mean_dtype": mean_dtype,
    }
    return TrainConfig.from_dict(
        {
            "steps": 1_000_000,
            "seq_len": sizes.context,
            "optimizer": optimizer,
            "grad_clip": GRAD_CLIP,
            "dtype": dtype,
            **settings,
        }
    )


def step_on(training: TrainingStep, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    """A function that takes a whole step on the same rows each time."""
    given = Batch(tokens, targets, None, torch.zeros(len(tokens), dtype=torch.int64))

    def step() -> None:
        training.update(*training.backward(given), schedule=1.0)

    return step


def gpt(shape: Shape) -> DecoderConfig:
    """GPT-2's architecture at a shape, without biases and dropout."""
    norm = LayerNormConfig(bias=False)
    block = PreNormConfig(
        norm=norm,
        attention=AttentionConfig(n_heads=shape.n_heads),
        feed_forward=MlpConfig(d_ff=shape.d_ff, activation="gelu"),
    )
    return DecoderConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        n_layers=shape.n_layers,
        max_seq_len=shape.context,
        embedding=EmbeddingConfig(position=LearnedPositionConfig()),
        blocks={"main": block},
        final_norm=norm,
        head=HeadConfig(tied=True),
    )


def generate(
    *,
    shape: str,
    precision: str,
    compiled: bool,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    models: str,
    device: str,
    exact: bool = False,
    threads: int,
) -> Round:
    """Rounds of greedy decoding."""
    torch.set_num_threads(threads)
    resolve("decoding", wait=True)
    model = workhorse.load(
        huggingface_folder(shape, models),
        device=device,
        execution="compiled" if compiled else "auto",
        exact=exact,
        notify=lambda _line: None,
        **LOAD_OPTIONS[precision],
    )
    prompts = random_tokens(batch, prompt_tokens, DECODING[shape].vocab_size)
    config = GenerationConfig(max_new_tokens=new_tokens, temperature=0, stop_tokens=(), exact=exact)

    return greedy(model.backend, prompts, config)


def greedy(model: Decoder | Backend, prompts: list[list[int]], config: GenerationConfig) -> Round:
    """Rounds of new tokens of all prompts together, after one round that does not count."""

    def take() -> dict[str, float]:
        clock = TokenClock(len(prompts), len(prompts[0]))
        deltas = stream(model, prompts, config, batch_size=len(prompts))
        with suppress(StopIteration):
            while True:
                for _ in prompts:
                    next(deltas)
                clock.tick()
        return clock.rates(config.max_new_tokens)

    take()
    return take
