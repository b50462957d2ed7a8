"""The collectives of a step that `plan` counts are those that a step of several processes calls."""

from collections import Counter
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.forked import start
from workhorse.memory.step_memory import PlannedStep
from workhorse.nn import DecoderConfig
from workhorse.parallel.config import Coordinates, ParallelismConfig
from workhorse.parallel.division.teams import make_teams
from workhorse.parallel.processes import exchange
from workhorse.parallel.processes.world import World
from workhorse.parallel.shards import local
from workhorse.plan.collectives import collectives
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import build_step

CPU = torch.device("cpu")
BUCKET = 2**11
"""Elements of a bucket of gradients, so that the small models have several."""
KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "alltoall_base_": "all_to_all",
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""Operators of `torch.ops.c10d`; the tensors of a rank are the argument before the group."""
Counts = dict[tuple[int, str], tuple[int, int]]
"""Number of calls and bytes, by number of ranks in the group and kind."""


class Counting(TorchDispatchMode):
    """Counts the collectives of a rank, without code of Workhorse."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, str]] = Counter()
        self.n_bytes: Counter[tuple[int, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            kind = KINDS[func._schema.name.partition("::")[2]]
            at = next(n for n, one in enumerate(args) if isinstance(one, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(args[at])
            given = args[at - 1]
            tensors = [given] if isinstance(given, torch.Tensor) else given
            place = group.size(), kind
            self.counts[place] += 1
            self.n_bytes[place] += sum(one.nbytes for one in tensors)
        return func(*args, **(kwargs or {}))


def model(**fields: Any) -> DecoderConfig:
    block = {
        "kind": "pre_norm",
        "norm": "rms_norm",
        "attention": {"n_heads": 4, "n_kv_heads": 2, "position": "rope", "qkv_bias": True},
        "feed_forward": {"kind": "gated_mlp", "d_ff": 48, "activation": "silu"},
    }
    shape = {"vocab_size": 51, "d_model": 24, "n_layers": 3, "max_seq_len": 16}
    return DecoderConfig.from_dict(
        {**shape, "blocks": {"main": {**block, **fields}}, "final_norm": "rms_norm"}
    )


def mixture(**fields: Any) -> DecoderConfig:
    experts = {"kind": "moe", "n_experts": 4, "top_k": 2, "d_ff": 16, "activation": "silu"}
    return model(feed_forward={**experts, **fields})


def planned(config: DecoderConfig, ways: dict[str, Any], **fields: Any) -> PlannedStep:
    adamw = {"kind": "adamw", "learning_rate": 1e-3}
    given = {"steps": 1, "batch_size": 12, "seq_len": 16, "dtype": "bfloat16", "optimizer": adamw}
    train = TrainConfig(**{**given, **fields})
    return PlannedStep(config, train, CPU, ParallelismConfig.from_dict(ways))


def measure(rank: int, folder: str, steps: list[PlannedStep]) -> None:
    """Run one rank; it writes its calls in each of the steps to the folder."""
    torch.set_num_threads(1)
    exchange.BUCKET = BUCKET
    size, meeting = steps[0].parallel.processes, f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    found: list[Counts] = []
    try:
        for step in steps:
            world, config = World(rank, size, step.parallel), step.config
            teams = make_teams(world, step.parallel, config.vocab_size)
            decoder = teams.build(config, "auto", "meta" if world.lockstep else CPU)
            made = build_step(
                *(decoder, step.train, CPU),
                parallel=step.parallel,
                world=world,
                teams=teams,
                whole=config,
            )
            for weight in made.objective.parameters():
                nn.init.normal_(local(weight.data), std=0.1)
            batch = step.synthetic(step.train.batch_size, CPU)
            batch.tokens.random_(config.vocab_size)
            made.backward(batch)  # FSDP sets itself up
            made.forget()
            with Counting() as counting:
                made.backward(batch)
            found.append({at: (n, counting.n_bytes[at]) for at, n in counting.counts.items()})
    finally:
        dist.destroy_process_group()
    torch.save(found, f"{folder}/{rank}")


def check(folder: Path, steps: list[PlannedStep]) -> None:
    """Assert that `plan` counts the calls of a rank of each stage.

    The ranks of divided experts get different numbers of tokens, so their sum is compared.
    """
    apart = mkdtemp(dir=folder)
    size = steps[0].parallel.processes
    start(measure, (apart, steps), size)
    of_ranks = [torch.load(f"{apart}/{rank}") for rank in range(size)]
    for number, step in enumerate(steps):
        mesh = step.parallel
        for stage in range(mesh.pipeline):
            planned = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
            for _, ranks, kind, count, n_bytes in collectives(step, stage):
                planned[0][ranks, kind] += count
                planned[1][ranks, kind] += n_bytes
            at = Coordinates(stage, mesh.data - 1, 0, mesh.context - 1, mesh.tensor - 1)
            called: Counts = of_ranks[mesh.rank(at)][number]
            if mesh.expert > 1:
                sums = Counter[tuple[int, str]]()
                for counts in of_ranks:
                    sums.update({at: n_bytes for at, (_, n_bytes) in counts[number].items()})
                called = {at: (count, sums[at] / size) for at, (count, _) in called.items()}
            assert {at: (n, planned[1][at]) for at, n in planned[0].items()} == called, mesh


def exact(shards: int) -> dict[str, Any]:
    return {"reduction": {"kind": "exact", "logical_shards": shards}}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BUCKET", BUCKET)


def test_each_division_in_two(tmp_path: Path) -> None:
    check(
        tmp_path,
        [
            planned(model(), {"data": 2}, batch_size=11),
            planned(model(), {"shard": 2}, micro_batch_size=4),
            planned(model(), {"tensor": 2}, micro_batch_size=5),
            planned(model(), {"pipeline": 2}, micro_batch_size=5),
            planned(model(), {"context": 2}, micro_batch_size=5),
            planned(mixture(), {"data": 2, "expert": 2}),
        ],
    )


@pytest.mark.slow
def test_settings_of_two_processes(tmp_path: Path) -> None:
    tied = model().replace(head={"tied": True})
    again = {"activation_checkpointing": True}
    check(
        tmp_path,
        [
            planned(model(), {"data": 2, **exact(6)}),
            planned(model(), {"shard": 2}, dtype="float32", **again),
            planned(model(), {"shard": 2, "reshard": "step"}, micro_batch_size=2),
            planned(model(), {"shard": 2, **exact(6)}),
            planned(model(), {"shard": 2, "reshard": "step", **exact(6)}, micro_batch_size=1),
            planned(tied, {"shard": 2}),
            planned(model(), {"tensor": 2}, **again),
            planned(tied, {"pipeline": 2}, dtype="float32"),
            planned(mixture(), {"data": 2, "expert": 2}, **again),
            planned(mixture(weigh="input", bias=True), {"data": 2, "expert": 2}),
            planned(mixture(), {"shard": 2, "expert": 2}, micro_batch_size=4),
        ],
    )


@pytest.mark.slow
def test_two_divisions_at_once(tmp_path: Path) -> None:
    one = {"micro_batch_size": 1}
    learned = model().replace(embedding={"position": {"kind": "learned"}, "norm": "rms_norm"})
    check(
        tmp_path,
        [
            planned(model(), {"data": 2, "shard": 2}),
            planned(model(), {"data": 2, "shard": 2, **exact(4)}),
            planned(model(), {"shard": 2, "pipeline": 2}, **one),
            planned(model().replace(n_layers=4), {"shard": 2, "pipeline": 2}, **one),
            planned(model(), {"shard": 2, "pipeline": 2, "reshard": "step"}, **one),
            planned(learned, {"shard": 2, "pipeline": 2}, **one),
            planned(learned.replace(head={"tied": True}), {"shard": 2, "pipeline": 2}, **one),
            planned(model(), {"shard": 2, "tensor": 2}),
            planned(model(), {"shard": 2, "context": 2}),
            planned(model(), {"tensor": 4}),
            planned(model(), {"data": 2, "tensor": 2}),
            planned(model(), {"data": 2, "context": 2}, batch_size=11, micro_batch_size=2),
            planned(model().replace(n_layers=4), {"pipeline": 4}, micro_batch_size=2),
            planned(mixture().replace(vocab_size=52), {"data": 2, "tensor": 2, "expert": 2}),
        ],
    )


def test_one_process_calls_none() -> None:
    assert collectives(planned(model(), {}), 0) == []
