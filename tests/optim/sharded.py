"""A short training on one rank, or on two with sharded weights (`fully_shard`) and batch."""

from dataclasses import dataclass
from itertools import product, starmap
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.train.conftest import MODEL
from workhorse.data import Batch
from workhorse.execute.lower.train import train_natively
from workhorse.native import Operators, resolve
from workhorse.nn import DecoderConfig
from workhorse.optim.adamw import AdamWConfig
from workhorse.optim.groups import build_optimizer
from workhorse.optim.master_weights import round_weights
from workhorse.optim.muon import MuonConfig
from workhorse.parallel.shards import is_sharded
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.step.step import LossScale, Precision, TrainingStep

CPU = torch.device("cpu")
PROCESSES = 2
STEPS = 5
VOCAB = 11  # two ranks hold 6 and 5 rows
OPTIMIZERS = {
    "adamw": AdamWConfig(learning_rate=3e-3, mean_dtype="bfloat16"),
    "muon": MuonConfig(learning_rate=3e-3),
}


class Case(NamedTuple):
    """The model, optimizer and dtype of one training."""

    optimizer: str
    dtype: str
    tied: bool
    native: bool = False
    """True for native operators, False for PyTorch's."""

    def __str__(self) -> str:
        head, operators = "tied" if self.tied else "untied", "native" if self.native else "plain"
        return " ".join((self.optimizer, self.dtype, head, operators))


CASES = [
    *starmap(Case, product(OPTIMIZERS, ("float32", "bfloat16"), (True, False))),
    Case("adamw", "float32", tied=True, native=True),
    Case("adamw", "bfloat16", tied=True, native=True),
    Case("muon", "bfloat16", tied=False, native=True),
]


def possible_cases() -> list[Case]:
    """The cases that this machine can run; it may have no native operators."""
    there = resolve("training", wait=True).training is not None
    return [case for case in CASES if not case.native or there]


@dataclass(frozen=True)
class Training:
    """The result of a training, the same on all ranks."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    """State of the optimizer."""
    sharded: bool
    """True if each weight, its gradient and its state were sharded over several ranks."""


def trained(case: Case, processes: int = 1, rank: int = 0) -> Training:
    """Train on sequences that count; in bfloat16 with gradients summed over two micro-batches."""
    torch.manual_seed(1)
    fields = {**MODEL, "vocab_size": VOCAB, "max_seq_len": 8, "head": {"tied": case.tied}}
    decoder = DecoderConfig.from_dict(fields).build()
    low_bits = round_weights(decoder) if case.dtype == "bfloat16" else None
    objective = NextToken(decoder).train()
    operators = resolve("training", wait=True) if case.native else Operators()
    if case.native:
        train_natively(objective, operators)
    if processes > 1:
        _shard(objective)
    optimizer = build_optimizer(
        decoder, OPTIMIZERS[case.optimizer], low_bits, operators=operators.training
    )
    step = TrainingStep(
        objective,
        optimizer,
        CPU,
        precision=Precision(CPU, torch.float32),
        scale=LossScale(enabled=False),
        micro_batch_size=2 if case.dtype == "bfloat16" else 8,
        grad_clip=1.0,
    )
    losses, grad_norms, sharded = [], [], processes > 1
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        loss, counted = step.backward(_batch(generator, processes, rank))
        sharded &= all(map(is_sharded, optimizer.gradients()))
        if processes > 1:
            dist.all_reduce(loss)
            loss /= processes  # every rank has the same number of predictions
        result = step.update(loss, counted, schedule=1.0)
        losses.append(result.loss)
        grad_norms.append(result.grad_norm)
    state = optimizer.tensors()
    sharded &= all(is_sharded(x) for name, x in state.items() if not name.endswith("updates"))
    optimizer.load({name: _whole(tensor) for name, tensor in state.items()})
    return Training(
        losses,
        grad_norms,
        {name: _whole(x) for name, x in optimizer.masters.weights(decoder).items()},
        {name: _whole(tensor) for name, tensor in state.items()},
        sharded,
    )


def train_all(rank: int, folder: str) -> None:
    """Run every case on one of two ranks; rank 0 writes the results to the folder."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES)
    try:
        results = {case: vars(trained(case, PROCESSES, rank)) for case in possible_cases()}
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save({str(case): result for case, result in results.items()}, Path(folder, "results"))


def _batch(generator: torch.Generator, processes: int, rank: int) -> Batch:
    """A rank's share of the eight rows; all ranks have the same number of predictions."""
    starts = torch.randint(VOCAB, (8, 1), generator=generator)
    text = ((starts + torch.arange(9) * 3) % VOCAB).chunk(processes)[rank]
    return Batch(text[:, :-1], text[:, 1:], None, torch.zeros(len(text), dtype=torch.int64))


def _shard(objective: NextToken) -> None:
    """Shard the blocks, then the rest: a tied table and its head are in one group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in objective.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if is_sharded(tensor) else tensor).detach().clone()
