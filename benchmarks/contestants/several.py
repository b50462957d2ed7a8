"""Contestants with several processes that train one model: Workhorse, and a plain PyTorch loop.

The contestant's own process is rank 0. It starts the other ranks, and every round runs on all of
them.
"""

import datetime
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants.ours import gpt, keep_memory, step_on, train_config
from benchmarks.contestants.training import (
    STEPS,
    fused_adamw,
    plain_step,
)
from benchmarks.harness.limits import seconds_of
from benchmarks.harness.shapes import TRAINING
from benchmarks.harness.worker import Round
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.division.teams import make_teams
from workhorse.parallel.processes.world import World
from workhorse.train.step.build import build_step

CPU = torch.device("cpu")
PATIENCE = datetime.timedelta(hours=4)
"""How long ranks wait for their next round."""
WARM_UP = 8
"""Steps before the first round: with exact sums, memory is reused only after some steps."""
Step = Callable[[], object]


def train(
    *,
    shape: str,
    dtype: str,
    rows: int,
    processes: int,
    how: Literal["workhorse", "ddp", "fsdp"],
    parallel: Mapping[str, Any] | None = None,
    micro_batch_size: int | None = None,
    threads: int,
) -> Round:
    """Rounds of training steps on several processes.

    Args:
        shape: a name in `TRAINING`.
        dtype: the dtype of the matmuls.
        rows: size of the global batch.
        processes: number of processes.
        how: the trainer; `ddp` on one process is the plain loop.
        parallel: the section `parallel` of a Workhorse recipe.
        micro_batch_size: rows per pass, for Workhorse; None for all rows of a process.
        threads: number of threads of each process.
    """
    place = f"file://{tempfile.mkdtemp()}/meeting"
    job = Job(shape, dtype, rows, processes, how, parallel or {}, micro_batch_size, threads, place)
    for rank in range(1, processes):
        mp.get_context("spawn").Process(target=_help, args=(rank, job), daemon=True).start()
    steps = _steps(rank=0, job=job)
    tokens = rows * TRAINING[shape].context * STEPS[shape]

    def take() -> dict[str, float]:
        _next_round()
        return {"tokens": tokens / seconds_of(steps, "cpu")}

    return take


@dataclass(frozen=True)
class Job:
    """Arguments of `train`, and the address at which the process group is initialised."""

    shape: str
    dtype: str
    rows: int
    processes: int
    how: str
    parallel: Mapping[str, Any]
    micro_batch_size: int | None
    threads: int
    place: str


def _help(rank: int, job: Job) -> None:
    steps = _steps(rank, job)
    while True:
        _next_round()
        steps()


def _next_round() -> None:
    """Wait until rank 0 begins a round."""
    if dist.is_initialized():
        dist.broadcast(torch.zeros(1), src=0)


def _steps(rank: int, job: Job) -> Step:
    """A function that runs the steps of a round; the warm-up steps are done."""
    torch.set_num_threads(job.threads)
    keep_memory(CPU)
    if job.processes > 1:
        size = job.processes
        dist.init_process_group("gloo", job.place, PATIENCE, world_size=size, rank=rank)
    torch.manual_seed(0)
    sizes = TRAINING[job.shape]
    texts = torch.randint(sizes.vocab_size, (job.rows, sizes.context + 1))
    tokens, targets = texts[:, :-1].contiguous(), texts[:, 1:].contiguous()
    step = (_ours if job.how == "workhorse" else _plain)(rank, job, tokens, targets)

    def steps() -> None:
        for _ in range(STEPS[job.shape]):
            step()

    for _ in range(WARM_UP):
        step()
    return steps


def _ours(rank: int, job: Job, tokens: Tensor, targets: Tensor) -> Step:
    sizes = TRAINING[job.shape]
    config = train_config(
        sizes, job.dtype, batch_size=job.rows, micro_batch_size=job.micro_batch_size
    )
    parallel = ParallelismConfig.from_dict(job.parallel)
    world = World(rank, job.processes, parallel)
    whole = gpt(sizes)
    teams = make_teams(world, parallel, whole.vocab_size)
    decoder = teams.build(whole, "auto", CPU)
    training = build_step(
        decoder, config, CPU, parallel=parallel, world=world, teams=teams, whole=whole
    )
    return step_on(training, tokens, targets)


def _plain(rank: int, job: Job, tokens: Tensor, targets: Tensor) -> Step:
    """The same decoder in an ordinary PyTorch training loop."""
    decoder = gpt(TRAINING[job.shape]).build().train()
    model: nn.Module = decoder
    if job.how == "fsdp":
        for layer in decoder.layers:
            fully_shard(layer)
        fully_shard(decoder)
    elif job.processes > 1:
        model = DistributedDataParallel(decoder)
    share = len(tokens) // job.processes
    own = slice(rank * share, (rank + 1) * share)
    read, predicted = tokens[own], targets[own].flatten()

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(read).flatten(0, 1), predicted)

    return plain_step(model, fused_adamw(model), loss, job.dtype, "cpu")
