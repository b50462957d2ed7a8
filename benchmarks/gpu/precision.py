"""Number formats in training: the losses of 200 steps compared with float32.

There are two tasks. The first is the tests' task, a small decoder that learns to count; the tests'
bounds are the goal. The second is larger and learns text; its differences have no bound. Float32
itself, with two rows per pass, shows the effect of another order of sums.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants.ours import gpt
from benchmarks.gpu.block import Check, Figures, Setting
from benchmarks.harness.shapes import TRAINING
from workhorse.data import Batch
from workhorse.data.stdlib import modules
from workhorse.devices.names import training_dtype
from workhorse.errors import WorkhorseError
from workhorse.models.families.llama import llama
from workhorse.native.allocator import keep_freed_memory
from workhorse.nn import DecoderConfig
from workhorse.train import TrainConfig
from workhorse.train.step.build import build_step
from workhorse.transforms.float8 import check_float8

LARGEST, MEAN = 0.01, 0.002
"""Bounds in nats, from `tests/optim/test_master_weights.py`."""
CHARACTERS = 1_000_000
NUMBERS, BYTES = 11, 256
"""Sizes of the vocabularies."""


@dataclass(frozen=True)
class Task:
    """A model and the data that it learns.

    Attributes:
        model: the config of the decoder.
        rows: number of rows of a batch.
        learning_rate: the learning rate of AdamW.
        draw: returns random rows of tokens, one token longer than the model's.
        bounded: True if the bounds of the tests are the goal.
    """

    model: DecoderConfig
    rows: int
    learning_rate: float
    draw: Callable[[torch.Generator], Tensor]
    bounded: bool

    @property
    def seq_len(self) -> int:
        return self.model.max_seq_len

    def batch(self, generator: torch.Generator) -> Batch:
        texts = self.draw(generator)
        sources = torch.zeros(self.rows, dtype=torch.int64)
        return Batch(texts[:, :-1], texts[:, 1:], None, sources)


def _count_on(generator: torch.Generator) -> Tensor:
    starts = torch.randint(NUMBERS, (4, 1), generator=generator)
    return (starts + torch.arange(17) * 3) % NUMBERS


def _read(generator: torch.Generator) -> Tensor:
    text, shape = _text(), TRAINING["tiny"]
    starts = torch.randint(len(text) - shape.context, (shape.batch, 1), generator=generator)
    return text[starts + torch.arange(shape.context + 1)]


@cache
def _text() -> Tensor:
    """The first bytes of the standard library's source."""
    text = b""
    for module in modules():
        text += module.text().encode()
        if len(text) > CHARACTERS:
            break
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


TASKS = {
    "counting": Task(
        model=llama(d_model=16, n_layers=2, n_heads=2, d_ff=32, vocab_size=NUMBERS, max_seq_len=16),
        rows=4,
        learning_rate=3e-3,
        draw=_count_on,
        bounded=True,
    ),
    "text": Task(
        model=gpt(TRAINING["tiny"]).replace(vocab_size=BYTES),
        rows=TRAINING["tiny"].batch,
        learning_rate=1e-3,
        draw=_read,
        bounded=False,
    ),
}
FORMATS: dict[str, dict[str, Any]] = {
    "float32, two rows at once": {"dtype": "float32", "micro_batch_size": 2},
    "tf32": {"dtype": "float32", "matmul_precision": "high"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, mean too": {"dtype": "bfloat16", "optimizer": {"mean_dtype": "bfloat16"}},
    "float16": {"dtype": "float16"},
    "fp8": {"dtype": "bfloat16", "fp8": True},
}


def checks(setting: Setting) -> Iterator[Check]:
    """For each task the reference, then each format compared with it."""
    steps = 5 if setting.tiny else 200
    for task_name, task in TASKS.items():
        losses = partial(_losses, task, steps, setting.device)
        reference: list[float] = []
        yield Check(f"{task_name}: float32", partial(_reference, reference, losses))
        for name, fields in FORMATS.items():
            beside = partial(_beside, reference, losses, fields, task, setting.device)
            yield Check(f"{task_name}: {name}", beside)


def _reference(into: list[float], losses: Callable[[dict[str, Any]], list[float]]) -> Figures:
    into += losses({"dtype": "float32"})
    return {"steps": len(into), "first": into[0], "last": into[-1]}


def _beside(
    reference: list[float],
    losses: Callable[[dict[str, Any]], list[float]],
    fields: dict[str, Any],
    task: Task,
    device: torch.device,
) -> Figures:
    """Differences of the losses from the reference's, or the reason why there are none."""
    if fields["dtype"] == "float16" and device.type != "cuda":
        return {"left_out": "float16 needs CUDA"}
    if "fp8" in fields:
        try:
            check_float8(device, training_dtype(fields["dtype"], device), task.seq_len)
        except WorkhorseError as error:
            return {"left_out": str(error)}
    found = losses(fields)
    apart = torch.tensor(found) - torch.tensor(reference)
    value = {"largest": float(apart.abs().max()), "mean": float(apart.abs().mean())}
    figures: Figures = {"value": value, "signed_mean": float(apart.mean()), "last": found[-1]}
    if task.bounded:
        figures["goal"] = {"largest": LARGEST, "mean": MEAN}
        figures["reached"] = value["largest"] <= LARGEST and value["mean"] <= MEAN
    return figures


def _losses(task: Task, steps: int, device: torch.device, fields: dict[str, Any]) -> list[float]:
    """Losses of a decoder that starts from the same weights and reads the same rows each time."""
    torch.manual_seed(1)
    decoder = task.model.build().to(device)
    optimizer = {"kind": "adamw", "learning_rate": task.learning_rate}
    optimizer |= fields.get("optimizer", {})
    sizes = {"steps": steps, "batch_size": task.rows, "seq_len": task.seq_len}
    config = TrainConfig.from_dict({**sizes, **fields, "optimizer": optimizer})
    generator = torch.Generator().manual_seed(2)
    with keep_freed_memory(device):
        step = build_step(decoder, config, device)
        batches = (task.batch(generator) for _ in range(steps))
        return [step.update(*step.backward(batch), schedule=1.0).loss for batch in batches]
