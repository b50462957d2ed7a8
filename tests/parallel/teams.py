"""Passes of a team of processes that divide sequences, beside those of one process."""

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nn.grid import CAUSAL, make, random_tokens
from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder, DecoderConfig
from workhorse.parallel.sequences import Team, make_team
from workhorse.parallel.world import World
from workhorse.train.objectives.divided import Divided
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.objectives.objective import Objective
from workhorse.transforms.checkpointing import checkpoint_activations

MEMBERS = 3
ROWS, COLUMNS = 2, 12
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 7 + [2] * 2, [4] * 12])
"""One that two processes have, one that all have."""


def batch_of(config: DecoderConfig, documents: Tensor | None) -> Batch:
    rows = random_tokens(config, ROWS, COLUMNS + 1)
    targets = rows[:, 1:].clone()
    targets[0, 4] = targets[1, -1] = IGNORE
    return Batch(rows[:, :-1], targets, documents, torch.zeros(ROWS, dtype=torch.int64))


def pass_over(decoder: Decoder, objective: Objective, batch: Batch) -> list[Tensor]:
    """Loss, count and the gradient of every weight."""
    decoder.zero_grad()
    outcome = objective(batch)
    outcome.loss.backward()
    gradients = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for weight in decoder.parameters()
    ]
    return [outcome.loss.detach(), outcome.count.float(), *gradients]


def worst_difference(team: Team, config: DecoderConfig, documents: Tensor | None) -> float:
    """Of the loss and any gradient, relative to its largest number, or to 1."""
    decoder, batch = make(config), batch_of(config, documents)
    alone = pass_over(decoder, NextToken(decoder), batch)
    if documents is None:
        checkpoint_activations(decoder)
    together = pass_over(decoder, Divided(NextToken(decoder, team=team), team), batch)
    for tensor in together:
        dist.all_reduce(tensor)
    assert torch.equal(together[1], alone[1])
    return max(
        float((ours - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        for ours, expected in zip(together, alone, strict=True)
    )


def compare_all(rank: int, folder: str) -> None:
    """One process of the team; the first leaves the differences in the folder."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=MEMBERS)
    try:
        world, cpu = World(rank, MEMBERS, team=MEMBERS), torch.device("cpu")
        team = make_team(world, make(CAUSAL[0]), cpu)
        found = [
            [worst_difference(team, config, documents) for documents in (None, DOCUMENTS)]
            for config in CAUSAL
        ]
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(found, f"{folder}/differences")
